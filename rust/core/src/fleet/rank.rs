//! One worker, one rank, and what is free on it.
use std::sync::Arc;

use crate::capacity::{Capacity, UNBOUNDED};
use crate::egress::Egress;
use crate::estimate::Fading;
use crate::health::Breaker;
use crate::ledger::Ledger;
use crate::load::RankReport;
use crate::reason::Reason;
use crate::service::Service;
use crate::topology::{EngineFacts, RankId, Role, WorkerId};
use crate::window::Window;

/// One registration.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) url: Arc<str>,
    pub(crate) role: Role,
    pub(crate) facts: EngineFacts,
    /// Rank slots, by rank.
    pub(crate) ranks: Vec<u32>,
    pub(crate) draining: bool,
    pub(crate) breaker: Breaker,
    pub(crate) egress: Egress,
    /// R3 bytes that may be about to leave it, as of the last tick.
    pub(crate) egress_limit: u64,
    /// No more R3 until some text has left.
    pub(crate) egress_full: bool,
    /// R3 of others waits for a request that was overtaken too often.
    pub(crate) egress_held: bool,
}

/// One rank.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) id: RankId,
    pub(crate) role: Role,
    pub(crate) worker: u32,
    /// Counts the uses of this slot: a permit of an earlier use touches nothing.
    pub(crate) generation: u32,
    pub(crate) live: bool,
    pub(crate) capacity: Capacity,
    pub(crate) ledger: Ledger,
    pub(crate) window: Window,
    pub(crate) service: Service,
    pub(crate) report: Option<RankReport>,
    /// Requests that the state slots were seen to hold, lowered by errors.
    pub(crate) learned: i64,
    /// Why it takes nothing; [`Reason::Bound`] when it does.
    pub(crate) closed: Reason,
    /// Kept for a request that was overtaken too often.
    pub(crate) held: bool,
    /// A person took it out of choice.
    pub(crate) drained: bool,
    /// Rises with each binding of the fleet; that of the last one to this rank.
    pub(crate) turn: u64,
    /// Prompt tokens that it was given of late, where prefixes choose it: they must not choose a few ranks only.
    pub(crate) given: Fading,
}

/// What is free on a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Free {
    pub(crate) rows: i64,
    pub(crate) metadata: i64,
    pub(crate) mamba: i64,
    pub(crate) window: i64,
    pub(crate) kv: i64,
}

impl Rank {
    /// Free amounts of a decode or regular rank (architecture section 4).
    pub(crate) fn free(&self) -> Free {
        let held = self.ledger.occupied();
        let c = &self.capacity;
        let less = |limit: i64, used: i64| if limit == UNBOUNDED { UNBOUNDED } else { limit - used };
        let mut mamba = less(c.mamba.min(self.learned), held.open);
        if let Some((free, own_then)) = self.report.as_ref().and_then(|r| r.mamba_free).zip(self.ledger.own_at_report())
        {
            // What the report says is free, less what was sent since. Where the pool is known, what ended since is free again,
            // and this bounds only while what is known of the pool is newer than the report.
            let since = self.ledger.own().open - own_then;
            let since = if c.mamba == UNBOUNDED { since.max(0) } else { since };
            let sent = since + self.ledger.leaked().open;
            mamba = mamba.min(i64::from(free) / c.mamba_per_request - sent);
        }
        let mut kv = if held.open == 0 { less(c.kv_pool, held.kv) } else { less(c.kv_limit, held.kv) };
        if self.role == Role::Decode
            && held.open > 0
            && let Some(used) = self.ledger.kv_in_use()
        {
            // What is used, and the room that decode keeps free for each request that it has (engine-protocol 3.1): answers
            // that outgrow what was reserved for them close the rank before the engine does.
            kv = kv.min(less(c.kv_limit, used + c.reserved_decode * held.open));
        }
        Free {
            rows: less(c.rows, held.open),
            metadata: less(c.metadata, held.transfer),
            mamba,
            window: less(self.window.size(), held.transfer),
            kv,
        }
    }

    /// What choosing asks of it.
    pub(crate) fn brief(&self) -> Brief {
        Brief { queued: self.queued_tokens(), turn: self.turn, role: self.role, closed: self.closed, live: self.live }
    }

    /// Uncached tokens before a prefill rank.
    pub(crate) fn queued_tokens(&self) -> i64 {
        self.ledger.occupied().uncached
    }
}

/// What choosing asks of the ranks that it looks at and mostly passes by: half a line of memory, where a rank has thirty.
/// As of the rank's last refresh.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Brief {
    /// See [`Rank::queued_tokens`].
    pub(crate) queued: i64,
    pub(crate) turn: u64,
    pub(crate) role: Role,
    pub(crate) closed: Reason,
    pub(crate) live: bool,
}

impl Default for Brief {
    /// Nothing lives there.
    fn default() -> Self {
        Self { queued: 0, turn: 0, role: Role::Regular, closed: Reason::Mode, live: false }
    }
}
