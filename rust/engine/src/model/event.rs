//! What goes into the model and what comes out of it.
use std::sync::Arc;
use std::time::Duration;

use r3router_core::time::Moment;

/// An engine of the fleet: its place in the list given to [`super::Fleet::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineId(pub u16);

/// The caller's name for one HTTP exchange. Unique over the life of a fleet; an effect names the exchange it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub u64);

/// One generate request of one sequence. Batches and n > 1 are several of these.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ask {
    /// The request id. Aborts match it by prefix.
    pub rid: Arc<str>,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Chained hashes of the prompt's prefix blocks ([`super::EngineConfig::prefix_block`] tokens each); may be empty.
    pub prefix: Arc<[u64]>,
    /// Tokens that will be generated (the caller decides where the sequence stops; at least 1). Prefill ignores it: 1.
    pub output_tokens: u32,
    /// `max_new_tokens` as the client named it; bounds decode's memory estimate.
    pub max_new_tokens: Option<u32>,
    /// Whether chunks are wanted.
    pub stream: bool,
    /// R3 wanted, from this position on (`routed_experts_start_len`).
    pub r3_start: Option<u32>,
    /// Bytes of the request body.
    pub body_bytes: u64,
    /// The other half's address and the room; `None` is refused with 400 by prefill and decode engines.
    pub bootstrap: Option<Bootstrap>,
    /// `routed_dp_rank`: the rank of the engine that receives this.
    pub routed_dp_rank: Option<u16>,
    /// `disagg_prefill_dp_rank`: the prefill rank that holds the KV.
    pub prefill_dp_rank: Option<u16>,
}

/// `bootstrap_host`, `bootstrap_port` and `bootstrap_room`, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    /// The prefill engine that decode will ask; `None` when the address leads nowhere. Prefill does not read it.
    pub prefill: Option<EngineId>,
    /// The room.
    pub room: u64,
}

/// How `/pause_generation` pauses (section 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseMode {
    /// Everything is aborted first.
    Abort,
    /// Running requests are pushed out and come back after.
    Retract,
    /// Everything stays where it is.
    InPlace,
}

/// Faults on demand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// The scheduler does nothing for so long (a long step, a CPU stall): all ranks stand still.
    StallScheduler(Duration),
    /// The HTTP loop is deaf for so long.
    StallHttp(Duration),
    /// The next `n` requests that reach this scheduler fail with 500 there, and the other half is not told.
    FailNext(u32),
    /// Prefill: the next `n` transfers fail in the transfer worker (decode is told by version).
    FailTransfers(u32),
    /// Prefill: the next `n` transfers begin and never end, and no clock covers them (KVX-2); prefill replies as usual.
    StickTransfers(u32),
    /// Decode: stuck transfers are let go, as if the engine had been helped.
    Unstick,
    /// Memory of every decode rank shrinks or grows to so many tokens.
    Pool(u64),
    /// The process dies: open exchanges are reset, queues are empty, and everything is refused until [`Fault::Revive`].
    Kill,
    /// The process is back, empty.
    Revive,
}

/// Something that happens to an engine from outside. `now` of [`super::Fleet::step`] is when the bytes reached its socket.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A generate request has arrived whole.
    Generate {
        /// The exchange.
        key: Key,
        /// The request.
        ask: Ask,
    },
    /// The client of this exchange closed its connection.
    Disconnect {
        /// The exchange.
        key: Key,
    },
    /// `/abort_request`. Answered with 200 whatever it hit.
    Abort {
        /// The exchange.
        key: Key,
        /// The prefix of the request ids.
        rid: Arc<str>,
        /// `abort_all`.
        all: bool,
    },
    /// A request that the HTTP loop answers by itself (`/model_info`, `/metrics`).
    Http {
        /// The exchange.
        key: Key,
    },
    /// A request that needs the scheduler (`/server_info`; `/v1/loads` is asked for as [`Event::Loads`]).
    Scheduler {
        /// The exchange.
        key: Key,
    },
    /// `/v1/loads`; the way it takes depends on the version. The figures are in [`super::Fleet::loads`] when it is answered.
    Loads {
        /// The exchange.
        key: Key,
    },
    /// `/health` or `/health_generate`: 200 when any scheduler output follows, at least 1 s, 503 after 20 s (4.2).
    Health {
        /// The exchange.
        key: Key,
    },
    /// `/pause_generation`.
    Pause {
        /// The exchange.
        key: Key,
        /// How.
        mode: PauseMode,
    },
    /// `/continue_generation`.
    Continue {
        /// The exchange.
        key: Key,
    },
    /// `/flush_cache`: 400 unless every queue is empty (5.3).
    Flush {
        /// The exchange.
        key: Key,
    },
    /// A fault.
    Fault(Fault),
}

/// Something that an engine does to the outside, at the moment at which [`super::Fleet::advance`] reports it.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// A stream's status and headers are out (200, before anything is known: section 1.3).
    Opened {
        /// The exchange.
        key: Key,
    },
    /// New tokens of a stream.
    Chunk {
        /// The exchange.
        key: Key,
        /// Tokens generated so far, these included.
        tokens: u32,
    },
    /// The reply, or the last chunk of a stream.
    Done {
        /// The exchange.
        key: Key,
        /// What it says.
        reply: Box<Reply>,
    },
    /// The connection was reset (the process died).
    Reset {
        /// The exchange.
        key: Key,
    },
    /// Answer to anything that is not a generate request.
    Answer {
        /// The exchange.
        key: Key,
        /// HTTP status.
        status: u16,
    },
}

/// How a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It reached its length.
    Length,
    /// `finish_reason {"type":"abort"}`. `status` 200 is graceful (a partial reply); any other is an error reply in
    /// whole form and a chunk in a stream (section 3.6).
    Abort {
        /// HTTP status of the whole form.
        status: u16,
        /// The engine's words.
        message: String,
    },
}

/// R3 rows of one reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R3Rows {
    /// Position of the first row.
    pub start: u32,
    /// Number of rows.
    pub rows: u32,
    /// Rows below this position are stale cache content on decode engines; 0 on others.
    pub junk_below: u32,
    /// Base64 characters that they take at the configured row size, in-line.
    pub text_bytes: u64,
    /// A descriptor leaves instead of the text.
    pub by_reference: bool,
}

/// What a finished request says.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// How it ended.
    pub finish: Finish,
    /// The rank that served it.
    pub rank: u16,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Of these, found in the prefix cache (decode repeats prefill's figure).
    pub cached_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// R3, when asked for and given.
    pub r3: Option<R3Rows>,
    /// When what happened.
    pub times: Times,
}

/// Moments in the life of a request inside one engine; zero when it was not reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The body reached the socket.
    pub arrived: Moment,
    /// The scheduler took it in.
    pub scheduled: Moment,
    /// Decode: memory reserved, clock W starts. Prefill: decode's reservation seen, request queued for a batch.
    pub reserved: Moment,
    /// KV arrived on decode; on prefill, its transfer was confirmed.
    pub delivered: Moment,
    /// First token known on this engine.
    pub first_token: Moment,
    /// Last token known; the reply enters the detokenizer after this.
    pub finished: Moment,
    /// The reply left the HTTP loop.
    pub emitted: Moment,
}
