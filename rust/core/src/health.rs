//! Which workers and pairs are out of choice for a while, and how many retries a fleet is given.
//!
//! Client errors, cancels and the router's own deadlines never count. Connect refused counts at once, everything else in a
//! row. Slowness alone never takes out the last worker of a role.
use std::time::Duration;

use crate::admission::Failure;
use crate::time::Moment;
use crate::topology::WorkerId;

/// First wait before a refused worker is probed; doubles up to the breaker's own time.
const QUICK_PROBE: Duration = Duration::from_secs(1);
/// Transfer failures in a row that cool a pair down (engine-protocol 6.5).
const PAIR_FAILURES: u32 = 2;
/// Pairs that are remembered; a fleet that has more failing pairs at once has other trouble.
const PAIRS_MAX: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open {
        until: Moment,
    },
    /// One attempt is let through.
    HalfOpen {
        probing: bool,
    },
}

/// The breaker of one worker.
#[derive(Clone, Debug)]
pub struct Breaker {
    state: State,
    failures: u32,
    /// Connects refused in a row while open.
    refusals: u32,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed, failures: 0, refusals: 0 }
    }
}

/// How a breaker is set.
#[derive(Clone, Copy, Debug)]
pub struct BreakerRule {
    /// Failures in a row that open it; 0: none do. A refused connect opens it in any case: nothing can be sent there.
    pub threshold: u32,
    /// How long it stays open.
    pub open_for: Duration,
}

impl Breaker {
    /// A leg failed on this worker. `last`: it is the only worker of its role that is in choice.
    pub fn failed(&mut self, how: Failure, rule: BreakerRule, last: bool, now: Moment) {
        let slow = match how {
            // The router's own deadline, back-pressure, and full state slots say nothing about health.
            Failure::Deadline | Failure::Overloaded | Failure::Mamba => return,
            Failure::Transfer => true,
            Failure::Connect | Failure::Reset | Failure::Server => false,
        };
        self.failures = self.failures.saturating_add(1);
        if how == Failure::Connect {
            let wait = QUICK_PROBE.saturating_mul(1 << self.refusals.min(16)).min(rule.open_for.max(QUICK_PROBE));
            // Attempts that were under way when it opened do not make the wait longer.
            if !matches!(self.state, State::Open { .. }) {
                self.refusals = self.refusals.saturating_add(1);
                self.state = State::Open { until: now + wait };
            }
            return;
        }
        let half_open = matches!(self.state, State::HalfOpen { .. });
        let too_many = rule.threshold > 0 && self.failures >= rule.threshold;
        if (too_many || half_open) && !(slow && last) {
            self.state = State::Open { until: now + rule.open_for };
        } else if half_open {
            self.state = State::HalfOpen { probing: false };
        }
    }

    /// A leg was answered by this worker, with whatever the request deserved.
    pub fn answered(&mut self) {
        *self = Self::default();
    }

    /// The KV of an attempt arrived: if it was the probe, it passed. Failures in a row are not forgotten before a whole answer.
    pub fn probe_passed(&mut self) {
        if matches!(self.state, State::HalfOpen { .. }) {
            *self = Self::default();
        }
    }

    /// An attempt ended and says nothing: if it was the probe, another may go.
    pub fn inconclusive(&mut self) {
        if let State::HalfOpen { probing } = &mut self.state {
            *probing = false;
        }
    }

    /// Something else proved that the process is there (a load report): probe now.
    pub fn seen_alive(&mut self) {
        if self.refusals > 0 && matches!(self.state, State::Open { .. }) {
            self.state = State::HalfOpen { probing: false };
        }
    }

    /// Time passes. Says whether the state changed.
    pub fn tick(&mut self, now: Moment) -> bool {
        match self.state {
            State::Open { until } if now >= until => {
                self.state = State::HalfOpen { probing: false };
                true
            }
            _ => false,
        }
    }

    /// An attempt was bound. Says whether the worker is closed to others now.
    pub fn bound(&mut self) -> bool {
        match &mut self.state {
            State::HalfOpen { probing } => {
                *probing = true;
                true
            }
            _ => false,
        }
    }

    /// Whether an attempt may be bound.
    pub fn admits(&self) -> bool {
        matches!(self.state, State::Closed | State::HalfOpen { probing: false })
    }

    /// Whether it is open: even a probe must wait.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    /// `closed`, `open`, or `half_open` while a probe decides.
    pub fn name(&self) -> &'static str {
        match self.state {
            State::Closed => "closed",
            State::Open { .. } => "open",
            State::HalfOpen { .. } => "half_open",
        }
    }

    /// When it lets a probe through, if it is open.
    pub fn opens_at(&self) -> Option<Moment> {
        match self.state {
            State::Open { until } => Some(until),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    prefill: WorkerId,
    decode: WorkerId,
    failures: u32,
    until: Moment,
}

/// Pairs whose transfers failed.
#[derive(Clone, Debug, Default)]
pub struct Cooldowns {
    pairs: Vec<Pair>,
}

impl Cooldowns {
    /// A transfer between the two failed.
    pub fn failed(&mut self, prefill: WorkerId, decode: WorkerId, rest: Duration, now: Moment) {
        if let Some(pair) = self.pairs.iter_mut().find(|p| p.prefill == prefill && p.decode == decode) {
            pair.failures += 1;
            if pair.failures >= PAIR_FAILURES {
                pair.until = now + rest;
            }
        } else if self.pairs.len() < PAIRS_MAX {
            self.pairs.push(Pair { prefill, decode, failures: 1, until: Moment::ZERO });
        }
    }

    /// A transfer between the two worked.
    pub fn worked(&mut self, prefill: WorkerId, decode: WorkerId) {
        if !self.pairs.is_empty() {
            self.pairs.retain(|p| p.prefill != prefill || p.decode != decode);
        }
    }

    /// A worker is gone.
    pub fn forget(&mut self, worker: WorkerId) {
        self.pairs.retain(|p| p.prefill != worker && p.decode != worker);
    }

    /// Whether the pair rests.
    pub fn rests(&self, prefill: WorkerId, decode: WorkerId, now: Moment) -> bool {
        !self.pairs.is_empty() && self.pairs.iter().any(|p| p.prefill == prefill && p.decode == decode && now < p.until)
    }

    /// How many pairs rest.
    pub fn resting(&self, now: Moment) -> usize {
        self.pairs.iter().filter(|p| now < p.until).count()
    }
}

/// A budget for retries: a share of the requests of late, and a few in any case, so that retries cannot multiply an outage.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    /// Retries that each request earns.
    share: f64,
    /// Retries per second that are always there.
    floor: f64,
    balance: f64,
    filled: Moment,
}

impl Default for RetryBudget {
    /// One retry for five requests, and ten a second.
    fn default() -> Self {
        Self::new(0.2, 10.0)
    }
}

impl RetryBudget {
    /// Seconds of the floor and requests' worth of share that can be saved up.
    const SAVED_SECS: f64 = 10.0;
    const SAVED_REQUESTS: f64 = 1000.0;

    /// `share` retries for each request, and `floor` a second.
    pub fn new(share: f64, floor: f64) -> Self {
        Self { share, floor, balance: floor, filled: Moment::ZERO }
    }

    fn add(&mut self, amount: f64) {
        let most = self.floor * Self::SAVED_SECS + self.share * Self::SAVED_REQUESTS;
        self.balance = (self.balance + amount).min(most);
    }

    /// A new request came.
    pub fn request(&mut self) {
        self.add(self.share);
    }

    /// Takes one retry out of the budget, if there is one.
    pub fn take(&mut self, now: Moment) -> bool {
        let secs = now.since(self.filled).as_secs_f64().min(Self::SAVED_SECS);
        self.filled = now;
        self.add(self.floor * secs);
        if self.balance < 1.0 {
            return false;
        }
        self.balance -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: BreakerRule = BreakerRule { threshold: 3, open_for: Duration::from_secs(10) };

    fn t(secs: f64) -> Moment {
        Moment::from_secs_f64(secs)
    }

    #[test]
    fn three_failures_in_a_row_open_it_and_a_good_probe_closes_it() {
        let mut b = Breaker::default();
        b.failed(Failure::Server, RULE, false, t(1.0));
        b.answered();
        for _ in 0..2 {
            b.failed(Failure::Reset, RULE, false, t(1.0));
            assert!(b.admits());
        }
        b.failed(Failure::Server, RULE, false, t(1.0));
        assert!(b.is_open() && !b.admits());
        assert!(!b.tick(t(10.9)));
        assert!(b.tick(t(11.0)));
        assert!(b.admits());
        assert!(b.bound());
        assert!(!b.admits(), "a single probe");
        b.answered();
        assert!(b.admits());
        assert!(!b.bound());
    }

    #[test]
    fn a_bad_probe_opens_it_again_and_a_cancelled_one_lets_another_go() {
        let mut b = Breaker::default();
        for _ in 0..3 {
            b.failed(Failure::Server, RULE, false, t(0.0));
        }
        b.tick(t(10.0));
        b.bound();
        b.inconclusive();
        assert!(b.admits());
        b.bound();
        b.failed(Failure::Server, RULE, false, t(12.0));
        assert!(b.is_open());
        assert_eq!(b.opens_at(), Some(t(22.0)));
    }

    #[test]
    fn deadlines_overload_and_full_state_slots_never_count() {
        let mut b = Breaker::default();
        for how in [Failure::Deadline, Failure::Overloaded, Failure::Mamba] {
            for _ in 0..100 {
                b.failed(how, RULE, false, t(0.0));
            }
        }
        assert!(b.admits());
    }

    #[test]
    fn connect_refused_opens_at_once_and_is_probed_soon() {
        let mut b = Breaker::default();
        b.failed(Failure::Connect, RULE, true, t(0.0));
        assert!(b.is_open());
        b.failed(Failure::Connect, RULE, true, t(0.5));
        assert_eq!(b.opens_at(), Some(t(1.0)), "attempts under way do not prolong it");
        b.tick(t(1.0));
        b.bound();
        b.failed(Failure::Connect, RULE, true, t(1.0));
        assert_eq!(b.opens_at(), Some(t(3.0)));
        b.seen_alive();
        assert!(b.admits());
    }

    #[test]
    fn the_last_worker_is_not_taken_out_for_failed_transfers() {
        let mut b = Breaker::default();
        for _ in 0..10 {
            b.failed(Failure::Transfer, RULE, true, t(0.0));
        }
        assert!(b.admits());
        b.failed(Failure::Transfer, RULE, false, t(0.0));
        assert!(b.is_open());
    }

    #[test]
    fn threshold_0_leaves_only_refused_connects() {
        let mut b = Breaker::default();
        let off = BreakerRule { threshold: 0, ..RULE };
        for _ in 0..100 {
            b.failed(Failure::Server, off, false, t(0.0));
        }
        assert!(b.admits());
        b.failed(Failure::Connect, off, false, t(0.0));
        assert!(b.is_open());
    }

    #[test]
    fn two_failed_transfers_in_a_row_let_a_pair_rest() {
        let (p, d) = (WorkerId(1), WorkerId(2));
        let mut c = Cooldowns::default();
        let rest = Duration::from_secs(10);
        c.failed(p, d, rest, t(0.0));
        c.worked(p, d);
        c.failed(p, d, rest, t(1.0));
        assert!(!c.rests(p, d, t(1.0)));
        c.failed(p, d, rest, t(2.0));
        assert!(c.rests(p, d, t(2.0)));
        assert!(!c.rests(p, WorkerId(3), t(2.0)));
        assert_eq!(c.resting(t(2.0)), 1);
        assert!(!c.rests(p, d, t(12.0)));
        c.forget(d);
        assert_eq!(c.resting(t(2.0)), 0);
    }

    #[test]
    fn retries_are_a_fifth_of_requests_and_ten_a_second() {
        let mut b = RetryBudget::default();
        let mut now = t(1.0);
        while b.take(now) {}
        for _ in 0..100 {
            b.request();
        }
        let mut taken = 0;
        while b.take(now) {
            taken += 1;
        }
        assert!((19..=20).contains(&taken), "{taken}");
        now = t(2.0);
        let mut taken = 0;
        while b.take(now) {
            taken += 1;
        }
        assert!((9..=11).contains(&taken), "{taken}");
    }
}
