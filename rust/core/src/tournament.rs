//! The best of many ranks in a few steps: a tree whose nodes know the best score and the most room below them.
//!
//! A request that does not fit the winner descends to the best rank with room for it; whole subtrees without enough room are
//! skipped. Setting a leaf and finding a leaf take `log2(ranks)` steps in the usual case, and neither allocates.

/// Room of a closed leaf.
const NONE: i64 = i64::MIN;
/// Most nodes that wait while one way down the tree is followed: one for each level.
const DEPTH: usize = u32::BITS as usize;

/// The best score and the most room below, for every request and for those with R3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    score: u64,
    room: i64,
    r3_room: i64,
}

const CLOSED: Node = Node { score: 0, room: NONE, r3_room: NONE };

impl Node {
    fn room(&self, r3: bool) -> i64 {
        if r3 { self.r3_room } else { self.room }
    }
}

/// Two siblings, in a line of memory of their own.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Siblings([Node; 2]);

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Tournament {
    /// A heap-shaped tree, the root at 1; leaf `i` is at `leaves + i`.
    pairs: Vec<Siblings>,
    leaves: usize,
}

impl Default for Tournament {
    fn default() -> Self {
        Self { pairs: vec![Siblings([CLOSED; 2])], leaves: 1 }
    }
}

impl Tournament {
    fn node(&self, i: usize) -> &Node {
        &self.pairs[i >> 1].0[i & 1]
    }

    /// Makes room for `leaves` leaves. Allocates; called when ranks are added.
    pub fn grow(&mut self, leaves: usize) {
        if leaves <= self.leaves {
            return;
        }
        let wider = leaves.next_power_of_two();
        let old = std::mem::replace(self, Self { pairs: vec![Siblings([CLOSED; 2]); wider.max(1)], leaves: wider });
        for leaf in 0..old.leaves {
            let Node { score, room, r3_room } = *old.node(old.leaves + leaf);
            self.set(leaf, score, room, r3_room != NONE);
        }
    }

    /// Opens a leaf with a score above 0 and room, for requests with R3 too when `r3`, or closes it with score 0. Unknown leaves
    /// are ignored.
    pub fn set(&mut self, leaf: usize, score: u64, room: i64, r3: bool) {
        if leaf >= self.leaves {
            return;
        }
        let mut node = if score == 0 { CLOSED } else { Node { score, room, r3_room: if r3 { room } else { NONE } } };
        let mut i = self.leaves + leaf;
        loop {
            let pair = &mut self.pairs[i >> 1].0;
            if pair[i & 1] == node {
                return;
            }
            pair[i & 1] = node;
            if i == 1 {
                return;
            }
            node = winner(pair[0], pair[1]);
            i >>= 1;
        }
    }

    /// Whether any leaf is open, to requests with R3 when `r3`.
    pub fn any(&self, r3: bool) -> bool {
        self.node(1).room(r3) != NONE
    }

    /// The most room of any open leaf.
    pub fn most_room(&self, r3: bool) -> i64 {
        self.node(1).room(r3)
    }

    /// The leaf's score, 0 when it is closed.
    pub fn score(&self, leaf: usize) -> u64 {
        if leaf < self.leaves { self.node(self.leaves + leaf).score } else { 0 }
    }

    /// The leaf's room, when it is open.
    pub fn room(&self, leaf: usize, r3: bool) -> Option<i64> {
        if leaf >= self.leaves {
            return None;
        }
        Some(self.node(self.leaves + leaf).room(r3)).filter(|&room| room != NONE)
    }

    /// The open leaf with the best score among those with at least `need` room that `accept` takes.
    pub fn best(&self, need: i64, r3: bool, mut accept: impl FnMut(usize) -> bool) -> Option<usize> {
        let mut found = None;
        let mut floor = 0;
        let mut others = [0; DEPTH];
        let (mut waiting, mut i) = (0, 1);
        loop {
            let node = self.node(i);
            let room = node.room(r3);
            if node.score > floor && room >= need && room != NONE {
                if i < self.leaves {
                    let better = usize::from(self.node(2 * i + 1).score > self.node(2 * i).score);
                    others[waiting] = 2 * i + (1 - better);
                    waiting += 1;
                    i = 2 * i + better;
                    continue;
                }
                if accept(i - self.leaves) {
                    floor = node.score;
                    found = Some(i - self.leaves);
                }
            }
            if waiting == 0 {
                return found;
            }
            waiting -= 1;
            i = others[waiting];
        }
    }
}

fn winner(a: Node, b: Node) -> Node {
    Node { score: a.score.max(b.score), room: a.room.max(b.room), r3_room: a.r3_room.max(b.r3_room) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_too_big_for_the_winner_goes_to_the_best_rank_that_holds_it() {
        let mut t = Tournament::default();
        t.grow(5);
        t.set(0, 90, 10, true);
        t.set(1, 50, 100, true);
        t.set(4, 70, 100, true);
        assert_eq!(t.best(5, false, |_| true), Some(0));
        assert_eq!(t.best(50, false, |_| true), Some(4));
        assert_eq!(t.best(50, false, |leaf| leaf != 4), Some(1));
        assert_eq!(t.best(101, false, |_| true), None);
        t.set(4, 0, 1000, true);
        assert_eq!(t.best(50, false, |_| true), Some(1));
    }

    proptest! {
        #[test]
        fn it_finds_what_a_scan_of_all_ranks_finds(
            sets in proptest::collection::vec((0usize..40, 0u64..50, 0i64..100, proptest::bool::ANY), 1..200),
            need in 0i64..100,
            refused in 0usize..40,
            with_r3 in proptest::bool::ANY,
        ) {
            let mut t = Tournament::default();
            let mut plain = vec![(0u64, NONE, false); 40];
            for (leaf, score, room, r3) in sets {
                t.grow(leaf + 1);
                t.set(leaf, score, room, r3);
                plain[leaf] = (score, room, r3);
            }
            let best = plain.iter().enumerate()
                .filter(|&(i, &(s, r, r3))| s > 0 && r >= need && i != refused && (r3 || !with_r3))
                .map(|(_, &(s, ..))| s).max();
            let got = t.best(need, with_r3, |leaf| leaf != refused);
            prop_assert_eq!(got.map(|leaf| plain[leaf].0), best);
            prop_assert_eq!(t.any(with_r3), plain.iter().any(|p| p.0 > 0 && (p.2 || !with_r3)));
        }
    }
}
