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

/// What went wrong. The name is the stable `code` that clients and metrics see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The body is not JSON; `measured` is the byte position.
    InvalidJson,
    /// A field that the router reads has the wrong type or value.
    InvalidField,
    /// The body is over the limit.
    BodyTooLarge,
    /// The request is larger than every rank's pool; it can never run.
    TooLargeForFleet,
    /// No worker of a role is registered or alive.
    NoWorkers,
    /// The queue is full.
    QueueFull,
    /// The deadline passed while the request waited in the router.
    QueueTimeout,
    /// A leg was dispatched and no token came in time.
    DeliveryTimeout,
    /// The whole request took longer than the limit.
    RequestTimeout,
    /// The router drains; it takes no new work.
    Draining,
    /// The client closed its connection.
    ClientGone,
    /// Aborted by `/abort_request`.
    Aborted,
    /// Connect refused, unreachable, or name not found.
    Connect,
    /// The connection broke before the reply was complete.
    Reset,
    /// The engine answered with a status of 4xx; passed on as it is.
    EngineRejected,
    /// The engine answered with a status of 5xx.
    EngineFailed,
    /// The engine answered something that is not the protocol (not JSON, missing object).
    EngineProtocol,
    /// An R3 part is missing, has the wrong length or the wrong dtype.
    R3Mismatch,
    /// This fleet cannot give R3 for this request.
    R3Unsupported,
    /// The R3 arena cannot ever hold the request.
    R3ArenaTooSmall,
    /// Path or method that the router does not know.
    NotFound,
    /// Wrong method on a known path.
    MethodNotAllowed,
    /// Missing or wrong key.
    Unauthorized,
    /// A fault of the router's own code.
    Internal,
}

impl Kind {
    /// The stable code, in snake case.
    pub fn code(self) -> &'static str {
        match self {
            Self::InvalidJson => "invalid_json",
            Self::InvalidField => "invalid_field",
            Self::BodyTooLarge => "body_too_large",
            Self::TooLargeForFleet => "too_large_for_fleet",
            Self::NoWorkers => "no_available_workers",
            Self::QueueFull => "queue_full",
            Self::QueueTimeout => "queue_timeout",
            Self::DeliveryTimeout => "delivery_timeout",
            Self::RequestTimeout => "request_timeout",
            Self::Draining => "draining",
            Self::ClientGone => "client_gone",
            Self::Aborted => "aborted",
            Self::Connect => "connect_failed",
            Self::Reset => "connection_reset",
            Self::EngineRejected => "engine_rejected",
            Self::EngineFailed => "engine_failed",
            Self::EngineProtocol => "engine_protocol",
            Self::R3Mismatch => "r3_mismatch",
            Self::R3Unsupported => "r3_unsupported",
            Self::R3ArenaTooSmall => "r3_arena_too_small",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::Unauthorized => "unauthorized",
            Self::Internal => "internal_error",
        }
    }

    /// The HTTP status a client gets when the error has none of its own.
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidJson | Self::InvalidField | Self::TooLargeForFleet | Self::R3ArenaTooSmall => 400,
            Self::Unauthorized => 401,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::BodyTooLarge => 413,
            Self::QueueFull | Self::QueueTimeout => 429,
            Self::ClientGone => 499,
            Self::EngineFailed | Self::Internal => 500,
            Self::R3Unsupported => 501,
            Self::Connect | Self::Reset | Self::EngineProtocol | Self::R3Mismatch | Self::EngineRejected => 502,
            Self::NoWorkers | Self::Draining | Self::Aborted => 503,
            Self::DeliveryTimeout | Self::RequestTimeout => 504,
        }
    }
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
