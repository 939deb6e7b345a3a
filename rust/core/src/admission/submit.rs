//! Requests come and go.
use super::{Admission, Request, Ticket};
use crate::error::{Error, Kind, Source};
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::Role;

/// When to come back after the queue was full: long enough to be worth it, short enough to keep the fleet busy.
const RETRY_AFTER: std::time::Duration = std::time::Duration::from_secs(1);

/// What a refusal for size, or for the want of the worker that was named, is counted as.
pub(super) fn refused_for(error: &Error) -> Reason {
    if error.kind == Kind::NoWorkers { Reason::NoWorkers } else { Reason::TooLarge }
}

impl Admission {
    /// Queues a request.
    ///
    /// # Errors
    /// At once when the queue is full, no worker of a role exists, or the request is larger than every rank.
    pub fn submit(&mut self, request: Request, now: Moment) -> Result<Ticket, Error> {
        self.take_returns(now);
        if !request.retry {
            self.retries.request();
        }
        self.check_workers(now)?;
        if let Some(error) = self.too_large(&request) {
            self.counters.add(refused_for(&error));
            return Err(error);
        }
        self.check_queue(&request)?;
        let paused_before = self.paused_for(now);
        let due =
            if request.deadline == Moment::NEVER { u64::MAX } else { request.deadline.0.saturating_sub(paused_before) };
        // A retry goes first, and a queue that was looked through to its end has room for another look.
        self.dirty |= request.retry || !self.cut_short;
        let index = self.queue.push(request, now, paused_before, due);
        Ok(Ticket(self.queue.ticket(index)))
    }

    /// Refuses what [`Admission::submit`] would refuse at once for its size or for want of workers, without queueing. For requests that
    /// are served in parts, so that no part is sent when another can never be.
    ///
    /// # Errors
    /// No worker of a role exists, or the request is larger than every rank.
    pub fn check(&mut self, request: &Request, now: Moment) -> Result<(), Error> {
        self.check_workers(now)?;
        match self.too_large(request) {
            Some(error) => {
                self.counters.add(refused_for(&error));
                Err(error)
            }
            None => Ok(()),
        }
    }

    /// Takes a waiting request out. Unknown tickets are ignored (it may have been bound a moment ago).
    pub fn cancel(&mut self, ticket: Ticket) {
        if let Some(index) = self.queue.find(ticket.0) {
            self.let_go(ticket.0, self.last_tick);
            self.queue.remove(index);
            self.counters.add(Reason::Cancelled);
            self.dirty = true;
        }
    }

    fn check_workers(&mut self, now: Moment) -> Result<(), Error> {
        let roles: &[Role] = if self.fleet.is_pd() { &[Role::Prefill, Role::Decode] } else { &[Role::Regular] };
        for &role in roles {
            let name = match (role, self.fleet.is_pd()) {
                (Role::Prefill, _) => "prefill",
                (Role::Decode, _) => "decode",
                (Role::Regular, _) => "regular (or prefill and decode)",
            };
            if self.fleet.registered(role) == 0 {
                self.counters.add(Reason::NoWorkers);
                return Err(Error::new(Kind::NoWorkers, Source::Router, format!("no {name} worker is registered"))
                    .with_limit(1.0, 0.0)
                    .advise(format!("register a {name} worker, by flag or by POST /workers"))
                    .retry_after(RETRY_AFTER));
            }
            if !self.config.enabled {
                continue;
            }
            let likely = self.fleet.ranks.get(self.fits_at[role as usize].get());
            let likely = likely.filter(|rank| rank.live && rank.role == role);
            let likely = likely.and_then(|rank| self.fleet.workers.get(rank.worker as usize)?.as_ref());
            if likely.is_some_and(|worker| worker.breaker.opens_at().is_none_or(|at| now >= at)) {
                continue;
            }
            let mut soonest: Option<Moment> = None;
            let mut all_open = true;
            for worker in self.fleet.of_role(role) {
                match worker.breaker.opens_at() {
                    Some(at) if now < at => soonest = Some(soonest.map_or(at, |s| s.min(at))),
                    _ => {
                        all_open = false;
                        break;
                    }
                }
            }
            if all_open && let Some(at) = soonest {
                self.counters.add(Reason::NoWorkers);
                let count = self.fleet.registered(role);
                return Err(Error::new(
                    Kind::NoWorkers,
                    Source::Router,
                    format!("all {count} {name} workers are out of choice after failures"),
                )
                .with_limit(1.0, 0.0)
                .advise("look at the engines' logs; each is tried again by itself after --cb-timeout-duration-secs")
                .retry_after(at.since(now)));
            }
        }
        Ok(())
    }

    /// A request that no rank could hold when idle would wait for ever.
    pub(super) fn too_large(&self, request: &Request) -> Option<Error> {
        if !self.config.enabled {
            return None;
        }
        if request.targets.any()
            && let Some(error) = self.target_error(request)
        {
            return Some(error);
        }
        let max_new = self.max_new(request);
        let pd = self.fleet.is_pd();
        if let Some(r3) = request.r3
            && r3.arena > self.config.arena_bytes
        {
            return Some(
                Error::new(
                    Kind::R3ArenaTooSmall,
                    Source::Client,
                    format!(
                        "the request's routed experts need {} bytes, the whole R3 arena has {}",
                        r3.arena, self.config.arena_bytes
                    ),
                )
                .with_limit(self.config.arena_bytes as f64, r3.arena as f64)
                .advise("raise --r3-arena-bytes, or ask for fewer tokens"),
            );
        }
        let sides: &[Role] = if pd { &[Role::Decode, Role::Prefill] } else { &[Role::Regular] };
        for &role in sides {
            let (mut fits, mut best) = (false, None);
            // The rank that fitted last is looked at first: a pass over all ranks would cost more than the decision itself.
            let hint = &self.fits_at[role as usize];
            let likely = self.fleet.ranks.get(hint.get()).map(|rank| (hint.get(), rank));
            for (slot, rank) in
                likely.into_iter().chain(self.fleet.ranks.iter().enumerate()).filter(|(_, r)| r.live && r.role == role)
            {
                let (ok, needs, limit) = match role {
                    Role::Prefill => (
                        rank.capacity.fits_prompt(request.prompt_tokens),
                        rank.capacity.prompt_kv(request.prompt_tokens),
                        rank.capacity.kv_pool.min(rank.capacity.max_prompt),
                    ),
                    _ => (
                        rank.capacity.fits_idle(request.prompt_tokens, max_new),
                        rank.capacity.kv_need(request.prompt_tokens, max_new),
                        rank.capacity.kv_pool.min(rank.capacity.max_prompt),
                    ),
                };
                if ok {
                    fits = true;
                    hint.set(slot);
                    break;
                }
                if best.is_none_or(|(_, l)| limit > l) {
                    best = Some((needs, limit));
                }
            }
            if fits {
                continue;
            }
            let (needs, limit) = best.unwrap_or_default();
            let name = match role {
                Role::Prefill => "prefill",
                Role::Decode => "decode",
                Role::Regular => "regular",
            };
            return Some(
                Error::new(
                    Kind::TooLargeForFleet,
                    Source::Client,
                    format!(
                        "a prompt of {} tokens needs {needs} tokens of KV, the largest {name} rank has {limit}",
                        request.prompt_tokens
                    ),
                )
                .with_limit(limit as f64, needs as f64)
                .advise("shorten the prompt or max_new_tokens, or add ranks with a larger KV pool"),
            );
        }
        None
    }

    /// The client named a rank that is not there, takes no requests, or could never hold this one.
    fn target_error(&self, request: &Request) -> Option<Error> {
        let max_new = self.max_new(request);
        let sides = [
            (Role::Prefill, self.fleet.is_pd()),
            (if self.fleet.is_pd() { Role::Decode } else { Role::Regular }, true),
        ];
        for (role, needed) in sides {
            let Some(target) = request.targets.of(role).filter(|_| needed) else { continue };
            let worker = self.fleet.worker(target.worker).and_then(|i| self.fleet.workers.get(i as usize)?.as_ref());
            let gone = |what: &str| {
                Some(
                    Error::new(Kind::NoWorkers, Source::Router, format!("the worker that the request names {what}"))
                        .with_limit(1.0, 0.0)
                        .advise("name another one, or none")
                        .retry_after(RETRY_AFTER),
                )
            };
            let Some(worker) = worker.filter(|w| w.role == role) else { return gone("is not there any more") };
            if worker.draining || !worker.breaker.admits() {
                return gone(if worker.draining { "drains" } else { "is out of choice after failures" });
            }
            let named = |slot: &&u32| target.names(self.fleet.ranks[**slot as usize].id);
            let mut ranks = worker.ranks.iter().filter(named).map(|&slot| &self.fleet.ranks[slot as usize].capacity);
            if worker.ranks.iter().find(named).is_none() {
                return gone("has no such rank");
            }
            let fits = ranks.any(|c| match role {
                Role::Prefill => c.fits_prompt(request.prompt_tokens),
                _ => c.fits_idle(request.prompt_tokens, max_new),
            });
            if !fits {
                let needs = request.prompt_tokens;
                return Some(
                    Error::new(
                        Kind::TooLargeForFleet,
                        Source::Client,
                        format!("a prompt of {needs} tokens is larger than the worker that the request names"),
                    )
                    .at_worker(&*worker.url)
                    .advise("name a worker with a larger KV pool, or none"),
                );
            }
        }
        None
    }

    fn check_queue(&mut self, request: &Request) -> Result<(), Error> {
        let (limit, measured, what, flag) = if self.queue.len() >= self.config.queue_max_requests {
            (self.config.queue_max_requests as f64, self.queue.len() as f64, "requests", "--queue-size")
        } else if self.queue.bytes().saturating_add(request.body_bytes) > self.config.queue_max_bytes {
            let bytes = self.queue.bytes().saturating_add(request.body_bytes);
            (self.config.queue_max_bytes as f64, bytes as f64, "body bytes", "--queue-max-bytes")
        } else {
            return Ok(());
        };
        self.counters.add(Reason::QueueFull);
        Err(Error::new(
            Kind::QueueFull,
            Source::Router,
            format!(
                "{measured} {what} wait or would wait in the router, the limit is {limit}; held by: {}",
                self.blocked.name()
            ),
        )
        .with_limit(limit, measured)
        .advise(format!("send fewer requests at once, or raise {flag}"))
        .retry_after(RETRY_AFTER))
    }

    /// Growth room that a request is given.
    pub(super) fn max_new(&self, request: &Request) -> u32 {
        request.max_new_tokens.unwrap_or(self.config.default_max_new_tokens)
    }
}
