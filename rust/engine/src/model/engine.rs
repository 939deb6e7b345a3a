//! One engine: what reaches it, and the loop of its scheduler. All ranks step together (lock-step DP, 3.4): a step is as
//! long as its longest rank, and a stall of one is a stall of all.
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use r3router_core::time::Moment;
use r3router_core::topology::Role;

use super::config::EngineConfig;
use super::event::{Ask, Bootstrap, Effect, EngineId, Event, Finish, Key};
use super::frontend::{Control, Frontend, HttpJob, Message, Output, at_rate, plain_effect};
use super::load::RankLoad;
use super::rank::{Rank, Work};
use super::request::{Req, ReqId, Stage};
use super::timers::{Out, Peer, Timer};

/// Where the scheduler's loop is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loop {
    /// Nothing to do until something happens.
    Idle,
    /// The next turn is set.
    Set,
}

/// Faults that are still to come.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) fail: u32,
    pub(super) fail_transfers: u32,
    pub(super) stick_transfers: u32,
}

/// One engine with all of its ranks and processes.
pub(super) struct Engine {
    pub(super) config: EngineConfig,
    /// Rank count of every prefill engine of the fleet, by place.
    prefill_ranks: Arc<[u16]>,
    pub(super) ranks: Vec<Rank>,
    pub(super) reqs: HashMap<ReqId, Req>,
    keys: HashMap<Key, ReqId>,
    pub(super) frontend: Frontend,
    pub(super) inbox: VecDeque<Inbox>,
    pub(super) held: Vec<ReqId>,
    loop_state: Loop,
    turn_no: u64,
    pub(super) last_turn: Moment,
    /// Time that the present turn takes before its batch.
    pub(super) stall: Duration,
    /// A turn must follow at once, because this one freed something that its earlier part could use.
    pub(super) again: bool,
    pub(super) outbox: Vec<Message>,
    pub(super) round_robin: usize,
    pub(super) paused: bool,
    pub(super) frontend_paused: bool,
    dead: bool,
    pub(super) pending: Pending,
    pub(super) steps: u64,
    pub(super) published: Vec<RankLoad>,
    pub(super) logged: Vec<RankLoad>,
    next_req: u64,
}

/// What the scheduler reads at the top of its loop.
#[derive(Debug)]
pub(super) enum Inbox {
    Request(ReqId),
    Control(Control),
}

impl Engine {
    pub(super) fn new(config: EngineConfig, number: u64, prefill_ranks: Arc<[u16]>) -> Self {
        let ranks: Vec<_> = (0..config.ranks.max(1)).map(|_| Rank::new(&config)).collect();
        let mut engine = Self {
            outbox: ranks.iter().map(|_| Message::default()).collect(),
            config,
            prefill_ranks,
            ranks,
            reqs: HashMap::new(),
            keys: HashMap::new(),
            frontend: Frontend::default(),
            inbox: VecDeque::new(),
            held: Vec::new(),
            loop_state: Loop::Idle,
            turn_no: 0,
            last_turn: Moment::ZERO,
            stall: Duration::ZERO,
            again: false,
            round_robin: 0,
            paused: false,
            frontend_paused: false,
            dead: false,
            pending: Pending::default(),
            steps: 0,
            published: Vec::new(),
            logged: Vec::new(),
            next_req: number << 40,
        };
        engine.published = engine.live(Moment::ZERO);
        engine.logged = engine.published.clone();
        engine
    }

    /// Something from outside.
    pub(super) fn event(&mut self, event: Event, out: &mut Out<'_>) {
        let turn = self.config.frontend.http_turn;
        if self.dead && !matches!(event, Event::Fault(_)) {
            if let Some(key) = key_of(&event) {
                out.effect(Effect::Reset { key });
            }
            return;
        }
        match event {
            Event::Generate { key, ask } => {
                let cost = turn + at_rate(ask.body_bytes, self.config.frontend.ingress_bytes_per_s);
                let id = self.admit_exchange(Some(key), ask, out.now);
                self.keys.insert(key, id);
                self.frontend.http(cost, HttpJob::Ingested(id), out);
            }
            Event::Disconnect { key } => self.disconnected(key, out),
            Event::Abort { key, rid, all } => {
                self.frontend.http(turn, HttpJob::Control(Control::Abort { key: Some(key), rid, all }), out);
            }
            Event::Http { key } => self.frontend.http(turn, HttpJob::Control(Control::Turn(key)), out),
            Event::Scheduler { key } => self.frontend.http(turn, HttpJob::Control(Control::Ask(key)), out),
            Event::Loads { key } => {
                let job = if self.config.version.loads_by_snapshot() { Control::Turn(key) } else { Control::Ask(key) };
                self.frontend.http(turn, HttpJob::Control(job), out);
            }
            Event::Health { key } => self.frontend.http(turn, HttpJob::Control(Control::Health(key)), out),
            Event::Pause { key, mode } => self.frontend.http(turn, HttpJob::Control(Control::Pause(key, mode)), out),
            Event::Continue { key } => self.frontend.http(turn, HttpJob::Control(Control::Continue(key)), out),
            Event::Flush { key } => self.frontend.http(turn, HttpJob::Control(Control::Flush(key)), out),
            Event::Fault(fault) => self.fault(fault, out),
        }
    }

    fn admit_exchange(&mut self, key: Option<Key>, ask: Ask, now: Moment) -> ReqId {
        self.next_req += 1;
        let id = ReqId(self.next_req);
        self.reqs.insert(id, Req::new(key, ask, now));
        id
    }

    /// Something that the engine told itself, or a peer told it.
    pub(super) fn timer(&mut self, timer: Timer, out: &mut Out<'_>) {
        if self.dead {
            return;
        }
        match timer {
            Timer::Turn(number) if number == self.turn_no => self.turn(out),
            Timer::Turn(_) => {}
            Timer::Http(job) => self.http_done(job, out),
            Timer::Send(message) => self.frontend.detokenize(message, &self.config, out),
            Timer::Detokenized(message) => self.frontend.emit(message, &self.config, out),
            Timer::Sent(id) => self.sent(id, out),
            Timer::Peer(word) => self.peer(word, out),
            Timer::Gone(id) => self.gone(id, out),
            Timer::Health(key, asked) => self.health(key, asked, out),
            Timer::NoHandshake(id) => {
                self.fail_handshake(id, "Could not fetch prefill parallel info from the bootstrap server", out);
            }
            Timer::Heartbeat(prefill) => self.lost_prefill(prefill, out),
        }
    }

    /// Makes the loop come round now if it sleeps.
    pub(super) fn wake(&mut self, out: &mut Out<'_>) {
        if self.loop_state == Loop::Idle {
            self.set_turn(out.now, out);
        }
    }

    fn set_turn(&mut self, at: Moment, out: &mut Out<'_>) {
        self.turn_no += 1;
        self.loop_state = Loop::Set;
        out.at(at, Timer::Turn(self.turn_no));
    }

    /// One turn of the scheduler's loop: results of the last batch, what came in, queues, the next batch.
    fn turn(&mut self, out: &mut Out<'_>) {
        let passed = out.now.since(self.last_turn).as_secs_f64();
        self.last_turn = out.now;
        self.again = false;
        self.loop_state = Loop::Set;
        let mut worked = false;
        for rank in 0..self.ranks.len() {
            self.ranks[rank].stats.running_seconds += self.ranks[rank].running.len() as f64 * passed;
            match std::mem::take(&mut self.ranks[rank].work) {
                Work::Idle => continue,
                Work::Prefill(chunks) => self.prefilled(rank, &chunks, out),
                Work::Decode => self.decoded(rank, out),
            }
            worked = true;
        }
        if worked {
            self.steps += 1;
        }
        while let Some(item) = self.inbox.pop_front() {
            match item {
                Inbox::Request(id) => self.intake(id, out),
                Inbox::Control(control) => self.control(control, out),
            }
        }
        if self.dead {
            return;
        }
        if !self.paused {
            for rank in 0..self.ranks.len() {
                match self.config.role {
                    Role::Decode => self.decode_queues(rank, out),
                    Role::Prefill => self.prefill_queues(rank, out),
                    Role::Regular => {}
                }
            }
        }
        let step = if self.paused { None } else { self.form(out) };
        self.send_outbox(out);
        let stall = std::mem::take(&mut self.stall);
        if worked && !self.paused {
            self.publish(out.now);
        }
        match step {
            Some(step) => self.set_turn(out.now + stall + step, out),
            None if !stall.is_zero() || self.again => self.set_turn(out.now + stall, out),
            None => self.sleep(out),
        }
    }

    /// Forms each rank's work; the step's length is that of the longest.
    fn form(&mut self, out: &mut Out<'_>) -> Option<Duration> {
        let mut longest = None;
        for rank in 0..self.ranks.len() {
            let mut step = if self.config.role == Role::Decode { None } else { self.form_prefill(rank, out) };
            if step.is_none() && self.config.role != Role::Prefill {
                step = self.form_decode(rank, out);
            }
            longest = longest.max(step);
        }
        longest
    }

    /// Sends what the ranks have to say, one after the other: gathering R3 stalls the loop of all.
    fn send_outbox(&mut self, out: &mut Out<'_>) {
        for rank in 0..self.outbox.len() {
            if self.outbox[rank].outputs.is_empty() {
                continue;
            }
            let mut message = std::mem::take(&mut self.outbox[rank]);
            let raw: u64 = message
                .outputs
                .iter()
                .filter_map(|o| if let Output::Final(_, _, reply) = o { reply.r3 } else { None })
                .map(|r3| u64::from(r3.rows) * u64::from(self.config.r3.row_bytes))
                .sum();
            if self.config.r3.by_reference {
                self.stall += at_rate(raw, self.config.r3.scheduler_by_reference);
            } else {
                self.stall += at_rate(raw, self.config.r3.scheduler);
                message.raw = raw;
            }
            out.at(out.now + self.stall, Timer::Send(message));
        }
    }

    /// No work: the loop sleeps until something happens or a clock runs out.
    fn sleep(&mut self, out: &mut Out<'_>) {
        self.loop_state = Loop::Idle;
        if self.paused {
            return;
        }
        let next = (0..self.ranks.len()).filter_map(|rank| self.next_expiry(rank)).min();
        if let Some(at) = next {
            self.turn_no += 1;
            out.at(at, Timer::Turn(self.turn_no));
        }
    }

    fn http_done(&mut self, job: HttpJob, out: &mut Out<'_>) {
        if let Some(effect) = plain_effect(&job) {
            let current = match &effect {
                Effect::Chunk { key, .. } => self.keys.contains_key(key),
                _ => true,
            };
            if current {
                out.effect(effect);
            }
            return;
        }
        match job {
            HttpJob::Ingested(id) => self.ingested(id, out),
            HttpJob::Control(control) => self.front_control(control, out),
            HttpJob::Emit(key, mut reply, id) => {
                self.reqs.remove(&id);
                if self.keys.remove(&key).is_some() {
                    reply.times.emitted = out.now;
                    out.effect(Effect::Done { key, reply });
                }
            }
            HttpJob::Drop(id) => {
                self.reqs.remove(&id);
            }
            HttpJob::Chunk(..) | HttpJob::Answer(..) => {}
        }
    }

    /// Takes a request out of every queue, gives back what it holds, and sends its last word.
    pub(super) fn end(&mut self, id: ReqId, finish: Finish, out: &mut Out<'_>) {
        self.unqueue(id);
        let Some(req) = self.reqs.get_mut(&id) else { return };
        let (prefill, decode) = (self.config.role == Role::Prefill, self.config.role == Role::Decode);
        let r3 = if finish == Finish::Length && (!prefill || self.config.prefill_returns_r3) {
            req.r3(prefill, decode, &self.config.r3)
        } else {
            None
        };
        req.stage = Stage::Leaving;
        req.times.finished = out.now;
        if matches!(finish, Finish::Abort { .. }) {
            self.ranks[req.rank].counters.aborted += 1;
        }
        let key = req.key;
        let reply = Box::new(req.reply(finish, r3));
        let rank = req.rank;
        self.outbox[rank].outputs.push(Output::Final(id, key, reply));
        // What it held may be what the queues wait for; and outside a turn there is nobody to send its last word.
        self.again = true;
        self.wake(out);
    }

    pub(super) fn key(&self, key: Key) -> Option<ReqId> {
        self.keys.get(&key).copied()
    }

    pub(super) fn forget_key(&mut self, key: Key) {
        self.keys.remove(&key);
    }

    pub(super) fn hand_to_scheduler(&mut self, control: Control, out: &mut Out<'_>) {
        self.inbox.push_back(Inbox::Control(control));
        self.wake(out);
    }

    pub(super) fn answer(&mut self, key: Key, status: u16, out: &mut Out<'_>) {
        self.frontend.http(self.config.frontend.http_chunk, HttpJob::Answer(key, status), out);
    }

    pub(super) fn pause_frontend(&mut self) {
        self.frontend_paused = true;
    }

    pub(super) fn resume_frontend(&mut self, out: &mut Out<'_>) {
        self.frontend_paused = false;
        for id in std::mem::take(&mut self.held) {
            if let Some(req) = self.reqs.get_mut(&id) {
                req.stage = Stage::Inbox;
                self.inbox.push_back(Inbox::Request(id));
            }
        }
        self.wake(out);
    }

    /// Everything that is open is reset, everything that is held is gone.
    pub(super) fn die(&mut self, out: &mut Out<'_>) {
        let mut keys: Vec<Key> = self.keys.drain().map(|(key, _)| key).collect();
        keys.sort_unstable();
        for key in keys {
            out.effect(Effect::Reset { key });
        }
        let stats: Vec<_> = self.ranks.iter().map(|r| r.stats.clone()).collect();
        let (turn_no, next_req) = (self.turn_no + 1, self.next_req);
        *self = Self::new(self.config.clone(), 0, Arc::clone(&self.prefill_ranks));
        (self.turn_no, self.next_req, self.dead, self.last_turn) = (turn_no, next_req, true, out.now);
        for (rank, stats) in self.ranks.iter_mut().zip(stats) {
            rank.stats = stats;
        }
    }

    pub(super) fn revive(&mut self, out: &mut Out<'_>) {
        if self.dead {
            self.dead = false;
            self.publish(out.now);
        }
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead
    }

    /// The loop has its next turn set: a batch runs, or a stall.
    pub(super) fn is_busy(&self) -> bool {
        self.loop_state == Loop::Set
    }

    pub(super) fn is_decode(&self) -> bool {
        self.config.role == Role::Decode
    }

    /// The prefill rank that decode asks for a request (section 2): the explicit one, else `room % dp_size`.
    ///
    /// `None` when the address leads to no prefill engine; `Err` with the rank when it has no such rank.
    pub(super) fn resolve_prefill(
        &self,
        bootstrap: Bootstrap,
        explicit: Option<u16>,
    ) -> Option<Result<(EngineId, usize), u16>> {
        let prefill = bootstrap.prefill?;
        let ranks = self.prefill_ranks.get(usize::from(prefill.0)).copied().filter(|n| *n > 0)?;
        Some(match explicit {
            Some(rank) if rank >= ranks => Err(rank),
            Some(rank) => Ok((prefill, usize::from(rank))),
            None => Ok((prefill, (bootstrap.room % u64::from(ranks)) as usize)),
        })
    }

    pub(super) fn peer(&mut self, word: Peer, out: &mut Out<'_>) {
        match word {
            Peer::Hello(room) => self.hello(room, out),
            Peer::Metadata(room) => self.metadata(room, out),
            Peer::Again(ask) => {
                let id = self.admit_exchange(None, *ask, out.now);
                let cost = self.config.frontend.http_turn;
                self.frontend.http(cost, HttpJob::Ingested(id), out);
            }
            Peer::Computed(id) => self.computed(id, out),
            Peer::Arrived { request, cached_tokens, stuck } => self.arrived(request, cached_tokens, stuck, out),
            Peer::Failed { request, reason } => self.transfer_failed(request, &reason, out),
            Peer::Abort { rank, room } => self.decode_gave_up(rank, room, out),
            Peer::DecodeLost(decode) => self.lost_decode(decode, out),
        }
    }
}

/// The exchange that an event belongs to.
fn key_of(event: &Event) -> Option<Key> {
    match event {
        Event::Generate { key, .. }
        | Event::Abort { key, .. }
        | Event::Http { key }
        | Event::Scheduler { key }
        | Event::Loads { key }
        | Event::Health { key }
        | Event::Pause { key, .. }
        | Event::Continue { key }
        | Event::Flush { key } => Some(*key),
        Event::Disconnect { .. } | Event::Fault(_) => None,
    }
}
