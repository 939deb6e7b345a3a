//! An API server that speaks LIST and WATCH of pods over TLS, as far as a client can tell, and fails on demand.
#![allow(clippy::unwrap_used, clippy::panic)]
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;

pub(crate) const TOKEN: &str = "the-token";
type Reply = BoxBody<Bytes, Infallible>;

#[derive(Default)]
struct State {
    pods: BTreeMap<String, Value>,
    version: u64,
    history: Vec<(u64, Value)>,
    oldest: u64,
    /// Watches send nothing.
    silent: bool,
    /// So many lists have a version that cannot be watched from any more.
    stale: u32,
    /// Every request gets this status.
    refuse: Option<u16>,
}

struct Shared {
    state: Mutex<State>,
    news: watch::Sender<u64>,
    cut: watch::Sender<u64>,
    lists: AtomicU64,
    watches: AtomicU64,
    pages: AtomicU64,
    paths: Mutex<Vec<String>>,
}

pub(crate) struct Fake {
    pub(crate) port: u16,
    pub(crate) folder: PathBuf,
    shared: Arc<Shared>,
}

fn reply(status: u16, value: &Value) -> Response<Reply> {
    Response::builder().status(status).body(Full::new(Bytes::from(value.to_string())).boxed()).unwrap()
}

fn failed(code: u16, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": "Expired", "code": code})
}

fn query<'a>(uri: &'a str, key: &str) -> Option<&'a str> {
    uri.split_once('?')?.1.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
}

fn selected(pod: &Value, selector: Option<&str>) -> bool {
    selector.is_none_or(|s| {
        s.replace("%2C", ",").replace("%3D", "=").split(',').all(|pair| {
            let (key, value) = pair.split_once('=').unwrap();
            pod["metadata"]["labels"][key] == value
        })
    })
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn answer(self: Arc<Self>, request: &Request<Incoming>) -> Response<Reply> {
        let uri = request.uri().to_string();
        self.paths.lock().unwrap().push(uri.clone());
        let authorization = request.headers().get("authorization").and_then(|h| h.to_str().ok()).unwrap_or("");
        if authorization != format!("Bearer {TOKEN}") {
            return reply(401, &failed(401, "Unauthorized"));
        }
        if let Some(status) = self.state().refuse {
            return reply(status, &failed(status, "pods is forbidden"));
        }
        let selector = query(&uri, "labelSelector").map(str::to_owned);
        if query(&uri, "watch") == Some("true") {
            return self.watch(query(&uri, "resourceVersion").unwrap().parse().unwrap(), selector);
        }
        let limit: usize = query(&uri, "limit").unwrap().parse().unwrap();
        let from: usize = query(&uri, "continue").map_or(0, |c| c.parse().unwrap());
        self.pages.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        let version = if state.stale > 0 { 0 } else { state.version };
        state.stale = state.stale.saturating_sub(1);
        let all: Vec<&Value> = state.pods.values().filter(|p| selected(p, selector.as_deref())).collect();
        let items: Vec<&Value> = all.iter().skip(from).take(limit).copied().collect();
        let more = if from + items.len() < all.len() { (from + items.len()).to_string() } else { String::new() };
        if more.is_empty() {
            self.lists.fetch_add(1, Ordering::Relaxed);
        }
        let metadata = json!({"resourceVersion": version.to_string(), "continue": more});
        reply(200, &json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}))
    }

    fn watch(self: Arc<Self>, from: u64, selector: Option<String>) -> Response<Reply> {
        if from < self.state().oldest {
            // As the API server does it: 200, and the error as an event.
            let error = json!({"type": "ERROR", "object": failed(410, "too old resource version")});
            return Response::new(Full::new(Bytes::from(format!("{error}\n"))).boxed());
        }
        let (send, receive) = mpsc::channel::<Bytes>(64);
        let (mut news, mut cut) = (self.news.subscribe(), self.cut.subscribe());
        cut.mark_unchanged();
        self.watches.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            let mut sent = from;
            loop {
                let events: Vec<(u64, Value)> = {
                    let state = self.state();
                    if state.silent {
                        Vec::new()
                    } else {
                        state.history.iter().filter(|(v, _)| *v > sent).cloned().collect()
                    }
                };
                for (version, event) in events {
                    sent = version;
                    if !selected(&event["object"], selector.as_deref()) {
                        continue;
                    }
                    // In two pieces, as a network may.
                    let text = format!("{event}\n");
                    let (one, other) = text.split_at(text.len() / 2);
                    for piece in [one, other] {
                        if send.send(Bytes::from(piece.to_owned())).await.is_err() {
                            return;
                        }
                    }
                }
                tokio::select! {
                    _ = news.changed() => {}
                    _ = cut.changed() => return,
                    () = send.closed() => return,
                }
            }
        });
        Response::new(Events(receive).boxed())
    }
}

/// The body of a watch.
struct Events(mpsc::Receiver<Bytes>);

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|b| Ok(Frame::data(b))))
    }
}

impl Fake {
    /// Starts one, with its certificate and token as files in a folder of its own.
    pub(crate) async fn start(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("r3router-discovery-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let certified = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        std::fs::write(folder.join("ca.crt"), certified.cert.pem()).unwrap();
        std::fs::write(folder.join("token"), format!("{TOKEN}\n")).unwrap();
        let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
        let chain = vec![CertificateDer::from(certified.cert.der().to_vec())];
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            state: Mutex::new(State { version: 1, ..State::default() }),
            news: watch::channel(0).0,
            cut: watch::channel(0).0,
            lists: AtomicU64::new(0),
            watches: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            paths: Mutex::new(Vec::new()),
        });
        let served = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let (acceptor, shared) = (acceptor.clone(), Arc::clone(&served));
                tokio::spawn(async move {
                    let Ok(tls) = acceptor.accept(tcp).await else { return };
                    let service = service_fn(move |r| {
                        let shared = Arc::clone(&shared);
                        async move { Ok::<_, Infallible>(shared.answer(&r)) }
                    });
                    let _ =
                        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(tls), service).await;
                });
            }
        });
        Self { port, folder, shared }
    }

    fn change(&self, kind: &str, pod: Value, told: bool) {
        let mut state = self.shared.state();
        state.version += 1;
        let version = state.version;
        let mut pod = pod;
        pod["metadata"]["resourceVersion"] = version.to_string().into();
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        if kind == "DELETED" {
            state.pods.remove(&name);
        } else {
            state.pods.insert(name, pod.clone());
        }
        if told {
            state.history.push((version, json!({"type": kind, "object": pod})));
        }
        drop(state);
        self.shared.news.send_modify(|n| *n += 1);
    }

    /// A pod comes or changes, and watches are told.
    pub(crate) fn put(&self, pod: Value) {
        self.change("MODIFIED", pod, true);
    }

    /// Many at once, untold.
    pub(crate) fn fill(&self, pods: impl IntoIterator<Item = Value>) {
        for pod in pods {
            self.change("ADDED", pod, false);
        }
    }

    /// A pod is deleted; `told`: watches hear of it.
    pub(crate) fn delete(&self, name: &str, told: bool) {
        let pod = self.shared.state().pods[name].clone();
        self.change("DELETED", pod, told);
    }

    pub(crate) fn silent(&self) {
        self.shared.state().silent = true;
    }

    pub(crate) fn refuse(&self, status: Option<u16>) {
        self.shared.state().refuse = status;
    }

    /// Running watches break.
    pub(crate) fn cut(&self) {
        self.shared.cut.send_modify(|n| *n += 1);
    }

    /// What was before now cannot be watched from, and the next list has such a version.
    pub(crate) fn forget(&self) {
        let mut state = self.shared.state();
        state.history.clear();
        state.oldest = state.version;
        state.stale = 1;
    }

    pub(crate) fn lists(&self) -> u64 {
        self.shared.lists.load(Ordering::Relaxed)
    }

    pub(crate) fn pages(&self) -> u64 {
        self.shared.pages.load(Ordering::Relaxed)
    }

    pub(crate) fn watches(&self) -> u64 {
        self.shared.watches.load(Ordering::Relaxed)
    }

    pub(crate) fn paths(&self) -> Vec<String> {
        self.shared.paths.lock().unwrap().clone()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A pod that runs and is ready, as the API server writes it.
pub(crate) fn pod(name: &str, uid: &str, ip: &str) -> Value {
    json!({
        "metadata": {
            "name": name, "namespace": "rl", "uid": uid,
            "labels": {"app": name.split('-').next().unwrap(), "fleet": "a"},
            "annotations": {"sglang.ai/bootstrap-port": "8998"},
            "managedFields": [{"manager": "kubelet", "operation": "Update"}]
        },
        "spec": {"containers": [{"name": "engine", "image": "sglang"}]},
        "status": {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "engine", "restartCount": 0, "ready": true, "state": {"running": {}}}]
        }
    })
}

/// Waits for a condition.
pub(crate) async fn until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}
