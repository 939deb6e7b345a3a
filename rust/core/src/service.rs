//! How fast one prefill rank computes, and how many uncached tokens it may have before it: one batch in service, one ready,
//! and what is on its way in or out.
use crate::estimate::{Quantiles, Rate};
use crate::time::Moment;

/// Bucket of the token rate, seconds.
const SPAN: f64 = 1.0;
/// The quantile of overheads that counts as unqueued.
const LOW: f64 = 0.2;

/// Estimates of one prefill rank.
#[derive(Clone, Debug, Default)]
pub struct Service {
    tokens: Rate,
    /// Bind-to-delivery time that is not computing: the way in, transfer, the way out.
    overhead: Quantiles,
    /// The rank had nothing to do at some moment of the running bucket.
    was_idle: bool,
}

impl Service {
    /// Nothing is left to do.
    pub fn idle(&mut self) {
        self.was_idle = true;
    }

    /// `uncached` tokens were delivered `secs` after bind, with `ahead` uncached tokens before them at bind. Returns the time
    /// without the wait for those before it.
    pub fn delivered(&mut self, uncached: i64, secs: f64, ahead: i64, now: Moment) -> Option<f64> {
        self.tokens.add(uncached.max(1) as f64, now);
        if let Some(rate) = self.rate() {
            let own = uncached as f64 / rate;
            let unqueued = (secs - ahead as f64 / rate).max(own).max(0.1 * secs).min(secs);
            self.overhead.record((unqueued - own).max(0.0));
            Some(unqueued)
        } else {
            (ahead == 0).then_some(secs)
        }
    }

    /// Reads the running bucket.
    pub fn update(&mut self, now: Moment) {
        if self.tokens.roll(now, SPAN, !self.was_idle) {
            self.was_idle = false;
        }
    }

    /// Uncached tokens per second, when measured.
    pub fn rate(&self) -> Option<f64> {
        self.tokens.get().filter(|&r| r > 0.0)
    }

    /// Uncached tokens that may be before the rank.
    pub fn limit(&self, chunk: i64) -> i64 {
        let on_the_way = self.rate().unwrap_or(0.0) * self.overhead.quantile(LOW).unwrap_or(0.0);
        2 * chunk + on_the_way as i64
    }

    /// Tokens that a new request may bring, with `open` requests of `queued` uncached tokens before the rank.
    /// `patience` is the longest expected wait, seconds.
    pub fn credit(&self, open: i64, queued: i64, chunk: i64, patience: f64) -> i64 {
        if open == 0 {
            return i64::MAX;
        }
        let in_time = self.rate().map_or(i64::MAX, |r| (r * patience) as i64 - queued);
        if open == 1 {
            // One in service, whatever its size: one more is the ready one.
            return in_time;
        }
        let room = self.limit(chunk) - queued;
        // A ready batch may be larger than one chunk.
        (if room >= chunk { i64::MAX } else { room }).min(in_time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_rank_takes_anything_and_a_busy_one_a_ready_batch() {
        let s = Service::default();
        assert_eq!(s.credit(0, 0, 8192, 75.0), i64::MAX);
        assert_eq!(s.credit(1, 57_000, 8192, 75.0), i64::MAX);
        assert_eq!(s.credit(2, 6_000, 8192, 75.0), i64::MAX);
        assert_eq!(s.credit(5, 15_000, 8192, 75.0), 1384);
        assert!(s.credit(5, 16_384, 8192, 75.0) <= 0);
    }

    #[test]
    fn a_wait_beyond_the_patience_gives_no_credit() {
        let mut s = Service::default();
        let mut now = Moment::from_secs_f64(1.0);
        for _ in 0..40 {
            now = now + std::time::Duration::from_millis(100);
            s.delivered(100, 1.0, 0, now);
            s.update(now);
        }
        let rate = s.rate().unwrap();
        assert!((900.0..1150.0).contains(&rate), "{rate}");
        assert!(s.credit(1, 80_000, 8192, 75.0) < 0);
        assert!(s.credit(1, 10_000, 8192, 75.0) > 50_000);
    }

    #[test]
    fn waiting_behind_others_is_taken_off() {
        let mut s = Service::default();
        let mut now = Moment::from_secs_f64(1.0);
        for _ in 0..40 {
            now = now + std::time::Duration::from_millis(100);
            s.delivered(100, 1.0, 0, now);
            s.update(now);
        }
        let unqueued = s.delivered(1000, 11.0, 9_000, now).unwrap();
        assert!((1.0..3.2).contains(&unqueued), "{unqueued}");
    }
}
