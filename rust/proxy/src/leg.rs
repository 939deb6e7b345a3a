//! One leg of an attempt: its body with the bytes counted, and what its failures mean.
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use memchr::memmem;
use r3router_core::admission::{Failure, Outcome};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::Role;
use serde_json::Value;

use crate::clock::Clock;
use crate::metrics::LegResult;
use crate::trace;
use crate::upstream::{Exchange, Fault};
use crate::worker::Worker;

/// Most bytes of an engine's error reply that are kept.
pub const MAX_ERROR: usize = 1 << 20;

/// A reply's body as it comes from an engine.
pub struct LegBody {
    exchange: Exchange,
    first: Option<Bytes>,
    worker: Arc<Worker>,
    clock: Clock,
    /// Bytes that have come.
    pub bytes: u64,
    began: Option<Instant>,
    last: Option<Instant>,
    /// Whether its end was reached.
    pub ended: bool,
    span: Option<Arc<trace::Leg>>,
}

impl std::fmt::Debug for LegBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LegBody").field("worker", &self.worker.url).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl LegBody {
    /// The body of `exchange`, which comes from `worker`.
    pub fn new(exchange: Exchange, worker: Arc<Worker>, clock: Clock) -> Self {
        Self { exchange, first: None, worker, clock, bytes: 0, began: None, last: None, ended: false, span: None }
    }

    /// Has what comes told to the leg's span, when that is recorded.
    #[must_use]
    pub fn traced(mut self, span: Option<Arc<trace::Leg>>) -> Self {
        if let Some(span) = &span {
            span.answered(self.status());
        }
        self.span = span;
        self
    }

    /// Status of the reply.
    pub fn status(&self) -> StatusCode {
        self.exchange.head.status
    }

    /// Headers of the reply.
    pub fn headers(&self) -> &HeaderMap {
        &self.exchange.head.headers
    }

    /// Headers of the reply, to be taken.
    pub fn headers_mut(&mut self) -> &mut HeaderMap {
        &mut self.exchange.head.headers
    }

    /// Its `content-length`.
    pub fn content_length(&self) -> Option<u64> {
        self.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
    }

    /// The engine.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// Time from the first to the last byte so far.
    pub fn took(&self) -> Duration {
        self.began.zip(self.last).map_or(Duration::ZERO, |(a, b)| b.duration_since(a))
    }

    /// Puts a piece back, to be read again first.
    pub fn unread(&mut self, piece: Bytes) {
        self.bytes = self.bytes.saturating_sub(piece.len() as u64);
        self.first = Some(piece);
    }

    /// The next piece; `None` at the end.
    pub fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Fault>>> {
        if let Some(piece) = self.first.take() {
            self.bytes += piece.len() as u64;
            return Poll::Ready(Some(Ok(piece)));
        }
        let piece = std::task::ready!(self.exchange.poll_chunk(cx));
        match &piece {
            Some(Ok(piece)) => {
                let now = Instant::now();
                self.began.get_or_insert(now);
                self.last = Some(now);
                self.worker.last_bytes.store(self.clock.at(now).0, Ordering::Relaxed);
                self.bytes += piece.len() as u64;
                if let Some(span) = &self.span {
                    span.received(piece.len(), now);
                }
            }
            Some(Err(_)) => {}
            None => self.ended = true,
        }
        Poll::Ready(piece)
    }

    /// The next piece; `None` at the end.
    pub async fn piece(&mut self) -> Option<Result<Bytes, Fault>> {
        std::future::poll_fn(|cx| self.poll_piece(cx)).await
    }

    /// The whole body, cut off after `limit` bytes.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn collect(&mut self, limit: usize) -> Result<Bytes, Fault> {
        let mut whole = Bytes::new();
        let mut more: Vec<u8> = Vec::new();
        while let Some(piece) = self.piece().await {
            let piece = piece?;
            if whole.is_empty() && more.is_empty() {
                whole = piece;
                continue;
            }
            if more.is_empty() {
                more.extend_from_slice(&whole);
            }
            more.extend_from_slice(&piece);
            if more.len() > limit {
                break;
            }
        }
        Ok(if more.is_empty() { whole } else { more.into() })
    }
}

impl Body for LegBody {
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        self.poll_piece(cx).map(|piece| piece.map(|p| p.map(Frame::data)))
    }

    fn size_hint(&self) -> SizeHint {
        self.content_length().map_or_else(SizeHint::default, |n| SizeHint::with_exact(n.saturating_sub(self.bytes)))
    }
}

impl std::error::Error for Fault {}

/// The side that an error of this role is charged to.
pub fn source(role: Role) -> Source {
    match role {
        Role::Prefill => Source::Prefill,
        Role::Decode | Role::Regular => Source::Decode,
    }
}

/// The error of a leg whose connection failed.
pub fn fault_error(role: Role, name: &str, fault: &Fault) -> Error {
    let kind = match fault {
        Fault::Connect(_) => Kind::Connect,
        Fault::Reset { .. } => Kind::Reset,
        Fault::Protocol(_) => Kind::EngineProtocol,
    };
    Error::new(kind, source(role), fault.to_string()).at_worker(name).retryable()
}

/// The error of a leg that answered with a status that is not 2xx.
pub fn status_error(role: Role, name: &str, status: StatusCode, body: &[u8]) -> Error {
    let text = message(body);
    let text = if text.is_empty() { format!("the engine answered {status} without a message") } else { text };
    let error = if status.is_server_error() {
        let error = Error::new(Kind::EngineFailed, source(role), text);
        // Somebody has aborted it, perhaps past the router: trying again would undo that.
        if error.message.contains("AbortReq") { error } else { error.retryable() }
    } else {
        Error::new(Kind::EngineRejected, source(role), text)
    };
    error.with_status(status.as_u16()).at_worker(name)
}

/// The engine's own sentence: `detail`, `error.message` or `message` of its JSON, else the text.
pub fn message(body: &[u8]) -> String {
    let text = |v: &Value| v.as_str().map(str::to_owned).or_else(|| (!v.is_null()).then(|| v.to_string()));
    let parsed: Option<Value> = serde_json::from_slice(body).ok();
    let found = parsed.as_ref().and_then(|v| {
        let nested = v.get("error").and_then(|e| e.get("message"));
        [nested, v.get("detail"), v.get("message"), v.get("error")].into_iter().flatten().find_map(text)
    });
    let mut found = found.unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_owned());
    if found.len() > 4096 {
        let mut end = 4096;
        while !found.is_char_boundary(end) {
            end -= 1;
        }
        found.truncate(end);
    }
    found
}

/// Texts of engine errors that mean: the KV did not arrive. From the SGLang versions 0.5.10 to 0.5.23.
const TRANSFER: [&str; 9] = [
    "transfer failed",
    "KVReceiver Exception",
    "KVSender Exception",
    "KVTransferError",
    "Decode handshake failed",
    "Prefill bootstrap failed",
    "KVPoll",
    "Metadata corruption",
    "Could not fetch",
];

/// How a leg's failure is charged, and the label that it is counted under.
pub fn judge(error: &Error) -> (LegResult, Option<Failure>) {
    let text = error.message.as_ref();
    match error.kind {
        Kind::Connect => (LegResult::Connect, Some(Failure::Connect)),
        Kind::Reset => (LegResult::Reset, Some(Failure::Reset)),
        Kind::DeliveryTimeout => (LegResult::Deadline, Some(Failure::Deadline)),
        Kind::EngineRejected => (LegResult::Rejected, None),
        Kind::R3Mismatch | Kind::EngineProtocol => (LegResult::Protocol, None),
        Kind::EngineFailed if text.contains("AbortReq") => (LegResult::Cancelled, None),
        Kind::EngineFailed if is_mamba(text) => (LegResult::Mamba, Some(Failure::Mamba)),
        Kind::EngineFailed if TRANSFER.iter().any(|t| text.contains(t)) => {
            (LegResult::Transfer, Some(Failure::Transfer))
        }
        Kind::EngineFailed if error.status == Some(503) => (LegResult::Overloaded, Some(Failure::Overloaded)),
        Kind::EngineFailed => (LegResult::Server, Some(Failure::Server)),
        _ => (LegResult::Cancelled, None),
    }
}

/// Whether an engine says that its state slots ran out.
fn is_mamba(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    lower.contains("mamba")
        && ["slot", "pool", "not enough", "ran out", "alloc", "exhaust"].iter().any(|w| lower.contains(w))
}

/// How an attempt that ended with `error` is told to the admission.
pub fn outcome(error: &Error) -> Outcome {
    let role = match error.source {
        Source::Prefill => Role::Prefill,
        _ => Role::Decode,
    };
    match judge(error) {
        (_, Some(how)) => Outcome::Failed { role, how },
        (LegResult::Rejected, None) => Outcome::Rejected,
        _ => Outcome::Cancelled,
    }
}

/// The error that the first event of a stream tells, when it tells one: SGLang answers 200 before it knows.
pub fn first_event_error(role: Role, name: &str, piece: &[u8]) -> Option<Error> {
    const MAX_EVENT: usize = 64 << 10;
    let data = piece.strip_prefix(b"data:")?;
    let end = memmem::find(data, b"\n\n").or_else(|| memmem::find(data, b"\r\n\r\n"))?;
    let data = data.get(..end.min(MAX_EVENT))?;
    if memmem::find(data, b"\"error\"").is_none() && memmem::find(data, b"\"status_code\"").is_none() {
        return None;
    }
    let event: Value = serde_json::from_slice(data).ok()?;
    let status = |v: &Value| v.as_u64().and_then(|s| u16::try_from(s).ok()).filter(|s| *s >= 400);
    if let Some(error) = event.get("error").filter(|e| e.is_object()) {
        let status = error.get("code").and_then(status).unwrap_or(500);
        return Some(status_error(role, name, StatusCode::from_u16(status).ok()?, data));
    }
    let reason = event.get("meta_info")?.get("finish_reason")?;
    let status = reason.get("status_code").and_then(status)?;
    let text = reason.get("message").and_then(Value::as_str).unwrap_or("aborted");
    Some(status_error(role, name, StatusCode::from_u16(status).ok()?, text.as_bytes()))
}

/// Whether a small JSON reply says that the engine ended the request as an abort.
pub fn says_abort(body: &[u8]) -> bool {
    memmem::find(body, b"\"abort\"").is_some() && {
        let value: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
        let reason = value.get("meta_info").and_then(|m| m.get("finish_reason"));
        let choice = value.get("choices").and_then(|c| c.get(0)).and_then(|c| c.get("finish_reason"));
        reason.and_then(|r| r.get("type")).and_then(Value::as_str) == Some("abort")
            || choice.and_then(Value::as_str) == Some("abort")
    }
}

#[cfg(test)]
mod tests {
    use super::{first_event_error, judge, message, says_abort, status_error};
    use crate::metrics::LegResult;
    use http::StatusCode;
    use r3router_core::admission::Failure;
    use r3router_core::topology::Role;

    #[test]
    fn the_engines_sentence_is_found_in_every_form() {
        assert_eq!(message(br#"{"detail":"too long"}"#), "too long");
        assert_eq!(message(br#"{"error":{"message":"no room","code":400}}"#), "no room");
        assert_eq!(message(br#"{"object":"error","message":"bad"}"#), "bad");
        assert_eq!(message(b"Internal Server Error"), "Internal Server Error");
        assert_eq!(message(b""), "");
    }

    #[test]
    fn failures_are_told_apart_by_status_and_text() {
        let of = |status, text: &str| {
            judge(&status_error(Role::Decode, "d", StatusCode::from_u16(status).unwrap(), text.as_bytes()))
        };
        assert_eq!(of(400, "too long"), (LegResult::Rejected, None));
        assert_eq!(of(503, "busy"), (LegResult::Overloaded, Some(Failure::Overloaded)));
        assert_eq!(of(500, "boom"), (LegResult::Server, Some(Failure::Server)));
        assert_eq!(of(500, r#"{"detail":"Decode transfer failed for request rank=1"}"#).1, Some(Failure::Transfer));
        assert_eq!(of(500, "NIXL KVReceiver Exception").1, Some(Failure::Transfer));
        assert_eq!(of(500, "mamba pool: not enough slots").1, Some(Failure::Mamba));
        assert_eq!(of(500, "Decode transfer failed: Aborted by AbortReq."), (LegResult::Cancelled, None));
        assert!(!status_error(Role::Decode, "d", StatusCode::INTERNAL_SERVER_ERROR, b"Aborted by AbortReq.").retryable);
    }

    #[test]
    fn an_error_in_the_first_event_is_an_error_with_its_status() {
        let event = br#"data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Decode transfer failed","status_code":500}}}

data: [DONE]

"#;
        let error = first_event_error(Role::Decode, "d", event).unwrap();
        assert_eq!((error.http_status(), error.message.as_ref()), (500, "Decode transfer failed"));
        let chat = b"data: {\"error\":{\"message\":\"no\",\"code\":400}}\n\n";
        assert_eq!(first_event_error(Role::Decode, "d", chat).unwrap().http_status(), 400);
        let graceful = b"data: {\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":null}}}\n\n";
        assert!(first_event_error(Role::Decode, "d", graceful).is_none());
        assert!(first_event_error(Role::Decode, "d", b"data: {\"text\":\"the \\\"error\\\" word\"}\n\n").is_none());
    }

    #[test]
    fn a_graceful_abort_is_seen() {
        assert!(says_abort(br#"{"meta_info":{"finish_reason":{"type":"abort","message":"x"}}}"#));
        assert!(says_abort(br#"{"choices":[{"finish_reason":"abort"}]}"#));
        assert!(!says_abort(br#"{"text":"\"abort\"","meta_info":{"finish_reason":{"type":"length"}}}"#));
    }
}
