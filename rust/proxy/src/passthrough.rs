//! Calls that one engine serves by itself and that hold no KV beyond their end: embeddings, scores, ranks, responses, tokens. The body goes
//! as it came and the reply comes as it is, piece by piece; admission is not asked for a place. What makes a model work waits while rollout
//! control has the fleet paused, as generation does, and its time limit stands still.
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Method, Uri, header};
use http_body::{Body, Frame, SizeHint};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::Role;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::access::Counted;
use crate::admit::Gate;
use crate::app::App;
use crate::attempts::strip_hop_by_hop;
use crate::body::ReplyBody;
use crate::context::{Count, REQUEST_ID};
use crate::control::broadcast;
use crate::errors::{Reply, error_reply};
use crate::info::no_workers;
use crate::leg::{LegBody, fault_error};
use crate::metrics::LegResult;
use crate::relay::ClientBody;
use crate::timer::Timer;
use crate::trace;
use crate::upstream::{Call, Fault};
use crate::worker::Worker;
use crate::{generate, rerank, target};

/// POST routes that any engine answers, in PD mode too.
pub const ANY_ENGINE: [&str; 4] = ["/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"];
/// POST routes that only regular engines answer.
pub const REGULAR_ONLY: [&str; 9] = [
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v1/score",
    "/v1/classify",
    "/classify",
    "/encode",
    "/v1/responses",
    "/v1/messages",
];
/// What `GET /v1/responses/{id}` and the like begin with: the engine that made a response keeps it.
pub const RESPONSES: &str = "/v1/responses/";

/// Fails in PD mode: no pair of engines serves `path`.
///
/// # Errors
/// `NeedsOneEngine`.
pub fn regular_only(app: &App, path: &str) -> Result<(), Error> {
    if !app.settings.pd_disaggregation {
        return Ok(());
    }
    Err(Error::new(
        Kind::NeedsOneEngine,
        Source::Client,
        format!("{path} is answered by one engine, and this router's engines are split into prefill and decode"),
    )
    .advise("send it to a router of regular workers, or to an engine itself"))
}

/// Sends a POST to the least busy engine and relays its answer.
pub async fn handle(app: &Arc<App>, uri: &Uri, headers: &HeaderMap, body: Bytes, count: Arc<Count>) -> Reply {
    let mut reply = match run(app, uri, headers, body, &count).await {
        Ok(reply) => reply,
        Err(error) => {
            count.failed(error.kind, error.http_status());
            error_reply(&error)
        }
    };
    reply.headers_mut().insert(REQUEST_ID, count.id().clone());
    reply.extensions_mut().insert(Counted);
    reply
}

async fn run(app: &Arc<App>, uri: &Uri, headers: &HeaderMap, body: Bytes, count: &Arc<Count>) -> Result<Reply, Error> {
    let path = uri.path();
    if REGULAR_ONLY.contains(&path) {
        regular_only(app, path)?;
    }
    an_object(&body)?;
    let ranking = rerank::wanted(path, &body);
    let mut call = Call {
        method: Method::POST,
        uri: if ranking.is_some() { Uri::from_static(rerank::ENGINE_PATH) } else { uri.clone() },
        headers: count.forwarded(headers),
        pieces: Arc::from([body]),
    };
    // As with generation: where the router does not check clients itself, their key is the engines' business.
    if app.client_key.is_none()
        && let Some(key) = headers.get(header::AUTHORIZATION)
    {
        call.headers.insert(header::AUTHORIZATION, key.clone());
    }
    let timer = Timer::of_request(&app.gate, count.arrived(), app.settings.request_timeout_secs);
    let queued = Instant::now();
    if REGULAR_ONLY.contains(&path) {
        app.gate.open().await?;
    }
    count.dispatched(queued.elapsed());
    let named = target::workers(app, headers)?;
    let mut passed = sent(app, &call, count, named, timer).await?;
    let status = passed.body.status();
    let mut reply_headers = std::mem::take(passed.body.headers_mut());
    strip_hop_by_hop(&mut reply_headers);
    if let Some(ranking) = ranking.filter(|_| status.is_success()) {
        let ranks = passed.collect().await?;
        let wrapped = ranking.wrap(ranks);
        count.bytes(wrapped.len() as u64);
        count.outcome(crate::metrics::ClientOutcome::Ok, status.as_u16());
        return Ok(generate::reply(status, reply_headers, ReplyBody::from(wrapped)));
    }
    let body = ReplyBody::Stream(Box::new(ClientBody::new(passed, Arc::clone(count), status.as_u16())));
    Ok(generate::reply(status, reply_headers, body))
}

/// Sends to one engine after the other until one can be reached: of those that the client named, or of all.
async fn sent(
    app: &Arc<App>,
    call: &Call,
    count: &Count,
    named: Vec<Arc<Worker>>,
    mut timer: Timer,
) -> Result<Passed, Error> {
    let mut workers = if named.is_empty() { app.registry.active() } else { named };
    workers.sort_by_key(|w| (w.role == Role::Decode, w.open.load(Ordering::Relaxed)));
    let mut last = no_workers(app, "any");
    let mut number = 0;
    for worker in workers.into_iter().take(app.settings.attempts() as usize) {
        number += 1;
        let mut leg = Leg::start(&worker, count.trace(), number);
        let mut call = call.clone().with_key(worker.key.get().as_ref());
        if let Some((request, span)) = &leg.span {
            span.mark(request, &mut call.headers);
            span.sends(call.pieces.iter().map(|p| p.len() as u64).sum());
        }
        let reply = {
            let mut reply = pin!(worker.pool.send(&call));
            poll_fn(|cx| match reply.as_mut().poll(cx) {
                Poll::Ready(reply) => Poll::Ready(Ok(reply)),
                Poll::Pending => timer.poll(cx, &app.gate, || true).map(Err),
            })
            .await
        };
        match reply {
            Ok(Ok(exchange)) => {
                leg.result = match exchange.head.status.as_u16() {
                    500.. => LegResult::Server,
                    400.. => LegResult::Rejected,
                    _ => LegResult::Ok,
                };
                let span = leg.span.as_ref().map(|(_, span)| Arc::clone(span));
                let body = LegBody::new(exchange, worker, app.clock).traced(span);
                return Ok(Passed { body, leg, gate: Arc::clone(&app.gate), timer });
            }
            Ok(Err(fault)) => {
                last = fault_error(worker.role, &worker.url, &fault);
                if !matches!(fault, Fault::Connect(_)) {
                    // It may have been served: a second engine would serve it twice.
                    leg.result = LegResult::Reset;
                    return Err(last);
                }
                leg.result = LegResult::Connect;
                app.suspect(&worker);
            }
            Err(overdue) => {
                leg.result = LegResult::Deadline;
                return Err(overdue.at_worker(&*worker.url));
            }
        }
    }
    Err(last)
}

/// Counts a call that is open on an engine.
struct Leg {
    worker: Arc<Worker>,
    result: LegResult,
    span: Option<(Arc<trace::Request>, Arc<trace::Leg>)>,
}

impl Leg {
    fn start(worker: &Arc<Worker>, trace: Option<&Arc<trace::Request>>, number: u32) -> Self {
        worker.leg_started();
        let span = trace.map(|request| {
            let span = trace::Leg::new(request, worker.role, worker, None, number);
            span.begin();
            (Arc::clone(request), span)
        });
        Self { worker: Arc::clone(worker), result: LegResult::Cancelled, span }
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        self.worker.leg_ended(self.result);
        if let Some((request, span)) = &self.span {
            span.end(self.result);
            span.leave(request);
        }
    }
}

/// An engine's reply on its way to the client.
struct Passed {
    body: LegBody,
    leg: Leg,
    gate: Arc<Gate>,
    timer: Timer,
}

impl Passed {
    async fn collect(mut self) -> Result<Bytes, Error> {
        const MOST: usize = 64 << 20;
        let worker = Arc::clone(self.body.worker());
        self.body.collect(MOST).await.map_err(|fault| {
            self.leg.result = LegResult::Reset;
            fault_error(worker.role, &worker.url, &fault)
        })
    }
}

impl Body for Passed {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let name = Arc::clone(&self.leg.worker.url);
        let gate = Arc::clone(&self.gate);
        if let Poll::Ready(error) = self.timer.poll(cx, &gate, || true) {
            self.leg.result = LegResult::Deadline;
            return Poll::Ready(Some(Err(error.at_worker(&*name))));
        }
        match std::task::ready!(self.body.poll_piece(cx)) {
            Some(Ok(piece)) => Poll::Ready(Some(Ok(Frame::data(piece)))),
            Some(Err(fault)) => {
                self.leg.result = LegResult::Reset;
                Poll::Ready(Some(Err(fault_error(self.leg.worker.role, &name, &fault))))
            }
            None => Poll::Ready(None),
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Asks every engine for a response that one of them keeps; the first that knows it answers.
///
/// # Errors
/// 501 in PD mode, `NoWorkers`.
pub async fn of_response(
    app: &Arc<App>,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    body: &Bytes,
) -> Result<Reply, Error> {
    regular_only(app, uri.path())?;
    let told = broadcast(app, method, uri, headers, body).await;
    let best = told.into_iter().min_by_key(|t| match &t.answer {
        Ok(answer) if answer.ok() => 0,
        Ok(answer) if answer.status != 404 => 1,
        Ok(_) => 2,
        Err(_) => 3,
    });
    let Some(best) = best else { return Err(no_workers(app, "regular")) };
    match best.answer {
        Ok(answer) => Ok(crate::info::relayed(answer)),
        Err(error) => Err(Error::new(Kind::Connect, Source::Decode, error.to_string()).at_worker(&*best.worker.url)),
    }
}

/// Fails unless the body is one JSON object. Its strings are not looked into: what an engine takes, the router lets through.
fn an_object(body: &[u8]) -> Result<(), Error> {
    is_json(body)?;
    if body.trim_ascii_start().first() == Some(&b'{') {
        return Ok(());
    }
    Err(Error::new(Kind::InvalidJson, Source::Client, "the body is JSON but no object").advise("send an object"))
}

/// Fails unless the body is JSON, with the place of the first byte that is not. Escapes are not looked into.
///
/// # Errors
/// `InvalidJson`.
pub(crate) fn is_json(body: &[u8]) -> Result<(), Error> {
    // The parser passes over strings without a look at their bytes.
    if let Err(error) = std::str::from_utf8(body) {
        let at = error.valid_up_to();
        let mut refused =
            Error::new(Kind::InvalidJson, Source::Client, format!("the body is not JSON: no UTF-8 at byte {at}"))
                .advise("send JSON");
        refused.measured = Some(at as f64);
        return Err(refused);
    }
    if let Err(error) = serde_json::from_slice::<IgnoredAny>(body) {
        let lines = body.split(|b| *b == b'\n').take(error.line().saturating_sub(1));
        let at = lines.map(|line| line.len() + 1).sum::<usize>() + error.column();
        let mut refused =
            Error::new(Kind::InvalidJson, Source::Client, format!("the body is not JSON: {error}")).advise("send JSON");
        refused.measured = Some(at.min(body.len()) as f64);
        return Err(refused);
    }
    Ok(())
}

/// A member of a body that is an object.
pub(crate) fn member(body: &[u8], name: &str) -> Option<Value> {
    serde_json::from_slice::<Value>(body).ok()?.get_mut(name).map(Value::take)
}

#[cfg(test)]
mod tests {
    use super::an_object;

    #[test]
    fn a_body_that_is_no_json_object_is_told_with_its_place_and_odd_strings_pass() {
        for good in [&b"{}"[..], b" \n{\"a\": \"\\ud800\"}", b"{\"a\": [1, {\"b\": null}]}"] {
            assert!(an_object(good).is_ok(), "{good:?}");
        }
        for (bad, at) in [
            (&b""[..], 0.0),
            (b"{\"text\": ", 9.0),
            (b"{\n\"a\": x}", 8.0),
            (b"{}x", 3.0),
            (b"{\"a\":\"b\xffc\"}", 7.0),
        ] {
            let error = an_object(bad).unwrap_err();
            assert_eq!((error.http_status(), error.measured), (400, Some(at)), "{bad:?}");
        }
        for other in [&b"[]"[..], b"5", b"null", b"\"{\""] {
            assert!(an_object(other).unwrap_err().message.contains("no object"), "{other:?}");
        }
    }
}
