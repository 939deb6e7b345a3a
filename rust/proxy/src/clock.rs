//! The process's clock as the core sees it: nanoseconds since start, never going back. It counts the fleet's time, which is the
//! machine's unless the fleet is an emulated one (`--time-scale`).
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use r3router_core::time::Moment;

/// Maps the machine's monotonic clock to [`Moment`].
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    scale: f64,
}

impl Clock {
    /// Distance of the origin from the process's start, so that subtracting a short age never meets zero.
    const LEAD_NS: u64 = 3_600_000_000_000;

    /// A clock that starts now and runs `scale` times as fast as the machine's.
    pub fn start(scale: f64) -> Self {
        Self { origin: Instant::now(), scale }
    }

    /// Fleet seconds per second of the machine.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The fleet's time of a span of the machine's.
    pub fn fleet(&self, span: Duration) -> Duration {
        if self.scale > 1.0 { scaled(span, |s| s * self.scale) } else { span }
    }

    /// The machine's time of a span of the fleet's.
    pub fn machine(&self, span: Duration) -> Duration {
        if self.scale > 1.0 { scaled(span, |s| s / self.scale) } else { span }
    }

    /// Now.
    pub fn now(&self) -> Moment {
        self.at(Instant::now())
    }

    /// The moment of an instant.
    pub fn at(&self, instant: Instant) -> Moment {
        let passed = self.fleet(instant.saturating_duration_since(self.origin));
        let ns = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX);
        Moment(ns.saturating_add(Self::LEAD_NS))
    }

    /// The instant of a moment, for timers. Moments far in the future end up a day away, where the timer is set anew.
    pub fn instant(&self, moment: Moment) -> Instant {
        const DAY_NS: u64 = 86_400_000_000_000;
        let ahead = moment.0.saturating_sub(self.now().0).min(DAY_NS);
        Instant::now() + self.machine(Duration::from_nanos(ahead))
    }
}

/// A span in seconds, after `change`.
fn scaled(span: Duration, change: impl FnOnce(f64) -> f64) -> Duration {
    Duration::try_from_secs_f64(change(span.as_secs_f64())).unwrap_or(Duration::MAX)
}

/// Seconds since 1970 on the machine's wall clock.
pub fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_with_a_scale_counts_the_fleets_time_and_sets_timers_in_the_machines() {
        let clock = Clock::start(15.0);
        let begin = Instant::now();
        let passed = clock.at(begin + Duration::from_secs(20)).since(clock.at(begin));
        assert!((passed.as_secs_f64() - 300.0).abs() < 1e-3, "{passed:?}");
        let ahead = clock.instant(clock.at(begin + Duration::from_secs(20))).duration_since(begin);
        assert!((ahead.as_secs_f64() - 20.0).abs() < 0.5, "{ahead:?}");
        assert_eq!(clock.machine(Duration::from_secs(300)), Duration::from_secs(20));
        let plain = Clock::start(1.0);
        let begin = Instant::now();
        assert_eq!(plain.at(begin + Duration::from_nanos(7)).since(plain.at(begin)), Duration::from_nanos(7));
    }
}
