//! Workers come, change and go; reports; pauses.
use super::Admission;
use crate::load::RankReport;
use crate::time::Moment;
use crate::topology::{EngineFacts, WorkerId, WorkerSpec};

impl Admission {
    /// Adds one registration of an engine. The same URL may be registered again after a removal: a new generation.
    pub fn add_worker(&mut self, spec: WorkerSpec, now: Moment) -> WorkerId {
        self.take_returns(now);
        self.dirty = true;
        self.fleet.add(spec, now)
    }

    /// Replaces what is known of a worker.
    pub fn update_facts(&mut self, id: WorkerId, facts: EngineFacts, now: Moment) {
        self.take_returns(now);
        if let Some(index) = self.fleet.worker(id) {
            self.fleet.set_facts(index, facts, now);
            self.dirty = true;
        }
    }

    /// Removes a worker with all of its ranks. Open permits on it stay valid and release nothing on it.
    pub fn remove_worker(&mut self, id: WorkerId, now: Moment) {
        self.take_returns(now);
        let Some(worker) = self.fleet.remove(id, now) else { return };
        for slot in worker.ranks {
            self.affinity.remove(slot);
            self.affinity_back.remove(slot);
        }
        self.cooldowns.forget(id);
        // A request that waits for nothing but this worker is refused by the next poll.
        self.dirty = true;
    }

    /// Takes a worker out of choice without touching its open attempts, or back in.
    pub fn set_draining(&mut self, id: WorkerId, draining: bool) {
        let Some(index) = self.fleet.worker(id) else { return };
        if let Some(Some(worker)) = self.fleet.workers.get_mut(index as usize) {
            worker.draining = draining;
        }
        // Requests that name it are refused.
        self.fleet.shrank |= draining;
        self.fleet.update_worker(index, self.last_tick);
        self.dirty = true;
    }

    /// Takes ranks out of choice without touching their open attempts, or back in: a person's wish, apart from what health checks say.
    /// Ranks that the worker does not have are passed over.
    pub fn set_drained(&mut self, id: WorkerId, ranks: &[u16], drained: bool) {
        let Some(index) = self.fleet.worker(id) else { return };
        let Some(Some(worker)) = self.fleet.workers.get(index as usize) else { return };
        for &rank in ranks {
            if let Some(&slot) = worker.ranks.get(usize::from(rank)) {
                self.fleet.ranks[slot as usize].drained = drained;
            }
        }
        self.fleet.update_worker(index, self.last_tick);
        self.dirty = true;
    }

    /// Bytes of the arena that are held for references beyond their requests. R3 requests wait while they leave too little.
    pub fn set_arena_kept(&mut self, bytes: u64) {
        self.dirty |= bytes < self.arena_kept;
        self.arena_kept = bytes;
    }

    /// The whole fleet is paused (rollout control): nothing is bound, deadlines stand still.
    pub fn set_paused(&mut self, paused: bool, now: Moment) {
        match (paused, self.paused_since) {
            (true, None) => self.paused_since = Some(now),
            (false, Some(since)) => {
                self.paused_total += now.0.saturating_sub(since.0);
                self.paused_since = None;
                self.dirty = true;
            }
            _ => {}
        }
    }

    /// An engine's load report. Ranks that are not in it keep their old one.
    pub fn report(&mut self, id: WorkerId, ranks: &[RankReport], now: Moment) {
        self.take_returns(now);
        let Some(index) = self.fleet.worker(id) else { return };
        if let Some(Some(worker)) = self.fleet.workers.get_mut(index as usize)
            && !worker.breaker.admits()
        {
            worker.breaker.seen_alive();
            self.fleet.update_worker(index, now);
        }
        for report in ranks {
            self.fleet.report(index, report, now);
        }
    }
}
