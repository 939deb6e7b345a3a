//! One column: a fresh fleet, one router, one load, and what came of it.
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::Serialize;

use super::DemoOptions;
use super::process::{Lateness, Router, cpu_seconds, free_port};
use crate::emulator::{EmulateOptions, EngineTruth, RunningFleet, Scale, quantile};
use crate::rollout::{self, RolloutOptions};

/// What stands between the client and the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnKind {
    /// Our proxy with admission and the `start_len` rewrite off.
    Unbounded,
    /// The `sglang-router` wheel.
    Peer,
    /// r3router, R3 in-line.
    Inline,
    /// r3router, engines with the plug-in, R3 by reference.
    Reference,
}

impl ColumnKind {
    /// In the order in which they run.
    pub const ALL: [Self; 4] = [Self::Unbounded, Self::Peer, Self::Inline, Self::Reference];

    /// Its letter in the table.
    pub fn letter(self) -> &'static str {
        match self {
            Self::Unbounded => "a",
            Self::Peer => "a2",
            Self::Inline => "b",
            Self::Reference => "c",
        }
    }

    /// Its name in the table.
    pub fn name(self, options: &DemoOptions) -> String {
        match self {
            Self::Unbounded => "unbounded router".to_owned(),
            Self::Peer => options.peer_name.clone(),
            Self::Inline => "r3router in-line".to_owned(),
            Self::Reference => "r3router by reference".to_owned(),
        }
    }
}

/// What came of one column. Times and rates are the model's (unscaled).
#[derive(Clone, Debug, Serialize)]
pub struct Column {
    /// Which one.
    pub kind: ColumnKind,
    /// Its name.
    pub name: String,
    /// The router's arguments.
    pub arguments: Vec<String>,
    /// Rollouts sent.
    pub sent: u64,
    /// Rollouts that came back whole.
    pub completed: u64,
    /// Of those, with the right R3 to the last byte.
    pub right_replies: u64,
    /// Of those, without any R3.
    pub missing_r3: u64,
    /// Requests that engines ended by their own clocks, on either side.
    pub engine_timeouts: u64,
    /// Rollouts that the client saw fail by an engine's clock.
    pub client_timeouts: u64,
    /// Rollouts that failed otherwise, by reason.
    pub failures: BTreeMap<String, u64>,
    /// R3 bytes (raw int32 in-line, narrow by reference) that were wrong or missing.
    pub wrong_bytes: u64,
    /// Completed rollouts per second.
    pub rollouts_per_second: f64,
    /// Most requests in transfer on any decode rank.
    pub peak_transfer: u32,
    /// Mean of requests in transfer per decode rank.
    pub mean_transfer: f64,
    /// Mean of running requests per decode rank.
    pub mean_running: f64,
    /// Wait between the client's send and the first engine's sight of the request, seconds: median, 99th percentile.
    pub router_wait: [f64; 2],
    /// Wait between decode's sight of the request and its first token, seconds: median, 99th percentile.
    pub engine_wait: [f64; 2],
    /// Whole rollout as the client saw it, seconds: median, 99th percentile.
    pub latency: [f64; 2],
    /// CPU that the router used, seconds per completed rollout (real).
    pub router_cpu_per_rollout: f64,
    /// Cores that the router used on average (real).
    pub router_cores: f64,
    /// Cores that the emulated fleet and the client used on average (real).
    pub harness_cores: f64,
    /// How late a timer of this process rang, 99th percentile: above a second or so the machine was too busy (with other work, or with
    /// this scale) for the column to show what the fleet would do.
    pub late_p99: f64,
    /// Most memory that the router had, bytes.
    pub router_peak_memory: u64,
    /// Real seconds of the column.
    pub real_seconds: f64,
    /// What happened in each engine.
    pub engines: Vec<EngineTruth>,
}

#[cfg(test)]
impl Column {
    /// A column in which nothing happened.
    pub(super) fn empty(kind: ColumnKind) -> Self {
        Self {
            kind,
            name: String::new(),
            arguments: Vec::new(),
            sent: 0,
            completed: 0,
            right_replies: 0,
            missing_r3: 0,
            engine_timeouts: 0,
            client_timeouts: 0,
            failures: BTreeMap::new(),
            wrong_bytes: 0,
            rollouts_per_second: 0.0,
            peak_transfer: 0,
            mean_transfer: 0.0,
            mean_running: 0.0,
            router_wait: [0.0; 2],
            engine_wait: [0.0; 2],
            latency: [0.0; 2],
            router_cpu_per_rollout: 0.0,
            router_cores: 0.0,
            harness_cores: 0.0,
            late_p99: 0.0,
            router_peak_memory: 0,
            real_seconds: 0.0,
            engines: Vec::new(),
        }
    }
}

/// The router's arguments besides the fleet's addresses. Retries are off in every column, so that a timeout shows as one.
fn arguments(options: &DemoOptions, kind: ColumnKind, port: u16, prometheus: u16) -> Vec<String> {
    let mut out: Vec<String> =
        ["--host", "127.0.0.1", "--port", &port.to_string(), "--disable-retries"].map(str::to_owned).to_vec();
    out.extend(["--prometheus-port".to_owned(), prometheus.to_string(), "--log-level".to_owned(), "warn".to_owned()]);
    if kind == ColumnKind::Peer {
        // Its breaker stays as it comes: with --disable-circuit-breaker version 0.3.2 went idle after the first timeouts.
        out.extend(["--worker-startup-check-interval", "1", "--request-timeout-secs", "3600"].map(str::to_owned));
        return out;
    }
    // The router's clocks run with the fleet's.
    out.extend(["--time-scale".to_owned(), options.scale.to_string()]);
    if kind == ColumnKind::Unbounded {
        out.push("--no-admission".to_owned());
    }
    out
}

fn runtime(name: &str, threads: usize) -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(threads.max(1)).thread_name(name).enable_all().build()
}

/// Runs one column.
pub(super) fn run(options: &DemoOptions, kind: ColumnKind, logs: &Path) -> io::Result<Column> {
    let scale = Scale::new(options.scale);
    let emulate = EmulateOptions {
        prefill: options.prefill,
        decode: options.decode,
        port: 0,
        engine_version: options.engine_version.clone(),
        scale: options.scale,
        plugin: kind == ColumnKind::Reference,
        ..EmulateOptions::default()
    };
    let config = emulate.fleet().map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    let shape = config.r3;
    let engines = runtime("emulator", options.threads)?;
    let fleet = engines.block_on(async { RunningFleet::start(config) })?;
    let wire = |tokens: u32| scale.wire(tokens.into()) as u32;
    let load = RolloutOptions {
        outstanding: options.per_gpu * usize::from(options.prefill + options.decode),
        seconds: options.seconds / options.scale,
        cached_tokens: wire(options.cached_tokens),
        families: options.families,
        new_tokens: wire(options.new_tokens[0]),
        new_tokens_max: wire(options.new_tokens[1]),
        output_tokens: wire(options.output_tokens),
        output_sigma: options.output_sigma,
        output_max: wire(options.output_max),
        by_reference: kind == ColumnKind::Reference,
        layers: shape.layers,
        top_k: shape.top_k,
        experts: shape.experts,
        threads: options.threads,
        ..RolloutOptions::default()
    };
    let client = runtime("rollout", options.threads)?;
    if options.warm {
        client.block_on(warm(&fleet, &load)).map_err(io::Error::other)?;
    }
    let port = free_port()?;
    let mut arguments = arguments(options, kind, port, free_port()?);
    arguments.extend(fleet.router_arguments());
    let command = if kind == ColumnKind::Peer { &options.peer } else { &options.router };
    let router = Router::start(command, &arguments, port, &logs.join(format!("{}.log", kind.letter())))?;
    let load = RolloutOptions { url: router.url.clone(), ..load };
    fleet.reset_truth();
    let (own, theirs) = (cpu_seconds("self"), router.cpu_seconds());
    let lateness = Lateness::start();
    let report = client.block_on(rollout::run(&load))?;
    let late = lateness.stop();
    let truth = fleet.truth();
    let (own, theirs) = (cpu_seconds("self") - own, router.cpu_seconds() - theirs);
    let arrivals = fleet.arrivals();
    let peak_memory = router.peak_memory();
    drop(router);
    drop(fleet);
    engines.shutdown_background();
    client.shutdown_background();

    let decode: Vec<_> = truth.iter().filter(|e| e.role == "decode").flat_map(|e| &e.ranks).collect();
    let mean = |f: &dyn Fn(&crate::emulator::RankTruth) -> f64| {
        decode.iter().map(|r| f(r)).sum::<f64>() / decode.len().max(1) as f64
    };
    let mut waits: Vec<f32> = report
        .sends
        .iter()
        .filter_map(|(nonce, sent)| arrivals.get(nonce).map(|at| at.saturating_duration_since(*sent).as_secs_f32()))
        .collect();
    let both = |values: &mut [f32]| [quantile(values, 0.50) * options.scale, quantile(values, 0.99) * options.scale];
    let decode_engine = truth.iter().find(|e| e.role == "decode");
    let timeouts: u64 = truth.iter().map(|e| e.timeouts).sum();
    Ok(Column {
        kind,
        name: kind.name(options),
        arguments,
        sent: report.sent,
        completed: report.completed,
        right_replies: report.right_replies,
        missing_r3: report.missing_r3,
        engine_timeouts: timeouts.max(report.engine_timeouts),
        client_timeouts: report.engine_timeouts,
        failures: report.failures,
        wrong_bytes: report.wrong_bytes,
        rollouts_per_second: report.per_second / options.scale,
        peak_transfer: decode.iter().map(|r| r.peak_transfer).max().unwrap_or(0),
        mean_transfer: mean(&|r| r.mean_transfer),
        mean_running: mean(&|r| r.mean_running),
        router_wait: both(&mut waits),
        engine_wait: decode_engine.map_or([0.0; 2], |e| [e.wait_p50, e.wait_p99]),
        latency: [report.latency_p50 * options.scale, report.latency_p99 * options.scale],
        router_cpu_per_rollout: theirs / report.completed.max(1) as f64,
        router_cores: theirs / report.seconds.max(1e-9),
        harness_cores: own / report.seconds.max(1e-9),
        late_p99: late * options.scale,
        router_peak_memory: peak_memory,
        real_seconds: report.seconds,
        engines: truth,
    })
}

/// Puts the shared prefixes into the cache of every prefill rank, as the turns before have: one short pair for each, straight to the
/// engines, the ranks side by side.
async fn warm(fleet: &RunningFleet, load: &RolloutOptions) -> Result<(), String> {
    let addresses = fleet.addresses();
    let decode = addresses.iter().find(|a| a.role == "decode").ok_or("the fleet has no decode engine")?.url.clone();
    let mut all: tokio::task::JoinSet<Result<(), String>> = tokio::task::JoinSet::new();
    for (engine, prefill) in (0_u64..).zip(addresses.iter().filter(|a| a.role == "prefill")) {
        let ranks = u64::from(prefill.ranks);
        let port = prefill.bootstrap_port.ok_or("a prefill engine has no bootstrap port")?;
        for rank in 0..ranks {
            let (load, prefill, decode) = (load.clone(), prefill.url.clone(), decode.clone());
            all.spawn(async move {
                for family in 0..load.families.max(1) {
                    // A room leaves its rank as the remainder; no router draws numbers this small.
                    let room = ranks * (1 + u64::from(family) + (engine << 32)) + rank;
                    let (p, d) = tokio::join!(
                        rollout::warm(&prefill, &load, port, room, family),
                        rollout::warm(&decode, &load, port, room, family)
                    );
                    p.and(d)?;
                }
                Ok(())
            });
        }
    }
    while let Some(ended) = all.join_next().await {
        ended.map_err(|e| e.to_string())??;
    }
    Ok(())
}
