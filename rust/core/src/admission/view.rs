//! What can be seen from outside.
use super::{Admission, RankView, Snapshot};
use crate::fleet::Rank;
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::Role;

impl Admission {
    /// What can be seen of the state now.
    pub fn snapshot(&self, now: Moment) -> Snapshot {
        let ranks = self.fleet.ranks.iter().filter(|r| r.live).map(|r| self.rank_view(r, now)).collect();
        Snapshot {
            ranks,
            queued: self.queue.len(),
            queued_bytes: self.queue.bytes(),
            oldest: self.queue.oldest().map_or(0.0, |since| now.since(since).as_secs_f64()),
            arena_reserved: self.arena_reserved,
            decisions: self.counters.iter().map(|(reason, n)| (reason.name(), n)).collect(),
        }
    }

    /// Attempts that are bound and not over.
    pub fn open_attempts(&self) -> usize {
        self.attempts.len()
    }

    fn rank_view(&self, rank: &Rank, now: Moment) -> RankView {
        let worker = self.fleet.workers[rank.worker as usize].as_ref();
        let (own, leaked, free) = (rank.ledger.own(), rank.ledger.leaked(), rank.free());
        let prefill = rank.role == Role::Prefill;
        let closed = if self.paused_since.is_some() { Reason::Paused } else { rank.closed };
        RankView {
            url: worker.map(|w| std::sync::Arc::clone(&w.url)).unwrap_or_default(),
            rank: rank.id.rank,
            role: match rank.role {
                Role::Prefill => "prefill",
                Role::Decode => "decode",
                Role::Regular => "regular",
            },
            in_transfer: (own.transfer + leaked.transfer).max(0) as u32,
            open: (own.open + leaked.open).max(0) as u32,
            foreign: rank.ledger.foreign().open as u32,
            window: if prefill { 0 } else { u32::try_from(rank.window.size()).unwrap_or(u32::MAX) },
            rate: if prefill { rank.service.rate().unwrap_or(0.0) } else { rank.window.completions() },
            tau: if prefill { 0.0 } else { rank.window.tau() },
            rows_free: free.rows,
            metadata_free: free.metadata,
            mamba_free: free.mamba,
            kv_free: free.kv,
            uncached_tokens: rank.queued_tokens().max(0) as u64,
            r3_bytes: worker.map_or(0, |w| w.egress.outstanding()),
            running: rank.report.as_ref().and_then(|r| r.running),
            waiting: rank.report.as_ref().and_then(|r| r.waiting_total),
            rows: rank.capacity.rows,
            mamba: rank.capacity.mamba,
            kv: rank.capacity.kv_pool,
            breaker: worker.map_or("closed", |w| w.breaker.name()),
            drained: rank.drained,
            unhealthy: worker.is_some_and(|w| w.draining),
            closed: if closed == Reason::Bound { "" } else { closed.name() },
            report_age: rank.report.as_ref().map_or(-1.0, |r| now.since(r.measured_at).as_secs_f64()),
        }
    }
}
