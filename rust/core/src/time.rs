//! Time as the core sees it: a number that the caller supplies. The core never reads a clock.
use std::ops::{Add, Sub};
use std::time::Duration;

/// A moment, in nanoseconds since an origin of the caller's choice (process start, or zero of a simulation).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

impl Moment {
    /// The origin.
    pub const ZERO: Self = Self(0);
    /// A moment later than every other; a deadline that never passes.
    pub const NEVER: Self = Self(u64::MAX);

    /// A moment from seconds since the origin.
    pub fn from_secs_f64(secs: f64) -> Self {
        Self((secs.max(0.0) * 1e9) as u64)
    }

    /// Seconds since the origin.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Time since `earlier`, zero when `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;
    fn add(self, d: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Moment {
    type Output = Duration;
    fn sub(self, other: Self) -> Duration {
        self.since(other)
    }
}
