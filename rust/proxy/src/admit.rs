//! The admission behind one mutex, for async callers: a request waits for its grant without polling, and whoever changes the
//! state hands out what became possible.
use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use r3router_core::admission::{
    Admission, AdmissionConfig, Binding, Decision, Outcome, Permit, Request, Snapshot, Ticket,
};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use r3router_core::topology::{EngineFacts, Role, WorkerId, WorkerSpec};
use tokio::sync::{Notify, oneshot};

use crate::clock::Clock;
use crate::worker::Worker;

/// A bound attempt with the engines that it goes to.
#[derive(Debug)]
pub struct Grant {
    /// Ranks, room and permit.
    pub binding: Binding,
    /// The prefill engine; `None` in regular mode.
    pub prefill: Option<Arc<Worker>>,
    /// The decode engine, or the regular one.
    pub decode: Arc<Worker>,
}

type Verdict = Result<Grant, Error>;

struct Inner {
    admission: Admission,
    workers: HashMap<WorkerId, Arc<Worker>>,
    waiting: HashMap<Ticket, oneshot::Sender<Verdict>>,
    /// Kept between calls, so that deciding does not allocate.
    decisions: Vec<Decision>,
    /// When the timer task must call again.
    due: Option<Moment>,
    paused_at: Option<Moment>,
    /// Another router binds.
    held: bool,
}

/// See the module's text.
pub struct Gate {
    inner: Mutex<Inner>,
    clock: Clock,
    /// Told when a dropped permit or an earlier deadline needs the timer task.
    wake: Arc<Notify>,
    paused: AtomicBool,
    /// Told when a pause ends.
    opened: Notify,
    /// Calls that wait for that and are not in the queue.
    outside: AtomicUsize,
    /// Most of them.
    outside_most: usize,
    /// Nanoseconds of pauses that are over.
    paused_ns: AtomicU64,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}

/// Verdicts for others that were found while holding the lock; sent after it was let go.
type Outbox = Vec<(oneshot::Sender<Verdict>, Verdict)>;

fn deliver(outbox: Outbox) {
    for (sender, verdict) in outbox {
        // A receiver that is gone drops the grant here, and its permit finds its own way back.
        let _ = sender.send(verdict);
    }
}

impl Inner {
    /// Takes every decision that can be taken now. The verdict on `own` is returned, all others go to the outbox.
    fn settle(&mut self, now: Moment, own: Option<Ticket>, outbox: &mut Outbox) -> Option<Verdict> {
        self.due = self.admission.poll(now, &mut self.decisions);
        if self.decisions.is_empty() {
            return None;
        }
        let mut mine = None;
        let mut decisions = std::mem::take(&mut self.decisions);
        for decision in decisions.drain(..) {
            let (ticket, verdict) = match decision {
                Decision::Bind(binding) => (binding.ticket, self.grant(binding)),
                Decision::Refuse(ticket, error) => (ticket, Err(error)),
            };
            if own == Some(ticket) {
                mine = Some(verdict);
            } else if let Some(sender) = self.waiting.remove(&ticket) {
                outbox.push((sender, verdict));
            }
        }
        self.decisions = decisions;
        mine
    }

    fn grant(&self, binding: Binding) -> Verdict {
        let decode = self.workers.get(&binding.decode.worker).cloned();
        let prefill = binding.prefill.map(|p| self.workers.get(&p.worker).cloned());
        match (decode, prefill) {
            (Some(decode), None) => Ok(Grant { binding, prefill: None, decode }),
            (Some(decode), Some(Some(prefill))) => Ok(Grant { binding, prefill: Some(prefill), decode }),
            // Cannot happen: workers are removed under the same lock. The permit goes back by its drop.
            _ => {
                Err(Error::new(Kind::Internal, Source::Router, "a pair was bound on a worker that is gone").retryable())
            }
        }
    }
}

impl Gate {
    /// An empty fleet.
    pub fn new(config: AdmissionConfig, clock: Clock) -> Arc<Self> {
        let wake = Arc::new(Notify::new());
        let told = Arc::clone(&wake);
        let outside_most = config.queue_max_requests;
        let admission = Admission::new(config, Box::new(move || told.notify_one()));
        Arc::new(Self {
            inner: Mutex::new(Inner {
                admission,
                workers: HashMap::new(),
                waiting: HashMap::new(),
                decisions: Vec::new(),
                due: None,
                paused_at: None,
                held: false,
            }),
            clock,
            wake,
            paused: AtomicBool::new(false),
            opened: Notify::new(),
            outside: AtomicUsize::new(0),
            outside_most,
            paused_ns: AtomicU64::new(0),
        })
    }

    /// The clock that the admission runs on.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Changes the state and hands out what became possible.
    fn change<R>(&self, change: impl FnOnce(&mut Inner, Moment) -> R) -> R {
        let mut outbox = Outbox::new();
        let (result, earlier) = {
            let mut inner = self.inner.lock();
            let now = self.clock.now();
            let before = inner.due;
            let result = change(&mut inner, now);
            inner.settle(now, None, &mut outbox);
            (result, earlier(before, inner.due))
        };
        if earlier {
            self.wake.notify_one();
        }
        deliver(outbox);
        result
    }

    /// Waits for a pair. Dropping the future takes the request out of the queue.
    ///
    /// # Errors
    /// The admission's refusal.
    pub async fn acquire(&self, request: Request) -> Verdict {
        let mut outbox = Outbox::new();
        let (ticket, receiver, wake) = {
            let mut inner = self.inner.lock();
            let now = self.clock.now();
            let before = inner.due;
            let ticket = inner.admission.submit(request, now)?;
            if let Some(verdict) = inner.settle(now, Some(ticket), &mut outbox) {
                let wake = earlier(before, inner.due);
                drop(inner);
                if wake {
                    self.wake.notify_one();
                }
                deliver(outbox);
                return verdict;
            }
            let (sender, receiver) = oneshot::channel();
            inner.waiting.insert(ticket, sender);
            (ticket, receiver, earlier(before, inner.due))
        };
        if wake {
            self.wake.notify_one();
        }
        deliver(outbox);
        let mut waiting = Waiting { gate: self, ticket: Some(ticket) };
        let verdict = receiver.await;
        waiting.ticket = None;
        verdict.unwrap_or_else(|_| Err(Error::new(Kind::Internal, Source::Router, "the queue dropped a request")))
    }

    /// Refuses what could never be granted.
    ///
    /// # Errors
    /// The admission's refusal.
    pub fn check(&self, request: &Request) -> Result<(), Error> {
        self.inner.lock().admission.check(request, self.clock.now())
    }

    /// Bytes of the R3 arena that references hold have changed.
    pub fn arena_kept(&self, bytes: u64) {
        self.change(|inner, _| inner.admission.set_arena_kept(bytes));
    }

    fn cancel(&self, ticket: Ticket) {
        self.change(|inner, _| {
            inner.waiting.remove(&ticket);
            inner.admission.cancel(ticket);
        });
    }

    /// The attempt's KV has arrived on decode.
    pub fn delivered(&self, permit: &Permit) {
        self.change(|inner, now| inner.admission.delivered(permit, now));
    }

    /// One leg's engine is done with it; `delivers` says that its end is also the news that the KV has arrived.
    pub fn leg_ended(&self, permit: &Permit, role: Role, delivers: bool) {
        self.change(|inner, now| {
            if delivers {
                inner.admission.delivered(permit, now);
            }
            inner.admission.leg_ended(permit, role, now);
        });
    }

    /// `bytes` of R3 text left an engine in `took`, as seen on the wire.
    pub fn emitted(&self, id: WorkerId, bytes: u64, took: Duration) {
        let (bytes, took) = ((bytes as f64 * self.clock.scale()) as u64, self.clock.fleet(took));
        self.inner.lock().admission.emitted(id, bytes, took, self.clock.now());
    }

    /// The attempt is over.
    pub fn finish(&self, permit: Permit, outcome: Outcome) {
        self.change(|inner, now| inner.admission.finish(permit, outcome, now));
    }

    /// Adds a generation of an engine, with `drained` ranks out of choice from the start. `make` gets its id and builds what the data plane
    /// needs of it.
    pub fn add_worker(
        &self,
        spec: WorkerSpec,
        drained: &[u16],
        make: impl FnOnce(WorkerId) -> Arc<Worker>,
    ) -> Arc<Worker> {
        self.change(|inner, now| {
            let id = inner.admission.add_worker(spec, now);
            inner.admission.set_drained(id, drained, true);
            let worker = make(id);
            inner.workers.insert(id, Arc::clone(&worker));
            worker
        })
    }

    /// Takes a generation out for good.
    pub fn remove_worker(&self, id: WorkerId) {
        self.change(|inner, now| {
            inner.admission.remove_worker(id, now);
            inner.workers.remove(&id);
        });
    }

    /// Takes a worker out of choice, or back in.
    pub fn set_draining(&self, id: WorkerId, draining: bool) {
        self.change(|inner, _| inner.admission.set_draining(id, draining));
    }

    /// Takes ranks out of choice as a person wishes, or back in.
    pub fn set_drained(&self, id: WorkerId, ranks: &[u16], drained: bool) {
        self.change(|inner, _| inner.admission.set_drained(id, ranks, drained));
    }

    /// Replaces what is known of a worker.
    pub fn update_facts(&self, id: WorkerId, facts: EngineFacts) {
        self.change(|inner, now| inner.admission.update_facts(id, facts, now));
    }

    /// Takes a load report.
    pub fn report(&self, id: WorkerId, ranks: &[RankReport]) {
        self.change(|inner, now| inner.admission.report(id, ranks, now));
    }

    /// Binds nothing while another router still does. Deadlines stand still.
    pub fn set_held(&self, held: bool) {
        self.change(|inner, now| {
            inner.held = held;
            inner.admission.set_paused(held || inner.paused_at.is_some(), now);
        });
    }

    /// Closes the gate for the whole fleet, or opens it.
    pub fn set_paused(&self, paused: bool) {
        self.change(|inner, now| {
            inner.admission.set_paused(paused || inner.held, now);
            self.paused.store(paused, Ordering::Relaxed);
            match (paused, inner.paused_at) {
                (true, None) => inner.paused_at = Some(now),
                (false, Some(since)) => {
                    inner.paused_at = None;
                    let ns = u64::try_from(self.clock.machine(now.since(since)).as_nanos()).unwrap_or(u64::MAX);
                    self.paused_ns.fetch_add(ns, Ordering::Relaxed);
                }
                _ => {}
            }
        });
        if !paused {
            self.opened.notify_waiters();
        }
    }

    /// Waits while rollout control has the gate closed, for calls that need nothing else of the admission.
    ///
    /// # Errors
    /// `QueueFull` when as many of them wait as may be in the queue.
    pub async fn open(&self) -> Result<(), Error> {
        if !self.is_paused() {
            return Ok(());
        }
        let place = Outside::new(self);
        if place.number > self.outside_most {
            let (most, wait) = (self.outside_most as f64, Duration::from_secs(1));
            let message = "the fleet is paused, and as many calls wait for its end as --queue-size allows";
            return Err(Error::new(Kind::QueueFull, Source::Router, message)
                .with_limit(most, place.number as f64)
                .retry_after(wait));
        }
        loop {
            let mut opened = pin!(self.opened.notified());
            // Before the look, so that an end of the pause between the two is not missed.
            opened.as_mut().enable();
            if !self.is_paused() {
                return Ok(());
            }
            opened.await;
        }
    }

    /// Calls that wait in [`Gate::open`].
    pub fn waiting_outside(&self) -> usize {
        self.outside.load(Ordering::Relaxed)
    }

    /// Whether the gate is closed by rollout control.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// How long the fleet was paused since start, the running pause included. Deadlines of requests in flight stand still for it.
    pub fn paused_total(&self) -> Duration {
        let past = Duration::from_nanos(self.paused_ns.load(Ordering::Relaxed));
        if !self.is_paused() {
            return past;
        }
        let since = self.inner.lock().paused_at;
        past + since.map_or(Duration::ZERO, |s| self.clock.machine(self.clock.now().since(s)))
    }

    /// What can be seen of the admission now.
    pub fn snapshot(&self) -> Snapshot {
        self.inner.lock().admission.snapshot(self.clock.now())
    }

    /// Calls the admission whenever time alone makes a decision possible. Runs until it is dropped.
    pub async fn run_timer(&self) {
        loop {
            self.change(|_, _| ());
            let () = ();
            let next = self.inner.lock().due;
            match next {
                Some(at) => {
                    // At least a millisecond between rounds: the timer is no finer than that.
                    let at = self.clock.instant(at).max(std::time::Instant::now() + Duration::from_millis(1));
                    tokio::select! {
                        () = self.wake.notified() => {}
                        () = tokio::time::sleep_until(at.into()) => {}
                    }
                }
                None => self.wake.notified().await,
            }
        }
    }
}

/// Whether the timer must be set anew because of an earlier moment.
fn earlier(before: Option<Moment>, after: Option<Moment>) -> bool {
    match (before, after) {
        (_, None) => false,
        (None, Some(_)) => true,
        (Some(before), Some(after)) => after < before,
    }
}

/// A call that waits for the end of a pause; dropped, it leaves.
struct Outside<'a> {
    gate: &'a Gate,
    number: usize,
}

impl<'a> Outside<'a> {
    fn new(gate: &'a Gate) -> Self {
        Self { gate, number: gate.outside.fetch_add(1, Ordering::Relaxed) + 1 }
    }
}

impl Drop for Outside<'_> {
    fn drop(&mut self) {
        self.gate.outside.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request in the queue; dropped, it leaves.
struct Waiting<'a> {
    gate: &'a Gate,
    ticket: Option<Ticket>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.gate.cancel(ticket);
        }
    }
}
