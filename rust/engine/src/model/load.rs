//! What an engine says about its ranks: the figures behind `/v1/loads`, `/server_info` and `/metrics`.
use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use r3router_core::topology::{Allocation, Role};

use super::engine::Engine;
use super::rank::{Rank, Work};
use super::request::ReqId;

/// One rank as it was at `measured_at`. Counts are requests, pools are tokens, section 4.1 to 4.3.
#[derive(Clone, Debug, PartialEq)]
pub struct RankLoad {
    /// The rank.
    pub rank: u16,
    /// When it was measured.
    pub measured_at: Moment,
    /// The engine's role.
    pub role: Role,
    /// In the running batch.
    pub running: u32,
    /// `queues.waiting`: decode, KV here and no slot yet; prefill and regular, queued for a batch.
    pub waiting: u32,
    /// Decode: waits for memory.
    pub prealloc: u32,
    /// Decode: memory reserved, KV not here.
    pub transfer: u32,
    /// Decode: pushed out.
    pub retracted: u32,
    /// Prefill: waits for decode's reservation or a metadata slot.
    pub bootstrap: u32,
    /// Prefill: computed, transfer not confirmed.
    pub inflight: u32,
    /// KV tokens in use.
    pub used_tokens: u64,
    /// KV tokens that a prefix cache holds and would give up.
    pub evictable_tokens: u64,
    /// KV pool.
    pub max_total_tokens: u64,
    /// Tokens of requests in transfer (`pre-allocated usage` x pool).
    pub transfer_tokens: u64,
    /// Decode, `prefill_complete`: tokens of requests whose prefill is done and that wait for memory.
    pub prealloc_ready_tokens: u64,
    /// Prefill: tokens queued and not cached.
    pub waiting_uncached_tokens: u64,
    /// Running limit.
    pub max_running: u32,
    /// State slots free; `None` for models without state.
    pub mamba_available: Option<u32>,
    /// State slots in use.
    pub mamba_used: u32,
    /// Output tokens per second, over the last publish interval.
    pub gen_throughput: f64,
    /// Part of prompt tokens found in the cache since start.
    pub cache_hit_rate: f64,
    /// Uncached tokens prefilled since start.
    pub total_prefill_uncached_tokens: u64,
    /// Time spent on prefill batches since start, microseconds.
    pub total_prefill_busy_us: u64,
    /// Latency of the last KV transfer, milliseconds.
    pub kv_transfer_latency_ms: f64,
    /// Speed of the last KV transfer, GB/s.
    pub kv_transfer_speed_gb_s: f64,
    /// `num_bootstrap_failed_reqs_total`.
    pub bootstrap_failed: u64,
    /// `num_transfer_failed_reqs_total`.
    pub transfer_failed: u64,
    /// `num_aborted_requests_total`.
    pub aborted: u64,
    /// `num_retracted_requests_total`.
    pub retracted_total: u64,
}

impl RankLoad {
    /// `num_waiting_reqs`: decode, waiting + prealloc + transfer + retracted; prefill, waiting + bootstrap (4.1).
    pub fn waiting_total(&self) -> u32 {
        self.waiting + self.prealloc + self.transfer + self.retracted + self.bootstrap
    }

    /// `token_usage`.
    pub fn token_usage(&self) -> f64 {
        self.used_tokens as f64 / self.max_total_tokens.max(1) as f64
    }

    /// What the router's core makes of it.
    pub fn report(&self) -> RankReport {
        let decode = (self.role == Role::Decode).then_some(());
        let prefill = (self.role == Role::Prefill).then_some(());
        RankReport {
            rank: self.rank,
            measured_at: self.measured_at,
            running: Some(self.running),
            waiting_total: Some(self.waiting_total()),
            prealloc: decode.map(|()| self.prealloc),
            transfer: decode.map(|()| self.transfer),
            retracted: decode.map(|()| self.retracted),
            bootstrap: prefill.map(|()| self.bootstrap),
            inflight: prefill.map(|()| self.inflight),
            used_tokens: Some(self.used_tokens),
            max_total_tokens: Some(self.max_total_tokens),
            max_running: Some(self.max_running),
            waiting_uncached_tokens: prefill.map(|()| self.waiting_uncached_tokens),
            mamba_free: self.mamba_available,
        }
    }
}

impl Engine {
    /// Every rank as it is, stamped `now`.
    pub(super) fn live(&self, now: Moment) -> Vec<RankLoad> {
        (0..self.ranks.len()).map(|rank| self.live_rank(rank, now)).collect()
    }

    fn live_rank(&self, rank: usize, now: Moment) -> RankLoad {
        let (r, c) = (&self.ranks[rank], &self.config);
        let prefill_complete = c.allocation == Allocation::PrefillComplete;
        let ready_tokens =
            |id: &ReqId| self.reqs.get(id).filter(|q| q.computed).map_or(0, |q| u64::from(q.ask.prompt_tokens));
        let in_batch = match &r.work {
            Work::Prefill(chunks) => chunks.len() as u32,
            Work::Idle | Work::Decode => 0,
        };
        let chunked = r.chunked.and_then(|id| self.reqs.get(&id)).map_or(0, |q| u64::from(q.left));
        RankLoad {
            rank: rank as u16,
            measured_at: now,
            role: c.role,
            running: r.running.len() as u32 + if c.role == Role::Prefill { 0 } else { in_batch },
            waiting: (r.waiting.len() + r.ready.len()) as u32,
            prealloc: r.prealloc.len() as u32,
            transfer: r.transfer.len() as u32,
            retracted: (r.retracted.len() + r.dropped.len()) as u32,
            bootstrap: r.bootstrap.len() as u32,
            inflight: r.inflight.len() as u32,
            used_tokens: r.used,
            evictable_tokens: (r.cache.len() as u64 * u64::from(c.prefix_block)).min(r.free()),
            max_total_tokens: r.pool,
            transfer_tokens: r.transfer_tokens,
            prealloc_ready_tokens: if prefill_complete { r.prealloc.iter().map(ready_tokens).sum() } else { 0 },
            waiting_uncached_tokens: r.waiting_uncached + chunked,
            max_running: c.max_running,
            mamba_available: c.mamba.map(|m| m.slots.saturating_sub(r.mamba)),
            mamba_used: r.mamba,
            gen_throughput: 0.0,
            cache_hit_rate: r.counters.cached_tokens as f64 / r.counters.prompt_tokens.max(1) as f64,
            total_prefill_uncached_tokens: r.counters.uncached_done,
            total_prefill_busy_us: r.counters.busy_us,
            kv_transfer_latency_ms: r.counters.transfer_ms,
            kv_transfer_speed_gb_s: r.counters.transfer_gb_s,
            bootstrap_failed: r.counters.bootstrap_failed,
            transfer_failed: r.counters.transfer_failed,
            aborted: r.counters.aborted,
            retracted_total: r.counters.retracted,
        }
    }
    /// Publishes as the version does (4.1): prefill and regular after every batch, decode every few steps.
    pub(super) fn publish(&mut self, now: Moment) {
        let every = if self.config.role == Role::Decode { u64::from(self.config.publish_steps.max(1)) } else { 1 };
        if self.steps.is_multiple_of(every) {
            let before = self.published.first().map_or(Moment::ZERO, |l| l.measured_at);
            let tokens: Vec<u64> =
                self.ranks.iter_mut().map(|r| std::mem::take(&mut r.counters.output_tokens)).collect();
            let passed = now.since(before).as_secs_f64().max(1e-9);
            self.published = self.live(now);
            for (load, tokens) in self.published.iter_mut().zip(tokens) {
                load.gen_throughput = tokens as f64 / passed;
            }
        }
        if self.steps.is_multiple_of(u64::from(self.config.metrics_steps.max(1))) || self.config.role == Role::Prefill {
            self.logged = self.live(now);
        }
    }

    /// `/v1/loads` at `now`: a sleeping loop publishes at once (idle) or every 50 ms (it waits), a paused one not at all.
    pub(super) fn loads(&self, now: Moment) -> Vec<RankLoad> {
        /// How often a loop that has no batch but waits for something publishes.
        const WAITING_PUBLISH: u64 = 50_000_000;
        if !self.config.version.loads_by_snapshot() {
            return self.live(self.last_turn);
        }
        if self.is_busy() || self.paused || self.is_dead() {
            return self.published.clone();
        }
        let quiet = self.ranks.iter().all(Rank::is_quiet);
        let age = now.since(self.last_turn).as_nanos() as u64;
        let stamp = if quiet { now } else { Moment(self.last_turn.0 + age / WAITING_PUBLISH * WAITING_PUBLISH) };
        self.live(stamp)
    }

    pub(super) fn metrics(&self) -> Vec<RankLoad> {
        self.logged.clone()
    }
}
