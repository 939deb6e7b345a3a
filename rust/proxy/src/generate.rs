//! `/generate`, `/v1/chat/completions` and `/v1/completions`: read, split, serve, join, answer.
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, Uri, header};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::wire::{Route, scan};

use crate::aborted;
use crate::app::App;
use crate::attempts::{Answer, Mode, Ready, Refusal, serve};
use crate::body::ReplyBody;
use crate::context::{Count, R3_TRANSPORT, REQUEST_ID, ROUTING_KEY, Shared};
use crate::errors::{Reply, error_reply};
use crate::fanout;
use crate::live::{Kept, Sub};
use crate::metrics::ClientOutcome;
use crate::relay::ClientBody;
use crate::settings::R3Transport;
use crate::target;

/// What came with the request's head.
#[derive(Debug)]
pub struct Head {
    /// The route.
    pub route: Route,
    /// Path and query.
    pub uri: Uri,
    /// All headers.
    pub headers: HeaderMap,
}

/// Serves a request whose body is here.
pub async fn handle(app: &Arc<App>, head: Head, body: Bytes, count: Arc<Count>) -> Reply {
    let id = count.id().clone();
    let mut reply = match run(app, head, body, &count).await {
        Ok(reply) => reply,
        Err(mut refusal) => {
            if refusal.error.kind == Kind::NoWorkers {
                refusal.error = app.registry.explain(app.roles(), refusal.error);
            }
            refuse(app, &refusal, &count)
        }
    };
    reply.headers_mut().insert(REQUEST_ID, id);
    reply
}

async fn run(app: &Arc<App>, head: Head, body: Bytes, count: &Arc<Count>) -> Result<Reply, Refusal> {
    let plain = |error: Error| Refusal { error, kept: None };
    let facts = scan(&body, head.route).map_err(plain)?;
    let asked = match head.headers.get(R3_TRANSPORT) {
        None => app.settings.r3_transport,
        Some(value) => value.to_str().ok().and_then(R3Transport::from_name).ok_or_else(|| {
            let message = format!("{R3_TRANSPORT} is {value:?}, which is no way for payloads to go");
            plain(Error::new(Kind::InvalidField, Source::Client, message).advise("send ref or inline, or leave it out"))
        })?,
    };
    let by_ref = facts.via_store || asked == R3Transport::Ref;
    // A client that names our own way gets our own references.
    let named = head.headers.contains_key(R3_TRANSPORT);
    let sink = facts.via_store && !named && !facts.stream && app.sink.is_some();
    if sink && facts.indexer_topk {
        let message = "indexer_topk cannot go into the sink's store";
        return Err(plain(
            Error::new(Kind::R3Unsupported, Source::Client, message)
                .advise("leave return_indexer_topk out, or send x-r3-transport: ref"),
        ));
    }
    let base = if by_ref { public_url(app, &head.headers) } else { Arc::from("") };
    let model = facts.model.and_then(|span| body.get(span.start..span.end)).map(|m| {
        let text = String::from_utf8_lossy(m);
        text.trim_matches('"').to_owned()
    });
    // Where the router checks clients itself, their key is the router's own business.
    let client_auth = if app.client_key.is_none() { head.headers.get(header::AUTHORIZATION).cloned() } else { None };
    let shared = Arc::new(Shared {
        app: Arc::clone(app),
        route: head.route,
        headers: count.forwarded(&head.headers),
        client_auth,
        uri: head.uri,
        arrived: count.arrived(),
        paused_before: app.gate.paused_total(),
        model: model.unwrap_or_default(),
        trace: count.trace().cloned(),
        key: head.headers.get(ROUTING_KEY).map_or(0, |key| key_hash(app, key)),
        targets: target::of(app, &head.headers).map_err(plain)?,
        by_ref,
        sink,
        base,
        body,
        facts,
    });
    // An engine serves a batch itself; only a pair needs a room for each of its requests, and references one reply for each.
    let references = shared.by_ref && shared.facts.routed_experts;
    let whole = !app.settings.pd_disaggregation && !references && (shared.facts.listed || shared.facts.subs() > 1);
    if shared.facts.subs() == 1 && !shared.facts.listed || whole {
        let sub = Sub::start(app, shared.facts.rid(0), shared.trace.as_ref());
        let mode = Mode { index: 0, whole, joined: false };
        let id = sub.client_rid.clone();
        return match serve(&shared, sub, mode, count).await {
            Ok(answer) => Ok(answered(answer, count)),
            Err(refusal) if refusal.error.kind == Kind::Aborted && !whole => {
                count.outcome(ClientOutcome::Aborted, 200);
                Ok(aborted::reply(&shared, id.as_deref().unwrap_or(""), refusal.kept.as_ref()))
            }
            Err(refusal) => Err(refusal),
        };
    }
    Box::pin(fanout::serve_all(&shared, count)).await
}

/// Makes the client's reply of an answer.
pub fn answered(answer: Answer, count: &Arc<Count>) -> Reply {
    let Answer { status, headers, ready } = answer;
    let count = Arc::clone(count);
    let code = status.as_u16();
    let body = match ready {
        Ready::Whole(bytes) => {
            count.bytes(bytes.len() as u64);
            count.outcome(ClientOutcome::Ok, code);
            ReplyBody::from(bytes)
        }
        Ready::Merged(merged) => ReplyBody::Stream(Box::new(ClientBody::new(Box::pin(merged), count, code))),
        Ready::Stream(relay) => ReplyBody::Stream(Box::new(ClientBody::new(relay, count, code))),
    };
    reply(status, headers, body)
}

/// A reply with an engine's status and end-to-end headers.
pub fn reply(status: StatusCode, headers: HeaderMap, body: ReplyBody) -> Reply {
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    *reply.headers_mut() = headers;
    reply
}

fn refuse(app: &App, refusal: &Refusal, count: &Count) -> Reply {
    let Refusal { error, kept } = refusal;
    // One engine's own failure is its own words; of a pair it has to be said which of the two failed.
    let alone = error.kind == Kind::EngineFailed && !app.settings.pd_disaggregation;
    let own = |kept: &&Kept| error.kind == Kind::EngineRejected || (alone && !kept.body.is_empty());
    if let Some(reply) = kept.as_ref().filter(own).map(|kept| as_the_engine_wrote(error, kept)) {
        let status = reply.status().as_u16();
        count.failed(error.kind, status);
        return reply;
    }
    count.failed(error.kind, error.http_status());
    error_reply(error)
}

/// What the client gets of an engine's refusal: its status and its body.
fn as_the_engine_wrote(error: &Error, kept: &Kept) -> Reply {
    let mut reply = Response::new(ReplyBody::from(kept.body.clone()));
    *reply.status_mut() = kept.status;
    let json = HeaderValue::from_static("application/json");
    reply.headers_mut().insert(header::CONTENT_TYPE, kept.content_type.clone().unwrap_or(json));
    reply.headers_mut().insert(crate::errors::ERROR_CODE, HeaderValue::from_static(error.kind.code()));
    reply
}

/// Under which address the client reaches this router: as set, or as it did this time.
fn public_url(app: &App, headers: &HeaderMap) -> Arc<str> {
    if let Some(url) = &app.settings.r3_public_url {
        return Arc::from(url.trim_end_matches('/'));
    }
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let scheme = if app.tls.is_some() { "https" } else { "http" };
    Arc::from(format!("{scheme}://{host}"))
}

/// Hash of a routing key; never 0, which means none. Drawn anew for each process, unless every router must give a key the same rank.
fn key_hash(app: &App, value: &HeaderValue) -> u64 {
    if app.settings.hashes_keys() {
        return r3router_core::policy::hash(value.as_bytes()).max(1);
    }
    static STATE: OnceLock<std::hash::RandomState> = OnceLock::new();
    let mut hasher = STATE.get_or_init(std::hash::RandomState::new).build_hasher();
    hasher.write(value.as_bytes());
    hasher.finish().max(1)
}
