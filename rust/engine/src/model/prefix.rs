//! The prefix cache of one rank: which blocks of which chains are there, least recently used out first.
use std::collections::HashMap;

/// Blocks by chained hash. A block's hash stands for everything before it, so presence of a block implies its prefix.
#[derive(Debug, Default)]
pub(super) struct PrefixCache {
    /// Hash to (last use, depth in its chain).
    blocks: HashMap<u64, (u64, u32)>,
    uses: u64,
}

impl PrefixCache {
    /// Number of leading blocks that are there; they count as used now.
    pub(super) fn hit(&mut self, chain: &[u64]) -> usize {
        self.uses += 1;
        let uses = self.uses;
        chain
            .iter()
            .take_while(|hash| match self.blocks.get_mut(hash) {
                Some(block) => {
                    block.0 = uses;
                    true
                }
                None => false,
            })
            .count()
    }

    /// Number of leading blocks that are there, without using them.
    pub(super) fn peek(&self, chain: &[u64]) -> usize {
        chain.iter().take_while(|hash| self.blocks.contains_key(hash)).count()
    }

    /// Puts a chain in; returns how many blocks are new.
    pub(super) fn insert(&mut self, chain: &[u64]) -> usize {
        self.uses += 1;
        let before = self.blocks.len();
        for (depth, hash) in chain.iter().enumerate() {
            self.blocks.insert(*hash, (self.uses, u32::try_from(depth).unwrap_or(u32::MAX)));
        }
        self.blocks.len() - before
    }

    /// Blocks held.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Evicts down to `most` blocks: the longest unused first and, within one chain, the deepest first.
    pub(super) fn shrink(&mut self, most: usize) {
        if self.blocks.len() <= most {
            return;
        }
        // A little more than asked, so that a full cache does not sort for every batch.
        let keep = most - most / 64;
        let mut order: Vec<(u64, std::cmp::Reverse<u32>, u64)> =
            self.blocks.iter().map(|(hash, (used, depth))| (*used, std::cmp::Reverse(*depth), *hash)).collect();
        order.sort_unstable();
        for (_, _, hash) in order.iter().take(self.blocks.len() - keep) {
            self.blocks.remove(hash);
        }
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_matches_up_to_its_first_unknown_block() {
        let mut cache = PrefixCache::default();
        assert_eq!(cache.insert(&[1, 2, 3]), 3);
        assert_eq!(cache.hit(&[1, 2, 9, 3]), 2);
        assert_eq!(cache.insert(&[1, 2, 9]), 1);
        assert_eq!(cache.len(), 4);
    }

    #[test]
    fn the_longest_unused_chain_leaves_from_its_end() {
        let mut cache = PrefixCache::default();
        cache.insert(&[1, 2, 3]);
        cache.insert(&[7, 8]);
        cache.shrink(4);
        assert_eq!((cache.peek(&[1, 2, 3]), cache.peek(&[7, 8])), (2, 2));
        cache.hit(&[1, 2]);
        cache.shrink(3);
        assert_eq!((cache.peek(&[1, 2]), cache.peek(&[7, 8])), (2, 1));
    }
}
