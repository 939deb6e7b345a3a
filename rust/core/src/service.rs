//! How fast one prefill rank computes, and how many uncached tokens it may have before it: one batch in service, one ready,
//! and what is on its way in or out.
//!
//! Because that is bounded, the time from bind to delivery counts as unqueued up to it.
use crate::estimate::{Quantiles, Rate};
use crate::time::Moment;

/// Batches' worth of tokens that a prefill rank needs before it to compute full batches without a gap. Its scheduler looks at
/// the world between two batches only (engine-protocol 3.4): one batch is computed; one has been, and its transfer is confirmed
/// at the next look; one is ready; one is on its way in the place of the one that was confirmed last. With 3, a simulated
/// fleet of eight ranks in lock-step does 3 % less.
const PIPELINE: i64 = 4;
/// Bucket of the token rate, seconds.
const SPAN: f64 = 1.0;
/// Overheads that say something together: the quantile of so many is their least, and one delivery that a fault held up says
/// nothing. In a cold fleet in the shape of the incident one would do 3 % more than three, and eight as much as three.
const ENOUGH: u32 = 3;
/// The quantile of overheads that counts as unqueued.
const LOW: f64 = 0.2;

/// Estimates of one prefill rank.
#[derive(Clone, Debug)]
pub struct Service {
    tokens: Rate,
    /// Bind-to-delivery time that is not computing: the way in, transfer, the way out.
    overhead: Quantiles,
    /// The rank had nothing to do at some moment of the running bucket.
    was_idle: bool,
}

impl Default for Service {
    fn default() -> Self {
        Self { tokens: Rate::default(), overhead: Quantiles::new(LOW), was_idle: false }
    }
}

impl Service {
    /// Nothing is left to do.
    pub fn idle(&mut self) {
        self.was_idle = true;
    }

    /// `uncached` tokens were delivered `secs` after bind, with `ahead` uncached tokens before them at bind. Returns the time
    /// without the wait for those before it.
    pub fn delivered(&mut self, uncached: i64, secs: f64, ahead: i64, chunk: i64, now: Moment) -> Option<f64> {
        self.tokens.add(uncached.max(1) as f64, now);
        if let Some(rate) = self.rate() {
            let own = uncached as f64 / rate;
            let without = |tokens: i64| (secs - tokens.max(0) as f64 / rate).max(own).max(0.1 * secs).min(secs);
            self.overhead.record((without(ahead) - own).max(0.0));
            Some(without(ahead - PIPELINE * chunk))
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
        let overhead = if self.overhead.samples() >= ENOUGH { self.overhead.get() } else { None };
        let on_the_way = self.rate().unwrap_or(0.0) * overhead.unwrap_or(0.0);
        PIPELINE * chunk + on_the_way as i64
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
        // A request counts with all of its tokens until it is delivered. The one in service is being computed, and its last
        // chunk leaves a batch short for the next to fill: it does not count, or requests of more than a batch would leave gaps.
        let room = self.limit(chunk) - (queued - queued / open);
        // Whatever is left takes one more request of up to a chunk, or batches would start short by half a request; room for
        // a whole batch takes a request of any size.
        (if room >= chunk {
            i64::MAX
        } else if room > 0 {
            chunk
        } else {
            room
        })
        .min(in_time)
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
        assert_eq!(s.credit(2, 24_576, 8192, 75.0), i64::MAX);
        // One of 20,000 is being computed, and the other leaves room for a batch.
        assert_eq!(s.credit(2, 40_000, 8192, 75.0), i64::MAX);
        assert_eq!(s.credit(3, 60_000, 8192, 75.0), 32_768 - 40_000);
        // Less than a batch is left: a request of up to a batch, once more.
        assert_eq!(s.credit(5, 40_950, 8192, 75.0), 8192);
        assert_eq!(s.credit(5, 40_960, 8192, 75.0), 0);
    }

    #[test]
    fn a_wait_beyond_the_patience_gives_no_credit() {
        let mut s = Service::default();
        let mut now = Moment::from_secs_f64(1.0);
        for _ in 0..40 {
            now = now + std::time::Duration::from_millis(100);
            s.delivered(100, 1.0, 0, 8192, now);
            s.update(now);
        }
        let rate = s.rate().unwrap();
        assert!((900.0..1150.0).contains(&rate), "{rate}");
        assert!(s.credit(1, 80_000, 8192, 75.0) < 0);
        assert!(s.credit(1, 10_000, 8192, 75.0) > 50_000);
    }

    #[test]
    fn one_delivery_that_a_fault_held_up_opens_no_rank() {
        let mut s = Service::default();
        let mut now = Moment::from_secs_f64(1.0);
        for _ in 0..40 {
            now = now + std::time::Duration::from_millis(100);
            s.tokens.add(1000.0, now);
            s.update(now);
        }
        assert!(s.rate().unwrap() > 9000.0);
        s.delivered(1000, 60.0, 0, 8192, now);
        assert_eq!(s.limit(8192), 4 * 8192);
        for _ in 0..40 {
            s.delivered(1000, 1.1, 0, 8192, now);
        }
        // A second on the way, at ten thousand tokens a second.
        assert!((40_000..46_000).contains(&s.limit(8192)), "{}", s.limit(8192));
    }

    #[test]
    fn waiting_behind_others_is_taken_off() {
        let mut s = Service::default();
        let mut now = Moment::from_secs_f64(1.0);
        for _ in 0..40 {
            now = now + std::time::Duration::from_millis(100);
            s.delivered(100, 1.0, 0, 8192, now);
            s.update(now);
        }
        // 900 to 1,150 tokens a second, batches of 1,000: 4,000 before it are the rank's own pipeline, 5,000 are a queue.
        let unqueued = s.delivered(1000, 11.0, 9_000, 1000, now).unwrap();
        assert!((5.3..6.8).contains(&unqueued), "{unqueued}");
        assert!((10.9..11.1).contains(&s.delivered(1000, 11.0, 4_000, 1000, now).unwrap()));
    }
}
