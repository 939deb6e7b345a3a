//! Seeds that found a fault, each with a line that says what it found. They run first and name themselves when they fail again.
use r3router_core::admission::Admission;

use crate::drive::run;
use crate::plan::Plan;

/// The seed, and what it found.
const FOUND: &[(u64, &str)] = &[];

#[test]
fn faults_that_a_seed_found_do_not_come_back() {
    for (seed, what) in FOUND {
        if let Some(v) = run(&Plan::from_seed(*seed), false, Admission::new).failure {
            panic!("seed {seed} is back ({what}): `{}`: {}", v.invariant, v.text);
        }
    }
}
