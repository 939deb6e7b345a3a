//! The engines of one process, their words to each other and their timers.
use std::sync::Arc;

use r3router_core::time::Moment;
use r3router_core::topology::Role;

use super::config::EngineConfig;
use super::engine::Engine;
use super::event::{Effect, EngineId, Event, Fault};
use super::load::RankLoad;
use super::rank::RankStats;
use super::timers::{HEARTBEAT_LOSS, Out, Peer, Timer, Timers};

/// Engines that know each other: decode asks prefill by its place in the list.
pub struct Fleet {
    engines: Vec<Engine>,
    timers: Timers,
    now: Moment,
}

impl Fleet {
    /// A fleet of empty engines; an engine's [`EngineId`] is its place in the list.
    pub fn new(configs: Vec<EngineConfig>) -> Self {
        let prefill_ranks: Arc<[u16]> =
            configs.iter().map(|c| if c.role == Role::Prefill { c.ranks.max(1) } else { 0 }).collect();
        let engines = configs
            .into_iter()
            .enumerate()
            .map(|(i, c)| Engine::new(c, i as u64 + 1, Arc::clone(&prefill_ranks)))
            .collect();
        Self { engines, timers: Timers::default(), now: Moment::ZERO }
    }

    /// Number of engines.
    pub fn len(&self) -> usize {
        self.engines.len()
    }

    /// Whether the fleet has no engines.
    pub fn is_empty(&self) -> bool {
        self.engines.is_empty()
    }

    /// How an engine is built; `None` for an engine that the fleet does not have.
    pub fn config(&self, engine: EngineId) -> Option<&EngineConfig> {
        self.engine(engine).map(|e| &e.config)
    }

    fn engine(&self, engine: EngineId) -> Option<&Engine> {
        self.engines.get(usize::from(engine.0))
    }

    /// Hands an event to an engine. Runs everything that was due at `now` first. Effects are appended in the order in
    /// which they happen, with the moment and the engine of each (never later than `now`).
    pub fn step(&mut self, engine: EngineId, event: Event, now: Moment, out: &mut Vec<(Moment, EngineId, Effect)>) {
        self.advance(now, out);
        let killed = event == Event::Fault(Fault::Kill);
        let Some(target) = self.engines.get_mut(usize::from(engine.0)) else { return };
        target.event(event, &mut Out { now: self.now, engine, timers: &mut self.timers, effects: out });
        if killed {
            self.spread_death(engine);
        }
    }

    /// Runs everything that is due at `now`.
    pub fn advance(&mut self, now: Moment, out: &mut Vec<(Moment, EngineId, Effect)>) {
        while let Some((at, engine, timer)) = self.timers.pop_due(now) {
            self.now = self.now.max(at);
            if let Timer::Heartbeat(prefill) = &timer
                && self.engine(*prefill).is_some_and(|p| !p.is_dead())
            {
                continue;
            }
            let Some(target) = self.engines.get_mut(usize::from(engine.0)) else { continue };
            let dead = target.is_dead();
            target.timer(timer, &mut Out { now: self.now, engine, timers: &mut self.timers, effects: out });
            if !dead && target.is_dead() {
                self.spread_death(engine);
            }
        }
        self.now = self.now.max(now);
    }

    /// What other engines notice of a death.
    fn spread_death(&mut self, dead: EngineId) {
        let role = self.engine(dead).map(|e| e.config.role);
        for i in 0..self.engines.len() {
            let other = EngineId(i as u16);
            match (role, self.engines[i].config.role) {
                (Some(Role::Prefill), Role::Decode) => {
                    self.timers.push(self.now + HEARTBEAT_LOSS, other, Timer::Heartbeat(dead));
                }
                (Some(Role::Decode), Role::Prefill) => {
                    self.timers.push(self.now, other, Timer::Peer(Peer::DecodeLost(dead)));
                }
                _ => {}
            }
        }
    }

    /// When [`Fleet::advance`] has something to do next; `None` when only an event can move the fleet.
    pub fn next_timer(&self) -> Option<Moment> {
        self.timers.next()
    }

    /// The published load of every rank, as `/v1/loads` gives it: as old as the engine's publishing makes it (4.1).
    /// `measured_at` is the per-load timestamp.
    pub fn loads(&self, engine: EngineId) -> Vec<RankLoad> {
        self.engine(engine).map_or_else(Vec::new, |e| e.loads(self.now))
    }

    /// The load as `/metrics` gives it: refreshed with the batch log only (4.3).
    pub fn metrics(&self, engine: EngineId) -> Vec<RankLoad> {
        self.engine(engine).map_or_else(Vec::new, Engine::metrics)
    }

    /// The load as it truly is, for reports and tests.
    pub fn live(&self, engine: EngineId) -> Vec<RankLoad> {
        self.engine(engine).map_or_else(Vec::new, |e| e.live(self.now))
    }

    /// What every rank went through since the start.
    pub fn stats(&self, engine: EngineId) -> Vec<RankStats> {
        self.engine(engine).map_or_else(Vec::new, |e| e.ranks.iter().map(|r| r.stats.clone()).collect())
    }

    /// Whether new generate requests are held at the engine's front end (paused).
    pub fn is_paused(&self, engine: EngineId) -> bool {
        self.engine(engine).is_some_and(|e| e.paused)
    }

    /// Whether the engine's process is dead.
    pub fn is_dead(&self, engine: EngineId) -> bool {
        self.engine(engine).is_some_and(Engine::is_dead)
    }
}
