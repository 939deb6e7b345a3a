//! The computed window against every fixed one and against none, over a folder of scenarios.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::scenario::{Scenario, ScenarioError, Window};
use super::{Report, run};

/// Fixed windows of a sweep, transfers per decode rank.
pub const STATIC: [u32; 11] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 96];

/// One scenario of a sweep.
#[derive(Clone, Debug)]
pub struct Row {
    /// With the computed window.
    pub computed: Report,
    /// With the best of the fixed windows.
    pub best_static: Report,
    /// The baseline: no admission at all.
    pub unbounded: Report,
}

impl Row {
    /// Rollouts per second of the computed window, in parts of the best fixed one.
    pub fn against_static(&self) -> f64 {
        self.computed.rollouts_per_s / self.best_static.rollouts_per_s.max(1e-9)
    }

    /// Rollouts per second of the computed window, in parts of the baseline.
    pub fn against_unbounded(&self) -> f64 {
        self.computed.rollouts_per_s / self.unbounded.rollouts_per_s.max(1e-9)
    }

    fn best(&self) -> u32 {
        match self.best_static.window {
            Some(Window::Static(n)) => n,
            _ => 0,
        }
    }
}

/// Plays one scenario with the computed window, every fixed window and the baseline.
pub fn compare(scenario: &Scenario) -> Row {
    let with = |window: Window, admission: bool| {
        let mut s = scenario.clone();
        (s.router.window, s.router.admission) = (window, admission);
        run(&s)
    };
    let computed = with(Window::Computed, true);
    let mut best: Option<Report> = None;
    for n in STATIC {
        let report = with(Window::Static(n), true);
        if best.as_ref().is_none_or(|b| report.rollouts_per_s > b.rollouts_per_s) {
            best = Some(report);
        }
    }
    let unbounded = with(Window::Unbounded, false);
    Row { best_static: best.unwrap_or_else(|| computed.clone()), computed, unbounded }
}

/// The scenarios of a folder, in the order of their names.
pub fn scenarios(dir: &Path) -> Result<Vec<Scenario>, ScenarioError> {
    let error = |message: String| ScenarioError { source: dir.display().to_string(), message };
    let entries = std::fs::read_dir(dir).map_err(|e| error(format!("cannot be read: {e}")))?;
    let mut paths: Vec<PathBuf> = entries
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "toml"))
        .collect();
    paths.sort();
    if paths.is_empty() {
        return Err(error("no *.toml in it".to_owned()));
    }
    paths.iter().map(|p| Scenario::read(p)).collect()
}

/// Sweeps a folder; returns the table, and writes it to `write` when that is given.
pub fn sweep(dir: &Path, write: Option<&Path>) -> Result<String, ScenarioError> {
    let rows: Vec<Row> = scenarios(dir)?.iter().map(compare).collect();
    let page = page(&rows);
    if let Some(path) = write {
        std::fs::write(path, &page).map_err(|e| ScenarioError {
            source: path.display().to_string(),
            message: format!("cannot be written: {e}"),
        })?;
    }
    Ok(page)
}

fn page(rows: &[Row]) -> String {
    let mut out = String::from(
        "# The computed window\n\n\
         Rollouts per second of fleet time, in virtual time: the engine model and the real admission core. Written by\n\
         `python -m r3router simulate --sweep tests/sim/scenarios --write benches/results/window.md`.\n\n\
         - computed: the window of `rust/core/src/window.rs`; best static: the best of fixed windows of 1 to 96 transfers per decode\n\
         \x20 rank (which one in brackets), with everything else of the router the same.\n\
         - unbounded: a router without admission, as the field has them; where it puts requests stands in each scenario's `[baseline]`.\n\
         - timeouts: requests that an engine's own clock ended (computed / unbounded). Over-reserved: requests that were sent to a\n\
         \x20 decode rank that had no room for them (computed / unbounded). In transfer: the highest of any decode rank.\n\n\
         | scenario | computed | best static | ratio | unbounded | ratio | timeouts | over-reserved | in transfer | router p50/p99 s | engine p50/p99 s |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let (c, s, u) = (&row.computed, &row.best_static, &row.unbounded);
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "| {} | {:.3} | {:.3} ({}) | {:.3} | {:.3} | {:.2} | {} / {} | {} / {} | {} / {} | {:.1} / {:.1} | {:.1} / {:.1} |",
            c.scenario,
            c.rollouts_per_s,
            s.rollouts_per_s,
            row.best(),
            row.against_static(),
            u.rollouts_per_s,
            row.against_unbounded(),
            c.engine_timeouts,
            u.engine_timeouts,
            c.over_reservations,
            u.over_reservations,
            c.peak_transfer,
            u.peak_transfer,
            c.router_wait_s.p50,
            c.router_wait_s.p99,
            c.engine_wait_s.p50,
            c.engine_wait_s.p99,
        );
    }
    let least = |f: fn(&Row) -> f64| rows.iter().map(f).fold(f64::INFINITY, f64::min);
    let _ = writeln!(
        out,
        "\n{} scenarios. Least against the best static window: {:.3}; least against unbounded: {:.2}.",
        rows.len(),
        least(Row::against_static),
        least(Row::against_unbounded)
    );
    out
}
