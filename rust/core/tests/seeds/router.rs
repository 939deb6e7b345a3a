//! The surface of the admission that the harness drives; the mutants stand behind the same one.
use std::time::Duration;

use r3router_core::admission::{Admission, Decision, Outcome, Permit, Request, Snapshot, Ticket};
use r3router_core::error::Error;
use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use r3router_core::topology::{EngineFacts, Role, WorkerId, WorkerSpec};

/// What can be driven.
pub(crate) trait Router {
    fn add_worker(&mut self, spec: WorkerSpec, now: Moment) -> WorkerId;
    fn update_facts(&mut self, id: WorkerId, facts: EngineFacts, now: Moment);
    fn remove_worker(&mut self, id: WorkerId, now: Moment);
    fn set_draining(&mut self, id: WorkerId, draining: bool);
    fn set_paused(&mut self, paused: bool, now: Moment);
    fn report(&mut self, id: WorkerId, ranks: &[RankReport], now: Moment);
    fn submit(&mut self, request: Request, now: Moment) -> Result<Ticket, Error>;
    fn cancel(&mut self, ticket: Ticket);
    fn poll(&mut self, now: Moment, out: &mut Vec<Decision>) -> Option<Moment>;
    fn delivered(&mut self, permit: &Permit, now: Moment);
    fn leg_ended(&mut self, permit: &Permit, role: Role, now: Moment);
    fn emitted(&mut self, id: WorkerId, bytes: u64, took: Duration, now: Moment);
    fn finish(&mut self, permit: Permit, outcome: Outcome, now: Moment);
    fn snapshot(&self, now: Moment) -> Snapshot;
}

impl Router for Admission {
    fn add_worker(&mut self, spec: WorkerSpec, now: Moment) -> WorkerId {
        Self::add_worker(self, spec, now)
    }
    fn update_facts(&mut self, id: WorkerId, facts: EngineFacts, now: Moment) {
        Self::update_facts(self, id, facts, now);
    }
    fn remove_worker(&mut self, id: WorkerId, now: Moment) {
        Self::remove_worker(self, id, now);
    }
    fn set_draining(&mut self, id: WorkerId, draining: bool) {
        Self::set_draining(self, id, draining);
    }
    fn set_paused(&mut self, paused: bool, now: Moment) {
        Self::set_paused(self, paused, now);
    }
    fn report(&mut self, id: WorkerId, ranks: &[RankReport], now: Moment) {
        Self::report(self, id, ranks, now);
    }
    fn submit(&mut self, request: Request, now: Moment) -> Result<Ticket, Error> {
        Self::submit(self, request, now)
    }
    fn cancel(&mut self, ticket: Ticket) {
        Self::cancel(self, ticket);
    }
    fn poll(&mut self, now: Moment, out: &mut Vec<Decision>) -> Option<Moment> {
        Self::poll(self, now, out)
    }
    fn delivered(&mut self, permit: &Permit, now: Moment) {
        Self::delivered(self, permit, now);
    }
    fn leg_ended(&mut self, permit: &Permit, role: Role, now: Moment) {
        Self::leg_ended(self, permit, role, now);
    }
    fn emitted(&mut self, id: WorkerId, bytes: u64, took: Duration, now: Moment) {
        Self::emitted(self, id, bytes, took, now);
    }
    fn finish(&mut self, permit: Permit, outcome: Outcome, now: Moment) {
        Self::finish(self, permit, outcome, now);
    }
    fn snapshot(&self, now: Moment) -> Snapshot {
        Self::snapshot(self, now)
    }
}
