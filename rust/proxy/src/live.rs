//! Requests in work: the permit, the legs and the ids of each, so that an end from any side (client, engine, abort, restart)
//! closes and counts everything exactly once.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use parking_lot::Mutex;
use r3router_core::admission::{Outcome, Permit};
use r3router_core::topology::{RankId, Role, WorkerId};
use tokio::sync::OwnedSemaphorePermit;

use crate::abort::{self, Abort};
use crate::admit::Grant;
use crate::app::App;
use crate::metrics::LegResult;
use crate::rid;
use crate::trace;
use crate::worker::Worker;

/// A signal to a request from outside its own task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// `/abort_request` named it.
    Aborted,
    /// The process of its prefill leg is gone.
    PrefillGone,
    /// The process of its decode leg is gone.
    DecodeGone,
}

const ABORTED: u8 = 1;
const PREFILL_GONE: u8 = 2;
const DECODE_GONE: u8 = 4;

/// One leg of the running attempt.
#[derive(Clone, Debug)]
pub struct Leg {
    /// Where it runs.
    pub worker: Arc<Worker>,
    /// On which rank.
    pub rank: RankId,
    /// Whether anything was sent that may still live on the engine.
    pub open: bool,
}

#[derive(Debug, Default)]
struct Attempt {
    rid: String,
    room: u64,
    permit: Option<Permit>,
    prefill: Option<Leg>,
    decode: Option<Leg>,
    bound: Option<Instant>,
    delivered: bool,
    delivery: Option<Duration>,
    reply: Option<Kept>,
    /// Which of the request's it is, from 1.
    number: u32,
    spans: Option<Box<trace::Attempt>>,
}

/// An engine's reply that ended an attempt, as the engine wrote it.
#[derive(Clone, Debug)]
pub struct Kept {
    /// Status.
    pub status: StatusCode,
    /// Its type.
    pub content_type: Option<HeaderValue>,
    /// Body.
    pub body: Bytes,
}

/// One sub-request from its arrival to its end, over all of its attempts.
#[derive(Debug)]
pub struct Sub {
    app: Arc<App>,
    number: u64,
    /// The client's own id.
    pub client_rid: Option<String>,
    /// Whether prefill's request was written to its end; decode's is sent after it.
    pub prefill_sent: AtomicBool,
    signals: AtomicU8,
    waker: Mutex<Option<Waker>>,
    attempt: Mutex<Attempt>,
    slot: Mutex<Option<OwnedSemaphorePermit>>,
    trace: Option<Arc<trace::Request>>,
}

/// Number of locks that the live requests are spread over.
const SHARDS: usize = 16;

/// All requests in work.
#[derive(Debug, Default)]
pub struct Live {
    shards: [Mutex<std::collections::HashMap<u64, Arc<Sub>>>; SHARDS],
    next: AtomicU64,
}

impl Live {
    fn shard(&self, number: u64) -> &Mutex<std::collections::HashMap<u64, Arc<Sub>>> {
        // The remainder is below the length, so the first shard never stands in for another.
        self.shards.get(number as usize % SHARDS).unwrap_or(&self.shards[0])
    }

    /// Every request in work.
    pub fn all(&self) -> Vec<Arc<Sub>> {
        self.shards.iter().flat_map(|shard| shard.lock().values().cloned().collect::<Vec<_>>()).collect()
    }

    /// Number of requests in work.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    /// Whether none is in work.
    pub fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().is_empty())
    }

    /// Tells every request with a leg on this generation that its process is gone.
    pub fn worker_gone(&self, id: WorkerId) {
        for sub in self.all() {
            let (prefill, decode) = {
                let attempt = sub.attempt.lock();
                let on = |leg: &Option<Leg>| leg.as_ref().is_some_and(|l| l.open && l.worker.id == id);
                (on(&attempt.prefill), on(&attempt.decode))
            };
            if prefill {
                sub.signal(PREFILL_GONE);
            }
            if decode {
                sub.signal(DECODE_GONE);
            }
        }
    }
}

/// Owns a sub-request's place among the live ones. Dropped at whatever moment, it ends the running attempt: legs are aborted, the
/// permit goes back.
#[derive(Debug)]
pub struct Owner(pub Arc<Sub>);

impl std::ops::Deref for Owner {
    type Target = Arc<Sub>;
    fn deref(&self) -> &Arc<Sub> {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.finish(Outcome::Cancelled, LegResult::Cancelled);
        self.0.app.live.shard(self.0.number).lock().remove(&self.0.number);
        self.0.slot.lock().take();
    }
}

/// What stood in the running attempt, for logs.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The id that engines know.
    pub rid: String,
    /// The room.
    pub room: u64,
    /// `url@rank`.
    pub prefill: Option<Arc<str>>,
    /// `url@rank`.
    pub decode: Option<Arc<str>>,
    /// From binding to the news that the KV is on decode.
    pub delivery: Option<Duration>,
}

impl Sub {
    /// A sub-request that begins now. `trace` is that of its request.
    pub fn start(app: &Arc<App>, client_rid: Option<String>, trace: Option<&Arc<trace::Request>>) -> Owner {
        let number = app.live.next.fetch_add(1, Ordering::Relaxed);
        let sub = Arc::new(Self {
            app: Arc::clone(app),
            number,
            client_rid,
            prefill_sent: AtomicBool::new(false),
            signals: AtomicU8::new(0),
            waker: Mutex::new(None),
            attempt: Mutex::default(),
            slot: Mutex::default(),
            trace: trace.cloned(),
        });
        app.live.shard(number).lock().insert(number, Arc::clone(&sub));
        Owner(sub)
    }

    /// Keeps a place under `--max-concurrent-requests` until the owner goes.
    pub fn hold(&self, slot: OwnedSemaphorePermit) {
        *self.slot.lock() = Some(slot);
    }

    /// Begins an attempt on a granted pair; `build` gets its new id, and its spans when they are recorded.
    pub fn begin<R>(&self, grant: Grant, build: impl FnOnce(&str, &Grant, Option<&trace::Attempt>) -> R) -> R {
        let rid = rid::make(self.client_rid.as_deref());
        let number = self.attempt.lock().number + 1;
        let spans = self.trace.as_ref().map(|request| {
            let prefill = grant.prefill.as_ref().zip(grant.binding.prefill.map(|p| p.rank));
            let decode = (&grant.decode, grant.binding.decode.rank);
            Box::new(trace::Attempt::begin(request, number, prefill, decode))
        });
        let built = build(&rid, &grant, spans.as_deref());
        self.prefill_sent.store(false, Ordering::Relaxed);
        self.signals.fetch_and(ABORTED, Ordering::AcqRel);
        let leg = |worker, rank| Leg { worker, rank, open: false };
        let Grant { binding, prefill, decode } = grant;
        let mut attempt = self.attempt.lock();
        *attempt = Attempt {
            rid,
            room: binding.room,
            prefill: prefill.zip(binding.prefill).map(|(worker, rank)| leg(worker, rank)),
            decode: Some(leg(decode, binding.decode)),
            permit: Some(binding.permit),
            bound: Some(Instant::now()),
            delivered: false,
            delivery: None,
            reply: None,
            number,
            spans,
        };
        built
    }

    /// Keeps an engine's reply that ends the attempt, for the client.
    pub fn keep_reply(&self, status: StatusCode, headers: &HeaderMap, body: Bytes) {
        let content_type = headers.get(header::CONTENT_TYPE).cloned();
        self.attempt.lock().reply = Some(Kept { status, content_type, body });
    }

    /// The kept reply of the last attempt.
    pub fn take_reply(&self) -> Option<Kept> {
        self.attempt.lock().reply.take()
    }

    /// A leg is about to be sent.
    pub fn leg_started(&self, role: Role) {
        let mut attempt = self.attempt.lock();
        if let Some(leg) = attempt.leg(role) {
            leg.open = true;
            leg.worker.leg_started();
        }
        if let Some(span) = attempt.span(role) {
            span.begin();
        }
    }

    /// The span of a leg of the running attempt, for what is seen of its reply.
    pub fn leg_span(&self, role: Role) -> Option<Arc<trace::Leg>> {
        self.trace.as_ref()?;
        self.attempt.lock().span(role).cloned()
    }

    /// Tells the running attempt's spans something, when they are recorded.
    pub fn spans(&self, tell: impl FnOnce(&mut trace::Attempt)) {
        if self.trace.is_some()
            && let Some(spans) = &mut self.attempt.lock().spans
        {
            tell(spans);
        }
    }

    /// A leg's engine is done with it. Prefill's whole reply means that the KV is on decode.
    pub fn leg_ended(&self, role: Role, result: LegResult) {
        let mut attempt = self.attempt.lock();
        let Some(leg) = attempt.leg(role) else { return };
        if !leg.open {
            return;
        }
        leg.open = false;
        leg.worker.leg_ended(result);
        if let Some(span) = attempt.span(role) {
            span.end(result);
        }
        let delivers = role == Role::Prefill && result == LegResult::Ok && !attempt.delivered;
        if delivers {
            attempt.note_delivery(&self.app);
        }
        if let Some(permit) = &attempt.permit {
            self.app.gate.leg_ended(permit, role, delivers);
        }
    }

    /// Decode's first token is here.
    pub fn delivered(&self) {
        let mut attempt = self.attempt.lock();
        if !attempt.delivered {
            attempt.note_delivery(&self.app);
            if let Some(permit) = &attempt.permit {
                self.app.gate.delivered(permit);
            }
        }
    }

    /// Whether the attempt's KV is known to be on decode.
    pub fn is_delivered(&self) -> bool {
        self.attempt.lock().delivered
    }

    /// Ends the attempt: the permit goes back, legs that are still open are aborted on their engines, decode first.
    /// Does nothing when no attempt runs.
    pub fn finish(&self, outcome: Outcome, open_legs: LegResult) {
        let (permit, rid, prefill, decode, pair) = {
            let mut attempt = self.attempt.lock();
            let Some(permit) = attempt.permit.take() else { return };
            let (pair, spans) = (attempt.prefill.is_some(), attempt.spans.take());
            let mut close = |role| {
                let leg = attempt.leg(role)?;
                let was_open = std::mem::replace(&mut leg.open, false);
                was_open.then(|| {
                    leg.worker.leg_ended(open_legs);
                    if let Some(span) = spans.as_ref().and_then(|spans| spans.leg(role)) {
                        span.end(open_legs);
                    }
                    Arc::clone(&leg.worker)
                })
            };
            let (decode, prefill) = (close(Role::Decode), close(Role::Prefill));
            if let Some(spans) = spans {
                spans.end(&attempt.rid, attempt.room, matches!(outcome, Outcome::Completed { .. }));
            }
            // The id stays for the log line.
            (permit, attempt.rid.clone(), prefill, decode, pair)
        };
        self.app.gate.finish(permit, outcome);
        let targets: Vec<Arc<Worker>> = decode.into_iter().chain(prefill).collect();
        // The baseline, a plain PD router, closes its connections and tells no engine.
        let plain = !self.app.settings.admission && pair;
        if !targets.is_empty() && open_legs != LegResult::Ok && !plain {
            abort::send_own(&self.app, Abort { rid, targets });
        }
    }

    /// Ranks of the running or last attempt.
    pub fn rank(&self, role: Role) -> Option<RankId> {
        self.attempt.lock().leg(role).map(|l| l.rank)
    }

    /// What logs say of the running or last attempt.
    pub fn trace(&self) -> Trace {
        let attempt = self.attempt.lock();
        let name = |leg: &Option<Leg>| leg.as_ref().map(|l| l.worker.name(l.rank.rank));
        Trace {
            rid: attempt.rid.clone(),
            room: attempt.room,
            prefill: name(&attempt.prefill),
            decode: name(&attempt.decode),
            delivery: attempt.delivery,
        }
    }

    /// The engine id of the running attempt with the engines that may hold it, and whether it is queued (no attempt runs).
    pub fn running(&self) -> Option<(String, Vec<Arc<Worker>>)> {
        let attempt = self.attempt.lock();
        attempt.permit.as_ref()?;
        let open = |leg: &Option<Leg>| leg.as_ref().filter(|l| l.open).map(|l| Arc::clone(&l.worker));
        Some((attempt.rid.clone(), open(&attempt.decode).into_iter().chain(open(&attempt.prefill)).collect()))
    }

    /// Marks it as aborted by the client: it is not tried again, and leaves the queue.
    pub fn abort(&self) {
        self.signal(ABORTED);
    }

    /// Whether the client has aborted it.
    pub fn is_aborted(&self) -> bool {
        self.signals.load(Ordering::Acquire) & ABORTED != 0
    }

    fn signal(&self, bit: u8) {
        self.signals.fetch_or(bit, Ordering::AcqRel);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }

    /// The signals that have come; the task of `cx` is woken for the next one.
    pub fn poll_signals(&self, cx: &mut Context<'_>) -> impl Iterator<Item = Signal> + use<> {
        {
            let mut waker = self.waker.lock();
            if !waker.as_ref().is_some_and(|w| w.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
        }
        let bits = self.signals.load(Ordering::Acquire);
        [(ABORTED, Signal::Aborted), (PREFILL_GONE, Signal::PrefillGone), (DECODE_GONE, Signal::DecodeGone)]
            .into_iter()
            .filter_map(move |(bit, signal)| (bits & bit != 0).then_some(signal))
    }
}

impl Attempt {
    fn leg(&mut self, role: Role) -> Option<&mut Leg> {
        match role {
            Role::Prefill => self.prefill.as_mut(),
            Role::Decode | Role::Regular => self.decode.as_mut(),
        }
    }

    fn span(&self, role: Role) -> Option<&Arc<trace::Leg>> {
        self.spans.as_ref()?.leg(role)
    }

    fn note_delivery(&mut self, app: &App) {
        self.delivered = true;
        if let Some(spans) = &mut self.spans {
            spans.delivered();
        }
        if let Some(bound) = self.bound {
            let took = bound.elapsed();
            self.delivery = Some(took);
            app.metrics.delivery.observe(took);
        }
    }
}
