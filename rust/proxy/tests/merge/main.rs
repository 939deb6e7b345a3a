//! Merging of replies, byte by byte: prefill's rows then decode's, and nothing of decode's junk, in every place and at any chunking.
#![allow(clippy::unwrap_used, clippy::format_collect)]
mod join;
mod json;
mod kit;
mod random;
mod sse;
