//! How requests end before their time: aborts by stage, failed transfers, clients that leave, engines that die
//! (sections 3.6, 5.1, 5.2).
use std::time::Duration;

use r3router_core::time::Moment;

use super::Version;
use super::engine::Engine;
use super::event::{EngineId, Fault, Finish, Key};
use super::frontend::{Control, Message};
use super::request::{ReqId, Stage};
use super::timers::{Out, Peer, Timer};

/// What up to 0.5.12 says of every failure on decode's side.
const OLD_DECODE_FAILURE: &str = "NIXL KVReceiver Exception";
/// The same on prefill's side.
const OLD_PREFILL_FAILURE: &str = "NIXL KVSender Exception";

impl Engine {
    /// Takes a request out of the queue it stands in and gives back everything that it holds.
    pub(super) fn unqueue(&mut self, id: ReqId) {
        let Some(req) = self.reqs.get(&id) else { return };
        let (stage, at, room) = (req.stage, req.rank, req.room());
        match stage {
            Stage::Transfer => self.unqueue_transfer(at, id),
            Stage::Prealloc => self.ranks[at].prealloc.retain(|other| *other != id),
            Stage::Ready => self.ranks[at].ready.retain(|other| *other != id),
            Stage::Retracted => self.ranks[at].retracted.retain(|other| *other != id),
            Stage::Rebootstrap => self.ranks[at].dropped.retain(|other| *other != id),
            Stage::Bootstrap => self.ranks[at].bootstrap.retain(|other| *other != id),
            Stage::Waiting => {
                self.ranks[at].waiting.retain(|other| *other != id);
                self.ranks[at].waiting_uncached -= u64::from(req.left);
            }
            Stage::Inflight => {
                self.ranks[at].inflight.retain(|other| *other != id);
                self.ranks[at].sent -= u32::from(req.arrived);
                self.ranks[at].unmet -= u32::from(req.waits_for_decode());
            }
            Stage::Ingress | Stage::Held | Stage::Inbox | Stage::Batch | Stage::Running | Stage::Leaving => {}
        }
        let Some(req) = self.reqs.get_mut(&id) else { return };
        let rank = &mut self.ranks[at];
        if stage == Stage::Running
            && let Some(run) = rank.remove_run(id)
        {
            let steps = run.joined_with - run.left;
            req.generated += steps;
            req.held += u64::from(steps);
            rank.run_tokens -= u64::from(req.ask.prompt_tokens + req.generated);
            rank.streams -= u32::from(req.ask.stream);
        }
        rank.used -= std::mem::take(&mut req.held);
        rank.rows -= u32::from(std::mem::take(&mut req.row));
        rank.metadata -= u32::from(std::mem::take(&mut req.metadata));
        if std::mem::take(&mut req.mamba) {
            rank.mamba -= self.config.mamba.map_or(0, |m| m.per_request);
        }
        if matches!(stage, Stage::Bootstrap | Stage::Waiting | Stage::Batch | Stage::Inflight) && room != 0 {
            rank.rooms.remove(&room);
        }
    }

    /// Ends a request of decode's transfer queue with 500; tells prefill where the version does.
    pub(super) fn transfer_failed(&mut self, id: ReqId, reason: &str, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get(&id).filter(|q| q.stage == Stage::Transfer) else { return };
        let message = self.decode_message("transfer", id, reason);
        if let (true, Some((prefill, rank))) = (self.config.version.decode_tells_prefill(), req.prefill) {
            out.tell(prefill, Peer::Abort { rank, room: req.room() });
        }
        self.ranks[req.rank].counters.transfer_failed += 1;
        self.end(id, Finish::Abort { status: 500, message }, out);
    }

    /// Ends a request of decode's prealloc queue with 500.
    pub(super) fn fail_handshake(&mut self, id: ReqId, reason: &str, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get(&id).filter(|q| q.stage == Stage::Prealloc) else { return };
        let message = self.decode_message("handshake", id, reason);
        self.ranks[req.rank].counters.bootstrap_failed += 1;
        self.end(id, Finish::Abort { status: 500, message }, out);
    }

    fn decode_message(&self, what: &str, id: ReqId, reason: &str) -> String {
        let Some(req) = self.reqs.get(&id) else { return String::new() };
        let (rank, rid, room) = (req.rank, &req.ask.rid, req.room());
        let exception = match self.config.version {
            Version::V0_5_12 => OLD_DECODE_FAILURE.to_owned(),
            Version::V0_5_23 => format!("KVTransferError({room}): {reason}"),
        };
        format!(
            "Decode {what} failed for request rank={rank} decode_req.req.rid='{rid}' decode_req.req.bootstrap_room={room} with exception {exception}"
        )
    }

    /// Ends a request of prefill's bootstrap queue with 500. Decode is told in no version.
    pub(super) fn fail_bootstrap(&mut self, id: ReqId, reason: &str, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get(&id) else { return };
        let message = self.prefill_message("bootstrap", id, reason);
        self.ranks[req.rank].counters.bootstrap_failed += 1;
        self.end(id, Finish::Abort { status: 500, message }, out);
    }

    /// Ends a request whose transfer was under way with 500.
    pub(super) fn fail_inflight(&mut self, id: ReqId, reason: &str, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get(&id) else { return };
        let message = self.prefill_message("transfer", id, reason);
        self.ranks[req.rank].counters.transfer_failed += 1;
        self.end(id, Finish::Abort { status: 500, message }, out);
    }

    fn prefill_message(&self, what: &str, id: ReqId, reason: &str) -> String {
        let Some(req) = self.reqs.get(&id) else { return String::new() };
        let (rank, rid, room) = (req.rank, &req.ask.rid, req.room());
        let exception = match self.config.version {
            Version::V0_5_12 => OLD_PREFILL_FAILURE.to_owned(),
            Version::V0_5_23 => format!("KVTransferError({room}): {reason}"),
        };
        format!(
            "Prefill {what} failed for request rank={rank} req.rid='{rid}' req.bootstrap_room={room} with exception {exception}"
        )
    }

    /// Every request of the scheduler whose rid starts with `rid` (5.1: it matches by prefix).
    fn matching(&self, rid: &str, all: bool) -> Vec<ReqId> {
        let mut ids: Vec<ReqId> = self
            .reqs
            .iter()
            .filter(|(_, q)| !matches!(q.stage, Stage::Ingress | Stage::Held | Stage::Inbox | Stage::Leaving))
            .filter(|(_, q)| all || q.ask.rid.starts_with(rid))
            .map(|(id, _)| *id)
            .collect();
        ids.sort_unstable();
        ids
    }

    /// An abort hits one request; where it stands decides the reply (5.1).
    fn abort_one(&mut self, id: ReqId, at_once: bool, out: &mut Out<'_>) {
        const REASON: &str = "Aborted by AbortReq.";
        let Some(req) = self.reqs.get_mut(&id) else { return };
        let graceful = |message: &str| Finish::Abort { status: 200, message: message.to_owned() };
        match req.stage {
            Stage::Bootstrap => self.fail_bootstrap(id, REASON, out),
            Stage::Inflight => self.fail_inflight(id, REASON, out),
            Stage::Prealloc => self.fail_handshake(id, REASON, out),
            Stage::Transfer => self.transfer_failed(id, REASON, out),
            Stage::Waiting | Stage::Ready | Stage::Retracted => self.end(id, graceful("Abort in waiting queue"), out),
            Stage::Running if at_once => self.end(id, graceful("Aborted"), out),
            Stage::Running => {
                req.stop = Some(graceful("Aborted"));
                self.ranks[req.rank].stops = true;
            }
            Stage::Batch => req.stop = Some(graceful("Aborted")),
            // Dropped requests cannot be aborted while they wait for the end of the pause (5.1).
            Stage::Rebootstrap | Stage::Ingress | Stage::Held | Stage::Inbox | Stage::Leaving => {}
        }
    }

    /// The HTTP loop has read a control request.
    pub(super) fn front_control(&mut self, control: Control, out: &mut Out<'_>) {
        match control {
            Control::Turn(key) => out.effect(super::Effect::Answer { key, status: 200 }),
            Control::Health(key) => {
                self.hand_to_scheduler(Control::Fake, out);
                out.at(out.now + Duration::from_secs(1), Timer::Health(key, out.now));
            }
            Control::Abort { key, rid, all } => {
                // An rid that the tokenizer does not know, because it is unknown or has not been read yet, is dropped.
                let known = all
                    || self.reqs.values().any(|q| q.ask.rid == rid && !matches!(q.stage, Stage::Ingress | Stage::Held));
                if known {
                    self.hand_to_scheduler(Control::Abort { key: None, rid, all }, out);
                }
                if let Some(key) = key {
                    out.effect(super::Effect::Answer { key, status: 200 });
                }
            }
            Control::Pause(..) => {
                self.pause_frontend();
                self.hand_to_scheduler(control, out);
            }
            Control::Ask(_) | Control::Continue(_) | Control::Flush(_) | Control::Fake => {
                self.hand_to_scheduler(control, out);
            }
        }
    }

    /// The scheduler has read a control request.
    pub(super) fn control(&mut self, control: Control, out: &mut Out<'_>) {
        match control {
            Control::Abort { rid, all, .. } => {
                for id in self.matching(&rid, all) {
                    self.abort_one(id, false, out);
                }
            }
            Control::Pause(key, mode) => {
                if mode == super::PauseMode::Abort {
                    for id in self.matching("", true) {
                        self.abort_one(id, true, out);
                    }
                } else if mode == super::PauseMode::Retract {
                    for rank in 0..self.ranks.len() {
                        if self.is_decode() && self.config.version == Version::V0_5_23 {
                            self.drop_running(rank);
                            continue;
                        }
                        for run in self.ranks[rank].running.clone() {
                            self.push_out(rank, run.id);
                        }
                    }
                }
                self.paused = true;
                self.answer(key, 200, out);
            }
            Control::Continue(key) => {
                self.paused = false;
                for rank in 0..self.ranks.len() {
                    self.rebootstrap(rank, out);
                }
                self.resume_frontend(out);
                self.answer(key, 200, out);
            }
            Control::Flush(key) => {
                let quiet = self.ranks.iter().all(super::rank::Rank::is_quiet);
                if quiet {
                    self.ranks.iter_mut().for_each(|r| r.cache.clear());
                }
                self.answer(key, if quiet { 200 } else { 400 }, out);
            }
            Control::Ask(key) => self.answer(key, 200, out),
            Control::Fake if !self.paused => out.at(out.now, Timer::Send(Message::default())),
            Control::Fake | Control::Turn(_) | Control::Health(_) => {}
        }
    }

    /// A client closed its connection: seen by a poll (whole reply) or two seconds after the stream's end (5.2).
    pub(super) fn disconnected(&mut self, key: Key, out: &mut Out<'_>) {
        let Some(id) = self.key(key) else { return };
        self.forget_key(key);
        let Some(req) = self.reqs.get(&id) else { return };
        let front = &self.config.frontend;
        let at = if req.ask.stream {
            out.now + front.stream_abort_after
        } else {
            let poll = front.disconnect_poll.max(Duration::from_millis(1)).as_nanos() as u64;
            let begun = req.times.scheduled.max(req.times.arrived);
            Moment(begun.0 + (out.now.since(begun).as_nanos() as u64 / poll + 1) * poll)
        };
        out.at(at, Timer::Gone(id));
    }

    /// The engine notices that a client has gone.
    pub(super) fn gone(&mut self, id: ReqId, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get_mut(&id) else { return };
        if req.stage == Stage::Ingress {
            out.at(out.now + self.config.frontend.disconnect_poll, Timer::Gone(id));
            return;
        }
        req.key = None;
        let rid = req.ask.rid.clone();
        self.hand_to_scheduler(Control::Abort { key: None, rid, all: false }, out);
    }

    /// The second-by-second look of a health check.
    pub(super) fn health(&mut self, key: Key, asked: Moment, out: &mut Out<'_>) {
        /// `SGLANG_HEALTH_CHECK_TIMEOUT`.
        const HEALTH_TIMEOUT: Duration = Duration::from_secs(20);
        if self.frontend.last_output > asked && self.frontend.last_output <= out.now {
            self.answer(key, 200, out);
        } else if out.now.since(asked) >= HEALTH_TIMEOUT {
            self.answer(key, 503, out);
        } else {
            out.at(out.now + Duration::from_secs(1), Timer::Health(key, asked));
        }
    }

    /// A fault on demand.
    pub(super) fn fault(&mut self, fault: Fault, out: &mut Out<'_>) {
        match fault {
            Fault::StallScheduler(time) => {
                self.stall += time;
                self.wake(out);
            }
            Fault::StallHttp(time) => self.frontend.stall_http(time, out.now),
            Fault::FailNext(n) => self.pending.fail += n,
            Fault::FailTransfers(n) => self.pending.fail_transfers += n,
            Fault::StickTransfers(n) => self.pending.stick_transfers += n,
            Fault::Unstick => {
                let stuck: Vec<ReqId> = self
                    .reqs
                    .iter()
                    .filter(|(_, q)| q.stuck && q.stage == Stage::Transfer)
                    .map(|(id, _)| *id)
                    .collect();
                for id in stuck {
                    self.transfer_failed(id, "let go (fault on demand)", out);
                }
            }
            Fault::Pool(tokens) => self.ranks.iter_mut().for_each(|r| r.pool = tokens),
            Fault::Kill => self.die(out),
            Fault::Revive => self.revive(out),
        }
    }

    /// A prefill engine was not heard of for two heartbeats: every room of it fails (3.5).
    pub(super) fn lost_prefill(&mut self, prefill: EngineId, out: &mut Out<'_>) {
        let mut ids: Vec<ReqId> =
            self.reqs.iter().filter(|(_, q)| q.prefill.is_some_and(|p| p.0 == prefill)).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        for id in ids {
            self.fail_handshake(id, "Lost connection with prefill instance", out);
            self.transfer_failed(id, "Lost connection with prefill instance", out);
        }
    }

    /// A decode engine died: what was being written to it fails in the transfer worker.
    pub(super) fn lost_decode(&mut self, decode: EngineId, out: &mut Out<'_>) {
        let mut ids: Vec<ReqId> = self
            .reqs
            .iter()
            .filter(|(_, q)| q.stage == Stage::Inflight && q.decode.is_some_and(|d| d.0 == decode))
            .map(|(id, _)| *id)
            .collect();
        ids.sort_unstable();
        for id in ids {
            self.fail_inflight(id, "remote agent lost", out);
        }
    }

    /// Decode no longer wants a room (0.5.23): prefill drops it wherever it stands.
    pub(super) fn decode_gave_up(&mut self, rank: usize, room: u64, out: &mut Out<'_>) {
        const REASON: &str = "Aborted by decode";
        if let Some(rank) = self.ranks.get_mut(rank) {
            rank.rooms.remove(&room);
        }
        let Some((id, stage)) =
            self.reqs.iter().find(|(_, q)| q.room() == room && q.rank == rank).map(|(id, q)| (*id, q.stage))
        else {
            return;
        };
        match stage {
            Stage::Bootstrap => self.fail_bootstrap(id, REASON, out),
            Stage::Waiting | Stage::Inflight => self.fail_inflight(id, REASON, out),
            Stage::Batch => {
                let message = self.prefill_message("transfer", id, REASON);
                if let Some(req) = self.reqs.get_mut(&id) {
                    req.stop = Some(Finish::Abort { status: 500, message });
                }
            }
            _ => {}
        }
    }
}
