//! Control calls: each goes exactly once to every physical engine, and the reply lists every engine's own status and body.
//! A pause closes the router's gate before any engine hears of it, and a continue opens it after all of them did.
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Uri, header};
use r3router_core::topology::Role;
use serde_json::{Value, json};

use crate::app::App;
use crate::ask::{Answer, NoAnswer, ask};
use crate::errors::{Reply, error_reply, json_reply};
use crate::passthrough::is_json;
use crate::upstream::Call;
use crate::worker::Worker;
use crate::workers::role_name;

/// Paths that every engine must hear.
pub const BROADCAST: [&str; 25] = [
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
];

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
            object.insert("status".into(), Value::Null);
            object.insert("error".into(), error.to_string().into());
        }
    }
    line
}

/// Sends one call to every active engine at once; answers in the order of registration.
pub async fn broadcast(app: &Arc<App>, method: &Method, uri: &Uri, headers: &HeaderMap, body: &Bytes) -> Vec<Told> {
    let limit = app.settings.request_timeout_secs;
    let mut tasks = Vec::new();
    // Decode first: it must know of a pause or an abort before prefill stops serving it.
    let mut workers = app.registry.active();
    workers.sort_by_key(|w| w.role == Role::Prefill);
    for worker in workers {
        let mut call = Call {
            method: method.clone(),
            uri: uri.clone(),
            headers: HeaderMap::new(),
            pieces: Arc::from([body.clone()]),
        };
        let content_type = headers.get(header::CONTENT_TYPE).cloned();
        if !body.is_empty() {
            let json = HeaderValue::from_static("application/json");
            call.headers.insert(header::CONTENT_TYPE, content_type.unwrap_or(json));
        }
        let call = call.with_key(worker.key.get().as_ref());
        let asked = Arc::clone(&worker);
        tasks.push((worker, app.runtime.spawn(async move { ask(&asked.pool, &call, limit).await })));
    }
    let mut told = Vec::with_capacity(tasks.len());
    for (worker, task) in tasks {
        let answer = task.await.unwrap_or(Err(NoAnswer::Slow(limit)));
        told.push(Told { worker, answer });
    }
    told
}

/// Answers a control call.
pub async fn handle(app: &Arc<App>, method: &Method, uri: &Uri, headers: &HeaderMap, body: Bytes) -> Reply {
    let path = uri.path();
    // Before any engine has it: half of them may stop at another byte than the rest.
    if !body.is_empty()
        && let Err(error) = is_json(&body)
    {
        return error_reply(&error);
    }
    if path == "/pause_generation" {
        app.gate.set_paused(true);
    }
    let told = broadcast(app, method, uri, headers, &body).await;
    let ok = told.iter().filter(|t| t.answer.as_ref().is_ok_and(Answer::ok)).count();
    let all = ok == told.len();
    // Opened last, and only when every engine goes on: a pair with one paused side would burn the other's clock.
    if path == "/continue_generation" && all {
        app.gate.set_paused(false);
    }
    let status = if told.is_empty() { 503 } else { worst(&told) };
    let mut reply = json!({
        "success": all && !told.is_empty(),
        "status": if all && !told.is_empty() { "success" } else { "error" },
        "message": message(path, ok, told.len(), app.gate.is_paused()),
        "workers": told.iter().map(told_json).collect::<Vec<_>>(),
        "paused": app.gate.is_paused(),
    });
    if path == "/flush_cache"
        && let Some(object) = reply.as_object_mut()
    {
        object.insert("workers_flushed".into(), ok.into());
        object.insert("total_http_workers".into(), told.len().into());
        object.insert("total_workers".into(), told.len().into());
    }
    json_reply(status, &reply)
}

fn message(path: &str, ok: usize, all: usize, paused: bool) -> String {
    let gate = match path {
        "/pause_generation" => "; the router dispatches nothing until /continue_generation",
        "/continue_generation" if paused => "; the router's gate stays closed until every engine has gone on",
        "/continue_generation" => "; the router dispatches again",
        _ => "",
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
