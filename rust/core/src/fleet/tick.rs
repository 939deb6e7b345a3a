//! R3 accounts, and everything that time alone changes.
use std::time::Duration;

use super::rank::Rank;
use super::{Fleet, takes};
use crate::egress::Egress;
use crate::time::Moment;
use crate::topology::{EngineFacts, Role};
use crate::window::Supply;

/// A leak on a rank that sends no reports is forgotten after so many waiting timeouts.
const LEAK_TIMEOUTS: f64 = 2.0;

impl Fleet {
    /// The R3 bytes that may be about to leave a worker: a look at its quantiles, so once a tick rather than at each decision.
    pub(super) fn egress_limit(beta: f64, facts: &EngineFacts, egress: &Egress) -> u64 {
        let timeout = facts.waiting_timeout.unwrap_or(crate::capacity::DEFAULT_WAITING_TIMEOUT);
        egress.limit(beta * timeout.as_secs_f64())
    }

    /// R3 text left a worker.
    pub(crate) fn emitted(&mut self, index: u32, bytes: u64, took: Duration, now: Moment) {
        if let Some(Some(worker)) = self.workers.get_mut(index as usize) {
            worker.egress.emitted(bytes, took, now);
            if worker.egress.is_guessed() {
                worker.egress_limit = Self::egress_limit(self.rule.beta, &worker.facts, &worker.egress);
            }
        }
    }

    /// Sees whether a worker's R3 account became full or free again.
    pub(crate) fn check_egress(&mut self, index: u32, now: Moment) {
        let Some(Some(worker)) = self.workers.get(index as usize) else { return };
        let full = worker.egress.outstanding() > 0 && worker.egress.outstanding() >= worker.egress_limit;
        self.improved |= worker.egress_held;
        if full != worker.egress_full {
            if let Some(Some(worker)) = self.workers.get_mut(index as usize) {
                worker.egress_full = full;
            }
            self.update_worker(index, now);
        }
    }

    /// Windows, rates, breakers, stale reports: everything that time alone changes. `flow` and `tau` are prefill's as measured; `waiting`
    /// is whether requests do.
    pub(crate) fn tick(&mut self, now: Moment, flow: Option<f64>, tau: Option<f64>, waiting: bool) {
        for index in 0..self.workers.len() {
            let Some(worker) = &mut self.workers[index] else { continue };
            worker.egress.update(now, worker.egress_limit);
            worker.egress_limit = Self::egress_limit(self.rule.beta, &worker.facts, &worker.egress);
            worker.breaker.tick(now);
            self.check_egress(index as u32, now);
        }
        let window_tau = tau.unwrap_or(1.0);
        let appetite = |rank: &Rank| {
            let delivered = rank.ledger.own().open - rank.ledger.own().transfer;
            let free = (rank.capacity.running - delivered).max(0) as f64;
            (free, rank.window.completions() * window_tau + free)
        };
        let hungry: f64 = self
            .ranks
            .iter()
            .filter(|r| r.live && r.role == Role::Decode && takes(r.closed))
            .map(|r| appetite(r).1)
            .sum();
        self.appetite = 0.0;
        for slot in 0..self.ranks.len() {
            let rank = &self.ranks[slot];
            if !rank.live {
                continue;
            }
            if rank.role == Role::Decode && takes(rank.closed) {
                let free = rank.free();
                self.appetite += free.rows.min(free.mamba).max(0) as f64 + rank.window.completions() * window_tau;
            }
            match rank.role {
                Role::Prefill => self.ranks[slot].service.update(now),
                Role::Decode => {
                    let (free_slots, wants) = appetite(rank);
                    let share = flow.map(|f| if hungry > 0.0 { f * wants / hungry } else { f });
                    let mode = self.rule.window;
                    if rank.free().window <= 0 {
                        // Full for as long as it is, not at the one moment at which it became so.
                        self.ranks[slot].window.was_reached();
                    }
                    self.ranks[slot].window.update(now, mode, Supply { share, tau, free_slots, waiting });
                }
                Role::Regular => {
                    let mode = self.rule.mode_of(rank.role, &rank.capacity);
                    self.ranks[slot].window.update(now, mode, Supply::default());
                }
            }
            let rank = &mut self.ranks[slot];
            let reports = matches!(self.workers.get(rank.worker as usize), Some(Some(w)) if w.facts.reports_load);
            if !reports && rank.ledger.leaked().open > 0 {
                let ns = (LEAK_TIMEOUTS * rank.capacity.waiting_timeout * 1e9) as u64;
                rank.ledger.expire_leaks(Moment(now.0.saturating_sub(ns)));
            }
            self.refresh(slot as u32, now);
        }
    }
}
