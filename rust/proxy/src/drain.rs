//! The end of a router: not ready at once, no new work, what runs goes on until the grace period ends.
use std::sync::atomic::{AtomicBool, Ordering};

use r3router_core::error::{Error, Kind, Source};

/// Whether the router takes new work.
#[derive(Debug, Default)]
pub struct Drain(AtomicBool);

impl Drain {
    /// From now on no new work is taken.
    pub fn start(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// New work is taken again: the router that was to take it has ended.
    pub fn stop(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Whether it has started.
    pub fn started(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// # Errors
    /// `Draining` once it has started.
    pub fn check(&self) -> Result<(), Error> {
        if self.started() {
            return Err(Error::new(
                Kind::Draining,
                Source::Router,
                "this router is shutting down and takes no new requests",
            )
            .advise("send to another router")
            .retry_after(std::time::Duration::from_secs(1)));
        }
        Ok(())
    }
}
