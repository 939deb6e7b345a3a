//! Passes a request on, as it is, to the router that has taken over from this one.
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response, header};
use hyper::body::Incoming;
use r3router_core::error::{Error, Kind, Source};

use crate::app::App;
use crate::attempts::strip_hop_by_hop;
use crate::body::{Cut, Pieces, ReplyBody};
use crate::edge::Edge;
use crate::errors::{Reply, error_reply};
use crate::handover::Passing;
use crate::receive::Receiver;
use crate::store::{Absent, id_of};
use crate::upstream::{Call, Exchange, Pool};

/// Whether the old router answers `path` itself: its health and its metrics are its own, and so are the rows that it knows. The other router
/// answers for these too, and for its own.
pub fn own(app: &App, path: &str) -> bool {
    let known = |id| !matches!(app.store.known(id), Err(Absent::Unknown));
    match path.strip_prefix("/r3/") {
        Some(id) => id_of(id).is_some_and(known),
        None => matches!(path, "/health" | "/liveness" | "/readiness" | "/ready" | "/metrics"),
    }
}

/// Answers with what the other router answers.
pub async fn on(app: &Arc<App>, pool: &Arc<Pool>, request: Request<Incoming>, edge: &Arc<Edge>) -> Reply {
    let passing = Passing::begin(app);
    let (parts, incoming) = request.into_parts();
    let receiver = Receiver { app, edge, headers: &parts.headers, arrived: Instant::now() };
    let body = match receiver.body(incoming, app.settings.max_payload_size).await {
        Ok(body) => body,
        Err(error) => return error_reply(&error),
    };
    let mut headers = parts.headers;
    strip_hop_by_hop(&mut headers);
    headers.remove(header::EXPECT);
    let call = Call { method: parts.method, uri: parts.uri, headers, pieces: Arc::from([body]) };
    match pool.send(&call).await {
        Ok(mut exchange) => {
            let status = exchange.head.status;
            let mut headers = std::mem::take(&mut exchange.head.headers);
            let length = headers.get(header::CONTENT_LENGTH).and_then(|l| l.to_str().ok()?.parse().ok());
            strip_hop_by_hop(&mut headers);
            let mut reply = Response::new(ReplyBody::Stream(Box::new(Passed { exchange, length, _passing: passing })));
            *reply.status_mut() = status;
            *reply.headers_mut() = headers;
            reply
        }
        Err(fault) => {
            let what = format!("the router that has taken over: {fault}");
            error_reply(&Error::new(Kind::Draining, Source::Router, what).advise("send it again"))
        }
    }
}

struct Passed {
    exchange: Exchange,
    length: Option<u64>,
    _passing: Passing,
}

impl Pieces for Passed {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        Poll::Ready(ready!(self.exchange.poll_chunk(cx)).map(|piece| piece.map_err(|fault| Cut(fault.to_string()))))
    }

    fn length(&self) -> Option<u64> {
        self.length
    }
}
