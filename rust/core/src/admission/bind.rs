//! Binding: both reservations in one step, the room, and the permit.
use super::attempts::{Attempt, Leg, Place};
use super::{Admission, Binding, Decision, Permit, Request, Ticket};
use crate::fleet::side;
use crate::ledger::Holding;
use crate::pairing::{Front, Pair};
use crate::policy::Policy;
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::Role;

impl Admission {
    /// Reserves on both ledgers and makes the binding.
    pub(super) fn bind(&mut self, ticket: u64, request: &Request, pair: Pair, now: Moment, out: &mut Vec<Decision>) {
        let r3 = request.r3.unwrap_or_default();
        let max_new = self.max_new(request);
        let place = |slot: u32, generation| Place { slot, generation };

        let back = &mut self.fleet.ranks[pair.back as usize];
        let holds = Holding {
            open: 1,
            transfer: 1,
            kv: back.capacity.kv_need(request.prompt_tokens, max_new),
            prompt: back.capacity.prompt_kv(request.prompt_tokens),
            uncached: 0,
        };
        back.ledger.reserve(holds, now);
        if self.policies.of(back.role) == Policy::CacheAware {
            back.given.add(f64::from(request.prompt_tokens), now);
        }
        if back.free().window <= 0 {
            back.window.was_reached();
        }
        let (decode_id, back_worker) = (back.id, back.worker);
        let decode = Leg { place: place(pair.back, back.generation), holds, text: r3.decode_text, ended: false };
        let role = back.role;
        self.count_leg(back_worker, pair.back, r3.decode_text, now);
        let mut moved = self.policies.bound(&self.fleet, role, pair.back, request, now);

        let (mut prefill, mut ahead, mut uncached) = (None, 0, 0);
        let mut room = 0;
        if let Some(front) = pair.front {
            let rank = &mut self.fleet.ranks[front.slot as usize];
            ahead = rank.queued_tokens();
            uncached = front.uncached;
            let holds = Holding { open: 1, transfer: 1, kv: 0, prompt: 0, uncached };
            rank.ledger.reserve(holds, now);
            let (id, worker, generation) = (rank.id, rank.worker, rank.generation);
            let ranks = self.fleet.workers[worker as usize].as_ref().map_or(1, |w| w.ranks.len() as u16);
            room = self.rooms.draw(id.rank, ranks);
            self.count_leg(worker, front.slot, r3.prefill_text, now);
            self.affinity.insert(&request.prefix, front.known, front.slot);
            self.affinity_back.insert(&request.prefix, pair.known, pair.back);
            moved |= self.policies.bound(&self.fleet, Role::Prefill, front.slot, request, now);
            if front.again > 0 {
                self.idle_tokens = (self.idle_tokens - front.again as f64).max(0.0);
                self.counters.add(Reason::AffinityMoved);
            }
            prefill =
                Some((id, Leg { place: place(front.slot, generation), holds, text: r3.prefill_text, ended: false }));
        } else {
            self.affinity.insert(&request.prefix, pair.known, pair.back);
        }
        if moved {
            self.counters.add(Reason::KeyMoved);
            // Others of the key have another rank now.
            self.dirty = true;
        }
        self.arena_reserved += r3.arena;
        let id = self.attempts.insert(Attempt {
            prefill: prefill.map(|p| p.1),
            decode,
            arena: r3.arena,
            bound_at: now,
            delivered_at: None,
            ahead,
            uncached,
        });
        self.counters.add(Reason::Bound);
        out.push(Decision::Bind(Binding {
            ticket: Ticket(ticket),
            prefill: prefill.map(|p| p.0),
            decode: decode_id,
            room,
            permit: Permit { id, returns: std::sync::Arc::clone(&self.returns) },
        }));
    }

    /// One leg more on a worker.
    fn count_leg(&mut self, worker: u32, slot: u32, text: u64, now: Moment) {
        self.fleet.take_turn(slot);
        let Some(Some(w)) = self.fleet.workers.get_mut(worker as usize) else { return };
        let probing = w.breaker.bound();
        if text > 0 {
            w.egress.reserve(text);
            self.fleet.check_egress(worker, now);
        }
        if probing {
            self.fleet.update_worker(worker, now);
        } else {
            self.fleet.refresh(slot, now);
        }
    }

    /// The admission is switched off: everything is bound at once, ranks in turn.
    pub(super) fn bind_all(&mut self, now: Moment, out: &mut Vec<Decision>) {
        let pd = self.fleet.is_pd();
        let mut cursor = self.queue.begin();
        while let Some(index) = self.queue.look(&mut cursor) {
            let ticket = self.queue.ticket(index);
            let front = if pd { self.next_in_turn(Role::Prefill) } else { None };
            let back = self.next_in_turn(if pd { Role::Decode } else { Role::Regular });
            let Some(back) = back else { return };
            if pd && front.is_none() {
                return;
            }
            let Some(request) = self.queue.take(&mut cursor) else { return };
            let front =
                front.map(|slot| Front { slot, uncached: i64::from(request.prompt_tokens), known: 0, again: 0 });
            self.bind(ticket, &request, Pair { front, back, known: 0 }, now, out);
        }
    }

    fn next_in_turn(&mut self, role: Role) -> Option<u32> {
        let count = self.fleet.ranks.len();
        let turn = &mut self.turns[side(role)];
        for _ in 0..count {
            *turn = (*turn + 1) % count;
            let rank = &self.fleet.ranks[*turn];
            let draining = self.fleet.workers[rank.worker as usize].as_ref().is_none_or(|w| w.draining || rank.drained);
            if rank.live && rank.role == role && !draining {
                return Some(*turn as u32);
            }
        }
        None
    }
}
