//! The router as a process: runtime, signals, exit.
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::reload::{Read, Reload};
use crate::server::Router;
use crate::settings::Settings;
use crate::start::{Start, StartError};

/// Serves until `shutdown`, inside the caller's runtime. `ready` gets the address once the port is bound.
///
/// # Errors
/// When the router cannot start.
pub async fn serve(
    settings: Settings,
    ready: impl FnOnce(SocketAddr),
    shutdown: impl Future<Output = ()>,
) -> Result<(), StartError> {
    let router = Router::bind(settings).await?;
    ready(router.address());
    router.run(shutdown).await;
    Ok(())
}

/// Serves on a runtime of its own until SIGTERM or SIGINT, then drains. A second signal ends it at once. SIGHUP has the settings read anew, by
/// `read`, and the certificates.
///
/// # Errors
/// When the router or the runtime cannot start.
pub fn serve_blocking(
    settings: Settings,
    read: Option<Read>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), StartError> {
    let failed = |error| StartError::Listen("a runtime".to_owned(), error);
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if settings.threads > 0 {
        builder.worker_threads(settings.threads as usize);
    }
    let runtime = builder.thread_name("r3router").enable_all().build().map_err(failed)?;
    let served = runtime.block_on(async {
        let mut signals = Signals::new().map_err(failed)?;
        let mut reload = Reload::new(settings.clone(), read);
        let router = Router::bind(settings).await?;
        ready(router.address());
        let app = Arc::clone(router.app());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let mut running = std::pin::pin!(router.run(async move {
            let _ = stopped.await;
        }));
        let mut stop = Some(stop);
        loop {
            tokio::select! {
                () = running.as_mut() => return Ok(()),
                signal = signals.next() => match (signal, stop.take()) {
                    (Signal::Reload, kept) => {
                        stop = kept;
                        reload.run(&app);
                    }
                    (Signal::End, Some(stop)) => drop(stop.send(())),
                    (Signal::End, None) => return Ok(()),
                },
            }
        }
    });
    // Background aborts that were just started get a moment to leave.
    runtime.shutdown_timeout(std::time::Duration::from_millis(500));
    served
}

/// Does all that [`serve_blocking`] does before it takes a port, and lets it go again.
///
/// # Errors
/// What that would refuse to start with.
pub fn check_blocking(settings: Settings) -> Result<(), StartError> {
    let failed = |error| StartError::Listen("a runtime".to_owned(), error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async { Start::of(settings).await.map(drop) })
}

/// What a signal asks for.
#[derive(Clone, Copy, Debug)]
enum Signal {
    End,
    Reload,
}

/// SIGTERM, SIGINT and SIGHUP.
struct Signals {
    term: tokio::signal::unix::Signal,
    int: tokio::signal::unix::Signal,
    hup: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.term.recv() => Signal::End,
            _ = self.int.recv() => Signal::End,
            _ = self.hup.recv() => Signal::Reload,
        }
    }
}
