//! Why a request was bound, held or refused: a closed set, for counters, closed ranks and error texts.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// See the module's text.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Reason { $($(#[$doc])* $name),* }

        impl Reason {
            /// Every reason, in order.
            pub const ALL: &[Self] = &[$(Self::$name),*];
            /// The stable name of metrics and messages.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

reasons! {
    /// Bound to a pair.
    #[default]
    Bound = "bound",
    /// No free request row.
    Rows = "rows",
    /// No free metadata slot.
    Metadata = "metadata",
    /// No free state slot.
    Mamba = "mamba",
    /// Not enough free KV.
    Kv = "kv",
    /// The window of transfers in flight is full.
    Window = "window",
    /// Prefill has one batch in service and one ready.
    Prefill = "prefill",
    /// Prefill would keep it waiting for too long a part of the engine's timeout.
    PrefillWait = "prefill_wait",
    /// Waits for the prefill rank that has its prefix.
    Affinity = "affinity",
    /// Waits for the prefill rank of its routing key.
    Key = "routing_key",
    /// Waits for the decode (or regular) rank of its routing key.
    KeyDecode = "routing_key_decode",
    /// Too many R3 bytes are about to leave the prefill engine.
    R3Egress = "r3_egress",
    /// Too many R3 bytes are about to leave the decode (or regular) engine.
    R3EgressDecode = "r3_egress_decode",
    /// The R3 arena is full.
    Arena = "arena",
    /// No recent report of the engine's load.
    Stale = "stale",
    /// The engine pushed requests out under memory pressure.
    Retracted = "retracted",
    /// Rollout control closed the gate.
    Paused = "paused",
    /// The worker's breaker is open.
    Ejected = "ejected",
    /// The worker drains.
    Draining = "draining",
    /// The rank is kept for a request that was overtaken too often.
    Held = "held",
    /// Every pair that is left failed a transfer a moment ago.
    Cooling = "cooling",
    /// Every rank that is left failed this request before.
    Avoided = "avoided",
    /// The worker serves the other mode (regular beside prefill and decode).
    Mode = "mode",
    /// Others were before it.
    Queued = "queued",
    /// No worker of a role.
    NoWorkers = "no_workers",
    /// Refused: the queue is full.
    QueueFull = "queue_full",
    /// Refused: larger than every rank.
    TooLarge = "too_large",
    /// Refused: the deadline passed.
    Deadline = "deadline",
    /// Left before it was bound.
    Cancelled = "cancelled",
    /// Moved away from the prefill rank that has its prefix.
    AffinityMoved = "affinity_moved",
    /// A routing key was moved to another rank.
    KeyMoved = "routing_key_moved",
}

impl Reason {
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();
}

/// One counter for each reason.
#[derive(Clone, Debug)]
pub struct Counters([u64; Reason::COUNT]);

impl Default for Counters {
    fn default() -> Self {
        Self([0; Reason::COUNT])
    }
}

impl Counters {
    /// Adds one.
    pub fn add(&mut self, reason: Reason) {
        self.0[reason as usize] += 1;
    }

    /// Takes one away; used where counters are populations.
    pub fn remove(&mut self, reason: Reason) {
        self.0[reason as usize] = self.0[reason as usize].saturating_sub(1);
    }

    /// The counter of `reason`.
    pub fn get(&self, reason: Reason) -> u64 {
        self.0[reason as usize]
    }

    /// Every counter with its name.
    pub fn iter(&self) -> impl Iterator<Item = (Reason, u64)> + '_ {
        Reason::ALL.iter().map(|&r| (r, self.get(r)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_indexes_match() {
        for (i, a) in Reason::ALL.iter().enumerate() {
            assert_eq!(*a as usize, i);
            assert!(Reason::ALL[i + 1..].iter().all(|b| b.name() != a.name()));
        }
    }
}
