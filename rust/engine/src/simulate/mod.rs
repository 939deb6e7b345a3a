//! Fleets in virtual time: the engine model, the real admission core and a client in one event loop, without a clock.
//! Minutes of fleet time take seconds, and a seed gives the same run every time.
//!
//! `run` plays one scenario; `compare` plays many with the computed window, with fixed ones and with none; `missed` says which
//! targets a row misses, and `sweep` writes a folder's table.
mod attempt;
mod bodies;
mod lengths;
mod plain;
mod report;
mod scenario;
mod sweep;
mod table;
mod targets;
#[cfg(test)]
mod tests;
mod workload;
mod world;

use std::path::Path;

use r3router_core::admission::{AdmissionConfig, WindowMode};

pub use lengths::Lengths;
pub use report::{DecodeRank, Report, Waits};
pub use scenario::{
    AllocationSpec, Baseline, Class, FaultKind, FaultSpec, FleetSpec, Placement, RouterSpec, Scenario, ScenarioError,
    SideSpec, VersionSpec, Window, Workload,
};
pub use sweep::{Row, STATIC, compare, scenarios};
pub use table::{Sweep, sweep};
pub use targets::{OF_BEST_STATIC, OF_UNBOUNDED, OF_UNBOUNDED_UNDER_SKEW, missed};

use crate::model::Finish;

/// Plays a scenario to its end.
pub fn run(scenario: &Scenario) -> Report {
    world::World::new(scenario).run()
}

/// Plays the scenario of a file; the report as JSON.
pub fn run_file(path: &Path) -> Result<String, ScenarioError> {
    let report = run(&Scenario::read(path)?);
    serde_json::to_string_pretty(&report)
        .map_err(|e| ScenarioError { source: path.display().to_string(), message: e.to_string() })
}

fn admission_config(scenario: &Scenario) -> AdmissionConfig {
    AdmissionConfig {
        window: match scenario.router.window {
            Window::Computed => WindowMode::Computed,
            Window::Unbounded => WindowMode::Unbounded,
            Window::Static(n) => WindowMode::Static(n),
        },
        queue_max_requests: scenario.router.queue_max,
        seed: scenario.router.seed,
        ..AdmissionConfig::default()
    }
}

/// A failure in a few words, without names and numbers, so that it can be counted.
fn reason(finish: &Finish) -> String {
    match finish {
        Finish::Length => "length".to_owned(),
        Finish::Abort { status, message } => {
            let head = message.split(" for request").next().unwrap_or(message);
            let tail = message.rsplit("): ").next().filter(|t| *t != message).unwrap_or("");
            format!("{status} {head}{}{tail}", if tail.is_empty() { "" } else { ": " })
        }
    }
}
