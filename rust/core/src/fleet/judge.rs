//! Whether a rank takes requests, how good it is, and its place in the trees.
use super::rank::{Rank, Worker};
use super::{Fleet, side};
use crate::capacity::UNBOUNDED;
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::Role;

/// Load that one request adds to a prefill rank beside its tokens, in tokens: spreads tiny requests.
const TOKENS_PER_REQUEST: i64 = 32;
/// Bits of a score that tell equal ranks apart: which of them was bound to least recently.
const TURN_BITS: u32 = 39;
const LAST_TURN: u64 = (1 << TURN_BITS) - 1;

impl Fleet {
    /// Why the rank takes nothing, or its score and room.
    fn judge(&self, rank: &Rank, worker: &Worker, now: Moment) -> Result<(u32, i64), Reason> {
        if (rank.role == Role::Regular) == self.is_pd() {
            return Err(Reason::Mode);
        }
        if worker.draining || rank.drained {
            return Err(Reason::Draining);
        }
        if !worker.breaker.admits() {
            return Err(Reason::Ejected);
        }
        let verdict =
            if rank.role == Role::Prefill { self.judge_prefill(rank) } else { self.judge_decode(rank, worker, now) };
        // Last, so that it says that the rank would be open.
        if rank.held && verdict.is_ok() { Err(Reason::Held) } else { verdict }
    }

    fn judge_decode(&self, rank: &Rank, worker: &Worker, now: Moment) -> Result<(u32, i64), Reason> {
        if worker.facts.reports_load && self.is_stale(rank, now) {
            return Err(Reason::Stale);
        }
        if rank.report.as_ref().is_some_and(|r| r.retracted.unwrap_or(0) > 0) {
            return Err(Reason::Retracted);
        }
        let free = rank.free();
        for (amount, reason) in [
            (free.rows, Reason::Rows),
            (free.metadata, Reason::Metadata),
            (free.mamba, Reason::Mamba),
            (free.kv, Reason::Kv),
            (free.window, Reason::Window),
        ] {
            if amount <= 0 {
                return Err(reason);
            }
        }
        let c = &rank.capacity;
        let part = |free: i64, of: i64| if of == UNBOUNDED { 1.0 } else { free as f64 / of.max(1) as f64 };
        let headroom = part(free.rows, c.rows).min(part(free.kv, c.kv_pool)).min(part(free.mamba, c.mamba));
        Ok(((headroom.clamp(0.0, 1.0) * f64::from(1u32 << 24)) as u32 + 1, free.kv))
    }

    fn judge_prefill(&self, rank: &Rank) -> Result<(u32, i64), Reason> {
        let held = rank.ledger.occupied();
        let queued = held.uncached;
        let room = if self.rule.unbounded() {
            i64::MAX
        } else {
            if rank.capacity.metadata != UNBOUNDED && held.open >= rank.capacity.metadata {
                return Err(Reason::Metadata);
            }
            let patience = self.rule.alpha * rank.capacity.waiting_timeout;
            let credit = rank.service.credit(held.transfer, queued, rank.capacity.chunk, patience);
            if credit <= 0 {
                return Err(if queued < 2 * rank.capacity.chunk { Reason::PrefillWait } else { Reason::Prefill });
            }
            credit
        };
        let load = (queued + TOKENS_PER_REQUEST * held.open).clamp(0, 1 << 24);
        Ok(((1 << 24) - load as u32 + 1, room))
    }

    /// Whether the rank's load is not known any more.
    pub(crate) fn is_stale(&self, rank: &Rank, now: Moment) -> bool {
        rank.report.as_ref().is_none_or(|r| now.since(r.measured_at) > self.rule.stale_after)
    }

    /// Puts a rank's state into the trees.
    pub(crate) fn refresh(&mut self, slot: u32, now: Moment) {
        let rank = &self.ranks[slot as usize];
        if !rank.live {
            return;
        }
        let Some(Some(worker)) = self.workers.get(rank.worker as usize) else { return };
        let verdict = self.judge(rank, worker, now);
        let r3_open = !worker.egress_full && !worker.egress_held;
        let (side_index, leaf) = (side(rank.role), slot as usize);
        let tree = if side_index == 0 { &mut self.prefill } else { &mut self.decode };
        let (reason, score, room) = match verdict {
            // Of equal ranks the one that was bound to least recently is the best, so that each gets the same share.
            Ok((score, room)) => {
                (Reason::Bound, u64::from(score) << TURN_BITS | (LAST_TURN - rank.turn.min(LAST_TURN)), room)
            }
            Err(reason) => (reason, 0, 0),
        };
        let old = tree.score(leaf) >> TURN_BITS;
        self.improved |= score >> TURN_BITS > old
            || (score > 0 && (tree.room(leaf, false) < Some(room) || (r3_open && tree.room(leaf, true).is_none())));
        // The request that the rank is kept for may fit now.
        self.improved |= reason == Reason::Held;
        tree.set(leaf, score, room, r3_open);
        let rank = &mut self.ranks[leaf];
        if rank.closed != reason {
            let counters = &mut self.closed[side_index];
            if rank.closed != Reason::Bound {
                counters.remove(rank.closed);
            }
            if reason != Reason::Bound {
                counters.add(reason);
            }
            rank.closed = reason;
        }
        self.briefs[leaf] = rank.brief();
    }

    /// A rank is bound to: every other that is equal to it goes before it from now on.
    pub(crate) fn take_turn(&mut self, slot: u32) {
        if let Some(rank) = self.ranks.get_mut(slot as usize) {
            rank.turn = self.next_turn;
            self.next_turn += 1;
        }
    }
}
