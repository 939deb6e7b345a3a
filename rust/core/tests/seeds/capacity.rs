//! What a rank can hold by everything that the router was told, written down once more from the design's formulas.
//! Where the design leaves room, the bound here is the widest one: what breaks it is over capacity by any reading.
use r3router_core::load::RankReport;
use r3router_core::topology::Role;

use crate::book::{Book, Violation, Waiting, broken};
use crate::engines::Place;
use crate::plan::Ns;

/// KV tokens that an engine keeps for each request beside its prompt, when it does not say.
const RESERVED: u64 = 512;

/// What is open on a decode rank, split by the last report.
#[derive(Debug, Default)]
struct Open {
    now: u64,
    at_report: u64,
    since_report: u64,
    /// Were open at the report and have ended since.
    ended: u64,
    transfer_now: u64,
    transfer_at_report: u64,
    tokens_now: u64,
    tokens_since: u64,
    tokens_ended: u64,
}

/// Requests that a report counts, in whatever queue.
fn reported_rows(r: &RankReport) -> u64 {
    let waiting = r.waiting_total.unwrap_or_else(|| {
        r.prealloc.unwrap_or(0).saturating_add(r.transfer.unwrap_or(0)).saturating_add(r.retracted.unwrap_or(0))
    });
    u64::from(r.running.unwrap_or(0)) + u64::from(waiting)
}

impl Book {
    /// The KV pool of a rank by facts or reports, whichever says more.
    pub(crate) fn pool(&self, place: Place) -> Option<u64> {
        let reported = self.rank(place).report.as_ref().and_then(|(_, r)| r.max_total_tokens);
        // A pool that no machine has, or of nothing, is as good as unknown.
        let absurd = reported.is_some_and(|n| n == 0 || n > 1 << 50);
        self.workers[place.0].facts.max_total_tokens.max(reported).filter(|_| !absurd)
    }

    /// Rows: running limit, and that with the extra rows of decode.
    pub(crate) fn rows(&self, place: Place) -> Option<(u64, u64)> {
        let facts = &self.workers[place.0].facts;
        let reported = self.rank(place).report.as_ref().and_then(|(_, r)| r.max_running);
        let rows = |running: u32| {
            let running = u64::from(running.max(1));
            let unsaid = if running <= 32 { 2 * running } else { 0 };
            (running, running + facts.extra_slots.map_or(unsaid, u64::from))
        };
        // Where facts and report differ, the larger of each.
        let known = [facts.max_running, reported].into_iter().flatten().map(rows);
        known.reduce(|a, b| (a.0.max(b.0), a.1.max(b.1)))
    }

    /// A report that still counts.
    pub(crate) fn fresh(&self, place: Place, now: Ns) -> bool {
        let stale = self.config.stale_after.as_nanos() as u64;
        self.rank(place).report.as_ref().is_some_and(|(measured, _)| now - measured <= stale)
    }

    fn page_ceil(&self, worker: usize, tokens: u64) -> u64 {
        tokens.next_multiple_of(u64::from(self.workers[worker].facts.page_size.unwrap_or(1)).max(1))
    }

    /// KV that a prompt reserves on decode, at least.
    pub(crate) fn need(&self, worker: usize, prompt: u64) -> u64 {
        let reserved = self.workers[worker].facts.reserved_decode_tokens.map_or(RESERVED, u64::from);
        self.page_ceil(worker, prompt) + reserved
    }

    fn open(&self, place: Place, measured: Option<Ns>) -> Open {
        let mut open = Open::default();
        for index in &self.rank(place).attempts {
            let a = &self.attempts[*index];
            if a.decode != place {
                continue;
            }
            let held = a.decode_released().is_none();
            let transfer = a.transfer_ended().is_none();
            let need = a.need;
            open.now += u64::from(held);
            open.transfer_now += u64::from(held && transfer);
            open.tokens_now += if held { need } else { 0 };
            let Some(measured) = measured else { continue };
            if a.bound > measured {
                open.since_report += u64::from(held);
                open.tokens_since += if held { need } else { 0 };
            } else if a.decode_released().is_none_or(|end| end >= measured) {
                open.at_report += 1;
                open.transfer_at_report += u64::from(a.transfer_ended().is_none_or(|end| end >= measured));
                if !held {
                    open.ended += 1;
                    let most = a.prompt + a.max_new.max(RESERVED) + 2 * RESERVED;
                    open.tokens_ended += self.page_ceil(place.0, most);
                }
            }
        }
        open
    }

    /// Checks a decode (or regular) rank after something was bound to it.
    pub(crate) fn check_decode(&self, place: Place, w: &Waiting, now: Ns) -> Result<(), Violation> {
        let worker = &self.workers[place.0];
        let report = self.rank(place).report.as_ref().filter(|_| self.fresh(place, now));
        let open = self.open(place, report.map(|(measured, _)| *measured));
        let at = format!("{}@{}", worker.url, place.1);
        if let Some((_, r)) = report
            && r.retracted.is_some_and(|n| n > 0)
        {
            return broken("closed", format!("{at}: bound while it reports {:?} retracted", r.retracted));
        }
        if worker.facts.reports_load && report.is_none() {
            return broken("stale", format!("{at}: bound without a report that counts"));
        }
        if let Some((running, rows)) = self.rows(place) {
            let reported = report.map_or(0, |(_, r)| reported_rows(r));
            let foreign = reported.saturating_sub(open.at_report);
            if open.now + foreign > rows {
                return broken("capacity", format!("{at}: {} rows of ours and {foreign} foreign of {rows}", open.now));
            }
            if worker.role == Role::Decode {
                let reported =
                    report.map_or(0, |(_, r)| u64::from(r.prealloc.unwrap_or(0)) + u64::from(r.transfer.unwrap_or(0)));
                // Transfers are requests too: no more of them than of all.
                let foreign = reported.saturating_sub(open.transfer_at_report).min(foreign);
                if open.transfer_now + foreign > 2 * running {
                    let ours = open.transfer_now;
                    return broken("capacity", format!("{at}: {ours} + {foreign} metadata slots of {}", 2 * running));
                }
            }
        }
        self.check_mamba(place, &open, &at, now)?;
        self.check_kv(place, &open, w, &at, now)
    }

    fn check_mamba(&self, place: Place, open: &Open, at: &str, now: Ns) -> Result<(), Violation> {
        let facts = &self.workers[place.0].facts;
        let per = u64::from(facts.mamba_slots_per_request.unwrap_or(1).max(1));
        if let Some(slots) = facts.mamba_slots
            && open.now * per > u64::from(slots)
        {
            return broken("capacity", format!("{at}: {} requests of {per} mamba slots, of {slots}", open.now));
        }
        let report = self.rank(place).report.as_ref().filter(|_| self.fresh(place, now));
        if let Some(free) = report.and_then(|(_, r)| r.mamba_free)
            && open.since_report * per > u64::from(free) + open.ended * per
        {
            let since = open.since_report;
            return broken("capacity", format!("{at}: {since} since a report of {free} free mamba slots, {per} each"));
        }
        if let Some(limit) = self.rank(place).mamba_ran_out
            && limit > 1
            && open.now > u64::from(limit)
        {
            return broken("capacity", format!("{at}: {} open after mamba slots ran out at {limit}", open.now));
        }
        Ok(())
    }

    fn check_kv(&self, place: Place, open: &Open, w: &Waiting, at: &str, now: Ns) -> Result<(), Violation> {
        let Some(pool) = self.pool(place) else { return Ok(()) };
        if w.prompt > pool {
            return broken("capacity", format!("{at}: prompt of {} in a pool of {pool}", w.prompt));
        }
        let report = self.rank(place).report.as_ref().filter(|_| self.fresh(place, now));
        let used = report.and_then(|(_, r)| r.used_tokens).unwrap_or(0);
        // A request alone on a rank without requests may use the margin, whatever the tokens there are.
        let alone = open.now <= 1 && report.is_none_or(|(_, r)| reported_rows(r) <= open.at_report);
        if alone && used.saturating_sub(open.tokens_ended) + w.prompt <= pool {
            return Ok(());
        }
        let cap = (pool as f64 * (1.0 - self.config.kv_margin)) as u64 + 1;
        if open.now > 1 && open.tokens_now > cap {
            return broken("capacity", format!("{at}: {} KV tokens of ours of {cap}", open.tokens_now));
        }
        let total = (u128::from(used) + u128::from(open.tokens_since)).saturating_sub(u128::from(open.tokens_ended));
        if total > u128::from(cap) {
            let (since, ended) = (open.tokens_since, open.tokens_ended);
            return broken(
                "capacity",
                format!("{at}: {used} KV tokens reported + {since} since - {ended} ended, of {cap}"),
            );
        }
        Ok(())
    }

    /// Four batches' worth of uncached tokens (one in service, one done and not confirmed, one ready, one on its way), beside
    /// what is on its way in or out and the request that is being computed, which is at most the largest. Only prompts without a prefix are known to be uncached. A batch may be one request of any size.
    pub(crate) fn check_prefill(&self, place: Place, newest: usize, on_the_way: u64, now: Ns) -> Result<(), Violation> {
        let Some(chunk) = self.workers[place.0].facts.chunked_prefill_size else { return Ok(()) };
        let since = match &self.rank(place).report {
            Some((measured, r)) if self.fresh(place, now) && r.waiting_uncached_tokens.is_some() => *measured,
            _ => 0,
        };
        let before =
            self.rank(place).attempts.iter().filter(|i| **i != newest).map(|i| &self.attempts[*i]).filter(|a| {
                let open = a.delivered.is_none() && a.prefill_released().is_none();
                a.prefill == Some(place) && a.no_prefix && a.bound >= since && open
            });
        let (count, queued, largest) =
            before.fold((0, 0, 0), |(count, tokens, largest), a| (count + 1, tokens + a.prompt, a.prompt.max(largest)));
        if count > 1 && queued - largest > 4 * u64::from(chunk) + on_the_way {
            let at = format!("{}@{}", self.workers[place.0].url, place.1);
            return broken(
                "prefill",
                format!("{at}: bound on top of {count} requests of {queued} tokens, batch {chunk}"),
            );
        }
        Ok(())
    }

    /// Whether a request is larger than every rank of some role by what is known, so that it must be refused.
    pub(crate) fn surely_too_large(&self, prompt: u64) -> bool {
        [Role::Prefill, Role::Decode, Role::Regular].into_iter().any(|role| {
            let mut any = false;
            let all = self.workers.iter().enumerate().filter(|(_, w)| w.registered && w.role == role).all(|(i, w)| {
                any = true;
                w.facts.max_input_tokens.is_some_and(|most| prompt > most)
                    || (0..w.ranks.len()).all(|r| self.pool((i, r)).is_some_and(|pool| prompt > pool))
            });
            any && all
        })
    }

    /// Whether some rank of each role that is registered can surely hold it when idle, so that it must not be refused as too large.
    pub(crate) fn surely_fits(&self, prompt: u64, max_new: u64) -> bool {
        [Role::Prefill, Role::Decode, Role::Regular].into_iter().all(|role| {
            let mut any = false;
            let fits = self.workers.iter().enumerate().filter(|(_, w)| w.registered && w.role == role).any(|(i, w)| {
                any = true;
                let input = w.facts.max_input_tokens.is_none_or(|most| prompt <= most);
                input && (0..w.ranks.len()).any(|r| self.roomy((i, r), prompt, max_new))
            });
            !any || fits
        })
    }

    /// Whether an idle rank holds it with the margin, the reserve and all of its growth.
    pub(crate) fn roomy(&self, place: Place, prompt: u64, max_new: u64) -> bool {
        let facts = &self.workers[place.0].facts;
        let reserved = facts.reserved_decode_tokens.map_or(RESERVED, u64::from);
        let need = prompt.next_multiple_of(64) + max_new + 2 * reserved + RESERVED;
        let least = [facts.max_total_tokens, self.rank(place).report.as_ref().and_then(|(_, r)| r.max_total_tokens)];
        least.into_iter().flatten().all(|pool| need as f64 <= pool as f64 * (1.0 - self.config.kv_margin))
    }
}
