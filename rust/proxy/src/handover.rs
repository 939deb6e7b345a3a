//! A restart by overlap: a new router gets the listening sockets of the one that serves, waits until it knows the load of every engine, takes
//! over, and the old one ends when its requests have.
//!
//! The sockets themselves are handed over, through a UNIX socket, since two sockets on one port (`SO_REUSEPORT`) lose connections: what the
//! kernel has put into the queue of the old one is reset when that closes. Here there is one queue, and it never closes.
//!
//! Only one of the two binds requests to engines at any time. The old one goes on until its queue is empty, and the new one waits for that
//! and then for a report of every engine that was asked for after it: so neither reserves what the other has.
//!
//! The conversation, line by line:
//! ```text
//! old: {"workers": […], "stores": […]}   with the sockets attached
//! new: take PORT           it is ready; PORT of the loopback takes what still reaches the old one
//! old: taken               it has stopped to accept and passes on what comes on connections that it has
//! old: released            its queue is empty
//! ```
//! When the conversation breaks before `taken` the old router goes on as if nothing had been.
//!
//! `stores` are the directories of rows that clients were named references to. They stay where they are; the new router answers for what is
//! in them, and for what the old one still puts there: see [`crate::store`].
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use r3router_core::time::Moment;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::watch;

use crate::address::Address;
use crate::app::{App, CONNECT};
use crate::registration;
use crate::store::Bequest;
use crate::upstream::Pool;
use crate::workers::{Drained, Entry, Phase};

/// Sockets that are handed over: the main port's and that of the metrics.
const SOCKETS: usize = 2;
/// Most bytes of the first line.
const HELLO: usize = 1 << 20;
/// How long the first line may take.
const STEP: Duration = Duration::from_secs(10);
/// How long the new router waits for the report of an engine before it goes on without that engine's.
const REPORTS: Duration = Duration::from_secs(30);
/// From the old router's last binding until an engine counts what was sent to it.
const SETTLE: Duration = Duration::from_secs(1);
/// Pause between looks.
const LOOK: Duration = Duration::from_millis(20);

/// Where this router stands in a handover.
#[derive(Debug, Default)]
pub struct Handover {
    successor: RwLock<Option<Arc<Pool>>>,
    passing: AtomicUsize,
}

impl Handover {
    /// The router that has taken over; what still comes here is for it.
    pub fn successor(&self) -> Option<Arc<Pool>> {
        self.successor.read().clone()
    }

    /// Requests that are being passed on to it.
    pub fn passing(&self) -> usize {
        self.passing.load(Ordering::Relaxed)
    }
}

/// The listening sockets of a router.
#[derive(Debug)]
pub struct Sockets {
    /// The main port.
    pub main: TcpListener,
    /// The port of the metrics.
    pub metrics: Option<TcpListener>,
}

/// A new router's conversation with the one that serves.
#[derive(Debug)]
pub struct Taking {
    workers: Vec<Value>,
    stores: Vec<Bequest>,
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

/// An old router's conversation with the one that has taken over. It lasts for as long as the old router.
#[derive(Debug)]
pub struct Given {
    _reader: BufReader<OwnedReadHalf>,
    _writer: OwnedWriteHalf,
}

/// A request that is being passed on; see [`Handover::passing`].
#[derive(Debug)]
pub struct Passing(Arc<App>);

impl Passing {
    /// Counts one.
    pub fn begin(app: &Arc<App>) -> Self {
        app.handover.passing.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(app))
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        self.0.handover.passing.fetch_sub(1, Ordering::Relaxed);
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Asks the router behind `path` for its sockets; `None` when there is none.
///
/// # Errors
/// When there is one and it does not speak this.
pub async fn ask(path: &Path) -> io::Result<Option<(Sockets, Taking)>> {
    let stream = match UnixStream::connect(path).await {
        Ok(stream) => stream,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => return Ok(None),
        Err(e) => return Err(e),
    };
    let mut sockets = Vec::new();
    let mut hello = Vec::new();
    let told = async {
        while !hello.contains(&b'\n') {
            if hello.len() > HELLO {
                return Err(bad("no end of the first line"));
            }
            let mut tile = [0; 4096];
            let got = stream.async_io(Interest::READABLE, || receive(stream.as_fd(), &mut tile, &mut sockets)).await;
            let got = match got {
                Err(e) if e.kind() != io::ErrorKind::ConnectionReset => return Err(e),
                got => got.unwrap_or(0),
            };
            if got == 0 {
                return Err(bad("the serving router ended the handover; another one may be on its way"));
            }
            hello.extend_from_slice(tile.get(..got).unwrap_or_default());
        }
        Ok(())
    };
    tokio::time::timeout(STEP, told).await.map_err(|_| bad("the serving router does not answer"))??;
    let hello: Value = serde_json::from_slice(&hello).map_err(|e| bad(&e.to_string()))?;
    let mut sockets = sockets.into_iter().map(|fd| {
        let socket = std::net::TcpListener::from(fd);
        socket.set_nonblocking(true)?;
        TcpListener::from_std(socket)
    });
    let main = sockets.next().ok_or_else(|| bad("no socket came"))??;
    let metrics = sockets.next().transpose()?;
    let list = |name: &str| hello.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
    let bequest = |store: &Value| {
        let path = store.get("path")?.as_str()?.into();
        Some(Bequest { path, spilled: store.get("spilled").and_then(Value::as_bool).unwrap_or(false) })
    };
    let stores = list("stores").iter().filter_map(bequest).collect();
    let (reader, writer) = stream.into_split();
    let taking = Taking { workers: list("workers"), stores, reader: BufReader::new(reader), writer };
    Ok(Some((Sockets { main, metrics }, taking)))
}

fn receive(from: BorrowedFd<'_>, tile: &mut [u8], sockets: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(from, &mut [IoSliceMut::new(tile)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            sockets.extend(fds);
        }
    }
    Ok(got.bytes)
}

fn send(to: BorrowedFd<'_>, text: &[u8], sockets: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !sockets.is_empty() && !control.push(SendAncillaryMessage::ScmRights(sockets)) {
        return Err(io::Error::other("too many sockets"));
    }
    Ok(sendmsg(to, &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL)?)
}

/// The line that comes next; "" at the end.
async fn line(reader: &mut BufReader<OwnedReadHalf>) -> io::Result<String> {
    let mut text = String::new();
    reader.read_line(&mut text).await?;
    Ok(text.trim_end().to_owned())
}

impl Taking {
    /// Takes what was there while it ran: engines that were registered and are not here yet, and the rows of references.
    pub fn inherit(&mut self, app: &Arc<App>) {
        app.store.take_over(std::mem::take(&mut self.stores));
        for worker in &self.workers {
            if let Err(error) = registration::again(app, worker) {
                tracing::warn!(%error, "an engine of the router before this one cannot be registered");
            }
        }
    }

    /// Waits until this router is ready and has the old one stop to accept. `port` of the loopback is served by this router.
    ///
    /// # Errors
    /// When the old router ends or does not follow. It accepts no more then, or is gone.
    pub async fn take(&mut self, app: &Arc<App>, port: u16) -> io::Result<()> {
        tokio::select! {
            () = reports(app, None) => {}
            // Nothing is to be said yet, so that this is its end: nobody else answers now.
            _ = line(&mut self.reader) => return Err(bad("it has ended")),
        }
        self.writer.write_all(format!("take {port}\n").as_bytes()).await?;
        // It may take as long as a pause of the fleet does.
        match line(&mut self.reader).await?.as_str() {
            "taken" => Ok(()),
            "" => Err(bad("it has ended")),
            other => Err(bad(other)),
        }
    }

    /// Opens the gate when the old router binds no more. Ready when that has ended.
    pub async fn release(mut self, app: Arc<App>) {
        // "released", or the end of the old router: either way it binds no more.
        let told = line(&mut self.reader).await.is_ok_and(|text| text == "released");
        reports(&app, Some(app.clock.now())).await;
        app.gate.set_held(false);
        tracing::info!(told, "this router binds now");
        let _ = line(&mut self.reader).await;
    }
}

/// Waits until every engine that answers has been asked for its load after `since`, or ever.
async fn reports(app: &Arc<App>, since: Option<Moment>) {
    let until = Instant::now() + REPORTS;
    let mut waiting = true;
    while waiting {
        tokio::time::sleep(LOOK).await;
        let late = Instant::now() >= until;
        let entries = app.registry.all();
        waiting = entries.iter().any(|entry| match entry.active() {
            Some(worker) => !late && !worker.reported_after(since),
            None => !late && entry.phase() == Phase::Pending,
        });
        let missing = app.roles().iter().any(|role| app.registry.healthy(*role) == 0);
        // Without an engine of a role this router is of no use, and the old one serves on.
        waiting |= since.is_none() && missing;
    }
}

/// Tells the accept loops whether to accept.
#[derive(Debug)]
pub struct Doors {
    open: watch::Sender<bool>,
}

impl Doors {
    /// Open or closed.
    pub fn new(open: bool) -> Self {
        Self { open: watch::channel(open).0 }
    }

    /// What an accept loop looks at.
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.open.subscribe()
    }

    /// Opens or closes.
    pub fn set(&self, open: bool) {
        self.open.send_replace(open);
    }
}

/// Hands over to whoever asks at `path`; ready once a new router has taken over and nothing waits here any more.
///
/// # Errors
/// When it cannot listen at `path`.
pub async fn offer(app: &Arc<App>, path: &Path, sockets: &[OwnedFd], doors: &Doors) -> io::Result<Given> {
    let (mut listener, mut at) = bind(path)?;
    loop {
        let (stream, _) = listener.accept().await?;
        match hand_over(app, stream, sockets, doors).await {
            Ok(given) => return Ok(given),
            Err(error) => {
                // It died, or was refused by its own settings: this router serves on.
                *app.handover.successor.write() = None;
                app.drain.stop();
                doors.set(true);
                tracing::warn!(%error, "a new router asked for this one's sockets and did not take over");
                // It may have begun to offer them itself before it died.
                if place(path).ok() != Some(at) {
                    (listener, at) = bind(path)?;
                }
            }
        }
    }
}

/// What is at `path`: device and inode.
fn place(path: &Path) -> io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// A listening socket at `path` that nobody else may connect to, in place of what was there.
fn bind(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    use std::os::unix::fs::PermissionsExt;
    let new = path.with_extension(format!("{}", std::process::id()));
    let _ = std::fs::remove_file(&new);
    let listener = UnixListener::bind(&new)?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600))?;
    let at = place(&new)?;
    std::fs::rename(&new, path)?;
    Ok((listener, at))
}

async fn hand_over(app: &Arc<App>, stream: UnixStream, sockets: &[OwnedFd], doors: &Doors) -> io::Result<Given> {
    let workers: Vec<Value> = known(app);
    // A path that is no text is the other router's loss, which its log says.
    let store = |b: Bequest| json!({ "path": b.path.to_string_lossy(), "spilled": b.spilled });
    let stores: Vec<Value> = app.store.bequests().into_iter().map(store).collect();
    let hello = format!("{}\n", json!({ "workers": workers, "stores": stores })).into_bytes();
    let fds: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
    let sent = stream.async_io(Interest::WRITABLE, || send(stream.as_fd(), &hello, &fds)).await?;
    let (reader, mut writer) = stream.into_split();
    writer.write_all(hello.get(sent..).unwrap_or_default()).await?;
    let mut reader = BufReader::new(reader);
    tracing::info!("a new router has the sockets; this one serves on until it is ready");
    let text = line(&mut reader).await?;
    let port: u16 = text.strip_prefix("take ").and_then(|p| p.parse().ok()).ok_or_else(|| bad("it went away"))?;
    // What waits here could not leave once the end of the pause reaches the new router only.
    while app.gate.is_paused() {
        tokio::time::sleep(LOOK).await;
    }
    let address = Address::parse(&format!("http://{}:{port}", Ipv4Addr::LOCALHOST)).map_err(|e| bad(&e.to_string()))?;
    *app.handover.successor.write() =
        Some(Pool::new(address, app.settings.upstream_idle_secs, CONNECT, &Arc::default()));
    doors.set(false);
    writer.write_all(b"taken\n").await?;
    tracing::info!(live = app.metrics.live(), "a new router has taken over; what runs and waits here goes on");
    app.drain.start();
    let empty = async {
        while app.gate.snapshot().queued > 0 {
            tokio::time::sleep(LOOK).await;
        }
        tokio::time::sleep(SETTLE).await;
    };
    tokio::select! {
        () = empty => {}
        // It says nothing more until this router has ended, so this is its end.
        _ = line(&mut reader) => return Err(bad("it ended after it had taken over")),
    }
    writer.write_all(b"released\n").await?;
    Ok(Given { _reader: reader, _writer: writer })
}

/// The engines of which this router knows what the next one's settings and discovery do not say: see [`registration::told`].
fn known(app: &App) -> Vec<Value> {
    let alone = |entry: &&Arc<Entry>| !entry.registration.named || entry.state().drained != Drained::default();
    app.registry.all().iter().filter(alone).map(|entry| registration::told(app, entry)).collect()
}

/// A port of the loopback for what the old router passes on.
///
/// # Errors
/// When there is none.
pub async fn loopback() -> io::Result<(TcpListener, u16)> {
    let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}
