//! Runs the model on scaled real time: hands events in, hands effects to the exchanges that wait for them.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use r3router_core::time::Moment;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::truth::Tally;
use crate::model::{Effect, EngineId, Event, Fleet, Key, Pace, RankLoad};

/// The model and those who wait for it.
pub(crate) struct Drive {
    state: Mutex<State>,
    start: Instant,
    pace: Pace,
    wake: Notify,
}

struct State {
    fleet: Fleet,
    waiters: HashMap<Key, (usize, UnboundedSender<(usize, Effect)>)>,
    tallies: Vec<Tally>,
    next_key: u64,
    /// When the timer task will wake by itself.
    armed: Moment,
    effects: Vec<(Moment, EngineId, Effect)>,
}

impl Drive {
    pub(crate) fn new(fleet: Fleet, engines: usize, pace: Pace) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                fleet,
                waiters: HashMap::new(),
                tallies: (0..engines).map(|_| Tally::default()).collect(),
                next_key: 1,
                armed: Moment::NEVER,
                effects: Vec::new(),
            }),
            start: Instant::now(),
            pace,
            wake: Notify::new(),
        })
    }

    /// Names a new exchange, hands its event in, and sends its effects to `waiter` with `index`.
    pub(crate) fn open(
        &self,
        engine: EngineId,
        index: usize,
        waiter: &UnboundedSender<(usize, Effect)>,
        event: impl FnOnce(Key) -> Event,
    ) -> Key {
        let mut state = self.state.lock();
        let key = Key(state.next_key);
        state.next_key += 1;
        state.waiters.insert(key, (index, waiter.clone()));
        self.step(&mut state, engine, event(key));
        key
    }

    /// Hands an event in and waits for its answer: the status, or `None` when the engine died.
    pub(crate) async fn ask(&self, engine: EngineId, event: impl FnOnce(Key) -> Event) -> Option<u16> {
        let (sender, mut receiver) = unbounded_channel();
        self.open(engine, 0, &sender, event);
        drop(sender);
        match receiver.recv().await {
            Some((_, Effect::Answer { status, .. })) => Some(status),
            _ => None,
        }
    }

    /// Hands in an event that nobody waits for.
    pub(crate) fn tell(&self, engine: EngineId, event: Event) {
        let mut state = self.state.lock();
        if let Event::Disconnect { key } = &event {
            state.waiters.remove(key);
        }
        self.step(&mut state, engine, event);
    }

    fn step(&self, state: &mut State, engine: EngineId, event: Event) {
        // Read under the lock: the model's time must not go backwards.
        let now = self.pace.fleet(self.start.elapsed());
        let mut effects = std::mem::take(&mut state.effects);
        state.fleet.step(engine, event, now, &mut effects);
        state.deliver(&mut effects, now);
        state.effects = effects;
        if state.fleet.next_timer().is_some_and(|at| at < state.armed) {
            self.wake.notify_one();
        }
    }

    /// Runs everything that is due, and moves the model's clock to now.
    fn advance(&self, state: &mut State) {
        let now = self.pace.fleet(self.start.elapsed());
        let mut effects = std::mem::take(&mut state.effects);
        state.fleet.advance(now, &mut effects);
        state.deliver(&mut effects, now);
        state.effects = effects;
    }

    /// Keeps the model's timers; ends only when the task is dropped.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            let next = {
                let mut state = self.state.lock();
                self.advance(&mut state);
                state.armed = state.fleet.next_timer().unwrap_or(Moment::NEVER);
                state.armed
            };
            if next == Moment::NEVER {
                self.wake.notified().await;
            } else {
                let at = self.start + self.pace.real(next);
                tokio::select! {
                    () = tokio::time::sleep_until(at.into()) => {}
                    () = self.wake.notified() => {}
                }
            }
        }
    }

    /// Real time since the start at which the model's clock shows `moment`.
    pub(crate) fn real(&self, moment: Moment) -> std::time::Duration {
        self.pace.real(moment)
    }

    /// The model's time now.
    pub(crate) fn now(&self) -> Moment {
        self.pace.fleet(self.start.elapsed())
    }

    /// The published load of an engine's ranks. Nothing moves the model's clock while no event comes, and the report of an engine that
    /// sits idle is as fresh as that of one that works.
    pub(crate) fn loads(&self, engine: EngineId) -> Vec<RankLoad> {
        let mut state = self.state.lock();
        self.advance(&mut state);
        state.fleet.loads(engine)
    }

    /// The load as `/metrics` gives it.
    pub(crate) fn metrics(&self, engine: EngineId) -> Vec<RankLoad> {
        self.state.lock().fleet.metrics(engine)
    }

    /// The tally of an engine.
    pub(crate) fn tally<R>(&self, engine: EngineId, change: impl FnOnce(&mut Tally) -> R) -> R {
        change(&mut self.state.lock().tallies[usize::from(engine.0)])
    }

    /// The true load and the tally of an engine.
    pub(crate) fn truth<R>(&self, engine: EngineId, read: impl FnOnce(&[RankLoad], &mut Tally, Moment) -> R) -> R {
        let mut state = self.state.lock();
        let now = self.now();
        let live = state.fleet.live(engine);
        let tally = &mut state.tallies[usize::from(engine.0)];
        tally.sample(&live, now);
        read(&live, tally, now)
    }
}

impl State {
    fn deliver(&mut self, effects: &mut Vec<(Moment, EngineId, Effect)>, now: Moment) {
        for (at, engine, effect) in effects.drain(..) {
            let (key, last) = match &effect {
                Effect::Opened { key } | Effect::Chunk { key, .. } => (*key, false),
                Effect::Done { key, .. } | Effect::Reset { key } | Effect::Answer { key, .. } => (*key, true),
            };
            if let Effect::Done { reply, .. } = &effect
                && let Some(tally) = self.tallies.get_mut(usize::from(engine.0))
            {
                tally.done(reply, at);
            }
            // A waiter that is gone has told the model so, or is about to.
            if last {
                if let Some((index, waiter)) = self.waiters.remove(&key) {
                    let _gone = waiter.send((index, effect));
                }
            } else if let Some((index, waiter)) = self.waiters.get(&key) {
                let _gone = waiter.send((*index, effect));
            }
        }
        for (engine, tally) in self.tallies.iter_mut().enumerate() {
            tally.sample(&self.fleet.live(EngineId(engine as u16)), now);
        }
    }
}
