//! Request bodies as bytes: what the router must know is found in one pass, and only the fields that it owns are changed.
//! Everything else reaches the engine byte for byte: unknown fields, number spellings, escapes, white space.
pub(crate) mod cursor;
mod layout;
mod prefix;
mod read;
mod scan;
mod splice;
pub(crate) mod text;

use std::sync::Arc;

use bytes::Bytes;

use crate::error::Error;

use layout::Layout;

/// Which engine route a body is for; decides what its fields mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// `/generate`.
    Generate,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// A half-open range of byte offsets into the body that was scanned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

/// How a prompt is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    /// Token ids.
    Ids,
    /// Text.
    Text,
    /// Chat messages.
    Messages,
    /// Embeddings.
    Embeds,
    /// None that the router knows; the engine decides.
    Absent,
}

/// One prompt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// How it is written.
    pub kind: PromptKind,
    /// Its JSON value.
    pub span: Span,
    /// Number of token ids sent. With `exact` it is the engine's prompt length; without (session history, images) a
    /// bound from below, which is still a legal `routed_experts_start_len`.
    pub ids: Option<u32>,
    /// Whether `ids` is the engine's own prompt length.
    pub exact: bool,
    /// Most tokens to generate: what the client named, or the route's default when it named none (`/generate` 128,
    /// completions 16); `None` when the engine fills the context (chat).
    pub max_new_tokens: Option<u32>,
}

/// What the router reads of a request, with the places that [`splice()`] needs.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The route that it was scanned for.
    pub route: Route,
    /// `stream`.
    pub stream: bool,
    /// The prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// Samples of each prompt (`sampling_params.n` or `n`), at least 1.
    pub samples: u32,
    /// The reply is a list (`/generate` with a batch, even of one, or with n > 1), or carries `index` when streamed.
    pub listed: bool,
    /// The client's `rid`s as JSON text decoded: none, one, or one a prompt.
    pub rids: Vec<String>,
    /// Log-probabilities of the prompt can be in the reply: `return_logprob` (any element); chat with `return_meta_info`;
    /// completions with `echo` and `logprobs`.
    pub logprobs: bool,
    /// `return_routed_experts`.
    pub routed_experts: bool,
    /// `routed_experts_start_len`, 0 when absent.
    pub routed_experts_start: u32,
    /// `return_indexer_topk`.
    pub indexer_topk: bool,
    /// `return_meta_info` (chat): payloads are in `choices[i].meta_info`.
    pub meta_info: bool,
    /// `return_outputs_via_store`: the client takes references. Never forwarded.
    pub via_store: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// `model`, when it is a string.
    pub model: Option<Span>,
    pub(crate) rid_list: bool,
    pub(crate) layout: Arc<Layout>,
}

impl Facts {
    /// Number of single requests that the engines get: prompts x samples, prompt-major.
    pub fn subs(&self) -> usize {
        self.prompts.len() * self.samples as usize
    }

    /// The prompt of sub-request `sub`.
    pub fn prompt(&self, sub: usize) -> &Prompt {
        &self.prompts[sub / self.samples as usize]
    }

    /// The `rid` that the client gave sub-request `sub`: its own string, the list's element, or `rid_i` as the engine
    /// derives it for a batch with one string.
    pub fn rid(&self, sub: usize) -> Option<String> {
        let samples = self.samples as usize;
        let (prompt, sample) = (sub / samples, sub % samples);
        if self.rid_list {
            let rid = self.rids.get(prompt)?;
            return Some(if samples > 1 { format!("{rid}_{sample}") } else { rid.clone() });
        }
        let rid = self.rids.first()?;
        Some(if self.subs() > 1 || self.listed { format!("{rid}_{sub}") } else { rid.clone() })
    }
}

/// Where decode finds prefill. Both legs of an attempt carry the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bootstrap<'a> {
    /// Prefill's host, a bare IPv6 literal or name.
    pub host: &'a str,
    /// Prefill's bootstrap port; `None` is sent as null.
    pub port: Option<u16>,
    /// The room, `1 <= room < 2^63`.
    pub room: u64,
}

/// The fields that the router owns, for one leg of one attempt of one sub-request. The client's own spellings of
/// these (and `bootstrap_pair_key`, `data_parallel_rank`, `return_outputs_via_store`) are removed in any case; a `None`
/// here sends none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Owned<'a> {
    /// Which sub-request, `0..facts.subs()`.
    pub sub: usize,
    /// `rid`.
    pub rid: Option<&'a str>,
    /// `bootstrap_host`, `bootstrap_port`, `bootstrap_room`.
    pub bootstrap: Option<Bootstrap<'a>>,
    /// `routed_dp_rank`: the rank of the engine that gets this body.
    pub routed_dp_rank: Option<u16>,
    /// `disagg_prefill_dp_rank`: the prefill rank that holds the KV.
    pub disagg_prefill_dp_rank: Option<u16>,
    /// Replaces `stream`. `Some(false)` also removes `stream_options`.
    pub stream: Option<bool>,
    /// Replaces `routed_experts_start_len`.
    pub routed_experts_start_len: Option<u32>,
    /// Sets `stream_options.include_usage`, so that row counts of a streamed chat can be checked; see
    /// `proxy::merge::Plan::hide_usage`.
    pub include_usage: bool,
}

/// A body in pieces: slices of the client's bytes with small inserts between.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    /// The pieces, in order, none empty.
    pub pieces: Vec<Bytes>,
    /// Their exact length in sum.
    pub len: usize,
}

/// Reads `body`.
///
/// # Errors
/// `InvalidJson` (`measured` is the byte position) when it is not JSON; `InvalidField` when a field that the router
/// reads has a type or value that no engine takes, or the batch is empty.
pub fn scan(body: &[u8], route: Route) -> Result<Facts, Error> {
    scan::scan(body, route)
}

/// The body of one leg of sub-request `owned.sub`. `facts` must come from [`scan()`] of the same bytes.
pub fn splice(body: &Bytes, facts: &Facts, owned: &Owned<'_>) -> Parts {
    splice::splice(body, facts, owned)
}

/// Token ids of one block of [`prefix_hashes`].
pub const BLOCK_TOKENS: usize = 256;
/// Text bytes of one block of [`prefix_hashes`].
pub const BLOCK_TEXT: usize = 1024;

/// One chained hash for each whole block of the prompt of `sub`, longest prefix last. Equal prefixes have equal hashes,
/// however the ids are spaced.
pub fn prefix_hashes(body: &[u8], facts: &Facts, sub: usize) -> Vec<u64> {
    prefix::hashes(body, facts, sub)
}
