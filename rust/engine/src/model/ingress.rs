//! How a request gets from the HTTP loop into a rank's first queue, and what is refused on the way.
use r3router_core::topology::Role;

use super::engine::{Engine, Inbox};
use super::event::{Effect, Fault, Finish};
use super::frontend::HttpJob;
use super::request::{ReqId, Stage};
use super::timers::Out;

/// The longest prompt is the pool less this (`max_req_input_len`; a real engine with 8,192 tokens takes 8,186).
const INPUT_MARGIN: u64 = 6;

impl Engine {
    pub(super) fn ingested(&mut self, id: ReqId, out: &mut Out<'_>) {
        let Some(req) = self.reqs.get_mut(&id) else { return };
        if let Some(wrong) = req.ask.routed_dp_rank.filter(|r| *r >= self.config.ranks.max(1)) {
            let message = format!("routed_dp_rank={wrong} out of range [0, {})", self.config.ranks);
            let reply = Box::new(req.reply(Finish::Abort { status: 400, message }, None));
            if let Some(key) = req.key {
                self.frontend.http(self.config.frontend.http_chunk, HttpJob::Emit(key, reply, id), out);
            }
            return;
        }
        if req.ask.stream
            && let Some(key) = req.key
        {
            out.effect(Effect::Opened { key });
        }
        if self.frontend_paused {
            req.stage = Stage::Held;
            self.held.push(id);
        } else {
            req.stage = Stage::Inbox;
            self.inbox.push_back(Inbox::Request(id));
            self.wake(out);
        }
    }

    /// The scheduler takes a request in: rank, checks, first queue.
    pub(super) fn intake(&mut self, id: ReqId, out: &mut Out<'_>) {
        let ranks = self.ranks.len();
        let Some(req) = self.reqs.get_mut(&id) else { return };
        if req.stage != Stage::Inbox {
            return;
        }
        req.times.scheduled = out.now;
        let pd = self.config.role != Role::Regular;
        let room = req.ask.bootstrap.map(|b| b.room);
        req.rank = match (req.ask.routed_dp_rank, room) {
            (Some(rank), _) if ranks > 1 => usize::from(rank),
            (_, Some(room)) if self.config.role == Role::Prefill => (room % ranks as u64) as usize,
            (_, None) if self.config.role == Role::Prefill && ranks > 1 => {
                // The controller asserts that a room is there, and its process dies (1.1).
                self.fault(Fault::Kill, out);
                return;
            }
            _ => {
                self.round_robin = (self.round_robin + 1) % ranks;
                self.round_robin
            }
        };
        let (rank, prompt) = (req.rank, req.ask.prompt_tokens);
        if pd && room.is_none() {
            let message = "Disaggregated request received without bootstrap room id".to_owned();
            self.end(id, Finish::Abort { status: 400, message }, out);
        } else if u64::from(prompt) > self.ranks[rank].pool.saturating_sub(INPUT_MARGIN) {
            let message = format!(
                "Input length ({prompt} tokens) exceeds the maximum allowed length ({} tokens). Use a shorter input or \
                 enable --allow-auto-truncate.",
                self.ranks[rank].pool.saturating_sub(INPUT_MARGIN)
            );
            self.end(id, Finish::Abort { status: 400, message }, out);
        } else if self.pending.fail > 0 {
            self.pending.fail -= 1;
            self.end(
                id,
                Finish::Abort { status: 500, message: "Internal server error (fault on demand)".to_owned() },
                out,
            );
        } else {
            match self.config.role {
                Role::Decode => self.decode_intake(id, out),
                Role::Prefill => self.prefill_intake(id, out),
                Role::Regular => self.queue_prefill(id),
            }
        }
    }
}
