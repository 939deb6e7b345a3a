//! Which path is answered by what.
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use hyper::body::Incoming;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::wire::Route;
use serde_json::json;

use crate::access::Line;
use crate::app::App;
use crate::context::{Count, REQUEST_ID, request_id};
use crate::edge::Edge;
use crate::errors::{Reply, bytes_reply, error_reply, json_reply, not_found, wrong_method};
use crate::generate::{self, Head};
use crate::receive::Receiver;
use crate::{abort, auth, control, info, objects, pass, passthrough, registration};

/// The engine route of a path.
fn engine_route(path: &str) -> Option<Route> {
    match path {
        "/generate" => Some(Route::Generate),
        "/v1/chat/completions" => Some(Route::Chat),
        "/v1/completions" => Some(Route::Completions),
        _ => None,
    }
}

fn engine_path(route: Route) -> &'static str {
    match route {
        Route::Generate => "/generate",
        Route::Chat => "/v1/chat/completions",
        Route::Completions => "/v1/completions",
    }
}

/// Whether a request of this kind has engines work for as long as its client waits, so that it must end when its client leaves.
pub(crate) fn occupies_engines(method: &Method, path: &str) -> bool {
    let passed = || passthrough::ANY_ENGINE.contains(&path) || passthrough::REGULAR_ONLY.contains(&path);
    *method == Method::POST && (engine_route(path).is_some() || passed() || path.starts_with(passthrough::RESPONSES))
}

/// Answers one request.
pub async fn answer(app: Arc<App>, request: Request<Incoming>, edge: Arc<Edge>) -> Reply {
    let origin = request.headers().get(header::ORIGIN).cloned();
    // Generation and what is passed through count themselves under an id; every other answer gets one here.
    let route = engine_route(request.uri().path());
    let counted = route.is_some() && request.method() == Method::POST;
    let id = (!counted).then(|| request_id(&app, route, request.headers()));
    let line = id.as_ref().and_then(|id| Line::begin(&app, app.scheme(), &request, id));
    let mut reply = match app.cors.preflight(request.method(), request.headers()) {
        Some(reply) => reply,
        None => routed(&app, request, &edge).await,
    };
    if let Some(id) = id {
        reply.headers_mut().entry(REQUEST_ID).or_insert(id);
    }
    if let Some(line) = line {
        line.end(&reply);
    }
    if let Some(origin) = origin {
        app.cors.mark(&origin, &mut reply);
    }
    if app.drain.started() {
        // Clients go on to another router with their next request.
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    reply
}

async fn routed(app: &Arc<App>, request: Request<Incoming>, edge: &Arc<Edge>) -> Reply {
    let path = request.uri().path();
    if let Some(pool) = app.handover.successor().filter(|_| !pass::own(app, path)) {
        return Box::pin(pass::on(app, &pool, request, edge)).await;
    }
    match (engine_route(path), request.method()) {
        (Some(route), &Method::POST) => engine(app, route, request, edge).await,
        (Some(_), method) => error_reply(&wrong_method(method, path, "POST")),
        // Apart, so that the future of a connection has no room for what few requests need.
        _ => match Box::pin(other(app, request, edge)).await {
            Ok(reply) => reply,
            Err(error) => error_reply(&error),
        },
    }
}

async fn engine(app: &Arc<App>, route: Route, request: Request<Incoming>, edge: &Arc<Edge>) -> Reply {
    let count = Arc::new(Count::start(app, Some(route), engine_path(route), request.headers()));
    let (parts, incoming) = request.into_parts();
    let receiver = Receiver { app, edge, headers: &parts.headers, arrived: count.arrived() };
    let body = match app.drain.check().and_then(|()| auth::check(app, parts.uri.path(), &parts.headers)) {
        Ok(()) => receiver.body(incoming, app.settings.max_payload_size).await,
        Err(error) => {
            receiver.unwanted(incoming);
            Err(error)
        }
    };
    match body {
        Ok(body) => generate::handle(app, Head { route, uri: parts.uri, headers: parts.headers }, body, count).await,
        Err(error) => {
            count.failed(error.kind, error.http_status());
            let mut reply = error_reply(&error);
            reply.headers_mut().insert(REQUEST_ID, count.id().clone());
            reply
        }
    }
}

async fn other(app: &Arc<App>, request: Request<Incoming>, edge: &Arc<Edge>) -> Result<Reply, Error> {
    let ok = || bytes_reply(200, "text/plain; charset=utf-8", Bytes::from_static(b"OK"));
    let (parts, incoming) = request.into_parts();
    let (method, uri, headers) = (&parts.method, &parts.uri, &parts.headers);
    let path = uri.path();
    let reads = matches!(*method, Method::GET | Method::HEAD);
    match path {
        "/health" | "/liveness" | "/readiness" | "/ready" | "/metrics" if !reads => {
            return Err(wrong_method(method, path, "GET or HEAD"));
        }
        "/health" | "/liveness" => return Ok(ok()),
        "/readiness" | "/ready" => return Ok(info::readiness(app)),
        "/metrics" => return Ok(info::metrics(app)),
        _ => {}
    }
    let allowed = auth::check(app, path, headers);
    if let Some(id) = path.strip_prefix("/r3/") {
        // Rows are named by ids that only their client was told; a wrong key is told apart from none.
        allowed.map_err(|e| auth::refused(e, headers))?;
        return objects::handle(app, method, uri, headers, id);
    }
    let receiver = Receiver { app, edge, headers, arrived: Instant::now() };
    if let Err(error) = allowed {
        receiver.unwanted(incoming);
        return Err(error);
    }
    if let Err(error) = elsewhere(app, method, path) {
        receiver.unwanted(incoming);
        return Err(error);
    }
    let body = receiver.body(incoming, app.settings.max_payload_size).await?;
    managed(app, method, uri, headers, body).await
}

/// Whether this belongs to the admin listener alone.
fn elsewhere(app: &App, method: &Method, path: &str) -> Result<(), Error> {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    let workers = path == "/workers" || path.starts_with("/workers/");
    let changes =
        matches!(path, "/add_worker" | "/remove_worker") || (workers && !reads) || control::BROADCAST.contains(&path);
    if changes && !app.settings.control_on_main_port {
        return Err(Error::new(
            Kind::AdminOnly,
            Source::Client,
            format!("{path} is answered on the admin listener only"),
        )
        .advise("send it to --admin-port with the --admin-api-key, or set --control-on-main-port"));
    }
    Ok(())
}

/// Everything that is no generation, once it may be answered.
pub(crate) async fn managed(
    app: &Arc<App>,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Reply, Error> {
    let path = uri.path();
    match path {
        "/" | "/routes" => Ok(json_reply(200, &routes())),
        "/health_generate" => info::health_generate(app).await,
        "/v1/loads" => Ok(info::loads(app, uri).await),
        "/get_loads" | "/get_load" => Ok(info::get_loads(app).await),
        "/engine_metrics" => Ok(info::engine_metrics(app).await),
        "/abort_request" => match *method {
            Method::POST => abort::client(app, body).await,
            _ => Err(wrong_method(method, path, "POST")),
        },
        _ if control::BROADCAST.contains(&path) => match *method {
            Method::POST | Method::GET => Ok(control::handle(app, method, uri, headers, body).await),
            // SGLang takes either.
            Method::PUT if path == "/set_internal_state" => Ok(control::handle(app, method, uri, headers, body).await),
            _ => Err(wrong_method(method, path, "POST")),
        },
        _ if info::PROXIED.contains(&path) => info::proxied(app, method, uri, headers, body).await,
        _ if passthrough::ANY_ENGINE.contains(&path) || passthrough::REGULAR_ONLY.contains(&path) => match *method {
            Method::POST => {
                app.drain.check()?;
                let known = passthrough::ANY_ENGINE.iter().chain(&passthrough::REGULAR_ONLY);
                let path = known.copied().find(|p| *p == path).unwrap_or_default();
                let count = Arc::new(Count::start(app, None, path, headers));
                Ok(passthrough::handle(app, uri, headers, body, count).await)
            }
            _ => Err(wrong_method(method, path, "POST")),
        },
        _ if path.starts_with(passthrough::RESPONSES) => {
            passthrough::of_response(app, method, uri, headers, &body).await
        }
        _ => match registration::handle(app, method, uri, body).await {
            Some(reply) => reply,
            None => Err(not_found(path)),
        },
    }
}

/// Everything that is answered, for people.
fn routes() -> serde_json::Value {
    json!({
        "generate": ["/generate", "/v1/chat/completions", "/v1/completions"],
        "any_engine": passthrough::ANY_ENGINE,
        "regular_engines_only": passthrough::REGULAR_ONLY,
        "responses": ["/v1/responses/{id}", "/v1/responses/{id}/cancel", "/v1/responses/{id}/input_items"],
        "health": ["/health", "/liveness", "/readiness", "/health_generate"],
        "info": info::PROXIED,
        "loads": ["/v1/loads", "/get_loads", "/engine_metrics", "/metrics"],
        "workers": ["/workers", "/workers/{id}", "/add_worker", "/remove_worker", "/list_workers"],
        "abort": ["/abort_request"],
        "references": ["/r3/{id}"],
        "every_engine": control::BROADCAST,
    })
}
