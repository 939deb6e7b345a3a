//! The baseline: a router as the field has them. It binds at once, keeps no ledger, joins both halves and cancels nothing.
use std::collections::HashMap;

use r3router_core::topology::Role;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::scenario::Placement;
use super::workload::Job;
use crate::model::{EngineConfig, EngineId};

/// Where a leg goes.
type Spot = (EngineId, u16);

/// Placement without admission.
pub(super) struct Plain {
    placement: Placement,
    prefill: Vec<Spot>,
    decode: Vec<Spot>,
    dp: Vec<u16>,
    turn: usize,
    homes: HashMap<u64, usize>,
    rng: StdRng,
}

impl Plain {
    pub(super) fn new(placement: Placement, engines: &[EngineConfig], seed: u64) -> Self {
        let spots = |role: Role| {
            let all = engines.iter().enumerate().filter(move |(_, c)| c.role == role);
            all.flat_map(|(i, c)| (0..c.ranks).map(move |rank| (EngineId(i as u16), rank))).collect::<Vec<Spot>>()
        };
        Self {
            placement,
            prefill: spots(Role::Prefill),
            decode: spots(Role::Decode),
            dp: engines.iter().map(|c| c.ranks).collect(),
            turn: 0,
            homes: HashMap::new(),
            rng: StdRng::seed_from_u64(seed ^ 0x70_6c61_696e),
        }
    }

    /// Prefill rank, decode rank and room of the next request.
    pub(super) fn place(&mut self, job: &Job) -> (Spot, Spot, u64) {
        let turn = self.turn;
        self.turn += 1;
        let n = self.prefill.len();
        let p = match self.placement {
            Placement::RoundRobin => turn % n,
            Placement::Random => self.rng.random_range(0..n),
            Placement::PrefixSticky => {
                let next = self.homes.len() % n;
                *self.homes.entry(job.family).or_insert(next)
            }
        };
        let (prefill, decode) = (self.prefill[p], self.decode[turn % self.decode.len()]);
        let dp = u64::from(self.dp[usize::from(prefill.0.0)]);
        let room = self.rng.random_range(1..(1u64 << 62) / dp) * dp + u64::from(prefill.1);
        (prefill, decode, room)
    }
}
