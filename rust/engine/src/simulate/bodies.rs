//! What the router registers and reads: engines as it learns them, requests as its scanner sees them.
use std::sync::Arc;
use std::time::Duration;

use r3router_core::admission::{R3Need, Request};
use r3router_core::policy::Targets;
use r3router_core::time::Moment;
use r3router_core::topology::{Role, WorkerSpec};

use super::scenario::Scenario;
use super::workload::Job;
use super::world::Case;
use crate::model::EngineConfig;

/// How an engine is registered.
pub(super) fn spec(place: usize, config: &EngineConfig) -> WorkerSpec {
    let url = format!("http://{}{place}:30000", if config.role == Role::Prefill { "p" } else { "d" });
    WorkerSpec { url: url.into(), role: config.role, ranks: config.ranks, facts: config.facts() }
}

/// Text of a body with `input_ids`: about seven characters an id.
pub(super) fn body_bytes(job: &Job) -> u64 {
    400 + 7 * u64::from(job.prompt)
}

/// What the router knows of a request when it queues it.
pub(super) fn request(scenario: &Scenario, job: &Job, case: &Case) -> Request {
    let row = u64::from(scenario.fleet.engines().first().map_or(1280, |c| c.r3.row_bytes));
    let text = |rows: u32| (u64::from(rows) * row).div_ceil(3) * 4;
    // What the router can know: the bound on the output that the client named, or the default's worth.
    let out = job.max_new.unwrap_or(4096);
    let decode_rows = if scenario.router.start_len_rewrite { out } else { job.prompt + out };
    Request {
        prompt_tokens: job.prompt,
        max_new_tokens: job.max_new,
        key: job.family,
        prefix: Arc::clone(&job.prefix),
        deadline: scenario.router.deadline_s.map_or(Moment::NEVER, |s| case.arrived + Duration::from_secs_f64(s)),
        body_bytes: body_bytes(job),
        r3: job.r3.then(|| R3Need {
            prefill_text: text(job.prompt),
            decode_text: text(decode_rows),
            arena: u64::from(job.prompt) * row / 4,
        }),
        avoid: case.avoid.clone(),
        retry: case.retries > 0,
        targets: Targets::default(),
    }
}
