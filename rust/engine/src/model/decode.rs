//! The decode side: first-in-first-out reservation that stops at the first misfit, transfers, the running batch and
//! retraction (section 3.1).
use std::time::Duration;

use r3router_core::time::Moment;
use r3router_core::topology::Allocation;

use super::engine::Engine;
use super::event::{Finish, Key};
use super::frontend::Output;
use super::rank::{Run, Work};
use super::request::{ReqId, Stage};
use super::timers::{Out, Peer, Room, Timer};

/// The memory gate at which an entry of the prealloc queue stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    Metadata,
    Row,
    Mamba,
    Kv,
}

impl Engine {
    /// A request joins the prealloc queue and learns which prefill rank holds its KV (section 2).
    pub(super) fn decode_intake(&mut self, id: ReqId, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get_mut(&id) else { return };
        req.stage = Stage::Prealloc;
        let (rank, room, bootstrap, explicit) = (req.rank, req.room(), req.ask.bootstrap, req.ask.prefill_dp_rank);
        self.ranks[rank].prealloc.push_back(id);
        match bootstrap.and_then(|b| self.resolve_prefill(b, explicit)) {
            None => out.at(out.now + self.config.handshake_timeout, Timer::NoHandshake(id)),
            Some(Err(wrong)) => {
                self.fail_handshake(id, &format!("Could not fetch bootstrap info for: prefill_dp_rank {wrong}"), out);
            }
            Some(Ok((prefill, prefill_rank))) => {
                if let Some(req) = self.reqs.get_mut(&id) {
                    req.prefill = Some((prefill, prefill_rank));
                }
                if self.config.allocation == Allocation::PrefillComplete {
                    out.tell(prefill, Peer::Hello(room_of(room, prefill_rank, out, rank, id)));
                }
            }
        }
    }

    /// One pass over the queues of a rank, as the scheduler's loop makes it.
    pub(super) fn decode_queues(&mut self, rank: usize, out: &mut Out<'_>) {
        self.resume_retracted(rank);
        // While anything is pushed out, nothing is reserved and no transfer is polled; W runs on.
        if self.ranks[rank].retracted.is_empty() {
            self.reserve(rank, out);
            self.poll_transfers(rank, out);
        }
        self.start_ready(rank, out);
        let prealloc = if self.config.allocation == Allocation::Early { self.ranks[rank].prealloc.len() } else { 0 };
        let r = &mut self.ranks[rank];
        r.stats.peak_prealloc = r.stats.peak_prealloc.max(prealloc as u32);
        r.stats.peak_transfer = r.stats.peak_transfer.max(r.transfer.len() as u32);
    }

    /// `pop_preallocated`: from the front, past those that are not ready, until the first that does not fit.
    fn reserve(&mut self, rank: usize, out: &mut Out<'_>) {
        let mut at = 0;
        while let Some(&id) = self.ranks[rank].prealloc.get(at) {
            let Some(req) = self.reqs.get(&id) else {
                self.ranks[rank].prealloc.remove(at);
                continue;
            };
            if req.prefill.is_none() || (self.config.allocation == Allocation::PrefillComplete && !req.computed) {
                at += 1;
                continue;
            }
            if self.closed_gate(rank, id).is_some() {
                if let Some(req) = self.reqs.get_mut(&id)
                    && !std::mem::replace(&mut req.blocked, true)
                {
                    self.ranks[rank].stats.blocked += 1;
                }
                return;
            }
            self.ranks[rank].prealloc.remove(at);
            if !self.config.version.checks_mamba() && !self.mamba_fits(rank) {
                // Nothing checked; the allocation itself fails.
                let message = "Not enough space for mamba cache; increase --max-mamba-cache-size".to_owned();
                self.end(id, Finish::Abort { status: 500, message }, out);
                continue;
            }
            self.take_reservation(rank, id, out);
        }
    }

    /// The first gate that is closed for this request, in the engine's order.
    pub(super) fn closed_gate(&self, rank: usize, id: ReqId) -> Option<Gate> {
        let (r, req) = (&self.ranks[rank], self.reqs.get(&id)?);
        if r.metadata >= self.config.metadata_slots() {
            return Some(Gate::Metadata);
        }
        if r.rows >= self.config.rows() {
            return Some(Gate::Row);
        }
        if self.config.version.checks_mamba() && !self.mamba_fits(rank) {
            return Some(Gate::Mamba);
        }
        let reserved = u64::from(self.config.reserved_decode_tokens);
        let prompt = u64::from(req.context());
        let bound = u64::from(req.output_bound(self.config.clip_max_new_tokens));
        let need = (self.config.page_ceil(req.context()) + reserved).max((prompt + bound).saturating_sub(r.run_tokens));
        (i128::from(need) > self.allocatable(rank)).then_some(Gate::Kv)
    }

    fn mamba_fits(&self, rank: usize) -> bool {
        self.config.mamba.is_none_or(|m| self.ranks[rank].mamba + m.per_request <= m.slots)
    }

    /// `available - max(R x (running + transfer + waiting), need of the largest running request alone)`.
    fn allocatable(&self, rank: usize) -> i128 {
        let r = &self.ranks[rank];
        let requests = r.running.len() + r.transfer.len() + r.ready.len();
        let reserve = u64::from(self.config.reserved_decode_tokens) * requests as u64;
        let largest = r
            .running
            .iter()
            .filter_map(|run| self.reqs.get(&run.id))
            .map(|q| u64::from(q.ask.prompt_tokens) + u64::from(q.output_bound(self.config.clip_max_new_tokens)))
            .max()
            .unwrap_or(0);
        let single = largest.saturating_sub(r.run_tokens);
        i128::from(r.free()) - i128::from(reserve.max(single))
    }

    fn take_reservation(&mut self, rank: usize, id: ReqId, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get_mut(&id) else { return };
        let tokens = self.config.page_ceil(req.context());
        req.stage = Stage::Transfer;
        req.times.reserved = out.now;
        req.held = tokens;
        (req.row, req.metadata, req.mamba) = (true, true, self.config.mamba.is_some());
        let prompt = u64::from(req.ask.prompt_tokens);
        if let Some((prefill, prefill_rank)) = req.prefill {
            let room = room_of(req.room(), prefill_rank, out, rank, id);
            out.tell(prefill, Peer::Metadata(room));
        }
        let r = &mut self.ranks[rank];
        r.take(tokens, self.config.prefix_block);
        r.rows += 1;
        r.metadata += 1;
        r.mamba += self.config.mamba.map_or(0, |m| m.per_request);
        r.transfer.push(id);
        r.transfer_tokens += prompt;
    }

    /// Arrived transfers go on, overdue ones end. Up to 0.5.12 the clock is looked at first (3.5).
    fn poll_transfers(&mut self, rank: usize, out: &mut Out<'_>) {
        let due =
            self.ranks[rank].transfer.first().and_then(|_| self.next_expiry(rank)).is_some_and(|at| at <= out.now);
        if self.ranks[rank].arrivals == 0 && !due {
            return;
        }
        for id in self.ranks[rank].transfer.clone() {
            let Some(req) = self.reqs.get_mut(&id) else { continue };
            let overdue = !req.stuck && out.now.since(req.times.reserved) >= self.config.waiting_timeout;
            if overdue && (!req.arrived || self.config.version.clock_before_arrival()) {
                self.ranks[rank].stats.waiting_timeouts += 1;
                let secs = self.config.waiting_timeout.as_secs_f64();
                self.transfer_failed(id, &format!("timed out after {secs}s in KVPoll.WaitingForInput"), out);
            } else if req.arrived {
                self.unqueue_transfer(rank, id);
                if let Some(req) = self.reqs.get_mut(&id) {
                    req.stage = Stage::Ready;
                    req.times.delivered = out.now;
                    req.metadata = false;
                    self.ranks[rank].metadata -= 1;
                    self.ranks[rank].ready.push_back(id);
                }
            }
        }
    }

    /// Takes a request out of the transfer queue without giving anything back.
    pub(super) fn unqueue_transfer(&mut self, rank: usize, id: ReqId) {
        let r = &mut self.ranks[rank];
        if let Some(at) = r.transfer.iter().position(|other| *other == id) {
            r.transfer.remove(at);
            if let Some(req) = self.reqs.get(&id) {
                r.transfer_tokens -= u64::from(req.ask.prompt_tokens);
                r.arrivals -= u32::from(req.arrived);
            }
        }
    }

    /// When the loop must look even if nothing happens: the first transfer's W, or the first bootstrap's B.
    pub(super) fn next_expiry(&self, rank: usize) -> Option<Moment> {
        let r = &self.ranks[rank];
        let waiting = r
            .transfer
            .iter()
            .filter_map(|id| self.reqs.get(id))
            .find(|q| !q.stuck)
            .map(|q| q.times.reserved + self.config.waiting_timeout);
        let unmet =
            r.inflight.iter().filter(|_| r.unmet > 0).filter_map(|id| self.reqs.get(id)).find(|q| q.waits_for_decode());
        let boot = r
            .bootstrap
            .front()
            .and_then(|id| self.reqs.get(id))
            .into_iter()
            .chain(unmet)
            .filter(|_| self.config.version.enforces_bootstrap_timeout())
            .map(|q| q.times.scheduled + self.config.bootstrap_timeout);
        waiting.into_iter().chain(boot).min()
    }

    /// Ready requests join the running batch; their first token came with the KV.
    fn start_ready(&mut self, rank: usize, out: &mut Out<'_>) {
        while self.ranks[rank].running.len() < self.config.max_running as usize {
            let Some(id) = self.ranks[rank].ready.pop_front() else { break };
            self.join(rank, id, out);
        }
    }

    /// Puts a request into the running batch, or ends it when its first token was its last.
    pub(super) fn join(&mut self, rank: usize, id: ReqId, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get_mut(&id) else { return };
        req.stage = Stage::Running;
        if req.generated == 0 {
            req.generated = 1;
            req.times.first_token = out.now;
            self.ranks[rank].counters.output_tokens += 1;
        }
        let left = req.ask.output_tokens.max(1).saturating_sub(req.generated);
        let (tokens, stream, key) = (u64::from(req.ask.prompt_tokens + req.generated), req.ask.stream, req.key);
        if left == 0 {
            self.end(id, Finish::Length, out);
            return;
        }
        if stream && let Some(key) = key {
            self.chunk(rank, key, 1);
        }
        let r = &mut self.ranks[rank];
        r.streams += u32::from(stream);
        r.run_tokens += tokens;
        r.running.push(Run { id, left, joined_with: left });
    }

    fn chunk(&mut self, rank: usize, key: Key, tokens: u32) {
        self.outbox[rank].outputs.push(Output::Chunk(key, tokens));
    }

    /// Sets up a decode step: memory for one token each, or somebody is pushed out. `None` without running requests.
    pub(super) fn form_decode(&mut self, rank: usize, out: &mut Out<'_>) -> Option<Duration> {
        while !self.ranks[rank].running.is_empty() && self.ranks[rank].free() < self.ranks[rank].running.len() as u64 {
            self.retract_one(rank, out);
        }
        let r = &mut self.ranks[rank];
        if r.running.is_empty() {
            return None;
        }
        r.work = Work::Decode;
        let cost = &self.config.compute;
        let kv = r.run_tokens as f64 * self.config.kv_bytes_per_token as f64 / cost.hbm_bytes_per_s.max(1.0);
        Some(cost.decode_step + cost.decode_per_seq * r.running.len() as u32 + Duration::from_secs_f64(kv))
    }

    /// A decode step is done: a token for everybody, and the end for those that had one to come.
    pub(super) fn decoded(&mut self, rank: usize, out: &mut Out<'_>) {
        let r = &mut self.ranks[rank];
        let n = r.running.len() as u64;
        r.take(n, self.config.prefix_block);
        r.run_tokens += n;
        r.counters.output_tokens += n;
        let mut ended = Vec::new();
        for run in &mut r.running {
            run.left -= 1;
            if run.left == 0 {
                ended.push(run.id);
            }
        }
        if r.stops || r.streams > 0 {
            let (stops, runs) = (std::mem::take(&mut r.stops), r.running.clone());
            for run in runs {
                let Some(req) = self.reqs.get(&run.id) else { continue };
                if stops && req.stop.is_some() && run.left > 0 {
                    ended.push(run.id);
                } else if req.ask.stream
                    && run.left > 0
                    && let Some(key) = req.key
                {
                    let tokens = req.generated + run.joined_with - run.left;
                    self.chunk(rank, key, tokens);
                }
            }
        }
        for id in ended {
            let finish = self.reqs.get_mut(&id).and_then(|req| req.stop.take()).unwrap_or(Finish::Length);
            self.end(id, finish, out);
        }
    }

    /// Pushes out the running request with the fewest output tokens, the longest prompt first among them.
    fn retract_one(&mut self, rank: usize, out: &mut Out<'_>) {
        let fewest = self.ranks[rank]
            .running
            .iter()
            .filter_map(|run| {
                self.reqs
                    .get(&run.id)
                    .map(|q| (q.generated + run.joined_with - run.left, std::cmp::Reverse(q.ask.prompt_tokens), run.id))
            })
            .min();
        let Some((_, _, id)) = fewest else {
            self.ranks[rank].running.clear();
            return;
        };
        let alone = self.ranks[rank].running.len() == 1;
        self.ranks[rank].counters.retracted += 1;
        if alone && self.ranks[rank].transfer.is_empty() && self.ranks[rank].ready.is_empty() {
            let message = "Out of memory even after retracting all other requests in the decode batch".to_owned();
            self.end(id, Finish::Abort { status: 500, message }, out);
        } else if !self.config.retract_backup && self.is_decode() {
            let message = "Retracted under decode memory pressure without a KV backup. Retry later.".to_owned();
            self.end(id, Finish::Abort { status: 503, message }, out);
        } else {
            self.push_out(rank, id);
        }
    }

    /// Moves a running request out of the batch and gives its memory back: decode keeps its KV on the host, a regular
    /// engine computes it again.
    pub(super) fn push_out(&mut self, rank: usize, id: ReqId) {
        self.unqueue(id);
        let decode = self.is_decode();
        let Some(req) = self.reqs.get_mut(&id) else { return };
        if decode {
            req.stage = Stage::Retracted;
            self.ranks[rank].retracted.push_back(id);
        } else {
            self.queue_prefill(id);
            let r = &mut self.ranks[rank];
            r.waiting.rotate_right(1);
        }
    }

    /// A pause with `retract` in 0.5.23: running requests lose their KV and wait for the end of the pause (5.4).
    pub(super) fn drop_running(&mut self, rank: usize) {
        for run in self.ranks[rank].running.clone() {
            self.unqueue(run.id);
            if let Some(req) = self.reqs.get_mut(&run.id) {
                req.stage = Stage::Rebootstrap;
                self.ranks[rank].dropped.push(run.id);
            }
        }
    }

    /// After it, decode asks prefill itself, with the old room and past the router, and reserves anew (5.4).
    pub(super) fn rebootstrap(&mut self, rank: usize, out: &mut Out<'_>) {
        for id in std::mem::take(&mut self.ranks[rank].dropped) {
            let Some(req) = self.reqs.get_mut(&id) else { continue };
            req.stage = Stage::Prealloc;
            (req.arrived, req.computed) = (false, false);
            self.ranks[rank].prealloc.push_back(id);
            let Some((prefill, prefill_rank)) = req.prefill else { continue };
            let ask = super::Ask {
                prompt_tokens: req.context(),
                output_tokens: 1,
                stream: false,
                r3_start: None,
                routed_dp_rank: Some(prefill_rank as u16),
                prefill_dp_rank: Some(prefill_rank as u16),
                ..req.ask.clone()
            };
            let room = req.room();
            out.tell(prefill, Peer::Again(Box::new(ask)));
            if self.config.allocation == Allocation::PrefillComplete {
                out.tell(prefill, Peer::Hello(room_of(room, prefill_rank, out, rank, id)));
            }
        }
    }

    /// Pushed-out requests come back in order while they fit with their outputs and R tokens more.
    fn resume_retracted(&mut self, rank: usize) {
        while let Some(&id) = self.ranks[rank].retracted.front() {
            let Some(req) = self.reqs.get(&id) else {
                self.ranks[rank].retracted.pop_front();
                continue;
            };
            let tokens = self.config.page_ceil(req.ask.prompt_tokens) + u64::from(req.generated.saturating_sub(1));
            let need = tokens + u64::from(self.config.reserved_decode_tokens);
            let rows = self.ranks[rank].rows < self.config.rows();
            if !rows || !self.mamba_fits(rank) || i128::from(need) > self.allocatable(rank) {
                return;
            }
            let slots = self.config.mamba.map_or(0, |m| m.per_request);
            if let Some(req) = self.reqs.get_mut(&id) {
                req.stage = Stage::Ready;
                req.held = tokens;
                (req.row, req.mamba) = (true, slots > 0);
            }
            let r = &mut self.ranks[rank];
            r.retracted.pop_front();
            r.take(tokens, self.config.prefix_block);
            r.rows += 1;
            r.mamba += slots;
            r.ready.push_back(id);
        }
    }

    /// Prefill says that the KV is here.
    pub(super) fn arrived(&mut self, id: ReqId, cached_tokens: u32, stuck: bool, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get_mut(&id).filter(|q| q.stage == Stage::Transfer) else { return };
        req.cached = cached_tokens;
        req.stuck = stuck;
        if !stuck && !req.arrived {
            req.arrived = true;
            self.ranks[req.rank].arrivals += 1;
            self.wake(out);
        }
    }

    /// Prefill is done and asks for memory (`prefill_complete`).
    pub(super) fn computed(&mut self, id: ReqId, out: &mut Out<'_>) {
        if let Some(req) = self.reqs.get_mut(&id) {
            req.computed = true;
            self.wake(out);
        }
    }
}

fn room_of(room: u64, prefill_rank: usize, out: &Out<'_>, rank: usize, request: ReqId) -> Room {
    Room { number: room, prefill_rank, decode: out.engine, decode_rank: rank as u16, request }
}
