//! A sweep as a page.
use std::fmt::Write as _;

use std::path::Path;

use serde::Serialize;

use super::scenario::ScenarioError;
use super::sweep::{Row, STATIC, compare, scenarios};
use super::targets::{OF_BEST_STATIC, OF_UNBOUNDED, OF_UNBOUNDED_UNDER_SKEW, missed};

/// A folder of scenarios, swept.
#[derive(Clone, Debug, Serialize)]
pub struct Sweep {
    /// The table in Markdown.
    pub page: String,
    /// What was missed, by scenario; empty when every target is met.
    pub missed: Vec<(String, Vec<String>)>,
}

/// Sweeps a folder on all processors; `done` gets a line as each scenario is through. `date` and `command` stand in the page.
pub fn sweep(dir: &Path, date: &str, command: &str, done: impl Fn(&str) + Sync) -> Result<Sweep, ScenarioError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let rows = compare(&scenarios(dir)?, &STATIC, threads, |row| done(&line(row)));
    let all = rows.iter().map(|row| (row.computed.scenario.clone(), missed(row)));
    Ok(Sweep { page: page(&rows, date, command), missed: all.filter(|(_, m)| !m.is_empty()).collect() })
}

/// A row in one line.
fn line(row: &Row) -> String {
    let misses = missed(row);
    format!(
        "{}: {:.3} of the best static window ({}), {:.2} of unbounded: {}",
        row.computed.scenario,
        row.against_static(),
        row.best_static().0,
        row.against_unbounded(),
        if misses.is_empty() { "met".to_owned() } else { format!("MISSED: {}", misses.join("; ")) }
    )
}

/// The page of a sweep in Markdown. `date` and `command` say when and how it was made; the figures are those of fleets in
/// virtual time, and the same on every machine.
fn page(rows: &[Row], date: &str, command: &str) -> String {
    let (first, last) = (STATIC[0], STATIC[STATIC.len() - 1]);
    let mut out = format!(
        "# The computed window\n\n\
         Rollouts per second of fleet time: the engine model and the real admission core in virtual time, so that the figures are the\n\
         same on every machine. Written on {date} by\n\n    {command}\n\n\
         | column | what it is |\n|---|---|\n\
         | computed | with the window of `rust/core/src/window.rs` |\n\
         | best static | the best of {} fixed windows from {first} to {last} transfers per decode rank (which one in brackets), with everything else of the router the same |\n\
         | unbounded | a router without admission, as the field has them; where it puts requests stands in each scenario's `[baseline]` |\n\
         | timeouts | requests that an engine's own clock ended: computed, unbounded |\n\
         | over-reserved | requests that reached a decode rank which had no room for them: computed, unbounded |\n\
         | in transfer | the most at one decode rank at once: computed, unbounded |\n\
         | in router, in engine | wait before the binding, and from it to the first token, seconds, p50 / p99, computed |\n\n\
         Targets: at least {OF_BEST_STATIC} of the best static window and {OF_UNBOUNDED} of unbounded ({OF_UNBOUNDED_UNDER_SKEW} where 55 % of the requests\n\
         share one prefix), every request answered, no engine timeout and no over-reservation.\n\n\
         | scenario | computed | best static | ratio | unbounded | ratio | timeouts | over-reserved | in transfer | in router | in engine | verdict |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|\n",
        STATIC.len(),
    );
    for row in rows {
        let (c, u) = (&row.computed, &row.unbounded);
        let (window, s) = row.best_static();
        let misses = missed(row);
        let verdict = if misses.is_empty() { "met".to_owned() } else { format!("MISSED: {}", misses.join("; ")) };
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "| {} | {:.3} | {:.3} ({window}) | {:.3} | {:.3} | {:.2} | {}, {} | {}, {} | {}, {} | {:.1} / {:.1} | {:.1} / {:.1} | {verdict} |",
            c.scenario,
            c.rollouts_per_s,
            s.rollouts_per_s,
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
        "\n{} scenarios, {} with a missed target. Least against the best static window: {:.4}; least against unbounded: {:.3}.",
        rows.len(),
        rows.iter().filter(|r| !missed(r).is_empty()).count(),
        least(Row::against_static),
        least(Row::against_unbounded)
    );
    out
}
