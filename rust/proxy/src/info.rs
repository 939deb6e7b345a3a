//! Routes that answer with engines' own data: health, model and server info, loads, metrics.
use std::fmt::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Uri, header};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::Role;
use serde_json::{Value, json};

use crate::app::App;
use crate::ask::{Answer, ask};
use crate::body::ReplyBody;
use crate::control::broadcast;
use crate::errors::{Reply, bytes_reply, json_reply};
use crate::metrics::{LegResult, Text};
use crate::upstream::Call;
use crate::worker::Worker;
use crate::workers::role_name;

/// GET routes that one engine answers.
pub const PROXIED: [&str; 8] = [
    "/get_model_info",
    "/model_info",
    "/server_info",
    "/get_server_info",
    "/v1/models",
    "/get_weights_by_name",
    "/get_weight_version",
    "/weight_version",
];

/// No worker that could answer.
pub(crate) fn no_workers(app: &App, what: &str) -> Error {
    let error = Error::new(Kind::NoWorkers, Source::Router, format!("no {what} worker is active"))
        .advise("register one with POST /workers; GET /workers shows the state of each")
        .retry_after(std::time::Duration::from_secs(1));
    app.registry.explain(app.roles(), error)
}

/// The least busy active engine; prefill before decode, as the SGLang router asks.
fn any_engine(app: &App) -> Result<Arc<Worker>, Error> {
    let busy = |w: &Arc<Worker>| w.open.load(std::sync::atomic::Ordering::Relaxed);
    app.registry
        .active()
        .into_iter()
        .min_by_key(|w| (w.role == Role::Decode, busy(w)))
        .ok_or_else(|| no_workers(app, "any"))
}

/// Whether the router can serve: a worker of every role that it needs.
pub fn readiness(app: &App) -> Reply {
    let roles: &[Role] = if app.settings.pd_disaggregation { &[Role::Prefill, Role::Decode] } else { &[Role::Regular] };
    let mut detail = serde_json::Map::new();
    let mut healthy = 0;
    let mut missing = Vec::new();
    for role in roles {
        let count = app.registry.healthy(*role);
        healthy += count;
        detail.insert(role_name(*role).to_owned(), count.into());
        if count == 0 {
            missing.push(role_name(*role));
        }
    }
    let total = app.registry.all().len();
    let draining = app.drain.started();
    if missing.is_empty() && !draining {
        let body = json!({ "status": "ready", "healthy_workers": healthy, "total_workers": total, "healthy": detail });
        return json_reply(200, &body);
    }
    let reason = if draining { "draining".to_owned() } else { "insufficient healthy workers".to_owned() };
    let body = json!({
        "status": "not ready", "reason": reason, "missing": missing,
        "healthy_workers": healthy, "total_workers": total, "healthy": detail,
    });
    json_reply(503, &body)
}

/// Asks one engine of every role whether it generates.
///
/// # Errors
/// `NoWorkers`, or the first engine's failure.
pub async fn health_generate(app: &Arc<App>) -> Result<Reply, Error> {
    let roles: &[Role] = if app.settings.pd_disaggregation { &[Role::Prefill, Role::Decode] } else { &[Role::Regular] };
    let workers = app.registry.active();
    let mut last = None;
    for role in roles {
        let Some(worker) = workers.iter().find(|w| w.role == *role) else {
            return Err(no_workers(app, role_name(*role)));
        };
        let call = Call::get(Uri::from_static("/health_generate")).with_key(worker.key.get().as_ref());
        let answer = asked(app, worker, &call).await?;
        if !answer.ok() {
            return Ok(relayed(answer));
        }
        last = Some(answer);
    }
    Ok(last.map_or_else(|| bytes_reply(200, "text/plain; charset=utf-8", Bytes::from_static(b"OK")), relayed))
}

async fn asked(app: &App, worker: &Worker, call: &Call) -> Result<Answer, Error> {
    ask(&worker.pool, call, app.settings.request_timeout_secs).await.map_err(|error| {
        let source = if worker.role == Role::Prefill { Source::Prefill } else { Source::Decode };
        Error::new(Kind::Connect, source, error.to_string()).at_worker(&*worker.url)
    })
}

/// An engine's answer as the client's reply.
pub(crate) fn relayed(answer: Answer) -> Reply {
    let mut reply = http::Response::new(ReplyBody::from(answer.body));
    *reply.status_mut() = http::StatusCode::from_u16(answer.status).unwrap_or(http::StatusCode::BAD_GATEWAY);
    if let Some(content_type) = answer.content_type {
        reply.headers_mut().insert(header::CONTENT_TYPE, content_type);
    }
    reply
}

/// Sends a call to one engine and relays its answer.
///
/// # Errors
/// `NoWorkers`, `Connect`.
pub async fn proxied(
    app: &Arc<App>,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Reply, Error> {
    let worker = any_engine(app)?;
    let mut call = Call {
        method: method.clone(),
        uri: uri.clone(),
        headers: crate::context::forwarded(headers),
        pieces: Arc::from([body]),
    };
    if method == Method::GET {
        call.headers.remove(header::CONTENT_TYPE);
    }
    let call = call.with_key(worker.key.get().as_ref());
    Ok(relayed(asked(app, &worker, &call).await?))
}

/// Every engine's `/v1/loads`, with its address and role.
pub async fn loads(app: &Arc<App>, uri: &Uri) -> Reply {
    let told = broadcast(app, &Method::GET, uri, &HeaderMap::new(), &Bytes::new()).await;
    let mut all = Vec::new();
    let workers: Vec<Value> = told
        .iter()
        .map(|t| {
            let answer = t.answer.as_ref().ok().filter(|a| a.ok()).and_then(Answer::json).unwrap_or(Value::Null);
            for load in answer.get("loads").and_then(Value::as_array).into_iter().flatten() {
                let mut load = load.clone();
                if let Some(object) = load.as_object_mut() {
                    object.insert("worker".into(), (&*t.worker.url).into());
                    object.insert("worker_type".into(), role_name(t.worker.role).into());
                }
                all.push(load);
            }
            json!({ "worker": &*t.worker.url, "worker_type": role_name(t.worker.role), "answer": answer })
        })
        .collect();
    json_reply(200, &json!({ "loads": all, "workers": workers }))
}

/// Tokens in use per engine, -1 where it is not known.
pub async fn get_loads(app: &Arc<App>) -> Reply {
    let told = broadcast(app, &Method::GET, &Uri::from_static("/v1/loads"), &HeaderMap::new(), &Bytes::new()).await;
    let workers: Vec<Value> = told
        .iter()
        .map(|t| {
            let answer = t.answer.as_ref().ok().filter(|a| a.ok()).and_then(Answer::json);
            let tokens = answer.as_ref().and_then(|a| a.get("loads")?.as_array()).map(|loads| {
                let used =
                    |l: &Value| l.get("num_total_tokens").or_else(|| l.get("num_used_tokens")).and_then(Value::as_f64);
                loads.iter().filter_map(used).sum::<f64>() as i64
            });
            json!({ "worker": &*t.worker.url, "load": tokens.unwrap_or(-1) })
        })
        .collect();
    json_reply(200, &json!({ "workers": workers }))
}

/// The engines' own metrics, each sample labelled with its engine's address.
pub async fn engine_metrics(app: &Arc<App>) -> Reply {
    let told = broadcast(app, &Method::GET, &Uri::from_static("/metrics"), &HeaderMap::new(), &Bytes::new()).await;
    let mut text = String::new();
    let mut described = std::collections::HashSet::new();
    for t in &told {
        let Some(answer) = t.answer.as_ref().ok().filter(|a| a.ok()) else { continue };
        let Ok(lines) = std::str::from_utf8(&answer.body) else { continue };
        for line in lines.lines().filter(|l| !l.is_empty()) {
            if line.starts_with('#') {
                let line = line.replace(':', "_");
                if described.insert(line.clone()) {
                    let _ = writeln!(text, "{line}");
                }
                continue;
            }
            let name_end = line.find(['{', ' ']).unwrap_or(line.len());
            let (name, rest) = line.split_at(name_end);
            let name = name.replace(':', "_");
            let label = format!("worker_addr=\"{}\"", t.worker.url);
            let _ = match rest.strip_prefix('{') {
                Some(labels) => writeln!(text, "{name}{{{label},{labels}"),
                None => writeln!(text, "{name}{{{label}}}{rest}"),
            };
        }
    }
    bytes_reply(200, METRICS_TYPE, text.into())
}

const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The router's own metrics.
pub fn metrics(app: &App) -> Reply {
    let mut reply = bytes_reply(200, METRICS_TYPE, metrics_text(app).into());
    reply.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    reply
}

/// The router's own metrics in the Prometheus exposition format.
pub fn metrics_text(app: &App) -> String {
    let mut text = Text::default();
    app.metrics.write(&mut text);
    text.single(
        "r3router_start_time_seconds",
        "When the router started, seconds since 1970; a restart is a change.",
        "gauge",
        app.started_unix,
    );
    write_admission(app, &mut text);
    write_workers(app, &mut text);
    text.finish()
}

fn write_admission(app: &App, text: &mut Text) {
    let snapshot = app.gate.snapshot();
    text.head("r3router_decisions_total", "Bindings, and why requests were held or refused.", "counter");
    for (reason, count) in &snapshot.decisions {
        text.line("r3router_decisions_total", &[("reason", reason)], *count as f64);
    }
    text.single("r3router_queued_requests", "Requests that wait.", "gauge", snapshot.queued as f64);
    text.single("r3router_queued_bytes", "Body bytes that wait.", "gauge", snapshot.queued_bytes as f64);
    text.single("r3router_queue_oldest_seconds", "Age of the oldest waiting request.", "gauge", snapshot.oldest);
    text.single(
        "r3router_paused",
        "1 while rollout control holds the gate closed.",
        "gauge",
        f64::from(u8::from(app.gate.is_paused())),
    );
    let arena = [
        ("reserved", snapshot.arena_reserved as f64),
        ("used", app.arena.used() as f64),
        ("peak", app.arena.peak() as f64),
        ("cap", app.arena.cap() as f64),
    ];
    text.head(
        "r3router_r3_arena_bytes",
        "The arena for R3 rows: reserved by admission, held, most ever held, limit.",
        "gauge",
    );
    for (what, value) in arena {
        text.line("r3router_r3_arena_bytes", &[("what", what)], value);
    }
    let (objects, kept, spilled) = app.store.usage();
    text.single("r3router_r3_objects", "Objects that clients may hold references to.", "gauge", objects as f64);
    text.head("r3router_r3_object_bytes", "Bytes of those objects, by where they lie.", "gauge");
    for (place, bytes) in [("arena", kept), ("spill", spilled)] {
        text.line("r3router_r3_object_bytes", &[("place", place)], bytes as f64);
    }
    let ends = app.store.ends();
    let by_end = [
        ("made", &ends.made),
        ("deleted", &ends.deleted),
        ("expired_read", &ends.expired_read),
        ("expired_unread", &ends.expired_unread),
        ("unsent", &ends.unsent),
        ("spilled", &ends.spilled),
        ("recovered", &ends.recovered),
        ("inherited", &ends.inherited),
        ("lost", &ends.lost),
    ];
    text.head(
        "r3router_r3_objects_total",
        "Objects made, and how they ended: deleted by the client, expired read or unread, their reply unsent. Spilled: written to disk. \
         Recovered: directories of dead routers removed at start. Inherited: made by a router that this one took over from. Lost: their files \
         were removed by somebody else, in a restart by overlap the other router.",
        "counter",
    );
    for (event, count) in by_end {
        let count = count.load(std::sync::atomic::Ordering::Relaxed) as f64;
        text.line("r3router_r3_objects_total", &[("event", event)], count);
    }
    text.head(
        "r3router_r3_sink_total",
        "References that went on to the sink's store, and those that it did not take.",
        "counter",
    );
    for outcome in ["put", "failed"] {
        let count = app.sink.as_ref().map_or(0, |sink| {
            let count = if outcome == "put" { &sink.put } else { &sink.failed };
            count.load(std::sync::atomic::Ordering::Relaxed)
        });
        text.line("r3router_r3_sink_total", &[("outcome", outcome)], count as f64);
    }
    let whole = |n: i64| if n == i64::MAX { f64::INFINITY } else { n as f64 };
    type Read = fn(&r3router_core::admission::RankView, &dyn Fn(i64) -> f64) -> f64;
    let gauges: [(&str, &str, Read); 13] = [
        ("r3router_rank_in_transfer", "Attempts whose KV is not delivered yet.", |r, _| f64::from(r.in_transfer)),
        ("r3router_rank_open", "Attempts open on the rank.", |r, _| f64::from(r.open)),
        ("r3router_rank_foreign", "Load on the rank that is not this router's.", |r, _| f64::from(r.foreign)),
        ("r3router_rank_window", "Computed bound on transfers in flight.", |r, _| f64::from(r.window)),
        ("r3router_rank_rate", "Completions per second that the window uses.", |r, _| r.rate),
        ("r3router_rank_tau_seconds", "Unqueued time from binding to delivery.", |r, _| r.tau),
        ("r3router_rank_rows_free", "Free request rows.", |r, w| w(r.rows_free)),
        ("r3router_rank_metadata_free", "Free metadata slots.", |r, w| w(r.metadata_free)),
        ("r3router_rank_mamba_free", "Requests that free mamba slots admit.", |r, w| w(r.mamba_free)),
        ("r3router_rank_kv_free_tokens", "Free KV tokens.", |r, w| w(r.kv_free)),
        ("r3router_rank_uncached_tokens", "Uncached tokens queued on a prefill rank.", |r, _| r.uncached_tokens as f64),
        ("r3router_rank_r3_bytes", "R3 text about to leave the engine.", |r, _| r.r3_bytes as f64),
        ("r3router_rank_report_age_seconds", "Age of the last load report, -1 without one.", |r, _| r.report_age),
    ];
    for (name, help, read) in gauges {
        text.head(name, help, "gauge");
        for rank in &snapshot.ranks {
            let number = rank.rank.to_string();
            text.line(name, &[("worker", &rank.url), ("rank", &number), ("role", rank.role)], read(rank, &whole));
        }
    }
    text.head("r3router_rank_closed", "1 while the rank takes nothing, with the reason.", "gauge");
    for rank in &snapshot.ranks {
        let number = rank.rank.to_string();
        let labels = [("worker", &*rank.url), ("rank", &number), ("role", rank.role), ("reason", rank.closed)];
        text.line("r3router_rank_closed", &labels, f64::from(u8::from(!rank.closed.is_empty())));
    }
}

fn write_workers(app: &App, text: &mut Text) {
    let entries = app.registry.all();
    text.head("r3router_worker_up", "1 while the worker is active and healthy.", "gauge");
    for entry in &entries {
        let labels = [("worker", &*entry.registration.shown), ("role", role_name(entry.registration.role))];
        text.line("r3router_worker_up", &labels, f64::from(u8::from(entry.healthy())));
    }
    let workers = app.registry.active();
    text.head("r3router_legs_total", "Legs that ended on the worker, by how.", "counter");
    for worker in &workers {
        for (at, result) in LegResult::NAMES.iter().enumerate() {
            let labels = [("worker", &*worker.url), ("role", role_name(worker.role)), ("result", result)];
            text.line("r3router_legs_total", &labels, worker.legs.get(at) as f64);
        }
    }
    text.head("r3router_legs_open", "Legs open on the worker.", "gauge");
    for worker in &workers {
        let open = worker.open.load(std::sync::atomic::Ordering::Relaxed) as f64;
        text.line("r3router_legs_open", &[("worker", &worker.url), ("role", role_name(worker.role))], open);
    }
    type Read = fn(&crate::upstream::PoolStats) -> &std::sync::atomic::AtomicU64;
    let counters: [(&str, &str, Read); 3] = [
        ("r3router_worker_connections_total", "Connections opened to the worker.", |s| &s.opened),
        ("r3router_worker_resent_total", "Calls sent again because a reused connection had died.", |s| &s.resent),
        ("r3router_worker_received_bytes_total", "Bytes of replies read from the worker.", |s| &s.received),
    ];
    for (name, help, read) in counters {
        text.head(name, help, "counter");
        for worker in &workers {
            let value = read(&worker.pool.stats).load(std::sync::atomic::Ordering::Relaxed) as f64;
            text.line(name, &[("worker", &worker.url), ("role", role_name(worker.role))], value);
        }
    }
}
