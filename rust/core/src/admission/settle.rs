//! Attempts go on and end: what they held is given back exactly once, and what their end says is counted.
use std::time::Duration;

use super::attempts::{Attempt, Leg};
use super::{Admission, Failure, Outcome, Permit};
use crate::health::Breaker;
use crate::ledger::Holding;
use crate::time::Moment;
use crate::topology::{Role, WorkerId};

impl Admission {
    /// The KV of this attempt has arrived on decode (P's reply, or D's first token): releases the transfer slot.
    pub fn delivered(&mut self, permit: &Permit, now: Moment) {
        self.take_returns(now);
        self.mark_delivered(permit.id, now);
    }

    fn mark_delivered(&mut self, id: u64, now: Moment) {
        let Some(attempt) = self.attempts.get_mut(id) else { return };
        if attempt.delivered_at.is_some() {
            return;
        }
        attempt.delivered_at = Some(now);
        let took = now.since(attempt.bound_at).as_secs_f64();
        let part = |leg: &mut Leg| {
            let done = Holding { transfer: leg.holds.transfer, uncached: leg.holds.uncached, ..Holding::default() };
            leg.holds -= done;
            (leg.place, done, leg.ended)
        };
        let (back, back_done, back_ended) = part(&mut attempt.decode);
        let front = attempt.prefill.as_mut().map(part);
        let (ahead, uncached) = (attempt.ahead, attempt.uncached);
        let mut unqueued = Some(took);
        let mut pair = (None, None);
        if let Some((place, done, ended)) = front {
            if let Some(rank) = self.fleet.at(place.slot, place.generation) {
                unqueued = rank.service.delivered(uncached, took, ahead, rank.capacity.chunk, now);
                if !ended {
                    rank.ledger.release(done, now);
                    if rank.ledger.own().transfer == 0 {
                        rank.service.idle();
                    }
                }
                pair.0 = Some((rank.worker, rank.id.worker));
                self.fleet.refresh(place.slot, now);
            }
            if let Some(secs) = unqueued {
                self.flow.delivered(secs, now);
            } else {
                self.flow.count(now);
            }
        }
        if let Some(rank) = self.fleet.at(back.slot, back.generation) {
            match unqueued {
                Some(secs) => rank.window.delivered(secs),
                None => rank.window.delivered_late(),
            }
            if !back_ended {
                rank.ledger.release(back_done, now);
            }
            pair.1 = Some((rank.worker, rank.id.worker));
            self.fleet.refresh(back.slot, now);
        }
        if let (Some(p), Some(d)) = pair {
            self.cooldowns.worked(p.1, d.1);
        }
        for (worker, _) in [pair.0, pair.1].into_iter().flatten() {
            self.on_breaker(worker, now, Breaker::probe_passed);
        }
    }

    /// One leg's engine is done with it (reply read to its end, or failed): releases what the leg held on its engine.
    pub fn leg_ended(&mut self, permit: &Permit, role: Role, now: Moment) {
        self.take_returns(now);
        let Some(attempt) = self.attempts.get_mut(permit.id) else { return };
        let leg = match role {
            Role::Prefill => attempt.prefill.as_mut(),
            Role::Decode | Role::Regular => Some(&mut attempt.decode),
        };
        if let Some(leg) = leg {
            let ended = *leg;
            leg.ended = true;
            leg.holds = Holding::default();
            leg.text = 0;
            self.end_leg(ended, false, now);
        }
    }

    /// Gives back what a leg still holds.
    fn end_leg(&mut self, leg: Leg, leaks: bool, now: Moment) {
        if leg.ended {
            return;
        }
        let Some(rank) = self.fleet.at(leg.place.slot, leg.place.generation) else { return };
        if leaks {
            rank.ledger.leak(leg.holds, now);
        } else {
            rank.ledger.release(leg.holds, now);
        }
        if rank.role == Role::Prefill && rank.ledger.own().transfer == 0 {
            rank.service.idle();
        }
        let worker = rank.worker;
        if leg.text > 0 {
            if let Some(Some(w)) = self.fleet.workers.get_mut(worker as usize) {
                w.egress.release(leg.text);
            }
            self.fleet.check_egress(worker, now);
        }
        self.fleet.refresh(leg.place.slot, now);
    }

    /// `bytes` of R3 text left an engine in `took`; feeds its measured emission rate.
    pub fn emitted(&mut self, id: WorkerId, bytes: u64, took: Duration, now: Moment) {
        if let Some(index) = self.fleet.worker(id) {
            self.fleet.emitted(index, bytes, took, now);
        }
    }

    /// The attempt is over; releases everything that is still held, and counts the outcome.
    pub fn finish(&mut self, mut permit: Permit, outcome: Outcome, now: Moment) {
        self.take_returns(now);
        let id = std::mem::take(&mut permit.id);
        self.end(id, outcome, now);
    }

    /// Permits that were dropped rather than finished: nobody waits for those attempts any more.
    pub(super) fn take_returns(&mut self, now: Moment) {
        {
            let mut dropped = self.returns.dropped.lock();
            if dropped.is_empty() {
                return;
            }
            std::mem::swap(&mut *dropped, &mut self.came_back);
        }
        while let Some(id) = self.came_back.pop() {
            self.end(id, Outcome::Cancelled, now);
        }
    }

    fn end(&mut self, id: u64, outcome: Outcome, now: Moment) {
        if matches!(outcome, Outcome::Completed { .. }) {
            self.mark_delivered(id, now);
        }
        let Some(attempt) = self.attempts.remove(id) else { return };
        let leaks = matches!(outcome, Outcome::Failed { how: Failure::Deadline, .. });
        if let Some(leg) = attempt.prefill {
            self.end_leg(leg, false, now);
        }
        self.end_leg(attempt.decode, leaks, now);
        if attempt.arena > 0 {
            self.arena_reserved = self.arena_reserved.saturating_sub(attempt.arena);
            self.dirty = true;
        }
        match outcome {
            Outcome::Completed { output_tokens } => self.completed(&attempt, output_tokens, now),
            Outcome::Cancelled | Outcome::Rejected => self.inconclusive(&attempt, None, now),
            Outcome::Failed { role, how } => self.failed(&attempt, role, how, now),
        }
    }

    fn completed(&mut self, attempt: &Attempt, tokens: u32, now: Moment) {
        for place in [Some(attempt.decode.place), attempt.prefill.map(|l| l.place)].into_iter().flatten() {
            if let Some(rank) = self.fleet.at(place.slot, place.generation) {
                let worker = rank.worker;
                self.on_breaker(worker, now, Breaker::answered);
            }
        }
        let place = attempt.decode.place;
        let decoded = attempt.delivered_at.map(|at| now.since(at).as_secs_f64());
        if let Some(rank) = self.fleet.at(place.slot, place.generation) {
            rank.window.completed(now);
            let worker = rank.worker;
            if let (Some(Some(w)), Some(secs)) = (self.fleet.workers.get_mut(worker as usize), decoded)
                && secs > 0.0
            {
                w.egress.decoded(tokens, secs);
            }
        }
    }

    /// The end of an attempt says nothing about these workers: if it was a probe, another may go.
    fn inconclusive(&mut self, attempt: &Attempt, except: Option<Role>, now: Moment) {
        for leg in [Some(attempt.decode), attempt.prefill].into_iter().flatten() {
            if let Some(rank) = self.fleet.at(leg.place.slot, leg.place.generation)
                && Some(rank.role) != except
            {
                let worker = rank.worker;
                self.on_breaker(worker, now, Breaker::inconclusive);
            }
        }
    }

    fn failed(&mut self, attempt: &Attempt, role: Role, how: Failure, now: Moment) {
        let back = attempt.decode.place;
        if let Some(rank) = self.fleet.at(back.slot, back.generation) {
            if matches!(how, Failure::Transfer | Failure::Overloaded) {
                rank.window.shrink(now);
            }
            if how == Failure::Mamba {
                // It held one too many: what is still there is what it can hold.
                rank.learned = rank.learned.min(rank.ledger.own().open.max(1));
            }
            self.fleet.refresh(back.slot, now);
        }
        let front = attempt.prefill.map(|l| l.place);
        if how == Failure::Transfer
            && let Some(front) = front
        {
            let p = self.fleet.at(front.slot, front.generation).map(|r| r.id.worker);
            let d = self.fleet.at(back.slot, back.generation).map(|r| r.id.worker);
            if let (Some(p), Some(d)) = (p, d) {
                self.cooldowns.failed(p, d, self.config.breaker_open_for, now);
            }
        }
        let place = if role == Role::Prefill { front } else { Some(back) };
        if let Some(place) = place
            && let Some(rank) = self.fleet.at(place.slot, place.generation)
        {
            let worker = rank.worker;
            let (setting, last) = (self.fleet.rule.breaker, self.fleet.is_last(worker));
            self.on_breaker(worker, now, |b| {
                b.failed(how, setting, last, now);
                // What does not count as a failure does not end a probe either.
                b.inconclusive();
            });
        }
        self.inconclusive(
            attempt,
            Some(if role == Role::Prefill { Role::Prefill } else { self.back_role(back.slot) }),
            now,
        );
    }

    fn back_role(&self, slot: u32) -> Role {
        self.fleet.ranks[slot as usize].role
    }

    /// Changes a worker's breaker and opens or closes its ranks accordingly.
    fn on_breaker(&mut self, index: u32, now: Moment, change: impl FnOnce(&mut Breaker)) {
        let Some(Some(worker)) = self.fleet.workers.get_mut(index as usize) else { return };
        let before = worker.breaker.admits();
        change(&mut worker.breaker);
        if worker.breaker.admits() != before {
            self.fleet.update_worker(index, now);
            self.dirty = true;
        }
    }
}
