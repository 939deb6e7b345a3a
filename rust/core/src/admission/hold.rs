//! Requests that were overtaken too often: ranks are kept for them, and drain until they fit.
//!
//! Half of the ranks at most are kept. When that many requests hold, nobody goes before the next one that was overtaken too
//! often: the number of overtakes is bounded, and the fleet is never all kept for the few.
use super::{Admission, Decision};
use crate::fleet::{side, takes};
use crate::pairing::Kept;
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::Role;

/// Requests that can hold at once.
const HOLDS_MAX: usize = 8;

/// A request that was overtaken too often, and what is kept for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    ticket: u64,
    kept: Kept,
    /// R3 of others waits, because the arena is what it lacks.
    pub(super) arena: bool,
    /// R3 of others on these engines waits, because their egress is what it lacks.
    egress: bool,
}

impl Admission {
    /// Whether ranks are kept for this entry.
    pub(super) fn is_held(&self, index: u32) -> bool {
        !self.holds.is_empty() && {
            let ticket = self.queue.ticket(index);
            self.holds.iter().any(|h| h.ticket == ticket)
        }
    }

    /// Begins to keep ranks for an entry. Says whether there was room for one more.
    pub(super) fn hold(&mut self, index: u32, reason: Reason, now: Moment) -> bool {
        let open = self.fleet.ranks.iter().filter(|r| r.live && side(r.role) == 1 && takes(r.closed)).count();
        if self.holds.len() >= (open / 2).clamp(1, HOLDS_MAX) {
            return false;
        }
        let ticket = self.queue.ticket(index);
        self.holds.push(Hold { ticket, kept: Kept::default(), arena: false, egress: false });
        self.keep(self.holds.len() - 1, index, reason);
        self.mark_kept(now);
        true
    }

    /// Tries the requests that ranks are kept for.
    pub(super) fn try_holds(&mut self, now: Moment, out: &mut Vec<Decision>) {
        let mut at = 0;
        while let Some(hold) = self.holds.get(at).copied() {
            let Some(index) = self.queue.find(hold.ticket) else {
                self.let_go(hold.ticket, now);
                continue;
            };
            match self.look_for(index, Some(hold.kept), now) {
                Ok(pair) => {
                    self.let_go(hold.ticket, now);
                    if let Some(request) = self.queue.remove(index) {
                        self.bind(hold.ticket, &request, pair, now, out);
                    }
                }
                Err(_) if self.take_from_younger(at, index, now, out) => {}
                Err(reason) => {
                    self.counters.add(reason);
                    if let Some(entry) = self.queue.entry_mut(index) {
                        entry.held = reason;
                    }
                    if self.keep(at, index, reason) {
                        self.mark_kept(now);
                    }
                    at += 1;
                }
            }
        }
    }

    /// Binds the request of a hold to what is kept for a younger request of its key, which then has what was kept for the
    /// older one: within a key nobody who fits is passed by.
    fn take_from_younger(&mut self, at: usize, index: u32, now: Moment, out: &mut Vec<Decision>) -> bool {
        let Some(class) = self.class_of(index) else { return false };
        for younger in at + 1..self.holds.len() {
            let (own, theirs) = (self.holds[at].kept, self.holds[younger].kept);
            let free = [theirs.prefill, theirs.decode].into_iter().flatten().any(|slot| {
                // Open but for the hold.
                self.fleet.ranks[slot as usize].closed == Reason::Held
            });
            if !free || self.queue.find(self.holds[younger].ticket).and_then(|i| self.class_of(i)) != Some(class) {
                continue;
            }
            let kept = Kept { prefill: theirs.prefill.or(own.prefill), decode: theirs.decode.or(own.decode) };
            let Ok(pair) = self.look_for(index, Some(kept), now) else { continue };
            self.holds[younger].kept = Kept {
                prefill: own.prefill.filter(|_| theirs.prefill.is_some()),
                decode: own.decode.filter(|_| theirs.decode.is_some()),
            };
            let ticket = self.holds[at].ticket;
            self.let_go(ticket, now);
            if let Some(request) = self.queue.remove(index) {
                self.bind(ticket, &request, pair, now, out);
            }
            return true;
        }
        false
    }

    /// Requests of one class are served in order: retries, and each key.
    fn class_of(&self, index: u32) -> Option<(bool, u64)> {
        self.queue.entry(index).map(|e| (e.request.retry, if e.request.retry { 0 } else { e.request.key }))
    }

    /// Chooses ranks of the side that the request lacks. Says whether anything changed.
    fn keep(&mut self, at: usize, index: u32, reason: Reason) -> bool {
        let (Some(&old), Some(entry)) = (self.holds.get(at), self.queue.entry(index)) else { return false };
        let prompt = entry.request.prompt_tokens;
        let max_new = self.max_new(&entry.request);
        let mut hold = old;
        let taken = |slot: u32| {
            self.holds.iter().enumerate().any(|(i, h)| i != at && [h.kept.prefill, h.kept.decode].contains(&Some(slot)))
        };
        let usable = |slot: u32| {
            let rank = &self.fleet.ranks[slot as usize];
            rank.live && takes(rank.closed) && !taken(slot)
        };
        // A rank that the request failed on is no use to it while another is left.
        let fits = |slot: u32, prefill: bool| {
            let rank = &self.fleet.ranks[slot as usize];
            if !entry.request.targets.of(rank.role).is_none_or(|t| t.names(rank.id)) {
                false
            } else if prefill {
                rank.role == Role::Prefill && rank.capacity.fits_prompt(prompt)
            } else {
                side(rank.role) == 1 && rank.capacity.fits_idle(prompt, max_new)
            }
        };
        let avoided = |slot: u32| entry.request.avoid.contains(&self.fleet.ranks[slot as usize].id);
        let others = |prefill: bool| {
            !entry.request.avoid.is_empty()
                && self.fleet.ranks.iter().enumerate().any(|(slot, rank)| {
                    let slot = slot as u32;
                    rank.live && takes(rank.closed) && fits(slot, prefill) && !avoided(slot)
                })
        };
        let (avoid_prefill, avoid_decode) = (others(true), others(false));
        let slots = 0..self.fleet.ranks.len() as u32;
        hold.arena = reason == Reason::Arena;
        hold.egress = matches!(reason, Reason::R3Egress | Reason::R3EgressDecode);
        hold.kept.prefill = hold.kept.prefill.filter(|&s| usable(s) && !(avoid_prefill && avoided(s)));
        hold.kept.decode = hold.kept.decode.filter(|&s| usable(s) && !(avoid_decode && avoided(s)));
        let prefill_lacks =
            matches!(reason, Reason::Prefill | Reason::PrefillWait | Reason::Affinity | Reason::Key | Reason::R3Egress);
        if self.fleet.is_pd() && prefill_lacks && hold.kept.prefill.is_none() {
            hold.kept.prefill = slots
                .clone()
                .filter(|&s| usable(s) && fits(s, true) && !(avoid_prefill && avoided(s)))
                .min_by_key(|&s| self.fleet.ranks[s as usize].queued_tokens());
        }
        if !prefill_lacks && reason != Reason::Arena && hold.kept.decode.is_none() {
            hold.kept.decode = slots
                .filter(|&s| usable(s) && fits(s, false) && !(avoid_decode && avoided(s)))
                .max_by_key(|&s| self.fleet.ranks[s as usize].free().kv);
        }
        self.holds[at] = hold;
        hold.kept != old.kept || hold.egress != old.egress
    }

    /// Closes what is kept, and opens what no longer is.
    fn mark_kept(&mut self, now: Moment) {
        let kept = |slot: u32| self.holds.iter().any(|h| [h.kept.prefill, h.kept.decode].contains(&Some(slot)));
        for slot in 0..self.fleet.ranks.len() as u32 {
            let held = kept(slot);
            let rank = &mut self.fleet.ranks[slot as usize];
            if rank.held != held {
                rank.held = held;
                self.fleet.refresh(slot, now);
            }
        }
        for index in 0..self.fleet.workers.len() {
            let holds = &self.holds;
            let Some(Some(worker)) = self.fleet.workers.get_mut(index) else { continue };
            let held = holds
                .iter()
                .filter(|h| h.egress)
                .any(|h| worker.ranks.iter().any(|&slot| [h.kept.prefill, h.kept.decode].contains(&Some(slot))));
            if worker.egress_held != held {
                worker.egress_held = held;
                self.fleet.update_worker(index as u32, now);
            }
        }
    }

    /// Whatever was kept for this ticket is open to all again.
    pub(super) fn let_go(&mut self, ticket: u64, now: Moment) {
        let before = self.holds.len();
        self.holds.retain(|h| h.ticket != ticket);
        if self.holds.len() != before {
            self.dirty = true;
            self.mark_kept(now);
        }
    }
}
