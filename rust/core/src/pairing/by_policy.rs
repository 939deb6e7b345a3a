//! Ranks by a policy other than the defaults, or by the client's word. The tests of what a rank can take are those of `pairing`.
use std::cell::Cell;

use super::{
    Front, Need, Pair, back_fits, front_fits, front_on, kept_front, kept_is_free, least_kv, no_front, others_left,
    shut, uncached_on, with_back,
};
use crate::fleet::{Fleet, takes};
use crate::health::Cooldowns;
use crate::policy::{Ask, Choice, Policies};
use crate::reason::Reason;
use crate::topology::{Role, WorkerId};

/// Asks the role's policy. A request that waited until ranks were kept for it waits for no key any more.
fn ask(
    fleet: &Fleet,
    policies: &Policies,
    need: &Need<'_>,
    role: Role,
    admits: &dyn Fn(u32) -> bool,
    will: &dyn Fn(u32) -> bool,
) -> Choice {
    let waited_out = need.waited_out || need.kept.is_some();
    policies.choose(&Ask { fleet, role, request: need.request, draw: need.draw, waited_out, admits, will })
}

/// Whether a rank is one that the client wants.
fn wanted(fleet: &Fleet, need: &Need<'_>, role: Role, slot: u32) -> bool {
    need.request.targets.of(role).is_none_or(|t| t.names(fleet.ranks[slot as usize].id))
}

/// Why the rank that the client named is closed, if it named one and it is.
fn why_named(fleet: &Fleet, need: &Need<'_>, role: Role) -> Option<Reason> {
    need.request.targets.of(role)?;
    let of_role = |slot: &u32| fleet.briefs[*slot as usize].live && fleet.briefs[*slot as usize].role == role;
    let slot = (0..fleet.briefs.len() as u32).filter(of_role).find(|&slot| wanted(fleet, need, role, slot))?;
    Some(fleet.briefs[slot as usize].closed).filter(|&closed| closed != Reason::Bound)
}

/// Whether a rank that is closed takes the request by itself before long.
fn opens(fleet: &Fleet, slot: u32) -> bool {
    let closed = fleet.briefs[slot as usize].closed;
    takes(closed) && closed != Reason::Held
}

pub(super) fn front(fleet: &Fleet, policies: &Policies, need: &Need<'_>) -> Result<Front, Reason> {
    let request = need.request;
    let r3 = request.r3.is_some();
    let avoid = !request.avoid.is_empty() && others_left(fleet, need, Role::Prefill);
    let fits = |slot: u32| wanted(fleet, need, Role::Prefill, slot) && front_fits(fleet, need, slot, avoid);
    let admits = |slot: u32| {
        let room = fleet.prefill.room(slot as usize, r3);
        room.is_some_and(|room| room >= uncached_on(request, need.found, slot)) && fits(slot)
    };
    if let Some(slot) = need.kept.and_then(|kept| kept_front(fleet, need, kept, fits)) {
        return Ok(front_on(need, slot));
    }
    let will = |slot: u32| {
        let rank = &fleet.ranks[slot as usize];
        opens(fleet, slot)
            && wanted(fleet, need, Role::Prefill, slot)
            && rank.capacity.fits_prompt(request.prompt_tokens)
            && !(avoid && request.avoid.contains(&rank.id))
    };
    match ask(fleet, policies, need, Role::Prefill, &admits, &will) {
        Choice::Rank(slot) => Ok(front_on(need, slot)),
        Choice::Wait => Err(Reason::Key),
        Choice::Nobody => {
            let why = || no_front(fleet, need, i64::from(request.prompt_tokens).max(1), avoid);
            Err(why_named(fleet, need, Role::Prefill).unwrap_or_else(why))
        }
    }
}

pub(super) fn back(
    fleet: &Fleet,
    cooldowns: &Cooldowns,
    policies: &Policies,
    need: &Need<'_>,
    partner: Option<WorkerId>,
) -> Result<u32, Reason> {
    let request = need.request;
    let r3 = request.r3.is_some();
    let role = if partner.is_some() { Role::Decode } else { Role::Regular };
    let avoid = !request.avoid.is_empty() && others_left(fleet, need, role);
    // Who names both ranks takes what becomes of the pair.
    let named = request.targets.prefill.is_some() && request.targets.back.is_some();
    let pairs = fleet.registered(Role::Prefill) * fleet.registered(Role::Decode);
    let all_rest = partner.is_some() && cooldowns.resting(need.now) >= pairs;
    let why = Cell::new(Reason::Kv);
    let fits = |slot: u32, rests: bool| {
        let cooling = partner.filter(|_| rests && !named).map(|p| (cooldowns, p));
        let verdict = if wanted(fleet, need, role, slot) {
            back_fits(fleet, need, slot, avoid, cooling)
        } else {
            return false;
        };
        // That a pair rests is told before all else: another prefill engine may do.
        let tell = |reason| {
            if why.get() != Reason::Cooling {
                why.set(reason);
            }
        };
        verdict.map_err(tell).is_ok()
    };
    if let Some(slot) = need.kept.and_then(|k| k.decode)
        && kept_is_free(fleet, slot)
        && fits(slot, false)
    {
        return Ok(slot);
    }
    let tree = &fleet.decode;
    if !tree.any(r3) {
        return Err(shut(fleet, 1, r3));
    }
    let least = least_kv(need);
    let roomy = |slot: u32| tree.room(slot as usize, r3).is_some_and(|room| room >= least);
    let will = |slot: u32| {
        let rank = &fleet.ranks[slot as usize];
        opens(fleet, slot)
            && wanted(fleet, need, role, slot)
            && rank.capacity.fits_idle(request.prompt_tokens, need.max_new)
            && !(avoid && request.avoid.contains(&rank.id))
    };
    let choice = match ask(fleet, policies, need, role, &|slot| roomy(slot) && fits(slot, true), &will) {
        // Every pair rests: better a pair that failed than none.
        Choice::Nobody if all_rest => ask(fleet, policies, need, role, &|slot| roomy(slot) && fits(slot, false), &will),
        choice => choice,
    };
    match choice {
        Choice::Rank(slot) => Ok(slot),
        Choice::Wait => Err(Reason::KeyDecode),
        Choice::Nobody => Err(why_named(fleet, need, role).unwrap_or(why.get())),
    }
}

/// The policy's prefill rank has no decode rank that its engine's pairs may use now: any other that has one.
pub(super) fn other_pair(
    fleet: &Fleet,
    cooldowns: &Cooldowns,
    policies: &Policies,
    need: &Need<'_>,
) -> Result<Pair, Reason> {
    let request = need.request;
    let r3 = request.r3.is_some();
    let avoid = !request.avoid.is_empty() && others_left(fleet, need, Role::Prefill);
    for slot in 0..fleet.ranks.len() as u32 {
        let room = fleet.prefill.room(slot as usize, r3);
        if room.is_some_and(|room| room >= uncached_on(request, need.found, slot))
            && wanted(fleet, need, Role::Prefill, slot)
            && front_fits(fleet, need, slot, avoid)
            && let Ok(pair) = with_back(fleet, cooldowns, policies, need, front_on(need, slot))
        {
            return Ok(pair);
        }
    }
    Err(Reason::Cooling)
}
