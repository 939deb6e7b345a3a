//! Seeds that found a fault, each with a line that says what it found.
use r3router_core::admission::Admission;
use r3router_core::policy::PolicyConfig;

use crate::drive::run;
use crate::plan::Plan;

/// The seed, and what it found.
const FOUND: &[(u64, &str)] = &[
    (73, "a fixed window held only from the first tick on"),
    (345, "a request that a rank was kept for did not take another rank that was free before it"),
    (422, "a kept rank that became free did not make the router look again"),
    (586, "a pair that had rested did not make the router look again"),
    (684, "a report from the future made the router deaf to all later ones"),
    (2517, "requests that fit no rank any more waited for ever, and ranks were kept for them"),
    (5832, "a kept rank that drained meanwhile stayed shut for ever"),
    (856, "of two requests of a key that ranks were kept for, the younger went first"),
    (7820, "ranks were kept for the very requests that had failed on them"),
    (9478, "a request that fits an idle pair was not looked at behind sixteen that did not"),
];

#[test]
fn faults_that_a_seed_found_do_not_come_back() {
    for (seed, what) in FOUND {
        // Most were found when there were no policies yet.
        let mut before = Plan::from_seed(*seed);
        before.config.policies = PolicyConfig::default();
        for call in &mut before.calls {
            call.names = None;
        }
        for plan in [before, Plan::from_seed(*seed)] {
            if let Some(v) = run(&plan, false, Admission::new).failure {
                panic!("seed {seed} is back ({what}): `{}`: {}", v.invariant, v.text);
            }
        }
    }
}
