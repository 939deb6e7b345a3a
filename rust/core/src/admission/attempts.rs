//! Bound attempts: what each holds and where, until it ends.
use crate::ledger::Holding;
use crate::time::Moment;

/// A rank slot in one of its uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) slot: u32,
    pub(super) generation: u32,
}

/// What an attempt still holds on one engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    pub(super) place: Place,
    pub(super) holds: Holding,
    /// R3 text that the engine will emit.
    pub(super) text: u64,
    pub(super) ended: bool,
}

/// One attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    pub(super) prefill: Option<Leg>,
    pub(super) decode: Leg,
    pub(super) arena: u64,
    pub(super) bound_at: Moment,
    pub(super) delivered_at: Option<Moment>,
    /// Uncached tokens that were before it on its prefill rank.
    pub(super) ahead: i64,
    pub(super) uncached: i64,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    attempt: Option<Attempt>,
}

/// Open attempts by permit id. An id is never used twice.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Attempts {
    /// Stores an attempt and names it. Ids are never 0.
    pub(super) fn insert(&mut self, attempt: Attempt) -> u64 {
        let index = if let Some(index) = self.free.pop() {
            self.slots[index as usize].attempt = Some(attempt);
            index
        } else {
            self.slots.push(Slot { generation: 1, attempt: Some(attempt) });
            (self.slots.len() - 1) as u32
        };
        u64::from(self.slots[index as usize].generation) << 32 | u64::from(index)
    }

    fn slot(&mut self, id: u64) -> Option<&mut Slot> {
        self.slots.get_mut(id as u32 as usize).filter(|s| u64::from(s.generation) == id >> 32)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Attempt> {
        self.slot(id)?.attempt.as_mut()
    }

    /// Takes an attempt out; `None` when it is out already.
    pub(super) fn remove(&mut self, id: u64) -> Option<Attempt> {
        let slot = self.slot(id)?;
        let attempt = slot.attempt.take()?;
        slot.generation = slot.generation.wrapping_add(1).max(1);
        self.free.push(id as u32);
        Some(attempt)
    }

    /// Open attempts.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
