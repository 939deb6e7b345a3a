//! What every part of a running router shares.
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use http::HeaderValue;
use r3router_core::error::Error;
use r3router_core::topology::Role;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::admit::Gate;
use crate::agents::Agents;
use crate::allow::Allow;
use crate::attempts::RetryBudget;
use crate::auth::bearer;
use crate::check::Findings;
use crate::clock::Clock;
use crate::control::Closed;
use crate::cors::Cors;
use crate::drain::Drain;
use crate::handover::Handover;
use crate::live::Live;
use crate::merge::Shape;
use crate::metrics::Metrics;
use crate::pace::Pace;
use crate::rows::RowWidths;
use crate::settings::Settings;
use crate::sink::Sink;
use crate::store::{Arena, Place, Store};
use crate::tls::{ClientTls, ServerTls};
use crate::trace::Traces;
use crate::worker::Worker;
use crate::workers::Registry;

/// How long a connect to an engine may take: a live host answers within a round trip.
pub const CONNECT: Duration = Duration::from_secs(5);

/// See the module's text.
#[derive(Debug)]
pub struct App {
    /// How the router is set, its limits in the machine's time.
    pub settings: Settings,
    /// The same as it was given, in the fleet's time.
    pub given: Settings,
    /// What is wrong with the fleet.
    pub findings: Findings,
    /// Its clock.
    pub clock: Clock,
    /// The admission.
    pub gate: Arc<Gate>,
    /// The engines.
    pub registry: Registry,
    /// What control calls have closed the admission for.
    pub closed: parking_lot::Mutex<Closed>,
    /// The edge's counters.
    pub metrics: Metrics,
    /// R3 rows that wait for their other half.
    pub arena: Arena,
    /// R3 rows that clients hold references to.
    pub store: Store,
    /// Who may be a worker.
    pub allow: Arc<Allow>,
    /// Agents on engines' hosts.
    pub agents: Arc<Agents>,
    /// Puts rows into another store.
    pub sink: Option<Sink>,
    /// Boot id of this machine, "" when it has none.
    pub host: Arc<str>,
    /// Requests in work, by the ids that clients abort them by.
    pub live: Live,
    /// R3 row widths learned from replies.
    pub rows: RowWidths,
    /// Places under `--max-concurrent-requests`.
    pub slots: Option<Arc<Semaphore>>,
    /// The pace of `--rate-limit-tokens-per-second`.
    pub pace: Option<Pace>,
    /// Which pages may call from a browser.
    pub cors: Cors,
    /// Attempts beyond the first that may still be made.
    pub retries: RetryBudget,
    /// Whether the router takes new work.
    pub drain: Drain,
    /// Whether another router has taken over.
    pub handover: Handover,
    /// Takes the spans of requests, with `--enable-trace`.
    pub traces: Option<Arc<Traces>>,
    /// TLS of the main port.
    pub tls: Option<Arc<ServerTls>>,
    /// TLS towards engines.
    pub engine_tls: Arc<ClientTls>,
    /// When it started.
    pub started: Instant,
    /// The same, seconds since 1970.
    pub started_unix: f64,
    /// The runtime, for work that outlives the request that causes it.
    pub runtime: Handle,
    /// `Bearer key` that clients must send.
    pub client_key: Option<HeaderValue>,
    /// `Bearer key` that the admin listener wants.
    pub admin_key: Option<HeaderValue>,
    /// `Bearer key` for engines that have none of their own.
    pub worker_key: Option<HeaderValue>,
}

impl App {
    /// A router without workers. Must be called inside a runtime.
    ///
    /// # Errors
    /// `InvalidField` when a key cannot stand in a header, or a certificate cannot be read.
    pub fn new(settings: Settings) -> Result<Arc<Self>, Error> {
        let client_key = bearer(settings.api_key.as_ref(), "--api-key")?;
        let admin_key = bearer(settings.admin_api_key.as_ref(), "--admin-api-key")?;
        let worker_key = bearer(settings.worker_api_key.as_ref(), "--worker-api-key")?;
        let engine_tls = ClientTls::new(&settings)?;
        let clock = Clock::start(settings.time_scale);
        let admission = settings.admission_config(rand::random());
        let given = settings.clone();
        let settings = settings.in_machine_time();
        let gate = Gate::new(admission, clock);
        let arena = Arena::new(settings.r3_arena_bytes);
        let place = Place {
            root: settings.r3_store_dir.clone().into(),
            spill: settings.r3_spill_dir.clone().map(Into::into),
            keep: settings.r3_ref_expiry_secs,
        };
        let told = Arc::downgrade(&gate);
        let store = Store::new(&arena, place, move |bytes| {
            if let Some(gate) = told.upgrade() {
                gate.arena_kept(bytes);
            }
        });
        let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let allow = Arc::new(Allow::new(&settings.worker_allow));
        let metrics = Metrics::new(&settings.prometheus_duration_buckets);
        let traces = Traces::start(&settings, &metrics.spans, &engine_tls)?;
        Ok(Arc::new(Self {
            allow: Arc::clone(&allow),
            clock,
            gate,
            store,
            agents: Arc::new(Agents::new(
                settings.upstream_idle_secs,
                Arc::clone(&allow),
                worker_key.clone(),
                Some(Arc::clone(&engine_tls)),
            )),
            tls: ServerTls::new(&settings)?,
            sink: settings
                .r3_sink
                .as_deref()
                .map(|url| Sink::new(url, settings.upstream_idle_secs, &engine_tls))
                .transpose()?,
            engine_tls,
            host: Arc::from(host.trim()),
            registry: Registry::default(),
            closed: parking_lot::Mutex::default(),
            metrics,
            traces,
            arena,
            live: Live::default(),
            rows: RowWidths::new(
                settings.r3_layers.zip(settings.r3_top_k).and_then(|(l, k)| l.checked_mul(k)),
                settings.r3_experts,
            ),
            slots: settings.max_concurrent_requests.0.map(|n| Arc::new(Semaphore::new(n as usize))),
            pace: settings.rate_limit_tokens_per_second.map(|rate| {
                let burst = settings.max_concurrent_requests.0.unwrap_or(rate);
                // The clock of an emulated fleet runs faster by its scale.
                Pace::new(f64::from(rate) * settings.time_scale, burst, Instant::now())
            }),
            cors: Cors::new(&settings.cors_allowed_origins),
            retries: RetryBudget::default(),
            drain: Drain::default(),
            handover: Handover::default(),
            started: Instant::now(),
            started_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            runtime: Handle::current(),
            client_key,
            admin_key,
            worker_key,
            given,
            findings: Findings::default(),
            settings,
        }))
    }

    /// R3 bytes of the fleet that so many on the wire stand for: the same unless it is an emulated one with a scale.
    pub fn fleet_bytes(&self, wire: u64) -> u64 {
        (wire as f64 * self.clock.scale()) as u64
    }

    /// The roles that a request needs an engine of.
    pub fn roles(&self) -> &'static [Role] {
        if self.settings.pd_disaggregation { &[Role::Prefill, Role::Decode] } else { &[Role::Regular] }
    }

    /// What is known of the model's routing.
    pub fn shape(&self) -> Shape {
        let Settings { r3_layers: layers, r3_top_k: top_k, r3_experts: experts, .. } = self.settings;
        Shape { layers, top_k, experts }
    }

    /// What the main port speaks.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// A connect to this worker failed: it is out of choice at once, and its keeper looks whether it lives.
    pub fn suspect(&self, worker: &Worker) {
        self.gate.remove_worker(worker.id);
        worker.suspect.notify_one();
    }
}
