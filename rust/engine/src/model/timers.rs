//! The fleet's own events: what it told itself to do later, in order of time and, within one moment, of asking.
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

use r3router_core::time::Moment;

use super::event::{Ask, Effect, EngineId, Key};
use super::frontend::{HttpJob, Message};
use super::request::ReqId;

/// Time from one engine to another (bootstrap and metadata messages on a cluster network).
pub(super) const PEER_LATENCY: Duration = Duration::from_micros(300);

/// Two missed heartbeats of 5 s: decode gives up every room of a lost prefill (3.5).
pub(super) const HEARTBEAT_LOSS: Duration = Duration::from_secs(10);

/// An internal event of one engine.
#[derive(Debug)]
pub(super) enum Timer {
    /// The scheduler's loop comes round; stale when the number is not the current one.
    Turn(u64),
    /// The HTTP loop is through with a job.
    Http(HttpJob),
    /// The scheduler sends a message to the detokenizer.
    Send(Message),
    /// The detokenizer is through with a message.
    Detokenized(Message),
    /// A transfer worker has written the last byte of this request.
    Sent(ReqId),
    /// Word from another engine.
    Peer(Peer),
    /// The front end notices that the client of this request has gone.
    Gone(ReqId),
    /// The second-by-second poll of `/health`, with the moment of the call.
    Health(Key, Moment),
    /// A handshake with nobody has failed.
    NoHandshake(ReqId),
    /// Look whether this prefill engine came back; its rooms are lost otherwise.
    Heartbeat(EngineId),
}

/// Words between the halves.
#[derive(Clone, Debug)]
pub(super) enum Peer {
    /// Decode to prefill, `prefill_complete` only: who waits for the room, before anything is reserved.
    Hello(Room),
    /// Decode to prefill: memory is reserved, write there.
    Metadata(Room),
    /// Decode to prefill after a pause with `retract`: compute this again (a request of its own, past the router).
    Again(Box<Ask>),
    /// Prefill to decode, `prefill_complete` only: computed, reserve now.
    Computed(ReqId),
    /// Prefill to decode: the KV is in your memory. `stuck`: it says so for ever but never ends (KVX-2).
    Arrived {
        /// Decode's request.
        request: ReqId,
        /// Tokens that prefill found in its cache; travels in the metadata row (1.3).
        cached_tokens: u32,
        /// The transfer never ends.
        stuck: bool,
    },
    /// Prefill to decode: the transfer failed (by version).
    Failed {
        /// Decode's request.
        request: ReqId,
        /// Why.
        reason: String,
    },
    /// Decode to prefill: no longer wanted (by version).
    Abort {
        /// Prefill's rank.
        rank: usize,
        /// The room.
        room: u64,
    },
    /// A decode engine died: transfers to it fail.
    DecodeLost(EngineId),
}

/// What decode says of a room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// `bootstrap_room`.
    pub(super) number: u64,
    /// Prefill's rank, as decode resolved it.
    pub(super) prefill_rank: usize,
    /// The decode engine.
    pub(super) decode: EngineId,
    /// Its rank.
    pub(super) decode_rank: u16,
    /// Its request.
    pub(super) request: ReqId,
}

struct Entry {
    at: Moment,
    order: u64,
    engine: EngineId,
    timer: Timer,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap gives its greatest first.
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// Everything that waits for its moment.
#[derive(Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Entry>,
    order: u64,
}

impl Timers {
    pub(super) fn push(&mut self, at: Moment, engine: EngineId, timer: Timer) {
        self.order += 1;
        self.heap.push(Entry { at, order: self.order, engine, timer });
    }

    pub(super) fn next(&self) -> Option<Moment> {
        self.heap.peek().map(|e| e.at)
    }

    pub(super) fn pop_due(&mut self, now: Moment) -> Option<(Moment, EngineId, Timer)> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|e| (e.at, e.engine, e.timer))
    }
}

/// Where an engine puts what it wants to happen.
pub(super) struct Out<'a> {
    pub(super) now: Moment,
    pub(super) engine: EngineId,
    pub(super) timers: &'a mut Timers,
    pub(super) effects: &'a mut Vec<(Moment, EngineId, Effect)>,
}

impl Out<'_> {
    /// Tells this engine something later.
    pub(super) fn at(&mut self, at: Moment, timer: Timer) {
        self.timers.push(at.max(self.now), self.engine, timer);
    }

    /// Tells another engine something.
    pub(super) fn tell(&mut self, engine: EngineId, word: Peer) {
        self.timers.push(self.now + PEER_LATENCY, engine, Timer::Peer(word));
    }

    /// Something happens to the outside, now.
    pub(super) fn effect(&mut self, effect: Effect) {
        self.effects.push((self.now, self.engine, effect));
    }
}
