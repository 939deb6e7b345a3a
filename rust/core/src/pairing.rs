//! Chooses a prefill rank and a decode rank for a request: a whole pair or nothing.
//!
//! Decode: the rank with the most headroom that can hold the request. Prefill: the rank that has the prompt's prefix, while
//! it has credit; else, the least loaded rank, when computing the prefix again there costs less than waiting for the one that
//! has it, or when ranks stood idle for as long as that costs ([`Need::idle_tokens`]; the ski-rental rule, which is never
//! worse than twice the best choice in hindsight), or when a rank runs dry while more work waits for each rank that has the
//! prefix than computing it again is ([`Need::behind`]): then it is needed there for longer than it takes to compute. So one
//! hot prefix spreads, and sessions stay where they are.
//!
//! That is what the default policies mean. Under others, and for requests that name their rank, `by_policy` chooses among the
//! ranks that have room by the same tests.
use crate::admission::Request;
use crate::affinity::{BLOCK_TOKENS, Match, REPLICAS};
use crate::capacity::CLIP_MAX_NEW_TOKENS;
use crate::fleet::{Fleet, takes};
use crate::health::Cooldowns;
use crate::policy::{Policies, Policy};
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::{RankId, Role, WorkerId};

mod by_policy;

/// A regular rank with the prefix is left when it has so many more requests than the best one, at least...
const REGULAR_SLACK: i64 = 4;
/// ... or when it has more and was given, of late, so many times the tokens more as are computed again by leaving it: new sessions then go
/// where there were fewer, and one that moves adds at most an eighth to what it evens out.
const REGULAR_AHEAD: f64 = 8.0;

/// Ranks that are kept for a request that was overtaken too often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) prefill: Option<u32>,
    pub(crate) decode: Option<u32>,
}

/// What is looked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need<'a> {
    pub(crate) request: &'a Request,
    /// Ranks that have its prefix.
    pub(crate) found: Match,
    /// Decode ranks that have it, where decode's policy asks for it.
    pub(crate) found_back: Match,
    /// Random bits, where a policy asks for them.
    pub(crate) draw: u64,
    /// It has waited long enough for the rank of its key.
    pub(crate) waited_out: bool,
    /// `max_new_tokens`, or the configured reserve.
    pub(crate) max_new: u32,
    /// Uncached tokens that idle prefill ranks could have computed while requests waited for ranks with their prefix.
    pub(crate) idle_tokens: f64,
    /// Other requests that are known to wait for the ranks with its prefix, in so far as decode has slots for them.
    pub(crate) behind: u32,
    /// More waits than decode has slots for. Prefill is not what limits then, and computing again has to save as much as it
    /// costs: it only holds slots of decode for longer.
    pub(crate) crowded: bool,
    /// The request may use these ranks, and need not stay with its prefix.
    pub(crate) kept: Option<Kept>,
    pub(crate) now: Moment,
}

/// A rank that computes the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Front {
    pub(crate) slot: u32,
    /// Prompt tokens that it must compute.
    pub(crate) uncached: i64,
    /// Blocks of the prompt that it has.
    pub(crate) known: usize,
    /// Tokens that are computed again because another rank has them.
    pub(crate) again: i64,
}

/// A whole pair. In regular mode both halves are one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) front: Option<Front>,
    pub(crate) back: u32,
    /// Blocks of the prompt that a regular rank has.
    pub(crate) known: usize,
}

/// Chooses.
pub(crate) fn choose(
    fleet: &Fleet,
    cooldowns: &Cooldowns,
    policies: &Policies,
    need: &Need<'_>,
) -> Result<Pair, Reason> {
    let of_targets = need.request.targets.any();
    if !fleet.is_pd() {
        if of_targets || policies.of(Role::Regular) != Policy::CacheAware {
            let back = by_policy::back(fleet, cooldowns, policies, need, None)?;
            return Ok(Pair { front: None, back, known: known_on(need.found, back) });
        }
        let (back, known) = near_prefix(fleet, cooldowns, need, None, need.found)?;
        return Ok(Pair { front: None, back, known });
    }
    // What is cheap and commonest first: no decode rank has credit, or none has the room.
    if need.kept.is_none() {
        let r3 = need.request.r3.is_some();
        if !fleet.decode.any(r3) {
            return Err(shut(fleet, 1, r3));
        }
        if fleet.decode.most_room(r3) < least_kv(need) {
            return Err(Reason::Kv);
        }
    }
    let by_prefix = policies.of(Role::Prefill) == Policy::CacheAware && !of_targets;
    let front = if by_prefix { front(fleet, need)? } else { by_policy::front(fleet, policies, need)? };
    match with_back(fleet, cooldowns, policies, need, front) {
        Err(_) if !by_prefix && cooldowns.resting(need.now) > 0 => {
            by_policy::other_pair(fleet, cooldowns, policies, need)
        }
        pair => pair,
    }
}

/// The decode rank for a prefill rank.
fn with_back(
    fleet: &Fleet,
    cooldowns: &Cooldowns,
    policies: &Policies,
    need: &Need<'_>,
    front: Front,
) -> Result<Pair, Reason> {
    let partner = Some(fleet.ranks[front.slot as usize].id.worker);
    let (back, known) = match policies.of(Role::Decode) {
        _ if need.request.targets.any() => (by_policy::back(fleet, cooldowns, policies, need, partner)?, 0),
        Policy::Headroom => (back(fleet, cooldowns, need, partner)?, 0),
        Policy::CacheAware => near_prefix(fleet, cooldowns, need, partner, need.found_back)?,
        _ => (by_policy::back(fleet, cooldowns, policies, need, partner)?, 0),
    };
    Ok(Pair { front: Some(front), back, known })
}

/// Never above what any rank's own formula asks for.
fn least_kv(need: &Need<'_>) -> i64 {
    i64::from(need.request.prompt_tokens) + i64::from(need.max_new.min(CLIP_MAX_NEW_TOKENS))
}

/// Why no rank of a side takes a request.
pub(crate) fn shut(fleet: &Fleet, side: usize, r3: bool) -> Reason {
    let tree = if side == 0 { &fleet.prefill } else { &fleet.decode };
    match (r3 && tree.any(false) && !tree.any(true), side) {
        (true, 0) => Reason::R3Egress,
        (true, _) => Reason::R3EgressDecode,
        _ => fleet.why_closed(side),
    }
}

/// Tokens of the prompt that `blocks` blocks stand for. Text blocks are counted in proportion.
fn tokens(request: &Request, blocks: usize) -> i64 {
    let prompt = i64::from(request.prompt_tokens);
    let all = request.prefix.len();
    let counted = if all * BLOCK_TOKENS > request.prompt_tokens as usize {
        prompt * blocks as i64 / all.max(1) as i64
    } else {
        (blocks * BLOCK_TOKENS) as i64
    };
    // The last token is always computed.
    counted.min(prompt - 1).max(0)
}

fn avoided(need: &Need<'_>, id: RankId) -> bool {
    need.request.avoid.contains(&id)
}

/// Whether a rank of the role is left that this request has not failed on. While there is one, the request waits for it.
fn others_left(fleet: &Fleet, need: &Need<'_>, role: Role) -> bool {
    fleet.ranks.iter().any(|r| {
        r.live
            && r.role == role
            && takes(r.closed)
            && !avoided(need, r.id)
            && need.request.targets.of(role).is_none_or(|t| t.names(r.id))
            && match role {
                Role::Prefill => r.capacity.fits_prompt(need.request.prompt_tokens),
                _ => r.capacity.fits_idle(need.request.prompt_tokens, need.max_new),
            }
    })
}

fn front(fleet: &Fleet, need: &Need<'_>) -> Result<Front, Reason> {
    let (request, found) = (need.request, need.found);
    let r3 = request.r3.is_some();
    let prompt = i64::from(request.prompt_tokens).max(1);
    let tree = &fleet.prefill;
    let avoid = !request.avoid.is_empty() && others_left(fleet, need, Role::Prefill);
    let fits = |slot: u32| front_fits(fleet, need, slot, avoid);

    // The rank that was kept, or any: a request that waited so long does not insist on its prefix.
    if let Some(kept) = need.kept {
        if let Some(slot) = kept_front(fleet, need, kept, fits) {
            return Ok(front_on(need, slot));
        }
        let slot = tree.best(prompt, r3, |s| fits(s as u32)).ok_or_else(|| no_front(fleet, need, prompt, avoid))?;
        return Ok(front_on(need, slot as u32));
    }

    let matched = tokens(request, found.blocks);
    let brief = |slot: u32| &fleet.briefs[slot as usize];
    let least = |slot: u32| (brief(slot).queued, brief(slot).turn);
    let on_prefix = found.slots().filter(|&s| brief(s).role == Role::Prefill);
    let own = (prompt - matched).max(1);
    let with_credit = on_prefix
        .clone()
        .filter(|&s| tree.room(s as usize, r3).is_some_and(|room| room >= own) && fits(s))
        .min_by_key(|&s| least(s));
    if let Some(slot) = with_credit {
        return Ok(Front { slot, uncached: own, known: found.blocks, again: 0 });
    }
    // Ranks that have the prefix and will take requests again by themselves.
    let waiting_for = on_prefix
        .filter(|&s| {
            let closed = brief(s).closed;
            takes(closed) && closed != Reason::Held && !(avoid && avoided(need, fleet.ranks[s as usize].id))
        })
        .map(|s| brief(s).queued)
        .fold(None, |all: Option<(i64, i64)>, queued| {
            Some(all.map_or((queued, 1), |(least, ranks)| (least.min(queued), ranks + 1)))
        });
    let Some(slot) = tree.best(prompt, r3, |s| fits(s as u32)) else {
        return Err(match waiting_for {
            Some(_) if tree.any(r3) => Reason::Affinity,
            _ => no_front(fleet, need, prompt, avoid),
        });
    };
    let slot = slot as u32;
    let Some((queued, ranks)) = waiting_for else {
        return Ok(Front { slot, uncached: prompt, known: 0, again: 0 });
    };
    let other = &fleet.ranks[slot as usize];
    let elsewhere = other.queued_tokens() + prompt;
    let again = matched;
    // A rank beyond those that can be named would be forgotten, and compute it for nothing.
    let needed = other.queued_tokens() < other.capacity.chunk
        && ranks < REPLICAS as i64
        && own.saturating_mul(i64::from(need.behind)) / ranks >= again;
    let cost = if need.crowded { again } else { 0 };
    if elsewhere + cost <= queued + own || needed || need.idle_tokens >= again as f64 {
        return Ok(Front { slot, uncached: prompt, known: 0, again });
    }
    Err(Reason::Affinity)
}

/// Whether a prefill rank that has credit takes the request. `avoid` says that ranks it failed on are left out.
fn front_fits(fleet: &Fleet, need: &Need<'_>, slot: u32, avoid: bool) -> bool {
    let (request, rank) = (need.request, &fleet.ranks[slot as usize]);
    rank.capacity.fits_prompt(request.prompt_tokens)
        && !(avoid && avoided(need, rank.id))
        && emits(fleet, rank.worker, request.r3.is_some(), request.r3.map_or(0, |r| r.prefill_text))
}

/// The prefill rank that is kept for the request, when it would take it.
fn kept_front(fleet: &Fleet, need: &Need<'_>, kept: Kept, fits: impl Fn(u32) -> bool) -> Option<u32> {
    let enough = |slot| prefill_credit(fleet, slot) >= uncached_on(need.request, need.found, slot);
    kept.prefill.filter(|&slot| fits(slot) && enough(slot))
}

fn front_on(need: &Need<'_>, slot: u32) -> Front {
    let (request, found) = (need.request, need.found);
    Front { slot, uncached: uncached_on(request, found, slot), known: known_on(found, slot), again: 0 }
}

fn known_on(found: Match, slot: u32) -> usize {
    if found.has(slot) { found.blocks } else { 0 }
}

fn uncached_on(request: &Request, found: Match, slot: u32) -> i64 {
    (i64::from(request.prompt_tokens) - tokens(request, known_on(found, slot))).max(1)
}

/// The credit of a prefill rank, whether or not it is kept for somebody.
fn prefill_credit(fleet: &Fleet, slot: u32) -> i64 {
    let rank = &fleet.ranks[slot as usize];
    if rank.closed != Reason::Held && rank.closed != Reason::Bound {
        return -1;
    }
    let held = rank.ledger.occupied();
    let patience = fleet.rule.alpha * rank.capacity.waiting_timeout;
    if held.open >= rank.capacity.metadata {
        return -1;
    }
    rank.service.credit(held.transfer, held.uncached, rank.capacity.chunk, patience)
}

fn no_front(fleet: &Fleet, need: &Need<'_>, prompt: i64, avoid: bool) -> Reason {
    let r3 = need.request.r3.is_some();
    let tree = &fleet.prefill;
    if !tree.any(r3) {
        shut(fleet, 0, r3)
    } else if tree.most_room(r3) < prompt {
        Reason::Prefill
    } else if avoid {
        Reason::Avoided
    } else {
        Reason::R3Egress
    }
}

/// Whether a worker may be sent so much more R3 text to emit.
fn emits(fleet: &Fleet, worker: u32, r3: bool, text: u64) -> bool {
    if !r3 || text == 0 {
        return true;
    }
    match &fleet.workers[worker as usize] {
        Some(w) => w.egress.admits(text, w.egress_limit),
        None => false,
    }
}

fn back(fleet: &Fleet, cooldowns: &Cooldowns, need: &Need<'_>, partner: Option<WorkerId>) -> Result<u32, Reason> {
    let request = need.request;
    let role = if partner.is_some() { Role::Decode } else { Role::Regular };
    let r3 = request.r3.is_some();
    let avoid = !request.avoid.is_empty() && others_left(fleet, need, role);
    let mut why = Reason::Kv;
    let mut cooled = false;
    let fits = |slot: u32, cooling: bool, why: &mut Reason, cooled: &mut bool| {
        let cooling = partner.filter(|_| cooling).map(|p| (cooldowns, p));
        match back_fits(fleet, need, slot, avoid, cooling) {
            Ok(()) => true,
            Err(reason) => {
                *cooled |= reason == Reason::Cooling;
                *why = reason;
                false
            }
        }
    };
    // The rank that was kept, or any other that is free before it.
    if let Some(slot) = need.kept.and_then(|k| k.decode)
        && kept_is_free(fleet, slot)
        && fits(slot, false, &mut why, &mut cooled)
    {
        return Ok(slot);
    }
    let tree = &fleet.decode;
    if !tree.any(r3) {
        return Err(shut(fleet, 1, r3));
    }
    // The rank's own formula is tested on the leaf.
    let least = least_kv(need);
    if let Some(slot) = tree.best(least, r3, |s| fits(s as u32, true, &mut why, &mut cooled)) {
        return Ok(slot as u32);
    }
    let pairs = fleet.registered(Role::Prefill) * fleet.registered(Role::Decode);
    if cooled && cooldowns.resting(need.now) >= pairs {
        // Every pair rests: better a pair that failed than none.
        if let Some(slot) = tree.best(least, r3, |s| fits(s as u32, false, &mut why, &mut cooled)) {
            return Ok(slot as u32);
        }
    }
    Err(why)
}

/// Whether a decode or regular rank that is open takes the request, or why not. `cooling` is the prefill worker whose pairs may rest.
fn back_fits(
    fleet: &Fleet,
    need: &Need<'_>,
    slot: u32,
    avoid: bool,
    cooling: Option<(&Cooldowns, WorkerId)>,
) -> Result<(), Reason> {
    let request = need.request;
    let rank = &fleet.ranks[slot as usize];
    let free = rank.free();
    if !rank.capacity.fits_idle(request.prompt_tokens, need.max_new)
        || rank.capacity.kv_need(request.prompt_tokens, need.max_new) > free.kv
    {
        Err(Reason::Kv)
    } else if avoid && avoided(need, rank.id) {
        Err(Reason::Avoided)
    } else if stale(fleet, slot, need.now) {
        Err(Reason::Stale)
    } else if !emits(fleet, rank.worker, request.r3.is_some(), request.r3.map_or(0, |r| r.decode_text)) {
        Err(Reason::R3EgressDecode)
    } else if cooling.is_some_and(|(cooldowns, p)| cooldowns.rests(p, rank.id.worker, need.now)) {
        Err(Reason::Cooling)
    } else {
        Ok(())
    }
}

/// Whether a kept rank would be open for the request that it is kept for.
fn kept_is_free(fleet: &Fleet, slot: u32) -> bool {
    let rank = &fleet.ranks[slot as usize];
    rank.closed == Reason::Held || rank.closed == Reason::Bound
}

/// A report may have aged since the rank was last looked at.
fn stale(fleet: &Fleet, slot: u32, now: Moment) -> bool {
    let rank = &fleet.ranks[slot as usize];
    matches!(&fleet.workers[rank.worker as usize], Some(w) if w.facts.reports_load) && fleet.is_stale(rank, now)
}

/// The rank that has the prompt's prefix, unless it has so many more requests than the best one, or was given so much more of late. Gives the
/// blocks that it has.
fn near_prefix(
    fleet: &Fleet,
    cooldowns: &Cooldowns,
    need: &Need<'_>,
    partner: Option<WorkerId>,
    found: Match,
) -> Result<(u32, usize), Reason> {
    let best = back(fleet, cooldowns, need, partner)?;
    if found.is_empty() || found.has(best) || need.kept.is_some() {
        return Ok((best, known_on(found, best)));
    }
    let request = need.request;
    let r3 = request.r3.is_some();
    let tree = &fleet.decode;
    let avoid = !request.avoid.is_empty();
    let open = |slot: u32| fleet.ranks[slot as usize].ledger.occupied().open;
    let cooling = partner.map(|p| (cooldowns, p));
    let on_prefix = found
        .slots()
        .filter(|&s| tree.room(s as usize, r3).is_some() && back_fits(fleet, need, s, avoid, cooling).is_ok());
    let given = |slot: u32| fleet.ranks[slot as usize].given.get(need.now);
    if let Some(slot) = on_prefix.min_by_key(|&s| (open(s), given(s) as u64))
        && open(slot) - open(best) <= REGULAR_SLACK.max(open(best) / 2)
        && (open(slot) <= open(best)
            || given(slot) - given(best) <= REGULAR_AHEAD * tokens(request, found.blocks) as f64)
    {
        return Ok((slot, found.blocks));
    }
    Ok((best, known_on(found, best)))
}
