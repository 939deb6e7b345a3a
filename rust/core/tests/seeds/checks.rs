//! The invariants on decisions and on what waits, each by the harness's own books.
use r3router_core::admission::{Binding, Request, Ticket, WindowMode};
use r3router_core::error::{Error, Kind};
use r3router_core::policy::{KEY_PATIENCE, Policy, Target, Targets};
use r3router_core::topology::Role;

use crate::book::{Book, Violation, Waiting, broken};
use crate::engines::Place;
use crate::plan::{MS, Ns};

/// Reports without load after which a rank is surely idle to the router.
const EMPTY_REPORTS: u32 = 3;

impl Book {
    /// What `submit` answered, before the request is put into the books.
    pub(crate) fn check_submit(&self, request: &Request, answer: Result<(), &Error>, now: Ns) -> Result<(), Violation> {
        let prompt = u64::from(request.prompt_tokens);
        let max_new = u64::from(request.max_new_tokens.unwrap_or(self.config.default_max_new_tokens));
        let arena = request.r3.map_or(0, |r| r.arena);
        let full = self.queued >= self.config.queue_max_requests
            || self.queued_bytes + request.body_bytes > self.config.queue_max_bytes;
        match answer {
            Ok(()) => {
                if self.surely_too_large(prompt) {
                    return broken("too-large", format!("a prompt of {prompt} was queued; no rank can ever hold it"));
                }
                if arena > self.config.arena_bytes {
                    return broken("arena", format!("{arena} arena bytes were queued, of {}", self.config.arena_bytes));
                }
                if full && !request.retry {
                    return broken(
                        "queue",
                        format!("{} requests and {} bytes wait already", self.queued, self.queued_bytes),
                    );
                }
            }
            Err(error) if error.kind == Kind::QueueTimeout && now >= request.deadline.0 => {}
            Err(error) => self.check_error(error, prompt, max_new, arena, full, request.targets)?,
        }
        Ok(())
    }

    fn check_error(
        &self,
        error: &Error,
        prompt: u64,
        max_new: u64,
        arena: u64,
        full: bool,
        targets: Targets,
    ) -> Result<(), Violation> {
        let named = || self.named(targets);
        let right = match error.kind {
            Kind::QueueFull => full,
            Kind::TooLargeForFleet => {
                !self.surely_fits(prompt, max_new)
                    || named().any(|place| {
                        let most = |at: Place| self.workers[at.0].facts.max_input_tokens;
                        place.is_none_or(|at| {
                            !self.roomy(at, prompt, max_new) || most(at).is_some_and(|most| prompt > most)
                        })
                    })
            }
            Kind::R3ArenaTooSmall => arena > self.config.arena_bytes,
            Kind::NoWorkers => {
                let out = |worker: &crate::book::Worker| !worker.registered || worker.draining || worker.tainted;
                !self.surely_workers() || named().any(|place| place.is_none_or(|at| out(&self.workers[at.0])))
            }
            _ => false,
        };
        if right { Ok(()) } else { broken("refusal", format!("refused for no reason of ours: {error}")) }
    }

    /// Each role that this fleet needs has a worker that nothing speaks against.
    fn surely_workers(&self) -> bool {
        let has = |role| self.registered(role).any(|w| !w.draining && !w.tainted);
        has(Role::Regular) || (has(Role::Prefill) && has(Role::Decode))
    }

    /// A waiting request was refused.
    pub(crate) fn check_refusal(&self, w: &Waiting, error: &Error, now: Ns) -> Result<(), Violation> {
        if error.kind == Kind::QueueTimeout {
            let late = now >= w.deadline && self.paused.is_none_or(|since| w.deadline <= since);
            if !late {
                return broken("deadline", format!("refused at {now}, deadline {}: {error}", w.deadline));
            }
            return Ok(());
        }
        self.check_error(error, w.prompt, w.max_new, w.arena, false, w.targets)
    }

    /// What a call names: a rank or a worker of each side, or one of them.
    pub(crate) fn targets(&self, number: u64) -> Targets {
        let target = |roles: [Role; 2], bits: u64| {
            let there: Vec<_> = self.workers.iter().filter(|w| w.registered && roles.contains(&w.role)).collect();
            let worker = there.get((bits % there.len().max(1) as u64) as usize)?;
            let rank = (bits >> 40) as u16 % worker.ranks.len() as u16;
            (bits >> 32 & 3 != 0).then_some(Target { worker: worker.id, rank: (bits >> 34 & 1 == 0).then_some(rank) })
        };
        Targets {
            prefill: target([Role::Prefill, Role::Prefill], number),
            back: target([Role::Decode, Role::Regular], number.rotate_left(23)),
        }
    }

    /// The places that are named, the first rank of a worker for a whole one; `None` for one that is not there.
    fn named(&self, targets: Targets) -> impl Iterator<Item = Option<Place>> + '_ {
        let id = |t: Target| r3router_core::topology::RankId { worker: t.worker, rank: t.rank.unwrap_or(0) };
        [targets.prefill, targets.back].into_iter().flatten().map(move |t| self.place(id(t)))
    }

    /// A binding, before it is put into the books. Gives the two places.
    pub(crate) fn check_binding(&mut self, b: &Binding, now: Ns) -> Result<(Waiting, Option<Place>, Place), Violation> {
        if self.gone.contains(&b.ticket) {
            return broken("cancelled", format!("{:?} was cancelled, refused or bound before", b.ticket));
        }
        let Some((class, at)) = self.find(b.ticket) else {
            return broken("cancelled", format!("{:?} was never submitted", b.ticket));
        };
        if self.paused.is_some() {
            return broken("paused", format!("{:?} was bound in a pause", b.ticket));
        }
        let (decode, prefill) = self.check_places(b)?;
        self.check_room(b, prefill)?;
        let w = self.waiting[&class][at].clone();
        let asked = |target: Option<Target>, id| target.is_none_or(|t: Target| t.names(id));
        if !asked(w.targets.back, b.decode) || b.prefill.is_some_and(|p| !asked(w.targets.prefill, p)) {
            return broken(
                "named",
                format!("{:?} names {:?} and went to {:?}, {:?}", b.ticket, w.targets, b.prefill, b.decode),
            );
        }
        // Inside a key only what does not fit may be overtaken; what needs no more of anything fits as well.
        let first = self.waiting[&class].range(..at).find(|e| self.fits_where(e, &w, prefill, decode));
        if let Some(first) = first {
            let (first, key) = (first.ticket, class.1);
            return broken(
                "fifo",
                format!("{:?} was bound before {first:?} of the same key {key}, which fits", b.ticket),
            );
        }
        if now > w.deadline {
            return broken("deadline", format!("{:?} was bound at {now}, deadline {}", b.ticket, w.deadline));
        }
        if self.arena + w.arena > self.config.arena_bytes {
            let limit = self.config.arena_bytes;
            return broken("arena", format!("{} + {} arena bytes of {limit}", self.arena, w.arena));
        }
        self.count_overtaken(&w, class)?;
        self.unqueue(b.ticket);
        Ok((w, prefill, decode))
    }

    fn check_places(&self, b: &Binding) -> Result<(Place, Option<Place>), Violation> {
        let Some(decode) = self.place(b.decode) else {
            return broken("pair", format!("{:?} does not exist", b.decode));
        };
        let prefill = match b.prefill {
            None => None,
            Some(id) => match self.place(id) {
                None => return broken("pair", format!("{id:?} does not exist")),
                some => some,
            },
        };
        let wanted = if prefill.is_some() { Role::Decode } else { Role::Regular };
        if self.workers[decode.0].role != wanted || prefill.is_some_and(|p| self.workers[p.0].role != Role::Prefill) {
            return broken("pair", format!("prefill {:?} with decode {:?} is not a whole pair", b.prefill, b.decode));
        }
        for (w, r) in prefill.into_iter().chain([decode]) {
            let worker = &self.workers[w];
            if !worker.registered || worker.draining {
                let state = if worker.registered { "draining" } else { "removed" };
                return broken("draining", format!("{}@{r} is {state} and was chosen", worker.url));
            }
        }
        Ok((decode, prefill))
    }

    fn check_room(&mut self, b: &Binding, prefill: Option<Place>) -> Result<(), Violation> {
        let Some((w, rank)) = prefill else {
            return if b.room == 0 { Ok(()) } else { broken("room", format!("room {} without prefill", b.room)) };
        };
        let ranks = self.workers[w].ranks.len() as u64;
        if b.room == 0 || b.room >= 1 << 63 {
            return broken("room", format!("room {} is out of range", b.room));
        }
        if b.room % ranks != rank as u64 {
            return broken("room", format!("room {} mod {ranks} is not rank {rank}", b.room));
        }
        if !self.rooms.insert(b.room) {
            return broken("room", format!("room {} was used before", b.room));
        }
        Ok(())
    }

    /// Whether an earlier request surely fits the places that a later one was given.
    fn fits_where(&self, e: &Waiting, later: &Waiting, prefill: Option<Place>, decode: Place) -> bool {
        let avoided = e.avoid.iter().filter_map(|id| self.place(*id)).any(|at| at == decode || Some(at) == prefill);
        let asked = |target: Option<Target>, (w, r): Place| {
            let id = r3router_core::topology::RankId { worker: self.workers[w].id, rank: r as u16 };
            target.is_none_or(|t| t.names(id))
        };
        // A request may wait for the rank of its key, which is another one for a request that is larger than some ranks, that
        // avoids some, or that names its own.
        let everywhere = |w: &Waiting| {
            self.workers.iter().enumerate().filter(|(_, worker)| worker.registered).all(|(i, worker)| {
                let most = worker.facts.max_input_tokens;
                most.is_none_or(|most| w.prompt <= most)
                    && (0..worker.ranks.len()).all(|r| self.roomy((i, r), w.prompt, w.max_new))
            })
        };
        let same_ranks =
            self.grace() == 0 || (e.targets == later.targets && e.avoid == later.avoid && everywhere(later));
        !avoided
            && same_ranks
            && asked(e.targets.back, decode)
            && prefill.is_none_or(|p| asked(e.targets.prefill, p))
            && e.no_prefix
            && later.no_prefix
            && e.prompt <= later.prompt
            && e.max_new <= later.max_new
            && e.arena <= later.arena
            && e.texts.0 <= later.texts.0
            && e.texts.1 <= later.texts.1
    }

    /// A new request was bound: whatever came before it was overtaken once more.
    fn count_overtaken(&mut self, bound: &Waiting, class: (bool, u64)) -> Result<(), Violation> {
        for w in self.waiting.values_mut().flatten() {
            w.passed += 1;
        }
        if !class.0 {
            return Ok(());
        }
        // Between keys the queue is fair, not FIFO: each other key may go a few times before a turn comes around. While a
        // rank is kept for a request, others go on elsewhere.
        let limit = self.config.max_overtakes * 2 + 8 * self.keys.len() as u32 + 64;
        for (other, queue) in &mut self.waiting {
            let reach = if *other == class { queue.len() } else { 1 };
            // Who names a worker waits for as long as that is closed.
            for w in queue.iter_mut().take(reach).filter(|w| w.seq < bound.seq && !w.targets.any()) {
                w.overtaken += 1;
                if w.overtaken > limit {
                    let (ticket, times) = (w.ticket, w.overtaken);
                    return broken("starved", format!("{ticket:?} was overtaken {times} times"));
                }
            }
        }
        Ok(())
    }

    /// The ranks just bound to are within what is known of them.
    pub(crate) fn check_capacity(
        &self,
        attempt: usize,
        w: &Waiting,
        on_the_way: u64,
        now: Ns,
    ) -> Result<(), Violation> {
        let a = &self.attempts[attempt];
        if !self.config.enabled {
            return Ok(());
        }
        self.check_decode(a.decode, w, now)?;
        if let WindowMode::Static(window) = self.config.window {
            let ours = self.rank(a.decode).attempts.iter().map(|i| &self.attempts[*i]);
            let ours = ours.filter(|o| o.decode == a.decode && o.transfer_ended().is_none()).count();
            if self.workers[a.decode.0].role == Role::Decode && ours > window.max(1) as usize {
                return broken("window", format!("{ours} in transfer, static window {window}"));
            }
        }
        for (worker, _) in a.prefill.into_iter().chain([a.decode]) {
            if self.workers[worker].connect_failed == Some(now) && self.config.breaker_threshold > 0 {
                let url = &self.workers[worker].url;
                return broken("connect", format!("{url} refused the connection at this moment and was chosen again"));
            }
        }
        match a.prefill {
            Some(_) if self.config.window == WindowMode::Unbounded => Ok(()),
            Some(prefill) => self.check_prefill(prefill, attempt, on_the_way, now),
            None => Ok(()),
        }
    }

    /// The router asks to be called again before the first deadline passes unseen.
    pub(crate) fn check_timer(&self, next: Option<Ns>) -> Result<(), Violation> {
        let first = self.waiting.values().flatten().map(|w| w.deadline).min().unwrap_or(Ns::MAX);
        // In a pause deadlines stand still. One nanosecond after is in time.
        if self.paused.is_none() && first != Ns::MAX && next.is_none_or(|next| next > first + 1) {
            return broken("timers", format!("the first deadline is {first}, the next poll is asked for at {next:?}"));
        }
        Ok(())
    }

    /// After a poll: nothing waits past its deadline, and nothing waits that an idle pair would take.
    pub(crate) fn check_waiting(&mut self, now: Ns) -> Result<(), Violation> {
        let verdict = self.check_idle(now);
        if let Ok(Some(idle)) = &verdict {
            for w in self.waiting.values_mut().flatten() {
                w.idle_since = if idle.contains(&w.ticket) { w.idle_since.or(Some(now)) } else { None };
            }
        }
        verdict.map(|_| ())
    }

    /// How long a request may wait although an idle pair holds it: for the rank of its key.
    fn grace(&self) -> Ns {
        let sticky = |policy: &Policy| matches!(policy, Policy::Manual | Policy::ConsistentHashing);
        // A tick later it is looked at again.
        if self.config.policies.of.iter().any(sticky) { KEY_PATIENCE.as_nanos() as u64 + 100 * MS } else { 0 }
    }

    /// The heads that an idle pair could take.
    fn check_idle(&self, now: Ns) -> Result<Option<Vec<Ticket>>, Violation> {
        let mut idle = Vec::new();
        if self.paused.is_some() || self.queued == 0 {
            return Ok(Some(idle));
        }
        for w in self.waiting.values().flatten() {
            if now > w.deadline {
                return broken("deadline", format!("{:?} waits at {now}, deadline {}", w.ticket, w.deadline));
            }
        }
        let retries = self.waiting.keys().any(|(new, _)| !*new);
        let heads = || self.waiting.values().filter_map(|q| q.front());
        // The queue may hold for a request that was overtaken often enough.
        if retries || self.waiting.values().flatten().any(|h| h.passed >= self.config.max_overtakes) {
            return Ok(Some(idle));
        }
        for head in heads() {
            let fits = self.idle_for(head, Role::Regular, now).is_some()
                || (self.idle_for(head, Role::Prefill, now).is_some()
                    && self.idle_for(head, Role::Decode, now).is_some());
            // One with a prefix may wait a little for the rank that has it.
            if fits && head.no_prefix && self.arena + head.arena <= self.config.arena_bytes {
                if now - head.idle_since.unwrap_or(now) >= self.grace() {
                    return broken("idle", format!("{:?} waits although an idle pair holds it", head.ticket));
                }
                idle.push(head.ticket);
            }
        }
        Ok(Some(idle))
    }

    /// A rank of a role that is surely idle, open and large enough.
    fn idle_for(&self, w: &Waiting, role: Role, now: Ns) -> Option<Place> {
        self.workers.iter().enumerate().filter(|(_, worker)| worker.role == role).find_map(|(i, worker)| {
            if !worker.registered || worker.draining || worker.tainted {
                return None;
            }
            let engine_has_r3 = || {
                (0..worker.ranks.len()).flat_map(|r| &worker.ranks[r].attempts).any(|a| {
                    let a = &self.attempts[*a];
                    a.r3 && a.finished.is_none()
                })
            };
            if w.r3 && engine_has_r3() {
                return None;
            }
            let small = worker.facts.max_input_tokens.is_none_or(|most| w.prompt <= most);
            let asked = |r: usize| {
                let id = r3router_core::topology::RankId { worker: worker.id, rank: r as u16 };
                w.targets.of(role).is_none_or(|t| t.names(id))
            };
            let ranks = (0..worker.ranks.len()).filter(|r| asked(*r)).map(|r| (i, r));
            ranks.into_iter().find(|place| small && self.idle(*place, w, now))
        })
    }

    fn idle(&self, place: Place, w: &Waiting, now: Ns) -> bool {
        let (worker, rank) = (&self.workers[place.0], self.rank(place));
        let avoided = w.avoid.iter().any(|id| self.place(*id) == Some(place));
        let open = |i: &usize| {
            let a = &self.attempts[*i];
            let released = if a.decode == place { a.decode_released() } else { a.prefill_released() };
            released.is_none() || a.finished.is_none()
        };
        if avoided || rank.attempts.iter().any(open) || !self.roomy(place, w.prompt, w.max_new) {
            return false;
        }
        let per = worker.facts.mamba_slots_per_request.unwrap_or(3);
        if worker.facts.mamba_slots.is_some_and(|slots| slots < per) || self.rows(place).is_some_and(|(r, _)| r == 0) {
            return false;
        }
        if !worker.facts.reports_load {
            return true;
        }
        let Some((_, r)) = rank.report.as_ref().filter(|_| self.fresh(place, now)) else { return false };
        rank.empty_reports >= EMPTY_REPORTS && r.mamba_free.is_none_or(|n| n >= per)
    }
}
