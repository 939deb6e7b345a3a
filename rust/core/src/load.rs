//! What an engine says about one rank, and how old that is.
use crate::time::Moment;

/// One rank's entry of `/v1/loads`. Every field is optional, because versions differ.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankReport {
    /// The rank.
    pub rank: u16,
    /// When the engine measured this, in the router's clock (the proxy converts the per-load `timestamp`; without one it
    /// is the moment at which the poll was sent).
    pub measured_at: Moment,
    /// Requests in the running batch.
    pub running: Option<u32>,
    /// `num_waiting_reqs` (decode: waiting + prealloc + transfer + retracted; prefill: waiting + bootstrap).
    pub waiting_total: Option<u32>,
    /// Decode: waiting for memory.
    pub prealloc: Option<u32>,
    /// Decode: memory reserved, KV not here yet.
    pub transfer: Option<u32>,
    /// Decode: pushed out under memory pressure. More than 0 closes the rank.
    pub retracted: Option<u32>,
    /// Prefill: waiting for decode's reservation.
    pub bootstrap: Option<u32>,
    /// Prefill: computed, transfer not confirmed.
    pub inflight: Option<u32>,
    /// KV tokens in use (running, waiting and in transfer).
    pub used_tokens: Option<u64>,
    /// KV pool, tokens.
    pub max_total_tokens: Option<u64>,
    /// Running limit of this rank.
    pub max_running: Option<u32>,
    /// Prefill: tokens that are queued and not cached.
    pub waiting_uncached_tokens: Option<u64>,
    /// Mamba slots free or evictable, from `/metrics`.
    pub mamba_free: Option<u32>,
}
