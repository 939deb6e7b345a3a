//! Request bodies: one limit for every route and framing, one copy at most, a time limit for what does not come, and an answer at once
//! when it is known that the body is not wanted.
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use r3router_core::error::{Error, Kind, Source};

use crate::app::App;
use crate::edge::Edge;

/// What is reserved at once for a body of a known length; more is reserved as it comes, so that a length alone costs nothing.
const RESERVE: usize = 64 << 20;
/// How much of a body that is not wanted is read and dropped beside the answer, so that a client that sends all before it reads can read
/// the answer, and so that the connection stays usable. Beyond it the connection is closed.
const DISCARD: u64 = 64 << 20;
/// How long it may take.
const DISCARD_TIME: Duration = Duration::from_secs(10);

fn too_large(limit: u64, measured: u64, more: &str) -> Error {
    Error::new(Kind::BodyTooLarge, Source::Client, format!("the body has {measured} bytes{more}; the limit is {limit}"))
        .with_limit(limit as f64, measured as f64)
        .advise("send less, or raise --max-payload-size")
}

fn stopped(what: &str, size: u64, announced: Option<u64>, limit: Duration, measured: Duration) -> Error {
    let all = announced.map_or_else(String::new, |all| format!(" of {all}"));
    Error::new(
        Kind::ReadTimeout,
        Source::Client,
        format!("{size} bytes{all} of the body came, and then {what} for {} s", measured.as_secs_f64()),
    )
    .with_limit(limit.as_secs_f64(), measured.as_secs_f64())
}

/// A body that did not come to its end: its framing is wrong, or its client has left.
fn broken(error: &hyper::Error) -> Error {
    let cause = std::error::Error::source(error).and_then(|e| e.downcast_ref::<io::Error>());
    match cause {
        Some(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => {
            Error::new(Kind::InvalidRequest, Source::Client, format!("the body's chunks cannot be read: {e}")).advise(
                "begin each chunk with its size in hexadecimal and a line's end, and end the last, of size 0, with an empty line; or send a Content-Length",
            )
        }
        _ => Error::new(Kind::ClientGone, Source::Client, format!("the body broke off: {error}")),
    }
}

/// The refusal of a body that is no JSON as it stands. Engines take none either.
fn encoded(headers: &HeaderMap) -> Option<Error> {
    let encoding =
        headers.get_all(header::CONTENT_ENCODING).iter().find(|e| !e.as_bytes().eq_ignore_ascii_case(b"identity"))?;
    let message = format!("the body has Content-Encoding {encoding:?}, which is not read here");
    Some(
        Error::new(Kind::InvalidRequest, Source::Client, message)
            .with_status(415)
            .advise("send the body as it is, without Content-Encoding"),
    )
}

/// A request's body as it comes in.
#[derive(Debug)]
pub struct Receiver<'a> {
    /// The router.
    pub app: &'a Arc<App>,
    /// The client's connection.
    pub edge: &'a Arc<Edge>,
    /// The request's headers.
    pub headers: &'a HeaderMap,
    /// When the head was here.
    pub arrived: Instant,
}

impl Receiver<'_> {
    /// Reads a whole body of at most `limit` bytes.
    ///
    /// # Errors
    /// 415 for a body that is encoded; `BodyTooLarge` as soon as it is known; `ReadTimeout` when nothing comes for `--body-read-timeout-secs` or the whole takes longer
    /// than a request may live; `ClientGone` when the connection broke.
    pub async fn body(&self, mut incoming: Incoming, limit: u64) -> Result<Bytes, Error> {
        if let Some(error) = encoded(self.headers).filter(|_| !incoming.is_end_stream()) {
            self.unwanted(incoming);
            return Err(error);
        }
        let announced = incoming.size_hint().exact();
        if let Some(length) = announced
            && length > limit
        {
            self.unwanted(incoming);
            return Err(too_large(limit, length, ""));
        }
        let settings = &self.app.settings;
        let idle = settings.body_read_timeout_secs;
        let mut whole: Option<Bytes> = None;
        let mut more = BytesMut::new();
        let mut size = 0u64;
        loop {
            let left = settings.request_timeout_secs.saturating_sub(self.arrived.elapsed());
            let Ok(frame) = tokio::time::timeout(idle.min(left), incoming.frame()).await else {
                return Err(if left < idle {
                    let all = settings.request_timeout_secs;
                    stopped("no end of it", size, announced, all, self.arrived.elapsed())
                        .advise("send faster, or raise --request-timeout-secs")
                } else {
                    stopped("nothing", size, announced, idle, idle).advise(
                        "send the body without a stop (a Python client whose event loop is blocked sends nothing), or raise --body-read-timeout-secs",
                    )
                });
            };
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|e| broken(&e))?;
            let Ok(piece) = frame.into_data() else { continue };
            size += piece.len() as u64;
            if size > limit {
                self.unwanted(incoming);
                return Err(too_large(limit, size, " or more"));
            }
            match whole.take() {
                None if more.is_empty() => whole = Some(piece),
                None => more.extend_from_slice(&piece),
                Some(first) => {
                    let rest = announced.and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
                    more.reserve(rest.min(RESERVE).max(first.len() + piece.len()));
                    more.extend_from_slice(&first);
                    more.extend_from_slice(&piece);
                }
            }
        }
        self.edge.whole();
        Ok(whole.unwrap_or_else(|| more.freeze()))
    }

    /// Reads and drops a body beside the answer to it. A client that asks first (`Expect: 100-continue`) has sent nothing and will not.
    pub fn unwanted(&self, mut incoming: Incoming) {
        if self.headers.contains_key(header::EXPECT) || incoming.is_end_stream() {
            return;
        }
        let busy = self.edge.more();
        self.app.runtime.spawn(async move {
            let dropped = async {
                let mut size = 0;
                while let Some(Ok(frame)) = incoming.frame().await {
                    size += frame.data_ref().map_or(0, |d| d.len() as u64);
                    if size > DISCARD {
                        break;
                    }
                }
            };
            let _ = tokio::time::timeout(DISCARD_TIME, dropped).await;
            drop(busy);
        });
    }
}
