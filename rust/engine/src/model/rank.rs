//! One DP rank: its pools, its queues and its counters.
use std::collections::{HashMap, VecDeque};

use r3router_core::time::Moment;

use super::config::EngineConfig;
use super::prefix::PrefixCache;
use super::request::ReqId;
use super::timers::Room;

/// A sequence in the running batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) id: ReqId,
    /// Output tokens to come.
    pub(super) left: u32,
    /// `left` when it joined.
    pub(super) joined_with: u32,
}

/// A sequence in the prefill batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub(super) id: ReqId,
    /// Uncached tokens of it in this batch.
    pub(super) tokens: u32,
    /// Its first chunk: the cached prefix is read, and can be sent.
    pub(super) first: bool,
}

/// What a rank does in the present step.
#[derive(Debug, Default)]
pub(super) enum Work {
    #[default]
    Idle,
    Prefill(Vec<Chunk>),
    Decode,
}

/// What a test or a report wants to know of a rank over its whole life.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStats {
    /// Most requests in transfer at once (reserved, KV not here).
    pub peak_transfer: u32,
    /// Most requests that waited for memory after an admission pass.
    pub peak_prealloc: u32,
    /// Requests that met a closed gate: they were sent here although they did not fit.
    pub blocked: u64,
    /// Requests that clock W ended.
    pub waiting_timeouts: u64,
    /// Requests that clock B ended.
    pub bootstrap_timeouts: u64,
    /// Integral of running requests over time, request-seconds.
    pub running_seconds: f64,
    /// Highest KV use, tokens.
    pub peak_used: u64,
}

/// Counters that `/metrics` show.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    pub(super) bootstrap_failed: u64,
    pub(super) transfer_failed: u64,
    pub(super) aborted: u64,
    pub(super) retracted: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) uncached_done: u64,
    pub(super) busy_us: u64,
    pub(super) output_tokens: u64,
    pub(super) transfer_ms: f64,
    pub(super) transfer_gb_s: f64,
}

/// One rank.
#[derive(Debug, Default)]
pub(super) struct Rank {
    /// KV pool, tokens.
    pub(super) pool: u64,
    /// KV tokens that requests hold (a prefix cache's are not in it).
    pub(super) used: u64,
    pub(super) rows: u32,
    pub(super) metadata: u32,
    pub(super) mamba: u32,
    pub(super) cache: PrefixCache,

    pub(super) prealloc: VecDeque<ReqId>,
    /// In order of reservation.
    pub(super) transfer: Vec<ReqId>,
    /// Prompt tokens of `transfer`.
    pub(super) transfer_tokens: u64,
    /// Entries of `transfer` whose KV is here.
    pub(super) arrivals: u32,
    pub(super) ready: VecDeque<ReqId>,
    pub(super) running: Vec<Run>,
    /// Prompt and output tokens of `running`.
    pub(super) run_tokens: u64,
    /// Streams in `running`.
    pub(super) streams: u32,
    /// Some of `running` is to be stopped.
    pub(super) stops: bool,
    pub(super) retracted: VecDeque<ReqId>,
    /// Dropped by a pause, to be computed again.
    pub(super) dropped: Vec<ReqId>,

    pub(super) bootstrap: VecDeque<ReqId>,
    pub(super) waiting: VecDeque<ReqId>,
    /// Uncached tokens of `waiting`, by what the cache held when they were queued.
    pub(super) waiting_uncached: u64,
    /// The request between two chunks.
    pub(super) chunked: Option<ReqId>,
    pub(super) inflight: Vec<ReqId>,
    /// `inflight` has entries whose transfer is done.
    pub(super) sent: u32,
    /// Entries of `inflight` that wait for decode's reservation (`prefill_complete`).
    pub(super) unmet: u32,
    /// What decode said of rooms, until the room's request is gone.
    pub(super) rooms: HashMap<u64, Room>,
    /// When each transfer worker is through.
    pub(super) workers: Vec<Moment>,

    pub(super) work: Work,
    pub(super) stats: RankStats,
    pub(super) counters: Counters,
}

impl Rank {
    pub(super) fn new(config: &EngineConfig) -> Self {
        Self {
            pool: config.max_total_tokens,
            workers: vec![Moment::ZERO; usize::from(config.transfer.workers.max(1))],
            ..Self::default()
        }
    }

    pub(super) fn free(&self) -> u64 {
        self.pool.saturating_sub(self.used)
    }

    /// Takes KV; what a prefix cache holds beyond the rest is evicted.
    pub(super) fn take(&mut self, tokens: u64, block: u32) {
        self.used += tokens;
        self.stats.peak_used = self.stats.peak_used.max(self.used);
        if self.cache.len() > 0 {
            self.cache.shrink((self.free() / u64::from(block.max(1))) as usize);
        }
    }

    /// Everything that the scheduler knows of and that has not ended.
    pub(super) fn is_quiet(&self) -> bool {
        self.prealloc.is_empty()
            && self.transfer.is_empty()
            && self.ready.is_empty()
            && self.running.is_empty()
            && self.retracted.is_empty()
            && self.dropped.is_empty()
            && self.bootstrap.is_empty()
            && self.waiting.is_empty()
            && self.chunked.is_none()
            && self.inflight.is_empty()
            && !matches!(self.work, Work::Prefill(_))
    }

    pub(super) fn remove_run(&mut self, id: ReqId) -> Option<Run> {
        let at = self.running.iter().position(|run| run.id == id)?;
        Some(self.running.remove(at))
    }
}
