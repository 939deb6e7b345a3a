//! A request inside an engine: where it stands and what it holds.
use r3router_core::time::Moment;

use super::config::R3Cost;
use super::event::{Ask, EngineId, Finish, Key, R3Rows, Reply, Times};

/// Names a request inside one fleet; never reused, so that a late timer finds nothing rather than another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ReqId(pub(super) u64);

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// In the HTTP loop, body not parsed: its rid is not known yet.
    Ingress,
    /// Parsed, held because the front end is paused (5.3).
    Held,
    /// On its way to the scheduler.
    Inbox,
    /// Prefill: waits for decode's reservation or a metadata slot.
    Bootstrap,
    /// Prefill and regular: queued for a batch.
    Waiting,
    /// Prefill and regular: in a batch, or between two chunks.
    Batch,
    /// Prefill: computed, transfer not confirmed.
    Inflight,
    /// Decode: waits for memory.
    Prealloc,
    /// Decode: memory reserved, KV not here.
    Transfer,
    /// Decode: KV here, waits for a slot.
    Ready,
    /// Generates.
    Running,
    /// Decode: pushed out.
    Retracted,
    /// Decode: pushed out by a pause with its KV dropped; prefill computes it again after (5.4).
    Rebootstrap,
    /// Finished; the reply is on its way through the Python processes.
    Leaving,
}

/// A request.
#[derive(Debug)]
pub(super) struct Req {
    /// The exchange; `None` once its client is gone, or for work without a client.
    pub(super) key: Option<Key>,
    pub(super) ask: Ask,
    pub(super) rank: usize,
    pub(super) stage: Stage,
    pub(super) times: Times,
    /// Tokens found in the prefix cache.
    pub(super) cached: u32,
    /// Uncached tokens left to compute.
    pub(super) left: u32,
    /// Output tokens so far.
    pub(super) generated: u32,
    /// KV tokens held on the rank.
    pub(super) held: u64,
    /// Holds a row, a metadata slot, state slots.
    pub(super) row: bool,
    pub(super) metadata: bool,
    pub(super) mamba: bool,
    /// Decode: the prefill engine and rank that were asked; prefill: unused.
    pub(super) prefill: Option<(EngineId, usize)>,
    /// Prefill: where the KV goes.
    pub(super) decode: Option<(EngineId, u16, ReqId)>,
    /// Decode: KV is in memory but not polled; prefill: transfer done but not polled.
    pub(super) arrived: bool,
    /// Decode: the transfer began and never ends; no clock covers it.
    pub(super) stuck: bool,
    /// Decode, `prefill_complete`: prefill is done. Prefill: computed, waits for metadata.
    pub(super) computed: bool,
    /// Has met a closed gate once.
    pub(super) blocked: bool,
    /// Ends at the next chance with this (an abort of a running request takes effect one step later, 5.1).
    pub(super) stop: Option<Finish>,
}

impl Req {
    pub(super) fn new(key: Option<Key>, ask: Ask, now: Moment) -> Self {
        Self {
            key,
            ask,
            rank: 0,
            stage: Stage::Ingress,
            times: Times { arrived: now, ..Times::default() },
            cached: 0,
            left: 0,
            generated: 0,
            held: 0,
            row: false,
            metadata: false,
            mamba: false,
            prefill: None,
            decode: None,
            arrived: false,
            stuck: false,
            computed: false,
            blocked: false,
            stop: None,
        }
    }

    /// Tokens whose KV decode needs before it can go on: the prompt, or all but the last token so far.
    pub(super) fn context(&self) -> u32 {
        self.ask.prompt_tokens + self.generated.saturating_sub(1)
    }

    /// Prefill, `prefill_complete`: computed, and decode has not reserved.
    pub(super) fn waits_for_decode(&self) -> bool {
        self.stage == Stage::Inflight && self.computed && self.decode.is_none()
    }

    pub(super) fn room(&self) -> u64 {
        self.ask.bootstrap.map_or(0, |b| b.room)
    }

    /// The bound that decode's memory estimate uses for the output (3.1).
    pub(super) fn output_bound(&self, clip: u32) -> u32 {
        self.ask.max_new_tokens.unwrap_or(clip).min(clip)
    }

    /// R3 rows of the reply: prefill covers `[start, prompt)`, the others `[start, prompt + out - 1)` (1.3).
    pub(super) fn r3(&self, prefill: bool, decode: bool, cost: &R3Cost) -> Option<R3Rows> {
        let start = self.ask.r3_start?;
        if decode && self.generated <= 1 {
            // A real decode engine leaves the field out when its only token came from prefill.
            return None;
        }
        let end =
            if prefill { self.ask.prompt_tokens } else { (self.ask.prompt_tokens + self.generated).saturating_sub(1) };
        let rows = end.saturating_sub(start);
        let raw = u64::from(rows) * u64::from(cost.row_bytes);
        Some(R3Rows {
            start,
            rows,
            junk_below: if decode { self.ask.prompt_tokens } else { 0 },
            text_bytes: raw.div_ceil(3) * 4,
            by_reference: cost.by_reference,
        })
    }

    pub(super) fn reply(&self, finish: Finish, r3: Option<R3Rows>) -> Reply {
        Reply {
            finish,
            rank: u16::try_from(self.rank).unwrap_or(u16::MAX),
            prompt_tokens: self.ask.prompt_tokens,
            cached_tokens: self.cached,
            output_tokens: self.generated,
            r3,
            times: self.times,
        }
    }
}
