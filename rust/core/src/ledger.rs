//! What is held on one rank: the router's own reservations, and load that is not the router's.
//!
//! The own ledger is the primary truth, because reports lag. A report is compared with what the ledger held *when the report
//! was measured*; only what it counts beyond that is foreign, so that no request is ever in both.
use std::collections::VecDeque;
use std::ops::{AddAssign, SubAssign};

use crate::time::Moment;

/// Amounts on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Requests.
    pub open: i64,
    /// Requests whose KV has not arrived (decode), or that are not prefilled and delivered (prefill).
    pub transfer: i64,
    /// KV tokens with growth room.
    pub kv: i64,
    /// KV tokens of prompts alone.
    pub prompt: i64,
    /// Tokens that prefill must compute.
    pub uncached: i64,
}

impl AddAssign for Holding {
    fn add_assign(&mut self, o: Self) {
        self.open += o.open;
        self.transfer += o.transfer;
        self.kv += o.kv;
        self.prompt += o.prompt;
        self.uncached += o.uncached;
    }
}

impl SubAssign for Holding {
    fn sub_assign(&mut self, o: Self) {
        self.open -= o.open;
        self.transfer -= o.transfer;
        self.kv -= o.kv;
        self.prompt -= o.prompt;
        self.uncached -= o.uncached;
    }
}

/// What a report counts on a rank; `None` where it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Requests, in whatever queue.
    pub open: Option<i64>,
    /// Requests in transfer and before it.
    pub transfer: Option<i64>,
    /// KV tokens in use.
    pub kv: Option<i64>,
    /// Queued uncached tokens.
    pub uncached: Option<i64>,
}

/// Reports whose foreign load is remembered: the highest counts, because a request that the engine has not seen yet hides one.
const FOREIGN_MEMORY: usize = 3;
/// Changes that are remembered between two reports. A rank that changes more often within one report's age forgets the
/// oldest, and reports from before them are not used.
const HISTORY_MAX: usize = 1 << 16;

/// Changes between two reports for which there is room from the start, so that a busy rank makes no room while it binds.
const HISTORY_FIRST: usize = 128;

#[derive(Clone, Copy, Debug)]
struct Change {
    at: Moment,
    added: bool,
    what: Holding,
}

/// The ledger of one rank.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    own: Holding,
    leaked: Holding,
    leaks: Vec<(Moment, Holding)>,
    foreign: Holding,
    recent: [Holding; FOREIGN_MEMORY],
    next: usize,
    /// Changes since the last report; only kept while reports are expected.
    history: VecDeque<Change>,
    recording: bool,
    /// Reports from before this cannot be compared.
    known_since: Moment,
    /// Own requests when the last report was measured.
    own_then: Option<i64>,
    /// KV tokens that the last report counted, less those of own prompts when it was measured.
    beyond_prompts: Option<i64>,
}

impl Ledger {
    /// An empty ledger. `recording`: whether reports will come.
    pub fn new(recording: bool) -> Self {
        let history = VecDeque::with_capacity(if recording { HISTORY_FIRST } else { 0 });
        Self { history, recording, ..Self::default() }
    }

    /// Whether reports will come from now on.
    pub fn set_recording(&mut self, recording: bool, now: Moment) {
        if recording && !self.recording {
            self.known_since = now;
        }
        if !recording {
            self.history.clear();
            self.foreign = Holding::default();
            self.recent = [Holding::default(); FOREIGN_MEMORY];
            self.beyond_prompts = None;
        }
        self.recording = recording;
    }

    fn note(&mut self, at: Moment, added: bool, what: Holding) {
        if !self.recording {
            return;
        }
        if self.history.len() >= HISTORY_MAX
            && let Some(gone) = self.history.pop_front()
        {
            self.known_since = self.known_since.max(gone.at);
        }
        self.history.push_back(Change { at, added, what });
    }

    /// Reserves.
    pub fn reserve(&mut self, what: Holding, now: Moment) {
        self.own += what;
        self.note(now, true, what);
    }

    /// Gives back.
    pub fn release(&mut self, what: Holding, now: Moment) {
        self.own -= what;
        self.note(now, false, what);
    }

    /// Ends an own reservation that the engine may still hold: it stays occupied until a report from after `now` says what is
    /// true, or until [`Ledger::expire_leaks`] where no report comes.
    pub fn leak(&mut self, what: Holding, now: Moment) {
        self.release(what, now);
        self.leaked += what;
        self.leaks.push((now, what));
    }

    /// Forgets leaks from `before` and earlier. Says whether there were any.
    pub fn expire_leaks(&mut self, before: Moment) -> bool {
        let (leaked, count) = (&mut self.leaked, self.leaks.len());
        self.leaks.retain(|&(at, what)| {
            let keep = at > before;
            if !keep {
                *leaked -= what;
            }
            keep
        });
        self.leaks.len() != count
    }

    /// The own reservations as they were just before `at`.
    fn own_at(&self, at: Moment) -> Holding {
        let mut own = self.own;
        for change in self.history.iter().rev() {
            if change.at < at {
                break;
            }
            if change.added {
                own -= change.what;
            } else {
                own += change.what;
            }
        }
        own
    }

    /// Compares with a report measured at `at`; returns `false` when it is too old to be compared. Reports must come in the
    /// order in which they were measured.
    pub fn reconcile(&mut self, counted: Counted, at: Moment) -> bool {
        if at < self.known_since {
            return false;
        }
        let own = self.own_at(at);
        self.own_then = Some(own.open);
        self.beyond_prompts = counted.kv.map(|used| used - own.prompt);
        while self.history.front().is_some_and(|c| c.at < at) {
            self.history.pop_front();
        }
        let over = |counted: Option<i64>, own: i64| counted.map_or(0, |c| (c - own).max(0));
        let open = over(counted.open, own.open);
        let now = Holding {
            open,
            transfer: over(counted.transfer, own.transfer).min(if counted.open.is_some() { open } else { i64::MAX }),
            // Growth room of own requests is not use; while others are there, what exceeds own prompts is theirs.
            kv: over(counted.kv, if open > 0 { own.prompt } else { own.kv }),
            prompt: 0,
            uncached: over(counted.uncached, own.uncached),
        };
        self.recent[self.next] = now;
        self.next = (self.next + 1) % FOREIGN_MEMORY;
        self.foreign = Holding {
            open: self.recent.iter().map(|h| h.open).max().unwrap_or(0),
            transfer: self.recent.iter().map(|h| h.transfer).max().unwrap_or(0),
            ..now
        };
        self.expire_leaks(at);
        true
    }

    /// The router's own reservations.
    pub fn own(&self) -> Holding {
        self.own
    }

    /// The router's own requests when the last report was measured.
    pub fn own_at_report(&self) -> Option<i64> {
        self.own_then
    }

    /// KV tokens in use now, as far as the last report tells: what it counted, and the prompts that were sent since, less those
    /// that ended. `None` when no report said. Growth that was reserved and not used is not in it; growth that was used is,
    /// beyond what was reserved.
    pub fn kv_in_use(&self) -> Option<i64> {
        self.beyond_prompts.map(|beyond| (beyond + self.own.prompt + self.leaked.kv).max(0))
    }

    /// Load of others.
    pub fn foreign(&self) -> Holding {
        self.foreign
    }

    /// Reservations that ended here and may not have ended there.
    pub fn leaked(&self) -> Holding {
        self.leaked
    }

    /// Everything that is to be taken as held.
    pub fn occupied(&self) -> Holding {
        let mut all = self.own;
        all += self.foreign;
        all += self.leaked;
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(kv: i64) -> Holding {
        Holding { open: 1, transfer: 1, kv, prompt: kv, uncached: 0 }
    }

    fn at(n: u64) -> Moment {
        Moment(n)
    }

    fn counted(open: i64, transfer: i64, kv: i64) -> Counted {
        Counted { open: Some(open), transfer: Some(transfer), kv: Some(kv), uncached: None }
    }

    #[test]
    fn a_request_that_a_report_shows_is_counted_once() {
        let mut l = Ledger::new(true);
        l.reserve(one(100), at(10));
        assert!(l.reconcile(counted(1, 1, 100), at(20)));
        assert_eq!(l.occupied(), one(100));
    }

    #[test]
    fn a_request_that_a_late_report_does_not_show_yet_is_counted_once() {
        let mut l = Ledger::new(true);
        l.reserve(one(100), at(30));
        assert!(l.reconcile(counted(0, 0, 0), at(20)));
        assert_eq!(l.occupied(), one(100));
    }

    #[test]
    fn a_request_that_ended_after_the_measurement_is_not_foreign() {
        let mut l = Ledger::new(true);
        l.reserve(one(100), at(10));
        l.release(one(100), at(30));
        assert!(l.reconcile(counted(1, 1, 100), at(20)));
        assert_eq!(l.occupied(), Holding::default());
    }

    #[test]
    fn load_of_others_is_foreign_and_leaves_when_three_reports_do_not_show_it() {
        let mut l = Ledger::new(true);
        l.reserve(one(100), at(10));
        l.reconcile(counted(3, 2, 700), at(20));
        assert_eq!(l.foreign(), Holding { open: 2, transfer: 1, kv: 600, ..Holding::default() });
        for i in 0..3 {
            assert_eq!(l.foreign().open, 2);
            l.reconcile(counted(1, 1, 100), at(30 + i));
        }
        assert_eq!(l.foreign(), Holding::default());
    }

    #[test]
    fn a_leak_stays_until_a_report_from_after_it_shows_the_slot_free() {
        let mut l = Ledger::new(true);
        l.reserve(one(100), at(10));
        l.leak(one(100), at(50));
        l.reconcile(counted(1, 1, 100), at(40));
        assert_eq!(l.occupied(), one(100), "an older report proves nothing");
        l.reconcile(counted(1, 1, 100), at(60));
        assert_eq!((l.leaked().open, l.occupied().open), (0, 1), "the engine still counts it: foreign now");
        for t in [70, 80, 90] {
            l.reconcile(counted(0, 0, 0), at(t));
        }
        assert_eq!(l.occupied(), Holding::default());
    }

    #[test]
    fn without_reports_a_leak_expires_by_time() {
        let mut l = Ledger::new(false);
        l.reserve(one(5), at(1));
        l.leak(one(5), at(2));
        assert!(!l.expire_leaks(at(1)));
        assert_eq!(l.occupied().open, 1);
        assert!(l.expire_leaks(at(2)));
        assert_eq!(l.occupied(), Holding::default());
    }

    #[test]
    fn unused_growth_room_of_own_requests_is_no_foreign_kv() {
        let mut l = Ledger::new(true);
        l.reserve(Holding { open: 1, transfer: 0, kv: 1000, prompt: 600, uncached: 0 }, at(1));
        l.reconcile(counted(1, 0, 700), at(2));
        assert_eq!(l.occupied().kv, 1000);
        l.reconcile(counted(1, 0, 1500), at(3));
        assert_eq!(l.occupied().kv, 1500, "growth beyond the reserve counts");
    }

    #[test]
    fn kv_in_use_is_what_was_reported_and_the_prompts_since() {
        let held = |prompt| Holding { open: 1, transfer: 0, kv: prompt + 4096, prompt, uncached: 0 };
        let mut l = Ledger::new(true);
        assert_eq!(l.kv_in_use(), None);
        l.reserve(held(600), at(1));
        l.reconcile(counted(1, 0, 20_600), at(2));
        assert_eq!(l.kv_in_use(), Some(20_600), "it grew far beyond its reserve");
        l.reserve(held(300), at(3));
        assert_eq!(l.kv_in_use(), Some(20_900));
        l.release(held(600), at(4));
        assert_eq!(l.kv_in_use(), Some(20_300), "what it grew is known to be free when a report says so");
        l.reconcile(counted(1, 0, 320), at(5));
        assert_eq!(l.kv_in_use(), Some(320));
    }

    #[test]
    fn a_report_from_before_what_is_remembered_is_refused() {
        let mut l = Ledger::new(false);
        l.set_recording(true, at(100));
        assert!(!l.reconcile(counted(9, 9, 9), at(99)));
        assert_eq!(l.occupied(), Holding::default());
    }

    proptest! {
        /// Whatever the order of binds, ends and honest reports of any age: own plus foreign is the truth as far as known, and
        /// never less than the own reservations.
        #[test]
        fn honest_reports_of_own_load_never_make_foreign_load(ops in proptest::collection::vec((0u8..3, 0u64..50), 1..200)) {
            let mut l = Ledger::new(true);
            let mut truth: Vec<(u64, i64)> = vec![(0, 0)];
            let (mut open, mut last) = (0i64, 0u64);
            for (i, (op, age)) in ops.into_iter().enumerate() {
                let t = (i as u64 + 1) * 10;
                match op {
                    0 => { open += 1; l.reserve(one(7), at(t)); }
                    1 if open > 0 => { open -= 1; l.release(one(7), at(t)); }
                    _ => {
                        let m = t.saturating_sub(age * 3).max(last);
                        last = m;
                        // The truth just before m.
                        let seen = truth.iter().rev().find(|&&(when, _)| when < m).map_or(0, |&(_, n)| n);
                        l.reconcile(counted(seen, seen, seen * 7), at(m));
                    }
                }
                truth.push((t, open));
                prop_assert_eq!(l.foreign(), Holding::default());
                prop_assert_eq!(l.occupied().open, open);
                prop_assert_eq!(l.occupied().kv, open * 7);
            }
        }
    }
}
