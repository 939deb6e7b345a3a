//! References in another store's words: the rows of a reply are put there by a process beside the router, and its handle takes the
//! place of ours. No row passes the router.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use memchr::memmem;
use r3router_core::error::{Error, Kind, Source};

use crate::address::Address;
use crate::allow::Allow;
use crate::app::CONNECT;
use crate::ask::ask;
use crate::seldom::Seldom;
use crate::tls::ClientTls;
use crate::upstream::{Call, Pool};

/// The member of a reply that a reference is.
const MEMBER: &[u8] = b"\"output_store_ref\":";
/// How long a put may take: a sample of 400 MB of int32 at 10 MB/s.
const LIMIT: Duration = Duration::from_secs(60);
/// How long to wait before another try, while the sink cannot be reached or is being started: a finished sample is worth it.
const PAUSES: [Duration; 3] = [Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(3)];

/// The process that puts rows.
#[derive(Debug)]
pub struct Sink {
    url: String,
    pool: Arc<Pool>,
    /// That it takes nothing.
    failing: Seldom,
    /// References that were put.
    pub put: AtomicU64,
    /// References that were not.
    pub failed: AtomicU64,
}

impl Sink {
    /// The sink at `url`; `tls` is spoken as with engines, when the address says so.
    ///
    /// # Errors
    /// `InvalidField` when it is no address.
    pub fn new(url: &str, idle: Duration, tls: &Arc<ClientTls>) -> Result<Self, Error> {
        let address = Address::parse(url)?;
        let (put, failed) = (AtomicU64::new(0), AtomicU64::new(0));
        // The operator named it: it is no worker, so that the list of workers says nothing of it.
        let pool = Pool::secured(address, idle, CONNECT, Some(Arc::clone(tls)), &Arc::new(Allow::new(&[])));
        Ok(Self { url: url.to_owned(), pool, failing: Seldom::default(), put, failed })
    }

    /// `reply` with each reference of ours replaced by the store's.
    ///
    /// # Errors
    /// `R3Sink` when the sink cannot be reached, refuses, or answers something that is no reference.
    pub async fn replace(&self, reply: &[u8]) -> Result<Vec<u8>, Error> {
        let mut out = Vec::with_capacity(reply.len());
        let mut from = 0;
        // Inside of a string the quotes would be escaped, so that this can only be a member's name.
        while let Some(at) = reply.get(from..).and_then(|rest| memmem::find(rest, MEMBER)) {
            let value = from + at + MEMBER.len();
            let rest = reply.get(value..).unwrap_or_default();
            let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<serde::de::IgnoredAny>();
            let Some(Ok(_)) = values.next() else {
                return Err(self.error("the reply's reference is not JSON"));
            };
            let end = value + values.byte_offset();
            out.extend_from_slice(reply.get(from..value).unwrap_or_default());
            let put = self.put(reply.get(value..end).unwrap_or_default()).await;
            let count = if put.is_ok() { &self.put } else { &self.failed };
            count.fetch_add(1, Ordering::Relaxed);
            out.extend_from_slice(&put?);
            from = end;
        }
        out.extend_from_slice(reply.get(from..).unwrap_or_default());
        Ok(out)
    }

    async fn put(&self, reference: &[u8]) -> Result<Bytes, Error> {
        let call = Call::post(Uri::from_static("/put"), Bytes::copy_from_slice(reference));
        let mut pauses = PAUSES.iter();
        loop {
            let why = match ask(&self.pool, &call, LIMIT).await {
                Ok(answer) if answer.ok() => {
                    let fits = answer.json().is_some_and(|v| {
                        let members = |name: &str| v.get(name).is_some_and(serde_json::Value::is_object);
                        members("handle") && members("fields")
                    });
                    return if fits {
                        if let Some(lasted) = self.failing.off() {
                            tracing::info!(sink = %self.url, lasted_s = lasted.as_secs_f64(), "rows are put again");
                        }
                        Ok(answer.body)
                    } else {
                        Err(self.error("it answered something that is no reference"))
                    };
                }
                Ok(answer) => {
                    let text = String::from_utf8_lossy(&answer.body);
                    let message =
                        format!("it answered {}: {}", answer.status, text.chars().take(300).collect::<String>());
                    if answer.status < 500 {
                        return Err(self.error(&message));
                    }
                    message
                }
                Err(error) => error.to_string(),
            };
            // Every sample of a batch meets the same.
            if let (true, lasted) = self.failing.on() {
                let lasted_s = lasted.as_secs();
                tracing::warn!(sink = %self.url, why, lasted_s, "rows were not put; each is tried again a few times");
            }
            let Some(pause) = pauses.next() else { return Err(self.error(&why)) };
            tokio::time::sleep(*pause).await;
        }
    }

    fn error(&self, why: &str) -> Error {
        Error::new(Kind::R3Sink, Source::Router, format!("the rows were not put by {}: {why}", self.url)).advise(
            "see whether `r3router sink` runs there and its store has room; x-r3-transport: ref goes without it",
        )
    }
}
