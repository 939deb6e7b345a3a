//! Decisions: which waiting requests are bound now, to which pairs, and which are refused.
use std::time::Duration;

use super::{Admission, Decision, Ticket};
use crate::error::{Error, Kind, Source};
use crate::pairing::{self, Kept, Need, Pair};
use crate::policy::KEY_PATIENCE;
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::Role;

/// Requests that do not fit and that one pass looks at.
const MISFITS: usize = 64;
/// Requests of one key in a row that do not fit and that one pass looks at, when there are other keys.
const DEPTH: u32 = 4;
/// Sets of ranks with a prefix whose waiting requests one pass counts.
const PREFIXES: usize = 8;
/// How often windows, rates and breakers are looked at.
pub(super) const TICK: Duration = Duration::from_millis(20);

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
        .advise("add ranks on the side that holds requests back, send fewer at once, or raise --queue-timeout-secs (and --request-timeout-secs, which ends waits too)")
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
            self.counters.add(super::submit::refused_for(&error));
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
        self.key_waits = false;
        self.prefix_waits_for.clear();
        self.skips.clear();
        self.try_holds(now, out);
        let mut cursor = self.queue.begin();
        let (mut deep, mut last_key) = (0, None);
        while let Some(index) = self.queue.look(&mut cursor) {
            if !self.any_credit() {
                self.cut_short = true;
                self.note_shut(index);
                break;
            }
            if self.skips.len() >= MISFITS {
                self.cut_short = true;
                break;
            }
            let Some(entry) = self.queue.entry(index) else { break };
            let (key, retry) = (entry.request.key, entry.request.retry);
            let verdict = if self.is_held(index) { Err(entry.held) } else { self.look_for(index, None, now) };
            match verdict {
                Ok(pair) => {
                    let ticket = self.queue.ticket(index);
                    self.overtake();
                    if let Some(request) = self.queue.take(&mut cursor) {
                        self.bind(ticket, &request, pair, now, out);
                    }
                }
                Err(reason) => {
                    if !self.skipped(index, reason, now) {
                        // It was overtaken often enough, and nothing can be kept for it now: nobody goes before it.
                        self.cut_short = true;
                        break;
                    }
                    deep = if last_key == Some(key) { deep + 1 } else { 1 };
                    last_key = Some(key);
                    self.queue.skip(&mut cursor, retry || deep < DEPTH || self.queue.keys() == 1);
                }
            }
        }
    }

    /// Whether any rank of each side takes anything.
    fn any_credit(&self) -> bool {
        self.fleet.decode.any(false) && (!self.fleet.is_pd() || self.fleet.prefill.any(false))
    }

    /// The whole fleet is shut: the first in line says why.
    fn note_shut(&mut self, index: u32) {
        let side = usize::from(!self.fleet.decode.any(false));
        self.blocked = self.fleet.why_closed(side);
        self.counters.add(self.blocked);
        if let Some(entry) = self.queue.entry_mut(index) {
            entry.held = self.blocked;
        }
    }

    /// Looks for a pair for an entry.
    pub(super) fn look_for(&mut self, index: u32, kept: Option<Kept>, now: Moment) -> Result<Pair, Reason> {
        let arena_is_kept = kept.is_none() && self.holds.iter().any(|h| h.arena);
        let Some(entry) = self.queue.entry_mut(index) else { return Err(Reason::Cancelled) };
        let request = &entry.request;
        if let Some(r3) = request.r3
            && r3.arena > 0
            && (arena_is_kept
                || self.arena_reserved.saturating_add(self.arena_kept).saturating_add(r3.arena)
                    > self.config.arena_bytes)
        {
            return Err(Reason::Arena);
        }
        if !request.prefix.is_empty() && now.since(entry.found_at) >= TICK {
            let fleet = &self.fleet;
            entry.found =
                self.affinity.longest(&entry.request.prefix, |s| fleet.briefs.get(s as usize).is_some_and(|r| r.live));
            if self.affinity_back.bytes() > 0 {
                entry.found_back = self
                    .affinity_back
                    .longest(&entry.request.prefix, |s| fleet.briefs.get(s as usize).is_some_and(|r| r.live));
            }
            entry.found_at = now;
        }
        let (found, keyed) = (entry.found, entry.request.key != 0);
        // Requests of one key have their prefix in common; without a key, what this pass has met counts.
        let of_key = if keyed { self.queue.of_key(index) - 1 } else { 0 };
        let met = self.prefix_waits_for.iter().find(|(ranks, _)| ranks.same_ranks(&found)).map_or(0, |(_, n)| *n);
        // Where decode is what limits, most of them wait for it, and not for these ranks.
        let part = (self.fleet.appetite / self.queue.len().max(1) as f64).min(1.0);
        let behind = (f64::from(of_key.max(met)) * part) as u32;
        let draw = self.policies.draw();
        let Some(entry) = self.queue.entry(index) else { return Err(Reason::Cancelled) };
        let need = Need {
            request: &entry.request,
            found: entry.found,
            found_back: entry.found_back,
            draw,
            waited_out: now.since(entry.key_since) >= KEY_PATIENCE,
            max_new: entry.request.max_new_tokens.unwrap_or(self.config.default_max_new_tokens),
            idle_tokens: self.idle_tokens,
            behind,
            crowded: part < 1.0,
            kept,
            now,
        };
        pairing::choose(&self.fleet, &self.cooldowns, &self.policies, &need)
    }

    /// An entry stays because it did not fit. Says whether younger ones may still go before it.
    fn skipped(&mut self, index: u32, reason: Reason, now: Moment) -> bool {
        self.skips.push(index);
        if self.is_held(index) {
            return true;
        }
        self.blocked = reason;
        self.counters.add(reason);
        if reason == Reason::Affinity {
            self.waits_for_prefix(index);
        }
        let Some(entry) = self.queue.entry_mut(index) else { return true };
        entry.held = reason;
        if matches!(reason, Reason::Key | Reason::KeyDecode) {
            entry.key_since = entry.key_since.min(now);
            self.key_waits = true;
        }
        entry.overtaken < self.config.max_overtakes || self.hold(index, reason, now)
    }

    /// An entry waits for the ranks that have its prefix.
    fn waits_for_prefix(&mut self, index: u32) {
        self.prefix_waits = true;
        let Some(found) = self.queue.entry(index).map(|entry| entry.found) else { return };
        if let Some((_, count)) = self.prefix_waits_for.iter_mut().find(|(ranks, _)| ranks.same_ranks(&found)) {
            *count += 1;
        } else if self.prefix_waits_for.len() < PREFIXES {
            self.prefix_waits_for.push((found, 1));
        }
    }

    /// A request goes before those that were skipped in this pass.
    fn overtake(&mut self) {
        for &index in &self.skips {
            if let Some(entry) = self.queue.entry_mut(index) {
                entry.overtaken = entry.overtaken.saturating_add(1);
            }
        }
    }
}
