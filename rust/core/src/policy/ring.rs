//! Ranks by hashes: each key has an order of all ranks, and goes to the first of them that is there.
//!
//! The order is that of the hashes of key and rank together (rendezvous hashing; Thaler and Ravishankar, 1998): when a rank goes,
//! only its keys move, and evenly; when it comes back, they come back. Every router, and a restarted one, has the same order.
use super::{Ask, Choice, pick};
use crate::topology::Role;

/// A rank with so many times its share of the requests is passed by under `prefix_hash` (sglang-router's load factor).
const SHARE: f64 = 1.25;

/// A hash that is the same in every process (FNV-1a; what is left to spread is spread by `weight`).
pub fn hash(bytes: &[u8]) -> u64 {
    go_on(0xcbf2_9ce4_8422_2325, bytes)
}

fn go_on(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Ranks that are asked one by one before all are.
const ONE_BY_ONE: usize = 4;

/// A name for a rank that outlives this process and the engine's.
pub(crate) fn name(url: &str, rank: u16) -> u64 {
    go_on(hash(url.as_bytes()), &rank.to_le_bytes())
}

fn weight(key: u64, rank: u64) -> u64 {
    let mut z = key ^ rank.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The slots of the role's ranks.
fn slots<'a>(ask: &'a Ask<'_>) -> impl Iterator<Item = u32> + 'a {
    let briefs = ask.fleet.briefs.iter().enumerate();
    briefs.filter(|(_, b)| b.live && b.role == ask.role).map(|(slot, _)| slot as u32)
}

/// The first rank in the key's order that is fine. Mostly it is the very first one, and whether a rank is fine costs more than its
/// hash: so the ranks are gone through one by one, and all are asked only when several in a row were not.
fn first(ask: &Ask<'_>, key: u64, fine: &dyn Fn(u32) -> bool) -> Option<u32> {
    let weigh = |slot: u32| weight(key, ask.fleet.names[slot as usize]);
    let mut below = u64::MAX;
    for _ in 0..ONE_BY_ONE {
        let slot = slots(ask).filter(|&slot| weigh(slot) < below).max_by_key(|&slot| weigh(slot))?;
        if fine(slot) {
            return Some(slot);
        }
        below = weigh(slot);
    }
    slots(ask).filter(|&slot| weigh(slot) < below && fine(slot)).max_by_key(|&slot| weigh(slot))
}

/// The key's rank, or the next in its order once it has waited long enough for that.
pub(super) fn choose(ask: &Ask<'_>, key: u64) -> Choice {
    match first(ask, key, ask.will) {
        Some(home) if (ask.admits)(home) => Choice::Rank(home),
        Some(_) if !ask.waited_out => Choice::Wait,
        _ => first(ask, key, ask.admits).into(),
    }
}

/// The key's rank while that has no more than its share of the open requests, else the one with the most room.
pub(super) fn choose_bounded(ask: &Ask<'_>, key: u64) -> Choice {
    let open = |slot: u32| ask.fleet.ranks[slot as usize].ledger.occupied().open;
    let Some(home) = first(ask, key, ask.will) else { return pick::roomiest(ask).into() };
    let (count, all) =
        slots(ask).filter(|&slot| (ask.will)(slot)).fold((0, 0), |(n, all), slot| (n + 1, all + open(slot)));
    if open(home) as f64 > SHARE * (all + 1) as f64 / f64::from(count) {
        return pick::roomiest(ask).into();
    }
    match (ask.admits)(home) {
        true => Choice::Rank(home),
        false if !ask.waited_out && ask.role == Role::Prefill => Choice::Wait,
        false => pick::roomiest(ask).into(),
    }
}
