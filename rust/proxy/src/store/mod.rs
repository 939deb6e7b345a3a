//! The arena: narrow rows in anonymous memory under one hard byte cap, accounted to the byte, given back on drop.
use std::sync::Arc;

use r3router_core::error::Error;

/// A budget of R3 bytes. Clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    cap: u64,
    used: std::sync::atomic::AtomicU64,
}

impl Arena {
    /// An empty arena that never holds more than `cap` bytes.
    pub fn new(cap: u64) -> Self {
        Self { inner: Arc::new(Inner { cap, used: std::sync::atomic::AtomicU64::new(0) }) }
    }

    /// The cap, bytes.
    pub fn cap(&self) -> u64 {
        self.inner.cap
    }

    /// Bytes held now.
    pub fn used(&self) -> u64 {
        self.inner.used.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Most bytes ever held at once.
    pub fn peak(&self) -> u64 {
        todo!()
    }

    /// Takes `bytes` off the budget.
    ///
    /// # Errors
    /// `R3ArenaTooSmall` with the cap and what would be held.
    #[allow(dead_code)]
    pub(crate) fn take(&self, bytes: u64) -> Result<(), Error> {
        let _ = bytes;
        todo!()
    }
}
