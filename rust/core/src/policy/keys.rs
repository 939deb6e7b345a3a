//! Which rank each routing key was given, in a table of fixed size, and how many keys each rank was used for of late.
//!
//! The table is set-associative: a key belongs to one line of eight entries and takes the place of the one that was used the
//! longest ago, so that the limit holds at every insert and nothing is ever swept. Ranks are named by slot and by the slot's use:
//! a restarted engine has none of the keys of the one before it.
use std::time::Duration;

use super::{Ask, Assignment, Choice, pick};
use crate::fleet::Fleet;
use crate::time::Moment;

/// Entries of the table, in lines. 16 bytes each, touched where keys are.
const LINES: usize = 1 << 15;
const WAYS: usize = 8;
/// Keys count for a rank's group for so many seconds after their last use: between two turns of an agent.
const RECENT: u32 = 60;

/// One key. Key 0 is an empty entry.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    key: u64,
    slot: u16,
    /// Low bits of the slot's generation.
    generation: u16,
    /// When it was used last, in seconds.
    used: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Keys {
    table: Vec<Entry>,
    /// Keys that are not used for so many seconds are none.
    idle: u32,
    now: u32,
    /// Of each slot, keys by the second of their last use modulo [`RECENT`].
    recent: Vec<[u32; RECENT as usize]>,
    /// The sums of those, and of which use of the slot they are.
    groups: Vec<Group>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Group {
    keys: u32,
    generation: u16,
}

fn seconds(now: Moment) -> u32 {
    // Second 0 is never: an empty entry is older than everything.
    u32::try_from(now.0 / 1_000_000_000).unwrap_or(u32::MAX).saturating_add(1)
}

impl Keys {
    pub(super) fn new(idle: Duration) -> Self {
        let idle = u32::try_from(idle.as_secs()).unwrap_or(u32::MAX);
        Self { table: vec![Entry::default(); LINES * WAYS], idle, now: 0, recent: Vec::new(), groups: Vec::new() }
    }

    fn line(key: u64) -> std::ops::Range<usize> {
        let at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % LINES * WAYS;
        at..at + WAYS
    }

    fn entry(&self, key: u64) -> Option<&Entry> {
        let known = self.table[Self::line(key)].iter().find(|e| e.key == key)?;
        (self.now.saturating_sub(known.used) <= self.idle).then_some(known)
    }

    /// The rank of a key, unless it is gone.
    fn find(&self, fleet: &Fleet, key: u64) -> Option<u32> {
        let entry = self.entry(key)?;
        let rank = fleet.ranks.get(usize::from(entry.slot))?;
        (rank.live && rank.generation as u16 == entry.generation).then_some(u32::from(entry.slot))
    }

    /// The key's rank; once it has waited long enough for that, and for a new key, another.
    pub(super) fn choose(&self, ask: &Ask<'_>, assignment: Assignment) -> Choice {
        if let Some(home) = self.find(ask.fleet, ask.request.key) {
            if (ask.admits)(home) {
                return Choice::Rank(home);
            }
            if !ask.waited_out && (ask.will)(home) {
                return Choice::Wait;
            }
        }
        match assignment {
            Assignment::Random => pick::random(ask),
            Assignment::MinLoad => pick::roomiest(ask),
            Assignment::MinGroup => self.smallest(ask),
        }
        .into()
    }

    /// The rank with the fewest keys of those that admit the request; of equal ones, the one bound to least recently.
    fn smallest(&self, ask: &Ask<'_>) -> Option<u32> {
        let briefs = ask.fleet.briefs.iter().enumerate();
        let ranks = briefs.filter(|(_, b)| b.live && b.role == ask.role);
        let admitted = ranks.filter(|(slot, _)| (ask.admits)(*slot as u32));
        let group = |slot: usize| {
            let now = ask.fleet.ranks[slot].generation as u16;
            self.groups.get(slot).filter(|g| g.generation == now).map_or(0, |g| g.keys)
        };
        admitted.min_by_key(|(slot, b)| (group(*slot), b.turn)).map(|(slot, _)| slot as u32)
    }

    /// A key is on a rank now. Says whether it was on another one before.
    pub(super) fn put(&mut self, fleet: &Fleet, key: u64, slot: u32, now: Moment) -> bool {
        self.tick(now);
        let (Ok(name), Some(rank)) = (u16::try_from(slot), fleet.ranks.get(slot as usize)) else { return false };
        if self.groups.len() < fleet.ranks.len() {
            self.groups.resize(fleet.ranks.len(), Group::default());
            self.recent.resize(fleet.ranks.len(), [0; RECENT as usize]);
        }
        let generation = rank.generation as u16;
        if self.groups[slot as usize].generation != generation {
            self.groups[slot as usize] = Group { keys: 0, generation };
            self.recent[slot as usize] = [0; RECENT as usize];
        }
        let line = Self::line(key);
        let oldest = || line.clone().min_by_key(|&at| self.table[at].used).unwrap_or(line.start);
        let at = line.clone().find(|&at| self.table[at].key == key).unwrap_or_else(oldest);
        let old = self.table[at];
        let fresh = Entry { key, slot: name, generation, used: self.now };
        let known = old.key == key && self.now.saturating_sub(old.used) <= self.idle;
        self.count(old, false);
        self.table[at] = fresh;
        self.count(fresh, true);
        known && (old.slot, old.generation) != (fresh.slot, fresh.generation)
    }

    /// Adds a key to its rank's group, or takes it out, while it counts there.
    fn count(&mut self, entry: Entry, comes: bool) {
        if entry.key == 0 || self.now.saturating_sub(entry.used) >= RECENT {
            return;
        }
        let slot = usize::from(entry.slot);
        let group = &mut self.groups[slot];
        if group.generation != entry.generation {
            return;
        }
        let cell = &mut self.recent[slot][(entry.used % RECENT) as usize];
        if comes {
            *cell += 1;
            group.keys += 1;
        } else {
            *cell = cell.saturating_sub(1);
            group.keys = group.keys.saturating_sub(1);
        }
    }

    /// Keys leave their groups as time passes.
    pub(super) fn tick(&mut self, now: Moment) {
        let second = seconds(now);
        if second <= self.now {
            return;
        }
        let passed = (second - self.now).min(RECENT);
        for step in 0..passed {
            let cell = ((second - step) % RECENT) as usize;
            for (recent, group) in self.recent.iter_mut().zip(&mut self.groups) {
                group.keys = group.keys.saturating_sub(std::mem::take(&mut recent[cell]));
            }
        }
        self.now = second;
    }
}
