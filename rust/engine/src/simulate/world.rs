//! The event loop: the fleet's model, the client and the router in one virtual time.
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use r3router_core::admission::{Admission, Decision, Outcome, Ticket};
use r3router_core::error::Kind;
use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use r3router_core::topology::{RankId, WorkerId};

use super::attempt::{Attempt, Leg, LegState, outcome};
use super::bodies::{body_bytes, request, spec};
use super::plain::Plain;
use super::report::{Report, Tally};
use super::scenario::{Happening, Scenario};
use super::workload::{Job, draw};
use crate::model::{Ask, Bootstrap, Effect, EngineConfig, EngineId, Event, Fleet, Key, Reply};

/// One way between router and engines.
const NETWORK: Duration = Duration::from_micros(200);
/// Keys of attempts are `2 x number + leg`; those of polls are above this.
const POLL_KEYS: u64 = 1 << 48;

/// What the client and the network will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Soon {
    Arrive(usize),
    Poll(u16),
    /// A generate request of an attempt reaches its engine.
    Send(u64, bool),
    /// An abort and a close of an attempt's leg reach its engine.
    Drop(u64, bool),
    Fault(usize),
}

/// The two kinds of router.
enum Router {
    Core(Box<Admission>),
    Plain(Box<Plain>),
}

/// How a request of the client stands.
#[derive(Clone, Default)]
pub(super) struct Case {
    pub(super) arrived: Moment,
    pub(super) retries: u32,
    pub(super) avoid: Vec<RankId>,
    over: bool,
}

/// Everything of one run.
pub(super) struct World<'a> {
    scenario: &'a Scenario,
    engines: Vec<EngineConfig>,
    fleet: Fleet,
    now: Moment,
    soon: BinaryHeap<Reverse<(Moment, u64, Soon)>>,
    order: u64,
    router: Router,
    /// Worker of each engine, and back.
    workers: Vec<WorkerId>,
    places: HashMap<WorkerId, EngineId>,
    jobs: Vec<Job>,
    cases: Vec<Case>,
    next_job: usize,
    tickets: HashMap<Ticket, usize>,
    attempts: HashMap<u64, Attempt>,
    attempt_no: u64,
    polls: u64,
    /// The admission has something new to decide on.
    stirred: bool,
    wake: Option<Moment>,
    open: u32,
    tally: Tally,
}

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> Self {
        let engines = scenario.fleet.engines();
        let block = engines.first().map_or(256, |c| c.prefix_block);
        let jobs = draw(scenario, block);
        let mut router = if scenario.router.admission {
            Router::Core(Box::new(Admission::new(super::admission_config(scenario), Box::new(|| {}))))
        } else {
            Router::Plain(Box::new(Plain::new(scenario.baseline.placement, &engines, scenario.router.seed)))
        };
        let mut workers = Vec::new();
        for (i, config) in engines.iter().enumerate() {
            workers.push(match &mut router {
                Router::Core(admission) => admission.add_worker(spec(i, config), Moment::ZERO),
                Router::Plain(_) => WorkerId(i as u64),
            });
        }
        let places = workers.iter().enumerate().map(|(i, w)| (*w, EngineId(i as u16))).collect();
        Self {
            scenario,
            fleet: Fleet::new(engines.clone()),
            engines,
            now: Moment::ZERO,
            soon: BinaryHeap::new(),
            order: 0,
            router,
            workers,
            places,
            cases: vec![Case::default(); jobs.len()],
            jobs,
            next_job: 0,
            tickets: HashMap::new(),
            attempts: HashMap::new(),
            attempt_no: 0,
            polls: 0,
            stirred: false,
            wake: None,
            open: 0,
            tally: Tally::default(),
        }
    }

    fn later(&mut self, at: Moment, what: Soon) {
        self.order += 1;
        self.soon.push(Reverse((at, self.order, what)));
    }

    /// Runs until every request has ended, or the limit.
    pub(super) fn run(mut self) -> Report {
        let limit = Moment::from_secs_f64(self.scenario.limit_s);
        self.begin();
        let mut effects = Vec::new();
        let mut cut_off = false;
        while self.open > 0 || self.next_job < self.jobs.len() {
            let next =
                [self.fleet.next_timer(), self.soon.peek().map(|e| e.0.0), self.wake].into_iter().flatten().min();
            let Some(next) = next.filter(|at| *at <= limit) else {
                cut_off = true;
                break;
            };
            self.now = self.now.max(next);
            self.fleet.advance(self.now, &mut effects);
            self.handle(&mut effects);
            while self.soon.peek().is_some_and(|e| e.0.0 <= self.now) {
                let Some(Reverse((_, _, what))) = self.soon.pop() else { break };
                self.happen(what, &mut effects);
                self.handle(&mut effects);
            }
            self.decide();
        }
        let first = self.cases.iter().map(|c| c.arrived).filter(|at| *at > Moment::ZERO).min().unwrap_or_default();
        let end = if cut_off { self.now } else { self.tally.last_end };
        let makespan = end.since(first).as_secs_f64().max(1e-9);
        if let Router::Core(admission) = &self.router {
            self.tally.decisions = admission.snapshot(self.now).decisions;
        }
        self.tally.report(self.scenario, &self.fleet, makespan, cut_off)
    }

    fn begin(&mut self) {
        let every = Duration::from_millis(self.scenario.router.poll_ms);
        if matches!(self.router, Router::Core(_)) {
            for engine in 0..self.engines.len() as u16 {
                // Not all at one moment, as a poller with one timer an engine does.
                self.later(Moment::ZERO + every * u32::from(engine) / self.engines.len() as u32, Soon::Poll(engine));
            }
        }
        for (i, fault) in self.scenario.faults.iter().enumerate() {
            self.later(Moment::from_secs_f64(fault.at_s), Soon::Fault(i));
        }
        // Loads are known before the first request arrives.
        let start = Moment::ZERO + every * 2;
        if let Some(n) = self.scenario.workload.concurrency {
            for _ in 0..n {
                self.next_arrival(start);
            }
        } else {
            for i in 0..self.jobs.len() {
                let at = start + self.jobs[i].at.since(Moment::ZERO);
                self.later(at, Soon::Arrive(i));
            }
            self.next_job = self.jobs.len();
            self.open = self.jobs.len() as u32;
        }
    }

    /// Closed loop: the next request, if any is left.
    fn next_arrival(&mut self, at: Moment) {
        if self.next_job < self.jobs.len() {
            self.later(at, Soon::Arrive(self.next_job));
            self.next_job += 1;
            self.open += 1;
        }
    }

    fn happen(&mut self, what: Soon, effects: &mut Vec<(Moment, EngineId, Effect)>) {
        match what {
            Soon::Arrive(job) => {
                self.cases[job].arrived = self.now;
                self.submit(job);
            }
            Soon::Poll(engine) => {
                self.polls += 1;
                let key = Key(POLL_KEYS + self.polls);
                self.fleet.step(EngineId(engine), Event::Loads { key }, self.now, effects);
                let next = self.now + Duration::from_millis(self.scenario.router.poll_ms);
                self.later(next, Soon::Poll(engine));
            }
            Soon::Send(number, decode) => {
                let leg = if decode { Leg::Decode } else { Leg::Prefill };
                if let Some((engine, event)) = self.generate(number, leg) {
                    self.fleet.step(engine, event, self.now, effects);
                }
            }
            Soon::Drop(number, decode) => {
                if let Some(attempt) = self.attempts.get(&number) {
                    let leg = if decode { Leg::Decode } else { Leg::Prefill };
                    let (engine, rid) = (attempt.engine(leg), attempt.rid.clone());
                    self.polls += 1;
                    let key = Key(POLL_KEYS + self.polls);
                    self.fleet.step(engine, Event::Abort { key, rid, all: false }, self.now, effects);
                    let key = Key(number * 2 + u64::from(decode));
                    self.fleet.step(engine, Event::Disconnect { key }, self.now, effects);
                    if !decode {
                        self.attempts.remove(&number);
                    }
                }
            }
            Soon::Fault(i) => self.fault(i, effects),
        }
    }

    fn fault(&mut self, i: usize, effects: &mut Vec<(Moment, EngineId, Effect)>) {
        let fault = &self.scenario.faults[i];
        let (Some(engine), Ok(what)) = (self.scenario.fault_engine(&fault.engine), fault.happening()) else { return };
        self.polls += 1;
        let key = Key(POLL_KEYS + self.polls);
        let event = match what {
            Happening::Fault(fault) => Event::Fault(fault),
            Happening::Pause(mode) => Event::Pause { key, mode },
            Happening::Continue => Event::Continue { key },
        };
        self.fleet.step(EngineId(engine), event, self.now, effects);
    }

    /// A request reaches the router.
    fn submit(&mut self, job: usize) {
        match &mut self.router {
            Router::Core(admission) => {
                let request = request(self.scenario, &self.jobs[job], &self.cases[job]);
                match admission.submit(request, self.now) {
                    Ok(ticket) => {
                        self.tickets.insert(ticket, job);
                        self.stirred = true;
                    }
                    Err(error) => self.refuse(job, error.kind),
                }
            }
            Router::Plain(plain) => {
                let (prefill, decode, room) = plain.place(&self.jobs[job]);
                self.bind(job, prefill, decode, room, None, None);
            }
        }
    }

    /// Asks the admission for decisions whenever something changed, or it asked to be asked.
    fn decide(&mut self) {
        let due = self.wake.is_some_and(|at| at <= self.now);
        if !self.stirred && !due {
            return;
        }
        self.stirred = false;
        let mut decisions = Vec::new();
        let Router::Core(admission) = &mut self.router else { return };
        // A wake-up at this very moment would be a loop without time.
        self.wake = admission.poll(self.now, &mut decisions).map(|at| at.max(Moment(self.now.0 + 1)));
        for decision in decisions {
            match decision {
                Decision::Bind(binding) => {
                    let Some(job) = self.tickets.remove(&binding.ticket) else { continue };
                    let prefill = binding.prefill.unwrap_or(binding.decode);
                    let places =
                        (self.places.get(&prefill.worker).copied(), self.places.get(&binding.decode.worker).copied());
                    let (Some(p), Some(d)) = places else { continue };
                    let ranks = Some((prefill, binding.decode));
                    self.bind(
                        job,
                        (p, prefill.rank),
                        (d, binding.decode.rank),
                        binding.room,
                        Some(binding.permit),
                        ranks,
                    );
                }
                Decision::Refuse(ticket, error) => {
                    if let Some(job) = self.tickets.remove(&ticket) {
                        self.refuse(job, error.kind);
                    }
                }
            }
        }
    }

    fn bind(
        &mut self,
        job: usize,
        prefill: (EngineId, u16),
        decode: (EngineId, u16),
        room: u64,
        permit: Option<r3router_core::admission::Permit>,
        ranks: Option<(RankId, RankId)>,
    ) {
        self.attempt_no += 1;
        let number = self.attempt_no;
        let attempt = Attempt {
            job,
            bound: self.now,
            prefill: prefill.0,
            decode: decode.0,
            prefill_rank: prefill.1,
            decode_rank: decode.1,
            room,
            ranks,
            // The full stop keeps one rid from being a prefix of another.
            rid: format!("{number}.").into(),
            permit,
            legs: [LegState::Open; 2],
            delivered: false,
            first_token: Moment::ZERO,
        };
        self.attempts.insert(number, attempt);
        self.later(self.now + NETWORK, Soon::Send(number, false));
        self.later(self.now + NETWORK, Soon::Send(number, true));
    }

    /// The body of one leg.
    fn generate(&self, number: u64, leg: Leg) -> Option<(EngineId, Event)> {
        let attempt = self.attempts.get(&number)?;
        let job = &self.jobs[attempt.job];
        let decode = leg == Leg::Decode;
        let rewrite = decode && self.scenario.router.start_len_rewrite && self.scenario.router.admission;
        let ask = Ask {
            rid: Arc::clone(&attempt.rid),
            prompt_tokens: job.prompt,
            prefix: Arc::clone(&job.prefix),
            output_tokens: job.output,
            max_new_tokens: job.max_new,
            stream: job.stream && decode,
            r3_start: job.r3.then_some(if rewrite { job.prompt } else { 0 }),
            body_bytes: body_bytes(job),
            bootstrap: Some(Bootstrap { prefill: Some(attempt.prefill), room: attempt.room }),
            routed_dp_rank: Some(if decode { attempt.decode_rank } else { attempt.prefill_rank }),
            prefill_dp_rank: Some(attempt.prefill_rank),
        };
        Some((attempt.engine(leg), Event::Generate { key: Key(number * 2 + u64::from(decode)), ask }))
    }

    fn handle(&mut self, effects: &mut Vec<(Moment, EngineId, Effect)>) {
        for (at, engine, effect) in effects.drain(..) {
            match effect {
                Effect::Answer { key, .. } if key.0 > POLL_KEYS => self.loads(engine),
                Effect::Chunk { key, tokens: 1 } => self.first_token(key.0 / 2, at),
                Effect::Done { key, reply } => self.leg_done(key, Some(&reply)),
                Effect::Reset { key } if key.0 < POLL_KEYS => self.leg_done(key, None),
                _ => {}
            }
        }
    }

    /// A poll came back.
    fn loads(&mut self, engine: EngineId) {
        let Router::Core(admission) = &mut self.router else { return };
        let reports: Vec<RankReport> = self.fleet.loads(engine).iter().map(crate::model::RankLoad::report).collect();
        admission.report(self.workers[usize::from(engine.0)], &reports, self.now);
        self.stirred = true;
    }

    fn first_token(&mut self, number: u64, at: Moment) {
        let Some(attempt) = self.attempts.get_mut(&number) else { return };
        attempt.first_token = at;
        self.deliver(number);
    }

    fn deliver(&mut self, number: u64) {
        let (Router::Core(admission), Some(attempt)) = (&mut self.router, self.attempts.get_mut(&number)) else {
            return;
        };
        if !std::mem::replace(&mut attempt.delivered, true)
            && let Some(permit) = &attempt.permit
        {
            admission.delivered(permit, self.now);
            self.stirred = true;
        }
    }

    fn leg_done(&mut self, key: Key, reply: Option<&Reply>) {
        let (number, leg) = (key.0 / 2, if key.0 % 2 == 1 { Leg::Decode } else { Leg::Prefill });
        let Some(attempt) = self.attempts.get_mut(&number) else { return };
        let failed = outcome(leg, reply.map(|r| &r.finish));
        *attempt.state(leg) = if failed.is_some() { LegState::Failed } else { LegState::Answered };
        if leg == Leg::Decode
            && let Some(reply) = reply.filter(|r| r.times.first_token > Moment::ZERO)
        {
            attempt.first_token = reply.times.first_token;
        }
        if let Some(failed) = failed {
            if let Some(reply) = reply {
                let text = super::reason(&reply.finish);
                *self.tally.reasons.entry(text).or_default() += 1;
            }
            self.leg_failed(number, leg, failed);
            return;
        }
        if let Some(reply) = reply {
            self.emitted(number, leg, reply);
        }
        if leg == Leg::Prefill || self.attempts.get(&number).is_some_and(|a| a.legs == [LegState::Answered; 2]) {
            self.deliver(number);
        }
        let Some(attempt) = self.attempts.get_mut(&number) else { return };
        let both = !attempt.legs.contains(&LegState::Open);
        if let (Router::Core(admission), Some(permit)) = (&mut self.router, &attempt.permit) {
            admission.leg_ended(permit, leg.role(), self.now);
            self.stirred = true;
        }
        if both {
            let done = attempt.legs == [LegState::Answered; 2];
            let output_tokens = self.jobs[attempt.job].output;
            self.close(number, if done { Outcome::Completed { output_tokens } } else { Outcome::Cancelled });
        }
    }

    /// What the router measures of R3 leaving an engine: bytes, and the time from the first to the last of them.
    fn emitted(&mut self, number: u64, leg: Leg, reply: &Reply) {
        let Some(attempt) = self.attempts.get(&number) else { return };
        let place = usize::from(attempt.engine(leg).0);
        let Some(r3) = reply.r3.filter(|r| !r.by_reference && r.rows > 0) else { return };
        if let Router::Core(admission) = &mut self.router {
            let cost = &self.engines[place].r3;
            let raw = f64::from(r3.rows) * f64::from(cost.row_bytes);
            let took = Duration::from_secs_f64(raw / cost.http_write);
            admission.emitted(self.workers[place], r3.text_bytes, took, self.now);
        }
    }

    /// Our router ends the attempt: the other leg is aborted, decode first. A plain router joins both.
    fn leg_failed(&mut self, number: u64, leg: Leg, failed: Outcome) {
        let Some(attempt) = self.attempts.get_mut(&number) else { return };
        if matches!(self.router, Router::Plain(_)) {
            if !attempt.legs.contains(&LegState::Open) {
                self.close(number, failed);
            }
            return;
        }
        let other_open = *attempt.state(leg.other()) == LegState::Open;
        let (job, ranks) = (attempt.job, attempt.ranks);
        let retryable =
            matches!(failed, Outcome::Failed { .. }) && self.cases[job].retries < self.scenario.router.retries;
        if let (Router::Core(admission), Some(permit)) = (&mut self.router, attempt.permit.take()) {
            admission.finish(permit, failed, self.now);
            self.stirred = true;
        }
        if other_open {
            self.later(self.now + NETWORK, Soon::Drop(number, leg == Leg::Prefill));
        } else {
            self.attempts.remove(&number);
        }
        if retryable {
            self.tally.retried += 1;
            self.cases[job].retries += 1;
            if let Some((p, d)) = ranks {
                self.cases[job].avoid.push(if leg == Leg::Prefill { p } else { d });
            }
            self.submit(job);
        } else {
            self.end(job, false);
        }
    }

    fn close(&mut self, number: u64, outcome: Outcome) {
        let Some(mut attempt) = self.attempts.remove(&number) else { return };
        if let (Router::Core(admission), Some(permit)) = (&mut self.router, attempt.permit.take()) {
            admission.finish(permit, outcome, self.now);
            self.stirred = true;
        }
        let completed = matches!(outcome, Outcome::Completed { .. });
        if completed {
            self.tally.router_waits.push(attempt.bound.since(self.cases[attempt.job].arrived).as_secs_f64());
            self.tally.engine_waits.push(attempt.first_token.since(attempt.bound).as_secs_f64());
        }
        self.end(attempt.job, completed);
    }

    fn refuse(&mut self, job: usize, kind: Kind) {
        self.tally.refused += 1;
        *self.tally.reasons.entry(format!("router: {}", kind.code())).or_default() += 1;
        self.end(job, false);
    }

    /// The client has its answer.
    fn end(&mut self, job: usize, completed: bool) {
        if std::mem::replace(&mut self.cases[job].over, true) {
            return;
        }
        self.open -= 1;
        self.tally.last_end = self.now;
        if completed {
            self.tally.completed += 1;
            self.tally.tokens += u64::from(self.jobs[job].output);
            self.tally.latencies.push(self.now.since(self.cases[job].arrived).as_secs_f64());
        } else {
            self.tally.failed += 1;
        }
        if self.scenario.workload.concurrency.is_some() {
            self.next_arrival(self.now);
        }
    }
}
