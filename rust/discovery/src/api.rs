//! LIST and WATCH of one kind of object, over TLS, with the token of a service account.
use std::fmt::Write as _;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::object::Object;

/// Objects in one page of a list. A page is what is in memory as text.
const PAGE: usize = 500;
/// Most bytes of a page, and of one event.
const PAGE_BYTES: usize = 256 << 20;
const EVENT_BYTES: usize = 16 << 20;
/// Longest wait for a connection, and for the head of a reply or the rest of a page.
const CONNECT: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(30);

/// Why the API server could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// Not in a pod, or its files are not there.
    #[error("{0}")]
    Setting(String),
    /// No connection, or it broke.
    #[error("the API server at {0}: {1}")]
    Connection(String, String),
    /// It says no.
    #[error("the API server answered {0}: {1}")]
    Refused(u16, String),
    /// The version that a watch or a page was to go on from is too old.
    #[error("the API server has forgotten the version that the list had")]
    Gone,
    /// What it sends is not the API.
    #[error("the API server's reply is not what was asked for: {0}")]
    Protocol(String),
}

/// An API server and the right to ask it.
#[derive(Clone, Debug)]
pub struct Access {
    host: String,
    port: u16,
    tls: Arc<ClientConfig>,
    token: PathBuf,
}

/// A list.
#[derive(Debug)]
pub struct Listed<T> {
    /// All of them.
    pub items: Vec<T>,
    /// The version that a watch goes on from.
    pub version: String,
}

/// One event of a watch.
#[derive(Debug)]
pub enum Event<T> {
    /// Added or changed.
    Changed(T),
    /// Deleted; as it was last.
    Deleted(T),
    /// Nothing happened; the watch lives.
    Bookmark,
}

#[derive(Deserialize)]
struct List<T> {
    metadata: ListMetadata,
    // The API writes a list without elements as null.
    items: Option<Vec<T>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    #[serde(default)]
    resource_version: String,
    #[serde(default)]
    r#continue: String,
}

#[derive(Deserialize)]
struct Kind {
    r#type: String,
}

#[derive(Deserialize)]
struct Of<T> {
    object: T,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    code: u16,
    message: String,
}

impl Access {
    /// That of the pod that this runs in, whose service account is the folder `account`: `token` and `ca.crt` are read.
    ///
    /// # Errors
    /// [`ApiError::Setting`] outside of a pod, or in one without a token.
    pub fn in_cluster(account: &Path) -> Result<Self, ApiError> {
        let read = |name: &str| {
            std::env::var(name)
                .map_err(|_| ApiError::Setting(format!("{name} is not set: discovery works in a pod of the cluster")))
        };
        let port = read("KUBERNETES_SERVICE_PORT")?;
        let port = port.parse().map_err(|_| ApiError::Setting(format!("KUBERNETES_SERVICE_PORT={port} is no port")))?;
        Self::new(&read("KUBERNETES_SERVICE_HOST")?, port, &account.join("ca.crt"), &account.join("token"))
    }

    /// An API server whose certificate is signed by one of the authorities in the file `ca` (PEM), and a file with a token. The token is
    /// read for each connection, since it changes.
    ///
    /// # Errors
    /// [`ApiError::Setting`] when a file cannot be read.
    pub fn new(host: &str, port: u16, ca: &Path, token: &Path) -> Result<Self, ApiError> {
        let wrong = |e: &dyn std::fmt::Display| ApiError::Setting(format!("{}: {e}", ca.display()));
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(ca).map_err(|e| wrong(&e))? {
            roots.add(certificate.map_err(|e| wrong(&e))?).map_err(|e| wrong(&e))?;
        }
        if roots.is_empty() {
            return Err(wrong(&"no certificate is in it"));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| wrong(&e))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { host: host.to_owned(), port, tls: Arc::new(tls), token: token.to_owned() })
    }

    /// The namespace of the service account in the folder `account`.
    ///
    /// # Errors
    /// [`ApiError::Setting`] when its file cannot be read.
    pub fn own_namespace(account: &Path) -> Result<String, ApiError> {
        let path = account.join("namespace");
        let text = std::fs::read_to_string(&path).map_err(|e| ApiError::Setting(format!("{}: {e}", path.display())))?;
        Ok(text.trim().to_owned())
    }

    /// All of them, page by page over one connection.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn list<T: Object>(&self, scope: &Scope) -> Result<Listed<T>, ApiError> {
        let (mut sender, token) = self.connect().await?;
        let (mut items, mut next) = (Vec::new(), String::new());
        loop {
            let mut query = format!("limit={PAGE}");
            if !next.is_empty() {
                let _ = write!(query, "&continue={}", escape(&next));
            }
            let body = self.get(&mut sender, &token, &scope.path::<T>(&query)).await?;
            let page = timeout(ANSWER, Limited::new(body, PAGE_BYTES).collect()).await;
            let page = page.map_err(|_| self.broken(&"a page did not come in time"))?;
            let page = page.map_err(|e| self.broken(&e))?.to_bytes();
            let list: List<T> = serde_json::from_slice(&page).map_err(|e| ApiError::Protocol(e.to_string()))?;
            items.extend(list.items.unwrap_or_default());
            next = list.metadata.r#continue;
            if next.is_empty() {
                return Ok(Listed { items, version: list.metadata.resource_version });
            }
        }
    }

    /// What changes after `version`, for `seconds` at most.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn watch<T: Object>(&self, scope: &Scope, version: &str, seconds: u64) -> Result<Watch<T>, ApiError> {
        let (mut sender, token) = self.connect().await?;
        let version = escape(version);
        let query = format!("watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={version}");
        let body = self.get(&mut sender, &token, &scope.path::<T>(&query)).await?;
        Ok(Watch { body, rest: BytesMut::new(), server: self.name(), of: PhantomData, _sender: sender })
    }

    fn name(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    fn broken(&self, why: &dyn std::fmt::Display) -> ApiError {
        ApiError::Connection(self.name(), why.to_string())
    }

    async fn connect(&self) -> Result<(SendRequest<Empty<Bytes>>, String), ApiError> {
        let token = std::fs::read_to_string(&self.token);
        let token = token.map_err(|e| ApiError::Setting(format!("{}: {e}", self.token.display())))?.trim().to_owned();
        let name = ServerName::try_from(self.host.clone()).map_err(|e| self.broken(&e))?;
        let opened = async {
            let tcp = TcpStream::connect((self.host.as_str(), self.port)).await?;
            tcp.set_nodelay(true)?;
            TlsConnector::from(Arc::clone(&self.tls)).connect(name, tcp).await
        };
        let opened = timeout(CONNECT, opened).await.map_err(|_| self.broken(&"no connection in time"))?;
        let (sender, connection) =
            handshake(TokioIo::new(opened.map_err(|e| self.broken(&e))?)).await.map_err(|e| self.broken(&e))?;
        // Ends when the sender and the body of its last reply are dropped.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to the API server");
            }
        });
        Ok((sender, token))
    }

    async fn get(&self, sender: &mut SendRequest<Empty<Bytes>>, token: &str, path: &str) -> Result<Incoming, ApiError> {
        sender.ready().await.map_err(|e| self.broken(&e))?;
        let host = if self.host.contains(':') { format!("[{}]:{}", self.host, self.port) } else { self.name() };
        let request = Request::get(path)
            .header(header::HOST, host)
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, "r3router")
            .header(header::AUTHORIZATION, format!("Bearer {token}"))
            .body(Empty::new())
            .map_err(|e| ApiError::Setting(format!("the token cannot be sent: {e}")))?;
        let reply =
            timeout(ANSWER, sender.send_request(request)).await.map_err(|_| self.broken(&"no answer in time"))?;
        let reply = reply.map_err(|e| self.broken(&e))?;
        match reply.status() {
            StatusCode::OK => Ok(reply.into_body()),
            StatusCode::GONE => Err(ApiError::Gone),
            status => {
                let body = timeout(ANSWER, Limited::new(reply.into_body(), 64 << 10).collect()).await;
                let body = body.ok().and_then(Result::ok).map(http_body_util::Collected::to_bytes).unwrap_or_default();
                let said: Status = serde_json::from_slice(&body).unwrap_or_default();
                Err(ApiError::Refused(status.as_u16(), said.message))
            }
        }
    }
}

/// Which objects are asked for.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// One namespace, or all of them.
    pub namespace: Option<String>,
    /// Labels, as the API takes them.
    pub labels: Option<String>,
}

impl Scope {
    fn path<T: Object>(&self, query: &str) -> String {
        let within = self.namespace.as_ref().map_or(String::new(), |n| format!("namespaces/{}/", escape(n)));
        let labels = self.labels.as_ref().map_or(String::new(), |l| format!("&labelSelector={}", escape(l)));
        format!("{}/{within}{}?{query}{labels}", T::GROUP, T::PLURAL)
    }
}

/// Text as a part of a query.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// A running watch.
#[derive(Debug)]
pub struct Watch<T> {
    body: Incoming,
    rest: BytesMut,
    server: String,
    of: PhantomData<T>,
    // The connection ends with it.
    _sender: SendRequest<Empty<Bytes>>,
}

impl<T: Object> Watch<T> {
    /// The next event; `None` when the server ends the watch. May be dropped and called again.
    ///
    /// # Errors
    /// [`ApiError`]; the watch is of no more use then.
    pub async fn next(&mut self) -> Result<Option<Event<T>>, ApiError> {
        loop {
            if let Some(end) = self.rest.iter().position(|b| *b == b'\n') {
                let line = self.rest.split_to(end + 1);
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return event(&line).map(Some);
            }
            if self.rest.len() > EVENT_BYTES {
                return Err(ApiError::Protocol("an event without an end".to_owned()));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(ApiError::Connection(self.server.clone(), error.to_string())),
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.rest.extend_from_slice(data);
                    }
                }
            }
        }
    }
}

fn event<T: Object>(line: &[u8]) -> Result<Event<T>, ApiError> {
    let wrong = |e: serde_json::Error| ApiError::Protocol(e.to_string());
    let object = || serde_json::from_slice::<Of<T>>(line).map(|of| of.object).map_err(wrong);
    match serde_json::from_slice::<Kind>(line).map_err(wrong)?.r#type.as_str() {
        "ADDED" | "MODIFIED" => Ok(Event::Changed(object()?)),
        "DELETED" => Ok(Event::Deleted(object()?)),
        "BOOKMARK" => Ok(Event::Bookmark),
        "ERROR" => {
            let status = serde_json::from_slice::<Of<Status>>(line).map_err(wrong)?.object;
            if status.code == 410 { Err(ApiError::Gone) } else { Err(ApiError::Refused(status.code, status.message)) }
        }
        other => Err(ApiError::Protocol(format!("an event of type {other}"))),
    }
}
