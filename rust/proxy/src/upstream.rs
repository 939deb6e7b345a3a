//! Connections to one engine. Idle ones are dropped before the engine's own keep-alive timer can close them, and a reused one
//! that dies before any reply byte is replaced by a new one once. No redirects, no proxies from the environment.
//!
//! A connection is driven by the task that uses it: no task per connection, and dropping an [`Exchange`] closes its socket at once.
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header, response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::address::Address;
use crate::allow::Allow;
use crate::body::{PiecesBody, WireStats};
use crate::tls::{ClientTls, Stream};

/// How soon after a request was written a reused connection must break for the request to be sent again. An engine that had closed
/// the connection answers with a reset within a round trip; one that read the request may run it, and the same id and room must not
/// come twice: that failure is for a new attempt to mend.
const STALE: Duration = Duration::from_millis(100);
/// Most idle connections that one engine keeps open; more are closed when they become idle.
const MAX_IDLE: usize = 4096;

/// Why an exchange failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No connection: refused, unreachable, name not found, or no answer in time. Nothing was sent.
    Connect(String),
    /// The connection broke. `answered` says whether any byte of the reply had come.
    Reset {
        /// What the operating system or the parser said.
        what: String,
        /// Whether any byte of the reply had come.
        answered: bool,
    },
    /// The engine's bytes are no HTTP.
    Protocol(String),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connect(what) => write!(f, "cannot connect: {what}"),
            Self::Reset { what, answered: false } => write!(f, "connection broke before any reply: {what}"),
            Self::Reset { what, answered: true } => write!(f, "connection broke in the middle of the reply: {what}"),
            Self::Protocol(what) => write!(f, "reply is not HTTP: {what}"),
        }
    }
}

/// A request to an engine. Cheap to send again: the body's pieces are shared.
#[derive(Clone, Debug)]
pub struct Call {
    /// Method.
    pub method: Method,
    /// Path and query.
    pub uri: Uri,
    /// Headers but the length; a `host` only where it is not the engine's.
    pub headers: HeaderMap,
    /// Body, in pieces.
    pub pieces: Arc<[Bytes]>,
}

impl Call {
    /// A GET of `uri`.
    pub fn get(uri: Uri) -> Self {
        Self { method: Method::GET, uri, headers: HeaderMap::new(), pieces: Arc::from([]) }
    }

    /// A POST of a JSON body.
    pub fn post(uri: Uri, body: impl Into<Bytes>) -> Self {
        let mut headers = HeaderMap::with_capacity(4);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Self { method: Method::POST, uri, headers, pieces: Arc::from([body.into()]) }
    }

    /// Sets `authorization: Bearer key`, when there is a key.
    #[must_use]
    pub fn with_key(mut self, key: Option<&HeaderValue>) -> Self {
        if let Some(key) = key {
            self.headers.insert(header::AUTHORIZATION, key.clone());
        }
        self
    }
}

/// A socket that counts what it reads.
struct Counted {
    io: Stream,
    stats: Arc<WireStats>,
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buf);
        let read = (buf.filled().len() - before) as u64;
        if read > 0 {
            self.stats.received.fetch_add(read, Ordering::Relaxed);
        }
        polled
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

/// One open connection.
struct Wire {
    sender: SendRequest<PiecesBody>,
    /// Gone when it has ended: hyper fails a request that was handed to it too late only when it is dropped.
    conn: Option<Connection<TokioIo<Counted>, PiecesBody>>,
    stats: Arc<WireStats>,
}

impl Wire {
    /// Moves bytes in both directions as far as they go.
    fn drive(&mut self, cx: &mut Context<'_>) {
        drive(&mut self.conn, cx);
    }

    /// Whether a new request can be sent on it now.
    fn ready(&mut self, cx: &mut Context<'_>) -> bool {
        self.drive(cx);
        self.conn.is_some() && matches!(self.sender.poll_ready(cx), Poll::Ready(Ok(())))
    }
}

fn drive(conn: &mut Option<Connection<TokioIo<Counted>, PiecesBody>>, cx: &mut Context<'_>) {
    if conn.as_mut().is_some_and(|conn| Pin::new(conn).poll(cx).is_ready()) {
        *conn = None;
    }
}

struct Idle {
    wire: Box<Wire>,
    since: Instant,
}

/// Counters of one engine's connections.
#[derive(Debug, Default)]
pub struct PoolStats {
    /// Connections opened.
    pub opened: AtomicU64,
    /// Exchanges that were sent again because a reused connection had died.
    pub resent: AtomicU64,
    /// Bytes of replies read.
    pub received: AtomicU64,
}

/// The connections to one engine.
pub struct Pool {
    address: Address,
    allow: Arc<Allow>,
    idle: Mutex<Vec<Idle>>,
    idle_timeout: Duration,
    connect_timeout: Duration,
    tls: Option<Arc<ClientTls>>,
    closed: AtomicBool,
    peer: Mutex<Option<SocketAddr>>,
    /// What happened on it.
    pub stats: PoolStats,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("address", &self.address.url).finish_non_exhaustive()
    }
}

impl Pool {
    /// Connections to `address`, kept idle for at most `idle_timeout`, to nobody but whom `allow` lets be a worker.
    pub fn new(address: Address, idle_timeout: Duration, connect_timeout: Duration, allow: &Arc<Allow>) -> Arc<Self> {
        Self::secured(address, idle_timeout, connect_timeout, None, allow)
    }

    /// As [`Pool::new`]; `tls` is spoken when the address says so.
    pub fn secured(
        address: Address,
        idle_timeout: Duration,
        connect_timeout: Duration,
        tls: Option<Arc<ClientTls>>,
        allow: &Arc<Allow>,
    ) -> Arc<Self> {
        Arc::new(Self {
            address,
            allow: Arc::clone(allow),
            idle: Mutex::default(),
            idle_timeout,
            connect_timeout,
            tls,
            closed: AtomicBool::new(false),
            peer: Mutex::default(),
            stats: PoolStats::default(),
        })
    }

    /// Whom it may connect to.
    pub fn allow(&self) -> &Arc<Allow> {
        &self.allow
    }

    /// The engine's address.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Sends a call and waits for the head of its reply.
    ///
    /// # Errors
    /// See [`Fault`]. A reused connection that dies before any reply byte is not one: the call is sent once more.
    pub async fn send(self: &Arc<Self>, call: &Call) -> Result<Exchange, Fault> {
        self.send_observed(call, || ()).await
    }

    /// As [`Pool::send`]; `sent` is called whenever the request may have been written to its end (at least once before a reply).
    ///
    /// # Errors
    /// As [`Pool::send`].
    pub async fn send_observed(self: &Arc<Self>, call: &Call, mut sent: impl FnMut()) -> Result<Exchange, Fault> {
        if let Some(wire) = poll_fn(|cx| Poll::Ready(self.checkout(cx))).await {
            let mut written: Option<Instant> = None;
            let mut told = || {
                written.get_or_insert_with(Instant::now);
                sent();
            };
            match self.exchange(wire, call, &mut told).await {
                Err(Fault::Reset { answered: false, .. }) if written.is_none_or(|at| at.elapsed() < STALE) => {
                    self.stats.resent.fetch_add(1, Ordering::Relaxed);
                }
                other => return other,
            }
        }
        let wire = self.connect().await?;
        self.exchange(wire, call, &mut sent).await
    }

    /// The address that it was connected to last.
    pub fn peer(&self) -> Option<SocketAddr> {
        *self.peer.lock()
    }

    /// Drops every idle connection that is older than the limit. Called now and then, so that no dead socket lingers.
    pub fn sweep(&self) {
        let expired: Vec<Idle> = {
            let mut idle = self.idle.lock();
            let now = Instant::now();
            let alive = idle.partition_point(|i| now.duration_since(i.since) >= self.idle_timeout);
            idle.drain(..alive).collect()
        };
        drop(expired);
    }

    /// Drops all idle connections and keeps none from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let idle = std::mem::take(&mut *self.idle.lock());
        drop(idle);
    }

    /// The youngest idle connection that still works.
    fn checkout(&self, cx: &mut Context<'_>) -> Option<Box<Wire>> {
        loop {
            let Idle { mut wire, since } = self.idle.lock().pop()?;
            if since.elapsed() < self.idle_timeout && wire.ready(cx) {
                return Some(wire);
            }
        }
    }

    async fn connect(&self) -> Result<Box<Wire>, Fault> {
        let io = match tokio::time::timeout(self.connect_timeout, self.dial()).await {
            Ok(Ok(io)) => io,
            Ok(Err(error)) => return Err(Fault::Connect(error.to_string())),
            Err(_) => return Err(Fault::Connect(format!("no answer within {:?}", self.connect_timeout))),
        };
        let stats = Arc::new(WireStats::default());
        let io = TokioIo::new(Counted { io, stats: Arc::clone(&stats) });
        let (sender, conn) = Builder::new().handshake(io).await.map_err(|e| Fault::Connect(e.to_string()))?;
        self.stats.opened.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Wire { sender, conn: Some(conn), stats }))
    }

    async fn dial(&self) -> io::Result<Stream> {
        let host = &*self.address.host;
        let io = match self.address.literal {
            Some(literal) => {
                self.allow.pick(host, std::iter::once(literal))?;
                TcpStream::connect(literal).await?
            }
            // Looked up anew at every connect, and what was looked up is what is connected to.
            None => {
                let found = tokio::net::lookup_host((host, self.address.port)).await?;
                TcpStream::connect(&*self.allow.pick(host, found)?).await?
            }
        };
        // Small bodies must not wait for an acknowledgement of the previous segment.
        io.set_nodelay(true)?;
        *self.peer.lock() = io.peer_addr().ok();
        match &self.tls {
            _ if !self.address.tls => Ok(Stream::Plain(io)),
            Some(tls) => tls.connect(&self.address.host, io).await,
            None => Err(io::Error::other("TLS is not spoken here")),
        }
    }

    async fn exchange(
        self: &Arc<Self>,
        mut wire: Box<Wire>,
        call: &Call,
        sent: &mut impl FnMut(),
    ) -> Result<Exchange, Fault> {
        let before = wire.stats.received.load(Ordering::Relaxed);
        let mut request = Request::new(PiecesBody::new(Arc::clone(&call.pieces), Arc::clone(&wire.stats)));
        *request.method_mut() = call.method.clone();
        *request.uri_mut() = call.uri.clone();
        request.headers_mut().clone_from(&call.headers);
        // A request that is passed on between routers keeps the host that its client wrote.
        if let http::header::Entry::Vacant(host) = request.headers_mut().entry(header::HOST) {
            host.insert(self.address.authority.clone());
        }
        let mut response = pin!(wire.sender.send_request(request));
        let mut told = false;
        let result = {
            let Wire { conn, stats, .. } = &mut *wire;
            poll_fn(|cx| {
                drive(conn, cx);
                if !told && stats.body_sent.load(Ordering::Relaxed) {
                    told = true;
                    sent();
                }
                response.as_mut().poll(cx)
            })
            .await
        };
        match result {
            Ok(response) => {
                let (head, body) = response.into_parts();
                Ok(Exchange { head, body, wire: Some(wire), pool: Arc::clone(self), counted: before })
            }
            Err(error) => {
                let answered = wire.stats.received.load(Ordering::Relaxed) > before;
                Err(fault(&error, answered))
            }
        }
    }

    fn give_back(&self, wire: Box<Wire>) {
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(Idle { wire, since: Instant::now() });
        }
    }
}

fn fault(error: &hyper::Error, answered: bool) -> Fault {
    let what = std::error::Error::source(error).map_or_else(|| error.to_string(), |s| format!("{error}: {s}"));
    if error.is_parse() { Fault::Protocol(what) } else { Fault::Reset { what, answered } }
}

/// A reply whose head is here. Read to its end, its connection goes back to the pool; dropped before, the socket closes.
pub struct Exchange {
    /// Status and headers.
    pub head: response::Parts,
    body: Incoming,
    wire: Option<Box<Wire>>,
    pool: Arc<Pool>,
    counted: u64,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").field("status", &self.head.status).finish_non_exhaustive()
    }
}

impl Exchange {
    /// The next piece of the body; `None` at its end.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Fault>>> {
        let Some(wire) = &mut self.wire else { return Poll::Ready(None) };
        // The first poll asks the connection for body bytes, the second takes what it has read.
        for round in 0..3 {
            if round > 0 {
                wire.drive(cx);
            }
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data()
                        && !data.is_empty()
                    {
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
                Poll::Ready(Some(Err(error))) => {
                    self.count();
                    self.wire = None;
                    return Poll::Ready(Some(Err(fault(&error, true))));
                }
                Poll::Ready(None) => {
                    wire.drive(cx);
                    self.count();
                    if let Some(mut wire) = self.wire.take()
                        && wire.ready(cx)
                    {
                        self.pool.give_back(wire);
                    }
                    return Poll::Ready(None);
                }
                Poll::Pending => {}
            }
        }
        Poll::Pending
    }

    /// The next piece of the body; `None` at its end.
    pub async fn chunk(&mut self) -> Option<Result<Bytes, Fault>> {
        poll_fn(|cx| self.poll_chunk(cx)).await
    }

    /// The whole body, cut off at `limit` bytes.
    ///
    /// # Errors
    /// When the connection breaks before the end.
    pub async fn collect(mut self, limit: usize) -> Result<(response::Parts, Bytes), Fault> {
        let mut first: Option<Bytes> = None;
        let mut rest: Vec<u8> = Vec::new();
        while let Some(chunk) = self.chunk().await {
            let chunk = chunk?;
            match &first {
                None => first = Some(chunk),
                Some(head) => {
                    if rest.is_empty() {
                        rest.extend_from_slice(head);
                    }
                    rest.extend_from_slice(&chunk);
                }
            }
            if rest.len() > limit {
                rest.truncate(limit);
                break;
            }
        }
        let body = if rest.is_empty() { first.unwrap_or_default() } else { rest.into() };
        Ok((self.head, body))
    }

    fn count(&mut self) {
        if let Some(wire) = &self.wire {
            let now = wire.stats.received.load(Ordering::Relaxed);
            self.pool.stats.received.fetch_add(now.saturating_sub(self.counted), Ordering::Relaxed);
            self.counted = now;
        }
    }
}

#[cfg(test)]
mod tests;
