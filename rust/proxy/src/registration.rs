//! The worker API: `POST/GET/PUT/DELETE /workers`, and the old `/add_worker`, `/remove_worker`, `/list_workers`. The list has one entry per
//! engine, and its `url` is an address that a client can call; ranks are extra. With `--list-ranks` it has one per rank.
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Method, Uri, header};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::Role;
use serde_json::{Map, Value, json};

use crate::address::Address;
use crate::app::App;
use crate::errors::{ERROR_CODE, Reply, json_reply, not_json, wrong_method};
use crate::keeper;
use crate::settings::nearest;
use crate::worker::Key;
use crate::workers::{Drained, Entry, Phase, Registration, role_name};

/// Fields of `POST /workers` that are kept and shown; no decision uses them.
const SHOWN: [&str; 5] = ["model_id", "priority", "cost", "labels", "runtime"];
/// Fields that decide something.
const OBEYED: [&str; 5] = ["url", "worker_type", "bootstrap_port", "api_key", "disable_health_check"];
/// Fields that the SGLang router takes and that have no effect here; the answer warns of each. Health checks are set for all workers at
/// once, and ranks are found by themselves.
const WITHOUT_EFFECT: [&str; 10] = [
    "tokenizer_path",
    "reasoning_parser",
    "tool_parser",
    "chat_template",
    "health_check_timeout_secs",
    "health_check_interval_secs",
    "health_success_threshold",
    "health_failure_threshold",
    "max_connection_attempts",
    "dp_aware",
];

/// Of these, what `PUT /workers/{id}` takes too.
const HEALTH_NUMBERS: [&str; 4] =
    ["health_check_timeout_secs", "health_check_interval_secs", "health_success_threshold", "health_failure_threshold"];

/// How long a name may take to be looked up before it is registered as it is.
const LOOK_UP: std::time::Duration = std::time::Duration::from_secs(2);

fn invalid(message: String, advice: &'static str) -> Error {
    Error::new(Kind::InvalidField, Source::Client, message).advise(advice)
}

/// Registers an engine and starts its keeper; registering it again changes nothing.
///
/// # Errors
/// When the address is registered for another role.
pub fn register(app: &Arc<App>, registration: Registration) -> Result<Arc<Entry>, Error> {
    app.allow.check(&registration.address)?;
    if registration.key.get().is_none() {
        registration.key.set(app.worker_key.clone());
    }
    let (entry, new) = app.registry.add(registration)?;
    if new {
        keeper::spawn(app, Arc::clone(&entry));
    }
    Ok(entry)
}

/// A registration of `url` without anything special.
///
/// # Errors
/// When `url` is no address.
pub fn plain(url: &str, role: Role, bootstrap_port: Option<u16>) -> Result<Registration, Error> {
    Ok(Registration { named: true, ..at(Address::parse(url)?, url, role, bootstrap_port) })
}

fn at(address: Address, url: &str, role: Role, bootstrap_port: Option<u16>) -> Registration {
    Registration {
        address,
        shown: url.trim().trim_end_matches('/').into(),
        role,
        bootstrap_port,
        key: Key::default(),
        health_checks: true,
        extra: Map::new(),
        named: false,
    }
}

/// What the next router is told of an engine: what `POST /workers` takes, `named`, and `drained` (true, or the ranks).
pub fn told(app: &App, entry: &Entry) -> Value {
    let (r, state) = (&entry.registration, entry.state());
    let key = r.key.get().filter(|k| Some(k) != app.worker_key.as_ref());
    let key = key.as_ref().and_then(|k| k.to_str().ok()).and_then(|k| k.strip_prefix("Bearer "));
    let mut fields = state.extra.clone();
    let own = json!({
        "url": &*r.shown, "worker_type": role_name(r.role), "bootstrap_port": r.bootstrap_port,
        "api_key": key, "disable_health_check": !r.health_checks, "named": r.named,
        "drained": if state.drained.all { json!(true) } else { json!(state.drained.ranks) },
    });
    if let Value::Object(own) = own {
        fields.extend(own);
    }
    Value::Object(fields)
}

/// Takes an engine of the router before this one, as [`told`]: registers it when somebody had, and keeps what a person took out of choice.
///
/// # Errors
/// As [`register`], and when it is no registration.
pub fn again(app: &Arc<App>, fields: &Value) -> Result<(), Error> {
    let Value::Object(mut fields) = fields.clone() else { return Err(invalid("no object".to_owned(), ADVICE)) };
    let named = fields.remove("named").is_some_and(|named| named == true);
    let drained = match fields.remove("drained") {
        Some(Value::Bool(all)) => Drained { all, ..Drained::default() },
        Some(Value::Array(ranks)) => {
            let rank = |r: &Value| r.as_u64().and_then(|r| u16::try_from(r).ok());
            Drained { ranks: ranks.iter().filter_map(rank).collect(), ..Drained::default() }
        }
        _ => Drained::default(),
    };
    let (registration, _) = read_fields(&fields, app.settings.pd_disaggregation)?;
    let url = Arc::clone(&registration.address.url);
    match app.registry.find(&url) {
        _ if drained == Drained::default() => {}
        Some(entry) => {
            entry.change(|state| {
                if let (Some(worker), Some(found)) = (&state.worker, &state.found) {
                    app.gate.set_drained(worker.id, &drained.of(found.ranks), true);
                }
                state.drained = drained;
            });
        }
        None => app.registry.inherit(Arc::clone(&url), drained),
    }
    // What settings or discovery named there, those of this router name, or name no more.
    if !named && app.registry.find(&url).is_none() {
        register(app, registration)?;
    }
    Ok(())
}

const ADVICE: &str =
    "send {\"url\": \"http://HOST:PORT\", \"worker_type\": \"regular|prefill|decode\", \"bootstrap_port\"?: 8998}";

/// Reads the body of `POST /workers`; the registration, and what the sender should know about it.
fn read(app: &App, body: &[u8]) -> Result<(Registration, Vec<String>), Error> {
    let value: Value = serde_json::from_slice(body).map_err(|e| not_json(body, &e, ADVICE))?;
    let Value::Object(fields) = value else {
        return Err(invalid("the body is no JSON object".to_owned(), ADVICE));
    };
    read_fields(&fields, app.settings.pd_disaggregation)
}

fn read_fields(fields: &Map<String, Value>, pd: bool) -> Result<(Registration, Vec<String>), Error> {
    let warnings = check_names(fields)?;
    // A null is a field that was left out.
    let field = |name: &str| fields.get(name).filter(|v| !v.is_null());
    let text = |name: &str| match field(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(other) => Err(invalid(format!("{name} {other} is no text"), ADVICE)),
    };
    let Some(url) = text("url")? else {
        return Err(invalid("url is missing".to_owned(), ADVICE));
    };
    // Before all else: whatever else is wrong, it is wrong with this engine.
    let address = Address::parse(url)?;
    let role = match text("worker_type")? {
        None if !pd => Role::Regular,
        None => {
            return Err(invalid("worker_type is missing; this router runs in PD mode".to_owned(), ADVICE));
        }
        Some(name) => match (name.to_ascii_lowercase().as_str(), pd) {
            ("prefill", true) => Role::Prefill,
            ("decode", true) => Role::Decode,
            ("regular", false) => Role::Regular,
            (known @ ("prefill" | "decode" | "regular"), _) => {
                let mode = if pd { "PD" } else { "regular" };
                return Err(invalid(format!("a {known} worker cannot serve: this router runs in {mode} mode"), ADVICE));
            }
            (other, _) => return Err(invalid(format!("worker_type {other:?} is unknown"), ADVICE)),
        },
    };
    let bootstrap_port = match field("bootstrap_port") {
        None => None,
        Some(port) => match port.as_u64().and_then(|p| u16::try_from(p).ok()).filter(|p| *p > 0) {
            Some(port) => Some(port),
            None => return Err(invalid(format!("bootstrap_port {port} is not between 1 and 65535"), ADVICE)),
        },
    };
    let mut registration = at(address, url, role, bootstrap_port);
    if let Some(key) = text("api_key")? {
        registration.key.set(Some(bearer(key)?));
    }
    registration.health_checks = match field("disable_health_check") {
        None => true,
        Some(Value::Bool(off)) => !off,
        Some(other) => return Err(invalid(format!("disable_health_check {other} is not true or false"), ADVICE)),
    };
    for name in SHOWN {
        if let Some(shown) = fields.get(name) {
            registration.extra.insert(name.to_owned(), shown.clone());
        }
    }
    Ok((registration, warnings))
}

/// An engine's key as it is sent.
fn bearer(key: &str) -> Result<HeaderValue, Error> {
    let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
        .map_err(|_| invalid("api_key has characters that no header takes".to_owned(), ADVICE))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Refuses names that nobody knows, since a misspelt `bootstrap_port` would be missed only when transfers fail; warns of known ones
/// without effect.
fn check_names(fields: &Map<String, Value>) -> Result<Vec<String>, Error> {
    let known = || OBEYED.into_iter().chain(SHOWN).chain(WITHOUT_EFFECT);
    let mut warnings = Vec::new();
    for name in fields.keys() {
        if !known().any(|k| k == name) {
            let near = nearest(name, known()).map_or_else(String::new, |near| format!("; did you mean {near}?"));
            let all = known().collect::<Vec<_>>().join(", ");
            return Err(Error::new(
                Kind::InvalidField,
                Source::Client,
                format!("{name} is no field of a worker{near}"),
            )
            .advise(format!("the fields are {all}")));
        }
        if WITHOUT_EFFECT.contains(&name.as_str()) {
            warnings.push(format!("{name} has no effect in this router"));
        }
    }
    Ok(warnings)
}

/// One entry as the list shows it.
fn show(app: &App, entry: &Entry) -> Value {
    let state = entry.state();
    let registration = &entry.registration;
    let mut item = json!({
        "id": entry.id,
        "url": &*registration.shown,
        "worker_type": role_name(registration.role),
        "state": state.phase.name(),
        "message": state.message,
        "since_s": state.since.elapsed().as_secs_f64(),
        "is_healthy": entry.healthy(),
        "connection_mode": "HTTP",
        "priority": 50,
        "cost": 1.0,
        "model_id": "unknown",
        "disable_health_check": !registration.health_checks,
        "load": state.worker.as_ref().map_or(0, |w| w.open.load(std::sync::atomic::Ordering::Relaxed).max(0)),
    });
    let Some(object) = item.as_object_mut() else { return item };
    if let Some(found) = &state.found {
        object.insert("ranks".into(), (0..found.ranks).collect::<Vec<_>>().into());
        object.insert("dp_size".into(), found.ranks.into());
        object.insert("metadata".into(), Value::Object(found.labels.clone()));
        let model = found.labels.get("served_model_name").or_else(|| found.labels.get("model_path"));
        if let Some(model) = model {
            object.insert("model_id".into(), model.clone());
        }
        if let Some(port) = found.bootstrap_port.or(registration.bootstrap_port) {
            object.insert("bootstrap_port".into(), port.into());
        }
    } else if let Some(port) = registration.bootstrap_port {
        object.insert("bootstrap_port".into(), port.into());
    }
    for (name, value) in &state.extra {
        object.insert(name.clone(), value.clone());
    }
    let _ = app;
    item
}

/// An entry as one item per rank, each with the id of the engine; as it is when the ranks are not known yet.
fn by_rank(item: Value) -> Vec<Value> {
    let ranks = item.get("ranks").and_then(Value::as_array).cloned().unwrap_or_default();
    let Some(url) = item.get("url").and_then(Value::as_str).filter(|_| !ranks.is_empty()) else { return vec![item] };
    let one = |rank: &Value| {
        let mut item = item.clone();
        if let Some(object) = item.as_object_mut() {
            object.insert("url".to_owned(), format!("{url}@{rank}").into());
            object.insert("dp_rank".to_owned(), rank.clone());
            object.insert("base_url".to_owned(), url.into());
        }
        item
    };
    ranks.iter().map(one).collect()
}

fn list(app: &App) -> Value {
    let entries = app.registry.all();
    let each = |e: &Arc<Entry>| if app.settings.list_ranks { by_rank(show(app, e)) } else { vec![show(app, e)] };
    let workers: Vec<Value> = entries.iter().flat_map(each).collect();
    let count = |role| entries.iter().filter(|e| e.registration.role == role).count();
    json!({
        "workers": workers,
        "total": workers.len(),
        "stats": {
            "prefill_count": count(Role::Prefill),
            "decode_count": count(Role::Decode),
            "regular_count": count(Role::Regular),
        },
    })
}

/// Answers `/workers`, `/workers/{id}` and the old forms; `None` for other paths.
pub async fn handle(app: &Arc<App>, method: &Method, uri: &Uri, body: Bytes) -> Option<Result<Reply, Error>> {
    let path = uri.path();
    let reply = match path {
        "/workers" => match *method {
            Method::POST => post(app, &body).await,
            Method::GET => Ok(json_reply(200, &list(app))),
            _ => Err(wrong_method(method, path, "GET or POST")),
        },
        "/add_worker" => add_old(app, uri, &body).await,
        "/remove_worker" => remove_old(app, uri),
        "/list_workers" => {
            let urls: Vec<String> = app.registry.all().iter().map(|e| e.registration.shown.to_string()).collect();
            Ok(json_reply(200, &json!({ "urls": urls })))
        }
        "/get_worker_urls" => {
            let urls: Vec<String> = app.registry.all().iter().map(|e| e.registration.shown.to_string()).collect();
            Ok(json_reply(200, &json!(urls)))
        }
        _ => {
            let id = decode_percent(path.strip_prefix("/workers/")?);
            by_id(app, method, path, &id, &body)
        }
    };
    Some(reply)
}

/// Refuses a name that points to nothing but what no worker is, while somebody is there to be told. One without an address may get one yet; every
/// connect looks anew.
async fn look_up(app: &App, address: &Address) -> Result<(), Error> {
    app.allow.check(address)?;
    if address.literal.is_some() {
        return Ok(());
    }
    match tokio::time::timeout(LOOK_UP, tokio::net::lookup_host((&*address.host, address.port))).await {
        Ok(Ok(found)) => app.allow.resolved(address, found),
        _ => Ok(()),
    }
}

async fn post(app: &Arc<App>, body: &[u8]) -> Result<Reply, Error> {
    let (registration, warnings) = read(app, body)?;
    look_up(app, &registration.address).await?;
    let entry = register(app, registration)?;
    let location = format!("/workers/{}", entry.id);
    let phase = entry.phase();
    let mut answer = json!({
        "status": "accepted",
        "worker_id": entry.id,
        "url": &*entry.registration.shown,
        "location": location,
        "state": phase.name(),
        "message": format!("the worker is {}; GET {location} says when it is active", phase.name()),
    });
    if !warnings.is_empty() {
        tracing::warn!(worker = &*entry.registration.shown, ?warnings, "registered");
        if let Some(answer) = answer.as_object_mut() {
            answer.insert("warnings".into(), warnings.into());
        }
    }
    let mut reply = json_reply(202, &answer);
    if let Ok(location) = HeaderValue::from_str(&location) {
        reply.headers_mut().insert(header::LOCATION, location);
    }
    Ok(reply)
}

fn unknown(id: &str) -> Error {
    Error::new(Kind::NotFound, Source::Client, format!("no worker has the id or address {id:?}"))
        .advise("GET /workers lists them")
}

fn by_id(app: &Arc<App>, method: &Method, path: &str, id: &str, body: &[u8]) -> Result<Reply, Error> {
    let Some(entry) = app.registry.find(id) else { return Ok(no_such_worker(id)) };
    match *method {
        Method::GET => Ok(json_reply(200, &show(app, &entry))),
        Method::DELETE => {
            remove(app, &entry);
            let message = format!("{} is removed; requests that run on it go on", entry.registration.shown);
            Ok(json_reply(
                202,
                &json!({ "status": "accepted", "worker_id": entry.id, "state": "removed", "message": message }),
            ))
        }
        Method::PUT => change(app, &entry, body),
        _ => Err(wrong_method(method, path, "GET or PUT or DELETE")),
    }
}

/// What `/workers/{id}` says of an id that is none, in the peer's shape: frameworks that delete what may be gone look for the code.
fn no_such_worker(id: &str) -> Reply {
    let message = format!("no worker has the id or address {id:?}; GET /workers lists them");
    let mut reply = json_reply(404, &json!({ "error": message, "code": "WORKER_NOT_FOUND" }));
    reply.headers_mut().insert(ERROR_CODE, HeaderValue::from_static("not_found"));
    reply
}

/// `PUT /workers/{id}`: the key that it is sent, and values that are kept and shown. Where it is and what it does is fixed by its
/// registration.
fn change(app: &App, entry: &Arc<Entry>, body: &[u8]) -> Result<Reply, Error> {
    const ADVICE: &str = "send {\"priority\"?: 50, \"cost\"?: 1.0, \"labels\"?: {…}, \"api_key\"?: \"…\"}; for the rest delete the worker and register it again";
    let Value::Object(mut fields) = serde_json::from_slice(body).map_err(|e| not_json(body, &e, ADVICE))? else {
        return Err(invalid("the body is no JSON object".to_owned(), ADVICE));
    };
    let mut warnings = Vec::new();
    let mut key = None;
    for (name, value) in &fields {
        let right = match name.as_str() {
            "priority" => value.is_u64(),
            "cost" => value.is_number(),
            "labels" => value.is_object(),
            "api_key" => match value {
                // An empty one takes the worker's own key away.
                Value::String(text) if text.is_empty() => {
                    key = Some(app.worker_key.clone());
                    true
                }
                Value::String(text) => {
                    key = Some(Some(bearer(text)?));
                    true
                }
                _ => false,
            },
            name if HEALTH_NUMBERS.contains(&name) => {
                warnings.push(format!("{name} has no effect on one worker; the flag of this name holds for all"));
                value.as_u64().is_some_and(|n| n > 0)
            }
            _ => return Err(invalid(format!("{name} of a registered worker cannot be changed"), ADVICE)),
        };
        if !right {
            let shown = if name == "api_key" { "what it was sent".to_owned() } else { value.to_string() };
            return Err(invalid(format!("{name} cannot be {shown}"), ADVICE));
        }
    }
    if let Some(key) = key {
        entry.registration.key.set(key);
        // An engine that refused the old one is asked again at once. To one that serves, a look would mean that it is suspected.
        if entry.phase() != Phase::Active {
            entry.look.notify_one();
        }
    }
    fields.retain(|name, _| SHOWN.contains(&name.as_str()));
    entry.change(|state| state.extra.extend(fields));
    let mut answer = json!({ "status": "accepted", "worker_id": entry.id, "message": "changed" });
    if !warnings.is_empty()
        && let Some(answer) = answer.as_object_mut()
    {
        answer.insert("warnings".into(), warnings.into());
    }
    Ok(json_reply(202, &answer))
}

/// Takes an engine out of choice at once; requests that run on it go on.
pub(crate) fn remove(app: &App, entry: &Arc<Entry>) {
    let worker = entry.state().worker;
    app.registry.remove(entry);
    // The keeper does it too; here it is done before the answer.
    if let Some(worker) = worker {
        app.gate.remove_worker(worker.id);
    }
}

/// `POST /add_worker?url=...&worker_type=...&bootstrap_port=...`, or the same as JSON: answers when the worker is active.
async fn add_old(app: &Arc<App>, uri: &Uri, body: &[u8]) -> Result<Reply, Error> {
    let mut fields = Map::new();
    for (name, value) in query(uri) {
        let value = match name.as_str() {
            "bootstrap_port" => value.parse::<u64>().map_or_else(|_| value.clone().into(), Value::from),
            "disable_health_check" | "dp_aware" => {
                value.parse::<bool>().map_or_else(|_| value.clone().into(), Value::from)
            }
            _ => value.into(),
        };
        fields.insert(name, value);
    }
    let (registration, _) = if fields.is_empty() && !body.is_empty() {
        read(app, body)?
    } else {
        read_fields(&fields, app.settings.pd_disaggregation)?
    };
    look_up(app, &registration.address).await?;
    let entry = register(app, registration)?;
    let mut phases = entry.watch();
    let limit = app.settings.worker_startup_timeout_secs;
    let settled = tokio::time::timeout(limit, phases.wait_for(|p| !matches!(p, Phase::Pending | Phase::Down))).await;
    let url = &entry.registration.shown;
    match settled {
        Ok(Ok(phase)) if *phase == Phase::Active => Ok(json_reply(
            200,
            &json!({ "status": "success", "worker_id": entry.id, "message": format!("added worker {url}") }),
        )),
        _ => {
            let why = entry.state().message;
            Err(Error::new(Kind::Connect, Source::Router, format!("worker {url} did not become active: {why}"))
                .at_worker(&**url)
                .advise("see that the engine is up and reachable from the router"))
        }
    }
}

fn remove_old(app: &Arc<App>, uri: &Uri) -> Result<Reply, Error> {
    let url = query(uri).into_iter().find(|(name, _)| name == "url").map(|(_, value)| value);
    let Some(url) = url else {
        return Err(invalid("url is missing".to_owned(), "call /remove_worker?url=http://HOST:PORT"));
    };
    let entry = app.registry.find(&url).ok_or_else(|| unknown(&url))?;
    remove(app, &entry);
    Ok(json_reply(
        200,
        &json!({ "status": "success", "message": format!("removed worker {}", entry.registration.shown) }),
    ))
}

/// The query's names and values.
fn query(uri: &Uri) -> Vec<(String, String)> {
    uri.query()
        .unwrap_or("")
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode_percent(name), decode_percent(&value.replace('+', " ")))
        })
        .collect()
}

/// Text with `%41` and such resolved; what is no such pair stays as it is.
fn decode_percent(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let pair = bytes.get(at + 1..at + 3).and_then(|p| std::str::from_utf8(p).ok());
        if let (b'%', Some(value)) = (byte, pair.and_then(|p| u8::from_str_radix(p, 16).ok())) {
            out.push(value);
            at += 3;
        } else {
            out.push(byte);
            at += 1;
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use r3router_core::topology::Role;
    use serde_json::{Value, json};

    use super::{by_rank, decode_percent, query, read_fields};

    fn of(value: &Value, pd: bool) -> Result<(super::Registration, Vec<String>), String> {
        read_fields(value.as_object().unwrap(), pd).map_err(|e| e.message.into_owned())
    }

    #[test]
    fn what_the_sglang_router_takes_is_taken_and_what_nobody_knows_is_refused_by_name() {
        let all = json!({
            "url": "http://d:1", "api_key": "k", "model_id": "m", "priority": 1, "cost": 2.0, "worker_type": "decode",
            "bootstrap_port": null, "runtime": "sglang", "tokenizer_path": "t", "reasoning_parser": "r", "tool_parser": "p",
            "chat_template": "c", "labels": {}, "health_check_timeout_secs": 30, "health_check_interval_secs": 60,
            "health_success_threshold": 2, "health_failure_threshold": 3, "disable_health_check": true,
            "max_connection_attempts": 20, "dp_aware": false,
        });
        let (registration, warnings) = of(&all, true).unwrap();
        assert_eq!((registration.role, registration.health_checks), (Role::Decode, false));
        assert_eq!(warnings.len(), 10, "{warnings:?}");
        let wrong = |value: Value| of(&value, true).unwrap_err();
        assert_eq!(
            wrong(json!({"url": "http://d:1", "worker_type": "decode", "bootstrap_prt": 1})),
            "bootstrap_prt is no field of a worker; did you mean bootstrap_port?"
        );
        assert!(wrong(json!({"url": "ftp://d:1"})).contains("ftp"), "the address comes before the missing role");
        assert!(wrong(json!({"url": "http://d:1", "worker_type": 5})).contains("worker_type"));
        assert!(wrong(json!({"url": "http://d:1"})).contains("worker_type is missing"));
        for (name, value) in
            [("api_key", json!(5)), ("disable_health_check", json!("yes")), ("bootstrap_port", json!("x"))]
        {
            let mut fields = json!({"url": "http://d:1", "worker_type": "decode"});
            fields[name] = value;
            assert!(wrong(fields).contains(name), "{name}");
        }
        assert!(of(&json!({"url": "http://d:1"}), false).unwrap().1.is_empty());
    }

    #[test]
    fn an_engine_is_listed_by_rank_once_its_ranks_are_known() {
        let urls = |item| by_rank(item).iter().map(|i| (i["url"].clone(), i["id"].clone())).collect::<Vec<_>>();
        let known = json!({"id": "x", "url": "http://a:1", "ranks": [0, 1]});
        assert_eq!(urls(known), [(json!("http://a:1@0"), json!("x")), (json!("http://a:1@1"), json!("x"))]);
        assert_eq!(urls(json!({"id": "x", "url": "http://a:1"})), [(json!("http://a:1"), json!("x"))]);
    }

    #[test]
    fn queries_are_decoded() {
        let uri = "/add_worker?url=http%3A%2F%2F%5B%3A%3A1%5D%3A9001&worker_type=decode&x".parse().unwrap();
        let pairs = query(&uri);
        assert_eq!(pairs[0], ("url".to_owned(), "http://[::1]:9001".to_owned()));
        assert_eq!(pairs[1].1, "decode");
        assert_eq!(pairs[2], ("x".to_owned(), String::new()));
        assert_eq!(decode_percent("100%zz%4"), "100%zz%4");
    }
}
