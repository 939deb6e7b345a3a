//! Runs of blocks that the same ranks have, in a pool of fixed size.
use super::REPLICAS;

/// Bytes of a run, with its place in the list of free ones.
pub(super) const BYTES: usize = size_of::<Run>() + size_of::<u32>();

/// Blocks `first..end` of what was inserted at once.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(32))]
pub(super) struct Run {
    /// Rank slots + 1, the newest first; 0 means none.
    pub(super) slots: [u16; REPLICAS],
    pub(super) first: u16,
    pub(super) end: u16,
    /// When it was used last.
    pub(super) age: u16,
    /// Entries of the table that lead here. The run is free when none does.
    pub(super) refs: u16,
}

impl Run {
    /// Names a rank. The oldest falls off.
    pub(super) fn add(&mut self, name: u16) {
        if self.slots.contains(&name) {
            return;
        }
        let hole = self.slots.iter().position(|&s| s == 0).unwrap_or(REPLICAS - 1);
        self.slots[..=hole].rotate_right(1);
        self.slots[0] = name;
    }

    fn forget(&mut self, removed: &[u32]) {
        for slot in &mut self.slots {
            if *slot != 0 && removed.contains(&(u32::from(*slot) - 1)) {
                *slot = 0;
            }
        }
    }
}

/// The pool. Memory is touched only where runs are.
#[derive(Debug, Default)]
pub(super) struct Runs {
    pool: Vec<Run>,
    free: Vec<u32>,
    limit: usize,
    /// Removed slots that may still be named; the sweep's place.
    removed: Vec<u32>,
    sweep_at: usize,
    /// Removed slots that joined after the running sweep began.
    joined: Vec<u32>,
}

impl Runs {
    /// An empty pool of `limit` runs.
    pub(super) fn new(limit: usize) -> Self {
        Self { pool: Vec::with_capacity(limit), free: Vec::with_capacity(limit), limit, ..Self::default() }
    }

    pub(super) fn bytes(&self) -> usize {
        self.limit * BYTES
    }

    pub(super) fn get(&self, run: u32) -> Run {
        self.pool.get(run as usize).copied().unwrap_or_default()
    }

    pub(super) fn get_mut(&mut self, run: u32) -> Option<&mut Run> {
        self.pool.get_mut(run as usize)
    }

    /// A run that no entry leads to yet, and that is to be held by one. `None` when there are as many as there may be.
    pub(super) fn take(&mut self, mut run: Run) -> Option<u32> {
        run.refs = 0;
        // The sweep may be past the place that it gets.
        run.forget(&self.removed);
        if let Some(index) = self.free.pop() {
            self.pool[index as usize] = run;
            return Some(index);
        }
        if self.pool.len() == self.limit {
            return None;
        }
        self.pool.push(run);
        Some((self.pool.len() - 1) as u32)
    }

    /// One entry more leads to a run.
    pub(super) fn hold(&mut self, run: u32) {
        if let Some(run) = self.get_mut(run) {
            run.refs += 1;
        }
    }

    /// One entry less leads to a run.
    pub(super) fn release(&mut self, run: u32) {
        let Some(place) = self.pool.get_mut(run as usize) else { return };
        place.refs = place.refs.saturating_sub(1);
        if place.refs == 0 {
            *place = Run::default();
            self.free.push(run);
        }
    }

    /// Runs that some entry leads to.
    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.pool.len() - self.free.len()
    }

    /// Whether one entry alone leads to a run.
    pub(super) fn is_single(&self, run: u32) -> bool {
        self.get(run).refs == 1
    }

    /// Starts to take a rank's name out of every run.
    pub(super) fn remove(&mut self, slot: u32) {
        if self.sweep_at == 0 {
            self.removed.push(slot);
        } else {
            self.joined.push(slot);
        }
    }

    /// Whether nothing names removed ranks any more.
    pub(super) fn swept(&self) -> bool {
        self.removed.is_empty() && self.joined.is_empty()
    }

    /// Sweeps `count` runs for removed ranks.
    pub(super) fn sweep(&mut self, count: usize) {
        if self.removed.is_empty() {
            return;
        }
        let end = (self.sweep_at + count).min(self.pool.len());
        for run in &mut self.pool[self.sweep_at..end] {
            run.forget(&self.removed);
        }
        self.sweep_at = end;
        if end == self.pool.len() {
            self.sweep_at = 0;
            self.removed.clear();
            self.removed.append(&mut self.joined);
        }
    }
}
