//! One error type for everything that can go wrong with a request: what, whose fault, and whether a new attempt is safe.
use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

/// Whose fault an error is. Decides which breaker is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The client sent something that cannot be served, or left.
    Client,
    /// The router itself: limits, queue, deadline, drain.
    Router,
    /// The prefill engine.
    Prefill,
    /// The decode engine (or the only engine, in regular mode).
    Decode,
}

/// Declares the kinds: meaning, stable code and HTTP status, once.
macro_rules! kinds {
    ($( $(#[doc = $help:literal])+ $variant:ident = $code:literal, $status:literal; )+) => {
        /// What went wrong. The name is the stable `code` that clients and metrics see.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Kind { $( $(#[doc = $help])+ $variant, )+ }

        impl Kind {
            /// Every kind, in the order of the reference page.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The stable code, in snake case.
            pub fn code(self) -> &'static str {
                match self { $( Self::$variant => $code, )+ }
            }

            /// The HTTP status a client gets when the error has none of its own.
            pub fn status(self) -> u16 {
                match self { $( Self::$variant => $status, )+ }
            }

            /// What it means, in a sentence.
            pub fn meaning(self) -> &'static str {
                match self { $( Self::$variant => concat!($($help),+), )+ }.trim_ascii()
            }
        }
    };
}

kinds! {
    /// The body is not JSON; `measured` is the byte position.
    InvalidJson = "invalid_json", 400;
    /// A field that the router reads has the wrong type or value.
    InvalidField = "invalid_field", 400;
    /// The head of the request or the framing of its body is not HTTP/1.1, the head is too long, or the body is encoded; the status says which (400,
    /// 414, 431, 415).
    InvalidRequest = "invalid_request", 400;
    /// The client began a request and stopped sending it; `limit` and `measured` are seconds.
    ReadTimeout = "read_timeout", 408;
    /// The body is over the limit.
    BodyTooLarge = "body_too_large", 413;
    /// The request is larger than every rank's pool; it can never run.
    TooLargeForFleet = "too_large_for_fleet", 400;
    /// No worker of a role is registered or alive.
    NoWorkers = "no_available_workers", 503;
    /// The queue is full.
    QueueFull = "queue_full", 429;
    /// The deadline passed while the request waited in the router.
    QueueTimeout = "queue_timeout", 429;
    /// A leg was dispatched and no token came in time.
    DeliveryTimeout = "delivery_timeout", 504;
    /// The whole request took longer than the limit.
    RequestTimeout = "request_timeout", 504;
    /// The router drains; it takes no new work.
    Draining = "draining", 503;
    /// The client closed its connection, or its sending side while engines worked for it, which looks the same.
    ClientGone = "client_gone", 499;
    /// Ended by `/abort_request` in a way that leaves nothing to answer with. A single request is answered with 200 and
    /// `finish_reason` `abort`, as an engine does; this is for parts of a batch and for broken streams.
    Aborted = "aborted", 503;
    /// Connect refused, unreachable, or name not found.
    Connect = "connect_failed", 502;
    /// The connection broke before the reply was complete.
    Reset = "connection_reset", 502;
    /// The engine answered with a status of 4xx. The client gets the engine's own status and body; only the header `x-smg-error-code`
    /// is added. 502 stands here for a reply that could not be kept.
    EngineRejected = "engine_rejected", 502;
    /// The engine answered with a status of 5xx.
    EngineFailed = "engine_failed", 500;
    /// The engine answered something that is not the protocol (not JSON, missing object).
    EngineProtocol = "engine_protocol", 502;
    /// An R3 part is missing, has the wrong length or the wrong dtype.
    R3Mismatch = "r3_mismatch", 502;
    /// This fleet cannot give R3 for this request.
    R3Unsupported = "r3_unsupported", 501;
    /// The R3 arena cannot ever hold the request.
    R3ArenaTooSmall = "r3_arena_too_small", 400;
    /// The directory for rows that are named by reference cannot be used; the message says which and why.
    R3StoreFailed = "r3_store_failed", 500;
    /// The process behind `--r3-sink` did not take the rows of a reply.
    R3Sink = "r3_sink_failed", 502;
    /// There are no rows under this id.
    R3Unknown = "r3_unknown", 404;
    /// Nobody fetched the rows within `--r3-ref-expiry-secs`.
    R3Expired = "r3_expired", 410;
    /// The rows were deleted by a client, or their reply could not be sent.
    R3Deleted = "r3_deleted", 410;
    /// The range lies outside of the rows.
    R3Range = "r3_range", 416;
    /// The address may not be a worker: it is link-local or hands out credentials, or it is not in `--worker-allow`.
    WorkerRefused = "worker_refused", 403;
    /// The route is answered on the admin listener only, or not to pages of other sites.
    AdminOnly = "admin_only", 403;
    /// The key does not open these rows.
    Forbidden = "forbidden", 403;
    /// Path or method that the router does not know.
    NotFound = "not_found", 404;
    /// A route that only one engine could answer, and this router's prefill and decode engines are two; `/routes` lists it under
    /// `regular_engines_only`.
    NeedsOneEngine = "pd_unsupported", 501;
    /// The address is registered for another role.
    WorkerConflict = "worker_conflict", 409;
    /// Wrong method on a known path.
    MethodNotAllowed = "method_not_allowed", 405;
    /// Missing or wrong key.
    Unauthorized = "unauthorized", 401;
    /// A fault of the router's own code.
    Internal = "internal_error", 500;
}

/// An error that a person can act on: what, limit, measured, which worker, what to change.
#[derive(Clone, Debug)]
pub struct Error {
    /// What went wrong.
    pub kind: Kind,
    /// Whose fault it is.
    pub source: Source,
    /// Whether a whole new attempt (new room, new rids) may succeed and is safe.
    pub retryable: bool,
    /// The HTTP status, when it is not the kind's own (an engine's status is kept).
    pub status: Option<u16>,
    /// A sentence for a person.
    pub message: Cow<'static, str>,
    /// The limit that was met, in the unit that the message names.
    pub limit: Option<f64>,
    /// The value that was measured against it.
    pub measured: Option<f64>,
    /// Base URL of the worker, with `@rank` where a rank is meant.
    pub worker: Option<String>,
    /// What to change.
    pub advice: Option<Cow<'static, str>>,
    /// When to come back, for 429 and 503.
    pub retry_after: Option<Duration>,
}

impl Error {
    /// An error of `kind` from `source`, not retry-able, with nothing but a message.
    pub fn new(kind: Kind, source: Source, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            source,
            retryable: false,
            status: None,
            message: message.into(),
            limit: None,
            measured: None,
            worker: None,
            advice: None,
            retry_after: None,
        }
    }

    /// Marks that a new attempt is safe.
    #[must_use]
    pub fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }

    /// Sets the status.
    #[must_use]
    pub fn with_status(mut self, status: u16) -> Self {
        self.status = Some(status);
        self
    }

    /// Sets limit and measured value.
    #[must_use]
    pub fn with_limit(mut self, limit: f64, measured: f64) -> Self {
        self.limit = Some(limit);
        self.measured = Some(measured);
        self
    }

    /// Names the worker.
    #[must_use]
    pub fn at_worker(mut self, worker: impl Into<String>) -> Self {
        self.worker = Some(worker.into());
        self
    }

    /// Says what to change.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<Cow<'static, str>>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// Says when to come back.
    #[must_use]
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The status that the client gets.
    pub fn http_status(&self) -> u16 {
        self.status.unwrap_or_else(|| self.kind.status())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.code(), self.message)?;
        if let Some(worker) = &self.worker {
            write!(f, " (worker {worker})")?;
        }
        if let Some(advice) = &self.advice {
            write!(f, "; {advice}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
