//! Counters and histograms of the data plane. Labels come from closed sets plus worker and rank; what describes a worker lives in the
//! worker, so that its series go with it. Gauges of the admission are read when they are scraped.
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use r3router_core::error::Kind;
use r3router_core::wire::Route;

/// Declares an enum of label values.
macro_rules! labels {
    ($(#[doc = $doc:literal])+ $type:ident { $( $(#[doc = $help:literal])+ $variant:ident = $name:literal, )+ }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type { $( $(#[doc = $help])+ $variant, )+ }

        impl $type {
            /// Every label value, in order.
            pub const NAMES: &'static [&'static str] = &[$($name),+];

            /// The label value.
            pub fn name(self) -> &'static str {
                Self::NAMES[self as usize]
            }
        }
    };
}

labels! {
    /// How a request ended for its client.
    ClientOutcome {
        /// A whole reply with 2xx.
        Ok = "ok",
        /// The body, a field, the size or what was asked for was wrong; nothing was dispatched.
        Invalid = "invalid",
        /// No or a wrong key, or not from here.
        Unauthorized = "unauthorized",
        /// The queue was full or the router drained.
        Shed = "shed",
        /// The deadline passed in the queue.
        QueueTimeout = "queue_timeout",
        /// No worker of a role.
        NoWorkers = "no_workers",
        /// The client left while its request waited.
        CancelledQueued = "cancelled_queued",
        /// The client left after its request was dispatched.
        CancelledRunning = "cancelled_running",
        /// `/abort_request`.
        Aborted = "aborted",
        /// An engine answered 4xx.
        EngineRejected = "engine_rejected",
        /// A leg failed.
        EngineFailed = "engine_failed",
        /// Nothing was delivered in time.
        DeliveryTimeout = "delivery_timeout",
        /// The request's own time limit.
        RequestTimeout = "request_timeout",
        /// An R3 part was missing or did not fit.
        R3 = "r3_mismatch",
        /// The sink did not take the rows.
        Sink = "r3_sink_failed",
        /// A fault of the router.
        Internal = "internal",
    }
}

impl ClientOutcome {
    /// The outcome of an error.
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::InvalidJson
            | Kind::InvalidField
            | Kind::InvalidRequest
            | Kind::R3Deleted
            | Kind::WorkerConflict
            | Kind::NeedsOneEngine
            | Kind::ReadTimeout
            | Kind::BodyTooLarge
            | Kind::TooLargeForFleet
            | Kind::R3Unsupported
            | Kind::R3ArenaTooSmall
            | Kind::R3Unknown
            | Kind::R3Expired
            | Kind::R3Range
            | Kind::WorkerRefused
            | Kind::NotFound
            | Kind::MethodNotAllowed => Self::Invalid,
            Kind::NoWorkers => Self::NoWorkers,
            Kind::QueueFull | Kind::Draining => Self::Shed,
            Kind::QueueTimeout => Self::QueueTimeout,
            Kind::DeliveryTimeout => Self::DeliveryTimeout,
            Kind::RequestTimeout => Self::RequestTimeout,
            Kind::ClientGone => Self::CancelledRunning,
            Kind::Aborted => Self::Aborted,
            Kind::EngineRejected => Self::EngineRejected,
            Kind::Connect | Kind::Reset | Kind::EngineFailed | Kind::EngineProtocol => Self::EngineFailed,
            Kind::R3Mismatch => Self::R3,
            Kind::R3Sink => Self::Sink,
            Kind::Unauthorized | Kind::Forbidden | Kind::AdminOnly => Self::Unauthorized,
            _ => Self::Internal,
        }
    }
}

labels! {
    /// How a leg ended on its worker.
    LegResult {
        /// A whole reply with 2xx.
        Ok = "ok",
        /// 4xx.
        Rejected = "rejected",
        /// Connect failed.
        Connect = "connect",
        /// The connection broke.
        Reset = "reset",
        /// 5xx.
        Server = "server",
        /// 503 or a retraction.
        Overloaded = "overloaded",
        /// The engine's transfer failed.
        Transfer = "transfer",
        /// State slots ran out.
        Mamba = "mamba",
        /// The router's delivery deadline.
        Deadline = "deadline",
        /// The reply was not the protocol, or an R3 part did not fit.
        Protocol = "protocol",
        /// Given up by the router: the client left, the other leg failed, or it was aborted.
        Cancelled = "cancelled",
    }
}

labels! {
    /// What became of a span of a trace.
    SpanFate {
        /// The collector has taken it.
        Exported = "exported",
        /// There was no room for it: the collector is slower than spans come.
        Dropped = "dropped",
        /// The collector could not be reached or refused it.
        Failed = "failed",
    }
}

/// A family of counters over one closed label.
#[derive(Debug)]
pub struct Counters<const N: usize>([AtomicU64; N]);

impl<const N: usize> Default for Counters<N> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl<const N: usize> Counters<N> {
    /// Adds one to the counter of `index`.
    pub fn inc(&self, index: usize) {
        self.add(index, 1);
    }

    /// Adds `n` to the counter of `index`.
    pub fn add(&self, index: usize, n: u64) {
        if let Some(counter) = self.0.get(index) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// The value of `index`.
    pub fn get(&self, index: usize) -> u64 {
        self.0.get(index).map_or(0, |c| c.load(Ordering::Relaxed))
    }
}

/// Upper bounds of the time histograms, seconds, unless `--prometheus-duration-buckets` names others.
const SECONDS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1200.0];

/// A histogram of times.
#[derive(Debug)]
pub struct Histogram {
    bounds: Arc<[f64]>,
    /// One for each bound, and one for what is above the last.
    buckets: Box<[AtomicU64]>,
    nanos: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new(&Arc::from(SECONDS))
    }
}

impl Histogram {
    /// An empty histogram. `bounds` are upper bounds in seconds, ascending.
    pub fn new(bounds: &Arc<[f64]>) -> Self {
        Self {
            bounds: Arc::clone(bounds),
            buckets: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            nanos: AtomicU64::new(0),
        }
    }

    /// Counts one time.
    pub fn observe(&self, time: Duration) {
        let secs = time.as_secs_f64();
        let at = self.bounds.iter().position(|bound| secs <= *bound).unwrap_or(self.bounds.len());
        if let Some(bucket) = self.buckets.get(at) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(0), Ordering::Relaxed);
    }

    fn write(&self, text: &mut Text, name: &str, help: &str) {
        text.head(name, help, "histogram");
        let bounds = self.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        let mut sum = 0;
        for (bucket, bound) in self.buckets.iter().zip(bounds) {
            sum += bucket.load(Ordering::Relaxed);
            text.line(&format!("{name}_bucket"), &[("le", &bound)], sum as f64);
        }
        text.line(&format!("{name}_sum"), &[], self.nanos.load(Ordering::Relaxed) as f64 / 1e9);
        text.line(&format!("{name}_count"), &[], sum as f64);
    }
}

/// The routes that a request is counted under.
pub const ROUTES: [&str; 4] = ["generate", "chat", "completions", "other"];
const OUTCOMES: usize = ClientOutcome::NAMES.len();
const RETRY_REASONS: usize = LegResult::NAMES.len();

/// The index of a route in [`ROUTES`].
pub fn route_index(route: Option<Route>) -> usize {
    match route {
        Some(Route::Generate) => 0,
        Some(Route::Chat) => 1,
        Some(Route::Completions) => 2,
        None => 3,
    }
}

/// Everything that is counted at the edge.
#[derive(Debug, Default)]
pub struct Metrics {
    started: Counters<4>,
    ended: [Counters<OUTCOMES>; 4],
    live: AtomicI64,
    /// Client connections open.
    pub connections: AtomicI64,
    /// Requests that wait for a place under `--max-concurrent-requests`.
    pub placing: AtomicI64,
    /// Attempts sent.
    pub attempts: AtomicU64,
    /// New attempts after a failed one, by the failure.
    pub retries: Counters<RETRY_REASONS>,
    /// `/abort_request` calls that the router made on its own.
    pub aborts: AtomicU64,
    /// Attempts whose aborts are under way.
    pub aborting: AtomicI64,
    /// R3 text bytes read: prefill, decode.
    pub r3_bytes: Counters<2>,
    /// Fetches of referenced rows.
    pub r3_fetched: AtomicU64,
    /// Bytes of replies handed to clients.
    pub reply_bytes: AtomicU64,
    /// Spans of traces, by what became of them.
    pub spans: Arc<Counters<{ SpanFate::NAMES.len() }>>,
    /// Wait in the router's queue.
    pub wait: Histogram,
    /// From binding to KV delivered.
    pub delivery: Histogram,
    /// From arrival to the end of the reply, of requests that completed.
    pub total: Histogram,
}

impl Metrics {
    /// Nothing counted yet. `bounds` are those of the time histograms in seconds; empty means the usual ones.
    pub fn new(bounds: &[f64]) -> Self {
        let bounds: Arc<[f64]> = if bounds.is_empty() { Arc::from(SECONDS) } else { Arc::from(bounds) };
        let time = || Histogram::new(&bounds);
        Self { wait: time(), delivery: time(), total: time(), ..Self::default() }
    }

    /// A request has arrived.
    pub fn start(&self, route: Option<Route>) {
        self.started.inc(route_index(route));
        self.live.fetch_add(1, Ordering::Relaxed);
    }

    /// A request has ended. Called exactly once for every [`Metrics::start`].
    pub fn end(&self, route: Option<Route>, outcome: ClientOutcome) {
        if let Some(ended) = self.ended.get(route_index(route)) {
            ended.inc(outcome as usize);
        }
        self.live.fetch_sub(1, Ordering::Relaxed);
    }

    /// Requests in work.
    pub fn live(&self) -> i64 {
        self.live.load(Ordering::Relaxed)
    }

    /// Requests that ended so, on all routes.
    pub fn ended(&self, outcome: ClientOutcome) -> u64 {
        self.ended.iter().map(|e| e.get(outcome as usize)).sum()
    }

    /// Writes the edge's series.
    pub fn write(&self, text: &mut Text) {
        text.head("r3router_requests_started_total", "Requests that arrived.", "counter");
        for (at, route) in ROUTES.iter().enumerate() {
            text.line("r3router_requests_started_total", &[("route", route)], self.started.get(at) as f64);
        }
        text.head("r3router_requests_total", "Requests that ended, by outcome for the client.", "counter");
        for (ended, route) in self.ended.iter().zip(ROUTES) {
            for (at, outcome) in ClientOutcome::NAMES.iter().enumerate() {
                text.line("r3router_requests_total", &[("route", route), ("outcome", outcome)], ended.get(at) as f64);
            }
        }
        text.single("r3router_requests_live", "Requests in work: started less ended.", "gauge", self.live() as f64);
        text.single(
            "r3router_place_waiting_requests",
            "Requests that wait for a place under --max-concurrent-requests; they are not in r3router_queued_requests yet.",
            "gauge",
            self.placing.load(Ordering::Relaxed) as f64,
        );
        let connections = self.connections.load(Ordering::Relaxed) as f64;
        text.single("r3router_client_connections", "Client connections open.", "gauge", connections);
        let attempts = self.attempts.load(Ordering::Relaxed) as f64;
        text.single("r3router_attempts_total", "Attempts sent to engines.", "counter", attempts);
        text.head("r3router_retries_total", "New attempts, by the failure before.", "counter");
        for (at, reason) in LegResult::NAMES.iter().enumerate() {
            text.line("r3router_retries_total", &[("reason", reason)], self.retries.get(at) as f64);
        }
        let aborts = self.aborts.load(Ordering::Relaxed) as f64;
        text.single("r3router_aborts_sent_total", "Abort calls that the router made on its own.", "counter", aborts);
        text.head("r3router_r3_text_bytes_total", "R3 text read from engines.", "counter");
        for (at, role) in ["prefill", "decode"].iter().enumerate() {
            text.line("r3router_r3_text_bytes_total", &[("role", role)], self.r3_bytes.get(at) as f64);
        }
        let fetched = self.r3_fetched.load(Ordering::Relaxed) as f64;
        text.single("r3router_r3_fetches_total", "Fetches of rows that were named by reference.", "counter", fetched);
        text.head("r3router_trace_spans_total", "Spans of traces (--enable-trace), by what became of them.", "counter");
        for (at, result) in SpanFate::NAMES.iter().enumerate() {
            text.line("r3router_trace_spans_total", &[("result", result)], self.spans.get(at) as f64);
        }
        let bytes = self.reply_bytes.load(Ordering::Relaxed) as f64;
        text.single("r3router_reply_bytes_total", "Bytes of replies handed to clients.", "counter", bytes);
        self.wait.write(text, "r3router_queue_wait_seconds", "Wait in the router's queue.");
        self.delivery.write(text, "r3router_delivery_seconds", "From binding a pair to KV delivered.");
        self.total.write(text, "r3router_request_seconds", "From arrival to the end of the reply, completed requests.");
    }
}

/// Text in the Prometheus exposition format.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// HELP and TYPE of a family.
    pub fn head(&mut self, name: &str, help: &str, kind: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One sample.
    pub fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.0.push_str(name);
        if !labels.is_empty() {
            self.0.push('{');
            for (at, (key, label)) in labels.iter().enumerate() {
                let _ = write!(self.0, "{}{key}=\"", if at > 0 { "," } else { "" });
                for c in label.chars() {
                    match c {
                        '\\' => self.0.push_str("\\\\"),
                        '"' => self.0.push_str("\\\""),
                        '\n' => self.0.push_str("\\n"),
                        c => self.0.push(c),
                    }
                }
                self.0.push('"');
            }
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// A family of one sample without labels.
    pub fn single(&mut self, name: &str, help: &str, kind: &str, value: f64) {
        self.head(name, help, kind);
        self.line(name, &[], value);
    }

    /// The text.
    pub fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ClientOutcome, Metrics, Text};
    use r3router_core::error::Kind;
    use r3router_core::wire::Route;

    #[test]
    fn nothing_that_a_client_did_is_a_fault_of_the_router() {
        for kind in Kind::ALL {
            let internal = ClientOutcome::of(*kind) == ClientOutcome::Internal;
            // A store that cannot be written is the operator's to mend, and no client's doing.
            assert_eq!(internal, matches!(kind, Kind::Internal | Kind::R3StoreFailed), "{}", kind.code());
        }
    }

    #[test]
    fn started_less_ended_is_live_and_label_values_are_escaped() {
        let metrics = Metrics::default();
        for _ in 0..3 {
            metrics.start(Some(Route::Chat));
        }
        metrics.end(Some(Route::Chat), ClientOutcome::Ok);
        metrics.wait.observe(Duration::from_millis(3));
        let mut text = Text::default();
        metrics.write(&mut text);
        text.line("x", &[("worker", "a\"b\n\\")], 1.5);
        let text = text.finish();
        assert!(text.contains("\nr3router_requests_live 2\n"));
        assert!(text.contains("\nr3router_requests_started_total{route=\"chat\"} 3\n"));
        assert!(text.contains("\nr3router_requests_total{route=\"chat\",outcome=\"ok\"} 1\n"));
        assert!(text.contains("\nr3router_queue_wait_seconds_bucket{le=\"0.001\"} 0\n"));
        assert!(text.contains("\nr3router_queue_wait_seconds_bucket{le=\"0.005\"} 1\n"));
        assert!(text.contains("\nr3router_queue_wait_seconds_count 1\n"));
        assert!(text.ends_with("x{worker=\"a\\\"b\\n\\\\\"} 1.5\n"));
    }

    #[test]
    fn bounds_of_time_histograms_can_be_chosen() {
        let metrics = Metrics::new(&[0.5, 2.0]);
        for millis in [400, 500, 1500, 9000] {
            metrics.total.observe(Duration::from_millis(millis));
        }
        let mut text = Text::default();
        metrics.write(&mut text);
        let text = text.finish();
        let lines: Vec<&str> = text.lines().filter(|l| l.starts_with("r3router_request_seconds")).collect();
        assert_eq!(
            lines,
            [
                "r3router_request_seconds_bucket{le=\"0.5\"} 2",
                "r3router_request_seconds_bucket{le=\"2\"} 3",
                "r3router_request_seconds_bucket{le=\"+Inf\"} 4",
                "r3router_request_seconds_sum 11.4",
                "r3router_request_seconds_count 4",
            ]
        );
    }

    #[test]
    fn every_outcome_has_its_own_name() {
        let names = ClientOutcome::NAMES;
        for (at, name) in names.iter().enumerate() {
            assert!(!names[at + 1..].contains(name), "{name} twice");
        }
        assert_eq!(ClientOutcome::Internal.name(), "internal");
    }
}
