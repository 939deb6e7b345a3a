//! R3 text that is about to leave an engine, and how much of it the engine can emit in time.
//!
//! One engine's Python processes emit about one 97 MB reply a second (engine-protocol 6.6), and everything else that the
//! engine answers waits behind it. So what is about to leave takes at most `beta` of the waiting timeout to emit:
//! `outstanding <= rate * (beta * timeout + decode time)`. The decode time is there because text of a request that still
//! decodes is not about to leave yet; prefill's is 0.
//!
//! What is reserved is a bound (on decode, rows of `max_new_tokens`); the limit grows by what replies fall short of theirs.
//! The rate is what left per second while much waited. It shows only while the engine has something to emit, and too small
//! an estimate would see to it that it never has: so it does not fall below a quarter of what a real engine did, unless a
//! single reply was slower.
use std::time::Duration;

use crate::estimate::{Quantiles, Rate};
use crate::time::Moment;

/// Bytes per second that are assumed of an engine before anything was measured: what a real engine did (6.6).
const FIRST_RATE: f64 = 97e6;
/// Part of it that an estimate does not fall below.
const LEAST_PART: f64 = 0.25;
/// Most that a reservation is taken to exceed its reply.
const MOST_SLACK: f64 = 32.0;
/// Part of the sums of reserved and emitted bytes that stays when a reply ends.
const SLACK_MEMORY: f64 = 0.98;
/// Replies smaller than this say nothing about bytes per second.
const SMALL: u64 = 256 << 10;
/// Bucket of the measured rate, seconds.
const SPAN: f64 = 5.0;
/// The quantile of seconds per output token that counts as unqueued.
const LOW: f64 = 0.2;
/// Weight of one request in the mean of output tokens.
const TOKENS_WEIGHT: f64 = 0.05;

/// The R3 account of one engine.
#[derive(Clone, Debug)]
pub struct Egress {
    outstanding: u64,
    /// Bytes per second of the slowest single reply.
    slowest: f64,
    rate: Rate,
    pace: Quantiles,
    tokens: f64,
    /// Emitted, and not yet matched by a release.
    fresh: u64,
    /// Fading sums over replies: what was reserved and what was emitted.
    reserved: f64,
    left: f64,
}

impl Default for Egress {
    fn default() -> Self {
        Self {
            outstanding: 0,
            slowest: f64::INFINITY,
            rate: Rate::default(),
            pace: Quantiles::new(LOW),
            tokens: 0.0,
            fresh: 0,
            reserved: 0.0,
            left: 0.0,
        }
    }
}

impl Egress {
    /// Counts text that will leave.
    pub fn reserve(&mut self, bytes: u64) {
        self.outstanding += bytes;
    }

    /// The text left, or never will.
    pub fn release(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
        if self.fresh > 0 {
            self.reserved = self.reserved * SLACK_MEMORY + bytes as f64;
            self.left = self.left * SLACK_MEMORY + std::mem::take(&mut self.fresh) as f64;
        }
    }

    /// Bytes that are about to leave.
    pub fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// `bytes` left in `took`.
    pub fn emitted(&mut self, bytes: u64, took: Duration, now: Moment) {
        self.rate.add(bytes as f64, now);
        self.fresh += bytes;
        let secs = took.as_secs_f64();
        if bytes >= SMALL && secs > 0.0 {
            // One slow reply shows that the engine is slower than assumed; one fast reply shows only how fast one process is.
            self.slowest = self.slowest.min(bytes as f64 / secs);
        }
    }

    /// A request of `tokens` output tokens decoded for `secs`.
    pub fn decoded(&mut self, tokens: u32, secs: f64) {
        if tokens == 0 {
            return;
        }
        let n = f64::from(tokens);
        self.pace.record(secs / n);
        self.tokens = if self.tokens == 0.0 { n } else { self.tokens + TOKENS_WEIGHT * (n - self.tokens) };
    }

    /// Reads the running bucket.
    pub fn update(&mut self, now: Moment, limit: u64) {
        self.rate.roll(now, SPAN, self.outstanding >= limit / 2);
    }

    /// Whether nothing was measured yet.
    pub fn is_guessed(&self) -> bool {
        self.rate.get().is_none()
    }

    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        let seen = self.rate.get();
        let measured = seen.map_or(FIRST_RATE, |r| r.max(FIRST_RATE * LEAST_PART));
        measured.min(self.slowest.max(seen.unwrap_or(0.0))).max(1.0)
    }

    /// Bytes that may be about to leave, when they may take `secs` to emit.
    pub fn limit(&self, secs: f64) -> u64 {
        let decode = self.pace.get().unwrap_or(0.0) * self.tokens;
        (self.rate() * (secs + decode) * self.slack()) as u64
    }

    /// How many times as much is reserved as is emitted.
    fn slack(&self) -> f64 {
        if self.left > 0.0 { (self.reserved / self.left).clamp(1.0, MOST_SLACK) } else { 1.0 }
    }

    /// Whether another reply of `bytes` fits: one is always let through.
    pub fn admits(&self, bytes: u64, limit: u64) -> bool {
        self.outstanding == 0 || self.outstanding.saturating_add(bytes) <= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(secs: f64) -> Moment {
        Moment::from_secs_f64(secs)
    }

    #[test]
    fn one_reply_is_always_let_through() {
        let mut e = Egress::default();
        assert!(e.admits(u64::MAX, 0));
        e.reserve(5);
        assert!(!e.admits(1, 5));
        assert!(e.admits(1, 6));
        e.release(5);
        assert_eq!(e.outstanding(), 0);
    }

    #[test]
    fn thirty_replies_of_97_mb_may_wait_at_an_engine_that_emits_one_a_second() {
        let mut e = Egress::default();
        let limit = e.limit(30.0);
        assert_eq!(limit / 97_000_000, 30);
        for i in 0..200 {
            e.reserve(97_000_000);
            e.emitted(97_000_000, Duration::from_millis(170), t(1.0 + f64::from(i)));
            e.update(t(1.0 + f64::from(i)), limit);
        }
        assert!(
            (80e6..110e6).contains(&e.rate()),
            "the rate is what left a second, not one reply's speed: {}",
            e.rate()
        );
    }

    #[test]
    fn a_slow_first_reply_lowers_the_assumed_rate() {
        let mut e = Egress::default();
        e.emitted(97_000_000, Duration::from_secs(10), t(10.0));
        assert!((e.rate() - 9.7e6).abs() < 1.0);
    }

    #[test]
    fn an_engine_that_was_asked_for_little_is_not_taken_for_a_slow_one() {
        let mut e = Egress::default();
        for i in 0..100 {
            e.reserve(14_000_000);
            e.update(t(1.0 + f64::from(i)), e.limit(30.0));
            e.emitted(2_000_000, Duration::from_millis(10), t(1.0 + f64::from(i)));
            e.release(14_000_000);
        }
        assert!(e.rate() >= 24e6, "{}", e.rate());
        // And what is reserved is seven times what leaves.
        assert!((e.limit(30.0) as f64 / (e.rate() * 30.0) - 7.0).abs() < 0.1);
    }

    #[test]
    fn text_of_requests_that_still_decode_is_not_about_to_leave() {
        let mut e = Egress::default();
        let before = e.limit(30.0);
        for _ in 0..50 {
            e.decoded(2000, 60.0);
        }
        let ratio = e.limit(30.0) as f64 / before as f64;
        assert!((2.7..3.3).contains(&ratio), "{ratio}");
    }
}
