//! The truth: what prefill and decode ranks do with what they are sent, in virtual time, whatever the router believes.
//! FIFO reservation that stops at the first misfit; rows, metadata, mamba slots and KV; batches; transfers; growth.
use std::collections::{BTreeSet, HashSet, VecDeque};

use r3router_core::admission::Failure;
use r3router_core::topology::Role;

use crate::plan::{BLOCK, Call, Engine, MS, Ns, SEC, Truth};

/// Tokens that the engine keeps free for each request that it holds.
const RESERVED: u64 = 512;
/// The most growth that the engine's own admission counts.
const CLIP_NEW: u64 = 4096;

/// Engine and rank.
pub(crate) type Place = (usize, usize);

/// Where a request is on decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnDecode {
    Away,
    Prealloc,
    Transfer,
    Ready,
    Running,
    Retracted,
    Gone,
}

/// Where a request is on prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnPrefill {
    Away,
    Bootstrap,
    Queue,
    Batch,
    Inflight,
    Gone,
}

/// One attempt, as the engines see it.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) prefill: Option<Place>,
    pub(crate) decode: Place,
    pub(crate) prompt: u64,
    pub(crate) max_new: u64,
    pub(crate) out: u64,
    pub(crate) prefix: std::sync::Arc<[u64]>,
    pub(crate) prefill_text: u64,
    pub(crate) decode_text: u64,
    pub(crate) stuck: bool,
    pub(crate) on_prefill: OnPrefill,
    pub(crate) on_decode: OnDecode,
    pub(crate) started: Ns,
    pub(crate) made: u64,
    pub(crate) epoch: u32,
}

/// What the engines will do later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Later {
    BatchDone(Place),
    KvHere(usize),
    DecodeDone(usize, u32),
    Growth(Place),
    Timeout(usize),
    FirstToken(usize),
    PrefillReply(usize),
    DecodeReply(usize),
}

/// What the engines tell the router, before the network's delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    PrefillReply(usize),
    FirstToken(usize),
    DecodeReply(usize),
    Rejected(usize),
    Failed(usize, Role, Failure),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Rank {
    pub(crate) prealloc: VecDeque<usize>,
    pub(crate) held: BTreeSet<usize>,
    pub(crate) ready: VecDeque<usize>,
    pub(crate) foreign: (u32, u64),
    pub(crate) forced: bool,
    pub(crate) hung: bool,
    pub(crate) growing: bool,
    pub(crate) bootstrap: BTreeSet<usize>,
    pub(crate) queue: VecDeque<usize>,
    pub(crate) batch: Vec<usize>,
    pub(crate) inflight: BTreeSet<usize>,
    pub(crate) cached: HashSet<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) truth: Truth,
    pub(crate) role: Role,
    pub(crate) alive: bool,
    pub(crate) ranks: Vec<Rank>,
}

/// All engines, by the order of their registration.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    pub(crate) processes: Vec<Process>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) later: Vec<(Ns, Later)>,
    pub(crate) said: Vec<(Ns, Said)>,
    /// Transfers that the engines' own clock ended.
    pub(crate) timeouts: u32,
    /// Requests that reached decode and found a row, metadata or mamba slot missing.
    pub(crate) queued_for_slots: u32,
}

impl Engines {
    pub(crate) fn start(&mut self, plan: &Engine) -> usize {
        self.processes.push(Process {
            truth: plan.truth.clone(),
            role: plan.role,
            alive: true,
            ranks: vec![Rank::default(); usize::from(plan.ranks)],
        });
        self.processes.len() - 1
    }

    pub(crate) fn alive(&self, process: usize) -> bool {
        self.processes[process].alive
    }

    pub(crate) fn truth(&self, process: usize) -> &Truth {
        &self.processes[process].truth
    }

    pub(crate) fn foreign(&mut self, (p, r): Place, rows: u32, tokens: u64) {
        self.processes[p].ranks[r].foreign = (rows, tokens);
    }

    pub(crate) fn force_retraction(&mut self, (p, r): Place, on: bool) {
        self.processes[p].ranks[r].forced = on;
    }

    pub(crate) fn hang(&mut self, (p, r): Place, on: bool) {
        self.processes[p].ranks[r].hung = on;
    }

    /// A new attempt leaves the router; `job` numbers are the caller's, in order.
    pub(crate) fn job(&mut self, prefill: Option<Place>, decode: Place, call: &Call, stuck: bool) -> usize {
        self.jobs.push(Job {
            prefill,
            decode,
            prompt: u64::from(call.prompt),
            max_new: u64::from(call.max_new.unwrap_or(call.out)),
            out: u64::from(call.out),
            prefix: call.prefix.clone(),
            prefill_text: call.r3.map_or(0, |r| r.prefill_text),
            decode_text: call.r3.map_or(0, |r| r.decode_text),
            stuck,
            on_prefill: OnPrefill::Away,
            on_decode: OnDecode::Away,
            started: 0,
            made: 0,
            epoch: 0,
        });
        self.jobs.len() - 1
    }

    /// The decode leg arrives.
    pub(crate) fn arrive_decode(&mut self, job: usize, now: Ns) {
        if self.jobs[job].on_decode != OnDecode::Away {
            return;
        }
        let (p, r) = self.jobs[job].decode;
        let role = self.processes[p].role;
        if !self.processes[p].alive {
            self.jobs[job].on_decode = OnDecode::Gone;
            self.said.push((now, Said::Failed(job, role, Failure::Connect)));
            return;
        }
        let truth = &self.processes[p].truth;
        if self.jobs[job].prompt > truth.pool {
            self.jobs[job].on_decode = OnDecode::Gone;
            self.said.push((now, Said::Rejected(job)));
            return;
        }
        if let Some((slots, per)) = truth.mamba
            && self.mamba_used((p, r)) + per > slots
        {
            self.jobs[job].on_decode = OnDecode::Gone;
            self.queued_for_slots += 1;
            self.said.push((now, Said::Failed(job, role, Failure::Mamba)));
            return;
        }
        self.jobs[job].on_decode = OnDecode::Prealloc;
        self.processes[p].ranks[r].prealloc.push_back(job);
        if !self.slots_for_one((p, r)) {
            self.queued_for_slots += 1;
        }
        self.pump_decode((p, r), now);
    }

    /// The prefill leg arrives.
    pub(crate) fn arrive_prefill(&mut self, job: usize, now: Ns) {
        let Some((p, r)) = self.jobs[job].prefill else { return };
        if self.jobs[job].on_prefill != OnPrefill::Away {
            return;
        }
        if !self.processes[p].alive {
            self.jobs[job].on_prefill = OnPrefill::Gone;
            self.said.push((now, Said::Failed(job, Role::Prefill, Failure::Connect)));
            return;
        }
        self.jobs[job].on_prefill = OnPrefill::Bootstrap;
        self.processes[p].ranks[r].bootstrap.insert(job);
        if matches!(self.jobs[job].on_decode, OnDecode::Transfer) {
            self.queue_prefill(job, now);
        }
    }

    /// Takes an attempt off both engines; a stuck one stays where it is until its engine's own clock.
    pub(crate) fn abort(&mut self, job: usize, now: Ns) {
        if let Some(place) = self.jobs[job].prefill {
            self.leave_prefill(job);
            self.pump_prefill(place, now);
        }
        if !(self.jobs[job].stuck && self.jobs[job].on_decode == OnDecode::Transfer) {
            self.leave_decode(job, now);
        }
    }

    /// The process dies: what it held fails, the other legs of those attempts stay until they are aborted.
    pub(crate) fn kill(&mut self, process: usize, now: Ns) {
        self.processes[process].alive = false;
        let role = self.processes[process].role;
        for job in 0..self.jobs.len() {
            let on_prefill = self.jobs[job].prefill.is_some_and(|(p, _)| p == process)
                && !matches!(self.jobs[job].on_prefill, OnPrefill::Gone | OnPrefill::Away);
            let on_decode = self.jobs[job].decode.0 == process
                && !matches!(self.jobs[job].on_decode, OnDecode::Gone | OnDecode::Away);
            if on_prefill {
                self.jobs[job].on_prefill = OnPrefill::Gone;
            }
            if on_decode {
                self.jobs[job].on_decode = OnDecode::Gone;
                self.jobs[job].epoch += 1;
            }
            if on_prefill || on_decode {
                self.said.push((now, Said::Failed(job, role, Failure::Reset)));
            }
        }
        for rank in &mut self.processes[process].ranks {
            *rank = Rank::default();
        }
    }

    /// Frees whatever hangs or was forced, at the end of a run: the engine's own clocks have passed.
    pub(crate) fn heal(&mut self, now: Ns) {
        for job in 0..self.jobs.len() {
            if self.jobs[job].stuck {
                self.jobs[job].stuck = false;
                if self.jobs[job].on_decode == OnDecode::Transfer {
                    self.leave_decode(job, now);
                    let role = self.processes[self.jobs[job].decode.0].role;
                    self.said.push((now, Said::Failed(job, role, Failure::Transfer)));
                }
            }
        }
        for p in 0..self.processes.len() {
            for r in 0..self.processes[p].ranks.len() {
                let rank = &mut self.processes[p].ranks[r];
                rank.foreign = (0, 0);
                rank.forced = false;
                rank.hung = false;
                self.pump_decode((p, r), now);
                self.pump_ready((p, r), now);
                self.pump_prefill((p, r), now);
            }
        }
    }

    /// Attempts that an engine still holds, for the trace.
    pub(crate) fn held(&self) -> Vec<String> {
        let away = |j: &Job| matches!(j.on_decode, OnDecode::Away | OnDecode::Gone);
        let held = self.jobs.iter().enumerate().filter(|(_, j)| !away(j));
        held.map(|(n, j)| format!("{n}: {:?} on {:?}, {:?} on {:?}", j.on_prefill, j.prefill, j.on_decode, j.decode))
            .collect()
    }

    /// Requests that any engine still holds.
    pub(crate) fn holds(&self) -> usize {
        self.processes.iter().flat_map(|p| &p.ranks).map(|r| r.held.len() + r.prealloc.len() + r.bootstrap.len()).sum()
    }

    pub(crate) fn later(&mut self, later: Later, now: Ns) {
        match later {
            Later::BatchDone(place) => self.batch_done(place, now),
            Later::KvHere(job) => self.kv_here(job, now),
            Later::DecodeDone(job, epoch) => self.decode_done(job, epoch, now),
            Later::Growth(place) => self.growth(place, now),
            Later::Timeout(job) => {
                if self.jobs[job].on_decode == OnDecode::Transfer {
                    self.timeouts += 1;
                    let role = self.processes[self.jobs[job].decode.0].role;
                    self.leave_decode(job, now);
                    self.said.push((now, Said::Failed(job, role, Failure::Transfer)));
                }
            }
            Later::FirstToken(job) => {
                if self.jobs[job].on_decode != OnDecode::Gone {
                    self.said.push((now, Said::FirstToken(job)));
                }
            }
            Later::PrefillReply(job) => self.said.push((now, Said::PrefillReply(job))),
            Later::DecodeReply(job) => self.said.push((now, Said::DecodeReply(job))),
        }
    }

    fn pump_decode(&mut self, place: Place, now: Ns) {
        let (p, r) = place;
        loop {
            let rank = &self.processes[p].ranks[r];
            let Some(&job) = rank.prealloc.front() else { return };
            if rank.forced || rank.hung || rank.held.iter().any(|j| self.jobs[*j].on_decode == OnDecode::Retracted) {
                return;
            }
            let truth = &self.processes[p].truth;
            let rows = truth.max_running + if self.processes[p].role == Role::Decode { truth.extra } else { 0 };
            let transfer = rank.held.iter().filter(|j| self.jobs[**j].on_decode == OnDecode::Transfer).count();
            let metadata = self.processes[p].role == Role::Regular || (transfer as u32) < 2 * truth.max_running;
            if rank.held.len() as u32 + rank.foreign.0 >= rows || !metadata {
                return;
            }
            let j = &self.jobs[job];
            let growth = j.prompt + j.max_new.min(CLIP_NEW);
            let need = (self.page_ceil(p, j.prompt) + RESERVED).max(growth);
            let free = truth.pool.saturating_sub(self.used(place, now) + RESERVED * rank.held.len() as u64);
            // An idle rank takes whatever fits its pool.
            if need > free && !(rank.held.is_empty() && rank.foreign.1 == 0) {
                return;
            }
            let (waiting, prefill_time) = (truth.waiting, 2 * MS + j.prompt * SEC / truth.rate.max(1));
            let rank = &mut self.processes[p].ranks[r];
            rank.prealloc.pop_front();
            rank.held.insert(job);
            self.jobs[job].on_decode = OnDecode::Transfer;
            self.later.push((now + waiting, Later::Timeout(job)));
            if self.jobs[job].prefill.is_none() {
                self.later.push((now + prefill_time, Later::KvHere(job)));
            } else if self.jobs[job].on_prefill == OnPrefill::Bootstrap {
                self.queue_prefill(job, now);
            }
        }
    }

    fn queue_prefill(&mut self, job: usize, now: Ns) {
        let Some((p, r)) = self.jobs[job].prefill else { return };
        self.jobs[job].on_prefill = OnPrefill::Queue;
        let rank = &mut self.processes[p].ranks[r];
        rank.bootstrap.remove(&job);
        rank.queue.push_back(job);
        self.pump_prefill((p, r), now);
    }

    pub(crate) fn uncached(&self, job: usize) -> u64 {
        let j = &self.jobs[job];
        let Some((p, r)) = j.prefill else { return j.prompt };
        let cached = &self.processes[p].ranks[r].cached;
        let hit = j.prefix.iter().take_while(|h| cached.contains(h)).count() as u64;
        j.prompt.saturating_sub(hit * BLOCK).max(1)
    }

    fn pump_prefill(&mut self, place: Place, now: Ns) {
        let (p, r) = place;
        if self.processes[p].ranks[r].hung || !self.processes[p].ranks[r].batch.is_empty() {
            return;
        }
        let (chunk, rate) = (self.processes[p].truth.chunk, self.processes[p].truth.rate);
        let mut tokens = 0;
        while let Some(&job) = self.processes[p].ranks[r].queue.front() {
            let uncached = self.uncached(job);
            if tokens > 0 && tokens + uncached > chunk {
                break;
            }
            tokens += uncached;
            self.jobs[job].on_prefill = OnPrefill::Batch;
            let prefix = self.jobs[job].prefix.clone();
            let rank = &mut self.processes[p].ranks[r];
            rank.queue.pop_front();
            rank.batch.push(job);
            rank.cached.extend(prefix.iter());
        }
        if tokens > 0 {
            self.later.push((now + 2 * MS + tokens * SEC / rate.max(1), Later::BatchDone(place)));
        }
    }

    fn batch_done(&mut self, place: Place, now: Ns) {
        let (p, r) = place;
        let transfer = self.processes[p].truth.transfer;
        for job in std::mem::take(&mut self.processes[p].ranks[r].batch) {
            if self.jobs[job].on_prefill == OnPrefill::Batch {
                self.jobs[job].on_prefill = OnPrefill::Inflight;
                self.processes[p].ranks[r].inflight.insert(job);
                self.later.push((now + transfer, Later::KvHere(job)));
            }
        }
        self.pump_prefill(place, now);
    }

    fn kv_here(&mut self, job: usize, now: Ns) {
        let place = self.jobs[job].decode;
        if self.jobs[job].on_decode != OnDecode::Transfer || self.jobs[job].stuck {
            return;
        }
        let rank = &self.processes[place.0].ranks[place.1];
        if rank.forced || rank.hung || rank.held.iter().any(|j| self.jobs[*j].on_decode == OnDecode::Retracted) {
            // A rank that retracts polls no transfers.
            self.later.push((now + 100 * MS, Later::KvHere(job)));
            return;
        }
        self.jobs[job].on_decode = OnDecode::Ready;
        self.processes[place.0].ranks[place.1].ready.push_back(job);
        if let Some((p, _)) = self.jobs[job].prefill
            && self.jobs[job].on_prefill == OnPrefill::Inflight
        {
            self.leave_prefill(job);
            let took = self.jobs[job].prefill_text * SEC / self.processes[p].truth.egress.max(1);
            self.later.push((now + took, Later::PrefillReply(job)));
        }
        self.pump_ready(place, now);
        self.pump_decode(place, now);
    }

    fn pump_ready(&mut self, place: Place, now: Ns) {
        let (p, r) = place;
        loop {
            let rank = &self.processes[p].ranks[r];
            let running = rank.held.iter().filter(|j| self.jobs[**j].on_decode == OnDecode::Running).count() as u32;
            if rank.hung || running + rank.foreign.0 >= self.processes[p].truth.max_running {
                return;
            }
            let Some(job) = self.processes[p].ranks[r].ready.pop_front() else { return };
            self.run(job, now);
        }
    }

    fn run(&mut self, job: usize, now: Ns) {
        let (p, r) = self.jobs[job].decode;
        let step = self.processes[p].truth.step;
        let j = &mut self.jobs[job];
        j.on_decode = OnDecode::Running;
        j.started = now;
        j.epoch += 1;
        let left = j.out.saturating_sub(j.made).max(1);
        let epoch = j.epoch;
        if j.made == 0 {
            self.later.push((now + step, Later::FirstToken(job)));
        }
        self.later.push((now + left * step, Later::DecodeDone(job, epoch)));
        if !self.processes[p].ranks[r].growing {
            self.processes[p].ranks[r].growing = true;
            self.later.push((now + SEC / 2, Later::Growth((p, r))));
        }
    }

    fn decode_done(&mut self, job: usize, epoch: u32, now: Ns) {
        let (p, r) = self.jobs[job].decode;
        if self.jobs[job].on_decode != OnDecode::Running || self.jobs[job].epoch != epoch {
            return;
        }
        if self.processes[p].ranks[r].hung {
            self.later.push((now + 100 * MS, Later::DecodeDone(job, epoch)));
            return;
        }
        let took = self.jobs[job].decode_text * SEC / self.processes[p].truth.egress.max(1);
        self.later.push((now + took, Later::DecodeReply(job)));
        self.leave_decode(job, now);
    }

    /// Looks at growth: pushes the newest out when the pool is full, and takes them back when there is room.
    fn growth(&mut self, place: Place, now: Ns) {
        let (p, r) = place;
        self.processes[p].ranks[r].growing = false;
        let pool = self.processes[p].truth.pool;
        let step = self.processes[p].truth.step;
        while self.used(place, now) > pool {
            let rank = &self.processes[p].ranks[r];
            let mut running = rank.held.iter().rev().copied().filter(|j| self.jobs[*j].on_decode == OnDecode::Running);
            let (Some(newest), Some(_)) = (running.next(), running.next()) else { break };
            let j = &mut self.jobs[newest];
            j.made += now.saturating_sub(j.started) / step;
            j.epoch += 1;
            j.on_decode = OnDecode::Retracted;
        }
        let out: Vec<usize> = self.processes[p].ranks[r]
            .held
            .iter()
            .copied()
            .filter(|j| self.jobs[*j].on_decode == OnDecode::Retracted)
            .collect();
        for job in out {
            let j = &self.jobs[job];
            if self.used(place, now) + self.page_ceil(p, j.prompt + j.made) + RESERVED <= pool {
                self.run(job, now);
            }
        }
        let busy = self.processes[p].ranks[r]
            .held
            .iter()
            .any(|j| matches!(self.jobs[*j].on_decode, OnDecode::Running | OnDecode::Retracted));
        if busy && !self.processes[p].ranks[r].growing {
            self.processes[p].ranks[r].growing = true;
            self.later.push((now + SEC / 2, Later::Growth(place)));
        }
        self.pump_decode(place, now);
    }

    fn leave_prefill(&mut self, job: usize) {
        let Some((p, r)) = self.jobs[job].prefill else { return };
        self.jobs[job].on_prefill = OnPrefill::Gone;
        let rank = &mut self.processes[p].ranks[r];
        rank.bootstrap.remove(&job);
        rank.inflight.remove(&job);
        rank.queue.retain(|j| *j != job);
        // A batch in service runs to its end; the aborted member only drops out of what follows.
    }

    fn leave_decode(&mut self, job: usize, now: Ns) {
        let (p, r) = self.jobs[job].decode;
        self.jobs[job].on_decode = OnDecode::Gone;
        self.jobs[job].epoch += 1;
        let rank = &mut self.processes[p].ranks[r];
        rank.held.remove(&job);
        rank.prealloc.retain(|j| *j != job);
        rank.ready.retain(|j| *j != job);
        self.pump_decode((p, r), now);
        self.pump_ready((p, r), now);
    }
}
