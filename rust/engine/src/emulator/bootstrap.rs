//! The bootstrap server of a prefill engine: where decode engines (and routers) learn its topology.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Response, StatusCode};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;

use super::body::EngineBody;
use super::engine::Engine;
use super::generate::{json, with_type};
use super::introspect::parameter;
use crate::model::Version;

/// `SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL`, of the model's time.
const ENTRY_LIFE: Duration = Duration::from_secs(120);

/// Which rank a room was registered for.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    rooms: Mutex<HashMap<u64, (u16, Instant)>>,
}

#[derive(Deserialize)]
struct Register {
    bootstrap_room: u64,
    dp_rank: u16,
}

#[derive(Deserialize)]
struct Query {
    bootstrap_rooms: Vec<u64>,
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<EngineBody> {
    with_type(status, "text/plain; charset=utf-8", body)
}

/// Answers one request.
pub(crate) fn handle(
    engine: &Arc<Engine>,
    registry: &Registry,
    method: &Method,
    path: &str,
    query: Option<&str>,
    body: &[u8],
) -> Response<EngineBody> {
    match (path, method) {
        ("/route", &Method::GET) => route(engine, query),
        // Ranks of a real engine register themselves by PUT; those of this one are known from the start.
        ("/health", _) | ("/route", &Method::PUT) => text(StatusCode::OK, "OK"),
        ("/route", _) => with_type(StatusCode::METHOD_NOT_ALLOWED, "application/json", "Method not allowed"),
        ("/register_dp_rank", &Method::POST) => match serde_json::from_slice::<Register>(body) {
            Ok(entry) => {
                registry.rooms.lock().insert(entry.bootstrap_room, (entry.dp_rank, Instant::now()));
                text(StatusCode::OK, "OK")
            }
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        },
        ("/query_dp_ranks", &Method::POST) => match serde_json::from_slice::<Query>(body) {
            Ok(wanted) => {
                let mut rooms = registry.rooms.lock();
                let life = engine.scale.real(ENTRY_LIFE);
                rooms.retain(|_, (_, at)| at.elapsed() < life);
                let found: serde_json::Map<_, _> = wanted
                    .bootstrap_rooms
                    .iter()
                    .filter_map(|room| rooms.get(room).map(|(rank, _)| (room.to_string(), (*rank).into())))
                    .collect();
                json(StatusCode::OK, serde_json::Value::from(found).to_string())
            }
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        },
        _ => text(StatusCode::NOT_FOUND, "404: Not Found"),
    }
}

fn route(engine: &Engine, query: Option<&str>) -> Response<EngineBody> {
    let mut numbers = [0_i64; 4];
    for (slot, name) in
        numbers.iter_mut().zip(["prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"])
    {
        match parameter(query, name).filter(|v| !v.is_empty()).map(str::parse) {
            Some(Ok(number)) => *slot = number,
            Some(Err(_)) => return text(StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error"),
            None => return text(StatusCode::BAD_REQUEST, "Missing inputs for bootstrap server."),
        }
    }
    if !engine.is_ready() {
        return text(
            StatusCode::SERVICE_UNAVAILABLE,
            "Prefill server not fully registered yet (0 workers registered).",
        );
    }
    let ranks = i64::from(engine.model.ranks);
    if numbers == [-1; 4] {
        let mut topology = json!({
            "attn_tp_size": 1,
            "attn_cp_size": 1,
            "dp_size": ranks,
            "pp_size": 1,
            "page_size": engine.scale.wire(engine.model.page_size.into()),
            "kv_cache_dtype": "bfloat16",
            "follow_bootstrap_room": true,
        });
        if engine.model.version == Version::V0_5_23
            && let serde_json::Value::Object(map) = &mut topology
        {
            map.insert("enable_dsa_cache_layer_split".into(), false.into());
            map.insert("enable_kv_cache_sharding".into(), false.into());
            map.insert("prefill_http_port".into(), engine.address.port().into());
            map.insert("decode_allocation_policy".into(), "early".into());
            for name in [
                "target_tp_rank",
                "target_tp_ranks",
                "target_cp_ranks",
                "target_pp_ranks",
                "required_dst_info_num",
                "required_prefill_response_num",
            ] {
                map.insert(name.into(), serde_json::Value::Null);
            }
        }
        return json(StatusCode::OK, topology.to_string());
    }
    let [dp, cp, tp, pp] = numbers;
    if (0..ranks).contains(&dp) && (cp, tp, pp) == (0, 0, 0) {
        let port = u32::from(engine.address.port()) + 20_000 + dp as u32;
        return json(
            StatusCode::OK,
            json!({"rank_ip": engine.address.ip().to_string(), "rank_port": port % 65_536}).to_string(),
        );
    }
    text(
        StatusCode::NOT_FOUND,
        format!("Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"),
    )
}
