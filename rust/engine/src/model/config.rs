//! What an engine is and what its work costs. Every default is the incident of `engine-protocol.md` 6.1 (Qwen3.5-35B-A3B
//! class, DP 4, NIXL, R3 on) unless the field says otherwise. All times are the fleet's own; [`super::Pace`] scales them.
use std::time::Duration;

use r3router_core::topology::{Allocation, EngineFacts, Role};

/// Which engine's behaviour is played. Everything that differs is asked of this type, never compared elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// 0.5.12: one text for every decode failure, no notices between the halves, loads by a round trip.
    V0_5_12,
    /// 0.5.23.
    #[default]
    V0_5_23,
}

impl Version {
    /// As engines print it.
    pub fn text(self) -> &'static str {
        match self {
            Self::V0_5_12 => "0.5.12",
            Self::V0_5_23 => "0.5.23",
        }
    }

    /// Prefill's bootstrap clock B is enforced (NIXL; not up to 0.5.12: section 0, 3.5).
    pub fn enforces_bootstrap_timeout(self) -> bool {
        self == Self::V0_5_23
    }

    /// A failed transfer on prefill is pushed to decode (section 0: only from the transfer worker).
    pub fn prefill_tells_decode(self) -> bool {
        self == Self::V0_5_23
    }

    /// Decode's abort or timeout is told to prefill (section 0).
    pub fn decode_tells_prefill(self) -> bool {
        self == Self::V0_5_23
    }

    /// `poll()` tests W before it reads the notices, so that KV which arrived while nobody polled is discarded (3.5).
    pub fn clock_before_arrival(self) -> bool {
        self == Self::V0_5_12
    }

    /// `/v1/loads` reads a shared-memory snapshot; before that it waits for the scheduler (section 0, 4.1).
    pub fn loads_by_snapshot(self) -> bool {
        self == Self::V0_5_23
    }

    /// `disagg_prefill_dp_rank` in prefill's body switches the follow-room conflict check off (section 0).
    pub fn explicit_rank_skips_conflict(self) -> bool {
        self == Self::V0_5_23
    }

    /// Decode checks mamba slots before it reserves (`ensure_mamba_capacity`, section 0).
    pub fn checks_mamba(self) -> bool {
        self == Self::V0_5_23
    }
}

/// Mamba / GDN state slots of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mamba {
    /// Slots of one rank.
    pub slots: u32,
    /// Slots that one request takes: 1, or 2 or 3 with extra buffers (section 3.3).
    pub per_request: u32,
}

/// What GPU work costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compute {
    /// Overhead of one prefill batch (launch, scheduling).
    pub prefill_batch: Duration,
    /// Uncached prompt tokens per second of one rank, at the long contexts of the incident. Section 6.6 without R3:
    /// 16 x 3k uncached tokens within 7 s.
    pub prefill_tokens_per_s: f64,
    /// Cost of a cached token in a batch (attention reads it), seconds.
    pub cached_token_s: f64,
    /// A decode step of an empty batch.
    pub decode_step: Duration,
    /// Each sequence of the fullest rank adds this to a step.
    pub decode_per_seq: Duration,
    /// HBM bytes per second with which a step reads the KV of its batch.
    pub hbm_bytes_per_s: f64,
}

impl Default for Compute {
    fn default() -> Self {
        Self {
            prefill_batch: Duration::from_millis(30),
            prefill_tokens_per_s: 7_000.0,
            cached_token_s: 0.0,
            decode_step: Duration::from_millis(14),
            decode_per_seq: Duration::from_micros(100),
            hbm_bytes_per_s: 3.0e12,
        }
    }
}

/// What moving KV from prefill to decode costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// From post to notice, without bytes.
    pub latency: Duration,
    /// Bytes per second of one worker thread (assumed: a 400 Gb/s link shared by four workers).
    pub bytes_per_s: f64,
    /// Worker threads of one prefill rank; a decode rank always meets the same one (3.4).
    pub workers: u16,
    /// State bytes (mamba) that travel with each request (assumed).
    pub state_bytes: u64,
}

impl Default for Transfer {
    fn default() -> Self {
        Self { latency: Duration::from_millis(5), bytes_per_s: 12.0e9, workers: 4, state_bytes: 32 << 20 }
    }
}

/// Bytes per second of the three Python processes that an R3 payload passes, each a single server, in series.
///
/// `r3-payload.md` 4.3 measured, for 92.2 MB raw: scheduler gather 153 + pickle 236 + send 130 ms; detokenizer 145 + 308 +
/// 108 ms; HTTP loop 127 ms to unpickle and about 200 ms to dump and write. The real engine of `engine-protocol.md` 6.6
/// took 1.0 s in all for 73.1 MB raw (97.4 MB of text), 0.84 of what those figures give; the rates here are those
/// figures at that engine's speed. What finishes in one step travels as one message, so that 16 samples that finish
/// together take 16 s, as measured there, and the HTTP loop is deaf for 2 s while it unpickles them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct R3Cost {
    /// Raw bytes of one token's row (layers x `top_k` x 4). Costs are counted with it, whatever the emulator sends.
    pub row_bytes: u32,
    /// Scheduler: gather, pickle and send, raw bytes per second. Stalls the engine's step loop, of all ranks.
    pub scheduler: f64,
    /// Detokenizer: unpickle, base64, pickle, raw bytes per second.
    pub detokenizer: f64,
    /// HTTP loop: unpickle, raw bytes per second, of the whole message before anything else runs.
    pub http_unpickle: f64,
    /// HTTP loop: dump and write, raw bytes per second, reply by reply.
    pub http_write: f64,
    /// The plug-in is in the engine: rows go narrow into shared memory and a descriptor of [`Self::REFERENCE_BYTES`] travels.
    pub by_reference: bool,
    /// With the plug-in: gather on the scheduler's thread, raw (not narrow) bytes per second; 46 ms per 92.2 MB (4.3).
    pub scheduler_by_reference: f64,
}

impl R3Cost {
    /// Bytes of a descriptor that stands for a payload.
    pub const REFERENCE_BYTES: u64 = 100;
}

impl Default for R3Cost {
    fn default() -> Self {
        Self {
            row_bytes: 1280,
            scheduler: 210e6,
            detokenizer: 196e6,
            http_unpickle: 860e6,
            http_write: 436e6,
            by_reference: false,
            scheduler_by_reference: 2.0e9,
        }
    }
}

/// What requests cost in the Python processes apart from R3.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frontend {
    /// One turn of the HTTP loop (6.6: `/model_info` answers in 2 ms, there and back).
    pub http_turn: Duration,
    /// One chunk of a stream, or one answer of a few bytes, through it (assumed).
    pub http_chunk: Duration,
    /// Parsing a request body, bytes per second (assumed: 10 ms for the 400 kB of 57k ids).
    pub ingress_bytes_per_s: f64,
    /// One message through the detokenizer.
    pub detokenizer_message: Duration,
    /// One reply or stream chunk in it.
    pub detokenizer_reply: Duration,
    /// How often the engine looks whether a client of a whole reply is still there (5.2).
    pub disconnect_poll: Duration,
    /// After the end of a stream whose client left, until its abort (5.2).
    pub stream_abort_after: Duration,
}

impl Default for Frontend {
    fn default() -> Self {
        Self {
            http_turn: Duration::from_millis(1),
            http_chunk: Duration::from_micros(50),
            ingress_bytes_per_s: 40e6,
            detokenizer_message: Duration::from_micros(200),
            detokenizer_reply: Duration::from_micros(50),
            disconnect_poll: Duration::from_secs(4),
            stream_abort_after: Duration::from_secs(2),
        }
    }
}

/// One engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// What it does.
    pub role: Role,
    /// The release that is played.
    pub version: Version,
    /// DP ranks.
    pub ranks: u16,
    /// KV pool of one rank, tokens.
    pub max_total_tokens: u64,
    /// KV page, tokens.
    pub page_size: u32,
    /// KV bytes of one token.
    pub kv_bytes_per_token: u64,
    /// Running requests of one rank.
    pub max_running: u32,
    /// Extra request rows of a decode rank; `None`: 0, or 2 x running when that is <= 32 (3.1).
    pub extra_slots: Option<u32>,
    /// State slots; `None` for a model without state.
    pub mamba: Option<Mamba>,
    /// `--num-reserved-decode-tokens`.
    pub reserved_decode_tokens: u32,
    /// `SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`.
    pub clip_max_new_tokens: u32,
    /// Uncached tokens of one prefill batch of one rank.
    pub chunked_prefill_size: u32,
    /// Tokens of one prefix block: [`super::Ask::prefix`] has one hash for each.
    pub prefix_block: u32,
    /// Prefix cache on prefill and regular engines.
    pub prefix_cache: bool,
    /// When decode reserves.
    pub allocation: Allocation,
    /// B: `SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`.
    pub bootstrap_timeout: Duration,
    /// W: `SGLANG_DISAGGREGATION_WAITING_TIMEOUT`.
    pub waiting_timeout: Duration,
    /// Handshake with a prefill that cannot be reached: fails after this (15 tries of 1 s; a real engine took 14 s).
    pub handshake_timeout: Duration,
    /// Whether prefill returns R3 (stock engines up to 0.5.12 do not, the miles branch does).
    pub prefill_returns_r3: bool,
    /// Retracted requests keep their KV on the host. Without it they end with 503 (3.1).
    pub retract_backup: bool,
    /// Decode publishes its load every so many steps (4.1).
    pub publish_steps: u32,
    /// `/metrics` are refreshed every so many steps or prefill batches (4.3).
    pub metrics_steps: u32,
    /// GPU work.
    pub compute: Compute,
    /// KV transfer.
    pub transfer: Transfer,
    /// R3 work.
    pub r3: R3Cost,
    /// Everything else the Python processes do.
    pub frontend: Frontend,
}

impl EngineConfig {
    /// A prefill engine of the incident with `ranks` ranks.
    pub fn prefill(ranks: u16) -> Self {
        // Prefill's state pool was not reported as short anywhere; its bound is left out unless a scenario asks for it.
        Self { role: Role::Prefill, mamba: None, ..Self::decode(ranks) }
    }

    /// A decode engine of the incident with `ranks` ranks.
    pub fn decode(ranks: u16) -> Self {
        Self {
            role: Role::Decode,
            version: Version::default(),
            ranks,
            max_total_tokens: 5_130_000,
            page_size: 64,
            kv_bytes_per_token: 20_000,
            max_running: 128,
            extra_slots: None,
            mamba: Some(Mamba { slots: 128, per_request: 1 }),
            reserved_decode_tokens: 512,
            clip_max_new_tokens: 4096,
            chunked_prefill_size: 8192,
            prefix_block: 256,
            prefix_cache: true,
            allocation: Allocation::Early,
            bootstrap_timeout: Duration::from_secs(300),
            waiting_timeout: Duration::from_secs(300),
            handshake_timeout: Duration::from_secs(14),
            prefill_returns_r3: true,
            retract_backup: true,
            publish_steps: 15,
            metrics_steps: 40,
            compute: Compute::default(),
            transfer: Transfer::default(),
            r3: R3Cost::default(),
            frontend: Frontend::default(),
        }
    }

    /// A regular engine of the same size with `ranks` ranks.
    pub fn regular(ranks: u16) -> Self {
        Self { role: Role::Regular, ..Self::decode(ranks) }
    }

    /// Extra request rows of one decode rank, by the rule of section 3.1 when none are set.
    pub fn extra_rows(&self) -> u32 {
        match (self.role, self.extra_slots) {
            (Role::Decode, Some(extra)) => extra,
            (Role::Decode, None) if self.max_running <= 32 => 2 * self.max_running,
            _ => 0,
        }
    }

    /// Request rows of one rank: running and, on decode, extra.
    pub fn rows(&self) -> u32 {
        self.max_running + self.extra_rows()
    }

    /// Metadata slots of one rank (3.1).
    pub fn metadata_slots(&self) -> u32 {
        2 * self.max_running
    }

    /// Tokens rounded up to pages.
    pub fn page_ceil(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.page_size.max(1))) * u64::from(self.page_size.max(1))
    }

    /// What a router learns of this engine from `/server_info`.
    pub fn facts(&self) -> EngineFacts {
        EngineFacts {
            max_running: Some(self.max_running),
            extra_slots: (self.role == Role::Decode).then(|| self.extra_rows()),
            mamba_slots: self.mamba.map(|m| m.slots),
            mamba_slots_per_request: self.mamba.map(|m| m.per_request),
            max_total_tokens: Some(self.max_total_tokens),
            page_size: Some(self.page_size),
            reserved_decode_tokens: Some(self.reserved_decode_tokens),
            chunked_prefill_size: (self.role != Role::Decode).then_some(self.chunked_prefill_size),
            max_input_tokens: Some(self.max_total_tokens.saturating_sub(6)),
            waiting_timeout: Some(self.waiting_timeout),
            allocation: self.allocation,
            reports_load: true,
        }
    }
}
