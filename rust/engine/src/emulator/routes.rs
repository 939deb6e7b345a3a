//! The routes of an engine's port.
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode, header};
use serde::Deserialize;
use serde_json::json as object;

use super::agent::Part;
use super::body::EngineBody;
use super::engine::{Engine, mode_name};
use super::fast::Prepared;
use super::fault::{Beyond, FaultRequest, Meets};
use super::generate::{self, Handled, error_object, json, with_type};
use super::introspect;
use super::request::Api;
use super::truth::EngineTruth;
use crate::model::{Event, Fault, PauseMode, Version};

const FLUSHED: &str = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n";

fn empty(status: StatusCode) -> Response<EngineBody> {
    let mut response = Response::new(EngineBody::bytes(Bytes::new()));
    *response.status_mut() = status;
    response
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<EngineBody> {
    with_type(status, "text/plain; charset=utf-8", body)
}

fn not_found() -> Response<EngineBody> {
    json(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#)
}

/// Answers one request. `None` resets the connection.
pub(crate) async fn handle(engine: Arc<Engine>, prepared: Option<&Prepared>, parts: Parts, body: Bytes) -> Handled {
    let path = parts.uri.path();
    let api = match path {
        "/generate" => Some(Api::Generate),
        "/v1/chat/completions" => Some(Api::Chat),
        "/v1/completions" => Some(Api::Completions),
        _ => None,
    };
    if let Some(api) = api {
        if parts.method != Method::POST && !(api == Api::Generate && parts.method == Method::PUT) {
            return Some(json(StatusCode::METHOD_NOT_ALLOWED, r#"{"detail":"Method Not Allowed"}"#));
        }
        if let Some(prepared) = prepared {
            return Some(prepared.reply(api, &body));
        }
        return generating(engine, api, body, &parts).await;
    }
    if let Some(rest) = path.strip_prefix("/emulator/") {
        return Some(emulator(&engine, &parts.method, rest, &body));
    }
    if let Some(id) = path.strip_prefix("/r3/") {
        return Some(segment(&engine, &parts, id));
    }
    served(&engine, &parts, path, &body).await
}

async fn generating(engine: Arc<Engine>, api: Api, mut body: Bytes, parts: &Parts) -> Handled {
    let (delay, meets) = engine.faults.lock().meet();
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    match meets {
        Meets::Nothing => {}
        Meets::Reset => return None,
        Meets::Hang => std::future::pending::<()>().await,
        Meets::Status(status, given) => {
            let status_code = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            return Some(match given {
                Some(body) => json(status_code, body),
                None => error_object(status, &status.to_string(), "fault on demand"),
            });
        }
    }
    if api != Api::Generate
        && let Some(rank) = parts.headers.get("x-data-parallel-rank")
    {
        match rank.to_str().ok().and_then(|r| r.trim().parse::<i64>().ok()) {
            Some(rank) => body = with_rank(&body, rank),
            None => {
                return Some(error_object(
                    400,
                    "BadRequest",
                    "Invalid X-Data-Parallel-Rank header: must be an integer",
                ));
            }
        }
    }
    let cut = engine.faults.lock().cut();
    let response = generate::handle(engine, api, body).await?;
    Some(match cut {
        Some(bytes) => response.map(|body| body.cut_after(bytes)),
        None => response,
    })
}

/// The header beats the body on the OpenAI routes. It is put before the last brace, where it wins.
fn with_rank(body: &[u8], rank: i64) -> Bytes {
    match serde_json::from_slice::<serde_json::Value>(body) {
        Ok(serde_json::Value::Object(mut map)) => {
            map.remove("data_parallel_rank");
            map.insert("routed_dp_rank".to_owned(), rank.into());
            serde_json::Value::from(map).to_string().into()
        }
        _ => Bytes::copy_from_slice(body),
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct AbortBody {
    rid: Option<String>,
    abort_all: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct PauseBody {
    mode: Option<String>,
}

#[derive(Deserialize)]
struct WeightBody {
    new_version: String,
    #[serde(default = "yes")]
    abort_all_requests: bool,
}

fn yes() -> bool {
    true
}

/// A body that may be left out; what is not JSON is the web framework's 400.
fn read<'a, T: Deserialize<'a> + Default>(body: &'a [u8]) -> Result<T, Box<Response<EngineBody>>> {
    if body.trim_ascii().is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(body).map_err(|e| Box::new(error_object(400, "Bad Request", &e.to_string())))
}

async fn served(engine: &Arc<Engine>, parts: &Parts, path: &str, body: &[u8]) -> Handled {
    let drive = &engine.drive;
    let id = engine.id;
    let (get, post) = (parts.method == Method::GET, parts.method == Method::POST);
    let query = parts.uri.query();
    // Whatever needs the HTTP loop or the scheduler waits for it: a starved front end answers late here too.
    let http = async || if engine.fast { Some(200) } else { drive.ask(id, |key| Event::Http { key }).await };
    let scheduler = async || if engine.fast { Some(200) } else { drive.ask(id, |key| Event::Scheduler { key }).await };
    Some(match path {
        "/model_info" | "/get_model_info" if get => {
            http().await?;
            json(StatusCode::OK, introspect::model_info(engine))
        }
        "/server_info" | "/get_server_info" if get => {
            scheduler().await?;
            json(StatusCode::OK, introspect::server_info(engine))
        }
        "/v1/loads" if get => {
            if !engine.fast {
                drive.ask(id, |key| Event::Loads { key }).await?;
            }
            match introspect::loads(engine, query) {
                Ok(body) if introspect::parameter(query, "format") == Some("prometheus") => text(StatusCode::OK, body),
                Ok(body) => json(StatusCode::OK, body),
                Err(message) => error_object(400, "400", &message),
            }
        }
        "/get_load" if get && engine.model.version == Version::V0_5_12 => {
            scheduler().await?;
            json(StatusCode::OK, introspect::get_load(engine))
        }
        "/v1/models" if get => {
            http().await?;
            json(StatusCode::OK, introspect::models(engine))
        }
        "/metrics" | "/metrics/" if get => {
            http().await?;
            with_type(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", introspect::metrics(engine))
        }
        "/health" | "/health_generate" if get => health(engine).await?,
        "/ready" if get && engine.model.version == Version::V0_5_23 => {
            empty(if engine.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE })
        }
        "/abort_request" if post => match read::<AbortBody>(body) {
            Err(response) => *response,
            Ok(abort) => {
                drive.tally(id, |tally| tally.aborts += 1);
                let all = abort.abort_all.unwrap_or(false);
                drive.ask(id, |key| Event::Abort { key, rid: abort.rid.unwrap_or_default().into(), all }).await?;
                empty(StatusCode::OK)
            }
        },
        "/pause_generation" if post => match read::<PauseBody>(body) {
            Err(response) => *response,
            Ok(pause) => {
                let mode = match pause.mode.as_deref() {
                    None | Some("abort") => PauseMode::Abort,
                    Some("retract") => PauseMode::Retract,
                    Some("in_place") => PauseMode::InPlace,
                    Some(other) => {
                        return Some(error_object(
                            400,
                            "Bad Request",
                            &format!("mode {other} is not abort, retract or in_place"),
                        ));
                    }
                };
                drive.ask(id, |key| Event::Pause { key, mode }).await?;
                json(StatusCode::OK, r#"{"message":"Generation paused successfully.","status":"ok"}"#)
            }
        },
        "/continue_generation" if post => {
            drive.ask(id, |key| Event::Continue { key }).await?;
            json(StatusCode::OK, r#"{"message":"Generation continued successfully.","status":"ok"}"#)
        }
        "/flush_cache" if get || post => {
            let status = drive.ask(id, |key| Event::Flush { key }).await?;
            if status == 200 {
                text(StatusCode::OK, FLUSHED)
            } else {
                text(StatusCode::BAD_REQUEST, "Flush cache failed.\n")
            }
        }
        "/update_weight_version" if post => match serde_json::from_slice::<WeightBody>(body) {
            Err(error) => error_object(400, "Bad Request", &error.to_string()),
            Ok(update) => {
                if update.abort_all_requests {
                    drive.ask(id, |key| Event::Abort { key, rid: "".into(), all: true }).await?;
                }
                *engine.weight_version.lock() = update.new_version.as_str().into();
                let message = format!("Weight version updated to {}", update.new_version);
                json(
                    StatusCode::OK,
                    object!({"success": true, "message": message, "new_version": update.new_version}).to_string(),
                )
            }
        },
        "/release_memory_occupation" | "/resume_memory_occupation" if post => {
            scheduler().await?;
            empty(StatusCode::OK)
        }
        _ => not_found(),
    })
}

async fn health(engine: &Arc<Engine>) -> Handled {
    let slow = engine.faults.lock().slow_health;
    if !slow.is_zero() {
        tokio::time::sleep(slow).await;
    }
    if engine.fast {
        return Some(empty(StatusCode::OK));
    }
    let status = engine.drive.ask(engine.id, |key| Event::Health { key }).await?;
    Some(empty(StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)))
}

/// What happened in this engine.
pub(crate) fn truth(engine: &Engine) -> EngineTruth {
    engine.drive.truth(engine.id, |live, tally, now| {
        tally.report(&engine.url, mode_name(engine.model.role), live, now, engine.scale)
    })
}

fn emulator(engine: &Arc<Engine>, method: &Method, rest: &str, body: &[u8]) -> Response<EngineBody> {
    match (rest, method) {
        ("truth", &Method::GET) => match serde_json::to_string(&truth(engine)) {
            Ok(body) => json(StatusCode::OK, body),
            Err(error) => error_object(500, "500", &error.to_string()),
        },
        ("truth/reset", &Method::POST) => {
            engine.drive.truth(engine.id, |_, tally, now| tally.reset(now));
            json(StatusCode::OK, "{}")
        }
        ("fault", &Method::POST) => match serde_json::from_slice::<FaultRequest>(body) {
            Err(error) => error_object(400, "Bad Request", &error.to_string()),
            Ok(fault) => match take_fault(engine, fault) {
                Ok(()) => json(StatusCode::OK, "{}"),
                Err(message) => error_object(400, "Bad Request", &message),
            },
        },
        _ => not_found(),
    }
}

/// Puts a fault on an engine.
pub(crate) fn take_fault(engine: &Arc<Engine>, fault: FaultRequest) -> Result<(), String> {
    let beyond = engine.faults.lock().set(fault)?;
    match beyond {
        Beyond::Nothing => {}
        Beyond::Model(fault) => engine.drive.tell(engine.id, Event::Fault(fault)),
        Beyond::Refuse(period) => {
            engine.listen(false);
            let engine = engine.clone();
            tokio::spawn(async move {
                tokio::time::sleep(period).await;
                engine.listen(true);
            });
        }
        Beyond::Kill => {
            engine.drive.tell(engine.id, Event::Fault(Fault::Kill));
            engine.died();
        }
        Beyond::Revive => {
            engine.drive.tell(engine.id, Event::Fault(Fault::Revive));
            engine.listen(true);
        }
    }
    Ok(())
}

/// Rows that the plug-in left on this host.
fn segment(engine: &Engine, parts: &Parts, id: &str) -> Response<EngineBody> {
    let Ok(id) = id.parse::<u64>() else { return not_found() };
    if parts.method == Method::DELETE {
        return empty(if engine.agent.delete(id) { StatusCode::NO_CONTENT } else { StatusCode::NOT_FOUND });
    }
    if parts.method != Method::GET {
        return json(StatusCode::METHOD_NOT_ALLOWED, r#"{"detail":"Method Not Allowed"}"#);
    }
    let Some(rows) = engine.agent.get(id) else { return not_found() };
    let range = parts.headers.get(header::RANGE).and_then(|v| v.to_str().ok());
    let part = match Part::parse(parts.uri.query(), range) {
        Ok(part) => part,
        Err(message) => return error_object(400, "Bad Request", &message),
    };
    let wide = introspect::parameter(parts.uri.query(), "dtype") == Some("int32");
    let shape = engine.pattern.shape();
    let width = if wide { shape.row_bytes() } else { shape.narrow_row_bytes() } as u64;
    let total = u64::from(rows.len()) * width;
    let Some((from, to)) = part.span(total, width) else {
        let mut response = empty(StatusCode::RANGE_NOT_SATISFIABLE);
        if let Ok(value) = HeaderValue::from_str(&format!("bytes */{total}")) {
            response.headers_mut().insert(header::CONTENT_RANGE, value);
        }
        return response;
    };
    let (first, last) = ((from / width) as u32, to.div_ceil(width) as u32);
    let mut bytes = Vec::new();
    if wide {
        engine.pattern.append_int32(&rows, first, last, &mut bytes);
    } else {
        engine.pattern.append_narrow(&rows, first, last, &mut bytes);
    }
    let skip = (from - u64::from(first) * width) as usize;
    let bytes = Bytes::from(bytes).slice(skip..skip + (to - from) as usize);
    engine.drive.tally(engine.id, |tally| tally.r3_fetched_bytes += to - from);
    let partial = range.is_some();
    let status = if partial { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let mut response = with_type(status, "application/octet-stream", bytes);
    let headers = response.headers_mut();
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if partial
        && to > from
        && let Ok(value) = HeaderValue::from_str(&format!("bytes {from}-{}/{total}", to - 1))
    {
        headers.insert(header::CONTENT_RANGE, value);
    }
    response
}
