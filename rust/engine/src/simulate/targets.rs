//! What the computed window is held to, whatever the scenario.
use super::sweep::Row;

/// Rollouts per second of the best fixed window that the computed one reaches at least.
pub const OF_BEST_STATIC: f64 = 0.99;
/// The same of a router without admission.
pub const OF_UNBOUNDED: f64 = 0.99;
/// The same where 55 % of the requests share one prefix, and the baseline keeps them on the prefill rank that had it first.
pub const OF_UNBOUNDED_UNDER_SKEW: f64 = 1.8;
/// How the names of such scenarios begin.
const SKEWED: &str = "skew_55";

/// The targets that a row misses, in words; empty when it meets them all.
pub fn missed(row: &Row) -> Vec<String> {
    let c = &row.computed;
    let (of_static, of_unbounded) = (row.against_static(), row.against_unbounded());
    let least = if c.scenario.starts_with(SKEWED) { OF_UNBOUNDED_UNDER_SKEW } else { OF_UNBOUNDED };
    let mut missed = Vec::new();
    let mut need = |met: bool, text: String| {
        if !met {
            missed.push(text);
        }
    };
    need(!c.cut_off, "cut off by its limit of time".to_owned());
    need(c.failed == 0, format!("{} requests failed: {:?}", c.failed, c.reasons));
    need(c.engine_timeouts == 0, format!("{} engine timeouts", c.engine_timeouts));
    need(c.over_reservations == 0, format!("{} reservations above capacity", c.over_reservations));
    need(of_static >= OF_BEST_STATIC, format!("{of_static:.4} of the best static window"));
    need(of_unbounded >= least, format!("{of_unbounded:.4} of unbounded, at least {least} is wanted"));
    missed
}
