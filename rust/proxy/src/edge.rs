//! The client's side of a connection: since when it is idle or in the middle of a request's head, and JSON in place of the empty replies
//! that hyper writes by itself to a head that is none.
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use r3router_core::error::{Error, Kind, Source};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use crate::body::{Cut, ReplyBody};
use crate::errors::error_json;

/// How much of what a refused client still sends is read, so that its reset does not overtake the answer.
const LINGER: usize = 1 << 20;
/// How long that may take.
const LINGER_TIME: Duration = Duration::from_secs(2);

/// What a connection is doing. A connection without a request in work has a time limit.
#[derive(Debug)]
pub struct Edge {
    opened: Instant,
    /// Requests in work, replies on their way and bodies that are read and dropped.
    busy: AtomicUsize,
    /// When the state was entered, nanoseconds since `opened`.
    since: AtomicU64,
    /// Bytes of a head that is not complete.
    head: AtomicUsize,
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overdue {
    /// Nothing came for so long.
    Idle,
    /// So many bytes of a head came, and no end of it.
    Head(usize),
}

impl Edge {
    /// Of a connection that was just accepted.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            opened: Instant::now(),
            busy: AtomicUsize::new(0),
            since: AtomicU64::new(0),
            head: AtomicUsize::new(0),
        })
    }

    fn enter(&self) {
        let ns = u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.since.store(ns, Ordering::Relaxed);
    }

    /// Something is done for the client, until the guard is dropped.
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        self.head.store(0, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed) > 0
    }

    fn came(&self, bytes: usize) {
        if bytes > 0 && !self.is_busy() && self.head.fetch_add(bytes, Ordering::Relaxed) == 0 {
            self.enter();
        }
    }

    /// Whether the connection's time is over at `now`; if not, when to look again.
    pub fn overdue(&self, now: Instant, idle: Duration, head: Duration) -> Result<Overdue, Instant> {
        if self.is_busy() {
            return Err(now + head.min(idle));
        }
        let bytes = self.head.load(Ordering::Relaxed);
        let since = self.opened + Duration::from_nanos(self.since.load(Ordering::Relaxed));
        let (until, what) =
            if bytes > 0 { (since + head, Overdue::Head(bytes)) } else { (since + idle, Overdue::Idle) };
        if now >= until {
            return Ok(what);
        }
        // A head may begin at any moment, so an idle connection is looked at as often as one needs.
        Err(until.min(now + head))
    }
}

/// See [`Edge::begin`].
#[derive(Debug)]
pub struct Busy(Arc<Edge>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.enter();
        self.0.head.store(0, Ordering::Relaxed);
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A reply's body; the connection is busy until it is dropped.
#[derive(Debug)]
pub struct Held {
    body: ReplyBody,
    _busy: Busy,
}

impl Held {
    /// Keeps `busy` for as long as `body` lives.
    pub fn new(body: ReplyBody, busy: Busy) -> Self {
        Self { body, _busy: busy }
    }
}

impl Body for Held {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The socket, as hyper sees it.
#[derive(Debug)]
pub struct Socket<T> {
    io: T,
    edge: Arc<Edge>,
    /// What is written instead of hyper's own reply.
    instead: Bytes,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Socket<T> {
    /// Watches `io` for `edge`.
    pub fn new(io: T, edge: Arc<Edge>) -> Self {
        Self { io, edge, instead: Bytes::new() }
    }

    /// Answers a client whose head did not come in time, and closes.
    pub async fn refuse(&mut self, error: &Error) {
        let reply = whole_reply(error);
        let _ = tokio::time::timeout(LINGER_TIME, async {
            self.io.write_all(&reply).await?;
            self.io.shutdown().await
        })
        .await;
        self.linger().await;
    }

    /// Reads what the client of a refused request had sent already: closing with unread bytes would reset the connection, and the answer
    /// would be lost.
    pub async fn linger(&mut self) {
        let _ = tokio::time::timeout(LINGER_TIME, async {
            let mut tile = [0; 4096];
            let mut left = LINGER;
            while let Ok(read) = self.io.read(&mut tile).await {
                left = left.saturating_sub(read);
                if read == 0 || left == 0 {
                    break;
                }
            }
        })
        .await;
    }

    fn poll_instead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.instead.is_empty() {
            let written = ready!(Pin::new(&mut self.io).poll_write(cx, &self.instead))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.instead.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Whether `buf` is a reply of hyper's own making; then ours is written in its place.
    fn takes(&mut self, buf: &[u8]) -> bool {
        if self.edge.is_busy() {
            return false;
        }
        let Some(error) = own_reply(buf) else { return false };
        self.instead = whole_reply(&error).into();
        true
    }
}

/// The error that hyper's empty reply stands for. It writes one only to a head that it cannot read.
fn own_reply(buf: &[u8]) -> Option<Error> {
    let head = std::str::from_utf8(buf).ok()?;
    if !head.ends_with("\r\n\r\n") || !head.contains("content-length: 0\r\n") || head.contains("content-type") {
        return None;
    }
    let (message, advice) = match head.get(..12)?.strip_prefix("HTTP/1.")?.get(2..)? {
        "400" => (
            "the request's head is not HTTP/1.1",
            "send HTTP/1.1: the router speaks no HTTP/2, and TLS only with --tls-cert-path",
        ),
        "414" => ("the request's path is too long", "send what is long in the body"),
        "431" => ("the request has more than 100 headers, or too many bytes of them", "send fewer"),
        _ => return None,
    };
    let status = head.get(9..12)?.parse().ok()?;
    Some(Error::new(Kind::InvalidRequest, Source::Client, message).with_status(status).advise(advice))
}

fn whole_reply(error: &Error) -> Vec<u8> {
    let status = error.http_status();
    let reason = http::StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason()).unwrap_or("");
    let body = error_json(error).to_string();
    format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n{}: {}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        crate::errors::ERROR_CODE,
        error.kind.code(),
        body.len(),
    )
    .into_bytes()
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Socket<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        self.edge.came(buf.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Socket<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_instead(cx))?;
        if self.takes(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_instead(cx))?;
        if let [only] = bufs
            && self.takes(only)
        {
            return Poll::Ready(Ok(only.len()));
        }
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(cx))?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(cx))?;
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Edge, Overdue, own_reply};

    #[test]
    fn a_head_has_less_time_than_an_idle_connection_and_a_request_in_work_none() {
        let (idle, head) = (Duration::from_secs(150), Duration::from_secs(30));
        let edge = Edge::new();
        let begun = Instant::now();
        let at = |s: u64| begun + Duration::from_secs(s);
        assert!(edge.overdue(at(1), idle, head).is_err_and(|next| next == at(31)));
        assert!(edge.overdue(at(149), idle, head).is_err());
        assert_eq!(edge.overdue(at(151), idle, head), Ok(Overdue::Idle));
        edge.came(5);
        edge.came(7);
        assert!(edge.overdue(at(29), idle, head).is_err());
        assert_eq!(edge.overdue(at(31), idle, head), Ok(Overdue::Head(12)));
        let busy = edge.begin();
        assert!(edge.overdue(at(10_000), idle, head).is_err());
        edge.came(9);
        drop(busy);
        assert!(edge.overdue(at(31), idle, head).is_err(), "bytes of a body are no head");
        assert_eq!(edge.overdue(at(151), idle, head), Ok(Overdue::Idle));
    }

    #[test]
    fn only_the_empty_replies_of_hyper_are_replaced() {
        let of = |head: &str| own_reply(head.as_bytes()).map(|e| (e.http_status(), e.kind.code()));
        assert_eq!(
            of("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\ndate: x\r\n\r\n"),
            Some((400, "invalid_request"))
        );
        assert_eq!(
            of("HTTP/1.1 431 X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"),
            Some((431, "invalid_request"))
        );
        for other in [
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 10\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\nHTTP/1.1 2",
            "HTTP/1.",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
