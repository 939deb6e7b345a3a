//! Starvation under load that never ends: small requests keep every rank full, and one that needs most of a rank waits.
use std::collections::VecDeque;
use std::time::Duration;

use r3router_core::admission::{Admission, AdmissionConfig, Decision, Outcome, Permit, Request, WindowMode};
use r3router_core::time::Moment;
use r3router_core::topology::{EngineFacts, Role, WorkerSpec};

use crate::rng::Rng;

/// KV pool of a decode rank, tokens.
const POOL: u64 = 100_000;
/// Prompt of the request that waits: it fits a rank that is more than half empty.
const LARGE: u32 = 60_000;
/// Small requests that wait at any time.
const BACKLOG: usize = 60;

fn worker(role: Role, ranks: u16) -> WorkerSpec {
    let facts = EngineFacts {
        max_running: Some(24),
        extra_slots: Some(0),
        max_total_tokens: Some(POOL),
        page_size: Some(1),
        chunked_prefill_size: Some(1 << 20),
        reports_load: false,
        ..EngineFacts::default()
    };
    WorkerSpec { url: format!("http://{role:?}").to_lowercase().into(), role, ranks, facts }
}

/// Requests that were bound before the large one, and how many may be before they count as overtakes: the turns of its own key,
/// and a few times what was open at most. `None` when it was never bound.
fn overtakes(seed: u64, max_overtakes: u32) -> Option<(usize, usize)> {
    let mut rng = Rng::new(seed);
    let config = AdmissionConfig { window: WindowMode::Static(16), max_overtakes, seed, ..AdmissionConfig::default() };
    let mut core = Admission::new(config, Box::new(|| {}));
    let mut now = Moment(1_000_000_000);
    let decodes = rng.range(1, 6) as u16;
    core.add_worker(worker(Role::Prefill, 4), now);
    core.add_worker(worker(Role::Decode, decodes), now);
    let keys = rng.pick(&[1, 3, 8]);
    let small = |rng: &mut Rng| Request {
        prompt_tokens: rng.range(3_000, 9_000) as u32,
        max_new_tokens: Some(rng.range(1, 500) as u32),
        key: rng.range(1, keys),
        deadline: Moment::NEVER,
        ..Request::default()
    };
    let large = Request {
        prompt_tokens: LARGE,
        max_new_tokens: Some(100),
        // Behind others of its key, or alone in its own.
        key: rng.pick(&[0, 1]),
        deadline: Moment::NEVER,
        ..Request::default()
    };
    let mut open: VecDeque<Permit> = VecDeque::new();
    let (mut ticket, mut waiting, mut before, mut most) = (None, 0, 0, 0);
    let mut out = Vec::new();
    for turn in 0..6000 {
        now = now + Duration::from_millis(rng.range(1, 30));
        while waiting < BACKLOG {
            core.submit(small(&mut rng), now).expect("there is room");
            waiting += 1;
        }
        if turn == 300 {
            ticket = Some(core.submit(large.clone(), now).expect("it fits an idle rank"));
        }
        if !open.is_empty() {
            let at = rng.range(0, open.len() as u64 - 1).min(rng.range(0, open.len() as u64 - 1)) as usize;
            let permit = open.remove(at).expect("it is there");
            core.delivered(&permit, now);
            core.leg_ended(&permit, Role::Prefill, now);
            core.finish(permit, Outcome::Completed { output_tokens: 1 }, now);
        }
        core.poll(now, &mut out);
        for decision in out.drain(..) {
            let Decision::Bind(binding) = decision else { panic!("nothing may be refused") };
            if Some(binding.ticket) == ticket {
                let turns = if large.key == 0 { 1 } else { BACKLOG };
                return Some((before, (turns + 1) * (keys as usize + 1) + 4 * most));
            }
            before += usize::from(ticket.is_some());
            waiting -= 1;
            open.push_back(binding.permit);
        }
        most = most.max(open.len());
    }
    None
}

#[test]
fn a_large_request_comes_through_a_stream_of_small_ones_that_never_ends() {
    for seed in 0..200 {
        let max_overtakes = [0, 1, 4, 16, 64][seed as usize % 5];
        let (before, free) = overtakes(seed, max_overtakes).expect("it is bound some day");
        let limit = free + 2 * max_overtakes as usize;
        assert!(before <= limit, "seed {seed}: {before} went before it, {limit} allowed");
    }
}

#[test]
fn without_a_bound_on_overtakes_the_stream_starves_it() {
    let starved = (0..20).filter(|seed| overtakes(*seed, u32::MAX).is_none()).count();
    assert!(starved > 10, "the stream is too thin to starve anything: {starved} of 20");
}
