//! The admission state machine: requests in, bindings out. `step` style, in the caller's time, no clock, no sockets.
//!
//! The proxy holds one [`Admission`] behind a mutex; the simulator holds one in virtual time. Both drive it by the same calls:
//! `submit` / `cancel` for requests, `report` for engines' loads, `poll` for decisions, `delivered` / `finish` for attempts.
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::affinity::{Affinity, Match};
use crate::error::Error;
use crate::fleet::Fleet;
use crate::health::{Cooldowns, RetryBudget};
use crate::policy::{Policies, Policy, PolicyConfig, Targets};
use crate::queue::Queue;
use crate::reason::{Counters, Reason};
use crate::room::Rooms;
use crate::time::Moment;
use crate::topology::{RankId, Role};
use crate::window::Flow;

mod attempts;
mod bind;
mod clock;
mod decide;
mod hold;
mod registry;
mod settle;
mod submit;
#[cfg(test)]
mod tests;
mod view;

use attempts::Attempts;
use hold::Hold;

/// How many transfers a decode rank may have in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WindowMode {
    /// The computed window of the design (Little's law).
    Computed,
    /// A fixed window per decode rank.
    Static(u32),
    /// No window; rows, mamba slots and KV still bound.
    Unbounded,
}

/// The admission's settings. Durations are real time of the fleet.
#[derive(Clone, Debug)]
pub struct AdmissionConfig {
    /// `false` binds every request at once, whatever the ledgers say (the baseline of the demo).
    pub enabled: bool,
    /// The bound on transfers in flight.
    pub window: WindowMode,
    /// Most requests that wait.
    pub queue_max_requests: usize,
    /// Most body bytes that wait.
    pub queue_max_bytes: u64,
    /// Part of a KV pool that is kept free for decode growth.
    pub kv_margin: f64,
    /// Growth room for a request that names no `max_new_tokens`, tokens.
    pub default_max_new_tokens: u32,
    /// Expected wait on a prefill rank is at most this part of the engine's waiting timeout.
    pub alpha: f64,
    /// R3 bytes about to leave an engine take at most this part of the waiting timeout to emit.
    pub beta: f64,
    /// A report older than this no longer counts.
    pub stale_after: Duration,
    /// A request may be overtaken this often before the queue holds for it.
    pub max_overtakes: u32,
    /// Bytes of the R3 arena; requests with R3 are bound only while their narrow rows fit.
    pub arena_bytes: u64,
    /// Hard limit on affinity memory, bytes; once more where decode has a table of its own.
    pub affinity_bytes: usize,
    /// How ranks are chosen among those that have room.
    pub policies: PolicyConfig,
    /// Failures in a row that open a worker's breaker; 0 switches it off.
    pub breaker_threshold: u32,
    /// How long a breaker stays open before one probe is let through.
    pub breaker_open_for: Duration,
    /// Seed of rooms and tie-breaks.
    pub seed: u64,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            window: WindowMode::Computed,
            queue_max_requests: 100_000,
            queue_max_bytes: 8 << 30,
            kv_margin: 0.05,
            default_max_new_tokens: 4096,
            alpha: 0.25,
            beta: 0.1,
            stale_after: Duration::from_secs(2),
            max_overtakes: 64,
            arena_bytes: 8 << 30,
            affinity_bytes: 64 << 20,
            policies: PolicyConfig::default(),
            breaker_threshold: 10,
            breaker_open_for: Duration::from_secs(10),
            seed: 0,
        }
    }
}

/// What the admission must know of one sub-request (batches and n>1 are split before).
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Prompt length in tokens: exact when `input_ids` were sent, else an estimate from above.
    pub prompt_tokens: u32,
    /// `max_new_tokens`, when the client named it.
    pub max_new_tokens: Option<u32>,
    /// Fairness key (hash of the routing key), 0 for none. Requests of one key are FIFO, but for one that does not fit: it may be
    /// overtaken a bounded number of times.
    pub key: u64,
    /// Chain of prefix hashes, longest last, one per `affinity::BLOCK_TOKENS` tokens; empty when unknown.
    pub prefix: Arc<[u64]>,
    /// When the request must be bound.
    pub deadline: Moment,
    /// Body bytes, for the queue's limit.
    pub body_bytes: u64,
    /// R3, when it was asked for.
    pub r3: Option<R3Need>,
    /// Ranks that an earlier attempt failed on; avoided while another fits.
    pub avoid: Vec<RankId>,
    /// Bind as a retry: it goes before new requests.
    pub retry: bool,
    /// Where the client wants it served, and nowhere else.
    pub targets: Targets,
}

/// R3 bytes that a request is expected to move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct R3Need {
    /// Base64 text that the prefill leg will send.
    pub prefill_text: u64,
    /// Base64 text that the decode leg will send.
    pub decode_text: u64,
    /// Narrow bytes that the router's arena must hold for it.
    pub arena: u64,
}

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A bound attempt: both ranks, the room, and the permit that holds the reservations.
#[derive(Debug)]
pub struct Binding {
    /// The request.
    pub ticket: Ticket,
    /// The prefill rank; `None` in regular mode.
    pub prefill: Option<RankId>,
    /// The decode rank, or the regular rank.
    pub decode: RankId,
    /// `room % prefill dp_size == prefill rank`, `1 <= room < 2^63`; 0 in regular mode.
    pub room: u64,
    /// The reservations. Dropping it releases them exactly once.
    pub permit: Permit,
}

/// What [`Admission::poll`] decided.
#[derive(Debug)]
pub enum Decision {
    /// Send it.
    Bind(Binding),
    /// It cannot be served (deadline, no workers any more).
    Refuse(Ticket, Error),
}

/// How an attempt ended, for rates, breakers and windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Both legs answered.
    Completed {
        /// Tokens that decode generated.
        output_tokens: u32,
    },
    /// The client left, or the request was aborted: says nothing about engines.
    Cancelled,
    /// An engine refused the request with 4xx: says nothing about its health.
    Rejected,
    /// A leg failed.
    Failed {
        /// The role of the leg that failed first.
        role: Role,
        /// How.
        how: Failure,
    },
}

/// How a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Connect refused: the worker is out of choice at once.
    Connect,
    /// The connection broke.
    Reset,
    /// 5xx that is none of the following.
    Server,
    /// 503 or a retraction: back off, shrink the window.
    Overloaded,
    /// The engine's own transfer timeout or failure: shrink the window, cool the pair down.
    Transfer,
    /// The engine says that state slots ran out: lower the rank's slots.
    Mamba,
    /// The router's own delivery deadline passed; the slot stays off the budget until a report shows it free.
    Deadline,
}

/// An owned reservation on both ledgers. Not `Clone`: it is released exactly once, by [`Admission::finish`] or by drop.
#[derive(Debug)]
pub struct Permit {
    pub(crate) id: u64,
    pub(crate) returns: Arc<Returns>,
}

/// Where dropped permits go until the next call into [`Admission`]; `wake` is told.
pub struct Returns {
    pub(crate) dropped: parking_lot::Mutex<Vec<u64>>,
    pub(crate) wake: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Returns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Returns").field("dropped", &self.dropped.lock().len()).finish_non_exhaustive()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        // `finish` leaves id 0 behind, so that a finished permit returns nothing twice.
        if self.id != 0 {
            self.returns.dropped.lock().push(self.id);
            (self.returns.wake)();
        }
    }
}

/// One rank as the metrics, the live view and the tests see it.
#[derive(Clone, Debug, Default)]
pub struct RankView {
    /// Base URL.
    pub url: Arc<str>,
    /// The rank.
    pub rank: u16,
    /// `prefill`, `decode` or `regular`.
    pub role: &'static str,
    /// Attempts whose KV is not delivered yet.
    pub in_transfer: u32,
    /// Attempts open on the rank.
    pub open: u32,
    /// Load on the rank that is not this router's.
    pub foreign: u32,
    /// The computed window (0 for prefill ranks).
    pub window: u32,
    /// Completions per second of the rank that the window uses.
    pub rate: f64,
    /// Unqueued bind-to-delivery time, seconds.
    pub tau: f64,
    /// Free request rows.
    pub rows_free: i64,
    /// Free metadata slots.
    pub metadata_free: i64,
    /// Requests that free mamba slots admit; `i64::MAX` for models without state.
    pub mamba_free: i64,
    /// Free KV tokens.
    pub kv_free: i64,
    /// Uncached tokens queued on a prefill rank.
    pub uncached_tokens: u64,
    /// R3 text bytes about to leave the engine.
    pub r3_bytes: u64,
    /// Requests that decode there by the last report; `None` without one.
    pub running: Option<u32>,
    /// Requests that wait there by the last report, whoever sent them; on decode also those in transfer.
    pub waiting: Option<u32>,
    /// Request rows in all; `i64::MAX` without a limit.
    pub rows: i64,
    /// Requests that the state slots admit in all; `i64::MAX` for models without state.
    pub mamba: i64,
    /// KV pool, tokens; `i64::MAX` when it is not known.
    pub kv: i64,
    /// `closed`, `open`, or `half_open` while a probe decides.
    pub breaker: &'static str,
    /// A person took the rank out of choice.
    pub drained: bool,
    /// Health checks took the worker out of choice.
    pub unhealthy: bool,
    /// Why the rank is closed, or "" when it is open.
    pub closed: &'static str,
    /// Age of the last report, seconds; negative when there was none.
    pub report_age: f64,
}

/// Everything that can be seen of the admission at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Every rank.
    pub ranks: Vec<RankView>,
    /// Requests that wait.
    pub queued: usize,
    /// Body bytes that wait.
    pub queued_bytes: u64,
    /// Age of the oldest waiting request, seconds.
    pub oldest: f64,
    /// Arena bytes reserved.
    pub arena_reserved: u64,
    /// `(reason, count)` since start: bound, and why requests were held or refused.
    pub decisions: Vec<(&'static str, u64)>,
}

/// The state machine. See the module's text for how it is driven.
pub struct Admission {
    config: AdmissionConfig,
    returns: Arc<Returns>,
    /// Permits that came back by drop; a buffer that is kept.
    came_back: Vec<u64>,
    fleet: Fleet,
    queue: Queue,
    attempts: Attempts,
    affinity: Affinity,
    /// That of decode, empty unless its policy asks for one.
    affinity_back: Affinity,
    policies: Policies,
    cooldowns: Cooldowns,
    retries: RetryBudget,
    rooms: Rooms,
    flow: Flow,
    counters: Counters,
    arena_reserved: u64,
    /// Bytes of the arena that finished requests still hold, for clients with a reference.
    arena_kept: u64,
    /// Per role, the rank in which a request fitted last.
    fits_at: [Cell<usize>; 3],
    /// Requests that were overtaken too often, and what is kept for them.
    holds: Vec<Hold>,
    paused_since: Option<Moment>,
    /// Pauses that are over, nanoseconds.
    paused_total: u64,
    /// Next ranks of the plain round robin, when the admission is switched off.
    turns: [usize; 2],
    next_tick: Moment,
    last_tick: Moment,
    /// Something became possible since the last pass over the queue.
    dirty: bool,
    /// Pairs that were resting at the last tick.
    resting: usize,
    /// Entries that the running pass skipped; a buffer that is kept.
    skips: Vec<u32>,
    /// The last pass did not reach the end of the queue.
    cut_short: bool,
    /// What stopped the last pass.
    blocked: Reason,
    /// Prefill or the windows held requests back at every tick since the flow was last read.
    flow_limited: bool,
    /// Requests wait for prefill ranks that have their prefix.
    prefix_waits: bool,
    /// Requests wait for the rank of their key.
    key_waits: bool,
    /// How many the running pass has met, by the ranks that they wait for; a buffer that is kept.
    prefix_waits_for: Vec<(Match, u32)>,
    /// Tokens that idle prefill ranks could have computed meanwhile.
    idle_tokens: f64,
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admission")
            .field("queued", &self.queue.len())
            .field("ranks", &self.fleet.ranks.len())
            .finish_non_exhaustive()
    }
}

impl Admission {
    /// An empty fleet. `wake` is called (from any thread, under no lock) when a dropped permit makes a new `poll` worthwhile.
    pub fn new(config: AdmissionConfig, wake: Box<dyn Fn() + Send + Sync>) -> Self {
        Self {
            returns: Arc::new(Returns { dropped: parking_lot::Mutex::default(), wake }),
            came_back: Vec::new(),
            fleet: Fleet::new(&config),
            queue: Queue::default(),
            attempts: Attempts::default(),
            affinity: Affinity::new(config.affinity_bytes),
            affinity_back: Affinity::new(match config.policies.of[Role::Decode as usize] {
                Policy::CacheAware => config.affinity_bytes,
                _ => 0,
            }),
            policies: Policies::new(config.policies, config.seed),
            cooldowns: Cooldowns::default(),
            retries: RetryBudget::default(),
            rooms: Rooms::new(config.seed),
            flow: Flow::default(),
            counters: Counters::default(),
            arena_reserved: 0,
            arena_kept: 0,
            fits_at: Default::default(),
            holds: Vec::new(),
            paused_since: None,
            paused_total: 0,
            turns: [0; 2],
            next_tick: Moment::ZERO,
            last_tick: Moment::ZERO,
            dirty: false,
            resting: 0,
            skips: Vec::new(),
            cut_short: false,
            blocked: Reason::Queued,
            flow_limited: true,
            prefix_waits: false,
            key_waits: false,
            prefix_waits_for: Vec::new(),
            idle_tokens: 0.0,
            config,
        }
    }

    /// The settings that it runs with.
    pub fn config(&self) -> &AdmissionConfig {
        &self.config
    }

    /// Takes one retry out of the fleet's budget: one for five requests, and ten a second.
    pub fn take_retry(&mut self, now: Moment) -> bool {
        self.retries.take(now)
    }

    /// The queue's own clock: it stands still while the fleet is paused. Nanoseconds.
    fn queue_time(&self, now: Moment) -> u64 {
        self.paused_since.unwrap_or(now).0.saturating_sub(self.paused_total)
    }

    /// Pause time up to now, nanoseconds.
    fn paused_for(&self, now: Moment) -> u64 {
        self.paused_total + self.paused_since.map_or(0, |s| now.0.saturating_sub(s.0))
    }
}
