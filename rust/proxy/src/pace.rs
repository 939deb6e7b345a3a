//! `--rate-limit-tokens-per-second`: a bucket of tokens that fills at a rate. A request takes one and waits until it is there.
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// See the module's text. The bucket is kept as the moment at which it will be full (generic cell rate algorithm, ITU-T I.371).
#[derive(Debug)]
pub struct Pace {
    /// Time in which one token comes.
    interval: Duration,
    /// Time in which an empty bucket fills.
    depth: Duration,
    full_at: Mutex<Instant>,
}

impl Pace {
    /// A full bucket. `rate` is tokens per second, above 0; `burst` is what it holds, at least 1.
    pub fn new(rate: f64, burst: u32, now: Instant) -> Self {
        let interval = Duration::from_secs_f64(1.0 / rate.max(1e-3));
        Self { interval, depth: interval.saturating_mul(burst.max(1)), full_at: Mutex::new(now) }
    }

    /// Takes the next token and says how long it is until it comes; `Err` with that time when it is more than `limit`, and then
    /// nothing is taken.
    ///
    /// # Errors
    /// The time until the next token.
    pub fn take(&self, now: Instant, limit: Duration) -> Result<Duration, Duration> {
        let mut full_at = self.full_at.lock();
        let next = (*full_at).max(now) + self.interval;
        let wait = next.saturating_duration_since(now).saturating_sub(self.depth);
        if wait > limit {
            return Err(wait);
        }
        *full_at = next;
        Ok(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::Pace;
    use std::time::{Duration, Instant};

    #[test]
    fn a_burst_goes_at_once_then_requests_go_at_the_rate_and_rest_fills_the_bucket_again() {
        let start = Instant::now();
        let pace = Pace::new(10.0, 3, start);
        let ms = Duration::from_millis;
        let take = |at: u64| pace.take(start + ms(at), ms(450)).map(|d| d.as_millis());
        assert_eq!([take(0), take(0), take(0), take(0), take(0)], [Ok(0), Ok(0), Ok(0), Ok(100), Ok(200)]);
        assert_eq!([take(100), take(150)], [Ok(200), Ok(250)]);
        assert_eq!([take(150), take(150)], [Ok(350), Ok(450)]);
        assert_eq!(take(150), Err(ms(550)));
        assert_eq!(take(250), Ok(450), "a refused request took a token");
        assert_eq!([take(5000), take(5000), take(5000), take(5000)], [Ok(0), Ok(0), Ok(0), Ok(100)]);
    }
}
