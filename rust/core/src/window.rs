//! The computed bound on transfers in flight to one decode rank.
//!
//! `W = ceil(x + 2 sqrt(x))`, where `x = r * tau` is what Little's law needs in flight: `tau` the unqueued time from bind to
//! delivery, with what prefill's own pipeline of batches takes (see `service`); `r` the rate at which the rank takes deliveries.
//! The root is room for the randomness of arrivals, and it makes the measured rate grow when the window was what limited it.
//!
//! `r` is the smaller of what the rank can absorb and its share of what prefill delivers. What a rank absorbs within `tau` is
//! its completions and the running slots that are free now: a rank that fills up absorbs long before its first completion.
use crate::admission::WindowMode;
use crate::estimate::{Quantiles, Rate};
use crate::time::Moment;

/// Window of a rank that nothing is known of. What prefill's credit lets through bounds the transfers of a cold fleet before
/// this does (see `service`), so that a smaller one only makes it take more doublings, of one tau each, until decode is fed.
const FIRST: f64 = 16.0;
/// The quantile of bind-to-delivery times that counts as unqueued. The median: what waits at prefill is bounded by its
/// credit, so that the times do not grow with the load, and batches spread them (one of two in the middle of its batch).
const LOW: f64 = 0.5;
/// tau before the first delivery, seconds: only paces the first doubling.
const TAU_UNKNOWN: f64 = 1.0;
/// Deliveries that end the start-up.
const ENOUGH_DELIVERIES: u64 = 8;
/// What a failure leaves of the window.
const SHRINK: f64 = 0.7;
/// Shortest bucket of a rate, seconds.
const SHORTEST_SPAN: f64 = 0.25;

/// `ceil(x + 2 sqrt(x))`.
pub fn littles(x: f64) -> f64 {
    (x + 2.0 * x.max(0.0).sqrt()).ceil()
}

/// What the fleet knows when a window is computed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Supply {
    /// Deliveries per second of all of prefill that this rank may count on; `None` before they were measured.
    pub share: Option<f64>,
    /// Fleet-wide unqueued bind-to-delivery time, seconds, for a rank that has too few samples of its own.
    pub tau: Option<f64>,
    /// Running slots of the rank that are free, requests in transfer not counted.
    pub free_slots: f64,
    /// Whether requests wait. Without any the rates are those of the clients, and say nothing about what the fleet can do.
    pub waiting: bool,
}

/// The window of one decode rank.
#[derive(Clone, Debug)]
pub struct Window {
    times: Quantiles,
    completions: Rate,
    deliveries: u64,
    /// Start-up size; doubles while it is reached.
    size: f64,
    reached: bool,
    /// Times tau in which requests waited since it was last reached.
    unreached: f64,
    starting: bool,
    grown_at: Moment,
    /// Additive-increase bound after a failure.
    cap: f64,
    shrunk_at: Moment,
    current: f64,
    tau: f64,
}

impl Window {
    /// The window of a rank that was just added.
    pub fn new(now: Moment, mode: WindowMode) -> Self {
        let current = match mode {
            WindowMode::Computed => FIRST,
            WindowMode::Static(n) => f64::from(n.max(1)),
            WindowMode::Unbounded => f64::INFINITY,
        };
        Self {
            times: Quantiles::new(LOW),
            completions: Rate::default(),
            deliveries: 0,
            size: FIRST,
            reached: false,
            unreached: 0.0,
            starting: true,
            grown_at: now,
            cap: f64::INFINITY,
            shrunk_at: Moment::ZERO,
            current,
            tau: TAU_UNKNOWN,
        }
    }

    /// A delivery that took `secs` from bind, without the time that known work before it took.
    pub fn delivered(&mut self, secs: f64) {
        self.times.record(secs);
        self.deliveries += 1;
    }

    /// A delivery whose time says nothing: what was before it is not known.
    pub fn delivered_late(&mut self) {
        self.deliveries += 1;
    }

    /// A request ended well on this rank.
    pub fn completed(&mut self, now: Moment) {
        self.completions.add(1.0, now);
    }

    /// The rank took as many transfers as it may: start-up may double.
    pub fn was_reached(&mut self) {
        self.reached = true;
    }

    /// Retraction, transfer failure or 503: x 0.7, at most once per tau.
    pub fn shrink(&mut self, now: Moment) {
        if now.since(self.shrunk_at).as_secs_f64() < self.tau && self.shrunk_at != Moment::ZERO {
            return;
        }
        self.shrunk_at = now;
        self.grown_at = now;
        self.cap = (self.current.min(self.cap) * SHRINK).max(1.0);
        self.starting = false;
        self.current = self.current.min(self.cap);
    }

    /// Computes the window anew.
    pub fn update(&mut self, now: Moment, mode: WindowMode, supply: Supply) {
        let own = (self.times.samples() >= 8).then(|| self.times.get()).flatten();
        let tau = own.or(supply.tau).or_else(|| self.times.get());
        self.tau = tau.unwrap_or(TAU_UNKNOWN);
        self.completions.roll(now, self.tau.max(SHORTEST_SPAN), true);
        let elapsed = now.since(self.grown_at).as_secs_f64() / self.tau.max(1e-6);
        if self.cap.is_finite() {
            self.cap += elapsed;
        }
        let computed = match (mode, supply.share, tau) {
            (WindowMode::Unbounded, ..) => f64::INFINITY,
            (WindowMode::Static(n), ..) => f64::from(n),
            (WindowMode::Computed, Some(share), Some(tau)) => {
                let absorbed = self.completions.get().unwrap_or(0.0) * tau + supply.free_slots.max(0.0);
                let littles = littles(absorbed.min(share * tau));
                // Little's law takes over once it asks for less than start-up allows, and something else was what limited for a
                // tau. While it is the window that limits, the measured rate is that of one or two doublings ago, and the law
                // would hold the fleet to what start-up let through: then it has to ask for less than a quarter. Before anybody
                // waits it has nothing to say: a few calls one after another would leave a window of one for the burst after them.
                let limits = self.reached || supply.waiting;
                let asks_less =
                    (limits && littles <= self.size / 4.0) || (self.unreached >= 1.0 && littles <= self.size);
                self.starting &= self.deliveries < ENOUGH_DELIVERIES || !asks_less;
                if self.starting { self.start(elapsed, supply.waiting) } else { littles }
            }
            (WindowMode::Computed, ..) => self.start(elapsed, supply.waiting),
        };
        if self.cap >= computed {
            self.cap = f64::INFINITY;
        }
        self.current = computed.min(self.cap).max(1.0);
        self.grown_at = now;
    }

    /// Start-up: doubles per tau while the window is what limits.
    fn start(&mut self, taus: f64, waiting: bool) -> f64 {
        self.unreached = match (self.reached, waiting) {
            (true, _) => 0.0,
            (false, true) => self.unreached + taus,
            (false, false) => self.unreached,
        };
        if self.reached && self.deliveries > 0 {
            self.size = (self.size * taus.min(30.0).exp2()).min(1e6);
        }
        self.reached = false;
        self.size.floor()
    }

    /// Transfers that may be in flight.
    pub fn size(&self) -> i64 {
        if self.current >= 1e15 { i64::MAX } else { self.current as i64 }
    }

    /// Unqueued bind-to-delivery time, seconds.
    pub fn tau(&self) -> f64 {
        self.tau
    }

    /// The low quantile of this rank's own samples.
    pub fn own_tau(&self) -> Option<f64> {
        self.times.get()
    }

    /// Completions per second.
    pub fn completions(&self) -> f64 {
        self.completions.get().unwrap_or(0.0)
    }
}

/// What prefill delivers, all ranks together.
#[derive(Clone, Debug)]
pub struct Flow {
    rate: Rate,
    times: Quantiles,
}

impl Default for Flow {
    fn default() -> Self {
        Self { rate: Rate::default(), times: Quantiles::new(LOW) }
    }
}

impl Flow {
    /// A delivery that took `secs` from bind without known waiting.
    pub fn delivered(&mut self, secs: f64, now: Moment) {
        self.rate.add(1.0, now);
        self.times.record(secs);
    }

    /// A delivery whose time says nothing.
    pub fn count(&mut self, now: Moment) {
        self.rate.add(1.0, now);
    }

    /// Reads the running bucket, and says whether it was full. `limited`: prefill or the windows were what held requests back.
    pub fn update(&mut self, now: Moment, limited: bool) -> bool {
        let span = self.tau().unwrap_or(TAU_UNKNOWN).max(SHORTEST_SPAN);
        self.rate.roll(now, span, limited)
    }

    /// Deliveries per second.
    pub fn rate(&self) -> Option<f64> {
        self.rate.get()
    }

    /// Unqueued bind-to-delivery time of the fleet, seconds.
    pub fn tau(&self) -> Option<f64> {
        self.times.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(secs: f64) -> Moment {
        Moment::from_secs_f64(secs)
    }

    /// Ticks a window through `secs` of a fleet whose transfers take one second; `reached` says whether all of it is in flight.
    fn play(w: &mut Window, from: f64, secs: f64, share: f64, reached: bool) {
        for tick in 1..=(secs / 0.02) as usize {
            if reached {
                w.was_reached();
            }
            let supply = Supply { share: Some(share), tau: Some(1.0), free_slots: 1e3, waiting: true };
            w.update(t(from + tick as f64 * 0.02), WindowMode::Computed, supply);
        }
    }

    fn with_deliveries() -> Window {
        let mut w = Window::new(t(0.0), WindowMode::Computed);
        for _ in 0..8 {
            w.delivered(1.0);
        }
        w
    }

    #[test]
    fn a_rate_that_the_window_itself_holds_down_does_not_end_the_start_up() {
        let mut w = with_deliveries();
        // The rate of half the window: what was measured before the last doubling. Little's law alone would ask for 14.
        play(&mut w, 0.0, 1.0, 8.0, true);
        assert!((31..=34).contains(&w.size()), "{}", w.size());
        play(&mut w, 1.0, 1.0, 16.0, true);
        assert!((62..=68).contains(&w.size()), "{}", w.size());
    }

    #[test]
    fn littles_law_takes_over_when_something_else_has_limited_for_a_tau() {
        let mut w = with_deliveries();
        play(&mut w, 0.0, 0.9, 8.0, false);
        assert_eq!(w.size(), 16);
        play(&mut w, 0.9, 0.2, 8.0, false);
        assert_eq!(w.size(), littles(8.0) as i64);
    }

    #[test]
    fn calls_one_after_another_leave_the_window_to_the_burst_after_them() {
        let mut w = with_deliveries();
        for tick in 1..=5000 {
            // Nobody waits, so the rate of deliveries is that of the clients.
            let supply = Supply { share: Some(0.5), tau: Some(1.0), free_slots: 1e3, waiting: false };
            w.update(t(f64::from(tick) * 0.02), WindowMode::Computed, supply);
        }
        assert_eq!(w.size(), FIRST as i64);
        play(&mut w, 100.0, 1.0, 16.0, true);
        assert!((31..=34).contains(&w.size()), "{}", w.size());
    }

    #[test]
    fn growing_without_more_deliveries_ends_the_start_up() {
        let mut w = with_deliveries();
        play(&mut w, 0.0, 10.0, 8.0, true);
        assert_eq!(w.size(), littles(8.0) as i64, "x = 8 asks for 14, less than a quarter of 64");
    }
}
