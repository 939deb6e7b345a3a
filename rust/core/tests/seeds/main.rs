//! Simulation by seeds: random fleets, workloads and faults drive the admission in virtual time, and every promise of the
//! design is checked at every step by books that share no code with it.
//!
//! `SIM_SEEDS=count` sets how many seeds run, `SIM_SEED=n` replays one and prints its trace.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
mod book;
mod capacity;
mod checks;
mod drive;
mod engines;
mod events;
mod faults;
mod loads;
mod mutants;
mod plan;
mod regressions;
mod rng;
mod router;
mod sustained;
mod views;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use r3router_core::admission::Admission;

use crate::drive::{Report, Tally, run};
use crate::plan::Plan;

/// Seeds of a normal run.
const SEEDS: u64 = 10_000;
/// Lines of a trace that a failure prints.
const TRACE_LINES: usize = 40;
/// How many of them may be reports.
const TRACE_REPORTS: usize = 8;
const REPORT: &str = " report of worker";

/// Seeds that must reach everything in [`REACHED`].
const ENOUGH_TO_REACH_ALL: u64 = 2000;
/// What the runs must come across, or the checks on it mean nothing.
const REACHED: &[&str] = &[
    "bound",
    "completed",
    "rejected",
    "retry",
    "removed",
    "dropped permit",
    "left while waiting",
    "left while bound",
    "delivery deadline",
    "queue_full",
    "queue_timeout",
    "too_large_for_fleet",
    "r3_arena_too_small",
    "no_available_workers",
    "failed: connect",
    "failed: reset",
    "failed: server",
    "failed: overloaded",
    "failed: transfer",
    "failed: mamba",
    "failed: deadline",
    "fault: dies",
    "fault: rank hangs",
    "fault: silent",
    "fault: late",
    "fault: lies",
    "fault: foreign",
    "fault: retracts",
    "fault: drains",
    "fault: pauses",
    "fault: retold",
    "names a worker",
];

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A failing seed: itself, the step, the promise, a short trace, and the command that replays it.
fn explain(seed: u64, steps: u64, lines: usize) -> String {
    let Report { failure, trace, tally } = run(&Plan::from_seed(seed), true, Admission::new);
    let mut text = String::new();
    let _ = match failure {
        Some(v) => writeln!(text, "seed {seed} breaks `{}` at step {}: {}", v.invariant, tally.steps, v.text),
        None => writeln!(
            text,
            "seed {seed} failed at step {steps} and does not when it runs again: it is not deterministic"
        ),
    };
    // Reports are most of a trace and seldom the cause: only the last few are shown.
    let reports = trace.iter().filter(|line| line.contains(REPORT)).count();
    let mut shown = 0;
    let trace: Vec<_> = trace
        .iter()
        .filter(|line| {
            shown += usize::from(line.contains(REPORT));
            !line.contains(REPORT) || shown + TRACE_REPORTS > reports
        })
        .collect();
    for line in &trace[trace.len().saturating_sub(lines)..] {
        let _ = writeln!(text, "  {}", line.chars().take(600).collect::<String>());
    }
    let _ = writeln!(text, "replay: SIM_SEED={seed} cargo test -p r3router-core --test seeds -- --nocapture");
    text
}

#[test]
fn every_promise_holds_at_every_step_of_every_seed() {
    if let Some(seed) = number("SIM_SEED") {
        let report = run(&Plan::from_seed(seed), true, Admission::new);
        for line in &report.trace {
            println!("{line}");
        }
        if let Some(v) = report.failure {
            panic!("seed {seed} breaks `{}` at step {}: {}", v.invariant, report.tally.steps, v.text);
        }
        println!("seed {seed} holds: {:?}", report.tally);
        return;
    }
    let count = number("SIM_SEEDS").unwrap_or(SEEDS);
    let mut total = Tally::default();
    let mut failures: BTreeMap<&'static str, Vec<(u64, u64)>> = BTreeMap::new();
    for seed in 0..count {
        let report = run(&Plan::from_seed(seed), false, Admission::new);
        total.steps += report.tally.steps;
        for (what, times) in report.tally.events {
            *total.events.entry(what).or_default() += times;
        }
        if let Some(v) = report.failure {
            failures.entry(v.invariant).or_default().push((seed, report.tally.steps));
        }
    }
    println!("{count} seeds, {} steps: {:?}", total.steps, total.events);
    let mut text = String::new();
    for (invariant, seeds) in &failures {
        let _ = writeln!(
            text,
            "\n`{invariant}` is broken by {} of {count} seeds: {:?}",
            seeds.len(),
            seeds.iter().map(|s| s.0).take(20).collect::<Vec<_>>()
        );
        // The shortest run tells most.
        let (seed, steps) = seeds.iter().min_by_key(|(_, steps)| *steps).unwrap();
        text.push_str(&explain(*seed, *steps, TRACE_LINES));
    }
    assert!(failures.is_empty(), "{text}");
    if count >= ENOUGH_TO_REACH_ALL {
        let missed: Vec<_> = REACHED.iter().filter(|what| !total.events.contains_key(**what)).collect();
        assert!(missed.is_empty(), "{count} seeds never reached {missed:?}: {:?}", total.events);
    }
}

#[test]
fn a_seed_runs_the_same_twice() {
    for seed in 0..100 {
        let plan = Plan::from_seed(seed);
        let (first, second) = (run(&plan, false, Admission::new), run(&plan, false, Admission::new));
        assert_eq!(first.tally.digest, second.tally.digest, "seed {seed}");
        assert_eq!(first.tally.steps, second.tally.steps, "seed {seed}");
    }
}
