//! Proof that the harness can fail: routers with one fault each, made from the real one by bending what goes in or comes out,
//! and the promise that each must be caught breaking.
use std::collections::HashMap;
use std::time::Duration;

use r3router_core::admission::{
    Admission, AdmissionConfig, Decision, Failure, Outcome, Permit, Request, Snapshot, Ticket, WindowMode,
};
use r3router_core::error::Error;
use r3router_core::load::RankReport;
use r3router_core::policy::Targets;
use r3router_core::time::Moment;
use r3router_core::topology::{EngineFacts, Role, WorkerId, WorkerSpec};

use crate::drive::{Wake, run};
use crate::plan::Plan;
use crate::router::Router;

/// Seeds in which a fault must be found.
const SEEDS: u64 = 400;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Counters go down twice for one end.
    ReleasesTwice,
    /// A permit that is finished is never released.
    ReleasesNever,
    /// The transfer is never released before the end.
    IgnoresDelivery,
    /// Believes in one row, slot and metadata entry more than there is.
    OneRowMore,
    /// Believes in twice the KV.
    TwiceTheKv,
    /// Believes that each request takes one mamba slot.
    OneMambaSlot,
    /// Believes in an endless prefill batch.
    EndlessBatch,
    ReusesRooms,
    ShiftsRooms,
    /// One key is never served.
    StarvesKey,
    /// Nothing is decided before the next event.
    NeverSetsTimers,
    SwapsInsideKey,
    IgnoresPause,
    IgnoresDeadline,
    IgnoresCancel,
    IgnoresDrain,
    IgnoresRemoval,
    IgnoresArena,
    /// Any age of a report will do.
    IgnoresAge,
    IgnoresRetraction,
    BindsHalfPairs,
    TakesTooLarge,
    ChargesClientErrors,
    RefusesAtRandom,
    ForgetsLeaks,
    /// Windows are as wide as the ledgers.
    OpensWindows,
    /// The breaker opens at the first failure.
    LosesPatience,
    WakesNobody,
    /// Decides at every fifth poll only.
    Dawdles,
    /// Believes in a request that nobody sent.
    SeesGhosts,
    /// A refused connection is a failure like another.
    IgnoresRefusedConnections,
    /// Sends requests elsewhere than to the worker that they name.
    IgnoresNames,
}

struct Mutant {
    core: Admission,
    polls: u32,
    fault: Fault,
    rooms: HashMap<(Option<r3router_core::topology::RankId>, u64), u64>,
    ends: u32,
    /// Tickets that were given out for requests that the core has not seen, with their bytes.
    held: HashMap<Ticket, u64>,
    bytes: HashMap<Ticket, u64>,
    /// Cancelled, and kept in the core's queue.
    kept: HashMap<Ticket, u64>,
    urls: HashMap<WorkerId, std::sync::Arc<str>>,
    removed: Vec<std::sync::Arc<str>>,
    first_of: HashMap<u64, Ticket>,
    swapped: HashMap<Ticket, Ticket>,
    made_up: u64,
}

impl Mutant {
    fn new(mut config: AdmissionConfig, wake: Wake, fault: Fault) -> Self {
        match fault {
            Fault::OpensWindows => config.window = WindowMode::Unbounded,
            Fault::LosesPatience => config.breaker_threshold = config.breaker_threshold.min(1),
            _ => {}
        }
        let wake = if fault == Fault::WakesNobody { Box::new(|| {}) } else { wake };
        let core = Admission::new(config, wake);
        Self {
            polls: 0,
            core,
            fault,
            rooms: HashMap::new(),
            ends: 0,
            held: HashMap::new(),
            bytes: HashMap::new(),
            kept: HashMap::new(),
            urls: HashMap::new(),
            removed: Vec::new(),
            first_of: HashMap::new(),
            swapped: HashMap::new(),
            made_up: 0,
        }
    }

    fn bend(&self, mut facts: EngineFacts) -> EngineFacts {
        match self.fault {
            Fault::OneRowMore => facts.max_running = facts.max_running.map(|n| n + 1),
            Fault::TwiceTheKv => facts.max_total_tokens = facts.max_total_tokens.map(|n| n * 2),
            Fault::OneMambaSlot => facts.mamba_slots_per_request = facts.mamba_slots_per_request.map(|_| 1),
            Fault::EndlessBatch => facts.chunked_prefill_size = facts.chunked_prefill_size.map(|_| u32::MAX),
            Fault::TakesTooLarge => facts.max_input_tokens = None,
            _ => {}
        }
        facts
    }
}

impl Router for Mutant {
    fn add_worker(&mut self, mut spec: WorkerSpec, now: Moment) -> WorkerId {
        spec.facts = self.bend(spec.facts);
        let url = spec.url.clone();
        let id = self.core.add_worker(spec, now);
        self.removed.retain(|u| *u != url);
        self.urls.insert(id, url);
        id
    }

    fn update_facts(&mut self, id: WorkerId, facts: EngineFacts, now: Moment) {
        let facts = self.bend(facts);
        self.core.update_facts(id, facts, now);
    }

    fn remove_worker(&mut self, id: WorkerId, now: Moment) {
        if self.fault == Fault::IgnoresRemoval {
            self.removed.extend(self.urls.get(&id).cloned());
        } else {
            self.core.remove_worker(id, now);
        }
    }

    fn set_draining(&mut self, id: WorkerId, draining: bool) {
        if self.fault != Fault::IgnoresDrain {
            self.core.set_draining(id, draining);
        }
    }

    fn set_paused(&mut self, paused: bool, now: Moment) {
        if self.fault != Fault::IgnoresPause {
            self.core.set_paused(paused, now);
        }
    }

    fn report(&mut self, id: WorkerId, ranks: &[RankReport], now: Moment) {
        let mut ranks = ranks.to_vec();
        for r in &mut ranks {
            match self.fault {
                Fault::OneRowMore => r.max_running = r.max_running.map(|n| n.saturating_add(1)),
                Fault::TwiceTheKv => r.max_total_tokens = r.max_total_tokens.map(|n| n.saturating_mul(2)),
                Fault::IgnoresAge => r.measured_at = Moment(u64::MAX / 2),
                Fault::IgnoresRetraction => r.retracted = None,
                Fault::SeesGhosts => r.running = r.running.map(|n| n.saturating_add(1)),
                _ => {}
            }
        }
        self.core.report(id, &ranks, now);
    }

    fn submit(&mut self, mut request: Request, now: Moment) -> Result<Ticket, Error> {
        match self.fault {
            Fault::StarvesKey if request.key == 1 => {
                self.made_up += 1;
                let ticket = Ticket(u64::MAX - self.made_up);
                self.held.insert(ticket, request.body_bytes);
                return Ok(ticket);
            }
            Fault::IgnoresDeadline => request.deadline = Moment::NEVER,
            Fault::IgnoresNames => request.targets = Targets::default(),
            Fault::IgnoresArena => {
                if let Some(r3) = &mut request.r3 {
                    r3.arena = 0;
                }
            }
            Fault::TakesTooLarge => request.prompt_tokens = request.prompt_tokens.min(1000),
            Fault::RefusesAtRandom if self.ends % 5 == 4 => {
                return Err(Error::new(
                    r3router_core::error::Kind::NoWorkers,
                    r3router_core::error::Source::Router,
                    "no worker",
                ));
            }
            _ => {}
        }
        let (key, bytes) = (request.key, request.body_bytes);
        let ticket = self.core.submit(request, now)?;
        self.bytes.insert(ticket, bytes);
        if self.fault == Fault::SwapsInsideKey {
            if let Some(first) = self.first_of.remove(&key) {
                self.swapped.insert(first, ticket);
                self.swapped.insert(ticket, first);
            } else {
                self.first_of.insert(key, ticket);
            }
        }
        Ok(ticket)
    }

    fn cancel(&mut self, ticket: Ticket) {
        if self.held.remove(&ticket).is_some() {
            return;
        }
        if self.fault == Fault::IgnoresCancel {
            self.kept.insert(ticket, self.bytes[&ticket]);
        } else {
            self.core.cancel(ticket);
        }
    }

    fn poll(&mut self, now: Moment, out: &mut Vec<Decision>) -> Option<Moment> {
        self.polls += 1;
        if self.fault == Fault::Dawdles && !self.polls.is_multiple_of(5) {
            return Some(now + Duration::from_nanos(1));
        }
        let next = self.core.poll(now, out);
        for decision in out {
            let b = match decision {
                Decision::Bind(b) => b,
                Decision::Refuse(ticket, _) => {
                    self.kept.remove(ticket);
                    continue;
                }
            };
            self.kept.remove(&b.ticket);
            self.first_of.retain(|_, t| *t != b.ticket);
            match self.fault {
                Fault::ReusesRooms => b.room = *self.rooms.entry((b.prefill, 0)).or_insert(b.room),
                Fault::ShiftsRooms => b.room += 1,
                Fault::BindsHalfPairs => b.prefill = None,
                Fault::SwapsInsideKey => {
                    if let Some(other) = self.swapped.remove(&b.ticket) {
                        b.ticket = other;
                    }
                }
                _ => {}
            }
        }
        if self.fault == Fault::NeverSetsTimers { None } else { next }
    }

    fn delivered(&mut self, permit: &Permit, now: Moment) {
        if self.fault != Fault::IgnoresDelivery {
            self.core.delivered(permit, now);
        }
    }

    fn leg_ended(&mut self, permit: &Permit, role: Role, now: Moment) {
        self.core.leg_ended(permit, role, now);
    }

    fn emitted(&mut self, id: WorkerId, bytes: u64, took: Duration, now: Moment) {
        self.core.emitted(id, bytes, took, now);
    }

    fn finish(&mut self, permit: Permit, outcome: Outcome, now: Moment) {
        self.ends += 1;
        let outcome = match (self.fault, outcome) {
            (Fault::ReleasesNever, _) => {
                std::mem::forget(permit);
                return;
            }
            (Fault::ChargesClientErrors, Outcome::Rejected | Outcome::Cancelled) => {
                Outcome::Failed { role: Role::Decode, how: Failure::Server }
            }
            (Fault::ForgetsLeaks, Outcome::Failed { role, how: Failure::Deadline })
            | (Fault::IgnoresRefusedConnections, Outcome::Failed { role, how: Failure::Connect }) => {
                Outcome::Failed { role, how: Failure::Server }
            }
            _ => outcome,
        };
        self.core.finish(permit, outcome, now);
    }

    fn snapshot(&self, now: Moment) -> Snapshot {
        let mut shown = self.core.snapshot(now);
        if self.fault == Fault::ReleasesTwice && self.ends > 0 {
            for view in &mut shown.ranks {
                view.open = view.open.saturating_sub(1);
            }
        }
        if self.fault == Fault::OneRowMore {
            // It shows what is true, so that only what it binds gives it away.
            for view in &mut shown.ranks {
                view.rows_free = view.rows_free.saturating_sub(3);
                view.metadata_free = view.metadata_free.saturating_sub(2);
            }
        }
        shown.queued = (shown.queued + self.held.len()).saturating_sub(self.kept.len());
        shown.queued_bytes += self.held.values().sum::<u64>();
        shown.queued_bytes = shown.queued_bytes.saturating_sub(self.kept.values().sum());
        shown.ranks.retain(|view| !self.removed.contains(&view.url));
        shown
    }
}

/// The promises that a fault was caught breaking, over some seeds.
fn caught(fault: Fault) -> Vec<&'static str> {
    let mut found: Vec<&'static str> = (0..SEEDS)
        .filter_map(|seed| run(&Plan::from_seed(seed), false, |config, wake| Mutant::new(config, wake, fault)).failure)
        .map(|v| v.invariant)
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn is_caught_as(fault: Fault, invariant: &str) {
    let found = caught(fault);
    assert!(found.contains(&invariant), "{fault:?} should break `{invariant}` in {SEEDS} seeds, it broke {found:?}");
}

#[test]
fn a_release_that_counts_twice_is_seen() {
    is_caught_as(Fault::ReleasesTwice, "released-once");
}

#[test]
fn a_release_that_is_lost_is_seen() {
    is_caught_as(Fault::ReleasesNever, "released-once");
    is_caught_as(Fault::IgnoresDelivery, "released-once");
}

#[test]
fn one_request_over_capacity_is_seen() {
    is_caught_as(Fault::OneRowMore, "capacity");
    is_caught_as(Fault::TwiceTheKv, "capacity");
    is_caught_as(Fault::OneMambaSlot, "capacity");
    is_caught_as(Fault::OpensWindows, "window");
    is_caught_as(Fault::SeesGhosts, "truth");
    is_caught_as(Fault::EndlessBatch, "prefill");
    is_caught_as(Fault::ForgetsLeaks, "free");
}

#[test]
fn wrong_rooms_are_seen() {
    is_caught_as(Fault::ReusesRooms, "room");
    is_caught_as(Fault::ShiftsRooms, "room");
}

#[test]
fn starving_is_seen() {
    is_caught_as(Fault::StarvesKey, "starved");
    is_caught_as(Fault::Dawdles, "idle");
    is_caught_as(Fault::WakesNobody, "wake");
    is_caught_as(Fault::NeverSetsTimers, "timers");
}

#[test]
fn overtaking_inside_a_key_is_seen() {
    is_caught_as(Fault::SwapsInsideKey, "fifo");
}

#[test]
fn binding_what_must_not_be_bound_is_seen() {
    is_caught_as(Fault::IgnoresPause, "paused");
    is_caught_as(Fault::IgnoresDeadline, "deadline");
    is_caught_as(Fault::IgnoresCancel, "cancelled");
    is_caught_as(Fault::IgnoresArena, "arena");
}

#[test]
fn choosing_workers_that_are_out_of_choice_is_seen() {
    is_caught_as(Fault::IgnoresDrain, "draining");
    is_caught_as(Fault::IgnoresRemoval, "draining");
    is_caught_as(Fault::IgnoresAge, "stale");
    is_caught_as(Fault::IgnoresRetraction, "closed");
    is_caught_as(Fault::BindsHalfPairs, "pair");
    is_caught_as(Fault::IgnoresNames, "named");
}

#[test]
fn answers_for_no_reason_are_seen() {
    is_caught_as(Fault::TakesTooLarge, "too-large");
    is_caught_as(Fault::RefusesAtRandom, "refusal");
    is_caught_as(Fault::LosesPatience, "breaker");
    is_caught_as(Fault::IgnoresRefusedConnections, "connect");
    is_caught_as(Fault::ChargesClientErrors, "breaker");
}
