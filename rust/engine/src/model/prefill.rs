//! The prefill side: bootstrap queue, chunked batches over a prefix cache, transfers (sections 3.2, 3.4).
use std::time::Duration;

use r3router_core::topology::{Allocation, Role};

use super::engine::Engine;
use super::event::Finish;
use super::frontend::at_rate;
use super::rank::{Chunk, Work};
use super::request::{ReqId, Stage};
use super::timers::{Out, Peer, Room, Timer};

impl Engine {
    /// A request joins the bootstrap queue, unless its room belongs to another rank (section 0).
    pub(super) fn prefill_intake(&mut self, id: ReqId, out: &mut Out<'_>) {
        let ranks = self.ranks.len() as u64;
        let Some(req) = self.reqs.get_mut(&id) else { return };
        let (rank, room) = (req.rank, req.room());
        let explicit = req.ask.prefill_dp_rank.is_some() && self.config.version.explicit_rank_skips_conflict();
        if room % ranks != rank as u64 && !explicit {
            let reason =
                format!("follow_bootstrap_room conflict: room {room} belongs to dp rank {}, not {rank}", room % ranks);
            self.fail_bootstrap(id, &reason, out);
            return;
        }
        req.stage = Stage::Bootstrap;
        self.ranks[rank].bootstrap.push_back(id);
    }

    /// One pass over the queues of a rank.
    pub(super) fn prefill_queues(&mut self, rank: usize, out: &mut Out<'_>) {
        self.poll_bootstrap(rank, out);
        self.poll_inflight(rank, out);
    }

    /// Leaves the bootstrap queue: who has decode's metadata, while metadata slots last.
    fn poll_bootstrap(&mut self, rank: usize, out: &mut Out<'_>) {
        for id in self.ranks[rank].bootstrap.clone() {
            let Some(req) = self.reqs.get_mut(&id) else { continue };
            let room = self.ranks[rank].rooms.get(&req.room()).copied();
            let early = self.config.allocation == Allocation::Early;
            if early && room.is_none() {
                if self.bootstrap_overdue(id, out) {
                    self.ranks[rank].stats.bootstrap_timeouts += 1;
                    self.fail_bootstrap(id, &self.overdue_text(), out);
                }
                continue;
            }
            if self.ranks[rank].metadata >= self.config.metadata_slots() {
                break;
            }
            // Under `prefill_complete` the room is known but nothing is reserved there yet.
            req.decode = room.filter(|_| early).map(|r| (r.decode, r.decode_rank, r.request));
            req.times.reserved = out.now;
            req.metadata = true;
            self.ranks[rank].metadata += 1;
            self.ranks[rank].bootstrap.retain(|other| *other != id);
            self.queue_prefill(id);
        }
    }

    /// Clock B, which runs from arrival, is over (3.5).
    fn bootstrap_overdue(&self, id: ReqId, out: &Out<'_>) -> bool {
        let age = self.reqs.get(&id).map_or(Duration::ZERO, |q| out.now.since(q.times.scheduled));
        self.config.version.enforces_bootstrap_timeout() && age >= self.config.bootstrap_timeout
    }

    fn overdue_text(&self) -> String {
        format!("timed out after {}s in KVPoll.Bootstrapping", self.config.bootstrap_timeout.as_secs_f64())
    }

    /// Queues a request for a batch.
    pub(super) fn queue_prefill(&mut self, id: ReqId) {
        let block = self.config.prefix_block;
        let Some(req) = self.reqs.get_mut(&id) else { return };
        req.stage = Stage::Waiting;
        let rank = &mut self.ranks[req.rank];
        let known = if self.config.prefix_cache { rank.cache.peek(&req.ask.prefix) as u32 * block } else { 0 };
        let total = req.ask.prompt_tokens + req.generated;
        req.left = total.saturating_sub(known.min(total.saturating_sub(1)));
        rank.waiting_uncached += u64::from(req.left);
        rank.waiting.push_back(id);
    }

    /// Fills a batch: the chunked request first, then the queue in order, until tokens, rows, state or KV run out.
    pub(super) fn form_prefill(&mut self, rank: usize, out: &mut Out<'_>) -> Option<Duration> {
        let mut budget = self.config.chunked_prefill_size.max(1);
        let mut batch = Vec::new();
        let mut cached = 0u64;
        if let Some(id) = self.ranks[rank].chunked.take()
            && let Some(req) = self.reqs.get(&id)
        {
            let tokens = req.left.min(budget);
            budget -= tokens;
            batch.push(Chunk { id, tokens, first: false });
        }
        while budget > 0 {
            let Some(&id) = self.ranks[rank].waiting.front() else { break };
            if !self.admit(rank, id) {
                break;
            }
            let Some(req) = self.reqs.get(&id) else { continue };
            let tokens = req.left.min(budget);
            budget -= tokens;
            cached += u64::from(req.cached);
            batch.push(Chunk { id, tokens, first: true });
            self.send_cached_early(rank, id, out);
        }
        if batch.is_empty() {
            return None;
        }
        let uncached: u64 = batch.iter().map(|c| u64::from(c.tokens)).sum();
        let cost = &self.config.compute;
        let step = cost.prefill_batch
            + at_rate(uncached, cost.prefill_tokens_per_s)
            + Duration::from_secs_f64(cached as f64 * cost.cached_token_s);
        let r = &mut self.ranks[rank];
        r.counters.busy_us += step.as_micros() as u64;
        r.work = Work::Prefill(batch);
        Some(step)
    }

    /// Takes the front of the waiting queue into a batch if a row, state slots and KV are there.
    fn admit(&mut self, rank: usize, id: ReqId) -> bool {
        let block = self.config.prefix_block;
        let slots = self.config.mamba.map_or(0, |m| m.per_request);
        let Some(req) = self.reqs.get_mut(&id) else {
            self.ranks[rank].waiting.pop_front();
            return true;
        };
        let r = &mut self.ranks[rank];
        let mamba = self.config.mamba.is_none_or(|m| r.mamba + slots <= m.slots);
        if r.rows >= self.config.max_running || !mamba {
            return false;
        }
        let total = req.ask.prompt_tokens + req.generated;
        let hit = if self.config.prefix_cache { r.cache.hit(&req.ask.prefix) as u32 * block } else { 0 };
        let cached = hit.min(total.saturating_sub(1));
        // The matched prefix stays while the request runs, so it counts against the pool like the rest.
        let growth = if self.config.role == Role::Regular {
            u64::from(self.config.reserved_decode_tokens) * (r.running.len() as u64 + 1)
        } else {
            0
        };
        if r.free() < u64::from(total) + growth && r.rows > 0 {
            return false;
        }
        r.waiting.pop_front();
        r.waiting_uncached -= u64::from(req.left);
        req.stage = Stage::Batch;
        req.cached = cached.min(req.ask.prompt_tokens);
        req.left = total - cached;
        req.held = u64::from(total - cached);
        (req.row, req.mamba) = (true, slots > 0);
        r.rows += 1;
        r.mamba += slots;
        r.counters.prompt_tokens += u64::from(total);
        r.counters.cached_tokens += u64::from(cached);
        let held = req.held;
        r.take(held, block);
        true
    }

    /// 0.5.23 sends the cached prefix while the rest is being computed (3.4).
    fn send_cached_early(&mut self, rank: usize, id: ReqId, out: &mut Out<'_>) {
        let early = self.config.role == Role::Prefill && self.config.version == super::Version::V0_5_23;
        let target = self.reqs.get(&id).and_then(|req| req.decode.map(|d| (d.1, req.cached)));
        if let (true, Some((decode_rank, cached))) = (early && self.config.allocation == Allocation::Early, target) {
            self.post(rank, decode_rank, u64::from(cached) * self.config.kv_bytes_per_token, out);
        }
    }

    /// Gives a transfer worker bytes; returns when it is through with them.
    fn post(&mut self, rank: usize, decode_rank: u16, bytes: u64, out: &Out<'_>) -> r3router_core::time::Moment {
        let workers = &mut self.ranks[rank].workers;
        let at = usize::from(decode_rank) % workers.len();
        workers[at] = workers[at].max(out.now + self.stall) + at_rate(bytes, self.config.transfer.bytes_per_s);
        workers[at]
    }

    /// A prefill batch is done.
    pub(super) fn prefilled(&mut self, rank: usize, chunks: &[Chunk], out: &mut Out<'_>) {
        let block = self.config.prefix_block.max(1);
        for chunk in chunks {
            let Some(req) = self.reqs.get_mut(&chunk.id) else { continue };
            req.left -= chunk.tokens;
            self.ranks[rank].counters.uncached_done += u64::from(chunk.tokens);
            if let Some(finish) = req.stop.take() {
                self.end(chunk.id, finish, out);
                continue;
            }
            let last = req.left == 0;
            let (decode, cached, total) = (req.decode, req.cached, req.ask.prompt_tokens);
            if !last {
                self.ranks[rank].chunked = Some(chunk.id);
            } else if self.config.prefix_cache {
                let whole = (total / block) as usize;
                let chain = req.ask.prefix.clone();
                let chain = &chain[..whole.min(chain.len())];
                let r = &mut self.ranks[rank];
                let new = r.cache.insert(chain) as u64 * u64::from(block);
                // Blocks that the cache took over are no longer this request's own.
                let moved = new.min(req.held);
                req.held -= moved;
                r.used -= moved;
                r.take(0, block);
            }
            if self.config.role == Role::Regular {
                if last {
                    self.join(rank, chunk.id, out);
                }
                continue;
            }
            let late_prefix = chunk.first && self.config.version == super::Version::V0_5_12;
            let tokens = u64::from(chunk.tokens) + if late_prefix { u64::from(cached) } else { 0 };
            let bytes = tokens * self.config.kv_bytes_per_token;
            match (last, decode) {
                (false, Some((_, decode_rank, _))) => {
                    self.post(rank, decode_rank, bytes, out);
                }
                (true, Some((_, decode_rank, _))) => self.send_last(rank, chunk.id, decode_rank, bytes, out),
                (true, None) => self.wait_for_decode(rank, chunk.id, out),
                (false, None) => {}
            }
        }
    }

    fn send_last(&mut self, rank: usize, id: ReqId, decode_rank: u16, bytes: u64, out: &mut Out<'_>) {
        let done =
            self.post(rank, decode_rank, bytes + self.config.transfer.state_bytes, out) + self.config.transfer.latency;
        self.ranks[rank].inflight.push(id);
        let took = done.since(out.now).as_secs_f64();
        let counters = &mut self.ranks[rank].counters;
        counters.transfer_ms = took * 1e3;
        counters.transfer_gb_s = bytes as f64 / took.max(1e-9) / 1e9;
        if let Some(req) = self.reqs.get_mut(&id) {
            req.stage = Stage::Inflight;
            req.generated = 1;
            req.times.first_token = out.now;
        }
        out.at(done, Timer::Sent(id));
    }

    /// `prefill_complete`: computed before decode has reserved; decode is told and answers with metadata.
    fn wait_for_decode(&mut self, rank: usize, id: ReqId, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get_mut(&id) else { return };
        req.stage = Stage::Inflight;
        req.computed = true;
        req.generated = 1;
        req.times.first_token = out.now;
        let room = req.room();
        self.ranks[rank].inflight.push(id);
        self.ranks[rank].unmet += 1;
        if let Some(room) = self.ranks[rank].rooms.get(&room) {
            out.tell(room.decode, Peer::Computed(room.request));
        }
    }

    /// A transfer worker is through with a request.
    pub(super) fn sent(&mut self, id: ReqId, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get_mut(&id).filter(|q| q.stage == Stage::Inflight) else { return };
        let Some((decode, _, request)) = req.decode else { return };
        if self.pending.fail_transfers > 0 {
            self.pending.fail_transfers -= 1;
            let reason = "transfer failed (fault on demand)".to_owned();
            if self.config.version.prefill_tells_decode() {
                out.tell(decode, Peer::Failed { request, reason: reason.clone() });
            }
            self.fail_inflight(id, &reason, out);
            return;
        }
        let stuck = self.pending.stick_transfers > 0;
        self.pending.stick_transfers -= u32::from(stuck);
        req.arrived = true;
        self.ranks[req.rank].sent += 1;
        // The notice travels with the last write: no time of its own.
        let word = Peer::Arrived { request, cached_tokens: req.cached, stuck };
        out.timers.push(out.now, decode, Timer::Peer(word));
        self.wake(out);
    }

    /// Confirmed transfers are answered; only now are KV, row and metadata slot free.
    fn poll_inflight(&mut self, rank: usize, out: &mut Out<'_>) {
        if self.ranks[rank].sent == 0 && self.ranks[rank].unmet == 0 {
            return;
        }
        for id in self.ranks[rank].inflight.clone() {
            let Some(req) = self.reqs.get_mut(&id) else { continue };
            if req.arrived {
                req.times.delivered = out.now;
                self.end(id, Finish::Length, out);
            } else if req.waits_for_decode() && self.bootstrap_overdue(id, out) {
                self.ranks[rank].stats.bootstrap_timeouts += 1;
                self.fail_inflight(id, &self.overdue_text(), out);
            }
        }
    }

    /// Decode waits for this room (`prefill_complete`, nothing reserved yet).
    pub(super) fn hello(&mut self, room: Room, out: &mut Out<'_>) {
        let Some(rank) = self.ranks.get_mut(room.prefill_rank) else { return };
        rank.rooms.insert(room.number, room);
        let computed =
            rank.inflight.iter().any(|id| self.reqs.get(id).is_some_and(|q| q.computed && q.room() == room.number));
        if computed {
            out.tell(room.decode, Peer::Computed(room.request));
        }
        self.wake(out);
    }

    /// Decode has reserved: the room may leave the bootstrap queue, or be written at once when it is computed already.
    pub(super) fn metadata(&mut self, room: Room, out: &mut Out<'_>) {
        let Some(rank) = self.ranks.get_mut(room.prefill_rank) else { return };
        rank.rooms.insert(room.number, room);
        let computed =
            rank.inflight.iter().copied().find(|id| {
                self.reqs.get(id).is_some_and(|q| q.computed && q.decode.is_none() && q.room() == room.number)
            });
        if let Some(id) = computed {
            self.ranks[room.prefill_rank].inflight.retain(|other| *other != id);
            self.ranks[room.prefill_rank].unmet -= 1;
            let tokens = self.reqs.get_mut(&id).map_or(0, |q| {
                q.decode = Some((room.decode, room.decode_rank, room.request));
                u64::from(q.ask.prompt_tokens)
            });
            self.send_last(room.prefill_rank, id, room.decode_rank, tokens * self.config.kv_bytes_per_token, out);
        }
        self.wake(out);
    }
}
