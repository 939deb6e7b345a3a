//! The admission state machine: requests in, bindings out. `step` style, in the caller's time, no clock, no sockets.
//!
//! The proxy holds one [`Admission`] behind a mutex; the simulator holds one in virtual time. Both drive it by the same calls:
//! `submit` / `cancel` for requests, `report` for engines' loads, `poll` for decisions, `delivered` / `finish` for attempts.
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::load::RankReport;
use crate::time::Moment;
use crate::topology::{EngineFacts, RankId, Role, WorkerId, WorkerSpec};

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
    /// Hard limit on affinity memory, bytes.
    pub affinity_bytes: usize,
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
    /// Fairness key (hash of the routing key); requests of one key are FIFO.
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
}

#[allow(clippy::todo, unused_variables, clippy::needless_pass_by_value, clippy::needless_pass_by_ref_mut, dead_code)]
impl Admission {
    /// An empty fleet. `wake` is called (from any thread, under no lock) when a dropped permit makes a new `poll` worthwhile.
    pub fn new(config: AdmissionConfig, wake: Box<dyn Fn() + Send + Sync>) -> Self {
        Self { config, returns: Arc::new(Returns { dropped: parking_lot::Mutex::default(), wake }) }
    }

    /// Adds one registration of an engine. The same URL may be registered again after a removal: a new generation.
    pub fn add_worker(&mut self, spec: WorkerSpec, now: Moment) -> WorkerId {
        todo!()
    }

    /// Replaces what is known of a worker.
    pub fn update_facts(&mut self, id: WorkerId, facts: EngineFacts, now: Moment) {
        todo!()
    }

    /// Removes a worker with all of its ranks. Open permits on it stay valid and release nothing on it.
    pub fn remove_worker(&mut self, id: WorkerId, now: Moment) {
        todo!()
    }

    /// Takes a worker out of choice without touching its open attempts, or back in.
    pub fn set_draining(&mut self, id: WorkerId, draining: bool) {
        todo!()
    }

    /// The whole fleet is paused (rollout control): nothing is bound, deadlines stand still.
    pub fn set_paused(&mut self, paused: bool, now: Moment) {
        todo!()
    }

    /// An engine's load report. Ranks that are not in it keep their old one.
    pub fn report(&mut self, id: WorkerId, ranks: &[RankReport], now: Moment) {
        todo!()
    }

    /// Queues a request.
    ///
    /// # Errors
    /// At once when the queue is full, no worker of a role exists, or the request is larger than every rank.
    pub fn submit(&mut self, request: Request, now: Moment) -> Result<Ticket, Error> {
        todo!()
    }

    /// Takes a waiting request out. Unknown tickets are ignored (it may have been bound a moment ago).
    pub fn cancel(&mut self, ticket: Ticket) {
        todo!()
    }

    /// Appends every decision that can be taken now. Returns when to call again if nothing else happens before.
    pub fn poll(&mut self, now: Moment, out: &mut Vec<Decision>) -> Option<Moment> {
        todo!()
    }

    /// The KV of this attempt has arrived on decode (P's reply, or D's first token): releases the transfer slot.
    pub fn delivered(&mut self, permit: &Permit, now: Moment) {
        todo!()
    }

    /// One leg's engine is done with it (reply read to its end, or failed): releases what the leg held on its engine.
    pub fn leg_ended(&mut self, permit: &Permit, role: Role, now: Moment) {
        todo!()
    }

    /// `bytes` of R3 text left an engine in `took`; feeds its measured emission rate.
    pub fn emitted(&mut self, id: WorkerId, bytes: u64, took: Duration, now: Moment) {
        todo!()
    }

    /// The attempt is over; releases everything that is still held, and counts the outcome.
    pub fn finish(&mut self, permit: Permit, outcome: Outcome, now: Moment) {
        todo!()
    }

    /// What can be seen of the state now.
    pub fn snapshot(&self, now: Moment) -> Snapshot {
        todo!()
    }
}
