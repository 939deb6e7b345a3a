//! The live table: every rank as admission sees it, with the state of its worker, and the queue, the arena and the counters around them.
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use r3router_core::admission::RankView;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::workers::{Entry, Phase, State, role_name};

/// Fields of a rank, for the reference page; a test compares them with what is sent.
pub(super) const FIELDS: [(&str, &str); 28] = [
    ("worker", "Id of its worker."),
    ("url", "Address of its worker, as registered."),
    ("rank", "The rank; `null` while the engine has not told its ranks."),
    ("role", "`prefill`, `decode` or `regular`."),
    (
        "state",
        "`open`, `full` (a bound is reached), `closed` (stale, paused, retracted), `ejected`, `unhealthy`, `draining`, `drained`; of a worker \
               that is not there `pending`, `down` or `failed`.",
    ),
    ("why", "What closes it, as in `r3router_rank_closed`, or what its worker last met; empty when it is open."),
    ("running", "Requests that decode there, by the engine's last report."),
    ("waiting", "Requests that wait there, by the engine's last report, whoever sent them."),
    ("in_transfer", "Attempts of this router whose KV is not delivered."),
    ("open", "Attempts of this router that are open on it."),
    ("foreign", "Load on it that is not this router's."),
    ("window", "Most transfers in flight, computed; `null` on prefill."),
    ("rows", "Request rows."),
    ("rows_free", "Free ones."),
    ("mamba", "Requests that its state slots hold; `null` for models without state."),
    ("mamba_free", "Requests that the free ones admit."),
    ("kv", "KV pool, tokens."),
    ("kv_free", "Free tokens."),
    ("uncached", "Prefill: tokens that are queued and not cached."),
    ("tau_s", "Decode: seconds from binding to delivery without queueing."),
    ("rate", "Completions a second that the window uses; prefill: tokens a second."),
    ("r3_bytes", "Routing payloads about to leave its engine, bytes of text."),
    ("breaker", "Of its worker: `closed`, `open` or `half_open`."),
    ("drained", "Whether a person took it out of choice."),
    ("report_age_s", "Age of the engine's last report."),
    ("legs_open", "Legs open on its worker."),
    ("version", "SGLang release of its worker."),
    ("since_s", "Seconds since its worker entered its state."),
];

/// The whole table.
pub(super) fn table(app: &Arc<App>) -> Value {
    let snapshot = app.gate.snapshot();
    let mut by_url: HashMap<Arc<str>, Vec<&RankView>> = HashMap::new();
    for rank in &snapshot.ranks {
        by_url.entry(Arc::clone(&rank.url)).or_default().push(rank);
    }
    let mut ranks = Vec::new();
    for entry in app.registry.all() {
        let state = entry.state();
        let views = by_url.get(&entry.registration.shown).filter(|_| state.phase == Phase::Active);
        match views {
            Some(views) => ranks.extend(views.iter().map(|view| one(&entry, &state, view))),
            None => ranks.push(absent(&entry, &state)),
        }
    }
    let decisions: Map<String, Value> = snapshot
        .decisions
        .iter()
        .filter(|(_, n)| *n > 0)
        .map(|(reason, n)| ((*reason).to_owned(), (*n).into()))
        .collect();
    let (errors, warnings) = app.findings.counts();
    let metrics = &app.metrics;
    json!({
        "time": unix(),
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": round(app.started.elapsed().as_secs_f64()),
        "pd": app.settings.pd_disaggregation,
        "paused": app.gate.is_paused(),
        "draining": app.drain.started(),
        "requests": {
            "live": metrics.live(),
            "queued": snapshot.queued,
            "queued_bytes": snapshot.queued_bytes,
            "oldest_s": round(snapshot.oldest),
            "queue_size": app.settings.queue_size,
            "bound": snapshot.decisions.iter().find(|(reason, _)| *reason == "bound").map_or(0, |(_, n)| *n),
        },
        "arena": { "reserved": snapshot.arena_reserved, "used": app.arena.used(), "cap": app.arena.cap() },
        "findings": { "errors": errors, "warnings": warnings },
        "decisions": decisions,
        "ranks": ranks,
    })
}

fn unix() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (since.as_secs_f64() * 1e3).round() / 1e3
}

fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn bounded(value: i64) -> Value {
    if value == i64::MAX { Value::Null } else { value.into() }
}

/// What a person wants to know first, and why.
fn state_of(state: &State, view: &RankView) -> (&'static str, String) {
    if view.drained {
        return (if view.open == 0 { "drained" } else { "draining" }, "a person took it out of choice".to_owned());
    }
    if state.ejected || view.unhealthy {
        return ("unhealthy", state.message.clone());
    }
    let name = match view.closed {
        "" => "open",
        "ejected" => "ejected",
        "stale" | "paused" | "retracted" | "mode" => "closed",
        _ => "full",
    };
    (name, view.closed.to_owned())
}

fn one(entry: &Entry, state: &State, view: &RankView) -> Value {
    let (name, why) = state_of(state, view);
    let prefill = view.role == "prefill";
    let decode_only = |value: Value| if prefill { Value::Null } else { value };
    let worker = state.worker.as_ref();
    json!({
        "worker": entry.id,
        "url": &*entry.registration.shown,
        "rank": view.rank,
        "role": view.role,
        "state": name,
        "why": why,
        "running": view.running,
        "waiting": view.waiting,
        "in_transfer": view.in_transfer,
        "open": view.open,
        "foreign": view.foreign,
        "window": if prefill || view.window >= i32::MAX as u32 { Value::Null } else { view.window.into() },
        "rows": bounded(view.rows),
        "rows_free": bounded(view.rows_free),
        "mamba": bounded(view.mamba),
        "mamba_free": bounded(view.mamba_free),
        "kv": bounded(view.kv),
        "kv_free": bounded(view.kv_free),
        "uncached": if prefill { view.uncached_tokens.into() } else { Value::Null },
        "tau_s": decode_only(round(view.tau).into()),
        "rate": round(view.rate),
        "r3_bytes": view.r3_bytes,
        "breaker": view.breaker,
        "drained": view.drained,
        "report_age_s": if view.report_age < 0.0 { Value::Null } else { round(view.report_age).into() },
        "legs_open": worker.map_or(0, |w| w.open.load(Ordering::Relaxed).max(0)),
        "version": state.found.as_ref().and_then(|f| f.traits.version.as_ref()).map(|v| v.text.to_string()),
        "since_s": round(state.since.elapsed().as_secs_f64()),
    })
}

/// A worker that is not in choice: one line without numbers.
fn absent(entry: &Entry, state: &State) -> Value {
    let mut item: Map<String, Value> = FIELDS.iter().map(|(name, _)| ((*name).to_owned(), Value::Null)).collect();
    for (name, value) in [
        ("worker", Value::from(entry.id.clone())),
        ("url", (&*entry.registration.shown).into()),
        ("role", role_name(entry.registration.role).into()),
        ("state", state.phase.name().into()),
        ("why", state.message.clone().into()),
        ("breaker", "open".into()),
        ("drained", state.drained.all.into()),
        ("since_s", round(state.since.elapsed().as_secs_f64()).into()),
    ] {
        item.insert(name.to_owned(), value);
    }
    item.into()
}

#[cfg(test)]
mod tests {
    use r3router_core::admission::RankView;

    use super::{FIELDS, State, one, state_of};
    use crate::address::Address;
    use crate::workers::{Phase, Registration, Registry};

    fn entry() -> std::sync::Arc<crate::workers::Entry> {
        let registration = Registration {
            address: Address::parse("http://d:1").unwrap(),
            shown: "http://d:1".into(),
            role: r3router_core::topology::Role::Decode,
            bootstrap_port: None,
            key: crate::worker::Key::default(),
            health_checks: true,
            extra: serde_json::Map::new(),
            named: false,
        };
        let (entry, _) = Registry::default().add(registration).unwrap();
        entry.change(|s| s.phase = Phase::Active);
        entry
    }

    #[test]
    fn a_rank_has_the_fields_of_the_page_and_no_number_where_nothing_bounds() {
        let entry = entry();
        let view =
            RankView { mamba: i64::MAX, mamba_free: i64::MAX, window: 16, report_age: -1.0, ..RankView::default() };
        let sent = one(&entry, &entry.state(), &view);
        let mut fields: Vec<&str> = FIELDS.iter().map(|(name, _)| *name).collect();
        fields.sort_unstable();
        assert_eq!(sent.as_object().unwrap().keys().map(String::as_str).collect::<Vec<_>>(), fields);
        assert!(sent["mamba"].is_null() && sent["report_age_s"].is_null());
        assert_eq!(sent["window"], 16);
    }

    #[test]
    fn the_state_says_what_a_person_must_know_first() {
        let entry = entry();
        let state: State = entry.state();
        let of = |view: RankView| state_of(&state, &view).0;
        let closed = |closed| RankView { closed, ..RankView::default() };
        assert_eq!(of(closed("")), "open");
        assert_eq!(of(closed("window")), "full");
        assert_eq!(of(closed("ejected")), "ejected");
        assert_eq!(of(closed("stale")), "closed");
        assert_eq!(of(RankView { drained: true, open: 3, ..closed("draining") }), "draining");
        assert_eq!(of(RankView { drained: true, ..closed("draining") }), "drained");
        assert_eq!(of(RankView { unhealthy: true, ..closed("draining") }), "unhealthy");
    }
}
