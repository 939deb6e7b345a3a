//! The invariants on what the router shows: its ledgers against the harness's books, at every step and at the end.
use std::collections::HashSet;

use r3router_core::admission::{RankView, Snapshot, WindowMode};
use r3router_core::topology::Role;

use crate::book::{Book, Violation, broken};
use crate::engines::Place;

impl Book {
    /// The router's counters are the harness's, after every step.
    pub(crate) fn check_snapshot(&self, s: &Snapshot) -> Result<(), Violation> {
        if s.queued != self.queued || s.queued_bytes != self.queued_bytes {
            let (ours, bytes) = (self.queued, self.queued_bytes);
            return broken(
                "queue",
                format!("{} requests, {} bytes shown; {ours}, {bytes} wait", s.queued, s.queued_bytes),
            );
        }
        if s.arena_reserved != self.arena {
            return broken("released-once", format!("arena {} shown, {} open", s.arena_reserved, self.arena));
        }
        let known: usize = self.workers.iter().filter(|w| w.registered).map(|w| w.ranks.len()).sum();
        if s.ranks.len() != known {
            return broken("views", format!("{} ranks shown, {known} registered", s.ranks.len()));
        }
        let mut seen = HashSet::new();
        for view in &s.ranks {
            let Some(place) = self.viewed(view) else {
                return broken("views", format!("{}@{} is shown and not registered", view.url, view.rank));
            };
            if !seen.insert(place) {
                return broken("views", format!("{}@{} is shown twice", view.url, view.rank));
            }
            self.check_view(place, view)?;
        }
        Ok(())
    }

    fn viewed(&self, view: &RankView) -> Option<Place> {
        let worker = self.workers.iter().position(|w| w.registered && w.url == view.url)?;
        (usize::from(view.rank) < self.workers[worker].ranks.len()).then_some((worker, usize::from(view.rank)))
    }

    /// Attempts open and in transfer on a place, leaks, and leaks that may still be counted.
    fn counts(&self, place: Place) -> (u32, u32, u32, u32) {
        let (mut open, mut transfer, mut leaks, mut lingering) = (0, 0, 0, 0);
        for a in self.rank(place).attempts.iter().map(|i| &self.attempts[*i]) {
            let released = if a.decode == place { a.decode_ended.or(a.finished) } else { a.prefill_released() };
            leaks += u32::from(a.leaked);
            lingering += u32::from(a.lingers && a.decode == place);
            if !a.leaked && released.is_none() {
                open += 1;
                transfer += u32::from(a.delivered.is_none());
            }
        }
        (open, transfer, leaks, lingering)
    }

    fn check_view(&self, place: Place, view: &RankView) -> Result<(), Violation> {
        let (open, transfer, leaks, lingering) = self.counts(place);
        let at = format!("{}@{}", view.url, view.rank);
        if view.open < open || view.open > open + lingering {
            return broken("released-once", format!("{at}: {} open shown, {open} are, {lingering} leaked", view.open));
        }
        if view.in_transfer < transfer || view.in_transfer > transfer + lingering {
            let shown = view.in_transfer;
            return broken(
                "released-once",
                format!("{at}: {shown} in transfer shown, {transfer} are, {lingering} leaked"),
            );
        }
        self.check_free(place, view, i64::from(open + leaks))?;
        let worker = &self.workers[place.0];
        let ejected = ["breaker", "eject", "unreachable", "connect"].iter().any(|word| view.closed.contains(word));
        let threshold = self.config.breaker_threshold;
        let may = worker.connect_failed.is_some() || (threshold > 0 && worker.charged >= threshold);
        if ejected && !may {
            let charged = worker.charged;
            return broken(
                "breaker",
                format!("{at} is closed ({}) after {charged} failures of {threshold}", view.closed),
            );
        }
        Ok(())
    }

    /// What is shown as free leaves out our own attempts and what leaked.
    fn check_free(&self, place: Place, view: &RankView, held: i64) -> Result<(), Violation> {
        let worker = &self.workers[place.0];
        if worker.role == Role::Prefill {
            return Ok(());
        }
        let at = format!("{}@{}", view.url, view.rank);
        if let Some((_, rows)) = self.rows(place)
            && view.rows_free > rows as i64 - held
        {
            return broken("free", format!("{at}: {} rows free shown, {held} of {rows} are held", view.rows_free));
        }
        let per = i64::from(worker.facts.mamba_slots_per_request.unwrap_or(1).max(1));
        if let Some(slots) = worker.facts.mamba_slots
            && view.mamba_free > i64::from(slots) / per - held
        {
            return broken(
                "free",
                format!("{at}: {} mamba free shown, {held} x {per} of {slots} held", view.mamba_free),
            );
        }
        Ok(())
    }

    /// Nothing was bound beyond the window that the router itself shows, before or after the poll.
    pub(crate) fn check_window(&self, before: &Snapshot, after: &Snapshot, touched: &[Place]) -> Result<(), Violation> {
        if self.config.window != WindowMode::Computed || !self.config.enabled {
            return Ok(());
        }
        for place in touched {
            let worker = &self.workers[place.0];
            if worker.role != Role::Decode {
                continue;
            }
            let find = |s: &Snapshot| {
                s.ranks.iter().find(|v| v.url == worker.url && usize::from(v.rank) == place.1).map_or(0, |v| v.window)
            };
            let window = find(before).max(find(after)).max(1);
            let (_, transfer, ..) = self.counts(*place);
            if transfer > window {
                return broken(
                    "window",
                    format!("{}@{}: {transfer} in transfer, window {window}", worker.url, place.1),
                );
            }
        }
        Ok(())
    }

    /// Everything has ended and every engine has said so: the ledgers say the same.
    pub(crate) fn check_quiet(&self, s: &Snapshot, foreign: &[(Place, u32)]) -> Result<(), Violation> {
        for view in &s.ranks {
            let Some(place) = self.viewed(view) else { continue };
            let rows = foreign.iter().find(|(at, _)| *at == place).map_or(0, |(_, rows)| *rows);
            let at = format!("{}@{}", view.url, view.rank);
            let sums = [("open", view.open), ("in_transfer", view.in_transfer)];
            for (name, shown) in sums {
                if shown != 0 {
                    return broken("truth", format!("{at}: {name} {shown} at rest"));
                }
            }
            if view.r3_bytes != 0 {
                return broken("truth", format!("{at}: {} R3 bytes at rest", view.r3_bytes));
            }
            let worker = &self.workers[place.0];
            if worker.role == Role::Prefill {
                if view.uncached_tokens != 0 {
                    return broken("truth", format!("{at}: {} uncached tokens at rest", view.uncached_tokens));
                }
                continue;
            }
            if worker.facts.reports_load && view.foreign != rows {
                return broken("truth", format!("{at}: {} foreign rows shown, {rows} are", view.foreign));
            }
            if let (true, Some(all)) = (worker.facts.reports_load, self.exact_rows(place))
                && view.rows_free != all as i64 - i64::from(rows)
            {
                return broken(
                    "truth",
                    format!("{at}: {} rows free shown, {all} in all, {rows} foreign", view.rows_free),
                );
            }
        }
        if s.arena_reserved != 0 || s.queued != 0 {
            return broken("truth", format!("arena {} and queue {} at rest", s.arena_reserved, s.queued));
        }
        Ok(())
    }

    /// Rows when facts and reports leave no room for reading.
    fn exact_rows(&self, place: Place) -> Option<u64> {
        let facts = &self.workers[place.0].facts;
        (self.workers[place.0].role == Role::Decode).then_some(())?;
        let (running, extra) = (facts.max_running?, facts.extra_slots?);
        let reported = self.rank(place).report.as_ref().and_then(|(_, r)| r.max_running);
        (reported.is_none_or(|r| r == running)).then_some(u64::from(running) + u64::from(extra))
    }
}
