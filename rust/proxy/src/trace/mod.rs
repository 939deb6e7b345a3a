//! Traces in the terms of OpenTelemetry: a request is a server span under the client's, its wait in the queue, its attempts and their merges
//! are spans below it, and each leg is a client span whose id is what the engine gets as `traceparent`, so that the engine's own spans hang
//! below the leg.
//!
//! Nothing here is made unless `--enable-trace` is set and the client's trace is sampled: then a request has a [`Request`], and everybody who
//! has something to tell has an `Option` of it. The spans are plain records; only `export` knows the libraries that carry them.
mod attempt;
mod endpoint;
#[cfg(feature = "otlp")]
mod export;
mod place;
#[cfg(any(feature = "otlp", test))]
mod queue;
mod request;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use r3router_core::error::Error;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

pub use attempt::{Attempt, Leg};
pub use endpoint::{Endpoint, Protocol};
pub use place::Place;
pub use request::{End, Origin, Request, Wait};

use crate::metrics::{Counters, SpanFate};
use crate::settings::Settings;
use crate::tls::ClientTls;

/// How many spans became what, by [`SpanFate`].
pub type Counts = Counters<{ SpanFate::NAMES.len() }>;

/// Longest text of an attribute, in bytes: what clients and engines write must not fill the queue.
const MOST_TEXT: usize = 1024;

/// Which side of a call a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Neither.
    Internal,
    /// Answers a call.
    Server,
    /// Makes a call.
    Client,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A text.
    Text(Cow<'static, str>),
    /// A number.
    Number(i64),
}

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Self::Text(Cow::Borrowed(text))
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

/// A text of somebody else's, cut to a bounded length.
fn text(of: &str) -> Value {
    let mut end = of.len().min(MOST_TEXT);
    while !of.is_char_boundary(end) {
        end -= 1;
    }
    Value::Text(Cow::Owned(of.get(..end).unwrap_or_default().to_owned()))
}

/// Name and value of what a span says.
pub type Attributes = Vec<(&'static str, Value)>;

/// A span that has ended.
#[derive(Clone, Debug)]
pub struct Span {
    /// Its name.
    pub name: Cow<'static, str>,
    /// Which side of a call it is.
    pub side: Side,
    /// Where it stands.
    pub place: Place,
    /// The span that it is below; 0 for none.
    pub parent: u64,
    /// Whether that one is another process's.
    pub remote: bool,
    /// When it began.
    pub began: SystemTime,
    /// When it ended.
    pub ended: SystemTime,
    /// What it says.
    pub attributes: Attributes,
    /// What happened in it.
    pub events: Vec<(&'static str, SystemTime)>,
    /// What went wrong, when something did.
    pub error: Option<String>,
}

/// Takes spans and has them sent. A span that finds no room is counted and dropped: nobody waits here.
#[derive(Debug)]
pub struct Traces {
    spans: mpsc::Sender<Span>,
    counts: Arc<Counts>,
    /// Part of the traces that begin here that is recorded.
    ratio: f64,
    closing: watch::Sender<bool>,
    sending: Mutex<Option<JoinHandle<()>>>,
}

impl Traces {
    /// Traces as the settings say; `None` without `--enable-trace`. Must be called inside a runtime.
    ///
    /// # Errors
    /// When this build has no OTLP, or the collector's address or a certificate cannot be used.
    pub fn start(settings: &Settings, counts: &Arc<Counts>, tls: &Arc<ClientTls>) -> Result<Option<Arc<Self>>, Error> {
        if !settings.enable_trace {
            return Ok(None);
        }
        Self::exporting(settings, counts, tls).map(Some)
    }

    #[cfg(feature = "otlp")]
    fn exporting(settings: &Settings, counts: &Arc<Counts>, tls: &Arc<ClientTls>) -> Result<Arc<Self>, Error> {
        let endpoint = Endpoint::parse(&settings.otlp_traces_endpoint)?;
        let exporter = Arc::new(export::Exporter::new(&endpoint, settings, tls)?);
        let ratio = settings.trace_ratio;
        Ok(Self::sending(counts, ratio, endpoint.to_string(), queue::PAUSE, move |spans| {
            let exporter = Arc::clone(&exporter);
            async move { exporter.send(spans).await }
        }))
    }

    #[cfg(not(feature = "otlp"))]
    fn exporting(_: &Settings, _: &Arc<Counts>, _: &Arc<ClientTls>) -> Result<Arc<Self>, Error> {
        use r3router_core::error::{Kind, Source};
        let error = Error::new(Kind::InvalidField, Source::Router, "this build has no traces");
        Err(error.advise("build it with the feature `otlp`, as the wheel is, or leave --enable-trace out"))
    }

    /// Traces that `send` takes in batches after a `pause`, a part `ratio` of those that begin here; `to` names where they go.
    #[cfg(any(feature = "otlp", test))]
    fn sending<F>(
        counts: &Arc<Counts>,
        ratio: f64,
        to: String,
        pause: Duration,
        send: impl Fn(Vec<Span>) -> F + Send + Sync + 'static,
    ) -> Arc<Self>
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let (spans, taken) = mpsc::channel(queue::ROOM);
        let (closing, closed) = watch::channel(false);
        let sending = tokio::spawn(queue::run(taken, closed, Arc::clone(counts), to, pause, send));
        Arc::new(Self { spans, counts: Arc::clone(counts), ratio, closing, sending: Mutex::new(Some(sending)) })
    }

    /// Where a request stands that `client` sent from there, or that begins a trace.
    pub fn origin(&self, client: Option<Place>) -> Origin {
        client.map_or_else(|| Origin::Here(Place::root(self.ratio)), Origin::Client)
    }

    fn take(&self, span: Span) {
        if self.spans.try_send(span).is_err() {
            self.counts.inc(SpanFate::Dropped as usize);
        }
    }

    /// Sends what is there, for at most `limit`; what comes later is dropped.
    pub async fn finish(&self, limit: Duration) {
        let _ = self.closing.send(true);
        let Some(mut sending) = self.sending.lock().take() else { return };
        if tokio::time::timeout(limit, &mut sending).await.is_err() {
            sending.abort();
            tracing::warn!(limit_s = limit.as_secs_f64(), "the last spans were not delivered in time; they are lost");
        }
    }
}
