//! The log line and the span of a request that is neither generation nor passed through: worker API, control, rows by reference, information, and what no
//! route knows. Those two write their own (`context::Count`), so that every request has one line.
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use http::{HeaderValue, Method, Request, Uri};
use http_body::Body;
use r3router_core::error::Kind;

use crate::app::App;
use crate::errors::{ERROR_CODE, Reply};
use crate::metrics::ClientOutcome;
use crate::passthrough::RESPONSES;
use crate::trace::{self, Place};
use crate::{control, info, pass};

/// In the extensions of a reply whose request has its own line.
#[derive(Clone, Copy, Debug)]
pub struct Counted;

/// What is asked every few seconds for as long as the router lives: health checks, scrapes and the tables of watching people.
const WATCHED: [&str; 7] =
    ["/health", "/liveness", "/readiness", "/ready", "/metrics", "/admin/ranks", "/admin/findings"];

/// Most characters of the id of rows that are written: who has all of it has the rows.
const SHOWN: usize = 8;

/// A path as it is written.
fn shown(path: &str) -> Cow<'_, str> {
    match path.strip_prefix("/r3/").and_then(|id| id.get(..SHOWN)) {
        Some(id) if path.len() > "/r3/".len() + SHOWN => Cow::Owned(format!("/r3/{id}...")),
        _ => Cow::Borrowed(path),
    }
}

/// A request that is being answered. Dropped before its end, its client has left.
#[derive(Debug)]
pub struct Line {
    of: Option<Known>,
}

#[derive(Debug)]
struct Known {
    method: Method,
    uri: Uri,
    id: HeaderValue,
    /// Where it, or its client, stands in a trace.
    place: Option<Place>,
    logs: bool,
    span: Option<Arc<trace::Request>>,
    scheme: &'static str,
    began: Instant,
}

/// Routes that are no constants of their own modules.
const NAMED: [&str; 12] = [
    "/abort_request",
    "/add_worker",
    "/admin/drain",
    "/admin/settings",
    "/admin/undrain",
    "/engine_metrics",
    "/get_loads",
    "/health_generate",
    "/list_workers",
    "/remove_worker",
    "/v1/loads",
    "/workers",
];

/// The route of a path, from a closed set: ids are not in it, and what nobody serves is "".
fn route(path: &str) -> &'static str {
    let mut known = control::BROADCAST.iter().chain(&info::PROXIED).chain(&NAMED);
    match path {
        _ if path.starts_with("/r3/") => "/r3/{id}",
        _ if path.starts_with("/workers/") => "/workers/{id}",
        _ if path.starts_with(RESPONSES) => "/v1/responses/{id}",
        _ => known.find(|route| **route == path).copied().unwrap_or(""),
    }
}

impl Line {
    /// The line of `request`, when such lines are written, and its span, when that is recorded; none for what is watched, and for what
    /// another router answers and writes. The port speaks `scheme`.
    pub fn begin<B>(app: &Arc<App>, scheme: &'static str, request: &Request<B>, id: &HeaderValue) -> Option<Self> {
        let logs = tracing::enabled!(target: "r3router::request", tracing::Level::INFO);
        if !logs && app.traces.is_none() {
            return None;
        }
        let path = request.uri().path();
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        let watched = reads && WATCHED.contains(&path);
        if watched || (app.handover.successor().is_some() && !pass::own(app, path)) {
            return None;
        }
        let (began, client) = (Instant::now(), Place::of(request.headers()));
        let span = app.traces.as_ref().and_then(|traces| {
            trace::Request::begin(traces, (request.method(), route(path)), traces.origin(client), began)
        });
        let known = Known {
            method: request.method().clone(),
            uri: request.uri().clone(),
            id: id.clone(),
            place: span.as_ref().map(|span| span.place()).or(client),
            logs,
            span,
            scheme,
            began,
        };
        Some(Self { of: Some(known) })
    }

    /// It is answered so.
    pub fn end(mut self, reply: &Reply) {
        let Some(known) = self.of.take() else { return };
        if reply.extensions().get::<Counted>().is_some() {
            return;
        }
        let status = reply.status().as_u16();
        let bytes = reply.body().size_hint().exact();
        let code = reply.headers().get(ERROR_CODE).and_then(|code| code.to_str().ok());
        let kind = code.and_then(|code| Kind::ALL.iter().find(|kind| kind.code() == code));
        let outcome = match (status, kind) {
            (..400, _) => ClientOutcome::Ok,
            (_, Some(kind)) => ClientOutcome::of(*kind),
            (..500, None) if code.is_some() => ClientOutcome::Invalid,
            // The router's own have a code: this is what engines answered.
            (..500, None) => ClientOutcome::EngineRejected,
            (_, None) => ClientOutcome::EngineFailed,
        };
        known.write(status, outcome, code, bytes);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(known) = self.of.take() {
            known.write(Kind::ClientGone.status(), ClientOutcome::CancelledRunning, None, None);
        }
    }
}

impl Known {
    fn write(&self, status: u16, outcome: ClientOutcome, error: Option<&str>, bytes: Option<u64>) {
        if let Some(span) = &self.span {
            span.end(&trace::End {
                scheme: self.scheme,
                outcome,
                status,
                error: error.and_then(|code| Kind::ALL.iter().map(|kind| kind.code()).find(|known| *known == code)),
                id: self.id.to_str().unwrap_or(""),
                rid: "",
                bytes: bytes.unwrap_or(0),
                attempts: 0,
                tokens: None,
            });
        }
        if !self.logs {
            return;
        }
        tracing::info!(
            target: "r3router::request",
            id = self.id.to_str().unwrap_or(""),
            method = self.method.as_str(),
            // Without the query, which may hold what is nobody's business.
            path = &*shown(self.uri.path()),
            route = "other",
            trace_id = self.place.map(|p| tracing::field::display(p.trace_id())),
            total_ms = self.began.elapsed().as_secs_f64() * 1e3,
            bytes,
            status,
            outcome = outcome.name(),
            error,
            "request"
        );
    }
}
