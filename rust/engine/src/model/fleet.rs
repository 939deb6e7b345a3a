//! The engines of one process, their peer messages and their timers.
use r3router_core::time::Moment;

use super::config::EngineConfig;
use super::event::{Effect, EngineId, Event};
use super::load::RankLoad;

/// Engines that know each other: decode asks prefill by its place in the list.
pub struct Fleet {
    configs: Vec<EngineConfig>,
}

impl Fleet {
    /// A fleet of empty engines; an engine's [`EngineId`] is its place in the list.
    pub fn new(configs: Vec<EngineConfig>) -> Self {
        Self { configs }
    }

    /// How an engine is built.
    ///
    /// Returns `None` for an engine that the fleet does not have.
    pub fn config(&self, engine: EngineId) -> Option<&EngineConfig> {
        self.configs.get(usize::from(engine.0))
    }

    /// Hands an event to an engine. Runs everything that was due before `now` first. Effects are appended in the order
    /// in which they happen, with the engine and the moment of each (never later than `now`).
    pub fn step(&mut self, engine: EngineId, event: Event, now: Moment, out: &mut Vec<(Moment, EngineId, Effect)>) {
        let _ = (engine, event);
        self.advance(now, out);
    }

    /// Runs everything that is due at `now`.
    pub fn advance(&mut self, now: Moment, out: &mut Vec<(Moment, EngineId, Effect)>) {
        let _ = (now, out);
    }

    /// When [`Fleet::advance`] has something to do next; `None` when only an event can move the fleet.
    pub fn next_timer(&self) -> Option<Moment> {
        None
    }

    /// The published load of every rank, as `/v1/loads` gives it: as old as the engine's publishing makes it (4.1).
    pub fn loads(&self, _engine: EngineId) -> Vec<RankLoad> {
        Vec::new()
    }

    /// The load as `/metrics` gives it: refreshed with the batch log only (4.3).
    pub fn metrics(&self, _engine: EngineId) -> Vec<RankLoad> {
        Vec::new()
    }

    /// The load as it truly is, for reports and tests.
    pub fn live(&self, _engine: EngineId) -> Vec<RankLoad> {
        Vec::new()
    }
}
