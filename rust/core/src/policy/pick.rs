//! Picks that look at nothing but the ranks: any, the next, the lighter of two, the one with the most room.
use super::Ask;
use crate::room::SplitMix;
use crate::topology::Role;
use crate::tournament::Tournament;

/// Draws at random before the ranks are looked through in order.
const DRAWS: usize = 8;

/// The tree that has the role's ranks.
fn tree<'a>(ask: &'a Ask<'_>) -> &'a Tournament {
    if ask.role == Role::Prefill { &ask.fleet.prefill } else { &ask.fleet.decode }
}

/// The slots of ranks that take anything at all. Cheaper to ask than whether they admit the request.
fn open<'a>(ask: &'a Ask<'_>) -> impl Iterator<Item = u32> + 'a {
    let (tree, r3) = (tree(ask), ask.request.r3.is_some());
    (0..ask.fleet.ranks.len()).filter(move |&slot| tree.room(slot, r3).is_some()).map(|slot| slot as u32)
}

/// The rank with the most room of those that admit the request; of equal ones, the one that was bound to least recently.
pub(super) fn roomiest(ask: &Ask<'_>) -> Option<u32> {
    tree(ask).best(i64::MIN + 1, ask.request.r3.is_some(), |slot| (ask.admits)(slot as u32)).map(|slot| slot as u32)
}

/// Any of them, each with the same chance.
pub(super) fn random(ask: &Ask<'_>) -> Option<u32> {
    random_but(ask, ask.draw, u32::MAX)
}

fn random_but(ask: &Ask<'_>, draw: u64, but: u32) -> Option<u32> {
    let count = open(ask).count();
    if count == 0 {
        return None;
    }
    let mut bits = SplitMix::new(draw);
    for _ in 0..DRAWS {
        let at = (bits.next() % count as u64) as usize;
        let slot = open(ask).nth(at).filter(|&slot| slot != but && (ask.admits)(slot));
        if slot.is_some() {
            return slot;
        }
    }
    // Few admit it: from one of them on, in order.
    next_but(ask, (bits.next() % ask.fleet.ranks.len() as u64) as u32, but)
}

/// The first that admits the request after `last`, around and around.
pub(super) fn next(ask: &Ask<'_>, last: u32) -> Option<u32> {
    next_but(ask, last, u32::MAX)
}

fn next_but(ask: &Ask<'_>, last: u32, but: u32) -> Option<u32> {
    let fine = |slot: &u32| *slot != but && (ask.admits)(*slot);
    // `u32::MAX` is before the first.
    let first = last.wrapping_add(1);
    open(ask).filter(|&slot| slot >= first).find(fine).or_else(|| open(ask).take_while(|&slot| slot < first).find(fine))
}

/// The one with more room of two that are drawn; with one that admits the request, that one.
pub(super) fn lighter(ask: &Ask<'_>) -> Option<u32> {
    let one = random(ask)?;
    let Some(other) = random_but(ask, ask.draw.rotate_left(32), one) else { return Some(one) };
    let score = |slot: u32| tree(ask).score(slot as usize);
    Some(if score(other) > score(one) { other } else { one })
}
