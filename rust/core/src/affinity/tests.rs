//! What the affinity remembers and forgets.
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

#[test]
fn conversations_keep_their_ranks_while_what_they_share_goes_round() {
    let mut a = Affinity::new(1 << 20);
    let of = |n: u64| [chain(0, 105), chain(n, 20)].concat();
    for n in 1..=50u64 {
        a.insert(&of(n), 0, n as u32);
    }
    for n in 1..=50u64 {
        let m = a.longest(&of(n), |_| true);
        assert_eq!((m.blocks, m.slots().collect::<Vec<_>>()), (125, vec![n as u32]));
    }
    let shared = a.longest(&chain(0, 105), |_| true);
    assert_eq!((shared.blocks, shared.slots().collect::<Vec<_>>()), (105, (44..=50).rev().collect()));
    assert_eq!(a.entries(), 105 + 50 * 20);
}

#[test]
fn a_prefix_that_ranks_have_is_given_to_one_more_in_one_step() {
    let mut a = Affinity::new(1 << 20);
    let prompt = chain(1, 211);
    a.insert(&prompt, 0, 1);
    let before = a.ticks;
    a.insert(&prompt, 0, 2);
    assert_eq!(a.ticks, before, "no block was written");
    assert_eq!(a.longest(&prompt[..1], |_| true).slots().collect::<Vec<_>>(), [2, 1]);
}

#[test]
fn every_run_is_freed_with_its_last_entry() {
    // A table of few entries, each of which is replaced many times.
    let mut a = Affinity::new(4 << 10);
    for i in 0..20_000 {
        let own = chain(i, 1 + (i % 7) as usize);
        a.insert(&[chain(i % 3, 2), own].concat(), 0, (i % 5) as u32);
        assert!(a.bytes() <= 4 << 10);
    }
    let led: std::collections::HashSet<u32> = (a.origin..a.origin + a.lines * LINE)
        .step_by(WORDS)
        .filter(|&at| a.table[at] != 0)
        .map(|at| a.lead(at).run)
        .collect();
    assert_eq!(a.runs.used(), led.len());
}

/// What the table stands for: for each block, the ranks that were given it last.
#[derive(Default)]
struct Plain(std::collections::HashMap<u64, Vec<u32>>);

impl Plain {
    fn insert(&mut self, chain: &[u64], slot: u32) {
        for &hash in chain {
            let ranks = self.0.entry(hash).or_default();
            if !ranks.contains(&slot) {
                ranks.insert(0, slot);
                ranks.truncate(REPLICAS);
            }
        }
    }

    fn remove(&mut self, slot: u32) {
        for ranks in self.0.values_mut() {
            ranks.retain(|&r| r != slot);
        }
    }
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

    #[test]
    fn runs_say_of_each_block_what_a_list_of_its_ranks_would(
        ops in proptest::collection::vec((0usize..4, 0usize..4, 0usize..9, 0usize..9, 0u32..12, 0u8..16), 1..120),
    ) {
        let mut a = Affinity::new(1 << 20);
        let mut plain = Plain::default();
        // Prompts of three pieces: few beginnings, fewer conversations on each, cut anywhere.
        let prompt = |a: usize, b: usize, cut_a: usize, cut_b: usize| {
            let mut all = chain(a as u64, 8)[..cut_a.min(8)].to_vec();
            if cut_a >= 8 {
                all.extend(&chain(10 + (a * 4 + b) as u64, 8)[..cut_b.min(8)]);
            }
            all
        };
        for (x, y, cut_x, cut_y, slot, kind) in ops {
            let chain = prompt(x, y, cut_x, cut_y);
            if kind == 0 {
                a.remove(slot);
                while !a.swept() {
                    a.sweep(3);
                }
                plain.remove(slot);
                continue;
            }
            a.insert(&chain, 0, slot);
            plain.insert(&chain, slot);
            for x in 0..4 {
                for y in 0..4 {
                    for cut in 1..=16 {
                        let chain = prompt(x, y, cut.min(8), cut.saturating_sub(8));
                        let last = chain[chain.len() - 1];
                        let got = a.find(last).map_or(vec![], |at| {
                            a.runs.get(a.lead(at).run).slots.iter().filter(|&&s| s != 0).map(|&s| u32::from(s) - 1).collect()
                        });
                        prop_assert_eq!(got, plain.0.get(&last).cloned().unwrap_or_default(), "{} {} {}", x, y, cut);
                    }
                }
            }
        }
    }
}
