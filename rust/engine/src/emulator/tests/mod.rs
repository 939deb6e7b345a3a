//! The emulator over real sockets: shapes, pairing, faults, R3.
mod abort;
mod faults;
mod pair;
mod shapes;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use super::{EmulateOptions, RunningFleet};

#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Reply {
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The events of an SSE body, `[DONE]` included.
    pub(super) fn events(&self) -> Vec<String> {
        self.text().split_terminator("\n\n").map(|e| e.strip_prefix("data: ").expect("an event").to_owned()).collect()
    }
}

pub(super) struct Lab {
    pub(super) fleet: RunningFleet,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Lab {
    pub(super) fn start(options: &EmulateOptions) -> Self {
        let config = options.fleet().unwrap();
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { fleet: RunningFleet::start(config).unwrap(), client }
    }

    /// One prefill and one decode engine of two ranks, a hundred times as fast as the clock.
    pub(super) fn pair() -> Self {
        Self::start(&Self::options())
    }

    pub(super) fn options() -> EmulateOptions {
        EmulateOptions {
            prefill: 2,
            decode: 2,
            port: 0,
            scale: 100.0,
            layers: 4,
            top_k: 2,
            ..EmulateOptions::default()
        }
    }

    pub(super) fn url(&self, engine: usize) -> String {
        self.fleet.addresses()[engine].url.clone()
    }

    pub(super) fn bootstrap(&self) -> u16 {
        self.fleet.addresses()[0].bootstrap_port.unwrap()
    }

    pub(super) async fn try_call(
        &self,
        method: Method,
        url: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) -> Result<Reply, String> {
        let mut request = Request::builder().method(method).uri(url).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap();
        let response = self.client.request(request).await.map_err(|e| format!("{e:?}"))?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(|e| format!("{e:?}"))?.to_bytes();
        Ok(Reply { status: parts.status.as_u16(), headers: parts.headers, body })
    }

    pub(super) async fn get(&self, engine: usize, path: &str) -> Reply {
        self.try_call(Method::GET, &format!("{}{path}", self.url(engine)), "", &[]).await.unwrap()
    }

    pub(super) async fn post(&self, engine: usize, path: &str, body: &str) -> Reply {
        self.try_call(Method::POST, &format!("{}{path}", self.url(engine)), body, &[]).await.unwrap()
    }

    /// Sends `body` (a JSON object without its closing brace) to both halves with one room, ranks spliced in.
    pub(super) async fn both(&self, path: &str, body: &str, room: u64, rank: u64) -> (Reply, Reply) {
        let port = self.bootstrap();
        let pd = format!(r#","bootstrap_host":"127.0.0.1","bootstrap_port":{port},"bootstrap_room":{room}"#);
        let prefill = format!(r#"{body}{pd},"routed_dp_rank":{rank},"disagg_prefill_dp_rank":{rank}}}"#);
        let decode = format!(r#"{body}{pd},"disagg_prefill_dp_rank":{rank}}}"#);
        tokio::join!(self.post(0, path, &prefill), self.post(1, path, &decode))
    }

    pub(super) async fn fault(&self, engine: usize, fault: &str) {
        let reply = self.post(engine, "/emulator/fault", fault).await;
        assert_eq!(reply.status, StatusCode::OK.as_u16(), "{}", reply.text());
    }

    pub(super) async fn truth(&self, engine: usize) -> Value {
        self.get(engine, "/emulator/truth").await.json()
    }
}

pub(super) fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// Member names in the order in which they stand in the text, at the top level of an object.
pub(super) fn ordered_keys(text: &str) -> Vec<String> {
    let (mut depth, mut keys, mut at) = (0, Vec::new(), 0);
    let bytes = text.as_bytes();
    while at < bytes.len() {
        match bytes[at] {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            b'"' => {
                let start = at + 1;
                at += 1;
                while bytes[at] != b'"' {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
                if depth == 1 && bytes.get(at + 1) == Some(&b':') {
                    keys.push(text[start..at].to_owned());
                }
            }
            _ => {}
        }
        at += 1;
    }
    keys
}
