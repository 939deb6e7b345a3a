//! The client's side of a connection: since when it is idle or in the middle of a request's head; whether its end is the end of its request;
//! and JSON in place of the empty replies that hyper writes by itself to a head that is none.
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use r3router_core::error::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::Sleep;

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
    /// Whether the request in work is answered although its client has closed its sending side.
    stays: AtomicBool,
    /// Whether its body is here to its end.
    whole: AtomicBool,
    /// Whether anything was written since it came.
    replied: AtomicBool,
    /// Who reads on once it is answered.
    reader: Mutex<Option<Waker>>,
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
            stays: AtomicBool::new(false),
            whole: AtomicBool::new(false),
            replied: AtomicBool::new(false),
            reader: Mutex::new(None),
        })
    }

    fn enter(&self) {
        let ns = u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.since.store(ns, Ordering::Relaxed);
    }

    /// A request is in work until the guard is dropped. It `stays` when it is answered although its client has closed its sending side; `whole`
    /// when there is no body to wait for.
    pub fn begin(self: &Arc<Self>, stays: bool, whole: bool) -> Busy {
        self.stays.store(stays, Ordering::Relaxed);
        self.whole.store(whole, Ordering::Relaxed);
        self.replied.store(false, Ordering::Relaxed);
        self.more()
    }

    /// Its body is here to its end.
    pub fn whole(&self) {
        self.whole.store(true, Ordering::Relaxed);
    }

    /// Whether a request is in work of which nothing was answered.
    pub fn unanswered(&self) -> bool {
        self.is_busy() && !self.replied.load(Ordering::Relaxed)
    }

    /// Something else is done for the client, until the guard is dropped.
    pub fn more(self: &Arc<Self>) -> Busy {
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
        if self.0.busy.fetch_sub(1, Ordering::Relaxed) == 1
            && let Some(reader) = self.0.reader.lock().take()
        {
            reader.wake();
        }
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
    /// Whether a reply of hyper's own was kept from the client, which is told more.
    kept: bool,
    /// When the end of the client's side is believed, of a request whose body may still be on its way through hyper.
    end: Option<Pin<Box<Sleep>>>,
}

/// How long the end of a body may take through hyper. It is the connection's own task that takes it, with its next turn.
const TURN: Duration = Duration::from_millis(50);

impl<T: AsyncRead + AsyncWrite + Unpin> Socket<T> {
    /// Watches `io` for `edge`.
    pub fn new(io: T, edge: Arc<Edge>) -> Self {
        Self { io, edge, kept: false, end: None }
    }

    /// Whether a reply of hyper's own was kept from the client, which is to be told more.
    pub fn kept(&self) -> bool {
        self.kept
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
    async fn linger(&mut self) {
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

    /// Whether `buf` is a reply of hyper's own making. It is kept: what is wrong is known once the connection has ended.
    fn keeps(&mut self, buf: &[u8]) -> bool {
        if self.edge.is_busy() {
            self.edge.replied.store(true, Ordering::Relaxed);
            return false;
        }
        let own = is_own(buf);
        self.kept |= own;
        own
    }

    /// Whether the end of the client's side is to be passed on. Hyper takes it for a client that has left, and drops what is in work.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let edge = &self.edge;
        if !edge.is_busy() || !edge.stays.load(Ordering::Relaxed) {
            return Poll::Ready(());
        }
        if !edge.whole.load(Ordering::Relaxed) {
            // Of a body of which hyper wants more, it is the end.
            let end = self.end.get_or_insert_with(|| Box::pin(tokio::time::sleep(TURN)));
            ready!(end.as_mut().poll(cx));
            if !edge.whole.load(Ordering::Relaxed) {
                return Poll::Ready(());
            }
        }
        *edge.reader.lock() = Some(cx.waker().clone());
        // The answer may have ended on another thread meanwhile.
        if edge.is_busy() { Poll::Pending } else { Poll::Ready(()) }
    }
}

/// Whether this is the empty reply that hyper writes to a head that it cannot read.
fn is_own(buf: &[u8]) -> bool {
    let Ok(head) = std::str::from_utf8(buf) else { return false };
    let empty = head.ends_with("\r\n\r\n") && head.contains("content-length: 0\r\n") && !head.contains("content-type");
    let status = head.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5));
    empty && matches!(status, Some("400" | "414" | "431"))
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
        let came = buf.filled().len() - before;
        if came == 0 && buf.remaining() > 0 {
            ready!(self.poll_end(cx));
        }
        self.edge.came(came);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Socket<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.keeps(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // A head that is answered with more behind it is none of hyper's own.
        if let [only] = bufs {
            if self.keeps(only) {
                return Poll::Ready(Ok(only.len()));
            }
        } else {
            self.edge.replied.store(true, Ordering::Relaxed);
        }
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.kept {
            // Something is to be written yet, by `refuse`, which shuts down itself.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Edge, Overdue, is_own};

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
        let busy = edge.begin(false, true);
        assert!(edge.overdue(at(10_000), idle, head).is_err());
        edge.came(9);
        drop(busy);
        assert!(edge.overdue(at(31), idle, head).is_err(), "bytes of a body are no head");
        assert_eq!(edge.overdue(at(151), idle, head), Ok(Overdue::Idle));
    }

    #[test]
    fn only_the_empty_replies_of_hyper_are_kept() {
        let of = |head: &str| is_own(head.as_bytes());
        assert!(of("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\ndate: x\r\n\r\n"));
        assert!(of("HTTP/1.1 431 X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"));
        for other in [
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 10\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\nHTTP/1.1 2",
            "HTTP/1.",
            "",
        ] {
            assert!(!of(other), "{other}");
        }
    }

    #[tokio::test]
    async fn the_end_of_a_clients_side_is_kept_from_an_answer_that_does_not_occupy_engines() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut client, server) = tokio::io::duplex(64);
        let edge = Edge::new();
        let mut socket = super::Socket::new(server, std::sync::Arc::clone(&edge));
        client.write_all(b"GET").await.unwrap();
        client.shutdown().await.unwrap();
        let mut tile = [0; 8];
        assert_eq!(socket.read(&mut tile).await.unwrap(), 3);
        // Its work goes to an engine: it has left.
        let busy = edge.begin(false, true);
        assert_eq!(socket.read(&mut tile).await.unwrap(), 0);
        drop(busy);
        // A body that has not come to its end has ended.
        let busy = edge.begin(true, false);
        assert_eq!(socket.read(&mut tile).await.unwrap(), 0);
        drop(busy);
        let busy = edge.begin(true, false);
        edge.whole();
        let mut reading = Box::pin(socket.read(&mut tile));
        assert!(futures_now(&mut reading).await.is_none(), "it is answered first");
        drop(busy);
        assert_eq!(reading.await.unwrap(), 0, "and then the reader is told");
    }

    /// What `future` has now, polled once.
    async fn futures_now<F: std::future::Future + Unpin>(future: &mut F) -> Option<F::Output> {
        std::future::poll_fn(|cx| {
            std::task::Poll::Ready(match std::pin::Pin::new(&mut *future).poll(cx) {
                std::task::Poll::Ready(out) => Some(out),
                std::task::Poll::Pending => None,
            })
        })
        .await
    }
}
