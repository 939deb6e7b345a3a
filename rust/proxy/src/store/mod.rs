//! The arena: narrow rows in anonymous memory under one hard byte cap, accounted to the byte, given back on drop.
mod arena;
mod rows;

pub use arena::{Arena, Charge};
pub use rows::{Reader, Rows};
