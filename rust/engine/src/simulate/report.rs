//! What a run says of itself.
use std::collections::BTreeMap;

use r3router_core::time::Moment;
use r3router_core::topology::Role;
use serde::Serialize;

use super::scenario::{Scenario, Window};
use crate::model::{EngineId, Fleet};

/// A share of waits, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Waits {
    /// Half waited less.
    pub p50: f64,
    /// 99 of 100 waited less.
    pub p99: f64,
    /// Longest.
    pub max: f64,
}

impl Waits {
    pub(super) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at =
            |q: f64| values.get(((values.len() as f64 - 1.0) * q).round().max(0.0) as usize).copied().unwrap_or(0.0);
        Self { p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

/// One decode rank over a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DecodeRank {
    /// Engine, counted from the first decode engine.
    pub engine: u16,
    /// The rank.
    pub rank: u16,
    /// Most requests in transfer at once.
    pub peak_transfer: u32,
    /// Running requests, mean over the run.
    pub mean_running: f64,
    /// Requests that were sent here although they did not fit.
    pub over_reservations: u64,
    /// Requests that clock W ended.
    pub timeouts: u64,
    /// Highest KV use, part of the pool.
    pub peak_used: f64,
    /// Requests that were pushed out.
    pub retracted: u64,
}

/// What a run says of itself. Times are fleet seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The scenario.
    pub scenario: String,
    /// The bound that was used; `None` for the plain router without admission.
    pub window: Option<Window>,
    /// Requests whose both halves answered.
    pub completed: u32,
    /// Requests that ended otherwise.
    pub failed: u32,
    /// Of these, refused or dropped by the router itself (queue full, deadline).
    pub refused: u32,
    /// Attempts that were repeated.
    pub retried: u32,
    /// Requests that an engine's own clock ended, W or B.
    pub engine_timeouts: u64,
    /// Requests that reached a decode rank that had no room for them.
    pub over_reservations: u64,
    /// From the first arrival to the last reply.
    pub makespan_s: f64,
    /// Completed requests per second.
    pub rollouts_per_s: f64,
    /// Generated tokens of completed requests per second.
    pub tokens_per_s: f64,
    /// Highest `peak_transfer` of any decode rank.
    pub peak_transfer: u32,
    /// Mean of `mean_running`.
    pub mean_running: f64,
    /// From arrival at the router to the binding.
    pub router_wait_s: Waits,
    /// From the binding to decode's first token.
    pub engine_wait_s: Waits,
    /// From arrival to the reply.
    pub latency_s: Waits,
    /// Every decode rank.
    pub decode_ranks: Vec<DecodeRank>,
    /// Why requests failed, with counts.
    pub reasons: Vec<(String, u32)>,
    /// What the admission decided and why it held requests back, with counts.
    pub decisions: Vec<(&'static str, u64)>,
    /// The run was cut off by `limit_s`.
    pub cut_off: bool,
}

/// What a run counts while it goes.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) completed: u32,
    pub(super) failed: u32,
    pub(super) refused: u32,
    pub(super) retried: u32,
    pub(super) tokens: u64,
    pub(super) last_end: Moment,
    pub(super) reasons: BTreeMap<String, u32>,
    pub(super) router_waits: Vec<f64>,
    pub(super) engine_waits: Vec<f64>,
    pub(super) latencies: Vec<f64>,
    pub(super) decisions: Vec<(&'static str, u64)>,
}

impl Tally {
    /// The report of a run of `makespan` seconds.
    pub(super) fn report(self, scenario: &Scenario, fleet: &Fleet, makespan: f64, cut_off: bool) -> Report {
        let mut decode_ranks = Vec::new();
        let mut engine_timeouts = 0;
        for place in 0..fleet.len() as u16 {
            let engine = EngineId(place);
            let Some(config) = fleet.config(engine) else { continue };
            for (stats, load) in fleet.stats(engine).into_iter().zip(fleet.live(engine)) {
                engine_timeouts += stats.waiting_timeouts + stats.bootstrap_timeouts;
                if config.role == Role::Decode {
                    decode_ranks.push(DecodeRank {
                        engine: place - scenario.fleet.prefill.engines,
                        rank: load.rank,
                        peak_transfer: stats.peak_transfer,
                        mean_running: stats.running_seconds / makespan,
                        over_reservations: stats.blocked,
                        timeouts: stats.waiting_timeouts,
                        peak_used: stats.peak_used as f64 / config.max_total_tokens as f64,
                        retracted: load.retracted_total,
                    });
                }
            }
        }
        Report {
            scenario: scenario.name.clone(),
            window: scenario.router.admission.then_some(scenario.router.window),
            completed: self.completed,
            failed: self.failed,
            refused: self.refused,
            retried: self.retried,
            engine_timeouts,
            over_reservations: decode_ranks.iter().map(|r| r.over_reservations).sum(),
            makespan_s: makespan,
            rollouts_per_s: f64::from(self.completed) / makespan,
            tokens_per_s: self.tokens as f64 / makespan,
            peak_transfer: decode_ranks.iter().map(|r| r.peak_transfer).max().unwrap_or(0),
            mean_running: decode_ranks.iter().map(|r| r.mean_running).sum::<f64>() / decode_ranks.len().max(1) as f64,
            router_wait_s: Waits::of(self.router_waits),
            engine_wait_s: Waits::of(self.engine_waits),
            latency_s: Waits::of(self.latencies),
            decode_ranks,
            reasons: self.reasons.into_iter().collect(),
            decisions: self.decisions,
            cut_off,
        }
    }
}
