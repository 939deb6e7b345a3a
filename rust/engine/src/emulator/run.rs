//! Entry points: a fleet in the caller's runtime, and a process of its own.
use std::future::Future;
use std::io;

use super::config::{EmulateOptions, FleetConfig};
use super::server::RunningFleet;

/// Plays `config` until `stop` ends. `ready` is called once all ports listen.
///
/// # Errors
/// A port that cannot be bound.
pub async fn run(
    config: FleetConfig,
    ready: impl FnOnce(&RunningFleet),
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let fleet = RunningFleet::start(config)?;
    ready(&fleet);
    stop.await;
    Ok(())
}

/// `python -m r3router emulate`: plays a fleet until SIGINT or SIGTERM. `ready` gets the lines to print: the engines and the router command
/// that fits them.
///
/// # Errors
/// Options that do not fit, and ports that cannot be bound.
pub fn emulate_blocking(options: &EmulateOptions, ready: impl FnOnce(String)) -> io::Result<()> {
    let config = options.fleet().map_err(|message| io::Error::new(io::ErrorKind::InvalidInput, message))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(options.threads.max(1))
        .thread_name("emulator")
        .enable_all()
        .build()?;
    runtime.block_on(run(config, |fleet| ready(describe(fleet)), stopped()))
}

fn describe(fleet: &RunningFleet) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for engine in fleet.addresses() {
        let bootstrap = engine.bootstrap_port.map(|p| format!(", bootstrap port {p}")).unwrap_or_default();
        let _infallible = writeln!(text, "{:<8} {} with {} ranks{bootstrap}", engine.role, engine.url, engine.ranks);
    }
    let scale = fleet.scale().factor();
    let scale = if scale > 1.0 { format!(" --time-scale {scale}") } else { String::new() };
    let arguments = fleet.router_arguments().join(" ");
    let crate::emulator::pattern::R3Shape { layers, top_k, experts } = fleet.r3();
    let r3 = format!(" --r3-layers {layers} --r3-top-k {top_k} --r3-experts {experts}");
    let _infallible = write!(text, "\nA router for this fleet:\n  python -m r3router serve {arguments}{scale}{r3}");
    text
}

/// Ends at SIGINT or SIGTERM.
async fn stopped() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        }
        Err(_) => {
            let _ended = tokio::signal::ctrl_c().await;
        }
    }
}
