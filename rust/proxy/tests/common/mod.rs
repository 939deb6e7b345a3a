//! Scripted engines on raw sockets, a router in the test's own runtime, and a client that sees every byte.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::missing_panics_doc)]
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use r3router_proxy::Router;
use r3router_proxy::app::App;
use r3router_proxy::settings::{PrefillWorker, Settings, WorkerUrl};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// One request as an engine saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub head: String,
    pub body: Vec<u8>,
    pub at: Instant,
    /// Number of the connection, in the order of accepting.
    pub connection: usize,
}

impl Seen {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (n, v) = line.split_once(':')?;
            n.eq_ignore_ascii_case(name).then(|| v.trim())
        })
    }
}

/// What a scripted engine does with a request.
pub enum Act {
    /// Writes these bytes and keeps the connection.
    Send(Vec<u8>),
    /// Writes each after its pause.
    Paced(Vec<(Duration, Vec<u8>)>),
    /// Writes these bytes, then closes.
    SendAndClose(Vec<u8>),
    /// Says nothing until the router closes.
    Hold,
    /// Closes with a reset.
    Reset,
    /// Says these bytes when an abort for the request's rid has come.
    UntilAborted(Vec<u8>),
}

pub type Script = dyn Fn(&Seen) -> Act + Send + Sync;

#[derive(Default)]
struct Log {
    seen: Vec<Seen>,
    closed: Vec<(usize, Instant)>,
    connections: usize,
}

/// A scripted engine.
#[derive(Clone)]
pub struct Engine {
    pub address: SocketAddr,
    log: Arc<Mutex<Log>>,
    script: Arc<Mutex<Arc<Script>>>,
    task: Arc<tokio::task::AbortHandle>,
}

impl Engine {
    pub async fn start(script: impl Fn(&Seen) -> Act + Send + Sync + 'static) -> Self {
        Self::start_on("127.0.0.1:0", script).await
    }

    pub async fn start_on(address: &str, script: impl Fn(&Seen) -> Act + Send + Sync + 'static) -> Self {
        let socket =
            if address.starts_with('[') { tokio::net::TcpSocket::new_v6() } else { tokio::net::TcpSocket::new_v4() };
        let socket = socket.unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address.parse().unwrap()).unwrap();
        let listener = socket.listen(1024).unwrap();
        let address = listener.local_addr().unwrap();
        let log: Arc<Mutex<Log>> = Arc::default();
        let script: Arc<Mutex<Arc<Script>>> = Arc::new(Mutex::new(Arc::new(script)));
        let task = tokio::spawn(accept(listener, Arc::clone(&log), Arc::clone(&script))).abort_handle();
        Self { address, log, script, task: Arc::new(task) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn script(&self, script: impl Fn(&Seen) -> Act + Send + Sync + 'static) {
        *self.script.lock() = Arc::new(script);
    }

    /// Requests of a path.
    pub fn seen(&self, path: &str) -> Vec<Seen> {
        self.log.lock().seen.iter().filter(|s| s.path.split('?').next() == Some(path)).cloned().collect()
    }

    /// Generation requests.
    pub fn legs(&self) -> Vec<Seen> {
        ["/generate", "/v1/chat/completions", "/v1/completions"].iter().flat_map(|p| self.seen(p)).collect()
    }

    /// The rids of aborts.
    pub fn aborts(&self) -> Vec<String> {
        self.seen("/abort_request").iter().filter_map(|s| s.json()["rid"].as_str().map(str::to_owned)).collect()
    }

    /// When the router closed a connection.
    pub fn closed(&self, connection: usize) -> Option<Instant> {
        self.log.lock().closed.iter().find(|(c, _)| *c == connection).map(|(_, at)| *at)
    }

    /// Stops listening; connections are closed. Returns when nobody can connect any more.
    pub async fn die(&self) {
        self.task.abort();
        until("it refuses connections", || std::net::TcpStream::connect(self.address).is_err()).await;
    }
}

async fn accept(listener: TcpListener, log: Arc<Mutex<Log>>, script: Arc<Mutex<Arc<Script>>>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let number = {
            let mut log = log.lock();
            log.connections += 1;
            log.connections - 1
        };
        connections.spawn(connection(stream, number, Arc::clone(&log), Arc::clone(&script)));
    }
}

async fn connection(mut stream: TcpStream, number: usize, log: Arc<Mutex<Log>>, script: Arc<Mutex<Arc<Script>>>) {
    let mut buffer = Vec::new();
    while let Some(seen) = read_request(&mut stream, &mut buffer, number).await {
        log.lock().seen.push(seen.clone());
        let act = match seen.path.split('?').next().unwrap_or("") {
            "/generate" | "/v1/chat/completions" | "/v1/completions" => (script.lock().clone())(&seen),
            _ => match (script.lock().clone())(&seen) {
                Act::Hold => default(&seen),
                act => act,
            },
        };
        match act {
            Act::Send(bytes) => {
                if stream.write_all(&bytes).await.is_err() {
                    break;
                }
            }
            Act::Paced(pieces) => {
                for (pause, bytes) in pieces {
                    tokio::time::sleep(pause).await;
                    if stream.write_all(&bytes).await.is_err() {
                        break;
                    }
                }
            }
            Act::SendAndClose(bytes) => {
                let _ = stream.write_all(&bytes).await;
                break;
            }
            Act::Hold => {
                if until_closed(&mut stream, || false).await {
                    break;
                }
            }
            Act::Reset => {
                stream.set_zero_linger().unwrap();
                break;
            }
            Act::UntilAborted(bytes) => {
                let rid = seen.json()["rid"].as_str().unwrap_or("").to_owned();
                let aborted = || {
                    log.lock()
                        .seen
                        .iter()
                        .any(|s| s.path == "/abort_request" && s.json()["rid"].as_str() == Some(rid.as_str()))
                };
                if until_closed(&mut stream, aborted).await || stream.write_all(&bytes).await.is_err() {
                    break;
                }
            }
        }
    }
    log.lock().closed.push((number, Instant::now()));
}

/// Waits for the router to close (`true`) or for `done`.
async fn until_closed(stream: &mut TcpStream, done: impl Fn() -> bool) -> bool {
    let mut byte = [0u8; 1];
    loop {
        tokio::select! {
            read = stream.read(&mut byte) => match read {
                Ok(0) | Err(_) => return true,
                Ok(_) => panic!("the router sent more than the request"),
            },
            () = tokio::time::sleep(Duration::from_millis(2)) => if done() { return false },
        }
    }
}

fn default(seen: &Seen) -> Act {
    match seen.path.split('?').next().unwrap_or("") {
        "/health" | "/abort_request" | "/health_generate" => Act::Send(reply(200, "")),
        _ => Act::Send(reply(404, r#"{"detail":"Not Found"}"#)),
    }
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>, connection: usize) -> Option<Seen> {
    let end = loop {
        if let Some(at) = find(buffer, b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(buffer[..end].to_vec()).unwrap();
    let length: usize = head
        .lines()
        .find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length:").map(|v| v.trim().parse().unwrap()))
        .unwrap_or(0);
    while buffer.len() < end + length {
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    let body = buffer[end..end + length].to_vec();
    buffer.drain(..end + length);
    let mut line = head.lines().next().unwrap().split(' ');
    let (method, path) = (line.next().unwrap().to_owned(), line.next().unwrap().to_owned());
    Some(Seen { method, path, head, body, at: Instant::now(), connection })
}

pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|w| w == needle)
}

/// A reply with a length.
pub fn reply(status: u16, body: &str) -> Vec<u8> {
    reply_with(status, "content-type: application/json\r\n", body.as_bytes())
}

pub fn reply_with(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{headers}\r\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// Head of an event stream.
pub fn sse_head() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n".to_vec()
}

pub fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut out = format!("{:x}\r\n", bytes.len()).into_bytes();
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
    out
}

/// A running router.
pub struct Running {
    pub address: SocketAddr,
    pub app: Arc<App>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

/// Settings of a quick PD router.
pub fn pd(prefill: &[&Engine], decode: &[&Engine]) -> Settings {
    Settings {
        pd_disaggregation: true,
        prefill: prefill
            .iter()
            .map(|e| PrefillWorker { url: WorkerUrl(e.url()), bootstrap_port: Some(8998) })
            .collect(),
        decode: decode.iter().map(|e| WorkerUrl(e.url())).collect(),
        ..base()
    }
}

/// Settings of a quick regular router.
pub fn regular(engines: &[&Engine]) -> Settings {
    Settings { worker_urls: engines.iter().map(|e| WorkerUrl(e.url())).collect(), ..base() }
}

pub fn base() -> Settings {
    Settings {
        host: "127.0.0.1".to_owned(),
        port: 0,
        prometheus_port: 0,
        poll_interval_ms: Duration::from_millis(20),
        retry_initial_backoff_ms: Duration::from_millis(1),
        ..Settings::default()
    }
}

impl Running {
    /// Starts a router and waits until every named engine is active.
    pub async fn start(settings: Settings) -> Self {
        let named = settings.prefill.len() + settings.decode.len() + settings.worker_urls.len();
        let running = Self::begin(settings).await;
        until("the engines are active", || running.app.registry.active().len() == named).await;
        running
    }

    /// Starts a router.
    pub async fn begin(settings: Settings) -> Self {
        let router = Router::bind(settings).await.unwrap();
        let (address, app) = (router.address(), Arc::clone(router.app()));
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let task = tokio::spawn(router.run(async move {
            let _ = stopped.await;
        }));
        Self { address, app, stop: Some(stop), task }
    }

    pub async fn stop(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        self.task.await.unwrap();
    }

    pub fn begin_stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    pub async fn client(&self) -> Client {
        Client { stream: TcpStream::connect(self.address).await.unwrap(), buffer: Vec::new() }
    }

    pub async fn post(&self, path: &str, body: &str) -> Reply {
        self.client().await.post(path, body).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        let mut client = self.client().await;
        client.send(format!("GET {path} HTTP/1.1\r\nhost: r\r\n\r\n").as_bytes()).await;
        client.reply().await
    }

    /// Nothing is open on any rank, nothing waits, nobody is served.
    pub async fn zero(&self) {
        until("all gauges are zero", || {
            let snapshot = self.app.gate.snapshot();
            snapshot.queued == 0
                && snapshot.arena_reserved == 0
                && snapshot.ranks.iter().all(|r| r.open == 0 && r.in_transfer == 0)
                && self.app.metrics.live() == 0
                && self.app.live.is_empty()
                && self.app.registry.active().iter().all(|w| w.open.load(std::sync::atomic::Ordering::Relaxed) == 0)
        })
        .await;
    }
}

/// A reply as the client got it.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
    /// The connection was closed before the body was complete.
    pub cut: bool,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {:?}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (n, v) = line.split_once(':')?;
            n.eq_ignore_ascii_case(name).then(|| v.trim())
        })
    }

    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or("").to_owned()
    }
}

/// A client's connection.
pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    pub async fn send_post(&mut self, path: &str, body: &str) {
        self.send(post_bytes(path, "", body).as_slice()).await;
    }

    pub async fn post(&mut self, path: &str, body: &str) -> Reply {
        self.send_post(path, body).await;
        self.reply().await
    }

    pub async fn reply(&mut self) -> Reply {
        let end = loop {
            if let Some(at) = find(&self.buffer, b"\r\n\r\n") {
                break at + 4;
            }
            assert!(self.more().await, "closed before a reply: {:?}", String::from_utf8_lossy(&self.buffer));
        };
        let head = String::from_utf8(self.buffer.drain(..end).collect()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut reply = Reply { status, head, body: Vec::new(), cut: false };
        if let Some(length) = reply.header("content-length") {
            assert!(reply.header("transfer-encoding").is_none(), "length and chunks together");
            let length: usize = length.parse().unwrap();
            while self.buffer.len() < length {
                if !self.more().await {
                    reply.cut = true;
                    reply.body = std::mem::take(&mut self.buffer);
                    return reply;
                }
            }
            reply.body = self.buffer.drain(..length).collect();
            return reply;
        }
        loop {
            let Some(at) = find(&self.buffer, b"\r\n") else {
                if self.more().await {
                    continue;
                }
                reply.cut = true;
                return reply;
            };
            let size = usize::from_str_radix(std::str::from_utf8(&self.buffer[..at]).unwrap(), 16).unwrap();
            while self.buffer.len() < at + 2 + size + 2 {
                if !self.more().await {
                    reply.cut = true;
                    return reply;
                }
            }
            let piece: Vec<u8> = self.buffer.drain(..at + 2 + size + 2).collect();
            reply.body.extend_from_slice(&piece[at + 2..at + 2 + size]);
            if size == 0 {
                return reply;
            }
        }
    }

    async fn more(&mut self) -> bool {
        self.stream.read_buf(&mut self.buffer).await.is_ok_and(|n| n > 0)
    }
}

pub fn post_bytes(path: &str, headers: &str, body: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nhost: r\r\n{headers}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Waits until `done`.
pub async fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..2500 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(4)).await;
    }
    panic!("not within ten seconds: {what}");
}

/// A test body on a runtime of two threads, as the router has.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut test: Pin<Box<dyn Future<Output = ()> + '_>> = Box::pin(test);
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), &mut test).await.expect("the test hangs") });
}

/// A prefill reply of `/generate`.
pub fn prefill_reply(_: &Seen) -> Act {
    Act::Send(reply(
        200,
        r#"{"text":"x","meta_info":{"id":"p","finish_reason":{"type":"length","length":0},"prompt_tokens":3,"completion_tokens":1}}"#,
    ))
}

/// A decode reply of `/generate`.
pub fn decode_reply(_: &Seen) -> Act {
    Act::Send(reply(200, DECODED))
}

pub const DECODED: &str = r#"{"text":"out","output_ids":[1,2],"meta_info":{"id":"d","finish_reason":{"type":"length","length":2},"prompt_tokens":3,"completion_tokens":2}}"#;
