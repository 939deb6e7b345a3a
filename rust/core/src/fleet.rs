//! Workers and ranks with everything that is known of them, and the trees that find the best rank.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::admission::{AdmissionConfig, WindowMode};
use crate::capacity::{Capacity, UNBOUNDED};
use crate::egress::Egress;
use crate::health::{Breaker, BreakerRule};
use crate::ledger::{Counted, Ledger};
use crate::load::RankReport;
use crate::reason::{Counters, Reason};
use crate::room::SplitMix;
use crate::service::Service;
use crate::time::Moment;
use crate::topology::{EngineFacts, RankId, Role, WorkerId, WorkerSpec};
use crate::tournament::Tournament;
use crate::window::{Supply, Window};

/// Load that one request adds to a prefill rank beside its tokens, in tokens: spreads tiny requests.
const TOKENS_PER_REQUEST: i64 = 32;
/// Bits of a score that tell equal ranks apart: which of them was bound to least recently.
const TURN_BITS: u32 = 39;
const LAST_TURN: u64 = (1 << TURN_BITS) - 1;
/// Turns of ranks that were never bound to are drawn at random below this.
const FIRST_TURN: u64 = 1 << 16;
/// A leak on a rank that sends no reports is forgotten after so many waiting timeouts.
const LEAK_TIMEOUTS: f64 = 2.0;

/// One registration.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) url: Arc<str>,
    pub(crate) role: Role,
    pub(crate) facts: EngineFacts,
    /// Rank slots, by rank.
    pub(crate) ranks: Vec<u32>,
    pub(crate) draining: bool,
    pub(crate) breaker: Breaker,
    pub(crate) egress: Egress,
    /// R3 bytes that may be about to leave it, as of the last tick.
    pub(crate) egress_limit: u64,
    /// No more R3 until some text has left.
    pub(crate) egress_full: bool,
    /// R3 of others waits for a request that was overtaken too often.
    pub(crate) egress_held: bool,
}

/// One rank.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) id: RankId,
    pub(crate) role: Role,
    pub(crate) worker: u32,
    /// Counts the uses of this slot: a permit of an earlier use touches nothing.
    pub(crate) generation: u32,
    pub(crate) live: bool,
    pub(crate) capacity: Capacity,
    pub(crate) ledger: Ledger,
    pub(crate) window: Window,
    pub(crate) service: Service,
    pub(crate) report: Option<RankReport>,
    /// Requests that the state slots were seen to hold, lowered by errors.
    pub(crate) learned: i64,
    /// Why it takes nothing; [`Reason::Bound`] when it does.
    pub(crate) closed: Reason,
    /// Kept for a request that was overtaken too often.
    pub(crate) held: bool,
    /// Rises with each binding of the fleet; that of the last one to this rank.
    pub(crate) turn: u64,
}

/// What is free on a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Free {
    pub(crate) rows: i64,
    pub(crate) metadata: i64,
    pub(crate) mamba: i64,
    pub(crate) window: i64,
    pub(crate) kv: i64,
}

impl Rank {
    /// Free amounts of a decode or regular rank (architecture section 4).
    pub(crate) fn free(&self) -> Free {
        let held = self.ledger.occupied();
        let c = &self.capacity;
        let less = |limit: i64, used: i64| if limit == UNBOUNDED { UNBOUNDED } else { limit - used };
        let mut mamba = less(c.mamba.min(self.learned), held.open);
        if c.mamba == UNBOUNDED
            && let Some((free, own_then)) =
                self.report.as_ref().and_then(|r| r.mamba_free).zip(self.ledger.own_at_report())
        {
            // The pool is unknown: what the report says is free, less what was sent since.
            let sent = (self.ledger.own().open - own_then).max(0) + self.ledger.leaked().open;
            mamba = mamba.min(i64::from(free) / c.mamba_per_request - sent);
        }
        let mut kv = if held.open == 0 { less(c.kv_pool, held.kv) } else { less(c.kv_limit, held.kv) };
        if self.role == Role::Decode
            && held.open > 0
            && let Some(used) = self.ledger.kv_in_use()
        {
            // What is used, and the room that decode keeps free for each request that it has (engine-protocol 3.1): answers
            // that outgrow what was reserved for them close the rank before the engine does.
            kv = kv.min(less(c.kv_limit, used + c.reserved_decode * held.open));
        }
        Free {
            rows: less(c.rows, held.open),
            metadata: less(c.metadata, held.transfer),
            mamba,
            window: less(self.window.size(), held.transfer),
            kv,
        }
    }

    /// Uncached tokens before a prefill rank.
    pub(crate) fn queued_tokens(&self) -> i64 {
        self.ledger.occupied().uncached
    }
}

/// Two trees of one side: for requests without R3 and with it.
#[derive(Debug, Default)]
pub(crate) struct Side {
    pub(crate) plain: Tournament,
    pub(crate) r3: Tournament,
}

impl Side {
    pub(crate) fn tree(&self, r3: bool) -> &Tournament {
        if r3 { &self.r3 } else { &self.plain }
    }
}

/// What of the settings the fleet needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) window: WindowMode,
    pub(crate) kv_margin: f64,
    pub(crate) alpha: f64,
    pub(crate) beta: f64,
    pub(crate) stale_after: Duration,
    pub(crate) breaker: BreakerRule,
}

impl Rule {
    pub(crate) fn of(config: &AdmissionConfig) -> Self {
        Self {
            window: config.window,
            kv_margin: config.kv_margin,
            alpha: config.alpha,
            beta: config.beta,
            stale_after: config.stale_after,
            breaker: BreakerRule { threshold: config.breaker_threshold, open_for: config.breaker_open_for },
        }
    }

    /// A regular engine queues without a clock: its rows are the bound, and failures shrink it.
    fn mode_of(&self, role: Role, capacity: &Capacity) -> WindowMode {
        match role {
            Role::Regular => WindowMode::Static(u32::try_from(capacity.rows).unwrap_or(u32::MAX)),
            _ => self.window,
        }
    }

    pub(crate) fn unbounded(&self) -> bool {
        matches!(self.window, WindowMode::Unbounded)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) rule: Rule,
    pub(crate) workers: Vec<Option<Worker>>,
    by_id: HashMap<WorkerId, u32>,
    next_id: u64,
    pub(crate) ranks: Vec<Rank>,
    /// Slots that may be used again.
    free_slots: Vec<u32>,
    /// Slots of removed ranks that the affinity may still name.
    pub(crate) retired: Vec<u32>,
    pub(crate) prefill: Side,
    pub(crate) decode: Side,
    /// Registered workers, by role.
    registered: [usize; 3],
    /// Closed ranks by reason, of prefill and of the other side.
    pub(crate) closed: [Counters; 2],
    random: SplitMix,
    /// The next binding's, see [`Rank::turn`].
    next_turn: u64,
    /// Requests that decode has slots for now or within a tau, as of the last tick.
    pub(crate) appetite: f64,
    /// Something became possible since the last look at the queue.
    pub(crate) improved: bool,
    /// Some request that waits may fit no rank any more.
    pub(crate) shrank: bool,
}

impl Fleet {
    pub(crate) fn new(config: &AdmissionConfig) -> Self {
        Self {
            rule: Rule::of(config),
            workers: Vec::new(),
            by_id: HashMap::new(),
            next_id: 1,
            ranks: Vec::new(),
            free_slots: Vec::new(),
            retired: Vec::new(),
            prefill: Side::default(),
            decode: Side::default(),
            registered: [0; 3],
            closed: [Counters::default(), Counters::default()],
            random: SplitMix::new(config.seed ^ 0x5eed),
            next_turn: FIRST_TURN,
            appetite: 0.0,
            improved: false,
            shrank: false,
        }
    }

    /// Prefill and decode rather than regular.
    pub(crate) fn is_pd(&self) -> bool {
        self.registered[Role::Prefill as usize] + self.registered[Role::Decode as usize] > 0
    }

    pub(crate) fn registered(&self, role: Role) -> usize {
        self.registered[role as usize]
    }

    pub(crate) fn worker(&self, id: WorkerId) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    /// The rank in a slot, if it still is the same one.
    pub(crate) fn at(&mut self, slot: u32, generation: u32) -> Option<&mut Rank> {
        self.ranks.get_mut(slot as usize).filter(|r| r.live && r.generation == generation)
    }

    /// Live workers of a role.
    pub(crate) fn of_role(&self, role: Role) -> impl Iterator<Item = &Worker> {
        self.workers.iter().flatten().filter(move |w| w.role == role)
    }

    /// Whether this is the only worker of its role that takes requests.
    pub(crate) fn is_last(&self, index: u32) -> bool {
        let Some(Some(worker)) = self.workers.get(index as usize) else { return false };
        !self.of_role(worker.role).any(|w| w.id != worker.id && w.breaker.admits() && !w.draining)
    }

    pub(crate) fn add(&mut self, spec: WorkerSpec, now: Moment) -> WorkerId {
        let id = WorkerId(self.next_id);
        self.next_id += 1;
        let index = self.workers.iter().position(Option::is_none).unwrap_or_else(|| {
            self.workers.push(None);
            self.workers.len() - 1
        }) as u32;
        let was_pd = self.is_pd();
        self.registered[spec.role as usize] += 1;
        let mut ranks = Vec::with_capacity(usize::from(spec.ranks.max(1)));
        for rank in 0..spec.ranks.max(1) {
            let capacity = Capacity::of(spec.role, &spec.facts, None, self.rule.kv_margin);
            let fresh = Rank {
                id: RankId { worker: id, rank },
                role: spec.role,
                worker: index,
                generation: 1,
                live: true,
                capacity,
                ledger: Ledger::new(spec.facts.reports_load),
                window: Window::new(now, self.rule.mode_of(spec.role, &capacity)),
                service: Service::default(),
                report: None,
                learned: UNBOUNDED,
                closed: Reason::Mode,
                held: false,
                // Several routers before the same engines must not all begin with the same rank and go on in step.
                turn: self.random.next() % FIRST_TURN,
            };
            self.closed[side(spec.role)].add(Reason::Mode);
            let slot = if let Some(slot) = self.free_slots.pop() {
                let place = &mut self.ranks[slot as usize];
                *place = Rank { generation: place.generation.wrapping_add(1), ..fresh };
                slot
            } else {
                self.ranks.push(fresh);
                (self.ranks.len() - 1) as u32
            };
            ranks.push(slot);
        }
        for tree in [&mut self.prefill.plain, &mut self.prefill.r3, &mut self.decode.plain, &mut self.decode.r3] {
            tree.grow(self.ranks.len());
        }
        let egress = Egress::default();
        let egress_limit = Self::egress_limit(self.rule.beta, &spec.facts, &egress);
        self.workers[index as usize] = Some(Worker {
            id,
            url: spec.url,
            role: spec.role,
            facts: spec.facts,
            ranks,
            draining: false,
            breaker: Breaker::default(),
            egress,
            egress_limit,
            egress_full: false,
            egress_held: false,
        });
        self.by_id.insert(id, index);
        if was_pd == self.is_pd() {
            self.update_worker(index, now);
        } else {
            self.refresh_all(now);
        }
        id
    }

    pub(crate) fn remove(&mut self, id: WorkerId, now: Moment) -> Option<Worker> {
        let index = self.by_id.remove(&id)?;
        let worker = self.workers.get_mut(index as usize)?.take()?;
        let was_pd = self.is_pd();
        self.registered[worker.role as usize] -= 1;
        self.shrank = true;
        for &slot in &worker.ranks {
            let rank = &mut self.ranks[slot as usize];
            rank.live = false;
            rank.generation = rank.generation.wrapping_add(1);
            if rank.closed != Reason::Bound {
                self.closed[side(rank.role)].remove(rank.closed);
            }
            for tree in [&mut self.prefill.plain, &mut self.prefill.r3, &mut self.decode.plain, &mut self.decode.r3] {
                tree.set(slot as usize, 0, 0);
            }
            self.retired.push(slot);
        }
        if was_pd != self.is_pd() {
            self.refresh_all(now);
        }
        Some(worker)
    }

    /// Nothing names retired slots any more: they may be used again.
    pub(crate) fn reuse_retired(&mut self) {
        self.free_slots.append(&mut self.retired);
    }

    pub(crate) fn set_facts(&mut self, index: u32, facts: EngineFacts, now: Moment) {
        let Some(Some(worker)) = self.workers.get_mut(index as usize) else { return };
        for &slot in &worker.ranks {
            let rank = &mut self.ranks[slot as usize];
            let capacity = Capacity::of(rank.role, &facts, rank.report.as_ref(), self.rule.kv_margin);
            self.shrank |= capacity.holds_less_than(&rank.capacity);
            rank.capacity = capacity;
            rank.ledger.set_recording(facts.reports_load, now);
            let slots = |f: &EngineFacts| (f.mamba_slots, f.mamba_slots_per_request);
            if slots(&facts) != slots(&worker.facts) {
                rank.learned = UNBOUNDED;
            }
        }
        worker.facts = facts;
        self.update_worker(index, now);
    }

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

    /// Everything of one worker's ranks anew.
    pub(crate) fn update_worker(&mut self, index: u32, now: Moment) {
        for rank in 0.. {
            let Some(Some(worker)) = self.workers.get(index as usize) else { return };
            let Some(&slot) = worker.ranks.get(rank) else { return };
            self.refresh(slot, now);
        }
    }

    fn refresh_all(&mut self, now: Moment) {
        for slot in 0..self.ranks.len() {
            self.refresh(slot as u32, now);
        }
    }

    /// Why the rank takes nothing, or its score and room.
    fn judge(&self, rank: &Rank, worker: &Worker, now: Moment) -> Result<(u32, i64), Reason> {
        if (rank.role == Role::Regular) == self.is_pd() {
            return Err(Reason::Mode);
        }
        if worker.draining {
            return Err(Reason::Draining);
        }
        if !worker.breaker.admits() {
            return Err(Reason::Ejected);
        }
        let verdict =
            if rank.role == Role::Prefill { self.judge_prefill(rank) } else { self.judge_decode(rank, worker, now) };
        // Last, so that it says that the rank would be open.
        if rank.held && verdict.is_ok() { Err(Reason::Held) } else { verdict }
    }

    fn judge_decode(&self, rank: &Rank, worker: &Worker, now: Moment) -> Result<(u32, i64), Reason> {
        if worker.facts.reports_load && self.is_stale(rank, now) {
            return Err(Reason::Stale);
        }
        if rank.report.as_ref().is_some_and(|r| r.retracted.unwrap_or(0) > 0) {
            return Err(Reason::Retracted);
        }
        let free = rank.free();
        for (amount, reason) in [
            (free.rows, Reason::Rows),
            (free.metadata, Reason::Metadata),
            (free.mamba, Reason::Mamba),
            (free.kv, Reason::Kv),
            (free.window, Reason::Window),
        ] {
            if amount <= 0 {
                return Err(reason);
            }
        }
        let c = &rank.capacity;
        let part = |free: i64, of: i64| if of == UNBOUNDED { 1.0 } else { free as f64 / of.max(1) as f64 };
        let headroom = part(free.rows, c.rows).min(part(free.kv, c.kv_pool)).min(part(free.mamba, c.mamba));
        Ok(((headroom.clamp(0.0, 1.0) * f64::from(1u32 << 24)) as u32 + 1, free.kv))
    }

    fn judge_prefill(&self, rank: &Rank) -> Result<(u32, i64), Reason> {
        let held = rank.ledger.occupied();
        let queued = held.uncached;
        let room = if self.rule.unbounded() {
            i64::MAX
        } else {
            if rank.capacity.metadata != UNBOUNDED && held.open >= rank.capacity.metadata {
                return Err(Reason::Metadata);
            }
            let patience = self.rule.alpha * rank.capacity.waiting_timeout;
            let credit = rank.service.credit(held.transfer, queued, rank.capacity.chunk, patience);
            if credit <= 0 {
                return Err(if queued < 2 * rank.capacity.chunk { Reason::PrefillWait } else { Reason::Prefill });
            }
            credit
        };
        let load = (queued + TOKENS_PER_REQUEST * held.open).clamp(0, 1 << 24);
        Ok(((1 << 24) - load as u32 + 1, room))
    }

    /// Whether the rank's load is not known any more.
    pub(crate) fn is_stale(&self, rank: &Rank, now: Moment) -> bool {
        rank.report.as_ref().is_none_or(|r| now.since(r.measured_at) > self.rule.stale_after)
    }

    /// Puts a rank's state into the trees.
    pub(crate) fn refresh(&mut self, slot: u32, now: Moment) {
        let rank = &self.ranks[slot as usize];
        if !rank.live {
            return;
        }
        let Some(Some(worker)) = self.workers.get(rank.worker as usize) else { return };
        let verdict = self.judge(rank, worker, now);
        let r3_open = !worker.egress_full && !worker.egress_held;
        let (side_index, leaf) = (side(rank.role), slot as usize);
        let trees = if side_index == 0 { &mut self.prefill } else { &mut self.decode };
        let (reason, score, room) = match verdict {
            // Of equal ranks the one that was bound to least recently is the best, so that each gets the same share.
            Ok((score, room)) => {
                (Reason::Bound, u64::from(score) << TURN_BITS | (LAST_TURN - rank.turn.min(LAST_TURN)), room)
            }
            Err(reason) => (reason, 0, 0),
        };
        let old = trees.plain.score(leaf) >> TURN_BITS;
        let old_r3 = trees.r3.score(leaf) > 0;
        self.improved |=
            score >> TURN_BITS > old || (score > 0 && (trees.plain.room(leaf) < Some(room) || (r3_open && !old_r3)));
        // The request that the rank is kept for may fit now.
        self.improved |= reason == Reason::Held;
        trees.plain.set(leaf, score, room);
        trees.r3.set(leaf, if r3_open { score } else { 0 }, room);
        let rank = &mut self.ranks[leaf];
        if rank.closed != reason {
            let counters = &mut self.closed[side_index];
            if rank.closed != Reason::Bound {
                counters.remove(rank.closed);
            }
            if reason != Reason::Bound {
                counters.add(reason);
            }
            rank.closed = reason;
        }
    }

    /// A rank is bound to: every other that is equal to it goes before it from now on.
    pub(crate) fn take_turn(&mut self, slot: u32) {
        if let Some(rank) = self.ranks.get_mut(slot as usize) {
            rank.turn = self.next_turn;
            self.next_turn += 1;
        }
    }

    /// The R3 bytes that may be about to leave a worker: a look at its quantiles, so once a tick rather than at each decision.
    fn egress_limit(beta: f64, facts: &EngineFacts, egress: &Egress) -> u64 {
        let timeout = facts.waiting_timeout.unwrap_or(crate::capacity::DEFAULT_WAITING_TIMEOUT);
        egress.limit(beta * timeout.as_secs_f64())
    }

    /// R3 text left a worker.
    pub(crate) fn emitted(&mut self, index: u32, bytes: u64, took: Duration, now: Moment) {
        if let Some(Some(worker)) = self.workers.get_mut(index as usize) {
            worker.egress.emitted(bytes, took, now);
            if worker.egress.is_guessed() {
                worker.egress_limit = Self::egress_limit(self.rule.beta, &worker.facts, &worker.egress);
            }
        }
    }

    /// Sees whether a worker's R3 account became full or free again.
    pub(crate) fn check_egress(&mut self, index: u32, now: Moment) {
        let Some(Some(worker)) = self.workers.get(index as usize) else { return };
        let full = worker.egress.outstanding() > 0 && worker.egress.outstanding() >= worker.egress_limit;
        self.improved |= worker.egress_held;
        if full != worker.egress_full {
            if let Some(Some(worker)) = self.workers.get_mut(index as usize) {
                worker.egress_full = full;
            }
            self.update_worker(index, now);
        }
    }

    /// The commonest reason for which a side is closed.
    pub(crate) fn why_closed(&self, side: usize) -> Reason {
        let (reason, count) = self.closed[side]
            .iter()
            .fold((Reason::NoWorkers, 0), |best, (r, n)| if n > best.1 { (r, n) } else { best });
        if count == 0 { Reason::NoWorkers } else { reason }
    }

    /// Windows, rates, breakers, stale reports: everything that time alone changes. `supply` is prefill's measured flow.
    pub(crate) fn tick(&mut self, now: Moment, flow: Option<f64>, tau: Option<f64>) {
        for index in 0..self.workers.len() {
            let Some(worker) = &mut self.workers[index] else { continue };
            worker.egress.update(now, worker.egress_limit);
            worker.egress_limit = Self::egress_limit(self.rule.beta, &worker.facts, &worker.egress);
            worker.breaker.tick(now);
            self.check_egress(index as u32, now);
        }
        let window_tau = tau.unwrap_or(1.0);
        let appetite = |rank: &Rank| {
            let delivered = rank.ledger.own().open - rank.ledger.own().transfer;
            let free = (rank.capacity.running - delivered).max(0) as f64;
            (free, rank.window.completions() * window_tau + free)
        };
        let hungry: f64 = self
            .ranks
            .iter()
            .filter(|r| r.live && r.role == Role::Decode && takes(r.closed))
            .map(|r| appetite(r).1)
            .sum();
        self.appetite = 0.0;
        for slot in 0..self.ranks.len() {
            let rank = &self.ranks[slot];
            if !rank.live {
                continue;
            }
            if rank.role == Role::Decode && takes(rank.closed) {
                let free = rank.free();
                self.appetite += free.rows.min(free.mamba).max(0) as f64 + rank.window.completions() * window_tau;
            }
            match rank.role {
                Role::Prefill => self.ranks[slot].service.update(now),
                Role::Decode => {
                    let (free_slots, wants) = appetite(rank);
                    let share = flow.map(|f| if hungry > 0.0 { f * wants / hungry } else { f });
                    let mode = self.rule.window;
                    if rank.free().window <= 0 {
                        // Full for as long as it is, not at the one moment at which it became so.
                        self.ranks[slot].window.was_reached();
                    }
                    self.ranks[slot].window.update(now, mode, Supply { share, tau, free_slots });
                }
                Role::Regular => {
                    let mode = self.rule.mode_of(rank.role, &rank.capacity);
                    self.ranks[slot].window.update(now, mode, Supply::default());
                }
            }
            let rank = &mut self.ranks[slot];
            let reports = matches!(self.workers.get(rank.worker as usize), Some(Some(w)) if w.facts.reports_load);
            if !reports && rank.ledger.leaked().open > 0 {
                let ns = (LEAK_TIMEOUTS * rank.capacity.waiting_timeout * 1e9) as u64;
                rank.ledger.expire_leaks(Moment(now.0.saturating_sub(ns)));
            }
            self.refresh(slot as u32, now);
        }
    }
}

/// Whether a rank that is closed for `reason` takes requests in the course of things.
pub(crate) fn takes(reason: Reason) -> bool {
    !matches!(reason, Reason::Mode | Reason::Draining | Reason::Ejected | Reason::Stale)
}

/// 0 for prefill, 1 for decode and regular.
pub(crate) fn side(role: Role) -> usize {
    usize::from(role != Role::Prefill)
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
