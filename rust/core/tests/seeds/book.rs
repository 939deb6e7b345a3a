//! The harness's own books: what the router was told, what it bound and what it let go, kept apart from the core's ledgers.
use std::collections::{BTreeMap, HashSet, VecDeque};

use r3router_core::admission::{AdmissionConfig, Request, Ticket};
use r3router_core::load::RankReport;
use r3router_core::policy::Targets;
use r3router_core::topology::{EngineFacts, RankId, Role, WorkerId};

use crate::engines::Place;
use crate::plan::{Ns, SEC};

/// A broken promise: which one, and the numbers.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) invariant: &'static str,
    pub(crate) text: String,
}

/// Refuses a step of the run.
pub(crate) fn broken<T>(invariant: &'static str, text: String) -> Result<T, Violation> {
    Err(Violation { invariant, text })
}

/// A worker as the router knows it.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) url: std::sync::Arc<str>,
    pub(crate) role: Role,
    pub(crate) since: Ns,
    pub(crate) facts: EngineFacts,
    pub(crate) registered: bool,
    pub(crate) draining: bool,
    /// Something untrue or late was said of it, or it failed: nothing is promised about when it is chosen.
    pub(crate) tainted: bool,
    /// Failures that may charge the breaker, since the last success.
    pub(crate) charged: u32,
    pub(crate) connect_failed: Option<Ns>,
    pub(crate) ranks: Vec<Rank>,
}

/// A rank as the router knows it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rank {
    pub(crate) report: Option<(Ns, RankReport)>,
    /// Attempts that are open here, or ended after the last report.
    pub(crate) attempts: Vec<usize>,
    /// Reports in a row that showed nothing at all; a few are needed before load of others is surely forgotten.
    pub(crate) empty_reports: u32,
    /// After an engine said that slots ran out with this many of ours on it.
    pub(crate) mamba_ran_out: Option<u32>,
}

/// An attempt that was bound.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) prefill: Option<Place>,
    pub(crate) decode: Place,
    pub(crate) prompt: u64,
    pub(crate) max_new: u64,
    /// KV that decode reserves, by the facts at the bind.
    pub(crate) need: u64,
    pub(crate) arena: u64,
    pub(crate) r3: bool,
    pub(crate) no_prefix: bool,
    pub(crate) bound: Ns,
    pub(crate) delivered: Option<Ns>,
    pub(crate) prefill_ended: Option<Ns>,
    pub(crate) decode_ended: Option<Ns>,
    pub(crate) finished: Option<Ns>,
    /// The delivery deadline passed: the slot is off the budget until a report says otherwise.
    pub(crate) leaked: bool,
    /// The router may still count the leak: no report that it must believe has cleared it.
    pub(crate) lingers: bool,
}

impl Attempt {
    /// When decode's reservation ended; a leak holds on.
    pub(crate) fn decode_released(&self) -> Option<Ns> {
        if self.leaked { None } else { self.decode_ended.or(self.finished) }
    }

    pub(crate) fn prefill_released(&self) -> Option<Ns> {
        self.prefill_ended.or(self.finished)
    }

    /// When its KV stopped being in transfer.
    pub(crate) fn transfer_ended(&self) -> Option<Ns> {
        if self.leaked { None } else { self.delivered.or(self.decode_ended).or(self.finished) }
    }
}

/// A request that waits.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) ticket: Ticket,
    pub(crate) call: usize,
    pub(crate) seq: u64,
    pub(crate) prompt: u64,
    pub(crate) max_new: u64,
    pub(crate) arena: u64,
    pub(crate) r3: bool,
    pub(crate) texts: (u64, u64),
    pub(crate) no_prefix: bool,
    pub(crate) body: u64,
    pub(crate) avoid: Vec<RankId>,
    pub(crate) deadline: Ns,
    pub(crate) since: Ns,
    /// Later requests that were bound before it: of its own key, and of others while it was the head of its key.
    pub(crate) overtaken: u32,
    /// Requests of any kind that were bound while this waited.
    pub(crate) passed: u32,
    pub(crate) targets: Targets,
    /// Since when an idle pair could take it.
    pub(crate) idle_since: Option<Ns>,
}

/// Whether a report shows no request and no token.
fn is_empty(r: &RankReport) -> bool {
    let nothing = |n: Option<u32>| n.is_none_or(|n| n == 0);
    nothing(r.running)
        && nothing(r.waiting_total)
        && nothing(r.prealloc)
        && nothing(r.transfer)
        && nothing(r.retracted)
        && nothing(r.bootstrap)
        && nothing(r.inflight)
        && r.used_tokens.is_none_or(|n| n == 0)
        && r.waiting_uncached_tokens.is_none_or(|n| n == 0)
}

/// Everything that the harness holds against the router.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) config: AdmissionConfig,
    pub(crate) workers: Vec<Worker>,
    pub(crate) attempts: Vec<Attempt>,
    /// By (retry first, key), in order of arrival.
    pub(crate) waiting: BTreeMap<(bool, u64), VecDeque<Waiting>>,
    pub(crate) queued: usize,
    pub(crate) queued_bytes: u64,
    pub(crate) arena: u64,
    pub(crate) rooms: HashSet<u64>,
    pub(crate) gone: HashSet<Ticket>,
    pub(crate) paused: Option<Ns>,
    pub(crate) seq: u64,
    pub(crate) bound: u64,
    /// Keys that were ever used; bounds how long a fair queue takes to come around.
    pub(crate) keys: HashSet<u64>,
}

impl Book {
    pub(crate) fn new(config: AdmissionConfig) -> Self {
        Self {
            config,
            workers: Vec::new(),
            attempts: Vec::new(),
            waiting: BTreeMap::new(),
            queued: 0,
            queued_bytes: 0,
            arena: 0,
            rooms: HashSet::new(),
            gone: HashSet::new(),
            paused: None,
            seq: 0,
            bound: 0,
            keys: HashSet::new(),
        }
    }

    pub(crate) fn place(&self, id: RankId) -> Option<Place> {
        let worker = self.workers.iter().position(|w| w.id == id.worker)?;
        (usize::from(id.rank) < self.workers[worker].ranks.len()).then_some((worker, usize::from(id.rank)))
    }

    pub(crate) fn rank(&self, (w, r): Place) -> &Rank {
        &self.workers[w].ranks[r]
    }

    pub(crate) fn registered(&self, role: Role) -> impl Iterator<Item = &Worker> {
        self.workers.iter().filter(move |w| w.registered && w.role == role)
    }

    /// Takes a report as the newest truth, unless a newer one is known. A measurement from the future counts as now.
    pub(crate) fn report(&mut self, worker: usize, reports: &[RankReport], now: Ns) {
        for report in reports {
            let (lies, since) = (self.workers[worker].tainted, self.workers[worker].since);
            let Some(rank) = self.workers[worker].ranks.get_mut(usize::from(report.rank)) else { continue };
            let measured = report.measured_at.0.min(now);
            // What was measured before the registration was another process.
            if measured < since || rank.report.as_ref().is_some_and(|(old, _)| *old > measured) {
                continue;
            }
            rank.report = Some((measured, report.clone()));
            rank.empty_reports = if is_empty(report) { rank.empty_reports.saturating_add(1) } else { 0 };
            rank.mamba_ran_out = None;
            let attempts = std::mem::take(&mut rank.attempts);
            for attempt in &attempts {
                let a = &mut self.attempts[*attempt];
                let here = a.decode == (worker, usize::from(report.rank));
                if here && a.lingers && a.finished.is_some_and(|end| end <= measured) {
                    a.leaked = false;
                    a.lingers = lies;
                }
            }
            let keep = attempts.into_iter().filter(|i| {
                let a = &self.attempts[*i];
                let ended = if a.decode.0 == worker { a.decode_released() } else { a.prefill_released() };
                a.lingers || ended.is_none_or(|end| end >= measured)
            });
            self.workers[worker].ranks[usize::from(report.rank)].attempts = keep.collect();
        }
    }

    /// Frees what the engine's own waiting clock must have freed.
    pub(crate) fn forget_old_leaks(&mut self, now: Ns) {
        for a in &mut self.attempts {
            let timeout = self.workers[a.decode.0].facts.waiting_timeout.map_or(300 * SEC, |t| t.as_nanos() as u64);
            // The engine's clock ran from some moment after the bind; a router that waits twice as long is careful.
            if a.leaked && now >= a.bound + timeout {
                a.leaked = false;
            }
            let worker = &self.workers[a.decode.0];
            if a.lingers && !worker.facts.reports_load && a.finished.is_some_and(|end| now > end + 2 * timeout + SEC) {
                a.lingers = false;
            }
        }
    }

    pub(crate) fn queue(&mut self, ticket: Ticket, call: usize, request: &Request, now: Ns) {
        self.seq += 1;
        self.queued += 1;
        self.queued_bytes += request.body_bytes;
        self.keys.insert(request.key);
        self.waiting.entry((!request.retry, request.key)).or_default().push_back(Waiting {
            ticket,
            call,
            seq: self.seq,
            prompt: u64::from(request.prompt_tokens),
            max_new: u64::from(request.max_new_tokens.unwrap_or(self.config.default_max_new_tokens)),
            arena: request.r3.map_or(0, |r| r.arena),
            r3: request.r3.is_some_and(|r| r.prefill_text > 0 || r.decode_text > 0),
            texts: request.r3.map_or((0, 0), |r| (r.prefill_text, r.decode_text)),
            no_prefix: request.prefix.is_empty(),
            body: request.body_bytes,
            avoid: request.avoid.clone(),
            deadline: request.deadline.0,
            since: now,
            overtaken: 0,
            passed: 0,
            targets: request.targets,
            idle_since: None,
        });
    }

    pub(crate) fn find(&self, ticket: Ticket) -> Option<((bool, u64), usize)> {
        self.waiting.iter().find_map(|(k, q)| q.iter().position(|w| w.ticket == ticket).map(|at| (*k, at)))
    }

    pub(crate) fn unqueue(&mut self, ticket: Ticket) -> Option<Waiting> {
        let (class, at) = self.find(ticket)?;
        let queue = self.waiting.get_mut(&class)?;
        let waiting = queue.remove(at)?;
        if queue.is_empty() {
            self.waiting.remove(&class);
        }
        self.queued -= 1;
        self.queued_bytes -= waiting.body;
        self.gone.insert(ticket);
        Some(waiting)
    }

    pub(crate) fn pause(&mut self, on: bool, now: Ns) {
        match (self.paused, on) {
            (None, true) => self.paused = Some(now),
            (Some(start), false) => {
                for w in self.waiting.values_mut().flatten() {
                    w.deadline = w.deadline.saturating_add(now - start.max(w.since));
                }
                self.paused = None;
            }
            _ => {}
        }
    }

    pub(crate) fn bind(&mut self, waiting: &Waiting, prefill: Option<Place>, decode: Place, now: Ns) -> usize {
        let attempt = self.attempts.len();
        let need = self.need(decode.0, waiting.prompt);
        self.attempts.push(Attempt {
            need,
            prefill,
            decode,
            prompt: waiting.prompt,
            max_new: waiting.max_new,
            arena: waiting.arena,
            r3: waiting.r3,
            no_prefix: waiting.no_prefix,
            bound: now,
            delivered: None,
            prefill_ended: None,
            decode_ended: None,
            finished: None,
            leaked: false,
            lingers: false,
        });
        self.arena += waiting.arena;
        self.bound += 1;
        for (w, r) in prefill.into_iter().chain([decode]) {
            self.workers[w].ranks[r].attempts.push(attempt);
        }
        attempt
    }

    pub(crate) fn delivered(&mut self, attempt: usize, now: Ns) {
        self.attempts[attempt].delivered.get_or_insert(now);
    }

    pub(crate) fn leg_ended(&mut self, attempt: usize, role: Role, now: Ns) {
        let a = &mut self.attempts[attempt];
        let leg = if role == Role::Prefill { &mut a.prefill_ended } else { &mut a.decode_ended };
        leg.get_or_insert(now);
    }

    pub(crate) fn finish(&mut self, attempt: usize, leak: bool, now: Ns) {
        let a = &mut self.attempts[attempt];
        if a.finished.is_none() {
            a.finished = Some(now);
            a.leaked = leak && a.delivered.is_none() && a.decode_ended.is_none();
            a.lingers = a.leaked;
            self.arena -= a.arena;
        }
    }

    /// A failure of one role's leg; `charges` says whether it speaks against the engine.
    pub(crate) fn failed(&mut self, attempt: usize, role: Role, charges: bool) {
        let a = &self.attempts[attempt];
        let worker = match (role, a.prefill) {
            (Role::Prefill, Some((p, _))) => p,
            _ => a.decode.0,
        };
        // A transfer that fails cools the pair down: nothing is promised of either.
        for w in a.prefill.map(|p| p.0).into_iter().chain([a.decode.0]) {
            self.workers[w].tainted = true;
        }
        if charges {
            self.workers[worker].charged += 1;
        }
    }

    pub(crate) fn succeeded(&mut self, attempt: usize) {
        let a = &self.attempts[attempt];
        for w in a.prefill.map(|p| p.0).into_iter().chain([a.decode.0]) {
            self.workers[w].charged = 0;
        }
    }
}
