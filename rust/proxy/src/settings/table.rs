//! The one declaration of every setting. Add a row here and it exists as flag, variable, TOML key, field and documentation.
//!
//! `peer("…")` marks a flag of sglang-router 0.3.2 and its default there; a test refuses a differing default that the help does not explain.
use std::time::Duration;

use r3router_core::admission::WindowMode;

use super::declare::{Row, Unit, settings};
use super::names::{
    AllowedHost, Assignment, Cap, DiscoverySource, LogLevel, Policy, PrefillWorker, R3Transport, Secret, WorkerUrl,
};
use super::sources::Merge;
use super::value::Value;

const DAY: f64 = 86_400.0;

settings! {
    "Address and workers" => {
        /// Address to listen on.
        host: String = "0.0.0.0".to_owned(); peer("0.0.0.0"),
        /// Port to listen on; 0 takes a free one and prints it.
        port: u16 = 30000; peer("30000"),
        /// Regular (unsplit) engines. More can be added while the router runs, with POST /workers.
        worker_urls: Vec<WorkerUrl> = Vec::new(); peer("[]"); reloads(),
        /// Prefill and decode are separate engines. May start without any; they come with POST /workers.
        pd_disaggregation: bool = false; peer("False"),
        /// A prefill engine and the port of its bootstrap server (`none` or left out: the engine is asked). Repeatable.
        prefill: Vec<PrefillWorker> = Vec::new(); peer("None"); reloads(),
        /// A decode engine. Repeatable.
        decode: Vec<WorkerUrl> = Vec::new(); peer("None"); reloads(),
        /// Without effect: r3router always routes by data-parallel rank.
        dp_aware: bool = false; peer("False"); inert(),
        /// List one worker a rank, as `url@rank`, in `GET /workers`, for tools that expect it. Otherwise one an engine, with its ranks.
        list_ranks: bool = false,
        /// How long an engine may take to come up before it counts as failed. It is still looked at.
        worker_startup_timeout_secs: Duration = Duration::from_secs(1800); unit(Unit::Secs); peer("1800"); range(1.0, DAY),
        /// Longest pause between looks at an engine that is not up yet, and the pause when it has failed: too late, in the wrong mode, without
        /// its key.
        worker_startup_check_interval: Duration = Duration::from_secs(30); unit(Unit::Secs); peer("30"); range(0.01, DAY),
        /// Key sent to engines as `Authorization: Bearer`, when the client's own is not to be passed on.
        worker_api_key: Option<Secret> = None,
        /// Who may be a worker, named here or registered later: hosts, `*.domains`, addresses and networks such as `10.0.0.0/8`. Left out, any
        /// address but link-local ones. Addresses at which clouds hand out credentials never are. Names are looked up at every connect.
        worker_allow: Vec<AllowedHost> = Vec::new(),
    }
    "Discovery in Kubernetes" => {
        /// Find engines by asking the API server. The service account needs a role with list and watch of pods (or of endpoint slices).
        service_discovery: bool = false; peer("False"),
        /// What is listed and watched: pods; or the endpoint slices of Services, which have the labels of their Service, for engines that are no
        /// pods of this cluster or listen on ports of their own. In slices the port named `http`, or the only one, is the engine's, and the one
        /// named `bootstrap` that of its bootstrap server.
        service_discovery_source: DiscoverySource = DiscoverySource::Pods,
        /// Labels, each KEY=VALUE, that a pod of an unsplit engine has, all of them.
        selector: Vec<String> = Vec::new(); peer("{}"),
        /// Labels of pods of prefill engines. Of a `LeaderWorkerSet` only leaders are engines.
        prefill_selector: Vec<String> = Vec::new(); peer("{}"),
        /// Labels of pods of decode engines.
        decode_selector: Vec<String> = Vec::new(); peer("{}"),
        /// Port of engines.
        service_discovery_port: u16 = 80; peer("80"),
        /// Namespace of the engines; `*` is all of them. Left out, the router's own.
        service_discovery_namespace: Option<String> = None; peer("None"),
        /// Annotation of a prefill pod with the port of its bootstrap server; without it, the engine is asked.
        bootstrap_port_annotation: String = "sglang.ai/bootstrap-port".to_owned(),
        /// Longest time until a pod that went unseen is out of choice: all are listed anew so often.
        service_discovery_interval_secs: Duration = Duration::from_secs(30); unit(Unit::Secs); range(1.0, 3600.0),
        /// Folder with the `token`, `ca.crt` and `namespace` of the service account, for one that is mounted elsewhere.
        service_discovery_account_dir: String = "/var/run/secrets/kubernetes.io/serviceaccount".to_owned(),
    }
    "TLS" => {
        /// Certificate of the router with its chain, in PEM: clients then speak HTTPS. Files of this group are read anew when they change. The
        /// port of the metrics stays in the clear.
        tls_cert_path: Option<String> = None; peer("None"),
        /// The private key of that certificate.
        tls_key_path: Option<String> = None; peer("None"),
        /// Authorities of clients, in PEM: with any, only clients that show a certificate of theirs are served.
        tls_client_ca_paths: Vec<String> = Vec::new(),
        /// Authorities of engines whose address begins with `https://`, in PEM. Left out, those that the system trusts.
        ca_cert_paths: Vec<String> = Vec::new(); peer("[]"),
        /// Certificate that the router shows to these engines.
        client_cert_path: Option<String> = None; peer("None"),
        /// The private key of that certificate.
        client_key_path: Option<String> = None; peer("None"),
    }
    "Routing" => {
        /// How a rank is chosen among those that have room: `cache_aware` the one that has the prompt's beginning cached, within balance;
        /// `headroom` the one with the most room; `random`; `round_robin`; `power_of_two` the lighter of two; `bucket` by prompt length; `manual`
        /// the one that a routing key was given first; `consistent_hashing` by a hash of the routing key; `prefix_hash` by one of the prompt's
        /// first 256 tokens. The routing key is the header `X-SMG-Routing-Key`. No policy overrides admission.
        policy: Policy = Policy::CacheAware; peer("cache_aware"),
        /// The same for prefill ranks. Left out, --policy.
        prefill_policy: Option<Policy> = None; peer("None"),
        /// The same for decode ranks. Left out, --policy, but for `cache_aware`, in whose place it is `headroom` then: prompts are cached by
        /// prefill, and decode needs room.
        decode_policy: Option<Policy> = None; peer("None"),
        /// Which rank a new routing key is given under `manual`: the one with the fewest keys of late (`min_group`), with the most room
        /// (`min_load`), or any (`random`). sglang-router's default is random, which leaves ranks with twice the sessions of others.
        assignment_mode: Assignment = Assignment::MinGroup; peer("random"),
        /// A routing key that was not used for so long is forgotten under `manual`.
        max_idle_secs: Duration = Duration::from_secs(14_400); unit(Unit::Secs); peer("14400"); range(1.0, 365.0 * DAY),
        /// How long `bucket` counts prompt lengths before it draws its limits anew.
        bucket_adjust_interval_secs: Duration = Duration::from_secs(5); unit(Unit::Secs); peer("5"); range(1.0, DAY),
        /// Memory for known prefixes, a hard limit that holds at every insert. In sglang-router it counts characters of each tree and is
        /// looked at between evictions only.
        max_tree_size: u64 = 64 << 20; unit(Unit::Bytes); peer("67108864"); range(0.0, 1e12),
    }
    "Requests" => {
        /// Largest request body.
        max_payload_size: u64 = 512 << 20; unit(Unit::Bytes); peer("536870912"); range(1024.0, f64::INFINITY),
        /// Longest life of a request, from its arrival to its last byte.
        request_timeout_secs: Duration = Duration::from_secs(1800); unit(Unit::Secs); peer("1800"); range(0.01, 30.0 * DAY),
        /// How long an engine may take to answer what is sent to every engine: pause, weights, adapters, sessions, flush.
        control_timeout_secs: Duration = Duration::from_secs(1800); unit(Unit::Secs); range(0.01, DAY),
        /// How long a client may take to send a request's head. It gets 408.
        header_read_timeout_secs: Duration = Duration::from_secs(30); unit(Unit::Secs); range(0.01, DAY),
        /// How long a client may send nothing of a body that it has begun. It gets 408. A trainer whose event loop is blocked sends nothing for a
        /// while, so this is minutes.
        body_read_timeout_secs: Duration = Duration::from_secs(120); unit(Unit::Secs); range(0.01, DAY),
        /// How long a client's connection may be idle between requests. Longer than clients keep theirs, so that no request crosses the close.
        idle_connection_timeout_secs: Duration = Duration::from_secs(150); unit(Unit::Secs); range(0.01, DAY),
        /// How long open requests may go on after SIGTERM.
        shutdown_grace_period_secs: Duration = Duration::from_secs(180); unit(Unit::Secs); peer("180"); range(0.0, DAY),
        /// Path of a UNIX socket by which a router that is started with the same path and port takes over from this one: it gets the listening
        /// sockets, waits until it knows the load of every engine, answers for the references that clients hold, and this one ends when its
        /// requests have. Left out, the port is simply bound.
        handover_socket: Option<String> = None,
        /// Headers that are read for a request's id, in order. Empty: x-request-id, x-correlation-id, x-trace-id, request-id.
        request_id_headers: Vec<String> = Vec::new(); peer("None"),
        /// Origins whose pages may call the router from a browser, such as `https://a.example`; left out or `*`, all may.
        cors_allowed_origins: Vec<String> = Vec::new(); peer("[]"),
        /// Key that clients must send as `Authorization: Bearer`.
        api_key: Option<Secret> = None; peer("None"),
    }
    "Admission" => {
        /// Bind a request to a pair only when both ranks have room for it. Off is the baseline for comparisons, a plain PD router as people
        /// ran them: every request is sent to both engines at once, a random room decides the prefill rank and the engine the decode rank,
        /// both replies are awaited whatever becomes of either, nothing is aborted, no limit but `request_timeout_secs` holds, and
        /// `start_len_rewrite` has no effect. Engines time out under load.
        admission: bool = true,
        /// Transfers in flight per decode rank: computed from measured rates, a fixed number, or unbounded.
        window: WindowMode = WindowMode::Computed,
        /// Most requests that wait in the router. sglang-router's default is 100; a rollout batch must wait here, where no engine clock runs, so ours holds one whole.
        queue_size: usize = 100_000; peer("100"); range(0.0, 1e8),
        /// Most bytes of request bodies that wait in the router.
        queue_max_bytes: u64 = 8 << 30; unit(Unit::Bytes); range(1024.0, f64::INFINITY),
        /// Longest wait in the router before a request gets 429. sglang-router's default is 60 s; a rollout may wait for minutes and that is no fault, so ours is 30 minutes.
        queue_timeout_secs: Duration = Duration::from_secs(1800); unit(Unit::Secs); peer("60"); range(0.0, 30.0 * DAY),
        /// Most requests that are in work at once, whatever the ranks could take; -1 leaves it to admission.
        max_concurrent_requests: Cap = Cap(None); peer("-1"); range(1.0, 1e9),
        /// Requests that may start in a second, more of them wait; in a burst up to --max-concurrent-requests, else one second's worth. Left out,
        /// no limit. In sglang-router a request that ends gives its token back, so that nothing is limited there.
        rate_limit_tokens_per_second: Option<u32> = None; peer("None"); range(1.0, 1e9),
        /// Part of each KV pool that is kept free.
        kv_margin: f64 = 0.05; range(0.0, 0.9),
        /// Room for growth of a request that names no `max_new_tokens`, in tokens.
        default_max_new_tokens: u32 = 4096; range(1.0, 1e7),
        /// Mamba state slots that one request takes. Left out: from the engine's version and flags.
        mamba_slots_per_request: Option<u32> = None; range(1.0, 64.0),
        /// Pause between polls of an engine's load.
        poll_interval_ms: Duration = Duration::from_millis(200); unit(Unit::Millis); range(5.0, 60_000.0),
        /// `SGLANG_DISAGGREGATION_WAITING_TIMEOUT` of the engines: a request may wait a quarter of it on a prefill rank, and routing payloads may
        /// take a tenth of it to leave an engine. SGLang tells it nowhere. Left out: what the engine's `/server_info` says, if it does (emulated
        /// ones do), else 300 s.
        engine_waiting_timeout_secs: Option<Duration> = None; unit(Unit::Secs); range(1.0, DAY),
        /// How long prefill may take to deliver KV after a request was sent. Left out: 30 s more than `--engine-waiting-timeout-secs` (330 s
        /// without it), so that the engine's own message comes first.
        delivery_timeout_secs: Option<Duration> = None; unit(Unit::Secs); range(0.01, DAY),
    }
    "Routing payloads (R3)" => {
        /// Memory for routing payloads that wait for their other half, in all.
        r3_arena_bytes: u64 = 8 << 30; unit(Unit::Bytes); range(1_048_576.0, f64::INFINITY),
        /// How payloads reach a client that does not say: inline in the reply, or as a reference.
        r3_transport: R3Transport = R3Transport::Inline,
        /// Directory on tmpfs for payloads that clients hold references to. The router makes its own in it and removes it at its end.
        r3_store_dir: String = "/dev/shm".to_owned(),
        /// Directory for payloads that the arena has no room for. Left out, R3 requests wait until references are let go.
        r3_spill_dir: Option<String> = None,
        /// How long a referenced payload is kept for its client.
        r3_ref_expiry_secs: Duration = Duration::from_secs(600); unit(Unit::Secs); range(0.01, DAY),
        /// Address under which clients fetch references, `http://HOST:PORT`. Left out: the one that the client used for its request.
        r3_public_url: Option<String> = None,
        /// Address of `r3router sink`, which puts rows into another store. Requests with `return_outputs_via_store` that do not stream and
        /// do not say `x-r3-transport: ref` then get that store's handle.
        r3_sink: Option<String> = None,
        /// Layers of the model (all of them, dense ones too), for the shape in references. Left out, rows are one layer wide.
        r3_layers: Option<u32> = None; range(1.0, 65_535.0),
        /// Experts that each token is routed to, per layer.
        r3_top_k: Option<u32> = None; range(1.0, 65_535.0),
        /// Experts of the model: up to 256 make references uint8, up to 65,536 uint16. Left out, they are int32.
        r3_experts: Option<u32> = None; range(1.0, 2e9),
        /// Ask decode engines for routing rows from near the prompt's end only, since prefill has the rest.
        start_len_rewrite: bool = true,
    }
    "Retries" => {
        /// Attempts of one request in all, the first included.
        retry_max_retries: u32 = 5; peer("5"); range(1.0, 1000.0),
        /// Pause before the second attempt.
        retry_initial_backoff_ms: Duration = Duration::from_millis(50); unit(Unit::Millis); peer("50"); range(0.0, 1e8),
        /// Longest pause between attempts.
        retry_max_backoff_ms: Duration = Duration::from_secs(30); unit(Unit::Millis); peer("30000"); range(0.0, 1e8),
        /// Each pause is this many times the one before.
        retry_backoff_multiplier: f64 = 1.5; peer("1.5"); range(1.0, 100.0),
        /// Part of a pause that is random.
        retry_jitter_factor: f64 = 0.2; peer("0.2"); range(0.0, 1.0),
        /// One attempt only.
        disable_retries: bool = false; peer("False"),
    }
    "Circuit breaker" => {
        /// Failures in a row that take a worker out of choice.
        cb_failure_threshold: u32 = 10; peer("10"); range(1.0, 1e6),
        /// Without effect: one good attempt takes a worker back in.
        cb_success_threshold: u32 = 3; peer("3"); range(1.0, 1e6); inert(),
        /// How long a worker stays out before it is tried again.
        cb_timeout_duration_secs: Duration = Duration::from_secs(60); unit(Unit::Secs); peer("60"); range(0.01, DAY),
        /// Without effect: failures in a row are counted, however long that takes, and one good attempt ends the row.
        cb_window_duration_secs: Duration = Duration::from_secs(120); unit(Unit::Secs); peer("120"); range(0.01, DAY); inert(),
        /// No breaker.
        disable_circuit_breaker: bool = false; peer("False"),
    }
    "Health checks" => {
        /// Failed checks in a row that mark a worker unhealthy.
        health_failure_threshold: u32 = 3; peer("3"); range(1.0, 1e6),
        /// Good checks in a row that mark it healthy.
        health_success_threshold: u32 = 2; peer("2"); range(1.0, 1e6),
        /// How long a check may take.
        health_check_timeout_secs: Duration = Duration::from_secs(5); unit(Unit::Secs); peer("5"); range(0.01, DAY),
        /// Pause between checks.
        health_check_interval_secs: Duration = Duration::from_secs(60); unit(Unit::Secs); peer("60"); range(0.01, DAY),
        /// Path that is asked.
        health_check_endpoint: String = "/health".to_owned(); peer("/health"),
        /// No checks; load polls and requests alone decide.
        disable_health_check: bool = false; peer("False"),
    }
    "Logs and metrics" => {
        /// How much is logged.
        log_level: LogLevel = LogLevel::Info; peer("info"); reloads(),
        /// Log lines as JSON objects.
        log_json: bool = false,
        /// Folder for log files; left out, logs go to standard error.
        log_dir: Option<String> = None; peer("None"),
        /// Address of the Prometheus port.
        prometheus_host: String = "0.0.0.0".to_owned(); peer("0.0.0.0"),
        /// Upper bounds of the time histograms, in seconds, ascending. Left out: 16 of them from 1 ms to 20 minutes.
        prometheus_duration_buckets: Vec<f64> = Vec::new(); peer("None"),
        /// Port of the Prometheus metrics; they are served on the router's own port too. 0 leaves only that.
        prometheus_port: u16 = 29000; peer("29000"),
    }
    "Traces" => {
        /// Send traces to an OpenTelemetry collector: a span for each request under the client's `traceparent`; generation has its wait,
        /// attempts and legs below it, and engines get the leg's. Off, `traceparent` passes as it came.
        enable_trace: bool = false; peer("False"),
        /// The collector. `HOST:PORT` is spoken to by OTLP over gRPC; one with a path, or with port 4318, by OTLP over HTTP. `https://` is TLS
        /// with the files of --ca-cert-paths and --client-cert-path. Read with --enable-trace only.
        otlp_traces_endpoint: String = "localhost:4317".to_owned(); peer("localhost:4317"),
        /// Part of the traces that begin here that is recorded. A client with a `traceparent` decides itself. Read with --enable-trace only.
        trace_ratio: f64 = 1.0; range(0.0, 1.0),
    }
    "Admin listener" => {
        /// Address of the admin listener: status page, live table, drain, findings, worker API and control, metrics. Beyond loopback it needs
        /// `--admin-api-key`.
        admin_host: String = "127.0.0.1".to_owned(),
        /// Its port; 0 is no admin listener.
        admin_port: u16 = 29001,
        /// Key that it wants as `Authorization: Bearer`.
        admin_api_key: Option<Secret> = None,
        /// Answer what changes the fleet (registering and removing workers, pause, weights, flush) on the main port too, as trainers need it.
        /// Off, only the admin listener does.
        control_on_main_port: bool = true,
    }
    "Process" => {
        /// For emulated fleets only (`r3router emulate --scale N`, whose clocks run N times as fast and whose sizes are N times smaller): the
        /// same N. Rates, windows, waits, load polls and the limits of requests then follow the fleet's clock.
        time_scale: f64 = 1.0; range(1.0, 1000.0),
        /// Threads that move bytes; 0 is one per core.
        threads: u32 = 0; range(0.0, 1024.0),
        /// How long an idle connection to an engine is kept. Below the 5 s after which engines close it.
        upstream_idle_secs: Duration = Duration::from_secs(3); unit(Unit::Secs); range(0.0, 3600.0),
    }
}
