//! What each event does: to the engines, to the router, and to the books.
use std::time::Duration;

use r3router_core::admission::{Failure, Outcome};
use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use r3router_core::topology::{RankId, Role, WorkerSpec};

use crate::book::{Violation, Worker};
use crate::drive::{Event, Run, State, note};
use crate::engines::{Place, Said};
use crate::plan::{Fate, Ns, SEC};
use crate::router::Router;

/// A report for the trace.
fn brief(r: &RankReport) -> String {
    let n = |v: Option<u32>| v.map_or("-".to_owned(), |v| v.to_string());
    let tokens = r.used_tokens.or(r.waiting_uncached_tokens).map_or("-".to_owned(), |v| v.to_string());
    let (running, waiting, transfer) = (n(r.running), n(r.waiting_total), n(r.transfer));
    let (retracted, mamba) = (n(r.retracted), n(r.mamba_free));
    let at = r.measured_at.as_secs_f64();
    let limits = (r.max_running, r.max_total_tokens);
    format!(
        "[@{} t {at:.3} run {running} wait {waiting} transfer {transfer} retracted {retracted} mamba {mamba} tokens {tokens} {limits:?}]",
        r.rank
    )
}

impl<R: Router> Run<'_, R> {
    pub(crate) fn handle(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Join(engine) => self.join(engine),
            Event::Arrive(call) => {
                self.submit(call, 0, Vec::new())?;
                if let Some(leaves) = self.plan.calls[call].leaves {
                    self.at(self.now + leaves, Event::Leave(call));
                }
            }
            Event::Leave(call) => self.leave(call)?,
            Event::Measure(worker) => self.measure(worker),
            Event::Report(worker, reports) => {
                if self.trace.is_some() {
                    let text: Vec<_> = reports.iter().map(brief).collect();
                    note!(self, "report of worker {worker}: {}", text.join(", "));
                }
                // A report that arrives after the removal is told too; it must change nothing.
                self.router.report(self.book.workers[worker].id, &reports, Moment(self.now));
                self.book.report(worker, &reports, self.now);
            }
            Event::Engine(later) => self.engines.later(later, self.now),
            Event::Hear(said) => self.hear(said)?,
            Event::ReachPrefill(job) => self.reach(job, Role::Prefill),
            Event::ReachDecode(job) => self.reach(job, Role::Decode),
            Event::Abort(job) => self.engines.abort(job, self.now),
            Event::Deadline(job) => {
                if self.live[job].permit.is_some() && self.book.attempts[job].delivered.is_none() {
                    self.tally.count("delivery deadline");
                    let role = self.book.workers[self.book.attempts[job].decode.0].role;
                    self.fail(job, role, Failure::Deadline)?;
                }
            }
            Event::Vanish(job) => {
                if self.live[job].permit.is_some() {
                    note!(self, "the task of attempt {job} goes away");
                    self.tally.count("dropped permit");
                    self.let_go(job)?;
                    self.over(job);
                }
            }
            Event::Fault(index) => self.fault(index),
            Event::FaultEnds(index) => self.fault_ends(index),
            Event::Heard(engine) => self.heard(engine),
            Event::Back(engine) => {
                self.heard(engine);
                self.join(engine);
            }
            Event::Poll => {}
        }
        Ok(())
    }

    /// A process starts and is registered: always a new generation.
    pub(crate) fn join(&mut self, engine: usize) {
        if self.current[engine].is_some() {
            return;
        }
        let planned = &self.plan.engines[engine];
        let spec = WorkerSpec {
            url: planned.url.clone(),
            role: planned.role,
            ranks: planned.ranks,
            facts: planned.told.clone(),
        };
        let id = self.router.add_worker(spec, Moment(self.now));
        note!(self, "worker {} is {} as {id:?}: {:?}", self.book.workers.len(), planned.url, planned.told);
        let worker = self.engines.start(planned);
        self.book.workers.push(Worker {
            id,
            url: planned.url.clone(),
            role: planned.role,
            since: self.now,
            facts: planned.told.clone(),
            registered: true,
            draining: false,
            tainted: false,
            charged: 0,
            connect_failed: None,
            ranks: vec![crate::book::Rank { empty_reports: 3, ..Default::default() }; usize::from(planned.ranks)],
        });
        self.current[engine] = Some(worker);
        let first = self.rng.range(0, planned.every);
        self.at(self.now + first, Event::Measure(worker));
    }

    /// The router hears that an engine is gone.
    pub(crate) fn heard(&mut self, engine: usize) {
        if let Some(worker) = self.current[engine]
            && !self.engines.alive(worker)
        {
            note!(self, "worker {worker} is removed");
            self.tally.count("removed");
            self.router.remove_worker(self.book.workers[worker].id, Moment(self.now));
            self.book.workers[worker].registered = false;
            self.current[engine] = None;
        }
    }

    fn measure(&mut self, worker: usize) {
        let Some(engine) = self.current.iter().position(|w| *w == Some(worker)) else { return };
        let planned = &self.plan.engines[engine];
        self.at(self.now + planned.every, Event::Measure(worker));
        if !self.engines.alive(worker)
            || !self.book.workers[worker].facts.reports_load
            || self.conditions[engine].silent
        {
            return;
        }
        let mut reports = self.engines.report(worker, self.now);
        if self.conditions[engine].lies {
            self.book.workers[worker].tainted = true;
            for report in &mut reports {
                self.lie(report);
            }
        }
        let delay = planned.delay + self.conditions[engine].late;
        self.at(self.now + delay, Event::Report(worker, reports));
    }

    fn leave(&mut self, call: usize) -> Result<(), Violation> {
        match self.calls[call] {
            State::Waits(ticket, _) => {
                note!(self, "the client of {ticket:?} leaves");
                self.tally.count("left while waiting");
                self.router.cancel(ticket);
                self.book.unqueue(ticket);
                self.calls[call] = State::Over;
            }
            State::Bound(job) if self.live[job].permit.is_some() => {
                self.tally.count("left while bound");
                if self.rng.percent(40) {
                    self.let_go(job)?;
                } else {
                    self.finish(job, Outcome::Cancelled, false);
                }
                self.over(job);
            }
            _ => {}
        }
        Ok(())
    }

    fn reach(&mut self, job: usize, role: Role) {
        if self.live[job].permit.is_none() {
            return;
        }
        let fate = if self.live[job].tries == 0 { self.plan.calls[self.live[job].call].fate } else { Fate::Fine };
        let regular = self.book.attempts[job].prefill.is_none();
        match fate {
            Fate::Rejected if role == Role::Decode => {
                let after = self.now + self.plan.net;
                self.at(after, Event::Hear(Said::Rejected(job)));
                return;
            }
            Fate::Fails(which, how) if which == role || (regular && role == Role::Decode) => {
                let how = [Failure::Reset, Failure::Server, Failure::Overloaded, Failure::Transfer, Failure::Connect]
                    [usize::from(how)];
                let wait = if how == Failure::Connect { 0 } else { self.rng.range(0, 2000) * 1_000_000 };
                let role = if regular { Role::Regular } else { role };
                self.at(self.now + wait + self.plan.net, Event::Hear(Said::Failed(job, role, how)));
                if how == Failure::Connect {
                    return;
                }
            }
            _ => {}
        }
        if role == Role::Prefill {
            self.engines.arrive_prefill(job, self.now);
        } else {
            self.engines.arrive_decode(job, self.now);
        }
    }

    fn hear(&mut self, said: Said) -> Result<(), Violation> {
        let (Said::PrefillReply(job)
        | Said::FirstToken(job)
        | Said::DecodeReply(job)
        | Said::Rejected(job)
        | Said::Failed(job, ..)) = said;
        if self.live[job].permit.is_none() {
            return Ok(());
        }
        note!(self, "{said:?}");
        let attempt = &self.book.attempts[job];
        let (prefill, decode) = (attempt.prefill, attempt.decode);
        let r3 = self.plan.calls[self.live[job].call].r3;
        match said {
            Said::PrefillReply(_) => {
                if let (Some(place), Some(r3)) = (prefill, r3) {
                    self.emitted(place, r3.prefill_text);
                }
                self.delivered(job);
                self.leg_ended(job, Role::Prefill);
                self.live[job].prefill_done = true;
            }
            Said::FirstToken(_) if self.live[job].streams => self.delivered(job),
            Said::FirstToken(_) => {}
            Said::DecodeReply(_) => {
                if let Some(r3) = r3 {
                    self.emitted(decode, r3.decode_text);
                }
                let role = self.book.workers[decode.0].role;
                self.leg_ended(job, role);
                self.live[job].decode_done = true;
            }
            Said::Rejected(_) => {
                self.tally.count("rejected");
                self.finish(job, Outcome::Rejected, false);
                self.over(job);
            }
            Said::Failed(_, role, how) => self.fail(job, role, how)?,
        }
        let live = &self.live[job];
        if live.permit.is_some() && live.prefill_done && live.decode_done {
            self.tally.count("completed");
            let output_tokens = self.plan.calls[live.call].out;
            self.book.succeeded(job);
            self.finish(job, Outcome::Completed { output_tokens }, false);
            self.calls[self.live[job].call] = State::Over;
        }
        Ok(())
    }

    fn emitted(&mut self, place: Place, bytes: u64) {
        let took = bytes * SEC / self.engines.truth(place.0).egress.max(1);
        let id = self.book.workers[place.0].id;
        self.router.emitted(id, bytes, Duration::from_nanos(took), Moment(self.now));
    }

    fn delivered(&mut self, job: usize) {
        if let Some(permit) = &self.live[job].permit {
            self.router.delivered(permit, Moment(self.now));
            self.book.delivered(job, self.now);
        }
    }

    fn leg_ended(&mut self, job: usize, role: Role) {
        if let Some(permit) = &self.live[job].permit {
            self.router.leg_ended(permit, role, Moment(self.now));
            self.book.leg_ended(job, role, self.now);
        }
    }

    fn finish(&mut self, job: usize, outcome: Outcome, leak: bool) {
        if let Some(permit) = self.live[job].permit.take() {
            note!(self, "attempt {job} ends: {outcome:?}");
            self.router.finish(permit, outcome, Moment(self.now));
            self.book.finish(job, leak, self.now);
        }
    }

    /// The attempt is over without success: both legs are aborted, the call has its answer.
    fn over(&mut self, job: usize) {
        self.calls[self.live[job].call] = State::Over;
        let net = self.plan.net;
        self.at(self.now + net, Event::Abort(job));
        // An abort that comes before its request is lost, so it is said twice.
        self.at(self.now + 5 * net, Event::Abort(job));
    }

    fn fail(&mut self, job: usize, role: Role, how: Failure) -> Result<(), Violation> {
        self.tally.count(match how {
            Failure::Connect => "failed: connect",
            Failure::Reset => "failed: reset",
            Failure::Server => "failed: server",
            Failure::Overloaded => "failed: overloaded",
            Failure::Transfer => "failed: transfer",
            Failure::Mamba => "failed: mamba",
            Failure::Deadline => "failed: deadline",
        });
        let attempt = self.book.attempts[job].clone();
        let place = if role == Role::Prefill { attempt.prefill.unwrap_or(attempt.decode) } else { attempt.decode };
        self.book.failed(job, role, how != Failure::Deadline);
        if how == Failure::Connect {
            self.book.workers[place.0].connect_failed = Some(self.now);
        }
        if how == Failure::Mamba {
            let open =
                self.book.attempts.iter().filter(|a| a.decode == place && a.decode_released().is_none()).count() as u32;
            self.book.workers[place.0].ranks[place.1].mamba_ran_out = Some(open - 1);
        }
        self.finish(job, Outcome::Failed { role, how }, how == Failure::Deadline);
        self.over(job);
        let (call, tries) = (self.live[job].call, self.live[job].tries);
        if tries < self.plan.retries {
            self.tally.count("retry");
            let avoid = vec![RankId { worker: self.book.workers[place.0].id, rank: place.1 as u16 }];
            self.submit(call, tries + 1, avoid)?;
        }
        Ok(())
    }

    /// All faults are over: the fleet is whole, the facts are known, and everything that waits must come through.
    pub(crate) fn heal(&mut self) {
        note!(self, "the fleet is whole again");
        self.healed = true;
        if self.book.paused.is_some() {
            self.pause(false);
        }
        for engine in 0..self.plan.engines.len() {
            self.conditions[engine] = crate::drive::Condition { silent: false, late: 0, lies: false };
            self.heard(engine);
            self.join(engine);
            let Some(worker) = self.current[engine] else { continue };
            self.drain(worker, false);
            let mut facts = crate::plan::facts(&self.plan.engines[engine].truth);
            facts.reports_load = self.plan.engines[engine].told.reports_load;
            self.tell(worker, facts);
        }
        self.engines.heal(self.now);
    }

    pub(crate) fn pause(&mut self, on: bool) {
        note!(self, "pause {on}");
        self.router.set_paused(on, Moment(self.now));
        self.book.pause(on, self.now);
    }

    pub(crate) fn drain(&mut self, worker: usize, on: bool) {
        note!(self, "worker {worker} drains: {on}");
        self.router.set_draining(self.book.workers[worker].id, on);
        self.book.workers[worker].draining = on;
    }

    pub(crate) fn tell(&mut self, worker: usize, facts: r3router_core::topology::EngineFacts) {
        self.router.update_facts(self.book.workers[worker].id, facts.clone(), Moment(self.now));
        for rank in &mut self.book.workers[worker].ranks {
            rank.mamba_ran_out = None;
        }
        self.book.workers[worker].facts = facts;
    }

    pub(crate) fn later(&mut self, after: Ns, event: Event) {
        self.at(self.now + after, event);
    }
}
