//! Scaled real time for the emulator. The model knows one time, the fleet's; the driver maps it.
use std::time::Duration;

use r3router_core::time::Moment;

/// Maps real time to the fleet's time. With a factor of 10, 300 s of an engine's clock pass in 30 s, and all costs with them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    factor: f64,
}

impl Pace {
    /// Fleet seconds per real second; values that are not positive and finite count as 1.
    pub fn new(factor: f64) -> Self {
        Self { factor: if factor.is_finite() && factor > 0.0 { factor } else { 1.0 } }
    }

    /// Fleet seconds per real second.
    pub fn factor(self) -> f64 {
        self.factor
    }

    /// The fleet's moment when so much real time has passed since its start.
    pub fn fleet(self, real: Duration) -> Moment {
        Moment::from_secs_f64(real.as_secs_f64() * self.factor)
    }

    /// Real time since the start at which the fleet reaches `moment`.
    pub fn real(self, moment: Moment) -> Duration {
        // Rounded up to the next nanosecond, so that a timer that was slept for is always due.
        Duration::from_nanos((moment.0 as f64 / self.factor).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_times_pace_makes_300_fleet_seconds_out_of_30() {
        let pace = Pace::new(10.0);
        assert_eq!(pace.fleet(Duration::from_secs(30)), Moment::from_secs_f64(300.0));
        assert_eq!(pace.real(Moment::from_secs_f64(300.0)), Duration::from_secs(30));
    }

    #[test]
    fn a_slept_timer_is_due() {
        for factor in [0.3, 1.0, 3.0, 7.0, 50.0] {
            let pace = Pace::new(factor);
            for nanos in [1u64, 999, 1_234_567, 98_765_432_101] {
                let due = pace.fleet(pace.real(Moment(nanos)) + Duration::from_nanos(1));
                assert!(due >= Moment(nanos), "factor {factor}: {due:?} < {nanos}");
            }
        }
    }
}
