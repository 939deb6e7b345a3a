use serde_json::{Value, json};

use super::{Lab, keys, ordered_keys};
use crate::emulator::EmulateOptions;
use crate::emulator::pattern::nonce_of_text;
use crate::emulator::reply::text;

fn regular() -> EmulateOptions {
    EmulateOptions { prefill: 0, decode: 0, regular: 2, ..Lab::options() }
}

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":3"#;

#[tokio::test]
async fn generate_has_the_keys_of_the_release_in_its_order() {
    let stamps =
        ["storage_prefetch_wait", "storage_staging_wait", "forward_entry_time", "prefill_finished_time", "queue_time"];
    let ends = [
        "e2e_latency",
        "request_received_ts",
        "first_token_latency",
        "api_server_dispatch_finish_ts",
        "request_finished_ts",
        "decode_throughput",
        "response_sent_to_client_ts",
    ];
    for (version, new) in [("0.5.23", true), ("0.5.12", false)] {
        let lab = Lab::start(&EmulateOptions { engine_version: version.to_owned(), ..regular() });
        let reply = lab
            .post(
                0,
                "/generate",
                r#"{"rid":"me","text":"hello there","sampling_params":{"max_new_tokens":3},"return_logprob":true,"return_routed_experts":true}"#,
            )
            .await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.headers["content-type"], "application/json");
        assert_eq!(reply.headers["content-length"], reply.body.len().to_string());
        assert_eq!(ordered_keys(&reply.text()), ["text", "output_ids", "meta_info"]);
        let body = reply.text();
        let meta = &body[body.find("\"meta_info\":").unwrap() + 12..body.len() - 1];
        let mut want = vec!["id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions"];
        want.extend(stamps.iter().filter(|_| new));
        want.extend(["input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"]);
        want.extend(["reasoning_tokens", "completion_tokens", "cached_tokens"]);
        want.extend(["weight_versions", "cached_tokens_details"].iter().filter(|_| new));
        want.extend(["routed_experts", "dp_rank"]);
        want.extend(if new { &ends[..] } else { &ends[..1] });
        assert_eq!(ordered_keys(meta), want, "{version}");
        let json = reply.json();
        assert_eq!(json["meta_info"]["id"], "me");
        assert_eq!(json["meta_info"]["finish_reason"], json!({"type": "length", "length": 3}));
        assert_eq!(json["meta_info"]["prompt_tokens"], 3);
        assert_eq!(json["text"], text(nonce_of_text("hello there"), 3));
        let rows = base64_simd::STANDARD.decode_to_vec(json["meta_info"]["routed_experts"].as_str().unwrap()).unwrap();
        assert_eq!(rows.len(), (3 + 3 - 1) * 4 * 2 * 4);
    }
}

#[tokio::test]
async fn batches_and_samples_answer_with_lists() {
    let lab = Lab::start(&regular());
    let batch = lab
        .post(0, "/generate", r#"{"input_ids":[[1,2],[3]],"sampling_params":{"max_new_tokens":2},"rid":["a","b"]}"#)
        .await
        .json();
    assert_eq!(batch.as_array().unwrap().len(), 2);
    assert_eq!(
        (batch[0]["meta_info"]["id"].as_str(), batch[1]["meta_info"]["prompt_tokens"].as_u64()),
        (Some("a"), Some(1))
    );
    let samples =
        lab.post(0, "/generate", r#"{"input_ids":[1,2],"sampling_params":{"max_new_tokens":2,"n":3}}"#).await.json();
    assert_eq!(samples.as_array().unwrap().len(), 3);
    let one = lab.post(0, "/generate", r#"{"input_ids":[[1,2]],"sampling_params":{"max_new_tokens":2}}"#).await.json();
    assert_eq!(one.as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_generate_stream_is_cumulative_and_its_last_event_has_the_payload() {
    let lab = Lab::start(&regular());
    let body =
        r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":8},"stream":true,"return_routed_experts":true}"#;
    let reply = lab.post(0, "/generate", body).await;
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    let mut events = reply.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let (last, before) = events.split_last().unwrap();
    assert!(!before.is_empty());
    let mut seen = 0;
    for event in before {
        assert!(event["meta_info"]["finish_reason"].is_null());
        assert!(event["meta_info"].get("routed_experts").is_none());
        let tokens = event["output_ids"].as_array().unwrap().len();
        assert!(tokens > seen);
        seen = tokens;
        let ids = &last["output_ids"].as_array().unwrap()[..tokens];
        assert_eq!(event["output_ids"].as_array().unwrap(), ids);
    }
    assert_eq!(last["output_ids"].as_array().unwrap().len(), 8);
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "length");
    assert!(last["meta_info"]["routed_experts"].is_string());
    assert!(last.get("index").is_none());
    let two = lab
        .post(0, "/generate", r#"{"input_ids":[[1],[2]],"sampling_params":{"max_new_tokens":2},"stream":true}"#)
        .await;
    let indices: std::collections::BTreeSet<u64> = two
        .events()
        .iter()
        .filter(|e| *e != "[DONE]")
        .map(|e| serde_json::from_str::<Value>(e).unwrap()["index"].as_u64().unwrap())
        .collect();
    assert_eq!(indices.into_iter().collect::<Vec<_>>(), [0, 1]);
}

#[tokio::test]
async fn chat_puts_r3_into_sglext_or_with_meta_info_into_each_choice() {
    let lab = Lab::start(&regular());
    let reply =
        lab.post(0, "/v1/chat/completions", &format!(r#"{CHAT},"return_routed_experts":true,"logprobs":true}}"#)).await;
    assert_eq!(
        ordered_keys(&reply.text()),
        ["id", "object", "created", "model", "choices", "usage", "metadata", "sglext"]
    );
    let json = reply.json();
    assert_eq!((json["object"].as_str(), json["model"].as_str()), (Some("chat.completion"), Some("m")));
    assert_eq!(json["id"].as_str().unwrap().len(), 32);
    let choice = &json["choices"][0];
    assert_eq!(keys(choice), ["finish_reason", "index", "logprobs", "matched_stop", "message"]);
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 3);
    assert!(json["sglext"]["routed_experts"].is_string());
    assert_eq!(json["usage"]["total_tokens"], 3 + 3);
    let two = lab
        .post(
            0,
            "/v1/chat/completions",
            &format!(r#"{CHAT},"return_routed_experts":true,"return_meta_info":true,"n":2}}"#),
        )
        .await
        .json();
    assert!(two.get("sglext").is_none());
    for choice in two["choices"].as_array().unwrap() {
        assert!(choice["meta_info"]["routed_experts"].is_string());
    }
    assert_eq!(two["usage"]["completion_tokens"], 6);
}

#[tokio::test]
async fn a_chat_stream_opens_with_the_role_and_ends_with_reason_payload_and_usage() {
    let lab = Lab::start(&regular());
    let body =
        format!(r#"{CHAT},"stream":true,"return_routed_experts":true,"stream_options":{{"include_usage":true}}}}"#);
    let mut events = lab.post(0, "/v1/chat/completions", &body).await.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    assert!(events.iter().all(|e| e["object"] == "chat.completion.chunk"));
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let content: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(content, text(nonce_of_text("hello there"), 3));
    let [finish, payload, usage] = &events[events.len() - 3..] else { panic!("three closing events") };
    assert_eq!(finish["choices"][0]["finish_reason"], "length");
    assert_eq!(payload["choices"], json!([]));
    assert!(payload["sglext"]["routed_experts"].is_string());
    assert_eq!(usage["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn completions_echo_and_count_and_stream() {
    let lab = Lab::start(&regular());
    let body = r#"{"model":"m","prompt":["one","two"],"max_tokens":2,"n":2,"echo":true,"logprobs":1,"return_routed_experts":true}"#;
    let json = lab.post(0, "/v1/completions", body).await.json();
    let choices = json["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert!(choices[1]["text"].as_str().unwrap().starts_with("one"));
    assert!(choices[2]["text"].as_str().unwrap().starts_with("two"));
    let lengths = |key: &str| choices[0]["logprobs"][key].as_array().unwrap().len();
    assert_eq!((lengths("tokens"), lengths("token_logprobs"), lengths("top_logprobs")), (3, 3, 3));
    assert!(json["sglext"]["routed_experts"].is_string());
    assert_eq!(json["usage"]["prompt_tokens"], 2);
    let events =
        lab.post(0, "/v1/completions", r#"{"model":"m","prompt":"one","max_tokens":3,"stream":true}"#).await.events();
    let text: String = events
        .iter()
        .filter(|e| *e != "[DONE]")
        .map(|e| serde_json::from_str::<Value>(e).unwrap()["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, super::super::reply::text(nonce_of_text("one"), 3));
}

#[tokio::test]
async fn loads_have_every_field_of_the_release_on_the_wires_scale() {
    let lab = Lab::pair();
    let json = lab.get(1, "/v1/loads").await.json();
    assert_eq!(keys(&json), ["accelerator", "loads", "num_accelerators", "timestamp", "version"]);
    let loads = json["loads"].as_array().unwrap();
    assert_eq!(loads.len(), 2);
    for field in [
        "timestamp",
        "dp_rank",
        "num_running_reqs",
        "num_waiting_reqs",
        "num_waiting_uncached_tokens",
        "num_used_tokens",
        "num_total_tokens",
        "num_active_tokens",
        "num_prealloc_ready_tokens",
        "max_total_num_tokens",
        "max_running_requests",
        "token_usage",
        "gen_throughput",
        "cache_hit_rate",
        "utilization",
        "total_prefill_uncached_tokens",
        "total_prefill_busy_us",
        "decode_moments",
        "memory",
        "disaggregation",
        "queues",
    ] {
        assert!(loads[0].get(field).is_some(), "{field}");
    }
    assert_eq!(loads[0]["max_total_num_tokens"], 51_300);
    assert_eq!(loads[1]["disaggregation"]["mode"], "decode");
    assert_eq!(lab.get(1, "/v1/loads?dp_rank=1&include=core").await.json()["loads"][0]["dp_rank"], 1);
    assert!(lab.get(1, "/v1/loads?include=core").await.json()["loads"][0].get("memory").is_none());
    assert_eq!(lab.get(1, "/v1/loads?dp_rank=7").await.status, 400);
    assert!(
        lab.get(1, "/v1/loads?format=prometheus").await.text().contains("sglang_num_running_reqs{dp_rank=\"1\"} 0")
    );
    assert_eq!(lab.get(1, "/get_load").await.status, 404);
    let old = Lab::start(&EmulateOptions { engine_version: "0.5.12".to_owned(), ..Lab::options() });
    let json = old.get(0, "/v1/loads").await.json();
    assert_eq!(keys(&json), ["aggregate", "dp_rank_count", "loads", "timestamp", "version"]);
    assert!(json["loads"][0].get("num_active_tokens").is_none());
    assert_eq!(json["loads"][0]["num_total_reqs"], 0);
    assert_eq!(old.get(0, "/get_load").await.json().as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn server_info_model_info_and_metrics_tell_a_router_what_it_needs() {
    let lab = Lab::pair();
    let info = lab.get(1, "/get_server_info").await.json();
    assert_eq!(info, lab.get(1, "/server_info").await.json());
    assert_eq!((info["dp_size"].as_u64(), info["disaggregation_mode"].as_str()), (Some(2), Some("decode")));
    assert_eq!(info["internal_states"][1]["effective_max_running_requests_per_dp"], 128);
    assert_eq!(info["max_running_requests"], 256);
    assert_eq!(info["emulator"]["waiting_timeout_s"], 3.0);
    assert_eq!(lab.get(0, "/model_info").await.json()["disaggregation_mode"], "prefill");
    assert_eq!(lab.get(0, "/get_model_info").await.status, 200);
    assert_eq!(lab.get(0, "/v1/models").await.json()["data"][0]["id"], "emulated-moe");
    let metrics = lab.get(1, "/metrics").await.text();
    for line in [
        r#"sglang:mamba_available_tokens{dp_rank="1",engine_type="decode",model_name="emulated-moe",moe_ep_rank="1",pp_rank="0",tp_rank="1"} 128.0"#,
        r#"sglang:num_decode_transfer_queue_reqs{dp_rank="0",engine_type="decode",model_name="emulated-moe",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.0"#,
        "# TYPE sglang:num_transfer_failed_reqs_total counter",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    assert_eq!(lab.get(0, "/ready").await.status, 200);
    assert_eq!(lab.get(0, "/health").await.status, 200);
    assert_eq!(lab.get(0, "/health_generate").await.status, 200);
    assert_eq!(lab.get(0, "/nothing").await.json(), json!({"detail": "Not Found"}));
}

#[tokio::test]
async fn the_bootstrap_server_tells_topology_and_ranks() {
    let lab = Lab::pair();
    let base = format!("http://127.0.0.1:{}", lab.bootstrap());
    let get = async |path: &str| lab.try_call(http::Method::GET, &format!("{base}{path}"), "", &[]).await.unwrap();
    let post = async |path: &str, body: &str| {
        lab.try_call(http::Method::POST, &format!("{base}{path}"), body, &[]).await.unwrap()
    };
    let route = |dp: i64, other: i64| {
        format!("/route?prefill_dp_rank={dp}&prefill_cp_rank={other}&target_tp_rank={other}&target_pp_rank={other}")
    };
    assert_eq!(get("/health").await.text(), "OK");
    let topology = get(&route(-1, -1)).await.json();
    assert_eq!((topology["dp_size"].as_u64(), topology["follow_bootstrap_room"].as_bool()), (Some(2), Some(true)));
    assert_eq!(topology["prefill_http_port"], lab.url(0).rsplit(':').next().unwrap().parse::<u16>().unwrap());
    assert!(get(&route(1, 0)).await.json()["rank_port"].is_u64());
    assert_eq!(get(&route(2, 0)).await.status, 404);
    assert_eq!(get("/route?prefill_dp_rank=1").await.status, 400);
    assert_eq!(post("/register_dp_rank", r#"{"bootstrap_room":77,"dp_rank":1}"#).await.text(), "OK");
    assert_eq!(post("/query_dp_ranks", r#"{"bootstrap_rooms":[77,78]}"#).await.json(), json!({"77": 1}));
}

#[tokio::test]
async fn errors_have_the_form_of_their_route() {
    let lab = Lab::start(&regular());
    let bad = lab.post(0, "/generate", "{").await;
    assert_eq!(
        (bad.status, bad.json()["object"].clone(), bad.json()["code"].clone()),
        (400, json!("error"), json!(400))
    );
    let missing = lab.post(0, "/generate", "{}").await;
    assert_eq!(missing.status, 400);
    assert!(missing.json()["error"]["message"].is_string());
    let empty = lab.post(0, "/v1/chat/completions", r#"{"model":"m","messages":[]}"#).await;
    assert_eq!((empty.status, empty.json()["type"].clone()), (400, json!("BadRequest")));
    let rank = lab.post(0, "/generate", r#"{"input_ids":[1],"routed_dp_rank":9,"stream":true}"#).await;
    assert_eq!(rank.status, 200);
    let events = rank.events();
    let first: Value = serde_json::from_str(&events[0]).unwrap();
    assert_eq!((first["error"]["code"].clone(), events[1].as_str()), (json!(400), "[DONE]"));
    assert_eq!(
        lab.try_call(http::Method::GET, &format!("{}/generate", lab.url(0)), "", &[]).await.unwrap().status,
        405
    );
}

#[tokio::test]
async fn the_rank_header_beats_the_body_on_openai_routes() {
    let lab = Lab::start(&regular());
    let url = format!("{}/v1/chat/completions", lab.url(0));
    let body = format!(r#"{CHAT},"return_meta_info":true,"routed_dp_rank":0}}"#);
    for rank in ["0", "1"] {
        let reply = lab.try_call(http::Method::POST, &url, &body, &[("x-data-parallel-rank", rank)]).await.unwrap();
        assert_eq!(reply.json()["choices"][0]["meta_info"]["dp_rank"].to_string(), rank);
    }
    let reply = lab.try_call(http::Method::POST, &url, &body, &[("x-data-parallel-rank", "x")]).await.unwrap();
    assert_eq!(reply.status, 400);
}

#[tokio::test]
async fn fast_mode_answers_every_route_at_once() {
    let lab = Lab::start(&EmulateOptions { fast: true, ..Lab::options() });
    for engine in [0, 1] {
        assert_eq!(lab.post(engine, "/generate", r#"{"input_ids":[1]}"#).await.json()["meta_info"]["id"], "fast");
        let events = lab.post(engine, "/v1/chat/completions", r#"{"stream":true}"#).await.events();
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
        assert_eq!(lab.get(engine, "/v1/loads").await.json()["loads"].as_array().unwrap().len(), 2);
        assert_eq!(lab.get(engine, "/server_info").await.status, 200);
    }
}

#[tokio::test]
async fn an_idle_engine_reports_its_load_as_of_now() {
    let lab = Lab::start(&EmulateOptions { fast: true, ..Lab::options() });
    let stamp = async || {
        lab.get(0, "/v1/loads").await.json()["loads"][0]["timestamp"].as_f64().expect("a rank's own timestamp")
    };
    let before = stamp().await;
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    let passed = stamp().await - before;
    assert!(passed >= 0.1, "the report's own time moved by {passed} s in 0.1 s");
}
