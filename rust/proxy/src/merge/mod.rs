//! Replies on the way out: what prefill alone knows is merged into what decode sends, and replies of split requests are joined.
//! Nothing is parsed into a tree and nothing is held but the rows, narrow, in the arena.
mod intake;
mod join;
mod join_stream;
mod json;
mod place;
mod prefill;
mod read;
mod reference;
mod resolve;
mod rope;
mod stream;
mod text;
mod unsplit;
mod weave;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use r3router_core::error::Error;
use r3router_core::wire::{Facts, Route};
use tokio::sync::Notify;

use crate::agents::Agents;
use crate::store::Arena;

pub use join_stream::JoinedStream;
pub use json::Merged;
pub use prefill::PrefillPart;
pub use reference::{Refs, Shape};
pub use stream::{MergedStream, error_event};

/// What of an attempt's replies has to be merged, and how the legs were asked.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The route.
    pub route: Route,
    /// R3 was asked for.
    pub routed_experts: bool,
    /// Indexer rows were asked for.
    pub indexer_topk: bool,
    /// Log-probabilities were asked for.
    pub logprobs: bool,
    /// `routed_experts_start_len` as the client sent it (0 when absent); prefill got the same.
    pub start: u32,
    /// `routed_experts_start_len` as decode got it.
    pub decode_start: u32,
    /// One engine ran the whole request: its rows are all there are, and prefill's part is empty.
    pub unsplit: bool,
    /// The client takes references (`return_outputs_via_store`, `x-r3-transport: ref`).
    pub by_ref: bool,
    /// How rows that engines sent become objects. Without it only engines' own objects can be named.
    pub refs: Option<Arc<Refs>>,
    /// Where rows that engines keep on their hosts are pulled from, for clients that want them in the reply.
    pub agents: Option<Arc<Agents>>,
    /// Most tokens that decode may generate, when known; bounds row counts where the reply does not say them.
    pub max_new_tokens: Option<u32>,
    /// Layers x experts of a row, when an earlier reply of the model has shown it.
    pub row_items: Option<u32>,
    /// The router asked decode for usage on its own (`Owned::include_usage`): the usage event is read and not passed on.
    pub hide_usage: bool,
    /// How prefill's rows wait for decode's reply.
    pub hold: Hold,
    /// Told once decode's whole reply has begun to come: rows that have not begun to come by then are held as [`Hold::Text`].
    pub due: Option<Arc<Due>>,
    /// URL of the prefill worker with its rank, for errors.
    pub prefill: Arc<str>,
    /// URL of the decode worker with its rank, for errors.
    pub decode: Arc<str>,
}

/// How prefill's rows wait for decode's reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hold {
    /// Decoded and narrow: up to 5.3 times smaller, for as long as it takes.
    #[default]
    Narrow,
    /// As the text that came, no decoding: for a decode reply that is due within a moment. The text counts against the arena;
    /// when it does not fit, the rows are held narrow after all.
    Text,
}

/// Whether decode's whole reply has begun to come.
#[derive(Debug, Default)]
pub struct Due {
    begun: AtomicBool,
    told: Notify,
}

impl Due {
    /// Decode's reply has begun.
    pub fn tell(&self) {
        self.begun.store(true, Ordering::Release);
        self.told.notify_one();
    }

    /// Waits up to `limit`; says whether decode's reply has begun.
    async fn within(&self, limit: Duration) -> bool {
        let _late = tokio::time::timeout(limit, self.told.notified()).await;
        self.begun.load(Ordering::Acquire)
    }
}

impl Plan {
    /// The plan for one sub-request of a scanned request; worker names empty, nothing hidden, rows held narrow.
    pub fn of(facts: &Facts, sub: usize, decode_start: Option<u32>) -> Self {
        Self {
            route: facts.route,
            routed_experts: facts.routed_experts,
            indexer_topk: facts.indexer_topk,
            logprobs: facts.logprobs,
            start: facts.routed_experts_start,
            decode_start: decode_start.unwrap_or(facts.routed_experts_start),
            unsplit: false,
            by_ref: facts.via_store,
            refs: None,
            agents: None,
            max_new_tokens: facts.prompt(sub).max_new_tokens,
            row_items: None,
            hide_usage: false,
            hold: Hold::Narrow,
            due: None,
            prefill: Arc::from(""),
            decode: Arc::from(""),
        }
    }

    /// A plan under which a reply passes as it is: for engines that are not split.
    pub fn relay(route: Route) -> Self {
        Self {
            route,
            routed_experts: false,
            indexer_topk: false,
            logprobs: false,
            start: 0,
            decode_start: 0,
            unsplit: false,
            by_ref: false,
            refs: None,
            agents: None,
            max_new_tokens: None,
            row_items: None,
            hide_usage: false,
            hold: Hold::Narrow,
            due: None,
            prefill: Arc::from(""),
            decode: Arc::from(""),
        }
    }

    /// Whether replies have to be merged at all; `false`: relay decode's body as it is, and only read prefill's to its end.
    pub fn merges(&self) -> bool {
        self.routed_experts || self.indexer_topk || self.logprobs
    }
}

/// Figures of a merge, for the log line and the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// `prompt_tokens`, when the reply says it.
    pub prompt_tokens: Option<u32>,
    /// `completion_tokens`, when the reply says it.
    pub completion_tokens: Option<u32>,
    /// R3 text bytes that prefill sent.
    pub r3_prefill: u64,
    /// R3 text bytes that decode sent.
    pub r3_decode: u64,
    /// Layers x experts of a row, when R3 was merged; good for the next plan's `row_items`.
    pub row_items: Option<u32>,
    /// The engine ended the request as an abort.
    pub aborted: bool,
    /// Events with output that decode has sent (streams): more than 0 means that the KV was delivered.
    pub events: u64,
    /// Decode sent an error event (streams).
    pub engine_error: bool,
}

/// Reads prefill's reply (a 2xx; non-streaming JSON) to its end. Rows go to the arena as they come.
///
/// # Errors
/// `Reset` when the body breaks, `EngineProtocol` when it is not the protocol, `R3Mismatch`, `R3ArenaTooSmall`.
pub async fn read_prefill<B>(
    body: B,
    content_length: Option<u64>,
    plan: &Plan,
    arena: &Arena,
) -> Result<PrefillPart, Error>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    prefill::read(body, content_length, plan, arena).await
}

/// Reads decode's reply (a 2xx; non-streaming JSON) and merges prefill's part into it. Nothing is handed out before all is checked.
/// `prefill` is polled from the start, so it may be what drives the other leg.
///
/// # Errors
/// As [`read_prefill`], and what `prefill` fails with.
pub async fn merge_json<B, F>(
    body: B,
    content_length: Option<u64>,
    prefill: F,
    plan: &Plan,
    arena: &Arena,
) -> Result<Merged, Error>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    F: Future<Output = Result<PrefillPart, Error>>,
{
    json::merge(body, content_length, prefill, plan, arena).await
}

/// Joins the merged replies of a split request, in the order of its sub-requests, to the one reply that an engine would give:
/// `/generate` a list, chat and completions one object with all choices and the usage in sum (the prompt counted once for all of
/// its samples). An engine gives the `sglext` of the first choice only; here the other choices carry theirs in `choices[i].sglext`.
///
/// # Errors
/// `EngineProtocol` when a reply has no choice or no usage to join.
pub fn join_json(replies: Vec<Merged>, facts: &Facts) -> Result<Merged, Error> {
    join::join(replies, facts)
}

/// Relays decode's event stream byte for byte, except for events that carry a field which prefill alone knows: those wait for it.
pub fn merge_sse<B, F>(body: B, prefill: F, plan: Plan, arena: Arena) -> MergedStream<B, F>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    F: Future<Output = Result<PrefillPart, Error>>,
{
    stream::merge(body, prefill, plan, arena)
}

/// See [`JoinedStream`]. `streams` are in the order of the sub-requests.
pub fn join_sse<S>(streams: Vec<S>, facts: &Facts) -> JoinedStream<S>
where
    S: Body<Data = Bytes> + Unpin,
    S::Error: std::fmt::Display,
{
    join_stream::join(streams, facts)
}
