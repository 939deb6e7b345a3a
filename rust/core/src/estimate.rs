//! Estimators: a windowed low quantile and a rate per second. Fixed memory, no allocation.
use crate::time::Moment;

/// Buckets per doubling.
const PER_OCTAVE: f64 = 8.0;
/// Values below this are counted as this, seconds.
const SMALLEST: f64 = 50e-6;
/// Covers 50 us to about 50 minutes.
const BUCKETS: usize = 208;
/// When so many samples are held, all counts are halved: older samples fade.
const HALVE_AT: u32 = 256;

/// One quantile of recent durations, to about 9 %.
#[derive(Clone, Debug)]
pub struct Quantiles {
    /// Seconds; kept, because it is asked for more often than samples come.
    value: f64,
    part: f64,
    total: u32,
    /// The quantile's bucket, and the samples in those below it.
    at: u32,
    below: u32,
    counts: [u16; BUCKETS],
}

impl Quantiles {
    /// The `part` quantile, 0 to 1, of nothing yet.
    pub fn new(part: f64) -> Self {
        Self { value: 0.0, part, total: 0, at: 0, below: 0, counts: [0; BUCKETS] }
    }

    /// Counts a duration in seconds.
    pub fn record(&mut self, secs: f64) {
        let bucket = ((secs / SMALLEST).max(1.0).log2() * PER_OCTAVE) as usize;
        let bucket = bucket.min(BUCKETS - 1);
        self.counts[bucket] += 1;
        self.total += 1;
        self.below += u32::from((bucket as u32) < self.at);
        if self.total >= HALVE_AT {
            (self.total, self.at, self.below) = (0, 0, 0);
            for c in &mut self.counts {
                *c /= 2;
                self.total += u32::from(*c);
            }
        }
        self.settle();
    }

    /// Moves to the bucket in which the quantile is.
    fn settle(&mut self) {
        let wanted = ((f64::from(self.total) * self.part).floor() as u32 + 1).min(self.total);
        let before = self.at;
        while self.at > 0 && self.below >= wanted {
            self.at -= 1;
            self.below -= u32::from(self.counts[self.at as usize]);
        }
        while (self.at as usize) < BUCKETS - 1 && self.below + u32::from(self.counts[self.at as usize]) < wanted {
            self.below += u32::from(self.counts[self.at as usize]);
            self.at += 1;
        }
        if self.at != before || self.value == 0.0 {
            self.value = SMALLEST * ((f64::from(self.at) + 0.5) / PER_OCTAVE).exp2();
        }
    }

    /// Samples that are held.
    pub fn samples(&self) -> u32 {
        self.total
    }

    /// The quantile in seconds (the middle of its bucket), `None` without samples.
    pub fn get(&self) -> Option<f64> {
        (self.total > 0).then_some(self.value)
    }
}

/// A rate per second that remembers what a source can do: it follows rises at once, and falls only while the source was what
/// limited the flow. (A queue that ran empty says nothing about the server behind it.)
#[derive(Clone, Copy, Debug, Default)]
pub struct Rate {
    sum: f64,
    events: u32,
    since: Moment,
    value: f64,
    known: bool,
}

/// Events that make a bucket worth reading.
const ENOUGH: u32 = 16;
/// A bucket without enough events is read after so many spans.
const PATIENCE: f64 = 4.0;

impl Rate {
    /// Counts `amount` at `now`.
    pub fn add(&mut self, amount: f64, now: Moment) {
        if self.events == 0 && !self.known {
            self.since = now;
        }
        self.sum += amount;
        self.events += 1;
    }

    /// Reads the running bucket when it is old and full enough, and says whether it was. `limited`: the source was what
    /// held the flow back.
    pub fn roll(&mut self, now: Moment, span: f64, limited: bool) -> bool {
        // The first bucket begins with its first event: the time before it says nothing about the source.
        if !self.known && self.events == 0 {
            return false;
        }
        let dt = now.since(self.since).as_secs_f64();
        if dt < span || (self.events < ENOUGH && dt < PATIENCE * span) {
            return false;
        }
        let sample = self.sum / dt.max(1e-9);
        if !self.known {
            self.value = sample;
            self.known = true;
        } else if sample > self.value {
            self.value += 0.5 * (sample - self.value);
        } else if limited {
            self.value += 0.25 * (sample - self.value);
        }
        self.sum = 0.0;
        self.events = 0;
        self.since = now;
        true
    }

    /// Units per second; `None` before the first bucket with an event was read.
    pub fn get(&self) -> Option<f64> {
        self.known.then_some(self.value)
    }
}

/// Seconds in which what was given counts for half.
const HALF_LIFE: f64 = 60.0;

/// A sum that fades: how much somebody was given of late.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fading {
    sum: f64,
    at: Moment,
}

impl Fading {
    /// Gives more.
    pub fn add(&mut self, amount: f64, now: Moment) {
        self.sum = self.get(now) + amount;
        self.at = self.at.max(now);
    }

    /// What counts now.
    pub fn get(&self, now: Moment) -> f64 {
        self.sum * (-now.since(self.at).as_secs_f64() / HALF_LIFE).exp2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_counts_for_half_after_its_half_life() {
        let at = Moment::from_secs_f64;
        let mut given = Fading::default();
        given.add(800.0, at(10.0));
        assert!((given.get(at(10.0 + HALF_LIFE)) - 400.0).abs() < 1e-6);
        given.add(100.0, at(10.0 + HALF_LIFE));
        assert!((given.get(at(10.0 + 2.0 * HALF_LIFE)) - 250.0).abs() < 1e-6);
        assert!((given.get(at(0.0)) - 500.0).abs() < 1e-6, "an earlier moment is now");
    }
    use proptest::prelude::*;

    #[test]
    fn a_low_quantile_ignores_a_slow_majority_of_outliers() {
        let mut q = Quantiles::new(0.1);
        for i in 0..100 {
            q.record(if i % 5 == 0 { 1.0 } else { 30.0 });
        }
        let low = q.get().unwrap();
        assert!((0.9..1.1).contains(&low), "{low}");
    }

    #[test]
    fn old_samples_fade() {
        let mut q = Quantiles::new(0.05);
        for _ in 0..1000 {
            q.record(1.0);
        }
        for _ in 0..2000 {
            q.record(8.0);
        }
        let low = q.get().unwrap();
        assert!((7.2..8.8).contains(&low), "{low}");
    }

    #[test]
    fn a_rate_does_not_fall_while_nothing_is_asked_of_the_source() {
        let mut r = Rate::default();
        let mut now = Moment::from_secs_f64(1.0);
        for _ in 0..100 {
            now = now + std::time::Duration::from_millis(100);
            r.add(1.0, now);
            r.roll(now, 1.0, true);
        }
        let busy = r.get().unwrap();
        assert!((9.0..11.5).contains(&busy), "{busy}");
        for _ in 0..100 {
            now = now + std::time::Duration::from_secs(1);
            r.roll(now, 1.0, false);
        }
        assert!((r.get().unwrap() - busy).abs() < 1e-9);
        for _ in 0..100 {
            now = now + std::time::Duration::from_secs(1);
            r.roll(now, 1.0, true);
        }
        assert!(r.get().unwrap() < 0.1);
    }

    #[test]
    fn the_first_bucket_begins_with_its_first_event() {
        let mut r = Rate::default();
        let mut now = Moment::from_secs_f64(1.0);
        // A minute of ticks without anything to do, as when a router waits for its first request.
        for _ in 0..3000 {
            now = now + std::time::Duration::from_millis(20);
            assert!(!r.roll(now, 0.25, false));
        }
        // 64 a second from the middle of what would be a bucket.
        for _ in 0..32 {
            now = now + std::time::Duration::from_micros(15_625);
            r.add(1.0, now);
            r.roll(now, 0.25, false);
        }
        let rate = r.get().unwrap();
        assert!((60.0..72.0).contains(&rate), "{rate}");
    }

    proptest! {
        #[test]
        fn a_quantile_lies_within_a_bucket_of_a_sample(values in proptest::collection::vec(1e-4f64..600.0, 1..100), q in 0.0f64..1.0) {
            let mut h = Quantiles::new(q);
            for &v in &values { h.record(v); }
            let got = h.get().unwrap();
            prop_assert!(values.iter().any(|&v| (got / v) < 1.1 && (v / got) < 1.1), "{got} {values:?}");
        }

        #[test]
        fn it_is_the_quantile_of_the_counts_after_every_sample(
            values in proptest::collection::vec(1e-5f64..1e4, 1..600), q in 0.0f64..1.0,
        ) {
            let mut h = Quantiles::new(q);
            for &v in &values {
                h.record(v);
                let wanted = ((f64::from(h.total) * q).floor() as u32 + 1).min(h.total);
                let mut seen = 0;
                let at = h.counts.iter().position(|&c| { seen += u32::from(c); seen >= wanted }).unwrap();
                prop_assert_eq!(h.get(), Some(SMALLEST * ((at as f64 + 0.5) / PER_OCTAVE).exp2()));
            }
        }
    }
}
