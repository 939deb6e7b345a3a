//! The router's own errors as replies: JSON that says what, limit, measured, which worker and what to change.
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use r3router_core::error::{Error, Kind, Source};
use serde_json::{Map, Value, json};

use crate::body::ReplyBody;

/// Header that carries the error's code, under the name that the SGLang router uses.
pub const ERROR_CODE: HeaderName = HeaderName::from_static("x-smg-error-code");

/// What the router answers.
pub type Reply = Response<ReplyBody>;

/// The `{"error": ...}` object of an error.
pub fn error_json(error: &Error) -> Value {
    let mut inner = Map::new();
    let status = error.http_status();
    inner.insert("type".into(), kind_name(status).into());
    inner.insert("code".into(), error.kind.code().into());
    inner.insert("message".into(), error.message.as_ref().into());
    inner.insert("status".into(), status.into());
    let source = match error.source {
        Source::Client => "client",
        Source::Router => "router",
        Source::Prefill => "prefill",
        Source::Decode => "decode",
    };
    inner.insert("source".into(), source.into());
    if let Some(limit) = error.limit {
        inner.insert("limit".into(), number(limit));
    }
    if let Some(measured) = error.measured {
        inner.insert("measured".into(), number(measured));
    }
    if let Some(worker) = &error.worker {
        inner.insert("worker".into(), worker.as_str().into());
    }
    if let Some(advice) = &error.advice {
        inner.insert("advice".into(), advice.as_ref().into());
    }
    json!({ "error": inner })
}

/// Whole numbers without a fraction, so that positions and counts read as such.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 9e15 { (value as i64).into() } else { value.into() }
}

fn kind_name(status: u16) -> &'static str {
    match status {
        400..=499 if status == 401 => "authentication_error",
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        503 => "service_unavailable",
        504 => "timeout_error",
        _ => "server_error",
    }
}

/// The reply to a request that failed before any byte of it was answered.
pub fn error_reply(error: &Error) -> Reply {
    let mut reply = json_reply(error.http_status(), &error_json(error));
    let headers = reply.headers_mut();
    headers.insert(ERROR_CODE, HeaderValue::from_static(error.kind.code()));
    if let Some(methods) = allowed(error).and_then(|m| HeaderValue::from_str(&m).ok()) {
        headers.insert(header::ALLOW, methods);
    }
    if error.kind == Kind::ReadTimeout || (error.kind == Kind::InvalidRequest && error.http_status() == 400) {
        // What may still come belongs to the request that was given up, or cannot be told from it.
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if let Some(after) = error.retry_after {
        // Whole seconds, rounded up: coming back early would meet the same limit.
        let secs = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        headers.insert(header::RETRY_AFTER, HeaderValue::from(secs.max(1)));
    }
    reply
}

/// A JSON reply.
pub fn json_reply(status: u16, value: &Value) -> Reply {
    bytes_reply(status, "application/json", Bytes::from(value.to_string()))
}

/// A reply of a known body.
pub fn bytes_reply(status: u16, content_type: &'static str, body: Bytes) -> Reply {
    let mut reply = Response::new(ReplyBody::from(body));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

/// A path that the router does not answer.
pub fn not_found(path: &str) -> Error {
    Error::new(Kind::NotFound, Source::Client, format!("the router has no route {path}"))
        .advise("see GET /routes for what it answers")
}

/// A body that is not JSON; `measured` is the position of the first byte that does not fit, the length when the end came too soon.
pub fn not_json(body: &[u8], error: &serde_json::Error, advice: &'static str) -> Error {
    let at = if error.is_eof() {
        body.len()
    } else {
        let before: usize =
            body.split_inclusive(|b| *b == b'\n').take(error.line().saturating_sub(1)).map(<[u8]>::len).sum();
        (before + error.column().saturating_sub(1)).min(body.len())
    };
    let message = if body.is_empty() {
        "the body is empty, not JSON, at byte 0".to_owned()
    } else {
        format!("the body is not JSON: {error}, at byte {at}")
    };
    let mut told = Error::new(Kind::InvalidJson, Source::Client, message).advise(advice);
    told.measured = Some(at as f64);
    told
}

/// A method that a path does not take.
pub fn wrong_method(method: &http::Method, path: &str, takes: &'static str) -> Error {
    Error::new(Kind::MethodNotAllowed, Source::Client, format!("{path} does not take {method}"))
        .advise(format!("use {takes}"))
}

/// The methods that [`wrong_method`] advises, as the header `allow` that a 405 must have.
fn allowed(error: &Error) -> Option<String> {
    let advice = error.advice.as_deref().filter(|_| error.kind == Kind::MethodNotAllowed)?;
    Some(advice.strip_prefix("use ")?.replace(" or ", ", "))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ERROR_CODE, error_json, error_reply, not_json, wrong_method};
    use r3router_core::error::{Error, Kind, Source};

    #[test]
    fn the_position_of_what_is_not_json_is_a_byte_of_the_body() {
        for (body, at) in [
            ("", 0),
            ("{", 1),
            ("nope", 1),
            (r#"{"a" 1}"#, 5),
            ("{\n \"a\": 1,\n x}", 12),
            ("{\n\n\"a\": [1,", 11),
            ("{\"a\": 1} x", 9),
            ("\u{e4}", 0),
        ] {
            let error = serde_json::from_str::<serde_json::Value>(body).unwrap_err();
            let told = not_json(body.as_bytes(), &error, "send JSON");
            assert_eq!(told.measured, Some(f64::from(at)), "{body:?}: {error}");
            assert!(told.message.ends_with(&format!("at byte {at}")), "{}", told.message);
        }
    }

    #[test]
    fn an_error_says_limit_measured_worker_and_advice() {
        let error = Error::new(Kind::QueueFull, Source::Router, "the queue is full")
            .with_limit(100.0, 100.0)
            .at_worker("http://d:1@3")
            .advise("send later")
            .retry_after(Duration::from_millis(1500));
        let json = error_json(&error);
        assert_eq!(
            json.to_string(),
            r#"{"error":{"advice":"send later","code":"queue_full","limit":100,"measured":100,"message":"the queue is full","source":"router","status":429,"type":"rate_limit_error","worker":"http://d:1@3"}}"#
        );
        let reply = error_reply(&error);
        assert_eq!(reply.status(), 429);
        assert_eq!(reply.headers()[ERROR_CODE], "queue_full");
        assert_eq!(reply.headers()["retry-after"], "2");
    }

    #[test]
    fn a_wrong_method_says_which_are_right_in_the_header_too() {
        let reply = error_reply(&wrong_method(&http::Method::PATCH, "/workers", "GET or POST"));
        assert_eq!(reply.status(), 405);
        assert_eq!(reply.headers()["allow"], "GET, POST");
    }
}
