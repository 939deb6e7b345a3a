//! A closed-loop HTTP/1.1 load generator for benchmarks: one thread, prepared request bytes, keep-alive connections, replies
//! read to their end and thrown away. It does as little as it can, because on a small machine it shares the cores with the router.
pub mod backend;
mod histogram;
pub mod relay;
mod reply;
mod yardstick;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub use yardstick::decode_seconds;

use histogram::Histogram;
use reply::ReplyReader;

/// Bytes that one read takes at most.
const READ_BYTES: usize = 256 * 1024;

/// What to send, and for how long.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadPlan {
    /// `host:port` of the server.
    pub address: String,
    /// Path of the POST.
    pub path: String,
    /// The body, sent as it is with every request.
    pub body: String,
    /// Connections, each with one request at a time.
    pub connections: usize,
    /// Requests in all; 0 means as many as fit into `seconds`.
    #[serde(default)]
    pub requests: u64,
    /// Longest run, seconds.
    pub seconds: f64,
    /// Send at this rate in all, requests/s, instead of as fast as replies come; 0 is closed loop.
    #[serde(default)]
    pub rate: f64,
}

/// What was seen. Latencies in microseconds, from the first byte sent to the last byte read.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LoadReport {
    /// Requests answered with 200 and a whole body.
    pub ok: u64,
    /// Connects, resets and bodies cut short.
    pub broken: u64,
    /// Other statuses, with their counts.
    pub statuses: BTreeMap<u16, u64>,
    /// The first broken request's reason.
    pub first_error: Option<String>,
    /// Seconds from the first request to the last reply.
    pub seconds: f64,
    /// Answered requests per second.
    pub per_second: f64,
    /// Median latency, microseconds.
    pub p50_us: f64,
    /// 99th percentile, microseconds.
    pub p99_us: f64,
    /// Longest, microseconds.
    pub max_us: f64,
    /// Body bytes read.
    pub body_bytes: u64,
}

struct Shared {
    request: Vec<u8>,
    plan: LoadPlan,
    started: Instant,
    deadline: Instant,
    sent: AtomicU64,
}

#[derive(Default)]
struct Tally {
    report: LoadReport,
    latencies: Histogram,
    last: Option<Instant>,
}

/// Runs `plan` and returns what was seen.
///
/// # Errors
/// When the runtime cannot be made; a server that does not answer is a count in the report.
pub fn run_blocking(plan: &LoadPlan) -> std::io::Result<LoadReport> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(run(plan)))
}

async fn run(plan: &LoadPlan) -> LoadReport {
    let request = format!(
        "POST {} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{}",
        plan.path,
        plan.address,
        plan.body.len(),
        plan.body
    );
    let started = Instant::now();
    let shared = Arc::new(Shared {
        request: request.into_bytes(),
        started,
        deadline: started + Duration::from_secs_f64(plan.seconds),
        plan: plan.clone(),
        sent: AtomicU64::new(0),
    });
    let tasks: Vec<_> = (0..plan.connections).map(|_| tokio::spawn(connection(Arc::clone(&shared)))).collect();
    let mut total = Tally::default();
    for task in tasks {
        if let Ok(tally) = task.await {
            merge(&mut total, tally);
        }
    }
    let mut report = total.report;
    report.seconds = total.last.unwrap_or(started).duration_since(started).as_secs_f64();
    report.per_second = if report.seconds > 0.0 { report.ok as f64 / report.seconds } else { 0.0 };
    report.p50_us = total.latencies.quantile(0.50);
    report.p99_us = total.latencies.quantile(0.99);
    report.max_us = total.latencies.max();
    report
}

fn merge(total: &mut Tally, part: Tally) {
    total.report.ok += part.report.ok;
    total.report.broken += part.report.broken;
    total.report.body_bytes += part.report.body_bytes;
    for (status, count) in part.report.statuses {
        *total.report.statuses.entry(status).or_default() += count;
    }
    if total.report.first_error.is_none() {
        total.report.first_error = part.report.first_error;
    }
    total.latencies.add(&part.latencies);
    total.last = total.last.max(part.last);
}

/// Takes the number of the next request and, at a fixed rate, waits for its time.
async fn next_slot(shared: &Shared) -> Option<Instant> {
    let number = shared.sent.fetch_add(1, Ordering::Relaxed);
    if shared.plan.requests > 0 && number >= shared.plan.requests {
        return None;
    }
    let now = Instant::now();
    if shared.plan.rate > 0.0 {
        let due = shared.started + Duration::from_secs_f64(number as f64 / shared.plan.rate);
        if due >= shared.deadline {
            return None;
        }
        if due > now {
            tokio::time::sleep_until(due.into()).await;
        }
        return Some(Instant::now());
    }
    (now < shared.deadline).then_some(now)
}

async fn connection(shared: Arc<Shared>) -> Tally {
    let mut tally = Tally::default();
    let mut stream = None;
    let mut buffer = vec![0_u8; READ_BYTES];
    while let Some(begin) = next_slot(&shared).await {
        match exchange(&shared, &mut stream, &mut buffer).await {
            Ok((200, bytes)) => {
                tally.report.ok += 1;
                tally.report.body_bytes += bytes;
                tally.latencies.record(begin.elapsed());
            }
            Ok((status, _)) => *tally.report.statuses.entry(status).or_default() += 1,
            Err(error) => {
                stream = None;
                tally.report.broken += 1;
                tally.report.first_error.get_or_insert_with(|| error.to_string());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        tally.last = Some(Instant::now());
    }
    tally
}

async fn exchange(shared: &Shared, slot: &mut Option<TcpStream>, buffer: &mut [u8]) -> std::io::Result<(u16, u64)> {
    if slot.is_none() {
        let stream = TcpStream::connect(&shared.plan.address).await?;
        stream.set_nodelay(true)?;
        *slot = Some(stream);
    }
    let Some(stream) = slot.as_mut() else { return Err(std::io::ErrorKind::NotConnected.into()) };
    stream.write_all(&shared.request).await?;
    let mut reader = ReplyReader::default();
    loop {
        let read = stream.read(buffer).await?;
        if read == 0 {
            return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the reply was cut short"));
        }
        if let Some(done) = reader.feed(&buffer[..read])? {
            if done.close {
                *slot = None;
            }
            return Ok((done.status, done.body_bytes));
        }
    }
}
