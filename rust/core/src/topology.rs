//! Workers, ranks and roles. One registration is one generation: a restarted process gets a new [`WorkerId`], so that
//! an old leg's end can never touch a new worker's counters.
use std::sync::Arc;
use std::time::Duration;

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Prefill and decode in one engine.
    Regular,
    /// Prefill side of a PD fleet.
    Prefill,
    /// Decode side of a PD fleet.
    Decode,
}

/// One registration of one engine process. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u64);

/// One data-parallel attention rank of a worker; the unit of choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RankId {
    /// The engine.
    pub worker: WorkerId,
    /// The rank, `0..dp_size`.
    pub rank: u16,
}

/// When a decode engine reserves memory (`--disaggregation-decode-allocation-policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Allocation {
    /// Before prefill starts: everything in prefill's pipeline is "in transfer" on decode.
    #[default]
    Early,
    /// After prefill ends.
    PrefillComplete,
}

/// What `/server_info`, the bootstrap `/route`, and the worker's own settings say about one engine. All optional: field
/// names and presence differ between engine versions. Per-rank figures are per DP rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineFacts {
    /// `max_running_requests` of one rank.
    pub max_running: Option<u32>,
    /// Extra request rows of a decode rank; default 0, or 2 x running when that is <= 32.
    pub extra_slots: Option<u32>,
    /// Mamba / GDN state slots of one rank; `None` for models without state.
    pub mamba_slots: Option<u32>,
    /// Mamba slots that one request takes (1, or 2 or 3 with extra buffers).
    pub mamba_slots_per_request: Option<u32>,
    /// KV pool of one rank, in tokens.
    pub max_total_tokens: Option<u64>,
    /// KV page, in tokens.
    pub page_size: Option<u32>,
    /// `--num-reserved-decode-tokens`; 512 when unknown.
    pub reserved_decode_tokens: Option<u32>,
    /// Tokens of one prefill batch of one rank (`chunked_prefill_size`).
    pub chunked_prefill_size: Option<u32>,
    /// Longest prompt that the engine takes, in tokens.
    pub max_input_tokens: Option<u64>,
    /// `SGLANG_DISAGGREGATION_WAITING_TIMEOUT`; 300 s when unknown.
    pub waiting_timeout: Option<Duration>,
    /// When decode reserves.
    pub allocation: Allocation,
    /// Whether the engine answers `/v1/loads`. `false`: the ledger alone bounds it, and no report is waited for.
    pub reports_load: bool,
}

/// An engine as it is registered.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// Base URL, normalised, without trailing slash.
    pub url: Arc<str>,
    /// What it does.
    pub role: Role,
    /// Number of DP ranks, at least 1.
    pub ranks: u16,
    /// What is known about it.
    pub facts: EngineFacts,
}
