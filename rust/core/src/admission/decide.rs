//! Decisions: which waiting requests are bound now, to which pairs, and which are refused.
use std::time::Duration;

use super::attempts::{Attempt, Leg, Place};
use super::{Admission, Binding, Decision, Permit, Ticket};
use crate::error::{Error, Kind, Source};
use crate::fleet::{side, takes};
use crate::ledger::Holding;
use crate::pairing::{self, Front, Kept, Need, Pair};
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::Role;

/// Requests that do not fit and that one pass looks at.
const MISFITS: u32 = 16;
/// Requests of one key that one pass looks at, when there are other keys.
const DEPTH: u32 = 4;
/// How often windows, rates and breakers are looked at.
const TICK: Duration = Duration::from_millis(20);
/// Half-life of the idle tokens that let a prefix move, seconds.
const IDLE_HALF_LIFE: f64 = 10.0;
/// Tokens per second of a prefill rank that was not measured yet.
const RATE_UNKNOWN: f64 = 5_000.0;
/// Lines of the affinity table that one tick sweeps.
const SWEEP_LINES: usize = 4096;

/// A request that was overtaken too often, and what is kept for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    ticket: u64,
    kept: Kept,
    /// R3 of others waits, because the arena is what it lacks.
    arena: bool,
}

impl Admission {
    /// Appends every decision that can be taken now. Returns when to call again if nothing else happens before.
    pub fn poll(&mut self, now: Moment, out: &mut Vec<Decision>) -> Option<Moment> {
        self.take_returns(now);
        if now >= self.next_tick {
            self.tick(now);
        }
        if self.paused_since.is_none() {
            self.refuse_late(now, out);
            self.refuse_orphans(out, now);
            self.refuse_too_large(out, now);
            if !self.config.enabled {
                self.bind_all(now, out);
            } else if self.dirty || self.fleet.improved {
                self.pass(now, out);
            }
        }
        self.next_call()
    }

    fn next_call(&self) -> Option<Moment> {
        if self.queue.is_empty() || self.paused_since.is_some() {
            return None;
        }
        let due = self.queue.earliest().map_or(u64::MAX, |(at, _)| at.saturating_add(self.paused_total));
        Some(self.next_tick.min(Moment(due)))
    }

    // ---- refusals -------------------------------------------------------------------------------------------------------

    fn refuse_late(&mut self, now: Moment, out: &mut Vec<Decision>) {
        let clock = self.queue_time(now);
        while let Some((due, index)) = self.queue.earliest()
            && due <= clock
        {
            let ticket = self.queue.ticket(index);
            let error = self.late(index, now);
            self.let_go(ticket, now);
            self.queue.remove(index);
            self.counters.add(Reason::Deadline);
            self.dirty = true;
            out.push(Decision::Refuse(Ticket(ticket), error));
        }
    }

    fn late(&self, index: u32, now: Moment) -> Error {
        let Some(entry) = self.queue.entry(index) else {
            return Error::new(Kind::QueueTimeout, Source::Router, "the deadline passed");
        };
        let paused = self.paused_for(now) - entry.paused_before;
        let waited =
            Duration::from_nanos(now.since(entry.since).as_nanos() as u64).saturating_sub(Duration::from_nanos(paused));
        let limit = entry.request.deadline.since(entry.since);
        let why = if entry.held == Reason::Queued { self.blocked } else { entry.held };
        Error::new(
            Kind::QueueTimeout,
            Source::Router,
            format!(
                "waited {:.1} s of at most {:.1} s in the router, with {} others; held by: {}",
                waited.as_secs_f64(),
                limit.as_secs_f64(),
                self.queue.len() - 1,
                why.name()
            ),
        )
        .with_limit(limit.as_secs_f64(), waited.as_secs_f64())
        .advise("add ranks on the side that holds requests back, send fewer at once, or raise the queue's deadline")
        .retry_after(Duration::from_secs(1))
    }

    /// Requests that wait for a role that has no worker any more.
    fn refuse_orphans(&mut self, out: &mut Vec<Decision>, now: Moment) {
        if self.queue.is_empty() {
            return;
        }
        let missing = if self.fleet.is_pd() {
            [Role::Prefill, Role::Decode].into_iter().find(|&r| self.fleet.registered(r) == 0)
        } else {
            (self.fleet.registered(Role::Regular) == 0).then_some(Role::Regular)
        };
        let Some(role) = missing else { return };
        let name = match role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Regular => "regular (or prefill and decode)",
        };
        let mut cursor = self.queue.begin();
        while let Some(index) = self.queue.look(&mut cursor) {
            let ticket = self.queue.ticket(index);
            self.let_go(ticket, now);
            self.queue.take(&mut cursor);
            self.counters.add(Reason::NoWorkers);
            let error = Error::new(Kind::NoWorkers, Source::Router, format!("the last {name} worker was removed"))
                .with_limit(1.0, 0.0)
                .advise(format!("register a {name} worker, by flag or by POST /workers"))
                .retry_after(Duration::from_secs(1));
            out.push(Decision::Refuse(Ticket(ticket), error));
        }
    }

    /// Requests that fitted when they came and fit no rank any more: the largest rank went, or turned out to be smaller.
    fn refuse_too_large(&mut self, out: &mut Vec<Decision>, now: Moment) {
        if !std::mem::take(&mut self.fleet.shrank) {
            return;
        }
        let mut cursor = self.queue.begin();
        while let Some(index) = self.queue.look(&mut cursor) {
            let error = self.queue.entry(index).and_then(|entry| self.too_large(&entry.request));
            let Some(error) = error else {
                self.queue.skip(&mut cursor, true);
                continue;
            };
            let ticket = self.queue.ticket(index);
            self.let_go(ticket, now);
            self.queue.take(&mut cursor);
            self.counters.add(Reason::TooLarge);
            self.dirty = true;
            out.push(Decision::Refuse(Ticket(ticket), error));
        }
    }

    // ---- a pass over the queue ------------------------------------------------------------------------------------------

    fn pass(&mut self, now: Moment, out: &mut Vec<Decision>) {
        self.dirty = false;
        self.fleet.improved = false;
        self.cut_short = false;
        self.prefix_waits = false;
        self.skips.clear();
        self.try_held(now, out);
        let mut cursor = self.queue.begin();
        let (mut misfits, mut deep, mut key) = (0, 0, None);
        while let Some(index) = self.queue.look(&mut cursor) {
            if !self.any_credit() {
                self.cut_short = true;
                self.note_held(index);
                break;
            }
            if misfits >= MISFITS {
                self.cut_short = true;
                break;
            }
            let Some(entry) = self.queue.entry(index) else { break };
            let this_key = entry.request.key;
            let held = self.hold.is_some_and(|h| h.ticket == self.queue.ticket(index));
            let verdict = if held { Err(self.blocked) } else { self.look_for(index, None, now) };
            match verdict {
                Ok(pair) => {
                    let ticket = self.queue.ticket(index);
                    if misfits > 0 {
                        self.overtake();
                    }
                    if let Some(request) = self.queue.take(&mut cursor) {
                        self.bind(ticket, &request, pair, now, out);
                    }
                    deep = 0;
                }
                Err(reason) => {
                    misfits += 1;
                    deep = if key == Some(this_key) { deep + 1 } else { 1 };
                    key = Some(this_key);
                    if !held {
                        self.skipped(index, reason, now);
                    }
                    self.queue.skip(&mut cursor, deep < DEPTH || self.queue.keys() == 1);
                }
            }
        }
    }

    /// Whether any rank of each side takes anything.
    fn any_credit(&self) -> bool {
        self.fleet.decode.plain.any() && (!self.fleet.is_pd() || self.fleet.prefill.plain.any())
    }

    /// The whole fleet is shut: the first in line says why.
    fn note_held(&mut self, index: u32) {
        let reason = if self.fleet.decode.plain.any() { self.fleet.why_closed(0) } else { self.fleet.why_closed(1) };
        self.blocked = reason;
        self.counters.add(reason);
        if let Some(entry) = self.queue.entry_mut(index) {
            entry.held = reason;
        }
    }

    /// Looks for a pair for an entry.
    fn look_for(&mut self, index: u32, kept: Option<Kept>, now: Moment) -> Result<Pair, Reason> {
        let Some(entry) = self.queue.entry(index) else { return Err(Reason::Cancelled) };
        let request = &entry.request;
        if let Some(r3) = request.r3 {
            let others_first = kept.is_none() && self.hold.is_some_and(|h| h.arena);
            if r3.arena > 0 && (others_first || self.arena_reserved.saturating_add(r3.arena) > self.config.arena_bytes)
            {
                return Err(Reason::Arena);
            }
        }
        let need = Need { request, max_new: self.max_new(request), idle_tokens: self.idle_tokens, kept, now };
        pairing::choose(&self.fleet, &mut self.affinity, &self.cooldowns, &need)
    }

    /// An entry stays because it did not fit.
    fn skipped(&mut self, index: u32, reason: Reason, now: Moment) {
        self.blocked = reason;
        self.counters.add(reason);
        self.prefix_waits |= reason == Reason::Affinity;
        let ticket = self.queue.ticket(index);
        let Some(entry) = self.queue.entry_mut(index) else { return };
        entry.held = reason;
        if entry.overtaken >= self.config.max_overtakes && self.hold.is_none() {
            self.hold = Some(Hold { ticket, kept: Kept::default(), arena: false });
            self.keep(index, reason, now);
        }
        self.skips.push(index);
    }

    /// A request was bound before those that were skipped in this pass.
    fn overtake(&mut self) {
        for &index in &self.skips {
            if let Some(entry) = self.queue.entry_mut(index) {
                entry.overtaken = entry.overtaken.saturating_add(1);
            }
        }
    }

    // ---- the request that was overtaken too often -------------------------------------------------------------------------

    /// Tries the request that ranks are kept for.
    fn try_held(&mut self, now: Moment, out: &mut Vec<Decision>) {
        let Some(hold) = self.hold else { return };
        let Some(index) = self.queue.find(hold.ticket) else {
            self.let_go(hold.ticket, now);
            return;
        };
        match self.look_for(index, Some(hold.kept), now) {
            Ok(pair) => {
                self.let_go(hold.ticket, now);
                if let Some(request) = self.queue.remove(index) {
                    self.bind(hold.ticket, &request, pair, now, out);
                }
            }
            Err(reason) => {
                self.counters.add(reason);
                if let Some(entry) = self.queue.entry_mut(index) {
                    entry.held = reason;
                }
                self.keep(index, reason, now);
            }
        }
    }

    /// Keeps ranks of the side that the request lacks, so that they drain for it.
    fn keep(&mut self, index: u32, reason: Reason, now: Moment) {
        let Some(mut hold) = self.hold else { return };
        let Some(entry) = self.queue.entry(index) else { return };
        let prompt = entry.request.prompt_tokens;
        let max_new = self.max_new(&entry.request);
        let pd = self.fleet.is_pd();
        let usable = |slot: u32| {
            let rank = &self.fleet.ranks[slot as usize];
            rank.live && takes(rank.closed)
        };
        hold.arena = reason == Reason::Arena;
        let prefill_side = matches!(reason, Reason::Prefill | Reason::PrefillWait | Reason::Affinity);
        if hold.kept.prefill.is_some_and(|s| !usable(s)) {
            hold.kept.prefill = None;
        }
        if hold.kept.decode.is_some_and(|s| !usable(s)) {
            hold.kept.decode = None;
        }
        if pd && prefill_side && hold.kept.prefill.is_none() {
            hold.kept.prefill = (0..self.fleet.ranks.len() as u32)
                .filter(|&s| {
                    let rank = &self.fleet.ranks[s as usize];
                    rank.role == Role::Prefill && usable(s) && rank.capacity.fits_prompt(prompt)
                })
                .min_by_key(|&s| self.fleet.ranks[s as usize].queued_tokens());
        }
        if !prefill_side && reason != Reason::Arena && hold.kept.decode.is_none() {
            hold.kept.decode = (0..self.fleet.ranks.len() as u32)
                .filter(|&s| {
                    let rank = &self.fleet.ranks[s as usize];
                    side(rank.role) == 1 && usable(s) && rank.capacity.fits_idle(prompt, max_new)
                })
                .max_by_key(|&s| self.fleet.ranks[s as usize].free().kv);
        }
        self.hold = Some(hold);
        for slot in [hold.kept.prefill, hold.kept.decode].into_iter().flatten() {
            self.mark(slot, true, reason == Reason::R3Egress, now);
        }
    }

    fn mark(&mut self, slot: u32, held: bool, egress: bool, now: Moment) {
        let rank = &mut self.fleet.ranks[slot as usize];
        let worker = rank.worker;
        let Some(Some(w)) = self.fleet.workers.get_mut(worker as usize) else { return };
        if rank.held == held && w.egress_held == egress {
            return;
        }
        rank.held = held;
        if w.egress_held == egress {
            self.fleet.refresh(slot, now);
        } else {
            w.egress_held = egress;
            self.fleet.update_worker(worker, now);
        }
    }

    /// Whatever was kept for this ticket is open to all again.
    pub(super) fn let_go(&mut self, ticket: u64, now: Moment) {
        let Some(hold) = self.hold.filter(|h| h.ticket == ticket) else { return };
        self.hold = None;
        self.dirty = true;
        for slot in [hold.kept.prefill, hold.kept.decode].into_iter().flatten() {
            self.mark(slot, false, false, now);
        }
    }

    // ---- binding --------------------------------------------------------------------------------------------------------

    /// Reserves on both ledgers and makes the binding.
    fn bind(&mut self, ticket: u64, request: &super::Request, pair: Pair, now: Moment, out: &mut Vec<Decision>) {
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
        if back.free().window <= 0 {
            back.window.was_reached();
        }
        let (decode_id, back_worker) = (back.id, back.worker);
        let decode = Leg { place: place(pair.back, back.generation), holds, text: r3.decode_text, ended: false };
        self.count_leg(back_worker, pair.back, r3.decode_text, now);

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
            if front.again > 0 {
                self.idle_tokens = (self.idle_tokens - front.again as f64).max(0.0);
                self.counters.add(Reason::AffinityMoved);
            }
            prefill =
                Some((id, Leg { place: place(front.slot, generation), holds, text: r3.prefill_text, ended: false }));
        } else {
            self.affinity.insert(&request.prefix, pair.known, pair.back);
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
    fn bind_all(&mut self, now: Moment, out: &mut Vec<Decision>) {
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
            let draining = self.fleet.workers[rank.worker as usize].as_ref().is_none_or(|w| w.draining);
            if rank.live && rank.role == role && !draining {
                return Some(*turn as u32);
            }
        }
        None
    }

    // ---- time -----------------------------------------------------------------------------------------------------------

    fn tick(&mut self, now: Moment) {
        let secs = now.since(self.last_tick).as_secs_f64().min(1.0);
        self.last_tick = now;
        self.next_tick = now + TICK;
        let limited = !self.queue.is_empty()
            && matches!(
                self.blocked,
                Reason::Window | Reason::Prefill | Reason::PrefillWait | Reason::Affinity | Reason::R3Egress
            );
        self.flow_limited &= limited;
        if self.flow.update(now, self.flow_limited) {
            self.flow_limited = true;
        }
        self.fleet.tick(now, self.flow.rate(), self.flow.tau());
        self.idle_tokens *= (-secs / IDLE_HALF_LIFE * std::f64::consts::LN_2).exp();
        if self.prefix_waits && !self.queue.is_empty() {
            let idle = self
                .fleet
                .ranks
                .iter()
                .filter(|r| r.live && r.role == Role::Prefill && r.closed == Reason::Bound)
                .filter(|r| r.queued_tokens() < r.capacity.chunk)
                .map(|r| r.service.rate().unwrap_or(RATE_UNKNOWN))
                .sum::<f64>();
            self.idle_tokens += idle * secs;
            self.dirty = true;
        }
        // A pair that has rested may be what somebody waits for.
        let resting = self.cooldowns.resting(now);
        self.dirty |= resting < self.resting;
        self.resting = resting;
        if !self.affinity.swept() {
            self.affinity.sweep(SWEEP_LINES);
        }
        if self.affinity.swept() && !self.fleet.retired.is_empty() {
            self.fleet.reuse_retired();
        }
    }
}
