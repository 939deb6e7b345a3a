//! The span of a client's request, and what hangs directly below it.
use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use http::{HeaderMap, Method};
use r3router_core::error::Error;

use super::place::{PARENT, STATE};
use super::{Attributes, Place, Side, Span, Traces, text};
use crate::metrics::ClientOutcome;

/// A request whose trace is recorded.
#[derive(Debug)]
pub struct Request {
    traces: Arc<Traces>,
    place: Place,
    /// The client's span; 0 when the trace begins here.
    parent: u64,
    method: Method,
    path: &'static str,
    began: Instant,
    /// The same on the clock that traces are in.
    began_at: SystemTime,
}

/// Where a request stands in a trace, which says whether it is recorded.
#[derive(Clone, Copy, Debug)]
pub enum Origin {
    /// Below a span of the client's.
    Client(Place),
    /// Its trace begins here.
    Here(Place),
}

impl Origin {
    /// What engines must be told so that they do not record either, when a trace that begins here is not recorded.
    pub fn unrecorded(self) -> Option<Place> {
        match self {
            Self::Here(place) if !place.is_sampled() => Some(place),
            _ => None,
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// What the port speaks.
    pub scheme: &'static str,
    /// For its client.
    pub outcome: ClientOutcome,
    /// Status of the reply; 0 when none was begun.
    pub status: u16,
    /// Code of the error, when it was one.
    pub error: Option<&'static str>,
    /// The request's id.
    pub id: &'a str,
    /// The id that engines knew it by last.
    pub rid: &'a str,
    /// Bytes of the reply.
    pub bytes: u64,
    /// Attempts made.
    pub attempts: u32,
    /// Tokens generated.
    pub tokens: Option<u32>,
}

impl Request {
    /// A request to `path` that came at `now`. `None` when its trace is not recorded.
    pub fn begin(
        traces: &Arc<Traces>,
        (method, path): (&Method, &'static str),
        origin: Origin,
        now: Instant,
    ) -> Option<Arc<Self>> {
        let (place, parent) = match origin {
            Origin::Client(place) if place.is_sampled() => (place.child(), place.span),
            Origin::Here(place) if place.is_sampled() => (place, 0),
            _ => return None,
        };
        let (traces, method, began_at) = (Arc::clone(traces), method.clone(), SystemTime::now() - now.elapsed());
        Some(Arc::new(Self { traces, place, parent, method, path, began: now, began_at }))
    }

    /// Where its span stands.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Its path.
    pub(super) fn path(&self) -> &'static str {
        self.path
    }

    pub(super) fn at(&self, moment: Instant) -> SystemTime {
        self.began_at + moment.saturating_duration_since(self.began)
    }

    /// Names `span` as the one that a call to an engine comes from. What tracing systems have added stays, unless the trace begins here.
    pub(super) fn mark(&self, headers: &mut HeaderMap, span: u64) {
        headers.insert(PARENT, Place { span, ..self.place }.header());
        if self.parent == 0 {
            headers.remove(STATE);
        }
    }

    pub(super) fn take(&self, span: Span) {
        self.traces.take(span);
    }

    /// A span below this request's, or below `parent` when that is not 0.
    pub(super) fn span(
        &self,
        name: impl Into<Cow<'static, str>>,
        (id, parent): (u64, u64),
        (began, ended): (Instant, Instant),
        attributes: Attributes,
    ) -> Span {
        let id = if id == 0 { self.place.child().span } else { id };
        Span {
            name: name.into(),
            side: Side::Internal,
            place: Place { span: id, ..self.place },
            parent: if parent == 0 { self.place.span } else { parent },
            remote: false,
            began: self.at(began),
            ended: self.at(ended),
            attributes,
            events: Vec::new(),
            error: None,
        }
    }

    /// It has ended.
    pub fn end(&self, end: &End<'_>) {
        let mut attributes: Attributes = vec![
            ("http.request.method", text(self.method.as_str())),
            ("url.scheme", end.scheme.into()),
            ("r3router.request.id", text(end.id)),
            ("r3router.outcome", end.outcome.name().into()),
            ("http.response.body.size", end.bytes.into()),
        ];
        if !self.path.is_empty() {
            attributes.extend([("http.route", self.path.into()), ("url.path", self.path.into())]);
        }
        if !end.rid.is_empty() {
            attributes.push(("r3router.rid", text(end.rid)));
        }
        if end.attempts > 0 {
            attributes.push(("r3router.attempts", u64::from(end.attempts).into()));
        }
        if end.status > 0 {
            attributes.push(("http.response.status_code", u64::from(end.status).into()));
        }
        if let Some(tokens) = end.tokens {
            attributes.push(("gen_ai.usage.output_tokens", u64::from(tokens).into()));
        }
        if let Some(code) = end.error {
            attributes.push(("error.type", code.into()));
        }
        let mut span = self.span(
            format!("{} {}", self.method, self.path).trim_end().to_owned(),
            (self.place.span, 0),
            (self.began, Instant::now()),
            attributes,
        );
        (span.parent, span.remote, span.side) = (self.parent, self.parent != 0, Side::Server);
        // A client's own mistake is no error of the server, as the conventions have it; a stream that broke after 200 is.
        let broke = matches!(
            end.outcome,
            ClientOutcome::EngineFailed
                | ClientOutcome::DeliveryTimeout
                | ClientOutcome::RequestTimeout
                | ClientOutcome::R3
                | ClientOutcome::Sink
                | ClientOutcome::Internal
        );
        span.error = (end.status >= 500 || broke).then(|| end.error.unwrap_or(end.outcome.name()).to_owned());
        self.take(span);
    }
}

/// A wait in the router's queue. Dropped, it was left by its client.
#[derive(Debug)]
pub struct Wait {
    of: Option<(Arc<Request>, Instant, u32)>,
}

impl Wait {
    /// A wait that begins now, for the attempt of this number.
    pub fn begin(request: Option<&Arc<Request>>, attempt: u32) -> Self {
        Self { of: request.map(|request| (Arc::clone(request), Instant::now(), attempt)) }
    }

    /// A pair was bound.
    pub fn bound(mut self) {
        self.end("bound", None);
    }

    /// It is refused.
    pub fn refused(mut self, error: &Error) {
        let ended_by_client = error.kind == r3router_core::error::Kind::Aborted;
        self.end(error.kind.code(), (!ended_by_client).then_some(error));
    }

    fn end(&mut self, result: &'static str, error: Option<&Error>) {
        let Some((request, began, attempt)) = self.of.take() else { return };
        let mut attributes: Attributes =
            vec![("r3router.attempt", u64::from(attempt).into()), ("r3router.queue.result", result.into())];
        if error.is_some() {
            attributes.push(("error.type", result.into()));
        }
        let mut span = request.span("queue", (0, 0), (began, Instant::now()), attributes);
        span.error = error.map(|error| error.message.chars().take(256).collect());
        request.take(span);
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.end("cancelled", None);
    }
}
