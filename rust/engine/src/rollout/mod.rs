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

pub use client::{run, warm};

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
    /// Prompt tokens that all requests of a family share.
    pub cached_tokens: u32,
    /// Prefixes that there are; requests take them in turn.
    pub families: u32,
    /// Prompt tokens that only one request has, at least.
    pub new_tokens: u32,
    /// The same at most (uniform between); below `new_tokens` all have the same.
    pub new_tokens_max: u32,
    /// Tokens to generate: the median.
    pub output_tokens: u32,
    /// Sigma of the log-normal spread around it; 0 for none.
    pub output_sigma: f64,
    /// Most tokens to generate.
    pub output_max: u32,
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
            families: 1,
            new_tokens: 3_000,
            new_tokens_max: 0,
            output_tokens: 64,
            output_sigma: 0.0,
            output_max: 8_192,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::{EmulateOptions, FaultRequest, RunningFleet};

    fn fleet() -> RunningFleet {
        let options = EmulateOptions {
            prefill: 0,
            decode: 0,
            regular: 1,
            port: 0,
            scale: 100.0,
            layers: 4,
            top_k: 2,
            ..EmulateOptions::default()
        };
        RunningFleet::start(options.fleet().unwrap()).unwrap()
    }

    fn options(fleet: &RunningFleet) -> RolloutOptions {
        RolloutOptions {
            url: fleet.addresses()[0].url.clone(),
            outstanding: 4,
            count: 12,
            seconds: 60.0,
            drain_seconds: 60.0,
            cached_tokens: 100,
            new_tokens: 30,
            output_tokens: 3,
            layers: 4,
            top_k: 2,
            ..RolloutOptions::default()
        }
    }

    #[tokio::test]
    async fn every_right_reply_is_right_in_whole_form_and_in_sse() {
        let fleet = fleet();
        for stream in [false, true] {
            let report = run(&RolloutOptions { stream, ..options(&fleet) }).await.unwrap();
            assert_eq!((report.sent, report.completed, report.right_replies, report.wrong_bytes), (12, 12, 12, 0));
            assert_eq!(report.payload_read, 12 * 132 * 32 / 3 * 4);
            assert!(report.failures.is_empty(), "{:?}", report.failures);
        }
        let arrivals = fleet.arrivals();
        let report = run(&RolloutOptions { seed: 9, ..options(&fleet) }).await.unwrap();
        assert!(report.sends.keys().all(|nonce| !arrivals.contains_key(nonce)));
        assert!(report.sends.keys().all(|nonce| fleet.arrivals().contains_key(nonce)));
    }

    #[tokio::test]
    async fn wrong_short_missing_and_failed_replies_are_counted_apart() {
        let fleet = fleet();
        fleet.fault(0, FaultRequest::WrongR3 { count: Some(3) }).unwrap();
        let report = run(&options(&fleet)).await.unwrap();
        assert_eq!((report.completed, report.wrong_replies, report.right_replies), (12, 3, 9));
        assert!(report.wrong_bytes > 3 * 132 * 8 / 2);
        fleet.fault(0, FaultRequest::ShortR3 { rows: 2, count: Some(1) }).unwrap();
        fleet.fault(0, FaultRequest::DropR3 { count: Some(2) }).unwrap();
        let report = run(&options(&fleet)).await.unwrap();
        // The fault that cuts rows may fall on a reply whose rows are dropped.
        assert_eq!((report.completed, report.missing_r3), (12, 2));
        assert!(report.wrong_bytes >= 2 * 132 * 32);
        fleet.fault(0, FaultRequest::Status { status: 500, body: None, count: Some(2) }).unwrap();
        let report = run(&options(&fleet)).await.unwrap();
        assert_eq!((report.completed, report.failures.values().sum::<u64>()), (10, 2));
        assert!(report.failures.keys().all(|reason| reason.starts_with("500: ")), "{:?}", report.failures);
        let timeout = r#"{"object":"error","message":"Decode transfer failed ... timed out after 300.0s in KVPoll.WaitingForInput"}"#;
        fleet.fault(0, FaultRequest::Status { status: 500, body: Some(timeout.to_owned()), count: Some(2) }).unwrap();
        let report = run(&options(&fleet)).await.unwrap();
        assert_eq!((report.completed, report.engine_timeouts, report.failures.len()), (10, 2, 0));
    }

    #[tokio::test]
    async fn a_run_without_end_stops_at_its_time() {
        let fleet = fleet();
        let report =
            run(&RolloutOptions { count: 0, seconds: 0.3, drain_seconds: 0.0, ..options(&fleet) }).await.unwrap();
        assert!(report.completed > 0);
        assert!(report.seconds >= 0.3);
        let nobody = RolloutOptions { url: "http://127.0.0.1:1".to_owned(), count: 3, ..options(&fleet) };
        let report = run(&nobody).await.unwrap();
        assert_eq!((report.completed, report.failures.values().sum::<u64>()), (0, 3));
    }
}
