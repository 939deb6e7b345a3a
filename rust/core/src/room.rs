//! Bootstrap rooms: `room % P_dp_size == prefill rank`, `1 <= room < 2^63`, never drawn twice by one process.
//!
//! Every resolution path of every engine version agrees on the prefill rank when the room implies it (engine-protocol,
//! section 0). The upper 47 bits are a permutation of a counter, so that rooms differ for certain; the lower 16 bits are
//! random but for what makes the rank come out right.

/// Bits of the permuted counter.
const HIGH_BITS: u32 = 47;
const HIGH_MASK: u64 = (1 << HIGH_BITS) - 1;
/// Values of the lower part; a rank count is at most `u16::MAX`, so that each residue is among them.
const LOW: u64 = 1 << 16;

/// Draws rooms.
#[derive(Clone, Debug)]
pub struct Rooms {
    seed: u64,
    drawn: u64,
    random: SplitMix,
}

impl Rooms {
    /// Rooms from `seed`; two processes that share engines need different seeds.
    pub fn new(seed: u64) -> Self {
        let mut random = SplitMix::new(seed);
        Self { seed: random.next(), drawn: 0, random }
    }

    /// A room that implies `rank` of `ranks`. `ranks` of 0 counts as 1.
    pub fn draw(&mut self, rank: u16, ranks: u16) -> u64 {
        let ranks = u64::from(ranks.max(1));
        let rank = u64::from(rank) % ranks;
        loop {
            self.drawn += 1;
            let base = permute(self.drawn.wrapping_add(self.seed)) << 16;
            let first = (rank + ranks - base % ranks) % ranks;
            let choices = (LOW - first).div_ceil(ranks);
            let room = base + first + ranks * (self.random.next() % choices);
            if room != 0 {
                return room;
            }
        }
    }
}

/// A permutation of the numbers of [`HIGH_BITS`] bits: odd multiplications and xor-shifts, each of which can be undone.
fn permute(n: u64) -> u64 {
    let mut x = n & HIGH_MASK;
    x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15) & HIGH_MASK;
    x ^= x >> 23;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93) & HIGH_MASK;
    x ^ (x >> 25)
}

/// A small generator for rooms and tie-breaks (Steele, Lea, Flood: fast splittable generators, 2014).
#[derive(Clone, Debug)]
pub struct SplitMix(u64);

impl SplitMix {
    /// A generator from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn ten_thousand_rooms_of_each_size_imply_their_rank_and_differ() {
        for ranks in [1u16, 2, 3, 4, 6, 7, 8, 64, 1000, u16::MAX] {
            let mut rooms = Rooms::new(u64::from(ranks));
            let mut seen = HashSet::new();
            for i in 0..10_000u32 {
                let rank = (i % u32::from(ranks)) as u16;
                let room = rooms.draw(rank, ranks);
                assert_eq!(room % u64::from(ranks), u64::from(rank));
                assert!((1..1 << 63).contains(&room));
                assert!(seen.insert(room));
            }
        }
    }

    #[test]
    fn rooms_of_different_rank_counts_differ_too() {
        let mut rooms = Rooms::new(7);
        let mut seen = HashSet::new();
        for i in 0..30_000u16 {
            assert!(seen.insert(rooms.draw(i % 3, [3, 4, 7][usize::from(i) % 3])));
        }
    }

    #[test]
    fn seeds_give_different_rooms() {
        assert_ne!(Rooms::new(1).draw(0, 4), Rooms::new(2).draw(0, 4));
    }

    proptest! {
        #[test]
        fn any_seed_and_size_keeps_the_rule(seed: u64, ranks in 1u16.., rank: u16) {
            let rank = rank % ranks;
            let mut rooms = Rooms::new(seed);
            for _ in 0..8 {
                let room = rooms.draw(rank, ranks);
                prop_assert_eq!(room % u64::from(ranks), u64::from(rank));
                prop_assert!((1..1 << 63).contains(&room));
            }
        }
    }
}
