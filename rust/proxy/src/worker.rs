//! One generation of one engine process, as the data plane sees it: where it is, what it can, and what happened on it.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use http::HeaderValue;
use parking_lot::RwLock;
use r3router_core::time::Moment;
use r3router_core::topology::{Role, WorkerId};
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

use crate::metrics::{Counters, LegResult};
use crate::upstream::Pool;

/// What an engine's version and flags allow. Unknown engines are taken as current ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// `disagg_prefill_dp_rank` may stand in decode's body. 0.5.10 fails on the first request that carries it.
    pub prefill_rank_for_decode: bool,
    /// `disagg_prefill_dp_rank` may stand in prefill's body, where it saves the room's registration (0.5.13 and later).
    pub prefill_rank_for_prefill: bool,
    /// Obeys `routed_experts_start_len` (0.5.12 and later).
    pub start_len: bool,
    /// Whether it can send R3 at all; `None` when nothing is known.
    pub routed_experts: Option<bool>,
    /// Whether the number of ranks was said by the engine. When not, no rank is named to it.
    pub ranks_known: bool,
}

impl Default for Abilities {
    fn default() -> Self {
        Self {
            prefill_rank_for_decode: true,
            prefill_rank_for_prefill: false,
            start_len: true,
            routed_experts: None,
            ranks_known: false,
        }
    }
}

/// Fires once, when a generation has ended: its legs are failed, whatever their sockets say.
#[derive(Debug, Default)]
pub struct Gone {
    gone: AtomicBool,
    told: Arc<Notify>,
}

impl Gone {
    /// Whether it has ended.
    pub fn is_set(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Ends it.
    pub fn set(&self) {
        self.gone.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    /// Waits for the end. Check [`Gone::is_set`] after creating it.
    pub fn wait(&self) -> OwnedNotified {
        Arc::clone(&self.told).notified_owned()
    }
}

/// `Bearer key` of an engine; `PUT /workers/{id}` can change it while requests run.
#[derive(Clone, Debug, Default)]
pub struct Key(Arc<RwLock<Option<HeaderValue>>>);

impl Key {
    /// A key, or none.
    pub fn new(key: Option<HeaderValue>) -> Self {
        Self(Arc::new(RwLock::new(key)))
    }

    /// What it is now.
    pub fn get(&self) -> Option<HeaderValue> {
        self.0.read().clone()
    }

    /// Changes it, for every generation of the engine.
    pub fn set(&self, key: Option<HeaderValue>) {
        *self.0.write() = key;
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Worker {
    /// The generation.
    pub id: WorkerId,
    /// Base URL as it was registered.
    pub url: Arc<str>,
    /// `url@rank` of every rank, for logs and errors.
    pub names: Vec<Arc<str>>,
    /// What it does.
    pub role: Role,
    /// What it can.
    pub abilities: Abilities,
    /// Host for `bootstrap_host`: an IPv6 literal in brackets, as SGLang's own load balancer sends it.
    pub bootstrap_host: Arc<str>,
    /// Port of its bootstrap server.
    pub bootstrap_port: Option<u16>,
    /// `Bearer key` for calls of the router's own and, where settings say so, for legs.
    pub key: Key,
    /// Its connections.
    pub pool: Arc<Pool>,
    /// Set when this generation has ended.
    pub gone: Gone,
    /// Told when a connect was refused, so that the keeper looks at once.
    pub suspect: Arc<Notify>,
    /// Legs open on it.
    pub open: AtomicI64,
    /// How its legs ended.
    pub legs: Counters<11>,
    /// When bytes last came from it, nanoseconds of the router's clock.
    pub last_bytes: AtomicU64,
    /// When the last poll of its load that was answered was sent, nanoseconds of the router's clock; 0 is never, and the end of time is
    /// that it reports none.
    pub reported: AtomicU64,
}

impl Worker {
    /// `url@rank`.
    pub fn name(&self, rank: u16) -> Arc<str> {
        self.names.get(usize::from(rank)).cloned().unwrap_or_else(|| Arc::clone(&self.url))
    }

    /// Whether it has answered a poll of its load that was sent after `since`, or any.
    pub fn reported_after(&self, since: Option<Moment>) -> bool {
        self.reported.load(Ordering::Relaxed) > since.map_or(0, |at| at.0)
    }

    /// Counts the end of a leg.
    pub fn leg_ended(&self, result: LegResult) {
        self.legs.inc(result as usize);
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts the start of a leg.
    pub fn leg_started(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }
}
