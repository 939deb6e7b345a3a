//! Latencies in microseconds with a relative error under 1 %, in constant memory.
use std::time::Duration;

/// Buckets per power of two.
const STEPS: usize = 64;
const OCTAVES: usize = 40;

pub(super) struct Histogram {
    counts: Vec<u64>,
    max_us: f64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; STEPS * OCTAVES], max_us: 0.0 }
    }
}

impl Histogram {
    fn bucket(us: f64) -> usize {
        (((us.max(1.0)).log2() * STEPS as f64) as usize).min(STEPS * OCTAVES - 1)
    }

    pub(super) fn record(&mut self, latency: Duration) {
        let us = latency.as_secs_f64() * 1e6;
        self.counts[Self::bucket(us)] += 1;
        self.max_us = self.max_us.max(us);
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.max_us = self.max_us.max(other.max_us);
    }

    pub(super) fn max(&self) -> f64 {
        self.max_us
    }

    /// The latency that a part `q` of the requests did not exceed; 0 when nothing was recorded.
    pub(super) fn quantile(&self, q: f64) -> f64 {
        let total: u64 = self.counts.iter().sum();
        if total == 0 {
            return 0.0;
        }
        let rank = ((q * total as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return ((bucket as f64 + 0.5) / STEPS as f64).exp2().min(self.max_us);
            }
        }
        self.max_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_one_percent_of_the_exact_ones() {
        let mut histogram = Histogram::default();
        for us in 1..=10_000_u64 {
            histogram.record(Duration::from_micros(us));
        }
        assert!((histogram.quantile(0.5) / 5_000.0 - 1.0).abs() < 0.011, "{}", histogram.quantile(0.5));
        assert!((histogram.quantile(0.99) / 9_900.0 - 1.0).abs() < 0.011, "{}", histogram.quantile(0.99));
        assert!((histogram.max() - 10_000.0).abs() < 1e-6);
        assert!(Histogram::default().quantile(0.5).abs() < f64::EPSILON);
    }
}
