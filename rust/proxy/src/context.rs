//! One client request from its head to the last byte of its reply: what all of its sub-requests share, and how its end is counted.
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use parking_lot::Mutex;
use r3router_core::error::Kind;
use r3router_core::policy::Targets;
use r3router_core::wire::{Facts, Route};

use crate::app::App;
use crate::live::{Sub, Trace};
use crate::metrics::ClientOutcome;
use crate::trace::{self, Place};
use crate::worker::Worker;

/// Request headers that reach the engines beside the router's own.
const FORWARDED: [HeaderName; 5] = [
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("x-correlation-id"),
    ROUTING_KEY,
];

/// Names the sample or session that a request belongs to.
pub const ROUTING_KEY: HeaderName = HeaderName::from_static("x-smg-routing-key");
/// Says how routing payloads reach the client.
pub const R3_TRANSPORT: HeaderName = HeaderName::from_static("x-r3-transport");
/// Carries the request's id in replies.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What all sub-requests of a request share.
#[derive(Debug)]
pub struct Shared {
    /// The router.
    pub app: Arc<App>,
    /// The engine route.
    pub route: Route,
    /// Path (and query) that the engines get.
    pub uri: Uri,
    /// The client's body.
    pub body: Bytes,
    /// What was read of it.
    pub facts: Facts,
    /// Headers for the legs.
    pub headers: HeaderMap,
    /// The client's own `authorization`, when it may reach engines.
    pub client_auth: Option<HeaderValue>,
    /// When the request came.
    pub arrived: Instant,
    /// Pauses of the fleet until then.
    pub paused_before: Duration,
    /// Model name, "" when the client named none.
    pub model: String,
    /// Hash of the routing key, 0 without one.
    pub key: u64,
    /// Its trace, when that is recorded.
    pub trace: Option<Arc<trace::Request>>,
    /// Where the client wants it served.
    pub targets: Targets,
    /// Whether payloads leave by reference.
    pub by_ref: bool,
    /// Whether references go on to the sink.
    pub sink: bool,
    /// Address that references name, "" when they are not wanted.
    pub base: Arc<str>,
}

impl Shared {
    /// Headers of a leg to `worker`: the worker's key, or the client's own where the router does not check clients itself.
    pub fn leg_headers(&self, worker: &Worker) -> HeaderMap {
        let mut headers = self.headers.clone();
        if let Some(auth) = worker.key.get().or_else(|| self.client_auth.clone()) {
            headers.insert(header::AUTHORIZATION, auth);
        }
        headers
    }

    /// When the request must be over, by what is known now: it moves on while the fleet is paused, from the request's arrival on.
    pub fn deadline(&self) -> Instant {
        let paused = self.app.gate.paused_total().saturating_sub(self.paused_before);
        self.arrived + self.app.settings.request_timeout_secs + paused
    }
}

/// The headers of `from` that legs carry.
pub fn forwarded(from: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    for name in FORWARDED {
        // A list may come in several headers: of `tracestate`, all of them count.
        let values = from.get_all(&name).iter().take(if name == "tracestate" { usize::MAX } else { 1 });
        for value in values {
            headers.append(&name, value.clone());
        }
    }
    headers
}

/// The request's id: the first of the configured headers, else a new one in the style of the SGLang router.
pub fn request_id(app: &App, route: Option<Route>, headers: &HeaderMap) -> HeaderValue {
    const DEFAULT: [&str; 4] = ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"];
    let configured = &app.settings.request_id_headers;
    let found = if configured.is_empty() {
        DEFAULT.iter().find_map(|name| headers.get(*name))
    } else {
        configured.iter().find_map(|name| headers.get(name.as_str()))
    };
    found.cloned().unwrap_or_else(|| new_id(route))
}

fn new_id(route: Option<Route>) -> HeaderValue {
    const DIGITS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
    let prefix: &[u8] = match route {
        Some(Route::Generate) => b"gnt-",
        Some(Route::Chat) => b"chatcmpl-",
        Some(Route::Completions) => b"cmpl-",
        None => b"req-",
    };
    let mut id = [0u8; 33];
    let mut bits: u128 = rand::random();
    let (head, tail) = id.split_at_mut(prefix.len());
    head.copy_from_slice(prefix);
    for byte in tail.iter_mut().take(24) {
        *byte = DIGITS[(bits & 31) as usize];
        bits >>= 5;
    }
    HeaderValue::from_bytes(&id[..prefix.len() + 24]).unwrap_or_else(|_| HeaderValue::from_static("req-unknown"))
}

/// What the log line of a request says beside its outcome.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// Ids and ranks of the last attempt.
    pub trace: Trace,
    /// Wait in the router's queue.
    pub wait: Duration,
    /// Attempts made.
    pub attempts: u32,
    /// Tokens generated, when the reply said it.
    pub output_tokens: Option<u32>,
}

#[derive(Debug, Default)]
struct Progress {
    line: Line,
    bytes: u64,
    status: u16,
    outcome: Option<ClientOutcome>,
    error: Option<&'static str>,
    dispatched: bool,
    /// The sub-request that was dispatched last, for ids and ranks when nobody is left to note them.
    last: Option<Arc<Sub>>,
}

/// Counts a request: started when it is made, ended when it is dropped, with the outcome that was set, or as left by the client.
#[derive(Debug)]
pub struct Count {
    app: Arc<App>,
    route: Option<Route>,
    path: &'static str,
    id: HeaderValue,
    arrived: Instant,
    /// Where the client stands in a trace of its own.
    client: Option<Place>,
    trace: Option<Arc<trace::Request>>,
    /// The trace that begins here and is not recorded.
    unrecorded: Option<Place>,
    progress: Mutex<Progress>,
}

impl Count {
    /// A POST to `path` that begins now.
    pub fn start(app: &Arc<App>, route: Option<Route>, path: &'static str, headers: &HeaderMap) -> Self {
        app.metrics.start(route);
        let (arrived, client) = (Instant::now(), Place::of(headers));
        let origin = app.traces.as_ref().map(|traces| (traces, traces.origin(client)));
        let trace =
            origin.and_then(|(traces, origin)| trace::Request::begin(traces, (&Method::POST, path), origin, arrived));
        let unrecorded = origin.and_then(|(_, origin)| origin.unrecorded());
        let id = request_id(app, route, headers);
        Self { app: Arc::clone(app), route, path, id, arrived, client, trace, unrecorded, progress: Mutex::default() }
    }

    /// Its trace, when that is recorded.
    pub fn trace(&self) -> Option<&Arc<trace::Request>> {
        self.trace.as_ref()
    }

    /// Headers for engines, `from` the client's: those of a trace that begins here and is not recorded say so.
    pub fn forwarded(&self, from: &HeaderMap) -> HeaderMap {
        let mut headers = forwarded(from);
        if let Some(place) = self.unrecorded {
            place.mark(&mut headers);
            headers.remove("tracestate");
        }
        headers
    }

    /// When it began.
    pub fn arrived(&self) -> Instant {
        self.arrived
    }

    /// Its id.
    pub fn id(&self) -> &HeaderValue {
        &self.id
    }

    /// It was dispatched, after `wait` in the queue.
    pub fn dispatched(&self, wait: Duration) {
        let mut progress = self.progress.lock();
        progress.dispatched = true;
        progress.line.attempts += 1;
        progress.line.wait += wait;
    }

    /// The sub-request whose ids and ranks the line has when nobody else notes them.
    pub fn follow(&self, sub: &Arc<Sub>) {
        self.progress.lock().last = Some(Arc::clone(sub));
    }

    /// Bytes were handed to the client.
    pub fn bytes(&self, n: u64) {
        self.progress.lock().bytes += n;
    }

    /// The head of a reply goes out.
    pub fn replied(&self, status: u16) {
        self.progress.lock().status = status;
    }

    /// Sets the outcome, and the status unless a reply has gone out with another.
    pub fn outcome(&self, outcome: ClientOutcome, status: u16) {
        let mut progress = self.progress.lock();
        progress.outcome = Some(outcome);
        // What the client was told stays told.
        if progress.status == 0 {
            progress.status = status;
        }
    }

    /// Whether the outcome is known.
    pub fn has_outcome(&self) -> bool {
        self.progress.lock().outcome.is_some()
    }

    /// Sets the outcome of an error.
    pub fn failed(&self, kind: Kind, status: u16) {
        self.outcome(ClientOutcome::of(kind), status);
        self.progress.lock().error = Some(kind.code());
    }

    /// Changes what the log line says.
    pub fn note(&self, change: impl FnOnce(&mut Line)) {
        change(&mut self.progress.lock().line);
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let progress = std::mem::take(self.progress.get_mut());
        let left = if progress.dispatched { ClientOutcome::CancelledRunning } else { ClientOutcome::CancelledQueued };
        let outcome = progress.outcome.unwrap_or(left);
        let took = self.arrived.elapsed();
        self.app.metrics.end(self.route, outcome);
        self.app.metrics.reply_bytes.fetch_add(progress.bytes, Ordering::Relaxed);
        if outcome == ClientOutcome::Ok {
            self.app.metrics.total.observe(took);
        }
        let logs = tracing::enabled!(target: "r3router::request", tracing::Level::INFO);
        if !logs && self.trace.is_none() {
            return;
        }
        let mut line = progress.line;
        if let Some(last) = progress.last.filter(|_| line.trace.rid.is_empty()) {
            line.trace = last.trace();
        }
        let id = self.id.to_str().unwrap_or("");
        if let Some(trace) = &self.trace {
            trace.end(&trace::End {
                scheme: self.app.scheme(),
                outcome,
                status: progress.status,
                error: progress.error,
                id,
                rid: &line.trace.rid,
                bytes: progress.bytes,
                attempts: line.attempts,
                tokens: line.output_tokens,
            });
        }
        if logs {
            // The client's own trace is named also when nothing of it is recorded here.
            let place = self.trace.as_ref().map(|t| t.place()).or(self.client);
            let route = crate::metrics::ROUTES[crate::metrics::route_index(self.route)];
            tracing::info!(
                target: "r3router::request",
                id,
                method = "POST",
                path = self.path,
                route,
                trace_id = place.map(|p| tracing::field::display(p.trace_id())),
                rid = line.trace.rid,
                room = line.trace.room,
                p = line.trace.prefill.as_deref().unwrap_or(""),
                d = line.trace.decode.as_deref().unwrap_or(""),
                wait_ms = line.wait.as_secs_f64() * 1e3,
                delivery_ms = line.trace.delivery.map(|d| d.as_secs_f64() * 1e3),
                total_ms = took.as_secs_f64() * 1e3,
                attempts = line.attempts,
                tokens = line.output_tokens,
                bytes = progress.bytes,
                // A client that left before any reply is told apart as nginx does.
                status = if progress.status == 0 { 499 } else { progress.status },
                outcome = outcome.name(),
                error = progress.error,
                "request"
            );
        }
    }
}
