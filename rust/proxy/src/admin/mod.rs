//! The admin listener: what a person on call looks at and changes. Loopback by default; with a key where other machines can reach it.
//!
//! Without a key a browser on the same machine is the danger: a page of another site may send requests here. So the `host` of a request must
//! be an address or `localhost` (a name that an attacker points to 127.0.0.1 is refused), bodies must be declared as JSON (which a page of
//! another site may not do unasked, and nobody here answers when it asks), and no reply allows other origins to read it.
mod drain;
mod ranks;
mod routes;

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, header};
use hyper::body::Incoming;
use r3router_core::error::{Error, Kind, Source};
use serde_json::{Value, json};

pub use routes::page;

use crate::access::Line;
use crate::app::App;
use crate::context::request_id;
use crate::edge::Edge;
use crate::errors::{Reply, bytes_reply, error_reply, json_reply, wrong_method};
use crate::receive::Receiver;
use crate::{auth, info};

/// Largest body: registrations and control calls are small. What trainers send in bulk (weights by tensor) goes to the main port.
const MAX_BODY: u64 = 64 << 20;
/// The status page.
const PAGE: &str = include_str!("page.html");
/// The page may run its own script and style, ask this listener, and nothing else; nobody may frame it.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Answers one request of the admin listener.
pub async fn answer(app: Arc<App>, request: Request<Incoming>, edge: Arc<Edge>) -> Reply {
    let id = request_id(&app, None, request.headers());
    let line = Line::begin(&app, "http", &request, &id);
    let mut reply = match routed(&app, request, &edge).await {
        Ok(reply) => reply,
        Err(error) => error_reply(&error),
    };
    let headers = reply.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(line) = line {
        line.end(&reply);
    }
    reply
}

async fn routed(app: &Arc<App>, request: Request<Incoming>, edge: &Arc<Edge>) -> Result<Reply, Error> {
    let (parts, incoming) = request.into_parts();
    let (method, headers) = (&parts.method, &parts.headers);
    let path = parts.uri.path();
    let receiver = Receiver { app, edge, headers, arrived: Instant::now() };
    if let Err(error) = admitted(app, method, path, headers) {
        receiver.unwanted(incoming);
        return Err(error);
    }
    let reads = matches!(*method, Method::GET | Method::HEAD);
    let body = receiver.body(incoming, MAX_BODY).await?;
    match path {
        "/" | "/admin" | "/admin/" if reads => Ok(status_page()),
        "/admin/ranks" if reads => Ok(json_reply(200, &ranks::table(app))),
        "/admin/findings" if reads => Ok(json_reply(200, &json!({ "findings": app.findings.json() }))),
        "/admin/settings" if reads => Ok(json_reply(200, &settings(app))),
        "/admin/routes" if reads => Ok(json_reply(200, &routes::list())),
        "/admin/drain" | "/admin/undrain" if *method == Method::POST => {
            drain::handle(app, &body, path == "/admin/drain").await
        }
        "/" | "/admin" | "/admin/" | "/admin/ranks" | "/admin/findings" | "/admin/settings" | "/admin/routes" => {
            Err(wrong_method(method, path, "GET or HEAD"))
        }
        "/admin/drain" | "/admin/undrain" => Err(wrong_method(method, path, "POST")),
        "/health" | "/liveness" => Ok(bytes_reply(200, "text/plain; charset=utf-8", Bytes::from_static(b"OK"))),
        "/readiness" | "/ready" => Ok(info::readiness(app)),
        "/metrics" => Ok(info::metrics(app)),
        _ => crate::routes::managed(app, method, &parts.uri, headers, body).await,
    }
}

/// Whether the request may be answered at all.
fn admitted(app: &App, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), Error> {
    // The page holds no data; it asks for them with the key that it asks its reader for.
    let open = matches!(path, "/" | "/admin" | "/admin/") || auth::OPEN.contains(&path);
    if let Some(key) = &app.admin_key {
        if !open {
            auth::bears(headers, key)
                .map_err(|e| e.advise("send Authorization: Bearer KEY with the router's --admin-api-key"))?;
        }
    } else if !literal_host(headers, &app.settings.admin_host) {
        return Err(Error::new(
            Kind::AdminOnly,
            Source::Client,
            "the request's host is a name, and the admin listener has no key",
        )
        .advise("call it by its address or as localhost, or set --admin-api-key"));
    }
    let changes = !matches!(*method, Method::GET | Method::HEAD);
    if changes && !declared_json(headers) {
        return Err(Error::new(Kind::AdminOnly, Source::Client, "the request is not declared as JSON")
            .advise("send content-type: application/json, with an empty object where nothing is to be said"));
    }
    Ok(())
}

/// Whether `host` is an address, `localhost`, or the name that the listener is set to.
fn literal_host(headers: &HeaderMap, own: &str) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|h| h.to_str().ok()) else {
        // HTTP/1.0 tools; browsers always send it.
        return true;
    };
    let bare = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((v6, _)) => v6,
        None => host.rsplit_once(':').map_or(host, |(bare, _)| bare),
    };
    bare.parse::<std::net::IpAddr>().is_ok() || bare.eq_ignore_ascii_case("localhost") || bare.eq_ignore_ascii_case(own)
}

fn declared_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
    kind.split(';').next().is_some_and(|k| k.trim().eq_ignore_ascii_case("application/json"))
}

fn status_page() -> Reply {
    let mut reply = bytes_reply(200, "text/html; charset=utf-8", Bytes::from_static(PAGE.as_bytes()));
    let headers = reply.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    reply
}

/// What the router runs with; keys as `***`.
fn settings(app: &App) -> Value {
    let values: serde_json::Map<String, Value> =
        app.given.values().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    json!({ "settings": values })
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue, header};

    use super::{declared_json, literal_host};

    fn with(name: http::HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
    }

    #[test]
    fn names_that_others_may_point_here_are_no_hosts() {
        for good in [
            "127.0.0.1:29001",
            "127.0.0.1",
            "localhost:29001",
            "LocalHost",
            "[::1]:29001",
            "[::1]",
            "10.0.0.7:1",
            "admin:1",
        ] {
            assert!(literal_host(&with(header::HOST, good), "admin"), "{good}");
        }
        for bad in ["evil.example:29001", "localhost.evil.example", "127.0.0.1.evil.example:29001", "", "[evil]"] {
            assert!(!literal_host(&with(header::HOST, bad), "127.0.0.1"), "{bad}");
        }
        assert!(literal_host(&HeaderMap::new(), "127.0.0.1"));
    }

    #[test]
    fn only_json_is_json() {
        for good in ["application/json", "Application/JSON; charset=utf-8"] {
            assert!(declared_json(&with(header::CONTENT_TYPE, good)));
        }
        for bad in ["text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", ""] {
            assert!(!declared_json(&with(header::CONTENT_TYPE, bad)), "{bad}");
        }
        assert!(!declared_json(&HeaderMap::new()));
    }
}
