//! Listeners and connections of a fleet.
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use r3router_core::topology::Role;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::bootstrap::{self, Registry};
use super::clock::unix_seconds;
use super::config::FleetConfig;
use super::drive::Drive;
use super::engine::{Engine, Shared};
use super::fast::Prepared;
use super::fault::FaultRequest;
use super::pattern::Pattern;
use super::routes;
use super::scale::Scale;
use super::truth::EngineTruth;
use crate::model::{EngineId, Fleet, Pace};

/// Pending connects of a listener; a whole rollout batch may come at once.
const BACKLOG: u32 = 4096;
/// Pause between tries to bind a port again after a fault closed it.
const REBIND: Duration = Duration::from_millis(20);

/// Where an engine listens.
#[derive(Clone, Debug, Serialize)]
pub struct EngineAddress {
    /// `prefill`, `decode` or `regular`.
    pub role: &'static str,
    /// Base URL.
    pub url: String,
    /// Bootstrap port of a prefill engine.
    pub bootstrap_port: Option<u16>,
    /// DP ranks.
    pub ranks: u16,
}

/// A fleet that runs on the current tokio runtime. Dropping it closes its ports.
pub struct RunningFleet {
    engines: Vec<Arc<Engine>>,
    tasks: Vec<JoinHandle<()>>,
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Regular => "regular",
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{address}: {e}"));
    socket.bind(address).map_err(named)?;
    socket.listen(BACKLOG).map_err(named)
}

impl RunningFleet {
    /// Binds all ports and starts to serve.
    ///
    /// # Errors
    /// A port that cannot be bound.
    pub fn start(config: FleetConfig) -> io::Result<Self> {
        let mut listeners = Vec::new();
        for engine in &config.engines {
            let api = bind((config.host, engine.port).into())?;
            let boot = match engine.model.role {
                Role::Prefill => Some(bind((config.host, engine.bootstrap_port).into())?),
                _ => None,
            };
            listeners.push((api, boot));
        }
        let mut bootstraps = Vec::new();
        for (i, (_, boot)) in listeners.iter().enumerate() {
            if let Some(boot) = boot {
                bootstraps.push((boot.local_addr()?, EngineId(i as u16)));
            }
        }
        let pattern = Pattern::new(config.r3);
        let models = config.engines.iter().map(|e| e.model.clone()).collect();
        let drive = Drive::new(Fleet::new(models), config.engines.len(), Pace::new(config.scale.factor()));
        let shared = Arc::new(Shared { config, bootstraps });
        let mut engines = Vec::new();
        let mut tasks = vec![tokio::spawn(drive.clone().run())];
        for (i, (api, boot)) in listeners.into_iter().enumerate() {
            let address = api.local_addr()?;
            let bootstrap = boot.as_ref().map(TcpListener::local_addr).transpose()?;
            let engine = Arc::new(Engine {
                id: EngineId(i as u16),
                model: shared.config.engines[i].model.clone(),
                address,
                bootstrap,
                url: format!("http://{address}"),
                drive: drive.clone(),
                pattern: pattern.clone(),
                scale: shared.config.scale,
                faults: Mutex::default(),
                agent: super::agent::Agent::default(),
                weight_version: Mutex::new("default".into()),
                started_unix: unix_seconds(),
                listens: watch::Sender::new(true),
                generation: watch::Sender::new(0),
                fast: shared.config.fast,
                keep_alive: shared.config.keep_alive,
                ready: AtomicBool::new(true),
                shared: shared.clone(),
            });
            tasks.push(tokio::spawn(accept(engine.clone(), api, address, Port::Api)));
            if let (Some(boot), Some(bootstrap)) = (boot, bootstrap) {
                tasks.push(tokio::spawn(accept(engine.clone(), boot, bootstrap, Port::Bootstrap)));
            }
            engines.push(engine);
        }
        Ok(Self { engines, tasks })
    }

    /// Factor between model and wire.
    pub fn scale(&self) -> Scale {
        self.engines.first().map_or_else(Scale::default, |e| e.scale)
    }

    /// Shape of the routing rows that the engines give.
    pub fn r3(&self) -> super::pattern::R3Shape {
        self.engines.first().map_or_else(super::pattern::R3Shape::default, |e| e.pattern.shape())
    }

    /// Where the engines listen, in the order of the configuration.
    pub fn addresses(&self) -> Vec<EngineAddress> {
        self.engines
            .iter()
            .map(|e| EngineAddress {
                role: role_name(e.model.role),
                url: e.url.clone(),
                bootstrap_port: e.bootstrap.map(|b| b.port()),
                ranks: e.model.ranks,
            })
            .collect()
    }

    /// What happened in each engine.
    pub fn truth(&self) -> Vec<EngineTruth> {
        self.engines.iter().map(|e| routes::truth(e)).collect()
    }

    /// Starts peaks, means and counts anew.
    pub fn reset_truth(&self) {
        for engine in &self.engines {
            engine.drive.truth(engine.id, |_, tally, now| tally.reset(now));
        }
    }

    /// When a request was first seen by an engine, by nonce; earliest of all engines.
    pub fn arrivals(&self) -> HashMap<u64, std::time::Instant> {
        let mut out: HashMap<u64, std::time::Instant> = HashMap::new();
        for engine in &self.engines {
            engine.drive.tally(engine.id, |tally| {
                for (nonce, at) in &tally.arrivals {
                    out.entry(*nonce).and_modify(|first| *first = (*first).min(*at)).or_insert(*at);
                }
            });
        }
        out
    }

    /// Puts a fault on engine number `index`.
    ///
    /// # Errors
    /// When there is no such engine or the fault makes no sense.
    pub fn fault(&self, index: usize, fault: FaultRequest) -> Result<(), String> {
        let engine = self.engines.get(index).ok_or_else(|| format!("engine {index} of {}", self.engines.len()))?;
        routes::take_fault(engine, fault)
    }

    /// The router's arguments that fit this fleet.
    pub fn router_arguments(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut regular = Vec::new();
        for address in self.addresses() {
            match address.role {
                "prefill" => {
                    out.extend(["--prefill".to_owned(), address.url]);
                    out.extend(address.bootstrap_port.map(|p| p.to_string()));
                }
                "decode" => out.extend(["--decode".to_owned(), address.url]),
                _ => regular.push(address.url),
            }
        }
        if !out.is_empty() {
            out.insert(0, "--pd-disaggregation".to_owned());
        }
        if !regular.is_empty() {
            out.push("--worker-urls".to_owned());
            out.extend(regular);
        }
        out
    }
}

impl Drop for RunningFleet {
    fn drop(&mut self) {
        for engine in &self.engines {
            engine.reset_sockets();
        }
        for task in &self.tasks {
            task.abort();
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Port {
    Api,
    Bootstrap,
}

/// Accepts while the port is open; closes it when a fault says so, and opens the same port again after.
async fn accept(engine: Arc<Engine>, listener: TcpListener, address: SocketAddr, port: Port) {
    let registry = Arc::new(Registry::default());
    let prepared = engine
        .fast
        .then(|| Arc::new(Prepared::new(engine.model.role, &engine.shared.config.model_name, engine.model.version)));
    let mut listens = engine.listens.subscribe();
    let mut listener = Some(listener);
    loop {
        let open = *listens.borrow_and_update();
        if !open {
            listener = None;
            if listens.changed().await.is_err() {
                return;
            }
            continue;
        }
        let Some(socket) = &listener else {
            listener = bind(address).ok();
            if listener.is_none() {
                tokio::time::sleep(REBIND).await;
            }
            continue;
        };
        tokio::select! {
            changed = listens.changed() => if changed.is_err() { return },
            accepted = socket.accept() => if let Ok((stream, _)) = accepted {
                let engine = engine.clone();
                let registry = registry.clone();
                let prepared = prepared.clone();
                tokio::spawn(async move { connection(engine, registry, prepared, stream, port).await });
            }
        }
    }
}

/// A socket that can be reset instead of closed.
struct Socket {
    stream: TcpStream,
    reset: Arc<AtomicBool>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.reset.load(Ordering::Relaxed) {
            // A failure leaves an orderly close, which the peer also takes as a broken exchange.
            let _closed_anyway = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

async fn connection(
    engine: Arc<Engine>,
    registry: Arc<Registry>,
    prepared: Option<Arc<Prepared>>,
    stream: TcpStream,
    port: Port,
) {
    let _best_effort = stream.set_nodelay(true);
    let reset = Arc::new(AtomicBool::new(false));
    let socket = Socket { stream, reset: reset.clone() };
    let mut died = engine.generation.subscribe();
    let keep_alive = engine.keep_alive;
    let flag = reset.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let engine = engine.clone();
        let registry = registry.clone();
        let prepared = prepared.clone();
        let flag = flag.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
            let response = match port {
                Port::Api => routes::handle(engine, prepared.as_deref(), parts, body).await,
                Port::Bootstrap => Some(bootstrap::handle(
                    &engine,
                    &registry,
                    &parts.method,
                    parts.uri.path(),
                    parts.uri.query(),
                    &body,
                )),
            };
            response.ok_or_else(|| {
                flag.store(true, Ordering::Relaxed);
                io::Error::from(io::ErrorKind::ConnectionReset)
            })
        }
    });
    // hyper's header timeout runs while a connection is idle, too: it is uvicorn's keep-alive clock.
    let serving = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(keep_alive)
        .max_buf_size(1 << 20)
        .serve_connection(TokioIo::new(socket), service);
    let mut serving = pin!(serving);
    tokio::select! {
        // A broken exchange is the peer's to notice.
        _ended = serving.as_mut() => {}
        _ = died.changed() => reset.store(true, Ordering::Relaxed),
    }
}
