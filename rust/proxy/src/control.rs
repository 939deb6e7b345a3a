//! Control calls: each goes exactly once to every physical engine, and the reply lists every engine's own status and body.
//! A pause closes the router's gate before any engine hears of it, and a continue opens it after all of them did; so do giving memory
//! back and taking it again.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Uri, header};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::Role;
use serde_json::{Value, json};

use crate::app::{App, CONNECT};
use crate::ask::{Answer, NoAnswer, ask};
use crate::errors::{Reply, error_reply, json_reply};
use crate::passthrough::is_json;
use crate::upstream::{Call, Fault, Pool};
use crate::worker::Worker;
use crate::workers::{Entry, Phase, role_name};

/// An engine that has not answered for so long is named in the log; the call goes on.
const QUIET: Duration = Duration::from_secs(30);
/// How long an engine that is not in choice has for going on.
const WAKE: Duration = Duration::from_secs(30);
/// The parts of an engine's memory without which it cannot generate, as SGLang names them.
const NEEDED: [&str; 2] = ["kv_cache", "weights"];

/// Paths that every engine must hear.
pub const BROADCAST: [&str; 32] = [
    "/flush_cache",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/begin_weight_update",
    "/end_weight_update",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/open_session",
    "/close_session",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/configure_logging",
    "/weights_checker",
    "/set_internal_state",
    "/clear_hicache_storage_backend",
    "/hicache/storage-backend/clear",
    "/slow_down",
    "/freeze_gc",
    "/set_trace_level",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
];

/// What control calls have closed the gate for.
#[derive(Debug, Default)]
pub struct Closed {
    paused: bool,
    /// Parts of the engines' memory that were given back.
    released: BTreeSet<String>,
    /// Calls that closed it so far.
    calls: u64,
}

impl Closed {
    fn any(&self) -> bool {
        self.paused || !self.released.is_empty()
    }
}

/// What a call does to the gate.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Turn {
    Nothing,
    Pause,
    Continue,
    Release(Vec<String>),
    Resume(Vec<String>),
}

impl Turn {
    fn of(path: &str, body: &[u8]) -> Self {
        let tags = || {
            let body: Value = serde_json::from_slice(body).unwrap_or_default();
            let named = body.get("tags").and_then(Value::as_array);
            named.map(|tags| tags.iter().filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>())
        };
        match path {
            "/pause_generation" => Self::Pause,
            "/continue_generation" => Self::Continue,
            "/release_memory_occupation" => Self::Release(tags().unwrap_or_else(|| NEEDED.map(str::to_owned).into())),
            "/resume_memory_occupation" => Self::Resume(tags().unwrap_or_default()),
            _ => Self::Nothing,
        }
    }

    /// Closes the gate, when that is what it does. Says how many calls have closed it so far.
    fn begin(&self, app: &App) -> u64 {
        let mut closed = app.closed.lock();
        match self {
            Self::Pause => closed.paused = true,
            Self::Release(tags) => closed.released.extend(tags.iter().cloned()),
            _ => return closed.calls,
        }
        closed.calls += 1;
        app.gate.set_paused(closed.any());
        closed.calls
    }

    /// Opens the gate, when that is what it does and nothing else keeps it closed. A call that began after this one and closed it wins.
    fn end(&self, app: &App, began: u64) {
        let mut closed = app.closed.lock();
        if closed.calls != began {
            return;
        }
        match self {
            Self::Continue => closed.paused = false,
            Self::Resume(tags) if tags.is_empty() => closed.released.clear(),
            Self::Resume(tags) => tags.iter().for_each(|tag| {
                closed.released.remove(tag);
            }),
            _ => return,
        }
        app.gate.set_paused(closed.any());
    }
}

/// What one engine answered.
#[derive(Debug)]
pub struct Told {
    /// The engine.
    pub worker: Arc<Worker>,
    /// Its answer.
    pub answer: Result<Answer, NoAnswer>,
}

/// One line of the reply: who, status, and the body as JSON where it is JSON.
pub fn told_json(told: &Told) -> Value {
    let mut line = json!({ "url": &*told.worker.url, "role": role_name(told.worker.role) });
    let Some(object) = line.as_object_mut() else { return line };
    match &told.answer {
        Ok(answer) => {
            object.insert("status".into(), answer.status.into());
            let body = answer.json().unwrap_or_else(|| String::from_utf8_lossy(&answer.body).into_owned().into());
            object.insert("body".into(), body);
        }
        Err(error) => {
            let flag = if matches!(error, NoAnswer::Slow(_)) { " (--control-timeout-secs)" } else { "" };
            object.insert("status".into(), Value::Null);
            object.insert("error".into(), format!("{error}{flag}").into());
        }
    }
    line
}

/// An engine that is registered and not in choice.
#[derive(Debug)]
struct Missed {
    entry: Arc<Entry>,
    phase: Phase,
    why: String,
    /// What it answered, where it was asked all the same.
    answer: Option<Result<Answer, NoAnswer>>,
}

impl Missed {
    fn json(&self) -> Value {
        let (status, error) = match &self.answer {
            None => (None, format!("not sent, the engine is {}: {}", self.phase.name(), self.why)),
            Some(Ok(answer)) => (Some(answer.status), format!("the engine is {}: {}", self.phase.name(), self.why)),
            Some(Err(error)) => (None, format!("the engine is {}: {}; {error}", self.phase.name(), self.why)),
        };
        let registration = &self.entry.registration;
        let (url, role) = (&*registration.shown, role_name(registration.role));
        json!({ "url": url, "role": role, "state": self.phase.name(), "status": status, "error": error })
    }

    fn went_on(&self) -> bool {
        matches!(&self.answer, Some(Ok(answer)) if answer.ok())
    }

    /// It was in choice and has missed the call.
    fn lacks(&self) -> bool {
        self.phase == Phase::Down && !self.went_on()
    }
}

/// Engines that are not in choice now. Those that were, and are down, have missed the call; those that are not up yet will begin with what
/// they load themselves. Only what goes on is told to both: see [`wake`].
fn missed(app: &App) -> Vec<Missed> {
    let of = |entry: Arc<Entry>| {
        let state = entry.state();
        let away = matches!(state.phase, Phase::Down | Phase::Pending);
        away.then(|| Missed { entry, phase: state.phase, why: state.message, answer: None })
    };
    app.registry.all().into_iter().filter_map(of).collect()
}

/// Has engines that are not in choice go on, too. A paused engine fails its health check, so that one whose router restarted, or that could
/// not be reached for a moment, does not come into choice before it is told.
async fn wake(app: &Arc<App>, away: &mut [Missed], call: &Call) {
    let limit = app.settings.control_timeout_secs.min(WAKE);
    let mut tasks = Vec::new();
    for missed in &*away {
        let registration = &missed.entry.registration;
        let (address, tls) = (registration.address.clone(), Some(Arc::clone(&app.engine_tls)));
        let pool = Pool::secured(address, Duration::ZERO, CONNECT, tls, &app.allow);
        let call = call.clone().with_key(registration.key.get().as_ref());
        tasks.push(app.runtime.spawn(async move { ask(&pool, &call, limit).await }));
    }
    for (missed, task) in away.iter_mut().zip(tasks) {
        missed.answer = Some(task.await.unwrap_or(Err(NoAnswer::Slow(limit))));
        missed.entry.look.notify_one();
    }
}

/// What an engine is sent.
fn sent(method: &Method, uri: &Uri, headers: &HeaderMap, body: &Bytes) -> Call {
    let pieces: Arc<[Bytes]> = Arc::from([body.clone()]);
    let mut call = Call { method: method.clone(), uri: uri.clone(), headers: HeaderMap::new(), pieces };
    if !body.is_empty() {
        let json = HeaderValue::from_static("application/json");
        call.headers.insert(header::CONTENT_TYPE, headers.get(header::CONTENT_TYPE).cloned().unwrap_or(json));
    }
    call
}

/// Sends one call to every active engine at once; answers in the order of registration.
pub async fn broadcast(app: &Arc<App>, method: &Method, uri: &Uri, headers: &HeaderMap, body: &Bytes) -> Vec<Told> {
    let limit = app.settings.control_timeout_secs;
    let mut tasks = Vec::new();
    // Decode first: it must know of a pause or an abort before prefill stops serving it.
    let mut workers = app.registry.active();
    workers.sort_by_key(|w| w.role == Role::Prefill);
    for worker in workers {
        let call = sent(method, uri, headers, body).with_key(worker.key.get().as_ref());
        let asked = Arc::clone(&worker);
        let task = async move {
            let mut answer = std::pin::pin!(ask(&asked.pool, &call, limit));
            match tokio::time::timeout(QUIET, &mut answer).await {
                Ok(answer) => answer,
                Err(_) => {
                    let path = call.uri.path();
                    tracing::warn!(
                        worker = &*asked.url,
                        path,
                        "no answer to a call to every engine yet; it is waited for"
                    );
                    answer.await
                }
            }
        };
        tasks.push((worker, app.runtime.spawn(task)));
    }
    let mut told = Vec::with_capacity(tasks.len());
    for (worker, task) in tasks {
        let answer = task.await.unwrap_or(Err(NoAnswer::Slow(limit)));
        told.push(Told { worker, answer });
    }
    told
}

/// Answers a control call. What a client that leaves has begun is carried through: engines and gate would be at odds otherwise.
pub async fn handle(app: &Arc<App>, method: &Method, uri: &Uri, headers: &HeaderMap, body: Bytes) -> Reply {
    // Before any engine has it: half of them may stop at another byte than the rest.
    if !body.is_empty()
        && let Err(error) = is_json(&body)
    {
        return error_reply(&error);
    }
    let (own, method, uri, headers) = (Arc::clone(app), method.clone(), uri.clone(), headers.clone());
    let carried = app.runtime.spawn(async move { carry(&own, &method, &uri, &headers, body).await });
    carried.await.unwrap_or_else(|error| {
        error_reply(&Error::new(Kind::Internal, Source::Router, format!("the control call ended by itself: {error}")))
    })
}

async fn carry(app: &Arc<App>, method: &Method, uri: &Uri, headers: &HeaderMap, body: Bytes) -> Reply {
    let path = uri.path();
    let (body, session) = if path == "/open_session" { named_session(body) } else { (body, None) };
    let turn = Turn::of(path, &body);
    let began = turn.begin(app);
    let mut away = missed(app);
    let told = broadcast(app, method, uri, headers, &body).await;
    for told in &told {
        if let Err(NoAnswer::Fault(Fault::Connect(_))) = told.answer {
            app.suspect(&told.worker);
        }
    }
    let ok = told.iter().filter(|t| t.answer.as_ref().is_ok_and(Answer::ok)).count();
    // Opened last, and only when every engine that can be reached goes on: a pair with one paused side would burn the other's clock. One that
    // cannot be reached is out of choice, and comes back as a new generation.
    let unreached = told.iter().filter(|t| matches!(t.answer, Err(NoAnswer::Fault(Fault::Connect(_))))).count();
    // Where no engine is in choice, none is left to be at odds with.
    if (ok > 0 || told.is_empty()) && ok + unreached == told.len() {
        turn.end(app, began);
    }
    // Not before: the gate does not wait for those that are out of choice anyway.
    if matches!(turn, Turn::Continue | Turn::Resume(_)) {
        wake(app, &mut away, &sent(method, uri, headers, &body)).await;
    }
    let woken = away.iter().filter(|m| m.went_on()).count();
    let down = away.iter().filter(|m| m.lacks()).count();
    let (ok, all) = (ok + woken, told.len() + woken + down);
    let success = ok > 0 && ok == all;
    let status = match worst(&told) {
        _ if told.is_empty() && woken == 0 => 503,
        200 if down > 0 => 502,
        status => status,
    };
    let lines = told.iter().map(told_json).chain(away.iter().map(Missed::json));
    let mut reply = json!({
        "success": success,
        "status": if success { "success" } else { "error" },
        "message": message(&turn, path, ok, all, app.gate.is_paused()),
        "workers": lines.collect::<Vec<_>>(),
        "paused": app.gate.is_paused(),
    });
    let Some(object) = reply.as_object_mut() else { return json_reply(status, &reply) };
    if path == "/flush_cache" {
        object.insert("workers_flushed".into(), ok.into());
        object.insert("total_http_workers".into(), all.into());
        object.insert("total_workers".into(), all.into());
    }
    if let Some(session) = session {
        object.insert("session_id".into(), session.into());
    }
    json_reply(status, &reply)
}

/// A session has one name on all engines: without one of the client's, each of them would draw its own.
fn named_session(body: Bytes) -> (Bytes, Option<String>) {
    let Ok(Value::Object(mut object)) = serde_json::from_slice::<Value>(&body) else { return (body, None) };
    if let Some(named) = object.get("session_id").filter(|id| !id.is_null()) {
        let named = named.as_str().map(str::to_owned);
        return (body, named);
    }
    let drawn = format!("{:032x}", rand::random::<u128>());
    object.insert("session_id".to_owned(), drawn.as_str().into());
    (Bytes::from(Value::Object(object).to_string()), Some(drawn))
}

fn message(turn: &Turn, path: &str, ok: usize, all: usize, paused: bool) -> String {
    let gate = match turn {
        Turn::Pause => "; the router dispatches nothing until /continue_generation",
        Turn::Release(_) => "; the router dispatches nothing until /resume_memory_occupation",
        Turn::Continue | Turn::Resume(_) if paused => {
            "; the router's gate stays closed until every engine has gone on and has its memory"
        }
        Turn::Continue | Turn::Resume(_) => "; the router dispatches again",
        Turn::Nothing => "",
    };
    if all == 0 {
        format!("no active engine to send {path} to{gate}")
    } else {
        format!("{ok} of {all} engines answered 2xx{gate}")
    }
}

/// 200 when every engine answered 2xx, else the first other status; 502 for an engine that gave none.
fn worst(told: &[Told]) -> u16 {
    told.iter()
        .find_map(|t| match &t.answer {
            Ok(answer) if answer.ok() => None,
            Ok(answer) => Some(answer.status),
            Err(_) => Some(502),
        })
        .unwrap_or(200)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::Value;

    use super::{Turn, named_session};

    #[test]
    fn memory_is_all_that_generation_needs_unless_parts_are_named() {
        let all = vec!["kv_cache".to_owned(), "weights".to_owned()];
        for body in [&b""[..], b"{}", br#"{"tags":null}"#] {
            assert_eq!(Turn::of("/release_memory_occupation", body), Turn::Release(all.clone()));
            assert_eq!(Turn::of("/resume_memory_occupation", body), Turn::Resume(Vec::new()));
        }
        let part = br#"{"tags":["kv_cache"]}"#;
        assert_eq!(Turn::of("/release_memory_occupation", part), Turn::Release(vec!["kv_cache".to_owned()]));
        assert_eq!(Turn::of("/flush_cache", part), Turn::Nothing);
    }

    #[test]
    fn a_session_keeps_its_clients_name_and_gets_one_where_it_has_none() {
        let own = Bytes::from_static(br#"{ "session_id": "mine",  "capacity_of_str_len": 5}"#);
        assert_eq!(named_session(own.clone()), (own, Some("mine".to_owned())));
        for body in [r#"{"capacity_of_str_len":5}"#, r#"{"session_id":null,"capacity_of_str_len":5}"#] {
            let (sent, name) = named_session(Bytes::from_static(body.as_bytes()));
            let sent: Value = serde_json::from_slice(&sent).unwrap();
            assert_eq!(sent["session_id"].as_str(), name.as_deref());
            assert_eq!((sent["capacity_of_str_len"].as_u64(), name.unwrap().len()), (Some(5), 32));
        }
        for body in ["", "[1]"] {
            let body = Bytes::from_static(body.as_bytes());
            assert_eq!(named_session(body.clone()), (body, None));
        }
    }
}
