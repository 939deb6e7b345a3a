//! The process's clock as the core sees it: nanoseconds since start, never going back.
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use r3router_core::time::Moment;

/// Maps the machine's monotonic clock to [`Moment`].
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// Distance of the origin from the process's start, so that subtracting a short age never meets zero.
    const LEAD_NS: u64 = 3_600_000_000_000;

    /// A clock that starts now.
    pub fn start() -> Self {
        Self { origin: Instant::now() }
    }

    /// Now.
    pub fn now(&self) -> Moment {
        self.at(Instant::now())
    }

    /// The moment of an instant.
    pub fn at(&self, instant: Instant) -> Moment {
        let ns = u64::try_from(instant.saturating_duration_since(self.origin).as_nanos()).unwrap_or(u64::MAX);
        Moment(ns.saturating_add(Self::LEAD_NS))
    }

    /// The instant of a moment, for timers. Moments far in the future end up a day away, where the timer is set anew.
    pub fn instant(&self, moment: Moment) -> Instant {
        const DAY_NS: u64 = 86_400_000_000_000;
        let ahead = moment.0.saturating_sub(self.now().0).min(DAY_NS);
        Instant::now() + std::time::Duration::from_nanos(ahead)
    }
}

/// Seconds since 1970 on the machine's wall clock.
pub fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
