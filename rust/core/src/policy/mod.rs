//! Which of the ranks that admission permits a request goes to: one choice for each role, by the names that sglang-router uses.
//!
//! A policy never permits anything. `pairing` asks it for one rank among those that have room, and binds to that rank or
//! to none. The defaults, [`Policy::CacheAware`] for prefill and regular ranks and [`Policy::Headroom`] for decode, are decided in
//! `pairing` itself and touch nothing here. A request that names its rank ([`Target`]) goes there under every policy.
use std::time::Duration;

use crate::admission::Request;
use crate::fleet::Fleet;
use crate::room::SplitMix;
use crate::time::Moment;
use crate::topology::{RankId, Role, WorkerId};

mod bucket;
mod keys;
mod pick;
mod ring;

use bucket::Buckets;
use keys::Keys;
pub use ring::hash;
pub(crate) use ring::name;

/// How long a request waits for the rank of its key, or of its prompt's beginning, while others have room: about two prefill
/// batches. Then it goes elsewhere; a rank that is gone or takes no requests is not waited for at all.
pub const KEY_PATIENCE: Duration = Duration::from_secs(2);

/// How a rank is chosen among those that admission permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// The rank that has the prompt's beginning cached, within balance.
    CacheAware,
    /// The rank with the most room.
    Headroom,
    /// Any.
    Random,
    /// Each in turn.
    RoundRobin,
    /// The lighter of two that are drawn at random.
    PowerOfTwo,
    /// Prompts of about one length together, the tokens shared evenly.
    Bucket,
    /// The rank that a routing key was given first.
    Manual,
    /// The rank that a hash of the routing key names.
    ConsistentHashing,
    /// The rank that a hash of the prompt's first block names, unless it has more than its share.
    PrefixHash,
}

/// Which rank a new routing key is given under [`Policy::Manual`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Assignment {
    /// The one with the fewest keys that were used of late; of equal ones, the one with the most room.
    #[default]
    MinGroup,
    /// The one with the most room.
    MinLoad,
    /// Any.
    Random,
}

/// A worker, or one rank of it, that a client named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The engine.
    pub worker: WorkerId,
    /// Its rank; `None` leaves that to the policy.
    pub rank: Option<u16>,
}

impl Target {
    /// Whether a rank is meant.
    pub fn names(&self, rank: RankId) -> bool {
        self.worker == rank.worker && self.rank.is_none_or(|r| r == rank.rank)
    }
}

/// Where a request must go and nowhere else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// The prefill side.
    pub prefill: Option<Target>,
    /// The decode or regular side.
    pub back: Option<Target>,
}

impl Targets {
    /// Whether any is named.
    pub fn any(&self) -> bool {
        self.prefill.is_some() || self.back.is_some()
    }

    /// That of a role.
    pub fn of(&self, role: Role) -> Option<Target> {
        if role == Role::Prefill { self.prefill } else { self.back }
    }
}

/// The policies and what they take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyConfig {
    /// By role: `Role as usize`.
    pub of: [Policy; 3],
    /// For new keys of [`Policy::Manual`].
    pub assignment: Assignment,
    /// Keys that were not used for so long are forgotten.
    pub key_idle: Duration,
    /// How long [`Policy::Bucket`] looks at lengths before it draws its limits anew.
    pub bucket_interval: Duration,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            of: [Policy::CacheAware, Policy::CacheAware, Policy::Headroom],
            assignment: Assignment::default(),
            key_idle: Duration::from_secs(4 * 3600),
            bucket_interval: Duration::from_secs(5),
        }
    }
}

/// What a policy says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// This one.
    Rank(u32),
    /// None of those that have room: better to wait for another a little.
    Wait,
    /// None has room.
    Nobody,
}

impl From<Option<u32>> for Choice {
    fn from(slot: Option<u32>) -> Self {
        slot.map_or(Self::Nobody, Self::Rank)
    }
}

/// What is asked of a policy. Slots are those of the role's ranks.
pub(crate) struct Ask<'a> {
    pub(crate) fleet: &'a Fleet,
    pub(crate) role: Role,
    pub(crate) request: &'a Request,
    /// Random bits of this look.
    pub(crate) draw: u64,
    /// The request has waited long enough for the rank of its key.
    pub(crate) waited_out: bool,
    /// Whether a rank has room for the request now.
    pub(crate) admits: &'a dyn Fn(u32) -> bool,
    /// Whether it will take the request in the course of things.
    pub(crate) will: &'a dyn Fn(u32) -> bool,
}

/// The state that policies keep.
#[derive(Debug)]
pub(crate) struct Policies {
    config: PolicyConfig,
    random: SplitMix,
    /// By role, where the last turn of [`Policy::RoundRobin`] was.
    turns: [u32; 3],
    keys: [Option<Keys>; 3],
    buckets: [Option<Buckets>; 3],
}

impl Policies {
    pub(crate) fn new(config: PolicyConfig, seed: u64) -> Self {
        let with = |policy| config.of.map(|p| p == policy);
        Self {
            config,
            random: SplitMix::new(seed ^ 0x9011),
            turns: [u32::MAX; 3],
            keys: with(Policy::Manual).map(|on| on.then(|| Keys::new(config.key_idle))),
            buckets: with(Policy::Bucket).map(|on| on.then(|| Buckets::new(config.bucket_interval))),
        }
    }

    /// The policy of a role.
    pub(crate) fn of(&self, role: Role) -> Policy {
        self.config.of[role as usize]
    }

    /// Bits for one look at a request, where a policy wants some.
    pub(crate) fn draw(&mut self) -> u64 {
        match self.config.of {
            [Policy::CacheAware | Policy::Headroom, Policy::CacheAware, Policy::Headroom] => 0,
            _ => self.random.next(),
        }
    }

    /// The choice of the role's policy. Those that `pairing` decides by itself take the rank with the most room here.
    pub(crate) fn choose(&self, ask: &Ask<'_>) -> Choice {
        match self.of(ask.role) {
            Policy::CacheAware | Policy::Headroom => pick::roomiest(ask).into(),
            Policy::Random => pick::random(ask).into(),
            Policy::RoundRobin => pick::next(ask, self.turns[ask.role as usize]).into(),
            Policy::PowerOfTwo => pick::lighter(ask).into(),
            Policy::Bucket => match &self.buckets[ask.role as usize] {
                Some(buckets) => buckets.choose(ask).into(),
                None => Choice::Nobody,
            },
            Policy::Manual => match &self.keys[ask.role as usize] {
                Some(keys) if ask.request.key != 0 => keys.choose(ask, self.config.assignment),
                _ => pick::roomiest(ask).into(),
            },
            Policy::ConsistentHashing => match ask.request.key {
                0 => pick::random(ask).into(),
                key => ring::choose(ask, key),
            },
            Policy::PrefixHash => match ask.request.prefix.first() {
                Some(&hash) => ring::choose_bounded(ask, hash),
                None => pick::roomiest(ask).into(),
            },
        }
    }

    /// A request was bound to a rank. Says whether its key was known on another one.
    pub(crate) fn bound(&mut self, fleet: &Fleet, role: Role, slot: u32, request: &Request, now: Moment) -> bool {
        match self.of(role) {
            Policy::RoundRobin => self.turns[role as usize] = slot,
            Policy::Bucket => {
                if let Some(buckets) = &mut self.buckets[role as usize] {
                    buckets.add(request.prompt_tokens, now);
                }
            }
            // A request that names its rank is a detour: its key stays where it is.
            Policy::Manual if request.key != 0 && request.targets.of(role).is_none() => {
                return self.keys[role as usize].as_mut().is_some_and(|keys| keys.put(fleet, request.key, slot, now));
            }
            _ => {}
        }
        false
    }

    /// What time alone changes.
    pub(crate) fn tick(&mut self, now: Moment) {
        self.keys.iter_mut().flatten().for_each(|keys| keys.tick(now));
        self.buckets.iter_mut().flatten().for_each(|buckets| buckets.tick(now));
    }
}
