//! What must be right before a router starts: certificates, keys, addresses, folders, the service account. `serve` begins with it and
//! `serve --check` does nothing else, so that the two cannot say different things.
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use r3router_core::error::{Error, Kind, Source};
use tokio::net::{TcpListener, TcpSocket};

use crate::app::App;
use crate::settings::{Settings, usable};
use crate::{discovery, logging};

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 4096;
/// Longest path that a UNIX socket can have (`sun_path`), less the process id that a new one has until it takes the old one's place.
const SOCKET_PATH: usize = 107 - 12;

/// Why the router did not start.
#[derive(Debug)]
pub enum StartError {
    /// It cannot listen.
    Listen(String, io::Error),
    /// A setting cannot be used.
    Setting(Error),
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            // As the settings write what is wrong with them: the flag first.
            Self::Setting(error) => {
                f.write_str(&error.message)?;
                error.advice.as_ref().map_or(Ok(()), |advice| write!(f, "; {advice}"))
            }
        }
    }
}

impl std::error::Error for StartError {}

fn wrong(message: String, advice: &'static str) -> Error {
    Error::new(Kind::InvalidField, Source::Client, message).advise(advice)
}

/// Where a listener will be.
#[derive(Clone, Debug)]
pub struct Place {
    host: String,
    port: u16,
    addresses: Vec<SocketAddr>,
}

impl Place {
    /// The addresses of `host`, of which this machine must have one. That somebody listens on the port is for [`Place::listen`] to find.
    ///
    /// # Errors
    /// When the name has no address, no address is this machine's, or the port may not be taken.
    async fn of(kind: &str, host: &str, port: u16) -> Result<Self, Error> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let found: io::Result<Vec<SocketAddr>> = tokio::net::lookup_host((bare, port)).await.map(Iterator::collect);
        let addresses = match found {
            Ok(found) if !found.is_empty() => found,
            none => {
                let why = none.err().map_or_else(String::new, |e| format!(": {e}"));
                let message = format!("--{kind}host: `{host}` has no address{why}");
                return Err(wrong(message, "give an address of this machine, or 0.0.0.0 or :: for all of them"));
            }
        };
        let mut last = None;
        for address in &addresses {
            match bind(*address) {
                Ok(_) => return Ok(Self { host: bare.to_owned(), port, addresses }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    return Ok(Self { host: bare.to_owned(), port, addresses });
                }
                Err(error) => last = Some(error),
            }
        }
        let why = last.map_or_else(String::new, |e| e.to_string());
        if why.is_empty() || bind(SocketAddr::from(([0, 0, 0, 0], port))).is_err_and(|e| is_denied(&e)) {
            let message = format!("--{kind}port: {bare}:{port} cannot be listened on: {why}");
            return Err(wrong(message, "choose a port from 1024 on, or give the process the right to take this one"));
        }
        let message = format!("--{kind}host: {bare}:{port} cannot be listened on: {why}");
        Err(wrong(message, "give an address of this machine, or 0.0.0.0 or :: for all of them"))
    }

    /// Takes the port.
    ///
    /// # Errors
    /// When none of the addresses can be had; mostly because somebody listens there.
    pub fn listen(&self) -> Result<TcpListener, StartError> {
        let mut last = io::Error::other("the name has no address");
        for address in &self.addresses {
            match bind(*address).and_then(|socket| socket.listen(BACKLOG)) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        Err(StartError::Listen(self.to_string(), last))
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// A socket that does not listen: whoever has the port keeps it.
fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted router must get its port although old connections linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Everything that a router starts with, but for its ports.
#[derive(Debug)]
pub struct Start {
    /// What it shares between its parts.
    pub app: Arc<App>,
    /// Where it will listen.
    pub main: Place,
    /// Where its metrics will be; `None` for port 0.
    pub metrics: Option<Place>,
    /// Where the admin listener will be; `None` for port 0.
    pub admin: Option<Place>,
    /// What discovery needs.
    pub discovery: Option<discovery::Ready>,
}

impl Start {
    /// Finds and reads all that the settings name. Takes no port, asks no engine, and leaves nothing behind when it is dropped. Must be called
    /// inside a runtime.
    ///
    /// # Errors
    /// The first thing that cannot be used, with its flag.
    pub async fn of(settings: Settings) -> Result<Self, StartError> {
        Self::find(settings).await.map_err(StartError::Setting)
    }

    async fn find(settings: Settings) -> Result<Self, Error> {
        if let Some(folder) = &settings.log_dir {
            logging::look(Path::new(folder))?;
        }
        if let Some(path) = &settings.handover_socket {
            look_at_socket(Path::new(path))?;
        }
        let main = Place::of("", &settings.host, settings.port).await?;
        let metrics = aside("prometheus-", &settings.prometheus_host, settings.prometheus_port).await?;
        let admin = aside("admin-", &settings.admin_host, settings.admin_port).await?;
        let app = App::new(settings)?;
        let discovery = discovery::ready(&app)?;
        Ok(Self { app, main, metrics, admin, discovery })
    }
}

async fn aside(kind: &str, host: &str, port: u16) -> Result<Option<Place>, Error> {
    if port == 0 { Ok(None) } else { Place::of(kind, host, port).await.map(Some) }
}

/// Whether routers can hand over at `path`: it is renamed to, so whatever else is there would be lost.
fn look_at_socket(path: &Path) -> Result<(), Error> {
    let refused = |why: String| {
        let message = format!("--handover-socket: no socket can be at {}: {why}", path.display());
        Err(wrong(message, "give a path in a folder that exists and can be written, of 95 bytes at most"))
    };
    if path.as_os_str().len() > SOCKET_PATH {
        return refused(format!("its path has {} bytes", path.as_os_str().len()));
    }
    if fs::symlink_metadata(path).is_ok_and(|there| !there.file_type().is_socket()) {
        return refused("something else is there".to_owned());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match usable(folder) {
        Ok(()) => Ok(()),
        Err(error) => refused(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Place, Start, StartError};
    use crate::settings::Settings;

    fn settings() -> Settings {
        Settings {
            host: "127.0.0.1".to_owned(),
            port: 0,
            prometheus_port: 0,
            admin_port: 0,
            r3_arena_bytes: 1 << 20,
            ..Settings::default()
        }
    }

    async fn refused(settings: Settings) -> String {
        match Start::of(settings).await {
            Err(StartError::Setting(error)) => StartError::Setting(error).to_string(),
            other => format!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_look_before_the_start_leaves_nothing_behind_and_takes_no_port() {
        let folder = std::env::temp_dir().join(format!("r3router-start-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let of = Settings {
            port: taken.local_addr().unwrap().port(),
            r3_store_dir: text(&folder),
            log_dir: Some(text(&folder.join("new/logs"))),
            handover_socket: Some(text(&folder.join("socket"))),
            ..settings()
        };
        let start = Start::of(of).await.expect("a port that is taken is no fault of the settings");
        assert!(start.main.listen().unwrap_err().to_string().starts_with("cannot listen on 127.0.0.1:"));
        drop(start);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a file was left behind");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[tokio::test]
    async fn what_a_start_cannot_use_is_named_by_its_flag() {
        let nowhere = "nowhere.invalid".to_owned();
        let error = refused(Settings { host: nowhere.clone(), ..settings() }).await;
        assert!(error.starts_with("--host: `nowhere.invalid` has no address"), "{error}");
        // An address of documentation is no machine's.
        let error = refused(Settings { host: "192.0.2.1".to_owned(), ..settings() }).await;
        assert!(error.starts_with("--host: 192.0.2.1:0 cannot be listened on"), "{error}");
        let error = refused(Settings { prometheus_host: nowhere.clone(), prometheus_port: 9, ..settings() }).await;
        assert!(error.starts_with("--prometheus-host: `nowhere.invalid`"), "{error}");
        let error = refused(Settings { admin_host: nowhere, admin_port: 9, ..settings() }).await;
        assert!(error.starts_with("--admin-host: `nowhere.invalid`"), "{error}");
        for (path, why) in [("/nowhere/at/all", "No such file"), ("/dev/null", "something else")] {
            let error = refused(Settings { handover_socket: Some(path.to_owned()), ..settings() }).await;
            assert!(error.starts_with("--handover-socket: no socket can be at") && error.contains(why), "{error}");
        }
        let long = format!("/tmp/{}", "x".repeat(120));
        let error = refused(Settings { handover_socket: Some(long), ..settings() }).await;
        assert!(error.contains("its path has 125 bytes"), "{error}");
    }

    #[tokio::test]
    async fn every_address_of_a_name_is_tried() {
        let place = Place::of("", "localhost", 0).await.expect("localhost is this machine");
        assert!(place.listen().is_ok());
    }
}
