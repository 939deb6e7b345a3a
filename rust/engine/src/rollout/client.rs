//! The closed loop: every slot sends, reads, checks, and begins again.
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;

use super::prompt::Prompts;
use super::reference::{self, Reference};
use super::scan::ReplyScan;
use super::verify::{Findings, TextCheck};
use super::{RolloutOptions, RolloutReport};
use crate::emulator::pattern::{Pattern, R3Shape, Rows};
use crate::emulator::{is_engine_timeout, quantile};

/// Pause of a slot after a failure that came at once, so that a refusing server is not hammered.
const PAUSE: Duration = Duration::from_millis(50);
/// Characters of a failure's text that are kept.
const REASON: usize = 160;

/// Keep-alive connections of one slot, one to each host.
#[derive(Default)]
pub(crate) struct Http {
    idle: HashMap<String, SendRequest<Full<Bytes>>>,
    busy: Option<SendRequest<Full<Bytes>>>,
}

impl Http {
    /// Sends one request. A connection that has died meanwhile is replaced once.
    pub(crate) async fn call(
        &mut self,
        method: Method,
        uri: &Uri,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, String> {
        let authority = uri.authority().ok_or_else(|| format!("{uri} has no host"))?.as_str().to_owned();
        let body = Bytes::from(body);
        let path = uri.path_and_query().map_or("/", |p| p.as_str());
        for fresh in [false, true] {
            let kept = self.idle.remove(&authority).filter(|s| !fresh && !s.is_closed());
            let was_kept = kept.is_some();
            let mut sender = match kept {
                Some(sender) => sender,
                None => connect(&authority).await?,
            };
            let request = Request::builder()
                .method(method.clone())
                .uri(path)
                .header(header::HOST, &authority)
                .header(header::CONTENT_TYPE, "application/json")
                .body(Full::new(body.clone()))
                .map_err(|e| e.to_string())?;
            if sender.ready().await.is_err() && was_kept {
                continue;
            }
            match sender.send_request(request).await {
                Ok(response) => {
                    self.busy = Some(sender);
                    return Ok(response);
                }
                Err(error) if was_kept && (error.is_canceled() || error.is_closed()) => {}
                Err(error) => return Err(format!("connection broke: {error}")),
            }
        }
        Err("connection broke: closed at once".to_owned())
    }

    /// The last reply was read to its end: its connection may be used again.
    pub(crate) fn give_back(&mut self, uri: &Uri) {
        if let (Some(sender), Some(authority)) = (self.busy.take(), uri.authority()) {
            self.idle.insert(authority.as_str().to_owned(), sender);
        }
    }
}

async fn connect(authority: &str) -> Result<SendRequest<Full<Bytes>>, String> {
    let stream = TcpStream::connect(authority).await.map_err(|e| format!("connect refused: {e}"))?;
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    tokio::spawn(async move {
        // Its end shows in the exchange.
        let _ended = connection.await;
    });
    Ok(sender)
}

/// Sends one half of a pair with the shared prefix straight to an engine, so that its cache has it. `url` is the engine's, `port` and
/// `room` are the pair's, `family` is the prefix.
///
/// # Errors
/// What the engine answered, when it was not 200.
pub async fn warm(url: &str, options: &RolloutOptions, port: u16, room: u64, family: u32) -> Result<(), String> {
    let uri: Uri = format!("{}/generate", url.trim_end_matches('/')).parse().map_err(|e| format!("url {url}: {e}"))?;
    let plain = RolloutOptions {
        routed_experts: false,
        by_reference: false,
        stream: false,
        output_tokens: 1,
        output_sigma: 0.0,
        ..options.clone()
    };
    // A number from far behind: no rollout of the run has these new tokens.
    let families = u64::from(options.families.max(1));
    let mut body = Prompts::new(&plain).prepare((1 << 50) * families + room * families + u64::from(family)).body;
    body.pop();
    let pair = format!(r#","bootstrap_host":"127.0.0.1","bootstrap_port":{port},"bootstrap_room":{room}}}"#);
    body.extend_from_slice(pair.as_bytes());
    let mut http = Http::default();
    let response = http.call(Method::POST, &uri, body).await?;
    let status = response.status().as_u16();
    let text = response.collect().await.map_err(|e| e.to_string())?.to_bytes();
    if status == 200 { Ok(()) } else { Err(format!("warming {url}: {status} {}", excerpt(&text))) }
}

struct Shared {
    options: RolloutOptions,
    uri: Uri,
    prompts: Prompts,
    pattern: Arc<Pattern>,
    next: AtomicU64,
    deadline: Instant,
    tally: Mutex<Tally>,
}

#[derive(Default)]
struct Tally {
    report: RolloutReport,
    latencies: Vec<f32>,
}

/// How one rollout ended.
enum Ended {
    Whole { findings: Option<Findings>, reference: bool },
    Timeout,
    Failed(String),
}

/// Runs `options` on the current runtime.
///
/// # Errors
/// When the URL cannot be read.
pub async fn run(options: &RolloutOptions) -> io::Result<RolloutReport> {
    let uri: Uri = format!("{}/generate", options.url.trim_end_matches('/'))
        .parse()
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, format!("url {}: {e}", options.url)))?;
    let shape = R3Shape { layers: options.layers, top_k: options.top_k, experts: options.experts };
    let started = Instant::now();
    let shared = Arc::new(Shared {
        prompts: Prompts::new(options),
        pattern: Pattern::new(shape),
        uri,
        next: AtomicU64::new(0),
        deadline: started + Duration::from_secs_f64(options.seconds),
        tally: Mutex::default(),
        options: options.clone(),
    });
    let mut slots = tokio::task::JoinSet::new();
    for _ in 0..options.outstanding {
        slots.spawn(slot(shared.clone()));
    }
    let limit = Duration::from_secs_f64(options.seconds + options.drain_seconds);
    let all = async { while slots.join_next().await.is_some() {} };
    let _cut_short = tokio::time::timeout_at((started + limit).into(), all).await;
    let seconds = started.elapsed().as_secs_f64();
    slots.shutdown().await;
    let mut tally = shared.tally.lock();
    let mut report = std::mem::take(&mut tally.report);
    report.seconds = seconds;
    report.per_second = report.completed as f64 / seconds.max(1e-9);
    report.latency_p50 = quantile(&mut tally.latencies, 0.50);
    report.latency_p99 = quantile(&mut tally.latencies, 0.99);
    Ok(report)
}

async fn slot(shared: Arc<Shared>) {
    let mut http = Http::default();
    loop {
        if Instant::now() >= shared.deadline {
            return;
        }
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        if shared.options.count > 0 && number >= shared.options.count {
            return;
        }
        let prepared = shared.prompts.prepare(number);
        let began = Instant::now();
        {
            let report = &mut shared.tally.lock().report;
            report.sent += 1;
            report.sends.insert(prepared.nonce, began);
        }
        let rows = Rows::of(prepared.nonce, 0, (prepared.prompt + prepared.output).saturating_sub(1));
        let ended = rollout(&shared, &mut http, prepared.body, rows).await.unwrap_or_else(|reason| {
            http = Http::default();
            Ended::Failed(reason)
        });
        let quick = matches!(ended, Ended::Failed(_)) && began.elapsed() < PAUSE;
        count(&shared, ended, began, rows);
        if quick {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

fn count(shared: &Shared, ended: Ended, began: Instant, rows: Rows) {
    // Raw bytes of the payload as an unsplit engine would send it.
    let expected = u64::from(rows.len()) * shared.pattern.shape().row_bytes() as u64;
    let mut tally = shared.tally.lock();
    match ended {
        Ended::Whole { findings, reference } => {
            tally.latencies.push(began.elapsed().as_secs_f32());
            let report = &mut tally.report;
            report.completed += 1;
            report.references += u64::from(reference);
            match findings {
                _ if !shared.options.routed_experts => {}
                None => {
                    report.missing_r3 += 1;
                    report.wrong_bytes += expected;
                }
                Some(findings) => {
                    report.payload_read += findings.read;
                    report.wrong_bytes += findings.wrong_bytes;
                    if findings.wrong_bytes > 0 {
                        report.wrong_replies += 1;
                    } else {
                        report.right_replies += 1;
                    }
                }
            }
        }
        Ended::Timeout => tally.report.engine_timeouts += 1,
        Ended::Failed(reason) => *tally.report.failures.entry(reason).or_default() += 1,
    }
}

async fn rollout(shared: &Shared, http: &mut Http, body: Vec<u8>, rows: Rows) -> Result<Ended, String> {
    let mut response = http.call(Method::POST, &shared.uri, body).await?;
    let status = response.status().as_u16();
    let mut scan = ReplyScan::new(TextCheck::new(shared.pattern.clone(), rows));
    while let Some(frame) = response.frame().await {
        let frame = frame.map_err(|e| format!("reply broke: {e}"))?;
        if let Some(bytes) = frame.data_ref() {
            scan.feed(bytes)?;
        }
    }
    http.give_back(&shared.uri);
    let (findings, rest) = scan.finish();
    if status != 200 {
        return Ok(failure(status, &rest));
    }
    let Some(object) = last_object(&rest, shared.options.stream) else {
        return Ok(Ended::Failed(format!("not a reply: {}", excerpt(&rest))));
    };
    let meta = &object["meta_info"];
    let finish = &meta["finish_reason"];
    if finish["type"] == "abort" || object.get("error").is_some() {
        return Ok(failure(200, &rest));
    }
    if finish["type"].is_null() {
        return Ok(Ended::Failed("the reply has no finish_reason".to_owned()));
    }
    match meta.get("output_store_ref").filter(|r| !r.is_null()) {
        None => Ok(Ended::Whole { findings, reference: false }),
        Some(value) => {
            let reference: Reference =
                serde_json::from_value(value.clone()).map_err(|e| format!("output_store_ref: {e}"))?;
            let findings = reference::check(http, &shared.uri, &reference, &shared.pattern, rows).await?;
            Ok(Ended::Whole { findings: Some(findings), reference: true })
        }
    }
}

/// The reply's object; in SSE the last event before `[DONE]`.
fn last_object(rest: &[u8], stream: bool) -> Option<serde_json::Value> {
    if !stream {
        return serde_json::from_slice(rest).ok();
    }
    let text = std::str::from_utf8(rest).ok()?;
    let event = text.split("\n\n").filter_map(|e| e.strip_prefix("data: ")).filter(|e| *e != "[DONE]").last()?;
    serde_json::from_str(event).ok()
}

fn failure(status: u16, body: &[u8]) -> Ended {
    let text = String::from_utf8_lossy(body);
    if is_engine_timeout(&text) { Ended::Timeout } else { Ended::Failed(format!("{status}: {}", excerpt(body))) }
}

/// The beginning of a text with its numbers taken out, so that failures of one kind are counted together.
fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(4 * REASON)]);
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '0'..='9' if out.ends_with('#') => {}
            '0'..='9' => out.push('#'),
            c => out.push(c),
        }
        if out.len() >= REASON {
            break;
        }
    }
    out
}
