//! The computed window against every fixed one and against none, over scenarios.
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::scenario::{Scenario, ScenarioError, Window};
use super::{Report, run};

/// Fixed windows of a sweep, transfers per decode rank: every one up to 6, then two an octave. The largest is above the request
/// rows of a rank of the scenarios, so that the last one binds nowhere.
pub const STATIC: [u32; 16] = [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192];

/// One scenario of a sweep.
#[derive(Clone, Debug)]
pub struct Row {
    /// With the computed window.
    pub computed: Report,
    /// With each of the fixed windows.
    pub fixed: Vec<Report>,
    /// The baseline: no admission at all.
    pub unbounded: Report,
}

impl Row {
    /// The run with the best fixed window, and that window. Among equals, the smallest.
    pub fn best_static(&self) -> (u32, &Report) {
        let mut best = (0, &self.computed);
        for report in &self.fixed {
            if let Some(Window::Static(window)) = report.window
                && (best.0 == 0 || report.rollouts_per_s > best.1.rollouts_per_s)
            {
                best = (window, report);
            }
        }
        best
    }

    /// Rollouts per second of the computed window, in parts of the best fixed one.
    pub fn against_static(&self) -> f64 {
        self.computed.rollouts_per_s / self.best_static().1.rollouts_per_s.max(1e-9)
    }

    /// Rollouts per second of the computed window, in parts of the baseline.
    pub fn against_unbounded(&self) -> f64 {
        self.computed.rollouts_per_s / self.unbounded.rollouts_per_s.max(1e-9)
    }
}

/// Plays each scenario with the computed window, each of the fixed `windows` and the baseline: one run at a time on each of `threads`
/// threads. `done` is told of each row as it becomes whole. A run depends on nothing but its scenario, so that the rows are the
/// same with any number of threads.
pub fn compare(scenarios: &[Scenario], windows: &[u32], threads: usize, done: impl Fn(&Row) + Sync) -> Vec<Row> {
    let points: Vec<(Window, bool)> = std::iter::once((Window::Computed, true))
        .chain(windows.iter().map(|&n| (Window::Static(n), true)))
        .chain(std::iter::once((Window::Unbounded, false)))
        .collect();
    let next = AtomicUsize::new(0);
    let found: Vec<Mutex<Vec<Option<Report>>>> =
        scenarios.iter().map(|_| Mutex::new(vec![None; points.len()])).collect();
    let rows: Vec<Mutex<Option<Row>>> = scenarios.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let (place, point) = (number / points.len(), number % points.len());
            let Some(scenario) = scenarios.get(place) else { return };
            let mut scenario = scenario.clone();
            (scenario.router.window, scenario.router.admission) = points[point];
            let report = run(&scenario);
            let whole = {
                let Ok(mut reports) = found[place].lock() else { return };
                reports[point] = Some(report);
                if reports.iter().all(Option::is_some) { reports.drain(..).flatten().collect() } else { Vec::new() }
            };
            if let Some(row) = row(whole) {
                done(&row);
                if let Ok(mut place) = rows[place].lock() {
                    *place = Some(row);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    rows.into_iter().filter_map(|row| row.into_inner().ok().flatten()).collect()
}

/// A row of the runs in the order in which `compare` makes them.
fn row(mut reports: Vec<Report>) -> Option<Row> {
    let unbounded = reports.pop()?;
    let mut reports = reports.into_iter();
    Some(Row { computed: reports.next()?, fixed: reports.collect(), unbounded })
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
