//! The listening side: accepts connections, serves HTTP/1 with keep-alive, and ends gracefully.
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use r3router_core::error::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::app::App;
use crate::edge::{Edge, Held, Overdue, Socket};
use crate::errors::{Reply, bytes_reply, error_reply, not_found};
use crate::handover::{Doors, Given, Sockets, Taking};
use crate::heads::{bad_head, half_a_head, half_closed, in_the_clear};
use crate::reload::Named;
use crate::seldom::Seldom;
use crate::settings::Settings;
use crate::start::{Place, Start, StartError};
use crate::{admin, check, handover, info, routes, tls};

/// Pause between looks for referenced rows that have expired.
const SWEEP: Duration = Duration::from_secs(1);
/// How long a client's connection may be idle after another router has taken over; clients keep theirs for 15 s or less.
const LINGER: Duration = Duration::from_secs(20);
/// Pause between tries to get the port of the admin listener.
const AGAIN: Duration = Duration::from_secs(1);
/// How long replies, and then the spans of their traces, may take to leave once the last request has ended.
const FLUSH: Duration = Duration::from_secs(2);

/// A router that listens.
#[derive(Debug)]
pub struct Router {
    app: Arc<App>,
    listener: TcpListener,
    metrics: Option<TcpListener>,
    admin: Option<(Place, Option<TcpListener>)>,
    address: SocketAddr,
    discovery: Option<JoinHandle<()>>,
    taking: Option<Taking>,
}

impl Router {
    /// Binds the ports and registers the engines that the settings name. Nothing is served until [`Router::run`].
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn bind(settings: Settings) -> Result<Self, StartError> {
        let Start { app, main, metrics, admin, discovery } = Start::of(settings).await?;
        let settings = &app.settings;
        let (taken, mut taking) = match &settings.handover_socket {
            None => (None, None),
            Some(path) => {
                handover::ask(Path::new(path)).await.map_err(|e| StartError::Listen(path.clone(), e))?.unzip()
            }
        };
        let (listener, given) = match taken {
            None => (main.listen()?, None),
            Some(Sockets { main, metrics }) => (main, metrics),
        };
        // The same series are on the main port; a second router on the host is no reason not to serve.
        let without = "no Prometheus port; /metrics on the main port has the same";
        let metrics = given.or_else(|| aside(metrics.as_ref(), without));
        let without = "no admin listener yet; it is tried again, and --admin-port names another port";
        let managing = aside(admin.as_ref(), without);
        if let (Some(admin), None, None, false) = (&admin, &managing, &taking, settings.control_on_main_port) {
            let error = io::Error::new(
                io::ErrorKind::AddrInUse,
                "and with --no-control-on-main-port nothing else takes workers",
            );
            return Err(StartError::Listen(admin.to_string(), error));
        }
        let address = listener.local_addr().map_err(|e| StartError::Listen(settings.host.clone(), e))?;
        if taking.is_some() && ![0, address.port()].contains(&settings.port) {
            let has = format!("the router there listens on {address}, not on port {}", settings.port);
            let path = settings.handover_socket.clone().unwrap_or_default();
            return Err(StartError::Listen(path, io::Error::other(has)));
        }
        if taking.is_some() {
            app.gate.set_held(true);
        }
        register_named(&app).map_err(StartError::Setting)?;
        let discovery = discovery.map(|ready| ready.start(&app));
        if let Some(taking) = &mut taking {
            taking.inherit(&app);
        }
        Ok(Self { app, listener, metrics, admin: admin.map(|place| (place, managing)), address, discovery, taking })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it shares between its parts, for tests and live views.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Serves until `shutdown` is ready, then drains: not ready at once, no new work, up to the grace period for what runs.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { app, listener, metrics, admin, address, discovery, taking } = self;
        tracing::info!(%address, pd = app.settings.pd_disaggregation, "listening");
        let (closing, closed) = watch::channel(Closing::No);
        let gate = Arc::clone(&app.gate);
        let timer = app.runtime.spawn(async move { gate.run_timer().await });
        let looking = app.runtime.spawn(tls::watch(app.tls.clone(), Arc::clone(&app.engine_tls)));
        let store = app.store.clone();
        let sweeping = app.runtime.spawn(async move {
            loop {
                tokio::time::sleep(SWEEP.min(store.keeps())).await;
                store.sweep();
            }
        });
        let checking = app.runtime.spawn(check::watch(Arc::clone(&app)));
        let doors = Doors::new(taking.is_none());
        let sockets = [Some(&listener), metrics.as_ref()].into_iter().flatten();
        let sockets: io::Result<Vec<OwnedFd>> = sockets.map(|s| s.as_fd().try_clone_to_owned()).collect();
        let accepting =
            app.runtime.spawn(accept(Arc::clone(&app), listener, doors.watch(), closed.clone(), serve_main));
        let scraping = metrics
            .map(|m| app.runtime.spawn(accept(Arc::clone(&app), m, doors.watch(), closed.clone(), serve_metrics)));
        let managing = app.runtime.spawn(manage(Arc::clone(&app), admin, closed.clone()));
        let given = tokio::select! {
            () = shutdown => None,
            given = overlap(&app, taking, sockets, &doors, closed) => Some(given),
        };
        app.drain.start();
        if given.is_some() {
            // The next router waits for its port.
            managing.abort();
        }
        let grace = app.settings.shutdown_grace_period_secs;
        tracing::info!(live = app.metrics.live(), grace_s = grace.as_secs_f64(), "draining");
        let until = Instant::now() + grace;
        while (app.metrics.live() > 0 || app.handover.passing() > 0) && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let left = app.metrics.live();
        if left > 0 {
            tracing::warn!(left, "the grace period is over; what still runs is aborted");
        }
        if given.is_some() {
            // Closing a connection that looks idle may cross a request. Each gets "connection: close" with its next reply, or is given up by its
            // client.
            wait_until(LINGER, || app.metrics.connections.load(Ordering::Relaxed) == 0).await;
        }
        accepting.abort();
        if let Some(scraping) = scraping {
            scraping.abort();
        }
        managing.abort();
        let _ = closing.send(Closing::Idle);
        if left == 0 {
            wait_until(FLUSH, || app.metrics.connections.load(Ordering::Relaxed) == 0).await;
        }
        // What is cut off here ends on the engines too.
        let _ = closing.send(Closing::All);
        wait_until(FLUSH, || app.metrics.connections.load(Ordering::Relaxed) == 0).await;
        wait_until(FLUSH, || app.metrics.aborting.load(Ordering::Relaxed) == 0).await;
        if let Some(traces) = &app.traces {
            traces.finish(FLUSH).await;
        }
        if let Some(discovery) = discovery {
            discovery.abort();
        }
        checking.abort();
        timer.abort();
        sweeping.abort();
        looking.abort();
        tracing::info!("stopped");
    }
}

/// Takes over from another router, when there is one, and hands over to the next one. Ready once that has been done.
async fn overlap(
    app: &Arc<App>,
    taking: Option<Taking>,
    sockets: io::Result<Vec<OwnedFd>>,
    doors: &Doors,
    closed: watch::Receiver<Closing>,
) -> Given {
    if let Some(taking) = taking {
        if let Err(error) = take(app, taking, doors, closed).await {
            tracing::warn!(%error, "the router before this one did not hand over");
            app.gate.set_held(false);
        }
        doors.set(true);
    }
    if let (Some(path), Ok(sockets)) = (&app.settings.handover_socket, sockets) {
        match handover::offer(app, Path::new(path), &sockets, doors).await {
            Ok(given) => return given,
            Err(error) => tracing::warn!(%error, path, "no router can take over from this one"),
        }
    }
    std::future::pending().await
}

async fn take(app: &Arc<App>, mut taking: Taking, doors: &Doors, closed: watch::Receiver<Closing>) -> io::Result<()> {
    let (loopback, port) = handover::loopback().await?;
    let open = Doors::new(true);
    let passed = app.runtime.spawn(accept(Arc::clone(app), loopback, open.watch(), closed, serve_plain));
    if let Err(error) = taking.take(app, port).await {
        passed.abort();
        return Err(error);
    }
    doors.set(true);
    tracing::info!("taken over; nothing is bound until the old router's queue is empty");
    let releasing = Arc::clone(app);
    app.runtime.spawn(async move {
        taking.release(releasing).await;
        passed.abort();
        drop(open);
    });
    Ok(())
}

fn register_named(app: &Arc<App>) -> Result<(), Error> {
    Named::of(&app.settings).iter().try_for_each(|named| named.register(app))
}

/// Serves the admin listener; tries to get its port while another has it, as the router before this one does until it has ended.
async fn manage(app: Arc<App>, admin: Option<(Place, Option<TcpListener>)>, closed: watch::Receiver<Closing>) {
    let Some((place, mut found)) = admin else { return };
    let admin = loop {
        match found {
            Some(admin) => break admin,
            None => tokio::time::sleep(AGAIN).await,
        }
        found = place.listen().ok();
    };
    if let Ok(at) = admin.local_addr() {
        tracing::info!("the admin listener is at http://{at}");
    }
    let open = Doors::new(true);
    accept(Arc::clone(&app), admin, open.watch(), closed, serve_admin).await;
}

/// A listener that the router can do without: `None` when its port is taken, with a warning that says `without`.
fn aside(place: Option<&Place>, without: &str) -> Option<TcpListener> {
    match place?.listen() {
        Ok(listener) => Some(listener),
        Err(error) => {
            tracing::warn!(%error, "{without}");
            None
        }
    }
}

async fn accept<S, F>(
    app: Arc<App>,
    listener: TcpListener,
    mut open: watch::Receiver<bool>,
    closed: watch::Receiver<Closing>,
    serve: S,
) where
    S: Fn(Arc<App>, TcpStream, watch::Receiver<Closing>) -> F + Send,
    F: Future<Output = ()> + Send + 'static,
{
    let failing = Seldom::default();
    loop {
        if !*open.borrow_and_update() {
            if open.changed().await.is_err() {
                return;
            }
            continue;
        }
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // Without a sender it stays as it is.
            Ok(()) = open.changed() => continue,
        };
        match accepted {
            Ok((stream, _)) => {
                if let Some(lasted) = failing.off() {
                    tracing::info!(lasted_s = lasted.as_secs_f64(), "connections are accepted again");
                }
                app.runtime.spawn(serve(Arc::clone(&app), stream, closed.clone()));
            }
            // Out of file descriptors, or the client has gone already: the next one may do better.
            Err(error) => {
                if let (true, lasted) = failing.on() {
                    tracing::warn!(%error, lasted_s = lasted.as_secs(), "accept failed; it is tried until it does not");
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

/// How the end of the router reaches its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closing {
    No,
    /// Those without a request close.
    Idle,
    /// All close.
    All,
}

async fn wait_until(limit: Duration, done: impl Fn() -> bool) {
    let until = Instant::now() + limit;
    while !done() && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Counts an open connection.
struct Open(Arc<App>);

impl Open {
    fn new(app: &Arc<App>) -> Self {
        app.metrics.connections.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(app))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.metrics.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn serve_main(app: Arc<App>, stream: TcpStream, closed: watch::Receiver<Closing>) {
    let Some(tls) = app.tls.clone() else { return serve_plain(app, stream, closed).await };
    // A stream's events must not wait for an acknowledgement.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    match tokio::time::timeout(app.settings.header_read_timeout_secs, tls.accept(stream)).await {
        Ok(Ok(Ok(stream))) => {
            let answered = Arc::clone(&app);
            connection(app, stream, closed, move |request, edge| routes::answer(Arc::clone(&answered), request, edge))
                .await;
        }
        Ok(Ok(Err(stream))) => Socket::new(stream, Edge::new()).refuse(&in_the_clear()).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS with a client"),
        Err(_) => tracing::debug!("no TLS with a client in time"),
    }
}

async fn serve_plain(app: Arc<App>, stream: TcpStream, closed: watch::Receiver<Closing>) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let answered = Arc::clone(&app);
    connection(app, stream, closed, move |request, edge| routes::answer(Arc::clone(&answered), request, edge)).await;
}

async fn serve_metrics(app: Arc<App>, stream: TcpStream, closed: watch::Receiver<Closing>) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let answered = Arc::clone(&app);
    connection(app, stream, closed, move |request: Request<Incoming>, _| {
        let app = Arc::clone(&answered);
        async move {
            match request.uri().path() {
                "/metrics" | "/" => info::metrics(&app),
                // For probes that have no certificate to show to the main port.
                "/health" | "/liveness" => bytes_reply(200, "text/plain; charset=utf-8", Bytes::from_static(b"OK")),
                "/readiness" | "/ready" => info::readiness(&app),
                path => error_reply(&not_found(path)),
            }
        }
    })
    .await;
}

async fn serve_admin(app: Arc<App>, stream: TcpStream, closed: watch::Receiver<Closing>) {
    let answered = Arc::clone(&app);
    connection(app, stream, closed, move |request, edge| admin::answer(Arc::clone(&answered), request, edge)).await;
}

async fn connection<T, S, F>(app: Arc<App>, stream: T, mut closed: watch::Receiver<Closing>, answer: S)
where
    T: AsyncRead + AsyncWrite + Unpin,
    S: Fn(Request<Incoming>, Arc<Edge>) -> F,
    F: Future<Output = Reply>,
{
    let _open = Open::new(&app);
    let edge = Edge::new();
    let service = service_fn(|request: Request<Incoming>| {
        let stays = !routes::occupies_engines(request.method(), request.uri().path());
        let busy = edge.begin(stays, request.body().is_end_stream());
        let answer = answer(request, Arc::clone(&edge));
        async move { Ok::<_, Infallible>(answer.await.map(|body| Held::new(body, busy))) }
    });
    // A client that has closed its sending side after its request, and one that has closed its connection, send the same: an end of the stream.
    // Nothing tells them apart until something is written to them. Engines are freed at once when a client leaves, so what runs on engines
    // ends with it, and the client is told to keep its side open; everything else is answered (see `Socket`).
    let mut connection = http1::Builder::new()
        .half_close(false)
        .keep_alive(true)
        .serve_connection(TokioIo::new(Socket::new(stream, Arc::clone(&edge))), service);
    let (idle, head) = (app.settings.idle_connection_timeout_secs, app.settings.header_read_timeout_secs);
    let mut look = pin!(tokio::time::sleep(idle.min(head)));
    loop {
        tokio::select! {
            biased;
            result = &mut connection => {
                let Err(error) = result else { return };
                tracing::debug!(%error, "client connection");
                let left = error.is_incomplete_message() && edge.unanswered();
                // What is in work for the client ends here.
                let mut socket = connection.into_parts().io.into_inner();
                if socket.kept() || error.is_parse() {
                    socket.refuse(&bad_head(&error)).await;
                } else if left {
                    socket.refuse(&half_closed()).await;
                }
                return;
            }
            changed = closed.changed() => {
                if changed.is_err() || *closed.borrow() == Closing::All {
                    return;
                }
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
            () = look.as_mut() => match edge.overdue(Instant::now(), idle, head) {
                Err(next) => look.as_mut().reset(next.into()),
                Ok(Overdue::Idle) => return,
                Ok(Overdue::Head(bytes)) => {
                    let error = half_a_head(bytes, head);
                    tracing::debug!(%error, "client connection");
                    connection.into_parts().io.into_inner().refuse(&error).await;
                    return;
                }
            },
        }
    }
}
