//! TLS by rustls on both sides: towards clients, with or without certificates of theirs, and towards engines. The files are looked at now
//! and then, and read anew when they have changed; what cannot be read then leaves what was there in force.
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::RwLock;
use r3router_core::error::{Error, Kind, Source};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::settings::Settings;

/// Pause between looks at the files. A secret that is mounted in a pod changes within a minute of its object.
pub const LOOK: Duration = Duration::from_secs(5);
/// The authorities that the system trusts, where distributions keep them.
const SYSTEM: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];
/// First byte of a connection that speaks TLS.
const HANDSHAKE: u8 = 22;

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn wrong(flag: &str, path: &str, why: &dyn std::fmt::Display) -> Error {
    Error::new(Kind::InvalidField, Source::Client, format!("{flag}: {path}: {why}"))
        .advise("name a file in PEM that the router may read")
}

/// A file and what was read of it.
#[derive(Clone, PartialEq, Eq)]
struct Text {
    flag: &'static str,
    path: String,
    bytes: Vec<u8>,
}

// It may be a key.
impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.path)
    }
}

impl Text {
    fn read(flag: &'static str, path: &str) -> Result<Self, Error> {
        let bytes = std::fs::read(path).map_err(|e| wrong(flag, path, &e))?;
        Ok(Self { flag, path: path.to_owned(), bytes })
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, Error> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.bytes).collect();
        let found = found.map_err(|e| wrong(self.flag, &self.path, &e))?;
        if found.is_empty() {
            return Err(wrong(self.flag, &self.path, &"no certificate is in it"));
        }
        Ok(found)
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, Error> {
        PrivateKeyDer::from_pem_slice(&self.bytes).map_err(|e| wrong(self.flag, &self.path, &e))
    }

    fn wrong(&self, why: &dyn std::fmt::Display) -> Error {
        wrong(self.flag, &self.path, why)
    }
}

fn roots(texts: &[Text]) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for text in texts {
        for certificate in text.certificates()? {
            roots.add(certificate).map_err(|e| text.wrong(&e))?;
        }
    }
    Ok(roots)
}

/// A configuration and the texts that it was made of.
#[derive(Debug)]
struct Kept<C> {
    texts: Vec<Text>,
    config: Arc<C>,
}

/// Where a certificate, its key and the authorities of the other side are.
#[derive(Clone, Debug)]
struct Paths {
    own: Option<(String, String)>,
    authorities: Vec<String>,
    flags: [&'static str; 3],
}

impl Paths {
    fn read(&self) -> Result<Texts, Error> {
        let [certificate, key, authorities] = self.flags;
        let own = match &self.own {
            Some((c, k)) => Some((Text::read(certificate, c)?, Text::read(key, k)?)),
            None => None,
        };
        let authorities: Result<_, _> = self.authorities.iter().map(|path| Text::read(authorities, path)).collect();
        Ok(Texts { own, authorities: authorities? })
    }
}

/// What they hold.
#[derive(Debug)]
struct Texts {
    own: Option<(Text, Text)>,
    authorities: Vec<Text>,
}

impl Texts {
    fn all(&self) -> Vec<Text> {
        let own = self.own.iter().flat_map(|(certificate, key)| [certificate.clone(), key.clone()]);
        own.chain(self.authorities.iter().cloned()).collect()
    }
}

/// The router's side of connections from clients.
#[derive(Debug)]
pub struct ServerTls {
    paths: Paths,
    kept: RwLock<Kept<ServerConfig>>,
}

impl ServerTls {
    /// TLS of the main port; `None` without `--tls-cert-path`.
    ///
    /// # Errors
    /// When a file cannot be read or used.
    pub fn new(settings: &Settings) -> Result<Option<Arc<Self>>, Error> {
        let own = settings.tls_cert_path.clone().zip(settings.tls_key_path.clone());
        if own.is_none() {
            return Ok(None);
        }
        let flags = ["--tls-cert-path", "--tls-key-path", "--tls-client-ca-paths"];
        let paths = Paths { own, authorities: settings.tls_client_ca_paths.clone(), flags };
        let texts = paths.read()?;
        let kept = Kept { config: Self::config(&texts)?, texts: texts.all() };
        Ok(Some(Arc::new(Self { paths, kept: RwLock::new(kept) })))
    }

    fn config(texts: &Texts) -> Result<Arc<ServerConfig>, Error> {
        let Some((certificate, key)) = &texts.own else {
            return Err(Error::new(Kind::Internal, Source::Router, "TLS without a certificate"));
        };
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| certificate.wrong(&e))?;
        let builder = match texts.authorities.first() {
            None => builder.with_no_client_auth(),
            Some(first) => {
                let roots = Arc::new(roots(&texts.authorities)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
                builder.with_client_cert_verifier(verifier.map_err(|e| first.wrong(&e))?)
            }
        };
        let config = builder.with_single_cert(certificate.certificates()?, key.key()?);
        let mut config = config.map_err(|e| certificate.wrong(&e))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// Reads the files anew when they have changed; whether they have.
    ///
    /// # Errors
    /// When they cannot be read or used; what was there stays in force.
    pub fn reload(&self) -> Result<bool, Error> {
        let texts = self.paths.read()?;
        let all = texts.all();
        if self.kept.read().texts == all {
            return Ok(false);
        }
        let config = Self::config(&texts)?;
        *self.kept.write() = Kept { texts: all, config };
        Ok(true)
    }

    /// Shakes hands; `None` when the other side does not speak TLS.
    ///
    /// # Errors
    /// What went wrong.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<Result<Stream, TcpStream>> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first != [HANDSHAKE] {
            return Ok(Err(stream));
        }
        let config = Arc::clone(&self.kept.read().config);
        let tls = TlsAcceptor::from(config).accept(stream).await?;
        Ok(Ok(Stream::Tls(Box::new(tls.into()))))
    }
}

/// Authorities; certificate and key.
#[cfg(feature = "otlp")]
pub(crate) type Pem = (Vec<Vec<u8>>, Option<(Vec<u8>, Vec<u8>)>);

/// The router's side of connections to engines.
#[derive(Debug)]
pub struct ClientTls {
    paths: Paths,
    kept: RwLock<Option<Kept<ClientConfig>>>,
}

impl ClientTls {
    /// TLS towards engines. Without any flag the authorities of the system are read with the first `https` engine.
    ///
    /// # Errors
    /// When a file cannot be read or used.
    pub fn new(settings: &Settings) -> Result<Arc<Self>, Error> {
        let own = settings.client_cert_path.clone().zip(settings.client_key_path.clone());
        let mut authorities = settings.ca_cert_paths.clone();
        let given = own.is_some() || !authorities.is_empty();
        if authorities.is_empty() {
            authorities.extend(SYSTEM.iter().find(|path| Path::new(path).exists()).map(|path| (*path).to_owned()));
        }
        let flags = ["--client-cert-path", "--client-key-path", "--ca-cert-paths"];
        let made = Self { paths: Paths { own, authorities, flags }, kept: RwLock::new(None) };
        if given {
            made.current()?;
        }
        Ok(Arc::new(made))
    }

    /// The same files in PEM, for a library that reads them itself: authorities; certificate and key, when there are.
    ///
    /// # Errors
    /// When a file cannot be read.
    #[cfg(feature = "otlp")]
    pub(crate) fn pem(&self) -> Result<Pem, Error> {
        let texts = self.paths.read()?;
        let own = texts.own.map(|(certificate, key)| (certificate.bytes, key.bytes));
        Ok((texts.authorities.into_iter().map(|text| text.bytes).collect(), own))
    }

    fn current(&self) -> Result<Arc<ClientConfig>, Error> {
        if let Some(kept) = &*self.kept.read() {
            return Ok(Arc::clone(&kept.config));
        }
        let texts = self.paths.read()?;
        let made = Kept { config: Self::config(&texts)?, texts: texts.all() };
        Ok(Arc::clone(&self.kept.write().get_or_insert(made).config))
    }

    fn config(texts: &Texts) -> Result<Arc<ClientConfig>, Error> {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| Error::new(Kind::Internal, Source::Router, e.to_string()))?
            .with_root_certificates(roots(&texts.authorities)?);
        let mut config = match &texts.own {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(certificate.certificates()?, key.key()?)
                .map_err(|e| certificate.wrong(&e))?,
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// As [`ServerTls::reload`].
    ///
    /// # Errors
    /// As [`ServerTls::reload`].
    pub fn reload(&self) -> Result<bool, Error> {
        if self.kept.read().is_none() {
            return Ok(false);
        }
        let texts = self.paths.read()?;
        let all = texts.all();
        if self.kept.read().as_ref().is_some_and(|kept| kept.texts == all) {
            return Ok(false);
        }
        let config = Self::config(&texts)?;
        *self.kept.write() = Some(Kept { texts: all, config });
        Ok(true)
    }

    /// Shakes hands with the engine at `host`.
    ///
    /// # Errors
    /// What went wrong.
    pub async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<Stream> {
        let config = self.current().map_err(|e| io::Error::other(e.message.into_owned()))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let tls = TlsConnector::from(config).connect(name, stream).await?;
        Ok(Stream::Tls(Box::new(tls.into())))
    }
}

/// Looks at the files once: whether those of each side have changed.
pub fn look(server: Option<&ServerTls>, client: &ClientTls) -> [Result<bool, Error>; 2] {
    [server.map_or(Ok(false), ServerTls::reload), client.reload()]
}

/// Looks at the files for ever.
pub async fn watch(server: Option<Arc<ServerTls>>, client: Arc<ClientTls>) {
    let mut last = String::new();
    loop {
        tokio::time::sleep(LOOK).await;
        for changed in look(server.as_deref(), &client) {
            match changed {
                Ok(true) => {
                    last.clear();
                    tracing::info!("certificates read anew; new connections use them");
                }
                // Once: a file may be broken for long.
                Err(error) if error.message != last => {
                    tracing::warn!(%error, "certificates cannot be read anew; those that were read before are used");
                    last = error.message.into_owned();
                }
                Ok(false) | Err(_) => {}
            }
        }
    }
}

/// A connection with TLS or without.
#[derive(Debug)]
pub enum Stream {
    /// In the clear.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<tokio_rustls::TlsStream<TcpStream>>),
}

macro_rules! either {
    ($self:expr, $stream:ident => $do:expr) => {
        match $self.get_mut() {
            Self::Plain($stream) => $do,
            Self::Tls($stream) => $do,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}
