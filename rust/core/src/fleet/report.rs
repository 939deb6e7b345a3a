//! What engines report of their ranks.
use super::Fleet;
use crate::capacity::Capacity;
use crate::ledger::Counted;
use crate::load::RankReport;
use crate::time::Moment;
use crate::topology::Role;

impl Fleet {
    /// Takes one rank's report. Older ones than the last are ignored.
    pub(crate) fn report(&mut self, index: u32, report: &RankReport, now: Moment) {
        let Some(Some(worker)) = self.workers.get(index as usize) else { return };
        let Some(&slot) = worker.ranks.get(usize::from(report.rank)) else { return };
        let rank = &mut self.ranks[slot as usize];
        // A clock that runs ahead must not outlive what is measured after it.
        let measured_at = report.measured_at.min(now);
        if rank.report.as_ref().is_some_and(|last| measured_at < last.measured_at) {
            return;
        }
        let counted = counted(rank.role, report, &rank.capacity, worker.facts.mamba_slots);
        rank.ledger.reconcile(counted, measured_at);
        let retracted_before = rank.report.as_ref().is_some_and(|r| r.retracted.unwrap_or(0) > 0);
        let limits = (report.max_total_tokens, report.max_running);
        if rank.report.as_ref().map(|r| (r.max_total_tokens, r.max_running)) != Some(limits) {
            let capacity = Capacity::of(rank.role, &worker.facts, Some(report), self.rule.kv_margin);
            self.shrank |= capacity.holds_less_than(&rank.capacity);
            rank.capacity = capacity;
        }
        if report.retracted.unwrap_or(0) > 0 && !retracted_before {
            rank.window.shrink(now);
        }
        rank.report = Some(RankReport { measured_at, ..report.clone() });
        self.refresh(slot, now);
    }
}

/// What a report counts (engine-protocol 4.1): decode's waiting number includes prealloc, transfer and retracted.
fn counted(role: Role, r: &RankReport, capacity: &Capacity, mamba_slots: Option<u32>) -> Counted {
    let sum = |parts: &[Option<u32>]| {
        parts.iter().any(Option::is_some).then(|| parts.iter().flatten().map(|&n| i64::from(n)).sum::<i64>())
    };
    let tokens = |n: Option<u64>| n.map(|n| i64::try_from(n).unwrap_or(i64::MAX / 4).min(i64::MAX / 4));
    match role {
        Role::Prefill => Counted {
            open: match r.waiting_total {
                Some(_) => sum(&[r.running, r.waiting_total, r.inflight]),
                None => sum(&[r.running, r.bootstrap, r.inflight]),
            },
            transfer: None,
            kv: None,
            uncached: tokens(r.waiting_uncached_tokens),
        },
        Role::Decode | Role::Regular => {
            let listed = match r.waiting_total {
                Some(_) => sum(&[r.running, r.waiting_total]),
                None => sum(&[r.running, r.prealloc, r.transfer, r.retracted]),
            };
            // Slots in use are requests too, even when no queue lists them.
            let slotted = r
                .mamba_free
                .zip(mamba_slots)
                .map(|(free, all)| i64::from(all.saturating_sub(free)) / capacity.mamba_per_request);
            Counted {
                open: listed.max(slotted),
                transfer: sum(&[r.transfer, r.prealloc]),
                kv: tokens(r.used_tokens),
                uncached: None,
            }
        }
    }
}
