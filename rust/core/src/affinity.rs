//! Which ranks have which prompt prefix in their cache: a table from chained block hash to ranks, with a hard limit in bytes.
//!
//! The table is set-associative, like a processor's cache: each hash belongs to one line of four entries, and an insert takes
//! the place of the oldest of them. So the limit holds at every insert, nothing is ever rehashed, and a probe is one memory
//! access. Entries name ranks by slot; a slot is reused only after a sweep has taken its entries out.
pub use crate::wire::BLOCK_TOKENS;

/// Ranks that one entry can name: enough to spread a hot prefix, few enough for two words. With three of them, a prefix that
/// more than half of the requests share fed three of eight prefill ranks, and the others computed it again and again.
pub const REPLICAS: usize = 7;
const WAYS: usize = 4;
/// Words of an entry: the hash, and the ranks with the entry's age.
const WORDS: usize = 3;
const ENTRY_BYTES: usize = 8 * WORDS;
/// Lines that one insert sweeps while a sweep is due.
const SWEEP_LINES: usize = 64;

/// A prefix that ranks have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Blocks of the prompt that they have.
    pub blocks: usize,
    /// Rank slots + 1; 0 means none.
    slots: [u16; REPLICAS],
}

impl Match {
    /// The rank slots.
    pub fn slots(&self) -> impl Iterator<Item = u32> + Clone + '_ {
        self.slots.iter().filter(|&&s| s != 0).map(|&s| u32::from(s) - 1)
    }

    /// Whether `slot` is among them.
    pub fn has(&self, slot: u32) -> bool {
        self.slots().any(|s| s == slot)
    }

    /// Whether both name the same ranks.
    pub fn same_ranks(&self, other: &Self) -> bool {
        self.slots == other.slots
    }

    /// Whether no rank has any block.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0 || self.slots.iter().all(|&s| s == 0)
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Affinity {
    /// Entries of a hash, seven slots + 1 and a 16-bit age. Hash 0 is an empty entry.
    table: Vec<u64>,
    lines: usize,
    /// Inserts and hits, for ages.
    ticks: u64,
    /// Ticks of one age step, so that ages span a few turns of the table.
    age_shift: u32,
    /// Removed slots that may still be named; the sweep's place.
    removed: Vec<u32>,
    sweep_at: usize,
    /// Removed slots that joined after the running sweep began.
    joined: Vec<u32>,
}

impl Affinity {
    /// An empty table of at most `bytes`. Memory is touched only where prefixes are.
    pub fn new(bytes: usize) -> Self {
        let lines = bytes / (ENTRY_BYTES * WAYS);
        let lines = if lines == 0 { 0 } else { 1 << lines.ilog2() };
        let entries = (lines * WAYS).max(1);
        Self {
            table: vec![0; lines * WAYS * WORDS],
            lines,
            age_shift: entries.ilog2().saturating_sub(12),
            ..Self::default()
        }
    }

    /// Bytes of the table.
    pub fn bytes(&self) -> usize {
        self.table.len() * 8
    }

    fn line(&self, hash: u64) -> usize {
        (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) as usize & (self.lines - 1)
    }

    fn age(&self) -> u16 {
        (self.ticks >> self.age_shift) as u16
    }

    /// Finds the entry of `hash`, and marks it as used.
    fn probe(&mut self, hash: u64) -> Option<[u16; REPLICAS]> {
        if self.lines == 0 || hash == 0 {
            return None;
        }
        let start = self.line(hash) * WAYS * WORDS;
        let age = self.age();
        let line = &mut self.table[start..start + WAYS * WORDS];
        for way in line.chunks_exact_mut(WORDS) {
            if way[0] == hash {
                let slots = unpack(way).0;
                pack(way, slots, age);
                return Some(slots);
            }
        }
        None
    }

    /// The longest known prefix of a chain and the ranks that have it. `alive` says which slots count.
    pub fn longest(&mut self, chain: &[u64], alive: impl Fn(u32) -> bool) -> Match {
        let mut found = Match::default();
        if self.lines == 0 || chain.is_empty() {
            return found;
        }
        self.ticks += 1;
        let keep = |slots: [u16; REPLICAS]| slots.map(|s| if s != 0 && alive(u32::from(s) - 1) { s } else { 0 });
        // The whole chain first: repeated prompts and samples of one prompt end there.
        let (mut low, mut high) = (0, chain.len());
        let mut middle = chain.len();
        while low < high {
            let slots = self.probe(chain[middle - 1]).map(keep).filter(|s| s.iter().any(|&s| s != 0));
            if let Some(slots) = slots {
                found = Match { blocks: middle, slots };
                low = middle;
            } else {
                high = middle - 1;
            }
            middle = (low + high).div_ceil(2);
        }
        found
    }

    /// `slot` has, or will have, the whole chain; it already had its first `known` blocks.
    pub fn insert(&mut self, chain: &[u64], known: usize, slot: u32) {
        let Ok(name) = u16::try_from(slot + 1) else { return };
        if self.lines == 0 {
            return;
        }
        if !self.removed.is_empty() {
            self.sweep(SWEEP_LINES);
        }
        for &hash in chain.iter().skip(known) {
            self.put(hash, name);
        }
    }

    fn put(&mut self, hash: u64, name: u16) {
        if hash == 0 {
            return;
        }
        self.ticks += 1;
        let age = self.age();
        let start = self.line(hash) * WAYS * WORDS;
        let line = &mut self.table[start..start + WAYS * WORDS];
        let mut victim = 0;
        let mut oldest = 0;
        for (i, way) in line.chunks_exact_mut(WORDS).enumerate() {
            if way[0] == hash {
                let mut slots = unpack(way).0;
                if !slots.contains(&name) {
                    // The newest replica comes first, the oldest falls off.
                    slots.rotate_right(1);
                    slots[0] = name;
                }
                pack(way, slots, age);
                return;
            }
            let since = if way[0] == 0 { u32::MAX } else { u32::from(age.wrapping_sub(unpack(way).1)) };
            if since >= oldest {
                oldest = since;
                victim = i;
            }
        }
        let mut slots = [0; REPLICAS];
        slots[0] = name;
        let way = &mut line[WORDS * victim..WORDS * (victim + 1)];
        way[0] = hash;
        pack(way, slots, age);
    }

    /// Starts to take out every entry of a removed rank. The slot may be reused once [`Affinity::swept`] no longer holds it.
    pub fn remove(&mut self, slot: u32) {
        if self.lines == 0 {
            return;
        }
        if self.sweep_at == 0 {
            self.removed.push(slot);
        } else {
            self.joined.push(slot);
        }
    }

    /// Whether nothing names removed ranks any more.
    pub fn swept(&self) -> bool {
        self.removed.is_empty() && self.joined.is_empty()
    }

    /// Sweeps some lines for removed ranks.
    pub fn sweep(&mut self, lines: usize) {
        if self.removed.is_empty() {
            return;
        }
        let end = (self.sweep_at + lines).min(self.lines);
        for way in self.table[self.sweep_at * WAYS * WORDS..end * WAYS * WORDS].chunks_exact_mut(WORDS) {
            if way[0] == 0 {
                continue;
            }
            let (slots, age) = unpack(way);
            let left = slots.map(|s| if s != 0 && self.removed.contains(&(u32::from(s) - 1)) { 0 } else { s });
            if left == [0; REPLICAS] {
                way.fill(0);
            } else if left != slots {
                pack(way, left, age);
            }
        }
        self.sweep_at = end;
        if end == self.lines {
            self.sweep_at = 0;
            self.removed.clear();
            self.removed.append(&mut self.joined);
        }
    }

    /// Entries in use. Counts; for tests and the live view.
    pub fn entries(&self) -> usize {
        self.table.chunks_exact(WORDS).filter(|e| e[0] != 0).count()
    }
}

fn pack(way: &mut [u64], slots: [u16; REPLICAS], age: u16) {
    let word = |four: [u16; 4]| four.iter().rev().fold(0, |word, &part| word << 16 | u64::from(part));
    way[1] = word([slots[0], slots[1], slots[2], slots[3]]);
    way[2] = word([slots[4], slots[5], slots[6], age]);
}

fn unpack(way: &[u64]) -> ([u16; REPLICAS], u16) {
    let part = |at: usize| (way[1 + at / 4] >> (16 * (at % 4))) as u16;
    (std::array::from_fn(part), part(REPLICAS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::room::SplitMix;
    use proptest::prelude::*;

    fn chain(seed: u64, blocks: usize) -> Vec<u64> {
        let mut r = SplitMix::new(seed);
        (0..blocks).map(|_| r.next() | 1).collect()
    }

    #[test]
    fn the_longest_shared_prefix_is_found_with_its_rank() {
        let mut a = Affinity::new(1 << 20);
        let mut prompt = chain(1, 211);
        a.insert(&prompt, 0, 5);
        prompt.extend(chain(2, 12));
        let m = a.longest(&prompt, |_| true);
        assert_eq!((m.blocks, m.slots().collect::<Vec<_>>()), (211, vec![5]));
        assert!(a.longest(&chain(3, 50), |_| true).is_empty());
        assert!(a.longest(&prompt, |slot| slot != 5).is_empty());
    }

    #[test]
    fn a_prefix_may_be_on_seven_ranks_and_the_newest_stay() {
        let mut a = Affinity::new(1 << 20);
        let prompt = chain(1, 4);
        for slot in 0..8 {
            a.insert(&prompt, 0, slot);
        }
        let mut slots: Vec<u32> = a.longest(&prompt, |_| true).slots().collect();
        slots.sort_unstable();
        assert_eq!(slots, [1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn memory_stays_at_its_limit_under_200_000_unique_prompts() {
        let limit = 1 << 20;
        let mut a = Affinity::new(limit);
        let before = a.bytes();
        for i in 0..200_000 {
            a.insert(&chain(i, 20), 0, (i % 8) as u32);
        }
        assert_eq!(a.bytes(), before);
        assert!(a.bytes() <= limit);
        assert!(a.entries() * ENTRY_BYTES <= limit);
        assert_eq!(a.longest(&chain(199_999, 20), |_| true).blocks, 20, "the newest is there");
    }

    #[test]
    fn a_used_prefix_outlives_unique_prompts_of_twice_the_table() {
        let mut a = Affinity::new(1 << 20);
        let hot = chain(u64::MAX, 64);
        a.insert(&hot, 0, 3);
        for i in 0..6_000 {
            a.insert(&chain(i, 20), 0, 1);
            assert_eq!(a.longest(&hot, |_| true).blocks, 64, "after {i}");
        }
    }

    #[test]
    fn entries_of_a_removed_rank_go_with_it() {
        let mut a = Affinity::new(1 << 16);
        a.insert(&chain(1, 100), 0, 1);
        a.insert(&chain(2, 100), 0, 2);
        a.insert(&chain(2, 100), 0, 1);
        a.remove(1);
        a.remove(7);
        while !a.swept() {
            a.sweep(16);
        }
        assert!(a.longest(&chain(1, 100), |_| true).is_empty());
        assert_eq!(a.longest(&chain(2, 100), |_| true).slots().collect::<Vec<_>>(), [2]);
        assert_eq!(a.entries(), 100);
    }

    #[test]
    fn no_memory_means_no_affinity() {
        let mut a = Affinity::new(0);
        a.insert(&chain(1, 10), 0, 1);
        a.remove(1);
        assert!(a.swept());
        assert!(a.longest(&chain(1, 10), |_| true).is_empty());
    }

    proptest! {
        #[test]
        fn a_match_is_never_longer_than_what_the_rank_was_given(shared in 0usize..60, own in 1usize..60, other in 1usize..60) {
            let mut a = Affinity::new(1 << 20);
            let mut first = chain(1, shared);
            let mut second = first.clone();
            first.extend(chain(2, own));
            second.extend(chain(3, other));
            a.insert(&first, 0, 9);
            let m = a.longest(&second, |_| true);
            prop_assert_eq!(m.blocks, shared);
            prop_assert_eq!(a.longest(&first, |_| true).blocks, first.len());
        }
    }
}
