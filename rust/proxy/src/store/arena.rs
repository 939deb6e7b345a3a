//! The byte budget and the memory that is taken from it.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapMut;
use r3router_core::error::{Error, Kind, Source};

/// Granularity of memory, bytes. Maps are whole pages, so a charge is what the process really holds.
const PAGE: usize = 4096;
/// The smallest and the largest extent of rows. Larger arenas take larger ones, to stay far below the kernel's limit of 65,530 maps.
const EXTENT_MIN: usize = 256 << 10;
const EXTENT_MAX: usize = 4 << 20;
/// Extents that a full arena has at most, unless the largest are too small for it.
const EXTENTS: u64 = 16_384;

/// A budget of R3 bytes. Clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    cap: u64,
    used: AtomicU64,
    peak: AtomicU64,
    /// Of those used, what came from a router before this one.
    inherited: AtomicU64,
}

impl Arena {
    /// An empty arena that never holds more than `cap` bytes.
    pub fn new(cap: u64) -> Self {
        Self {
            inner: Arc::new(Inner {
                cap,
                used: AtomicU64::new(0),
                peak: AtomicU64::new(0),
                inherited: AtomicU64::new(0),
            }),
        }
    }

    /// The cap, bytes.
    pub fn cap(&self) -> u64 {
        self.inner.cap
    }

    /// Bytes held now.
    pub fn used(&self) -> u64 {
        self.inner.used.load(Ordering::Relaxed)
    }

    /// Most bytes ever held at once.
    pub fn peak(&self) -> u64 {
        self.inner.peak.load(Ordering::Relaxed)
    }

    /// Bytes of one extent.
    pub(super) fn extent(&self) -> usize {
        let even = usize::try_from(self.inner.cap / EXTENTS).unwrap_or(EXTENT_MAX);
        even.next_power_of_two().clamp(EXTENT_MIN, EXTENT_MAX)
    }

    /// Takes `bytes` off the budget for as long as the charge lives.
    ///
    /// # Errors
    /// `R3ArenaTooSmall` with the cap and what would be held. It is worth a retry unless `bytes` alone are over the cap.
    pub fn charge(&self, bytes: u64) -> Result<Charge, Error> {
        self.charge_within(bytes, self.limit())
    }

    /// What is held at most: what was inherited makes the admission wait, and fails none of the requests that had been admitted before.
    fn limit(&self) -> u64 {
        self.inner.cap.saturating_add(self.inner.inherited.load(Ordering::Relaxed))
    }

    /// Takes `bytes` off the budget, over the cap too: they are there already, since a router before this one has made them.
    pub(super) fn charge_inherited(&self, bytes: u64) -> Charge {
        self.inner.inherited.fetch_add(bytes, Ordering::Relaxed);
        let used = self.inner.used.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        self.inner.peak.fetch_max(used, Ordering::Relaxed);
        Charge { arena: self.clone(), bytes, inherited: true }
    }

    /// As [`Arena::charge`], from the half of the arena that is spare while it is more than half empty: for what could be held smaller.
    ///
    /// # Errors
    /// As [`Arena::charge`], at half of the cap.
    pub fn charge_spare(&self, bytes: u64) -> Result<Charge, Error> {
        self.charge_within(bytes, self.inner.cap / 2)
    }

    fn charge_within(&self, bytes: u64, limit: u64) -> Result<Charge, Error> {
        let mut used = self.used();
        loop {
            let next = used.saturating_add(bytes);
            if next > limit {
                return Err(self.full(bytes, next));
            }
            match self.inner.used.compare_exchange_weak(used, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    self.inner.peak.fetch_max(next, Ordering::Relaxed);
                    return Ok(Charge { arena: self.clone(), bytes, inherited: false });
                }
                Err(now) => used = now,
            }
        }
    }

    /// As [`Arena::charge`], for rows that move: `leaving` bytes that are charged now are given back in the same step, so they do not
    /// stand in the way. The cap is passed by that much, for that long.
    ///
    /// # Errors
    /// As [`Arena::charge`].
    pub fn charge_moved(&self, bytes: u64, leaving: u64) -> Result<Charge, Error> {
        let next = self.used().saturating_add(bytes).saturating_sub(leaving);
        if next > self.limit() {
            return Err(self.full(bytes, next));
        }
        self.inner.used.fetch_add(bytes, Ordering::Relaxed);
        self.inner.peak.fetch_max(next, Ordering::Relaxed);
        Ok(Charge { arena: self.clone(), bytes, inherited: false })
    }

    fn full(&self, bytes: u64, next: u64) -> Error {
        let cap = self.inner.cap as f64;
        let e = Error::new(Kind::R3ArenaTooSmall, Source::Router, "the R3 arena is full")
            .with_limit(cap, next as f64)
            .advise("raise --r3-arena-bytes, or let fewer R3 requests run at once");
        if bytes > self.inner.cap { e } else { e.with_status(503).retryable() }
    }

    /// Zeroed memory of at least `bytes` bytes, whole pages.
    pub(super) fn map(&self, bytes: usize) -> Result<Memory, Error> {
        let len = bytes.max(1).next_multiple_of(PAGE);
        let charge = self.charge(len as u64)?;
        let map = MmapMut::map_anon(len).map_err(|e| {
            Error::new(Kind::Internal, Source::Router, format!("the system gave no memory for R3 rows: {e}"))
                .with_limit(self.inner.cap as f64, self.used() as f64)
        })?;
        Ok(Memory { map, _charge: charge })
    }
}

/// Bytes taken off a budget; dropping it gives them back.
#[derive(Debug)]
pub struct Charge {
    arena: Arena,
    bytes: u64,
    inherited: bool,
}

impl Charge {
    /// Takes over what `other` of the same budget holds.
    pub fn absorb(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Gives back all but `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.arena.inner.used.fetch_sub(less, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.arena.inner.used.fetch_sub(self.bytes, Ordering::Relaxed);
        if self.inherited {
            self.arena.inner.inherited.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// Charged memory. The map goes before the charge, so that the books never show less than is held.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) map: MmapMut,
    _charge: Charge,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cap_holds_and_drops_give_back() {
        let arena = Arena::new(10_000);
        let one = arena.map(1).unwrap();
        assert_eq!((arena.used(), one.map.len()), (4096, 4096));
        let two = arena.charge(5904).unwrap();
        assert_eq!((arena.used(), arena.peak()), (10_000, 10_000));
        let e = arena.map(1).unwrap_err();
        assert_eq!(
            (e.kind, e.limit, e.measured, e.retryable),
            (Kind::R3ArenaTooSmall, Some(1e4), Some(14_096.0), true)
        );
        drop(one);
        assert_eq!(arena.used(), 5904);
        let mut two = two;
        two.shrink(5000);
        two.shrink(6000);
        assert_eq!(arena.used(), 5000);
        drop(two);
        assert_eq!((arena.used(), arena.peak()), (0, 10_000));
        assert!(!arena.charge(10_001).unwrap_err().retryable);
    }

    #[test]
    fn what_was_inherited_counts_and_fails_nobody_who_was_admitted() {
        let arena = Arena::new(10_000);
        let own = arena.charge(6000).unwrap();
        let inherited = arena.charge_inherited(7000);
        assert_eq!((arena.used(), arena.peak()), (13_000, 13_000));
        let rest = arena.charge(4000).unwrap();
        assert_eq!(arena.charge(1).unwrap_err().limit, Some(1e4));
        assert!(arena.charge_spare(1).is_err());
        drop((own, rest, inherited));
        assert_eq!(arena.used(), 0);
        assert!(arena.charge(10_001).is_err(), "the cap is the old one again");
    }

    #[test]
    fn extents_grow_with_the_arena() {
        assert_eq!(Arena::new(1 << 30).extent(), 256 << 10);
        assert_eq!(Arena::new(16 << 30).extent(), 1 << 20);
        assert_eq!(Arena::new(1 << 40).extent(), 4 << 20);
    }
}
