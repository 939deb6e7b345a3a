//! What an engine says about its ranks: the figures behind `/v1/loads`, `/server_info` and `/metrics`.
use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use r3router_core::topology::Role;

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
