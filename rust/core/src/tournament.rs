//! The best of many ranks in a few steps: a tree whose nodes know the best score and the most room below them.
//!
//! A request that does not fit the winner descends to the best rank with room for it; whole subtrees without enough room are
//! skipped. Setting a leaf and finding a leaf take `log2(ranks)` steps in the usual case, and neither allocates.

/// Room of a closed leaf.
const NONE: i64 = i64::MIN;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    score: u64,
    room: i64,
}

const CLOSED: Node = Node { score: 0, room: NONE };

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Tournament {
    /// A heap-shaped tree; leaf `i` is at `leaves + i`.
    nodes: Vec<Node>,
    leaves: usize,
}

impl Default for Tournament {
    fn default() -> Self {
        Self { nodes: vec![CLOSED; 2], leaves: 1 }
    }
}

impl Tournament {
    /// Makes room for `leaves` leaves. Allocates; called when ranks are added.
    pub fn grow(&mut self, leaves: usize) {
        if leaves <= self.leaves {
            return;
        }
        let wider = leaves.next_power_of_two();
        let mut nodes = vec![CLOSED; 2 * wider];
        nodes[wider..wider + self.leaves].copy_from_slice(&self.nodes[self.leaves..2 * self.leaves]);
        for i in (1..wider).rev() {
            nodes[i] = winner(nodes[2 * i], nodes[2 * i + 1]);
        }
        self.nodes = nodes;
        self.leaves = wider;
    }

    /// Opens a leaf with a score above 0 and room, or closes it with score 0. Unknown leaves are ignored.
    pub fn set(&mut self, leaf: usize, score: u64, room: i64) {
        if leaf >= self.leaves {
            return;
        }
        let mut i = self.leaves + leaf;
        let mut node = if score == 0 { CLOSED } else { Node { score, room } };
        while self.nodes[i] != node {
            self.nodes[i] = node;
            if i == 1 {
                return;
            }
            node = winner(node, self.nodes[i ^ 1]);
            i /= 2;
        }
    }

    /// Whether any leaf is open.
    pub fn any(&self) -> bool {
        self.nodes[1].score > 0
    }

    /// The most room of any open leaf.
    pub fn most_room(&self) -> i64 {
        self.nodes[1].room
    }

    /// The leaf's score, 0 when it is closed.
    pub fn score(&self, leaf: usize) -> u64 {
        if leaf < self.leaves { self.nodes[self.leaves + leaf].score } else { 0 }
    }

    /// The leaf's room, when it is open.
    pub fn room(&self, leaf: usize) -> Option<i64> {
        if leaf >= self.leaves {
            return None;
        }
        let node = self.nodes[self.leaves + leaf];
        (node.score > 0).then_some(node.room)
    }

    /// The open leaf with the best score among those with at least `need` room that `accept` takes.
    pub fn best(&self, need: i64, mut accept: impl FnMut(usize) -> bool) -> Option<usize> {
        let mut found = None;
        let mut floor = 0;
        self.descend(1, need, &mut floor, &mut found, &mut accept);
        found
    }

    fn descend(
        &self,
        i: usize,
        need: i64,
        floor: &mut u64,
        found: &mut Option<usize>,
        accept: &mut impl FnMut(usize) -> bool,
    ) {
        let node = self.nodes[i];
        if node.score <= *floor || node.room < need {
            return;
        }
        if i >= self.leaves {
            if accept(i - self.leaves) {
                *floor = node.score;
                *found = Some(i - self.leaves);
            }
            return;
        }
        let (left, right) = (2 * i, 2 * i + 1);
        let (first, second) =
            if self.nodes[right].score > self.nodes[left].score { (right, left) } else { (left, right) };
        self.descend(first, need, floor, found, accept);
        self.descend(second, need, floor, found, accept);
    }
}

fn winner(a: Node, b: Node) -> Node {
    Node { score: a.score.max(b.score), room: a.room.max(b.room) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_too_big_for_the_winner_goes_to_the_best_rank_that_holds_it() {
        let mut t = Tournament::default();
        t.grow(5);
        t.set(0, 90, 10);
        t.set(1, 50, 100);
        t.set(4, 70, 100);
        assert_eq!(t.best(5, |_| true), Some(0));
        assert_eq!(t.best(50, |_| true), Some(4));
        assert_eq!(t.best(50, |leaf| leaf != 4), Some(1));
        assert_eq!(t.best(101, |_| true), None);
        t.set(4, 0, 1000);
        assert_eq!(t.best(50, |_| true), Some(1));
    }

    proptest! {
        #[test]
        fn it_finds_what_a_scan_of_all_ranks_finds(
            sets in proptest::collection::vec((0usize..40, 0u64..50, 0i64..100), 1..200),
            need in 0i64..100,
            refused in 0usize..40,
        ) {
            let mut t = Tournament::default();
            let mut plain = vec![(0u64, NONE); 40];
            for (leaf, score, room) in sets {
                t.grow(leaf + 1);
                t.set(leaf, score, room);
                plain[leaf] = (score, room);
            }
            let best = plain.iter().enumerate()
                .filter(|&(i, &(s, r))| s > 0 && r >= need && i != refused)
                .map(|(_, &(s, _))| s).max();
            let got = t.best(need, |leaf| leaf != refused);
            prop_assert_eq!(got.map(|leaf| plain[leaf].0), best);
            prop_assert_eq!(t.any(), plain.iter().any(|p| p.0 > 0));
        }
    }
}
