//! What the engines measure of themselves: pools, slots and `/v1/loads`.
use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use r3router_core::topology::Role;

use crate::engines::{Engines, OnDecode, Place};
use crate::plan::Ns;

impl Engines {
    /// `/v1/loads` of one engine at this moment; a rank that hangs is missing.
    pub(crate) fn report(&self, process: usize, now: Ns) -> Vec<RankReport> {
        let engine = &self.processes[process];
        (0..engine.ranks.len())
            .filter(|r| !engine.ranks[*r].hung)
            .map(|r| {
                let rank = &engine.ranks[r];
                let count = |state| rank.held.iter().filter(|j| self.jobs[**j].on_decode == state).count() as u32;
                let measured_at = Moment(now);
                if engine.role == Role::Prefill {
                    let waiting: u64 = rank.queue.iter().map(|j| self.uncached(*j)).sum();
                    return RankReport {
                        rank: r as u16,
                        measured_at,
                        running: Some(rank.batch.len() as u32),
                        waiting_total: Some((rank.queue.len() + rank.bootstrap.len()) as u32),
                        bootstrap: Some(rank.bootstrap.len() as u32),
                        inflight: Some(rank.inflight.len() as u32),
                        retracted: Some(0),
                        waiting_uncached_tokens: Some(waiting),
                        max_total_tokens: Some(engine.truth.pool),
                        max_running: Some(engine.truth.max_running),
                        ..RankReport::default()
                    };
                }
                let retracted = count(OnDecode::Retracted) + u32::from(rank.forced);
                let transfer = count(OnDecode::Transfer);
                let ready = count(OnDecode::Ready);
                let prealloc = rank.prealloc.len() as u32;
                RankReport {
                    rank: r as u16,
                    measured_at,
                    running: Some(count(OnDecode::Running) + rank.foreign.0),
                    waiting_total: Some(ready + prealloc + transfer + retracted),
                    prealloc: (engine.role == Role::Decode).then_some(prealloc),
                    transfer: (engine.role == Role::Decode).then_some(transfer),
                    retracted: Some(retracted),
                    used_tokens: Some(self.used((process, r), now)),
                    max_total_tokens: Some(engine.truth.pool),
                    max_running: Some(engine.truth.max_running),
                    mamba_free: engine
                        .truth
                        .mamba
                        .map(|(slots, _)| slots.saturating_sub(self.mamba_used((process, r)))),
                    ..RankReport::default()
                }
            })
            .collect()
    }

    pub(crate) fn page_ceil(&self, process: usize, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.processes[process].truth.page.max(1))
    }

    pub(crate) fn mamba_used(&self, (p, r): Place) -> u32 {
        let rank = &self.processes[p].ranks[r];
        let per = self.processes[p].truth.mamba.map_or(0, |(_, per)| per);
        (rank.held.len() + rank.prealloc.len()) as u32 * per + rank.foreign.0 * per
    }

    pub(crate) fn slots_for_one(&self, (p, r): Place) -> bool {
        let (truth, rank) = (&self.processes[p].truth, &self.processes[p].ranks[r]);
        let rows = truth.max_running + if self.processes[p].role == Role::Decode { truth.extra } else { 0 };
        let transfer = rank.held.iter().filter(|j| self.jobs[**j].on_decode == OnDecode::Transfer).count() as u32;
        let waiting = rank.prealloc.len() as u32;
        let metadata = self.processes[p].role == Role::Regular || transfer + waiting <= 2 * truth.max_running;
        rank.held.len() as u32 + rank.foreign.0 + waiting <= rows && metadata
    }

    /// KV in use: prompts by page, and what running requests have made.
    pub(crate) fn used(&self, (p, r): Place, now: Ns) -> u64 {
        let rank = &self.processes[p].ranks[r];
        rank.held
            .iter()
            .filter(|j| self.jobs[**j].on_decode != OnDecode::Retracted)
            .map(|j| self.tokens(*j, now))
            .sum::<u64>()
            + rank.foreign.1
    }

    pub(crate) fn tokens(&self, job: usize, now: Ns) -> u64 {
        let j = &self.jobs[job];
        let step = self.processes[j.decode.0].truth.step;
        let running = if j.on_decode == OnDecode::Running { now.saturating_sub(j.started) / step } else { 0 };
        self.page_ceil(j.decode.0, j.prompt + (j.made + running).min(j.out))
    }
}
