//! Ranks by prompt length: each rank gets the prompts of one range of lengths, and the ranges hold about as many tokens each.
//!
//! So short prompts do not stand behind long ones. Lengths are counted in bins of a quarter octave, over the running interval and
//! the one before. Prompts of one bin that belongs to several ranks are spread over them in proportion.
use std::time::Duration;

use super::{Ask, pick};
use crate::time::Moment;

/// Bins of a quarter octave: lengths up to `u32::MAX`.
const BINS: usize = 128;

/// Tokens by length.
#[derive(Debug)]
pub(super) struct Buckets {
    interval: Duration,
    since: Moment,
    now: [u64; BINS],
    before: [u64; BINS],
}

fn bin(length: u32) -> usize {
    let length = length.max(1);
    let octave = length.ilog2();
    // The two bits below the highest one.
    let quarter = if octave >= 2 { length >> (octave - 2) & 3 } else { length << (2 - octave) & 3 };
    octave as usize * 4 + quarter as usize
}

impl Buckets {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, since: Moment::ZERO, now: [0; BINS], before: [0; BINS] }
    }

    /// A prompt was sent.
    pub(super) fn add(&mut self, length: u32, now: Moment) {
        self.tick(now);
        self.now[bin(length)] += u64::from(length.max(1));
    }

    pub(super) fn tick(&mut self, now: Moment) {
        if now.since(self.since) >= self.interval {
            self.before = std::mem::replace(&mut self.now, [0; BINS]);
            self.since = now;
        }
    }

    /// The part of all tokens that is in shorter prompts, with those of the same bin counted up to `within` of it, 0 to 1.
    fn below(&self, length: u32, within: f64) -> Option<f64> {
        let tokens = |i: usize| (self.now[i] + self.before[i]) as f64;
        let all: f64 = (0..BINS).map(tokens).sum();
        let own = bin(length);
        let shorter: f64 = (0..own).map(tokens).sum();
        (all > 0.0).then(|| (shorter + within * tokens(own)) / all)
    }

    /// The rank of the length's range, or the nearest to it that admits the request. While no lengths are known, the roomiest.
    pub(super) fn choose(&self, ask: &Ask<'_>) -> Option<u32> {
        let within = (ask.draw >> 11) as f64 / (1u64 << 53) as f64;
        let Some(share) = self.below(ask.request.prompt_tokens, within) else { return pick::roomiest(ask) };
        let briefs = || ask.fleet.briefs.iter().enumerate().filter(|(_, b)| b.live && b.role == ask.role);
        let ranks = briefs().map(|(slot, _)| slot as u32).filter(|&slot| (ask.will)(slot));
        let count = briefs().filter(|(slot, _)| (ask.will)(*slot as u32)).count();
        let wanted = ((share * count as f64) as usize).min(count.saturating_sub(1));
        let nearest = ranks.enumerate().filter(|&(_, slot)| (ask.admits)(slot));
        nearest.min_by_key(|&(at, _)| at.abs_diff(wanted)).map(|(_, slot)| slot).or_else(|| pick::roomiest(ask))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_rise_with_length_four_an_octave() {
        let lengths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 1000, 1024, 1280, 1536, 1792, 2048, u32::MAX];
        let bins: Vec<usize> = lengths.iter().map(|&n| bin(n)).collect();
        assert!(bins.windows(2).all(|b| b[0] <= b[1]), "{bins:?}");
        assert_eq!(&bins[14..19], [40, 41, 42, 43, 44]);
        assert_eq!(*bins.last().unwrap(), BINS - 1);
    }

    #[test]
    fn shares_are_of_tokens_and_old_lengths_are_forgotten() {
        let t = |secs| Moment::from_secs_f64(100.0 + secs);
        let mut b = Buckets::new(Duration::from_secs(5));
        assert_eq!(b.below(10, 0.5), None);
        // 8 short ones have as many tokens as one long one.
        (0..8).for_each(|_| b.add(1024, t(0.0)));
        b.add(8192, t(1.0));
        assert_eq!(b.below(1024, 0.5), Some(0.25));
        assert_eq!(b.below(8192, 0.0), Some(0.5));
        b.tick(t(6.0));
        b.add(64, t(7.0));
        assert!(b.below(8192, 0.0).unwrap() > 0.5);
        b.tick(t(12.0));
        assert_eq!(b.below(8192, 0.0), Some(1.0));
    }
}
