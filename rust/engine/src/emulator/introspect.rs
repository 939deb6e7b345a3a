//! What an engine says about itself: `/v1/loads`, `/get_load`, `/server_info`, `/model_info`, `/v1/models`, `/metrics`, in the shapes of
//! the release that is played. Token counts are the wire's, times are real.
use std::fmt::Write as _;

use r3router_core::topology::Role;
use serde_json::{Value, json};

use super::clock::{iso_utc, unix_seconds};
use super::engine::{Engine, mode_name, type_name};
use crate::model::{RankLoad, Version};

/// Bytes of a row as `sections` of `/v1/loads?include=` name them.
struct Sections<'a>(Option<Vec<&'a str>>);

impl<'a> Sections<'a> {
    fn of(include: Option<&'a str>) -> Self {
        Self(include.map(|text| text.split(',').map(str::trim).collect()))
    }

    fn has(&self, name: &str) -> bool {
        self.0.as_ref().is_none_or(|list| list.iter().any(|s| *s == name || *s == "all"))
    }
}

/// Value of a query parameter, as it stands.
pub(crate) fn parameter<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    query?.split('&').find_map(|pair| pair.split_once('=').filter(|(key, _)| *key == name).map(|(_, value)| value))
}

fn unix_of(engine: &Engine, load: &RankLoad) -> f64 {
    engine.started_unix + engine.drive.real(load.measured_at).as_secs_f64()
}

fn load_object(engine: &Engine, load: &RankLoad, sections: &Sections<'_>) -> Value {
    let scale = engine.scale;
    let new = engine.model.version == Version::V0_5_23;
    let used = scale.wire(load.used_tokens);
    let total = scale.wire(load.max_total_tokens);
    let waiting = load.waiting_total();
    // Up to 0.5.12 requests in transfer are in the used tokens and counted once more as waiting ones (4.1).
    let in_transfer = scale.wire(load.transfer_tokens);
    let mut object = json!({
        "timestamp": unix_of(engine, load),
        "dp_rank": load.rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": waiting,
        "num_used_tokens": used,
        "num_total_tokens": if new { used } else { used + in_transfer },
        "max_total_num_tokens": total,
        "max_running_requests": load.max_running,
        "token_usage": round(load.token_usage(), 4),
        "gen_throughput": round(load.gen_throughput, 2),
        "cache_hit_rate": round(load.cache_hit_rate, 4),
        // Prefill does not know its own.
        "utilization": match load.role {
            Role::Prefill => -1.0,
            _ => round(f64::from(load.running) / f64::from(load.max_running.max(1)), 4),
        },
    });
    let Value::Object(map) = &mut object else { return object };
    if new {
        map.insert("num_waiting_uncached_tokens".into(), scale.wire(load.waiting_uncached_tokens).into());
        map.insert("num_active_tokens".into(), used.saturating_sub(in_transfer).into());
        map.insert("num_prealloc_ready_tokens".into(), scale.wire(load.prealloc_ready_tokens).into());
        map.insert("total_prefill_uncached_tokens".into(), scale.wire(load.total_prefill_uncached_tokens).into());
        let busy = load.total_prefill_busy_us as f64 / scale.factor();
        map.insert("total_prefill_busy_us".into(), (busy as u64).into());
        map.insert("decode_moments".into(), Value::Null);
    } else {
        map.insert("num_total_reqs".into(), (load.running + waiting).into());
    }
    if sections.has("memory") {
        map.insert(
            "memory".into(),
            json!({"weight_gb": 19.0, "kv_cache_gb": 105.0, "graph_gb": 1.2, "token_capacity": total}),
        );
    }
    if sections.has("disagg") && engine.model.role != Role::Regular {
        map.insert(
            "disaggregation".into(),
            json!({
                "mode": mode_name(engine.model.role),
                "prefill_bootstrap_queue_reqs": load.bootstrap,
                "prefill_inflight_queue_reqs": load.inflight,
                "decode_prealloc_queue_reqs": load.prealloc,
                "decode_transfer_queue_reqs": load.transfer,
                "decode_retracted_queue_reqs": load.retracted,
                "kv_transfer_speed_gb_s": round(load.kv_transfer_speed_gb_s, 3),
                "kv_transfer_latency_ms": round(load.kv_transfer_latency_ms / scale.factor(), 3),
            }),
        );
    }
    if sections.has("queues") {
        map.insert(
            "queues".into(),
            json!({"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": load.retracted, "prealloc_ready": 0}),
        );
    }
    object
}

fn round(value: f64, digits: i32) -> f64 {
    let unit = 10_f64.powi(digits);
    (value * unit).round() / unit
}

/// `/v1/loads`.
///
/// # Errors
/// The text of the 400 for a rank that does not exist.
pub(crate) fn loads(engine: &Engine, query: Option<&str>) -> Result<String, String> {
    let sections = Sections::of(parameter(query, "include"));
    let mut loads = engine.drive.loads(engine.id);
    if let Some(rank) = parameter(query, "dp_rank") {
        let wanted: u16 = rank.parse().map_err(|_| format!("dp_rank={rank} is not a rank"))?;
        if wanted >= engine.model.ranks {
            return Err(format!("dp_rank={wanted} out of range [0, {})", engine.model.ranks));
        }
        loads.retain(|load| load.rank == wanted);
    }
    if parameter(query, "format") == Some("prometheus") {
        return Ok(loads_text(engine, &loads));
    }
    let list: Vec<Value> = loads.iter().map(|load| load_object(engine, load, &sections)).collect();
    let timestamp = iso_utc(unix_seconds());
    let body = if engine.model.version == Version::V0_5_23 {
        json!({"timestamp": timestamp, "version": "0.5.23", "accelerator": null, "num_accelerators": 1, "loads": list})
    } else {
        let sum = |f: &dyn Fn(&RankLoad) -> u64| loads.iter().map(f).sum::<u64>();
        let n = loads.len().max(1) as f64;
        json!({
            "timestamp": timestamp,
            "version": "0.5.12",
            "dp_rank_count": loads.len(),
            "loads": list,
            "aggregate": {
                "total_running_reqs": sum(&|l| l.running.into()),
                "total_waiting_reqs": sum(&|l| l.waiting_total().into()),
                "total_reqs": sum(&|l| (l.running + l.waiting_total()).into()),
                "total_used_tokens": sum(&|l| engine.scale.wire(l.used_tokens)),
                "total_tokens": sum(&|l| engine.scale.wire(l.used_tokens + l.transfer_tokens)),
                "avg_token_usage": round(loads.iter().map(RankLoad::token_usage).sum::<f64>() / n, 4),
                "avg_throughput": round(loads.iter().map(|l| l.gen_throughput).sum::<f64>() / n, 2),
                "avg_utilization": 0.0,
            },
        })
    };
    Ok(body.to_string())
}

fn loads_text(engine: &Engine, loads: &[RankLoad]) -> String {
    let mut out = String::new();
    let mut gauge = |name: &str, value: &dyn Fn(&RankLoad) -> u64| {
        let _infallible = writeln!(out, "# TYPE sglang_{name} gauge");
        for load in loads {
            let _infallible = writeln!(out, "sglang_{name}{{dp_rank=\"{}\"}} {}", load.rank, value(load));
        }
    };
    gauge("num_running_reqs", &|l| l.running.into());
    gauge("num_waiting_reqs", &|l| l.waiting_total().into());
    gauge("num_used_tokens", &|l| engine.scale.wire(l.used_tokens));
    gauge("max_total_num_tokens", &|l| engine.scale.wire(l.max_total_tokens));
    gauge("disagg_decode_transfer_queue_reqs", &|l| l.transfer.into());
    gauge("disagg_decode_prealloc_queue_reqs", &|l| l.prealloc.into());
    out
}

/// `/get_load` of 0.5.12 (gone in 0.5.23).
pub(crate) fn get_load(engine: &Engine) -> String {
    let list: Vec<Value> = engine
        .drive
        .loads(engine.id)
        .iter()
        .map(|load| {
            json!({
                "dp_rank": load.rank,
                "num_reqs": load.running + load.waiting_total(),
                "num_waiting_reqs": load.waiting_total(),
                "num_tokens": engine.scale.wire(load.used_tokens),
                "num_pending_tokens": engine.scale.wire(load.waiting_uncached_tokens),
                "ts_tic": unix_of(engine, load),
            })
        })
        .collect();
    Value::from(list).to_string()
}

/// `/server_info` and `/get_server_info`. `waiting_timeout` is ours: an engine's clock is an environment variable that no route
/// shows, and a scaled one cannot be guessed.
pub(crate) fn server_info(engine: &Engine) -> String {
    let model = &engine.model;
    let scale = engine.scale;
    let ranks = u32::from(model.ranks);
    let total = scale.wire(model.max_total_tokens);
    let state = json!({
        "effective_max_running_requests_per_dp": model.max_running,
        "max_mamba_cache_size": model.mamba.map(|m| m.slots),
        "memory_usage": {"token_capacity": total},
        "disaggregation_mode": mode_name(model.role),
        "last_gen_throughput": 0.0,
        "weight_version": &*engine.weight_version.lock().clone(),
    });
    let mut info = json!({
        "model_path": engine.shared.config.model_name,
        "served_model_name": engine.shared.config.model_name,
        "host": engine.address.ip().to_string(),
        "port": engine.address.port(),
        "tp_size": ranks,
        "dp_size": ranks,
        "ep_size": ranks,
        "enable_dp_attention": ranks > 1,
        "load_balance_method": if model.role == Role::Prefill { "follow_bootstrap_room" } else { "round_robin" },
        "disaggregation_mode": mode_name(model.role),
        "disaggregation_bootstrap_port": engine.bootstrap.map_or(8998, |b| b.port()),
        "disaggregation_transfer_backend": "nixl",
        "disaggregation_decode_enable_radix_cache": false,
        "max_running_requests": model.max_running * ranks,
        "max_mamba_cache_size": model.mamba.map(|m| m.slots * ranks),
        "mamba_slots_per_request": model.mamba.map(|m| m.per_request),
        "page_size": scale.wire(model.page_size.into()),
        "num_reserved_decode_tokens": scale.wire(model.reserved_decode_tokens.into()),
        "disaggregation_decode_extra_slots": model.extra_slots,
        "disaggregation_decode_allocation_policy": match model.allocation {
            r3router_core::topology::Allocation::Early => "early",
            r3router_core::topology::Allocation::PrefillComplete => "prefill_complete",
        },
        "chunked_prefill_size": scale.wire(model.chunked_prefill_size.into()),
        "enable_return_routed_experts": true,
        "skip_server_warmup": true,
        "max_total_num_tokens": total,
        "max_req_input_len": total.saturating_sub(6),
        "context_length": total,
        "enable_metrics": true,
        "internal_states": vec![state; usize::from(model.ranks)],
        "version": model.version.text(),
        "emulator": {
            "scale": scale.factor(),
            "waiting_timeout_s": scale.real(model.waiting_timeout).as_secs_f64(),
            "plugin": model.r3.by_reference,
            "num_hidden_layers": engine.pattern.shape().layers,
            "num_experts_per_tok": engine.pattern.shape().top_k,
            "num_experts": engine.pattern.shape().experts,
        },
    });
    if model.version == Version::V0_5_23
        && let Value::Object(map) = &mut info
    {
        map.insert("attn_dp_size".into(), 1.into());
        map.insert("startup_time".into(), json!({}));
        map.insert("frontend".into(), "python".into());
        map.insert("launch_command".into(), "python -m r3router emulate".into());
    }
    info.to_string()
}

/// `/model_info` and `/get_model_info`.
pub(crate) fn model_info(engine: &Engine) -> String {
    let name = &engine.shared.config.model_name;
    let mut info = json!({
        "model_path": name,
        "served_model_name": name,
        "tokenizer_path": name,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": &*engine.weight_version.lock().clone(),
        "load_format": "auto",
        "reasoning_parser": null,
        "tool_call_parser": null,
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForCausalLM"],
    });
    if engine.model.version == Version::V0_5_23
        && let Value::Object(map) = &mut info
    {
        map.insert("disaggregation_mode".into(), mode_name(engine.model.role).into());
    }
    info.to_string()
}

/// `/v1/models`.
pub(crate) fn models(engine: &Engine) -> String {
    let name = &engine.shared.config.model_name;
    json!({
        "object": "list",
        "data": [{
            "id": name,
            "object": "model",
            "created": engine.started_unix as u64,
            "owned_by": "sglang",
            "root": name,
            "parent": null,
            "max_model_len": engine.scale.wire(engine.model.max_total_tokens),
        }],
    })
    .to_string()
}

/// `/metrics`: refreshed with the batch log only, as the engine's are.
pub(crate) fn metrics(engine: &Engine) -> String {
    let loads = engine.drive.metrics(engine.id);
    let scale = engine.scale;
    let labels = |load: &RankLoad| {
        format!(
            r#"{}engine_type="{}",model_name="{}",moe_ep_rank="{}",pp_rank="0",tp_rank="{}""#,
            // Without data parallelism the series carry no rank.
            if engine.model.ranks > 1 { format!("dp_rank=\"{}\",", load.rank) } else { String::new() },
            type_name(engine.model.role),
            engine.shared.config.model_name,
            load.rank,
            load.rank
        )
    };
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, value: &dyn Fn(&RankLoad) -> f64| {
        let _infallible = writeln!(out, "# HELP sglang:{name} {name}\n# TYPE sglang:{name} {kind}");
        for load in &loads {
            let _infallible = writeln!(out, "sglang:{name}{{{}}} {:?}", labels(load), value(load));
        }
    };
    let tokens = |n: u64| scale.wire(n) as f64;
    family("num_running_reqs", "gauge", &|l| l.running.into());
    family("num_queue_reqs", "gauge", &|l| l.waiting.into());
    family("token_usage", "gauge", &|l| {
        let mamba = f64::from(l.mamba_used) / f64::from(l.mamba_used + l.mamba_available.unwrap_or(0)).max(1.0);
        l.token_usage().max(mamba)
    });
    family("full_token_usage", "gauge", &RankLoad::token_usage);
    family("num_used_tokens", "gauge", &|l| tokens(l.used_tokens));
    family("kv_used_tokens", "gauge", &|l| tokens(l.used_tokens));
    family("kv_evictable_tokens", "gauge", &|l| tokens(l.evictable_tokens));
    family("kv_available_tokens", "gauge", &|l| {
        tokens(l.max_total_tokens.saturating_sub(l.used_tokens + l.evictable_tokens))
    });
    family("max_total_num_tokens", "gauge", &|l| tokens(l.max_total_tokens));
    family("page_size", "gauge", &|_| tokens(engine.model.page_size.into()));
    family("gen_throughput", "gauge", &|l| l.gen_throughput);
    family("cache_hit_rate", "gauge", &|l| l.cache_hit_rate);
    if loads.iter().any(|l| l.mamba_available.is_some()) {
        family("mamba_available_tokens", "gauge", &|l| l.mamba_available.unwrap_or(0).into());
        family("mamba_evictable_tokens", "gauge", &|_| 0.0);
        family("mamba_used_tokens", "gauge", &|l| l.mamba_used.into());
        family("mamba_usage", "gauge", &|l| {
            f64::from(l.mamba_used) / f64::from(l.mamba_used + l.mamba_available.unwrap_or(0)).max(1.0)
        });
    }
    if engine.model.role != Role::Regular {
        family("num_prefill_bootstrap_queue_reqs", "gauge", &|l| l.bootstrap.into());
        family("num_prefill_inflight_queue_reqs", "gauge", &|l| l.inflight.into());
        family("num_decode_prealloc_queue_reqs", "gauge", &|l| l.prealloc.into());
        family("num_decode_transfer_queue_reqs", "gauge", &|l| l.transfer.into());
        family("num_retracted_reqs", "gauge", &|l| l.retracted.into());
        family("pending_prealloc_token_usage", "gauge", &|l| {
            l.transfer_tokens as f64 / l.max_total_tokens.max(1) as f64
        });
        family("kv_transfer_speed_gb_s", "gauge", &|l| l.kv_transfer_speed_gb_s);
        family("kv_transfer_latency_ms", "gauge", &|l| l.kv_transfer_latency_ms / scale.factor());
    }
    family("num_bootstrap_failed_reqs_total", "counter", &|l| l.bootstrap_failed as f64);
    family("num_transfer_failed_reqs_total", "counter", &|l| l.transfer_failed as f64);
    family("num_aborted_requests_total", "counter", &|l| l.aborted as f64);
    family("num_retracted_requests_total", "counter", &|l| l.retracted_total as f64);
    out
}
