//! Small questions of the router's own to an engine: one GET or POST with the worker's key and a time limit.
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Uri};
use serde_json::Value;

use crate::upstream::{Call, Fault, Pool};

/// Most bytes of an answer that are read.
const MAX_ANSWER: usize = 16 << 20;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// The connection failed.
    Fault(Fault),
    /// It did not answer in time.
    Slow(Duration),
}

impl std::fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fault(fault) => fault.fmt(f),
            Self::Slow(limit) => write!(f, "no answer within {limit:?}"),
        }
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Its `content-type`.
    pub content_type: Option<HeaderValue>,
    /// Body.
    pub body: Bytes,
}

impl Answer {
    /// Whether it is 2xx.
    pub fn ok(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The body as JSON.
    pub fn json(&self) -> Option<Value> {
        serde_json::from_slice(&self.body).ok()
    }
}

/// Sends `call` and reads its whole answer within `limit`.
///
/// # Errors
/// [`NoAnswer`]; a status of any kind is an answer.
pub async fn ask(pool: &Arc<Pool>, call: &Call, limit: Duration) -> Result<Answer, NoAnswer> {
    let asked = async {
        let exchange = pool.send(call).await?;
        let (head, body) = exchange.collect(MAX_ANSWER).await?;
        let content_type = head.headers.get(http::header::CONTENT_TYPE).cloned();
        Ok(Answer { status: head.status.as_u16(), content_type, body })
    };
    match tokio::time::timeout(limit, asked).await {
        Ok(answer) => answer.map_err(NoAnswer::Fault),
        Err(_) => Err(NoAnswer::Slow(limit)),
    }
}

/// GETs `path` with the worker's key.
///
/// # Errors
/// As [`ask`].
pub async fn get(
    pool: &Arc<Pool>,
    path: &'static str,
    key: Option<&HeaderValue>,
    limit: Duration,
) -> Result<Answer, NoAnswer> {
    ask(pool, &Call::get(Uri::from_static(path)).with_key(key), limit).await
}
