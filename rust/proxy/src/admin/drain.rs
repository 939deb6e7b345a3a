//! Drain and undrain of a worker or of one rank. A drained rank gets no new requests; what runs on it goes on. It holds over restarts of the
//! engine, until it is taken back or the worker is removed.
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use r3router_core::error::{Error, Kind, Source};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::errors::{Reply, json_reply, not_json};
use crate::workers::{Entry, Phase};

const ADVICE: &str =
    "send {\"worker\": id or URL (or URL@RANK), \"rank\"?: 0, \"wait_s\"?: 60}; GET /admin/ranks lists them";
/// Longest wait of one call.
const LONGEST_S: f64 = 3600.0;
/// Pause between looks while a call waits.
const LOOK: Duration = Duration::from_millis(50);

struct Asked {
    entry: Arc<Entry>,
    rank: Option<u16>,
    wait: Duration,
}

fn wrong(message: String) -> Error {
    Error::new(Kind::InvalidField, Source::Client, message).advise(ADVICE)
}

fn read(app: &App, body: &[u8]) -> Result<Asked, Error> {
    let fields: Map<String, Value> = match serde_json::from_slice(body).map_err(|e| not_json(body, &e, ADVICE))? {
        Value::Object(fields) => fields,
        _ => return Err(wrong("the body is no JSON object".to_owned())),
    };
    if let Some(name) = fields.keys().find(|k| !["worker", "rank", "wait_s"].contains(&k.as_str())) {
        return Err(wrong(format!("{name} is no field of a drain")));
    }
    let Some(name) = fields.get("worker").and_then(Value::as_str) else {
        return Err(wrong("worker is missing, or no text".to_owned()));
    };
    let rank_of = |value: &Value| value.as_u64().and_then(|n| u16::try_from(n).ok());
    let mut rank = match fields.get("rank").filter(|v| !v.is_null()) {
        None => None,
        Some(value) => Some(rank_of(value).ok_or_else(|| wrong(format!("rank {value} is no rank")))?),
    };
    let mut entry = app.registry.find(name);
    if entry.is_none()
        && let Some((url, number)) = name.rsplit_once('@')
        && let Ok(number) = number.parse::<u16>()
    {
        if rank.is_some_and(|r| r != number) {
            return Err(wrong(format!("{name} and rank {} are not the same rank", rank.unwrap_or(0))));
        }
        rank = Some(number);
        entry = app.registry.find(url);
    }
    let Some(entry) = entry else {
        return Err(Error::new(Kind::NotFound, Source::Client, format!("no worker has the id or address {name:?}"))
            .advise(ADVICE));
    };
    let ranks = entry.state().found.map(|f| f.ranks);
    if let (Some(rank), Some(ranks)) = (rank, ranks)
        && rank >= ranks
    {
        return Err(wrong(format!("{} has ranks 0 to {}, not {rank}", entry.registration.shown, ranks - 1)));
    }
    let wait = match fields.get("wait_s").filter(|v| !v.is_null()) {
        None => 0.0,
        Some(value) => match value.as_f64().filter(|s| (0.0..=LONGEST_S).contains(s)) {
            Some(seconds) => seconds,
            None => return Err(wrong(format!("wait_s {value} is not between 0 and {LONGEST_S}"))),
        },
    };
    Ok(Asked { entry, rank, wait: Duration::from_secs_f64(wait) })
}

/// `POST /admin/drain` and `POST /admin/undrain`. With `wait_s` the answer comes when nothing runs there any more, or when that time is over.
pub(super) async fn handle(app: &Arc<App>, body: &Bytes, drain: bool) -> Result<Reply, Error> {
    let Asked { entry, rank, wait } = read(app, body)?;
    let changed = entry.change(|state| {
        let ranks = state.found.as_ref().map_or(1, |f| f.ranks);
        state.drained.set(rank, drain, ranks);
        if let Some(worker) = &state.worker {
            let all: Vec<u16> = (0..ranks).collect();
            let (out, back): (Vec<u16>, Vec<u16>) = all.into_iter().partition(|r| state.drained.holds(*r));
            app.gate.set_drained(worker.id, &out, true);
            app.gate.set_drained(worker.id, &back, false);
        }
    });
    if !changed {
        return Err(Error::new(Kind::NotFound, Source::Client, "the worker was removed").advise(ADVICE));
    }
    let what = if drain { "drained" } else { "back in choice" };
    tracing::warn!(worker = &*entry.registration.shown, rank, "taken by a person: {what}");
    let until = Instant::now() + wait;
    let mut open = open(app, &entry, rank);
    while drain && open > 0 && Instant::now() < until {
        tokio::time::sleep(LOOK).await;
        open = self::open(app, &entry, rank);
    }
    let state = match (drain, open) {
        (false, _) => "in choice",
        (true, 0) => "drained",
        (true, _) => "draining",
    };
    Ok(json_reply(
        200,
        &json!({ "worker": entry.id, "url": &*entry.registration.shown, "rank": rank, "state": state, "open": open }),
    ))
}

/// Attempts that are open on the rank, or on all ranks of the worker.
fn open(app: &App, entry: &Entry, rank: Option<u16>) -> u32 {
    if entry.phase() != Phase::Active {
        return 0;
    }
    let url = &entry.registration.shown;
    let of = |r: &&r3router_core::admission::RankView| r.url == *url && rank.is_none_or(|rank| r.rank == rank);
    app.gate.snapshot().ranks.iter().filter(of).map(|r| r.open).sum()
}
