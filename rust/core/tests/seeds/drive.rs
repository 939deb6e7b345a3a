//! The loop: one event at a time, then the router is polled, and everything is checked.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use r3router_core::admission::{AdmissionConfig, Decision, Permit, Request, Snapshot};
use r3router_core::load::RankReport;
use r3router_core::policy::Targets;
use r3router_core::time::Moment;
use r3router_core::topology::RankId;

use crate::book::{Book, Violation, broken};
use crate::engines::{Engines, Later, Place, Said};
use crate::plan::{Ns, Plan, SEC};
use crate::rng::Rng;
use crate::router::Router;

/// What happens next.
#[derive(Debug)]
pub(crate) enum Event {
    Join(usize),
    Arrive(usize),
    Leave(usize),
    Measure(usize),
    Report(usize, Vec<RankReport>),
    Engine(Later),
    Hear(Said),
    ReachPrefill(usize),
    ReachDecode(usize),
    Abort(usize),
    Deadline(usize),
    Vanish(usize),
    Fault(usize),
    FaultEnds(usize),
    Heard(usize),
    Back(usize),
    Poll,
}

/// An attempt as the client side of the router sees it. Numbered as in the books and at the engines.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) call: usize,
    pub(crate) tries: u32,
    pub(crate) permit: Option<Permit>,
    pub(crate) prefill_done: bool,
    pub(crate) decode_done: bool,
    pub(crate) streams: bool,
}

/// Where a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    ToCome,
    Waits(r3router_core::admission::Ticket, u32),
    Bound(usize),
    Over,
}

/// What happened in a run, to see that runs reach everything.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) steps: u64,
    pub(crate) events: BTreeMap<&'static str, u64>,
    /// Of every decision, in order: two runs of one seed must agree.
    pub(crate) digest: u64,
}

impl Tally {
    pub(crate) fn count(&mut self, what: &'static str) {
        *self.events.entry(what).or_default() += 1;
    }
}

/// How much waits at most before the fleet is whole again.
#[derive(Debug)]
pub(crate) struct Condition {
    pub(crate) silent: bool,
    pub(crate) late: Ns,
    pub(crate) lies: bool,
}

pub(crate) struct Run<'a, R> {
    pub(crate) plan: &'a Plan,
    pub(crate) router: R,
    pub(crate) book: Book,
    pub(crate) engines: Engines,
    pub(crate) rng: Rng,
    pub(crate) now: Ns,
    pub(crate) live: Vec<Live>,
    pub(crate) calls: Vec<State>,
    /// The worker that each planned engine is now; `None` before it joins and after its removal.
    pub(crate) current: Vec<Option<usize>>,
    pub(crate) conditions: Vec<Condition>,
    pub(crate) healed: bool,
    pub(crate) tally: Tally,
    pub(crate) trace: Option<Vec<String>>,
    events: BTreeMap<(Ns, u64), Event>,
    order: u64,
    poll_at: Option<Ns>,
    wakes: Arc<AtomicU64>,
    shown: Snapshot,
}

/// A trace line, made only when somebody reads it.
macro_rules! note {
    ($run:expr, $($text:tt)*) => {
        if let Some(trace) = &mut $run.trace {
            trace.push(format!("{:>12.6} {}", $run.now as f64 / 1e9, format!($($text)*)));
        }
    };
}
pub(crate) use note;

/// What came of a seed.
pub(crate) struct Report {
    pub(crate) tally: Tally,
    pub(crate) failure: Option<Violation>,
    pub(crate) trace: Vec<String>,
}

/// What a dropped permit calls.
pub(crate) type Wake = Box<dyn Fn() + Send + Sync>;

/// Runs a plan against a router made by `make`.
pub(crate) fn run<R: Router>(plan: &Plan, traced: bool, make: impl FnOnce(AdmissionConfig, Wake) -> R) -> Report {
    let wakes = Arc::new(AtomicU64::new(0));
    let told = wakes.clone();
    let wake: Wake = Box::new(move || {
        told.fetch_add(1, Ordering::Relaxed);
    });
    let mut run = Run {
        plan,
        router: make(plan.config.clone(), wake),
        book: Book::new(plan.config.clone()),
        engines: Engines::default(),
        rng: Rng::new(plan.run),
        now: SEC,
        live: Vec::new(),
        calls: vec![State::ToCome; plan.calls.len()],
        current: vec![None; plan.engines.len()],
        conditions: plan.engines.iter().map(|_| Condition { silent: false, late: 0, lies: false }).collect(),
        healed: false,
        tally: Tally::default(),
        trace: traced.then(Vec::new),
        events: BTreeMap::new(),
        order: 0,
        poll_at: None,
        wakes,
        shown: Snapshot::default(),
    };
    let failure = run.whole().err();
    if failure.is_some() {
        run.describe();
    }
    // A run that was cut short still holds permits; they go back to nobody.
    Report { tally: run.tally, failure, trace: run.trace.take().unwrap_or_default() }
}

impl<R: Router> Run<'_, R> {
    pub(crate) fn at(&mut self, when: Ns, event: Event) {
        self.order += 1;
        self.events.insert((when, self.order), event);
    }

    fn whole(&mut self) -> Result<(), Violation> {
        let mut heal = SEC;
        for (engine, joins) in self.plan.joins.iter().enumerate() {
            self.at(SEC + joins, Event::Join(engine));
            heal = heal.max(SEC + joins);
        }
        for (index, call) in self.plan.calls.iter().enumerate() {
            self.at(SEC + call.at, Event::Arrive(index));
            heal = heal.max(SEC + call.at);
        }
        for (index, (when, fault)) in self.plan.faults.iter().enumerate() {
            self.at(SEC + when, Event::Fault(index));
            heal = heal.max(SEC + when + fault.lasts() + SEC);
        }
        let limit = heal + self.patience();
        while let Some(((when, _), event)) = self.events.pop_first() {
            if !self.healed && when > heal {
                self.now = heal;
                self.heal();
                self.absorb();
                self.poll()?;
            }
            self.now = when;
            if when > limit {
                let waits = self.book.queued;
                let open = self.live.iter().filter(|l| l.permit.is_some()).count();
                return broken(
                    "starved",
                    format!("{waits} requests wait and {open} are open long after the fleet is whole"),
                );
            }
            self.step(event)?;
            if self.healed
                && self.calls.iter().all(|c| *c == State::Over)
                && self.live.iter().all(|l| l.permit.is_none())
            {
                return self.rest();
            }
        }
        broken("starved", format!("nothing more happens and {} requests wait", self.book.queued))
    }

    /// What the router shows when a promise breaks, at the end of the trace.
    fn describe(&mut self) {
        if self.trace.is_none() {
            return;
        }
        let s = self.router.snapshot(Moment(self.now));
        let decisions: Vec<_> = s.decisions.iter().filter(|(_, n)| *n > 0).collect();
        note!(self, "policies {:?}", self.plan.config.policies.of);
        note!(self, "queued {} arena {} decisions {decisions:?}", s.queued, s.arena_reserved);
        for w in self.book.waiting.values().flatten().take(6) {
            let need = (w.prompt, w.max_new, w.arena, w.texts);
            let names = w.targets;
            note!(
                self,
                "  {:?} waits: prompt, max_new, arena, texts {need:?} overtaken {} {names:?}",
                w.ticket,
                w.overtaken
            );
        }
        for held in self.engines.held() {
            note!(self, "  engines hold attempt {held}");
        }
        for v in &s.ranks {
            let load = format!(
                "open {} transfer {} foreign {} uncached {}",
                v.open, v.in_transfer, v.foreign, v.uncached_tokens
            );
            let free = (v.rows_free, v.metadata_free, v.mamba_free, v.kv_free);
            let (window, r3) = (v.window, v.r3_bytes);
            note!(
                self,
                "  {}@{} {:?} {load} window {window} free {free:?} r3 {r3} age {:.2}",
                v.url,
                v.rank,
                v.closed,
                v.report_age
            );
        }
    }

    /// How long the whole work may take one after the other, and the cool-downs.
    fn patience(&self) -> Ns {
        let slowest =
            |f: fn(&crate::plan::Truth) -> u64| self.plan.engines.iter().map(|e| f(&e.truth)).min().unwrap_or(1).max(1);
        let (rate, egress) = (slowest(|t| t.rate), slowest(|t| t.egress));
        let step = self.plan.engines.iter().map(|e| e.truth.step).max().unwrap_or(1);
        let each = |c: &crate::plan::Call| {
            let text = c.r3.map_or(0, |r| r.prefill_text + r.decode_text);
            u64::from(c.prompt) * SEC / rate + u64::from(c.out) * step + text * SEC / egress + 2 * SEC
        };
        self.plan.calls.iter().map(each).sum::<Ns>() * 3 + 2000 * SEC
    }

    fn step(&mut self, event: Event) -> Result<(), Violation> {
        self.tally.steps += 1;
        let quiet = matches!(event, Event::Engine(_) | Event::Measure(_));
        let only_time = matches!(event, Event::Poll);
        if matches!(event, Event::Poll) {
            if self.poll_at != Some(self.now) {
                return Ok(());
            }
            self.poll_at = None;
        }
        self.handle(event)?;
        self.absorb();
        if quiet {
            return Ok(());
        }
        // Now and then several things happen before the next poll.
        if self.rng.percent(12) && self.poll_at.is_none_or(|at| at > self.now) {
            let soon = self.now + 1 + self.rng.range(0, 500_000);
            self.poll_at = Some(soon);
            self.at(soon, Event::Poll);
            return Ok(());
        }
        self.poll_after(only_time)
    }

    /// Takes over what the engines will do and have said.
    pub(crate) fn absorb(&mut self) {
        for (when, later) in std::mem::take(&mut self.engines.later) {
            self.at(when, Event::Engine(later));
        }
        for (when, said) in std::mem::take(&mut self.engines.said) {
            let net = self.plan.net;
            self.at(when + net, Event::Hear(said));
        }
    }

    pub(crate) fn poll(&mut self) -> Result<(), Violation> {
        self.poll_after(false)
    }

    /// Polls and checks. Where only time has passed and nothing was decided, the ledgers are looked at now and then.
    fn poll_after(&mut self, only_time: bool) -> Result<(), Violation> {
        self.book.forget_old_leaks(self.now);
        let mut decisions = Vec::new();
        let next = self.router.poll(Moment(self.now), &mut decisions);
        let mut touched = Vec::new();
        let unchanged = only_time && decisions.is_empty() && !self.tally.steps.is_multiple_of(8);
        for decision in decisions {
            self.decide(decision, &mut touched)?;
        }
        self.book.check_timer(next.map(|n| n.0))?;
        if let Some(next) = next {
            if next.0 <= self.now {
                return broken("timers", format!("poll asks to be called again at {}, it is {}", next.0, self.now));
            }
            self.poll_at = None;
            if next != Moment::NEVER {
                self.poll_at = Some(next.0);
                self.at(next.0, Event::Poll);
            }
        }
        self.book.check_waiting(self.now)?;
        if !unchanged {
            let shown = self.router.snapshot(Moment(self.now));
            self.book.check_snapshot(&shown)?;
            self.book.check_window(&self.shown, &shown, &touched)?;
            self.shown = shown;
        }
        Ok(())
    }

    fn decide(&mut self, decision: Decision, touched: &mut Vec<Place>) -> Result<(), Violation> {
        match decision {
            Decision::Bind(binding) => {
                note!(
                    self,
                    "bind {:?} p {:?} d {:?} room {}",
                    binding.ticket,
                    binding.prefill,
                    binding.decode,
                    binding.room
                );
                self.tally.count("bound");
                self.mix(
                    binding.ticket.0 ^ binding.room ^ binding.decode.worker.0 << 32 ^ u64::from(binding.decode.rank),
                );
                let (waiting, prefill, decode) = self.book.check_binding(&binding, self.now)?;
                let attempt = self.book.bind(&waiting, prefill, decode, self.now);
                let on_the_way = prefill.map_or(0, |p| self.on_the_way(p));
                self.book.check_capacity(attempt, &waiting, on_the_way, self.now)?;
                touched.push(decode);
                self.send(waiting.call, prefill, decode, binding.permit);
            }
            Decision::Refuse(ticket, error) => {
                note!(self, "refuse {ticket:?} {error}");
                self.tally.count(error.kind.code());
                self.mix(ticket.0 ^ error.kind.code().len() as u64);
                let Some(waiting) = self.book.unqueue(ticket) else {
                    return broken("cancelled", format!("{ticket:?} is refused and does not wait"));
                };
                self.book.check_refusal(&waiting, &error, self.now)?;
                self.calls[waiting.call] = State::Over;
            }
        }
        Ok(())
    }

    /// The most tokens that a prefill rank computes while a request is on its way in, or its KV and its reply on their way out.
    fn on_the_way(&self, prefill: Place) -> u64 {
        let truth = self.engines.truth(prefill.0);
        let text = self.plan.calls.iter().filter_map(|c| c.r3).map(|r| r.prefill_text).max().unwrap_or(0);
        let way = truth.transfer + 4 * self.plan.net + text * SEC / truth.egress.max(1) + SEC / 50;
        4 * truth.rate * (way / 1_000_000) / 1000
    }

    fn mix(&mut self, bits: u64) {
        self.tally.digest = (self.tally.digest ^ bits ^ self.now).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
    }

    fn send(&mut self, call: usize, prefill: Option<Place>, decode: Place, permit: Permit) {
        let tries = match self.calls[call] {
            State::Waits(_, tries) => tries,
            _ => 0,
        };
        // A retry meets an engine that works, and so does every attempt once the fleet is whole.
        let stuck = tries == 0 && !self.healed && self.plan.calls[call].fate == crate::plan::Fate::Stuck;
        let job = self.engines.job(prefill, decode, &self.plan.calls[call], stuck);
        let streams = self.rng.percent(50);
        self.live.push(Live {
            call,
            tries,
            permit: Some(permit),
            prefill_done: prefill.is_none(),
            decode_done: false,
            streams,
        });
        self.calls[call] = State::Bound(job);
        let net = self.plan.net;
        let (first, second) = (self.now + net, self.now + net + self.rng.range(0, 2 * net));
        if self.rng.percent(50) {
            self.at(first, Event::ReachPrefill(job));
            self.at(second, Event::ReachDecode(job));
        } else {
            self.at(second, Event::ReachPrefill(job));
            self.at(first, Event::ReachDecode(job));
        }
        // A regular engine that does not stream shows no first token: nothing to wait for.
        if prefill.is_some() || streams {
            self.at(self.now + self.plan.delivery, Event::Deadline(job));
        }
        if let crate::plan::Fate::Vanishes(after) = self.plan.calls[call].fate {
            self.at(self.now + after, Event::Vanish(job));
        }
    }

    /// Queues a call or a retry of it.
    pub(crate) fn submit(&mut self, call: usize, tries: u32, avoid: Vec<RankId>) -> Result<(), Violation> {
        let c = &self.plan.calls[call];
        let deadline = c.patience.map_or(Moment::NEVER, |p| Moment(SEC + c.at + p));
        let request = Request {
            prompt_tokens: c.prompt,
            max_new_tokens: c.max_new,
            key: c.key,
            prefix: c.prefix.clone(),
            deadline,
            body_bytes: c.body,
            r3: c.r3,
            avoid,
            retry: tries > 0,
            targets: c.names.map_or_else(Targets::default, |n| self.book.targets(n)),
        };
        if request.targets.any() {
            self.tally.count("names a worker");
        }
        let answer = self.router.submit(request.clone(), Moment(self.now));
        note!(
            self,
            "submit call {call} prompt {} key {} retry {} to {:?}: {answer:?}",
            c.prompt,
            c.key,
            request.retry,
            request.targets
        );
        self.book.check_submit(&request, answer.as_ref().map(|_| ()), self.now)?;
        match answer {
            Ok(ticket) => {
                if self.book.gone.contains(&ticket) || self.book.find(ticket).is_some() {
                    return broken("queue", format!("{ticket:?} was given out twice"));
                }
                self.book.queue(ticket, call, &request, self.now);
                self.calls[call] = State::Waits(ticket, tries);
            }
            Err(error) => {
                self.tally.count(error.kind.code());
                self.calls[call] = State::Over;
            }
        }
        Ok(())
    }

    /// Drops a permit, as a task does that goes away; the router must be woken.
    pub(crate) fn let_go(&mut self, job: usize) -> Result<(), Violation> {
        let before = self.wakes.load(Ordering::Relaxed);
        drop(self.live[job].permit.take());
        if self.wakes.load(Ordering::Relaxed) != before + 1 {
            return broken("wake", format!("a dropped permit of attempt {job} woke nobody"));
        }
        self.book.finish(job, false, self.now);
        Ok(())
    }

    /// At rest the ledgers are the engines' truth: once with foreign load on some ranks, and once without.
    fn rest(&mut self) -> Result<(), Violation> {
        // Whatever is left at the engines ends by their own clocks.
        self.now += 700 * SEC;
        while let Some((_, event)) = self.events.pop_first() {
            if let Event::Engine(_) | Event::Abort(_) | Event::ReachPrefill(_) | Event::ReachDecode(_) = event {
                self.handle(event)?;
                self.absorb();
            }
        }
        if self.engines.holds() != 0 {
            return broken("truth", format!("engines hold {} requests that nobody waits for", self.engines.holds()));
        }
        let mut foreign = Vec::new();
        for busy in [true, false] {
            for worker in self.current.clone().into_iter().flatten() {
                let decodes = self.book.workers[worker].role != r3router_core::topology::Role::Prefill;
                for rank in 0..self.book.workers[worker].ranks.len() {
                    let (most, pool) = (self.engines.truth(worker).max_running, self.engines.truth(worker).pool);
                    let some = busy && decodes && self.rng.percent(30);
                    let rows = if some { self.rng.range(0, u64::from(most)) as u32 } else { 0 };
                    self.engines.foreign((worker, rank), rows, if rows > 0 { pool / 3 } else { 0 });
                    if rows > 0 {
                        foreign.push(((worker, rank), rows));
                    }
                }
            }
            // One report may be hidden by what is on its way; a few may not.
            for _ in 0..4 {
                self.now += SEC;
                for worker in self.current.clone().into_iter().flatten() {
                    if self.book.workers[worker].facts.reports_load {
                        let reports = self.engines.report(worker, self.now);
                        self.handle(Event::Report(worker, reports))?;
                    }
                }
                self.now += 1000;
                self.poll()?;
            }
            self.book.check_quiet(&self.shown, &foreign)?;
            foreign.clear();
        }
        if self.plan.honest && (self.engines.timeouts > 0 || self.engines.queued_for_slots > 0) {
            let (timeouts, slots) = (self.engines.timeouts, self.engines.queued_for_slots);
            return broken(
                "truth",
                format!("an honest fleet saw {timeouts} timeouts and {slots} requests without a slot"),
            );
        }
        Ok(())
    }
}
