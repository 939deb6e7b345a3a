//! A rollout client: keeps a number of R3 samples outstanding, as a trainer does, and checks every byte that comes back.
//!
//! Retries are off: what a router or an engine does to a request is what is counted.
mod client;
mod prompt;
mod reference;
mod scan;
pub mod verify;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::time::Instant;

use serde::{Deserialize, Serialize};

pub use client::run;

/// What to send. Token counts are the wire's (already scaled).
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutOptions {
    /// Base URL of the router (or of one engine).
    pub url: String,
    /// Requests outstanding at any time.
    pub outstanding: usize,
    /// Requests in all; 0 means as many as fit into `seconds`.
    pub count: u64,
    /// Longest run, real seconds; nothing is sent after it.
    pub seconds: f64,
    /// How long to wait for what is outstanding then, real seconds; the rest is dropped and not counted.
    pub drain_seconds: f64,
    /// Prompt tokens that all requests share.
    pub cached_tokens: u32,
    /// Prompt tokens that only one request has.
    pub new_tokens: u32,
    /// Tokens to generate.
    pub output_tokens: u32,
    /// Ask for R3 at all.
    pub routed_experts: bool,
    /// Ask for a reference (`return_outputs_via_store`) and fetch it.
    pub by_reference: bool,
    /// Ask for SSE.
    pub stream: bool,
    /// Layers of a row.
    pub layers: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Experts.
    pub experts: u32,
    /// Seed of the prompts.
    pub seed: u64,
    /// Threads of [`run_blocking`].
    pub threads: usize,
}

impl Default for RolloutOptions {
    fn default() -> Self {
        Self {
            url: "http://127.0.0.1:30000".to_owned(),
            outstanding: 64,
            count: 0,
            seconds: 30.0,
            drain_seconds: 0.0,
            cached_tokens: 54_000,
            new_tokens: 3_000,
            output_tokens: 64,
            routed_experts: true,
            by_reference: false,
            stream: false,
            layers: 40,
            top_k: 8,
            experts: 256,
            seed: 1,
            threads: 1,
        }
    }
}

/// What came back. Times are real seconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RolloutReport {
    /// Requests sent.
    pub sent: u64,
    /// Replies with status 200 that ended with their length.
    pub completed: u64,
    /// Requests that an engine's own clock ended, by the engine's message.
    pub engine_timeouts: u64,
    /// Everything else that failed, with its reason.
    pub failures: BTreeMap<String, u64>,
    /// Completed replies whose payload was there and wrong.
    pub wrong_replies: u64,
    /// Payload bytes that were wrong or missing, in all replies that should have had a payload.
    pub wrong_bytes: u64,
    /// Completed replies without the payload that was asked for.
    pub missing_r3: u64,
    /// Completed replies whose payload was right to the last byte.
    pub right_replies: u64,
    /// Payload characters (in-line) or bytes (by reference) read.
    pub payload_read: u64,
    /// Replies that gave a reference.
    pub references: u64,
    /// Seconds from the first request to the end of the run.
    pub seconds: f64,
    /// Completed replies per second.
    pub per_second: f64,
    /// Median time of a completed rollout, from the first byte sent to the last byte checked.
    pub latency_p50: f64,
    /// 99th percentile of the same.
    pub latency_p99: f64,
    /// When each request was sent, by nonce; joined with the engines' arrivals it gives the wait in the router.
    #[serde(skip)]
    pub sends: HashMap<u64, Instant>,
}

/// Runs `options` on threads of its own.
///
/// # Errors
/// When the URL cannot be read or the runtime cannot be made; a server that does not answer is a count in the report.
pub fn run_blocking(options: &RolloutOptions) -> io::Result<RolloutReport> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(options.threads.max(1))
        .thread_name("rollout")
        .enable_all()
        .build()?;
    runtime.block_on(run(options))
}
