//! Spans as OTLP, by the libraries of the OpenTelemetry project: over gRPC, or posted through the router's own connections.
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, Uri};
use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig, Identity};
use opentelemetry_otlp::{SpanExporter as Otlp, WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter, SpanLinks};
use r3router_core::error::{Error, Kind, Source};

use super::{Endpoint, Protocol, Side, Span, Value};
use crate::allow::Allow;
use crate::app::CONNECT;
use crate::settings::Settings;
use crate::tls::ClientTls;
use crate::upstream::{Call, Pool};

/// How long a batch may take, the library's own new tries included.
const LIMIT: Duration = Duration::from_secs(10);
/// Largest answer of a collector that is read.
const MOST_ANSWER: usize = 1 << 20;

/// Sends spans to a collector.
#[derive(Debug)]
pub(super) struct Exporter {
    otlp: Otlp,
    scope: InstrumentationScope,
}

impl Exporter {
    /// For the collector at `endpoint`. Must be called inside a runtime.
    ///
    /// # Errors
    /// When a certificate or the environment's `OTEL_…` variables cannot be used.
    pub(super) fn new(endpoint: &Endpoint, settings: &Settings, tls: &Arc<ClientTls>) -> Result<Self, Error> {
        let wrong = |why: &dyn std::fmt::Display| {
            Error::new(Kind::InvalidField, Source::Client, format!("no traces to {endpoint}: {why}"))
                .advise("see --otlp-traces-endpoint and the variables OTEL_EXPORTER_OTLP_…")
        };
        let url = &endpoint.address.url;
        let builder = Otlp::builder();
        let mut otlp = match endpoint.protocol {
            Protocol::Grpc => {
                let mut builder = builder.with_tonic().with_endpoint(url.as_ref()).with_timeout(LIMIT);
                if endpoint.address.tls {
                    let (authorities, own) = tls.pem()?;
                    let mut config =
                        ClientTlsConfig::new().ca_certificates(authorities.into_iter().map(Certificate::from_pem));
                    if let Some((certificate, key)) = own {
                        config = config.identity(Identity::from_pem(certificate, key));
                    }
                    builder = builder.with_tls_config(config);
                }
                builder.build()
            }
            Protocol::Http => {
                // The operator named it: it is no worker.
                let (allow, idle) = (Arc::new(Allow::new(&[])), settings.upstream_idle_secs);
                let pool = Pool::secured(endpoint.address.clone(), idle, CONNECT, Some(Arc::clone(tls)), &allow);
                builder
                    .with_http()
                    .with_http_client(Poster(pool))
                    .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                    .with_endpoint(format!("{url}{}", endpoint.path))
                    .with_timeout(LIMIT)
                    .build()
            }
        }
        .map_err(|e| wrong(&e))?;
        otlp.set_resource(&resource());
        let scope = InstrumentationScope::builder("r3router").with_version(env!("CARGO_PKG_VERSION")).build();
        Ok(Self { otlp, scope })
    }

    /// Sends a batch.
    ///
    /// # Errors
    /// Why it was not taken.
    pub(super) async fn send(&self, spans: Vec<Span>) -> Result<(), String> {
        let spans = spans.into_iter().map(|span| data(span, &self.scope)).collect();
        match tokio::time::timeout(LIMIT, self.otlp.export(spans)).await {
            Ok(sent) => sent.map_err(|e| e.to_string()),
            Err(_) => Err(format!("no answer in {} s", LIMIT.as_secs())),
        }
    }
}

/// Who sends: `service.name` is `r3router` unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` name another.
fn resource() -> Resource {
    let name = opentelemetry::Key::from_static_str("service.name");
    let named = Resource::builder().build().get(&name).is_some_and(|v| !v.as_str().starts_with("unknown_service"));
    let builder = Resource::builder().with_attributes([
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", format!("{:032x}", rand::random::<u128>())),
    ]);
    if named { builder.build() } else { builder.with_service_name("r3router").build() }
}

fn data(span: Span, scope: &InstrumentationScope) -> SpanData {
    let mut events = SpanEvents::default();
    events.events.extend(span.events.into_iter().map(|(name, at)| Event::new(name, at, Vec::new(), 0)));
    SpanData {
        span_context: SpanContext::new(
            TraceId::from_bytes(span.place.trace.to_be_bytes()),
            SpanId::from_bytes(span.place.span.to_be_bytes()),
            TraceFlags::new(span.place.flags),
            false,
            TraceState::NONE,
        ),
        parent_span_id: SpanId::from_bytes(span.parent.to_be_bytes()),
        parent_span_is_remote: span.remote,
        span_kind: match span.side {
            Side::Internal => SpanKind::Internal,
            Side::Server => SpanKind::Server,
            Side::Client => SpanKind::Client,
        },
        name: span.name,
        start_time: span.began,
        end_time: span.ended,
        attributes: span
            .attributes
            .into_iter()
            .map(|(name, value)| match value {
                Value::Text(text) => KeyValue::new(name, text),
                Value::Number(number) => KeyValue::new(name, number),
            })
            .collect(),
        dropped_attributes_count: 0,
        events,
        links: SpanLinks::default(),
        status: span.error.map_or(Status::Unset, Status::error),
        instrumentation_scope: scope.clone(),
    }
}

/// Posts through connections like those to engines: the same TLS, no redirects, no proxies from the environment.
#[derive(Debug)]
struct Poster(Arc<Pool>);

#[async_trait::async_trait]
impl HttpClient for Poster {
    async fn send_bytes(&self, request: http::Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().cloned();
        let uri = path.map_or_else(|| Uri::from_static("/"), Uri::from);
        let call = Call { method: parts.method, uri, headers: parts.headers, pieces: Arc::from([body]) };
        let (head, answer) = self.0.send(&call).await?.collect(MOST_ANSWER).await?;
        Ok(Response::from_parts(head, answer))
    }
}
