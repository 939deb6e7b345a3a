//! Behaviour of the model, rule by rule. Section numbers are those of `engine-protocol.md`.
mod decode;
mod frontend;
mod prefill;
mod random;
mod stop;

use std::sync::Arc;
use std::time::Duration;

use r3router_core::time::Moment;

use super::*;

/// A fleet in virtual time with a record of everything that came out.
struct Lab {
    fleet: Fleet,
    now: Moment,
    seen: Vec<(Moment, EngineId, Effect)>,
}

const P: EngineId = EngineId(0);
const D: EngineId = EngineId(1);

fn secs(s: f64) -> Moment {
    Moment::from_secs_f64(s)
}

impl Lab {
    fn new(configs: Vec<EngineConfig>) -> Self {
        Self { fleet: Fleet::new(configs), now: Moment::ZERO, seen: Vec::new() }
    }

    /// One prefill engine and one decode engine.
    fn pair(prefill: EngineConfig, decode: EngineConfig) -> Self {
        Self::new(vec![prefill, decode])
    }

    fn step(&mut self, engine: EngineId, event: Event) {
        self.fleet.step(engine, event, self.now, &mut self.seen);
    }

    fn ask(&mut self, engine: EngineId, key: u64, ask: Ask) {
        self.step(engine, Event::Generate { key: Key(key), ask });
    }

    /// Both halves of one request: keys `key` (prefill) and `key + 1000` (decode).
    fn both(&mut self, key: u64, ask: &Ask) {
        self.ask(P, key, ask.clone());
        self.ask(D, key + 1000, ask.clone());
    }

    fn until(&mut self, at: f64) {
        let end = secs(at);
        while let Some(next) = self.fleet.next_timer().filter(|t| *t <= end) {
            self.fleet.advance(next, &mut self.seen);
        }
        self.fleet.advance(end, &mut self.seen);
        self.now = end;
    }

    fn done(&self, key: u64) -> Option<(f64, Reply)> {
        self.seen.iter().find_map(|(at, _, effect)| match effect {
            Effect::Done { key: k, reply } if *k == Key(key) => Some((at.as_secs_f64(), (**reply).clone())),
            _ => None,
        })
    }

    fn answer(&self, key: u64) -> Option<(f64, u16)> {
        self.seen.iter().find_map(|(at, _, effect)| match effect {
            Effect::Answer { key: k, status } if *k == Key(key) => Some((at.as_secs_f64(), *status)),
            _ => None,
        })
    }

    fn abort(&self, key: u64) -> (u16, String) {
        match self.done(key).map(|(_, r)| r.finish) {
            Some(Finish::Abort { status, message }) => (status, message),
            other => panic!("no abort for {key}: {other:?}"),
        }
    }

    fn load(&self, engine: EngineId, rank: usize) -> RankLoad {
        self.fleet.live(engine)[rank].clone()
    }
}

/// A request of the incident's size for room `room`.
fn ask(room: u64, prompt: u32, output: u32) -> Ask {
    Ask {
        rid: format!("r{room}.").into(),
        prompt_tokens: prompt,
        output_tokens: output,
        max_new_tokens: Some(output),
        body_bytes: 1000,
        bootstrap: Some(Bootstrap { prefill: Some(P), room }),
        ..Ask::default()
    }
}

/// A chain of `blocks` hashes that is shared up to `shared` with every chain of the same family.
fn chain(family: u64, shared: u32, blocks: u32, own: u64) -> Arc<[u64]> {
    (0..blocks).map(|i| family << 40 | u64::from(i) | if i < shared { 0 } else { (own + 1) << 20 }).collect()
}

fn small_prefill() -> EngineConfig {
    EngineConfig::prefill(1)
}

fn small_decode() -> EngineConfig {
    EngineConfig::decode(1)
}

#[test]
fn a_pair_delivers_all_tokens_and_both_replies() {
    let mut lab = Lab::pair(EngineConfig::prefill(2), EngineConfig::decode(2));
    lab.both(1, &Ask { r3_start: Some(0), ..ask(7, 3000, 64) });
    lab.until(30.0);
    let (p_at, p) = lab.done(1).unwrap();
    let (d_at, d) = lab.done(1001).unwrap();
    assert_eq!(
        (p.finish.clone(), p.output_tokens, p.prompt_tokens, p.rank),
        (Finish::Length, 1, 3000, 1),
        "1.3: prefill gives one token"
    );
    assert_eq!((d.finish.clone(), d.output_tokens), (Finish::Length, 64));
    assert!(p_at < d_at);
    assert_eq!(
        p.r3.unwrap(),
        R3Rows { start: 0, rows: 3000, junk_below: 0, text_bytes: 5_120_000, by_reference: false }
    );
    assert_eq!(
        (d.r3.unwrap().rows, d.r3.unwrap().junk_below),
        (3063, 3000),
        "1.3: D covers prompt + out - 1, prompt rows are stale"
    );
    // Prefill takes 3000 / 7000 s and 30 ms; decode 63 steps of 14.1 ms and a little.
    assert!((p.times.delivered.as_secs_f64() - 0.47).abs() < 0.05, "{:?}", p.times);
    assert!((d.times.finished.since(d.times.first_token).as_secs_f64() - 63.0 * 0.0141).abs() < 0.05, "{:?}", d.times);
    for engine in [P, D] {
        for load in lab.fleet.live(engine) {
            assert_eq!((load.used_tokens, load.running, load.waiting_total(), load.mamba_used), (0, 0, 0, 0));
        }
    }
}

#[test]
fn decode_leaves_r3_out_when_its_only_token_came_from_prefill() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.both(1, &Ask { r3_start: Some(0), ..ask(1, 100, 1) });
    lab.both(2, &Ask { r3_start: Some(100), ..ask(2, 100, 3) });
    lab.until(10.0);
    assert_eq!((lab.done(1).unwrap().1.r3.unwrap().rows, lab.done(1001).unwrap().1.r3), (100, None));
    assert_eq!(lab.done(1002).unwrap().1.r3.unwrap().rows, 2, "start_len = prompt: output rows only");
}

#[test]
fn the_same_events_give_the_same_effects() {
    let run = || {
        let mut lab = Lab::pair(EngineConfig::prefill(4), EngineConfig::decode(4));
        for i in 1..200 {
            lab.until(i as f64 * 0.01);
            lab.both(i, &Ask { r3_start: Some(0), ..ask(i, 2000 + (i as u32 * 977) % 9000, 30) });
        }
        lab.until(500.0);
        lab.seen
    };
    assert_eq!(run(), run());
}
