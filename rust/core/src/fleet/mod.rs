//! Workers and ranks with everything that is known of them, and the trees that find the best rank.
use std::collections::HashMap;
use std::time::Duration;

use crate::admission::{AdmissionConfig, WindowMode};
use crate::capacity::{Capacity, UNBOUNDED};
use crate::egress::Egress;
use crate::estimate::Fading;
use crate::health::{Breaker, BreakerRule};
use crate::ledger::Ledger;
use crate::reason::{Counters, Reason};
use crate::room::SplitMix;
use crate::service::Service;
use crate::time::Moment;
use crate::topology::{EngineFacts, RankId, Role, WorkerId, WorkerSpec};
use crate::tournament::Tournament;
use crate::window::Window;

mod judge;
mod rank;
mod report;
mod tick;

pub(crate) use rank::{Brief, Rank, Worker};

/// Turns of ranks that were never bound to are drawn at random below this.
const FIRST_TURN: u64 = 1 << 16;

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
    /// What choosing asks of many ranks, by slot.
    pub(crate) briefs: Vec<Brief>,
    /// What hashes of keys are mixed with, by slot: see [`crate::policy::name`].
    pub(crate) names: Vec<u64>,
    /// Slots that may be used again.
    free_slots: Vec<u32>,
    /// Slots of removed ranks that the affinity may still name.
    pub(crate) retired: Vec<u32>,
    pub(crate) prefill: Tournament,
    pub(crate) decode: Tournament,
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
            briefs: Vec::new(),
            names: Vec::new(),
            free_slots: Vec::new(),
            retired: Vec::new(),
            prefill: Tournament::default(),
            decode: Tournament::default(),
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
        let in_choice = |w: &Worker| w.breaker.admits() && !w.draining && !self.is_drained(w);
        !self.of_role(worker.role).any(|w| w.id != worker.id && in_choice(w))
    }

    /// Whether every rank of it was taken out of choice by a person.
    pub(crate) fn is_drained(&self, worker: &Worker) -> bool {
        worker.ranks.iter().all(|&slot| self.ranks[slot as usize].drained)
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
                drained: false,
                // Several routers before the same engines must not all begin with the same rank and go on in step.
                turn: self.random.next() % FIRST_TURN,
                given: Fading::default(),
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
        self.briefs.resize(self.ranks.len(), Brief::default());
        self.names.resize(self.ranks.len(), 0);
        for &slot in &ranks {
            self.briefs[slot as usize] = self.ranks[slot as usize].brief();
            self.names[slot as usize] = crate::policy::name(&spec.url, self.ranks[slot as usize].id.rank);
        }
        for tree in [&mut self.prefill, &mut self.decode] {
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
            for tree in [&mut self.prefill, &mut self.decode] {
                tree.set(slot as usize, 0, 0, false);
            }
            self.briefs[slot as usize] = Brief::default();
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

    /// The commonest reason for which a side is closed.
    pub(crate) fn why_closed(&self, side: usize) -> Reason {
        let (reason, count) = self.closed[side]
            .iter()
            .fold((Reason::NoWorkers, 0), |best, (r, n)| if n > best.1 { (r, n) } else { best });
        if count == 0 { Reason::NoWorkers } else { reason }
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
