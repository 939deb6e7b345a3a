//! `/abort_request`: the router's own after a failed or left attempt, and the client's, translated to the ids that engines know.
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::{Role, WorkerId};
use serde_json::{Value, json};

use crate::app::App;
use crate::ask::{Answer, NoAnswer, ask};
use crate::control::{Told, told_json};
use crate::errors::{Reply, json_reply, not_json};
use crate::live::Sub;
use crate::rid;
use crate::upstream::Call;
use crate::worker::Worker;

/// An abort that comes before the engine knows the id is lost without a sign, so it is sent again after this pause.
const AGAIN: Duration = Duration::from_millis(300);
/// How long an engine may take to answer an abort.
const LIMIT: Duration = Duration::from_secs(5);

/// Legs of one attempt that must end on their engines.
#[derive(Debug)]
pub struct Abort {
    /// The attempt's id.
    pub rid: String,
    /// The engines, decode first: while it lives it would wait for prefill's bytes.
    pub targets: Vec<Arc<Worker>>,
}

fn call(worker: &Worker, body: Bytes) -> Call {
    Call::post(Uri::from_static("/abort_request"), body).with_key(worker.key.get().as_ref())
}

fn rid_body(rid: &str) -> Bytes {
    Bytes::from(json!({ "rid": rid }).to_string())
}

/// Sends aborts in the background: at once, and again after a pause.
pub fn send_own(app: &Arc<App>, abort: Abort) {
    let app = Arc::clone(app);
    let runtime = app.runtime.clone();
    app.metrics.aborting.fetch_add(1, Ordering::Relaxed);
    runtime.spawn(async move {
        let body = rid_body(&abort.rid);
        for round in 0..2 {
            if round > 0 {
                tokio::time::sleep(AGAIN).await;
            }
            let mut sends = tokio::task::JoinSet::new();
            for worker in &abort.targets {
                app.metrics.aborts.fetch_add(1, Ordering::Relaxed);
                let (worker, body) = (Arc::clone(worker), body.clone());
                sends.spawn_on(async move { ask(&worker.pool, &call(&worker, body), LIMIT).await }, &app.runtime);
                // The next engine's call begins after this one's task had its turn.
                tokio::task::yield_now().await;
            }
            while sends.join_next().await.is_some() {}
        }
        app.metrics.aborting.fetch_sub(1, Ordering::Relaxed);
    });
}

/// What a client asks to abort.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    All,
    Rid { rid: String, prefix: bool },
}

impl Target {
    fn read(body: &[u8]) -> Result<(Self, Value), Error> {
        const ADVICE: &str = "send {\"rid\": \"...\"} or {\"abort_all\": true}";
        let value: Value = serde_json::from_slice(body).map_err(|e| not_json(body, &e, ADVICE))?;
        let flag = |name: &str| value.get(name).and_then(Value::as_bool).unwrap_or(false);
        if flag("abort_all") {
            return Ok((Self::All, value));
        }
        match value.get("rid").and_then(Value::as_str) {
            Some(rid) if !rid.is_empty() => {
                let target = Self::Rid { rid: rid.to_owned(), prefix: flag("prefix") };
                Ok((target, value))
            }
            _ => Err(Error::new(Kind::InvalidField, Source::Client, "neither rid nor abort_all says what to abort")
                .advise(ADVICE)),
        }
    }

    /// Whether a request with the client's id, or with this id on the engines, is meant.
    fn hits(&self, client: Option<&str>, engine: Option<&str>) -> bool {
        match self {
            Self::All => true,
            Self::Rid { rid, prefix: true } => {
                client.is_some_and(|c| c.starts_with(rid.as_str()))
                    || engine.is_some_and(|e| e.starts_with(rid.as_str()))
            }
            Self::Rid { rid, prefix: false } => client == Some(rid.as_str()) || engine == Some(rid.as_str()),
        }
    }
}

/// Whether `client` is the id that the engine derives from `rid` for one element of a batch (`rid_0`, `rid_1`, ...).
fn derived(rid: &str, client: &str) -> bool {
    client
        .strip_prefix(rid)
        .and_then(|rest| rest.strip_prefix('_'))
        .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// Answers a client's abort: what waits in the router leaves the queue; every engine is called once for each attempt that it runs for
/// the id, or once with the body as it came.
///
/// # Errors
/// When the body is not JSON or names nothing.
pub async fn client(app: &Arc<App>, body: Bytes) -> Result<Reply, Error> {
    let (target, value) = Target::read(&body)?;
    let mut queued = 0;
    let mut hit: Vec<Arc<Sub>> = Vec::new();
    let mut ids: HashMap<WorkerId, Vec<String>> = HashMap::new();
    let mut stranger = false;
    for sub in app.live.all() {
        let running = sub.running();
        let engine = running.as_ref().map(|(rid, _)| rid.as_str());
        let client = sub.client_rid.as_deref();
        let meant = target.hits(client, engine)
            || matches!(&target, Target::Rid { rid, prefix: false } if client.is_some_and(|c| derived(rid, c)));
        if !meant {
            // An engine with several tokenizers matches by prefix even when it does not know the id itself.
            if let Target::Rid { rid, .. } = &target {
                stranger |= client.is_some_and(|c| c.starts_with(rid.as_str()));
            }
            continue;
        }
        sub.abort();
        match running {
            None => queued += 1,
            Some((rid, workers)) => {
                for worker in workers {
                    ids.entry(worker.id).or_default().push(rid.clone());
                }
                hit.push(sub);
            }
        }
    }
    let mut sends = Vec::new();
    for worker in ordered(app) {
        let own = match &target {
            Target::All => None,
            Target::Rid { .. } => ids.get(&worker.id),
        };
        let bodies: Vec<Bytes> = match (own, &target) {
            (Some(rids), _) => rids.iter().map(|rid| Bytes::from(with_rid(&value, rid))).collect(),
            (None, Target::Rid { rid, .. }) if stranger => {
                vec![Bytes::from(with_rid(&value, &format!("{}{}", rid::stem(rid), rid::MARK)))]
            }
            (None, _) => vec![body.clone()],
        };
        for body in bodies {
            let worker = Arc::clone(&worker);
            sends.push(async move {
                let answer = ask(&worker.pool, &call(&worker, body), LIMIT).await;
                Told { worker, answer }
            });
        }
    }
    let told = join_all(app, sends).await;
    again(app, hit);
    let failed = told.iter().filter(|t| !t.answer.as_ref().is_ok_and(Answer::ok)).count();
    let reply = json!({
        "success": failed == 0,
        "aborted": { "queued": queued, "running": ids.values().flatten().collect::<std::collections::HashSet<_>>().len() },
        "workers": told.iter().map(told_json).collect::<Vec<_>>(),
    });
    Ok(json_reply(200, &reply))
}

/// Decode engines first, so that none waits for a prefill that is gone.
fn ordered(app: &App) -> Vec<Arc<Worker>> {
    let mut workers = app.registry.active();
    workers.sort_by_key(|w| w.role == Role::Prefill);
    workers
}

fn with_rid(value: &Value, rid: &str) -> String {
    let mut value = value.clone();
    if let Some(object) = value.as_object_mut() {
        object.insert("rid".to_owned(), rid.into());
    }
    value.to_string()
}

async fn join_all<F>(app: &App, sends: Vec<F>) -> Vec<Told>
where
    F: Future<Output = Told> + Send + 'static,
{
    let tasks: Vec<_> = sends.into_iter().map(|send| app.runtime.spawn(send)).collect();
    let mut told = Vec::with_capacity(tasks.len());
    for task in tasks {
        if let Ok(answer) = task.await {
            told.push(answer);
        }
    }
    told
}

/// Repeats the abort of attempts that still run after a pause.
fn again(app: &Arc<App>, subs: Vec<Arc<Sub>>) {
    if subs.is_empty() {
        return;
    }
    let runtime = app.runtime.clone();
    runtime.spawn(async move {
        tokio::time::sleep(AGAIN).await;
        for sub in subs {
            if let Some((rid, workers)) = sub.running() {
                for worker in workers {
                    let call = call(&worker, rid_body(&rid));
                    let _: Result<Answer, NoAnswer> = ask(&worker.pool, &call, LIMIT).await;
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::{Target, derived};

    #[test]
    fn an_id_hits_its_own_attempts_and_no_longer_one() {
        let (target, _) = Target::read(br#"{"rid":"ep-7::t3"}"#).unwrap();
        assert!(target.hits(Some("ep-7::t3"), None));
        assert!(target.hits(None, Some("ep-7::t3")));
        assert!(!target.hits(Some("ep-7::t30"), Some("ep-7::t30~0123456789abcdef")));
        assert!(derived("ep-7::t3", "ep-7::t3_12") && !derived("ep-7::t3", "ep-7::t30") && !derived("a", "a_"));
        let (prefix, _) = Target::read(br#"{"rid":"ep-7::","prefix":true}"#).unwrap();
        assert!(prefix.hits(Some("ep-7::t30"), None) && !prefix.hits(Some("ep-8::t3"), None));
    }

    #[test]
    fn an_abort_that_names_nothing_is_refused() {
        assert_eq!(Target::read(b"{}").unwrap_err().kind.code(), "invalid_field");
        assert_eq!(Target::read(b"{").unwrap_err().kind.code(), "invalid_json");
        assert_eq!(Target::read(br#"{"abort_all":true}"#).unwrap().0, Target::All);
    }
}
