use std::sync::Arc;

use super::{Lab, Reply};
use crate::emulator::EmulateOptions;
use crate::emulator::pattern::{Pattern, R3Shape, Rows, TextStream, nonce_of_ids};
use crate::rollout::verify::TextCheck;

fn pattern() -> Arc<Pattern> {
    Pattern::new(R3Shape { layers: 4, top_k: 2, experts: 256 })
}

fn text(rows: Rows) -> String {
    let mut stream = TextStream::new(pattern(), rows);
    let mut out = Vec::new();
    while stream.next_tile(&mut out) {}
    String::from_utf8(out).unwrap()
}

fn raw(reply: &Reply, place: &str) -> Vec<u8> {
    let json = reply.json();
    let text = json.pointer(place).unwrap_or_else(|| panic!("{place} in {json}")).as_str().unwrap().to_owned();
    base64_simd::STANDARD.decode_to_vec(text).unwrap()
}

const IDS: &str = "[11,12,13,14,15,16,17,18,19,20]";

fn ids() -> Vec<u32> {
    (11..=20).collect()
}

#[tokio::test]
async fn prefill_has_the_prompt_rows_and_decode_has_junk_for_them() {
    let lab = Lab::pair();
    let body = format!(r#"{{"input_ids":{IDS},"sampling_params":{{"max_new_tokens":5}},"return_routed_experts":true"#);
    let (p, d) = lab.both("/generate", &body, 7, 1).await;
    assert_eq!((p.status, d.status), (200, 200), "{} {}", p.text(), d.text());
    let row = 4 * 2 * 4;
    let (p_raw, d_raw) = (raw(&p, "/meta_info/routed_experts"), raw(&d, "/meta_info/routed_experts"));
    assert_eq!((p_raw.len(), d_raw.len()), (10 * row, 14 * row));
    assert_ne!(p_raw, d_raw[..10 * row]);
    let mut joined = p_raw;
    joined.extend_from_slice(&d_raw[10 * row..]);
    let want = text(Rows::of(nonce_of_ids(&ids()), 0, 14));
    assert_eq!(base64_simd::STANDARD.encode_to_string(&joined), want);
    // The junk is caught by whoever knows the request, and is different every time.
    let mut check = TextCheck::new(pattern(), Rows::of(nonce_of_ids(&ids()), 0, 14));
    check.feed(d.json()["meta_info"]["routed_experts"].as_str().unwrap().as_bytes());
    assert!(check.finish().wrong_bytes > 0);
    let (_, again) = lab.both("/generate", &body, 9, 1).await;
    assert_ne!(raw(&again, "/meta_info/routed_experts")[..10 * row], d_raw[..10 * row]);
}

#[tokio::test]
async fn start_len_moves_the_first_row_on_both_sides() {
    let lab = Lab::pair();
    let nonce = nonce_of_ids(&ids());
    let body = |start: u32| {
        format!(
            r#"{{"input_ids":{IDS},"sampling_params":{{"max_new_tokens":5}},"return_routed_experts":true,"routed_experts_start_len":{start}"#
        )
    };
    let (p, d) = lab.both("/generate", &body(10), 4, 0).await;
    assert_eq!(p.json()["meta_info"]["routed_experts"], "");
    assert_eq!(d.json()["meta_info"]["routed_experts"], text(Rows::of(nonce, 10, 4)));
    let (p, _) = lab.both("/generate", &body(4), 6, 0).await;
    assert_eq!(p.json()["meta_info"]["routed_experts"], text(Rows::of(nonce, 4, 6)));
    let (p, d) = lab.both("/generate", &body(11), 8, 0).await;
    for reply in [p, d] {
        assert_eq!(reply.status, 400);
        assert!(reply.json()["error"]["message"].as_str().unwrap().contains("higher than the number of input tokens"));
    }
}

#[tokio::test]
async fn with_one_output_token_only_prefill_has_rows() {
    let lab = Lab::pair();
    let body = format!(r#"{{"input_ids":{IDS},"sampling_params":{{"max_new_tokens":1}},"return_routed_experts":true"#);
    let (p, d) = lab.both("/generate", &body, 2, 0).await;
    assert_eq!(raw(&p, "/meta_info/routed_experts").len(), 10 * 4 * 2 * 4);
    assert!(d.json()["meta_info"].get("routed_experts").is_none());
}

#[tokio::test]
async fn both_halves_know_the_same_first_token_and_only_prefill_knows_the_prompt() {
    let lab = Lab::pair();
    let body = format!(
        r#"{{"input_ids":{IDS},"sampling_params":{{"max_new_tokens":3}},"return_logprob":true,"logprob_start_len":0,"top_logprobs_num":2,"token_ids_logprob":[5]"#
    );
    let (p, d) = lab.both("/generate", &body, 2, 0).await;
    let (p, d) = (p.json(), d.json());
    assert_eq!(p["output_ids"][0], d["output_ids"][0]);
    assert_eq!(p["output_ids"].as_array().unwrap().len(), 1);
    assert_eq!(d["output_ids"].as_array().unwrap().len(), 3);
    let len = |v: &serde_json::Value, key: &str| v["meta_info"][key].as_array().unwrap().len();
    for key in ["input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"] {
        assert_eq!((len(&p, key), len(&d, key)), (10, 0), "{key}");
    }
    assert_eq!(p["meta_info"]["input_token_logprobs"][0], serde_json::json!([null, 11, null]));
    assert_eq!(p["meta_info"]["input_token_logprobs"][9][1], 20);
    assert_eq!(len(&d, "output_token_logprobs"), 3);
    assert_eq!(d["meta_info"]["output_token_logprobs"][0], p["meta_info"]["output_token_logprobs"][0]);
    assert!(d["meta_info"]["output_token_ids_logprobs"][0].is_null());
    assert_eq!(d["meta_info"]["output_top_logprobs"][1].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn the_rank_in_the_body_is_the_rank_that_serves() {
    let lab = Lab::pair();
    for rank in 0..2 {
        let body = format!(r#"{{"input_ids":{IDS},"sampling_params":{{"max_new_tokens":2}}"#);
        let (p, _) = lab.both("/generate", &body, 100 + rank, rank).await;
        assert_eq!(p.json()["meta_info"]["dp_rank"], rank);
    }
    let out = lab.post(0, "/generate", r#"{"input_ids":[1],"bootstrap_room":1,"routed_dp_rank":2}"#).await;
    assert_eq!(out.status, 400);
    assert_eq!(out.json()["error"]["message"], "routed_dp_rank=2 out of range [0, 2)");
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"routed_dp_rank":-1,"bootstrap_room":1}"#;
    let out = lab.post(1, "/v1/chat/completions", chat).await;
    assert_eq!((out.status, out.json()["object"].clone()), (400, "error".into()));
}

#[tokio::test]
async fn a_room_is_required_and_a_live_one_may_not_be_used_again() {
    let lab = Lab::pair();
    let reply = lab.post(1, "/generate", r#"{"input_ids":[1,2]}"#).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text().contains("Disaggregated request received without bootstrap room id"), "{}", reply.text());
    // Only decode gets room 6, so it stays live there.
    let port = lab.bootstrap();
    let body = format!(
        r#"{{"input_ids":[1,2],"bootstrap_host":"127.0.0.1","bootstrap_port":{port},"bootstrap_room":6,"stream":true}}"#
    );
    let url = format!("{}/generate", lab.url(1));
    let first = lab.try_call(http::Method::POST, &url, &body, &[]);
    let second = async {
        while lab.truth(1).await["live_rooms"] != 1 {
            tokio::task::yield_now().await;
        }
        lab.post(1, "/generate", &body.replace(",\"stream\":true", "")).await
    };
    tokio::select! {
        _ = first => panic!("decode cannot end without prefill before its clock"),
        reply = second => {
            assert_eq!(reply.status, 500);
            assert!(reply.text().contains("bootstrap_room mismatch"), "{}", reply.text());
        }
    }
    assert_eq!(lab.truth(1).await["duplicate_rooms"], 1);
}

#[tokio::test]
async fn a_prefill_engine_of_several_ranks_dies_without_a_room_and_comes_back() {
    let lab = Lab::pair();
    let url = format!("{}/generate", lab.url(0));
    let roomless = r#"{"input_ids":[1,2]}"#;
    assert!(lab.try_call(http::Method::POST, &url, roomless, &[]).await.unwrap_err().contains("ConnectionReset"));
    while !lab.try_call(http::Method::POST, &url, roomless, &[]).await.unwrap_err().contains("ConnectionRefused") {}
    lab.fleet.fault(0, crate::emulator::FaultRequest::Revive).unwrap();
    let body = format!(r#"{{"input_ids":{IDS},"sampling_params":{{"max_new_tokens":1}}"#);
    while lab.try_call(http::Method::GET, &format!("{}/ready", lab.url(0)), "", &[]).await.is_err() {
        tokio::task::yield_now().await;
    }
    let (p, d) = lab.both("/generate", &body, 2, 0).await;
    assert_eq!((p.status, d.status), (200, 200));
    let single = Lab::start(&EmulateOptions { prefill: 1, ..Lab::options() });
    assert_eq!(single.post(0, "/generate", roomless).await.status, 400);
}

#[tokio::test]
async fn a_conflicting_room_is_refused_by_prefill_unless_the_rank_is_named() {
    let lab = Lab::pair();
    let body = |named: &str| format!(r#"{{"input_ids":[1,2],"bootstrap_room":5,"routed_dp_rank":0{named}}}"#);
    let reply = lab.post(0, "/generate", &body("")).await;
    assert!(reply.text().contains("follow_bootstrap_room conflict"), "{}", reply.text());
    assert_eq!(reply.status, 500);
    let url = format!("{}/generate", lab.url(0));
    let named = body(r#","disagg_prefill_dp_rank":0"#);
    let waiting = lab.try_call(http::Method::POST, &url, &named, &[]);
    let seen = async {
        loop {
            let truth = lab.truth(0).await;
            if truth["ranks"][0]["bootstrap"] == 1 {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        reply = waiting => panic!("nothing bootstraps it: {}", reply.unwrap().text()),
        () = seen => {}
    }
}

#[tokio::test]
async fn the_plugin_sends_a_descriptor_and_serves_its_rows_by_range() {
    let lab = Lab::start(&EmulateOptions { plugin: true, ..Lab::options() });
    let body = format!(r#"{{"input_ids":{IDS},"sampling_params":{{"max_new_tokens":5}},"return_routed_experts":true"#);
    let (p, d) = lab.both("/generate", &body, 3, 1).await;
    let nonce = nonce_of_ids(&ids());
    for (reply, rows, from, to) in [(&p, 10, 0, 10), (&d, 14, 10, 14)] {
        let bytes = raw(reply, "/meta_info/routed_experts");
        let descriptor = r3router_core::r3::descriptor::Descriptor::decode(&bytes).unwrap();
        assert_eq!((descriptor.rows, descriptor.pos, descriptor.layers, descriptor.top_k), (rows, 0, 4, 2));
        let get = |query: String, headers: Vec<(&'static str, String)>| {
            let url = format!("{}{query}", descriptor.uri);
            let lab = &lab;
            async move {
                let headers: Vec<(&str, &str)> = headers.iter().map(|(n, v)| (*n, v.as_str())).collect();
                lab.try_call(http::Method::GET, &url, "", &headers).await.unwrap()
            }
        };
        let whole = get(String::new(), vec![]).await;
        assert_eq!(whole.body.len(), rows as usize * 8);
        assert_eq!(Some(crc32fast::hash(&whole.body)), descriptor.crc32);
        let mut want = Vec::new();
        pattern().append_narrow(&Rows::of(nonce, 0, 14), from, to, &mut want);
        let part = get(format!("?rows={from}:{to}"), vec![]).await;
        assert_eq!((part.status, &part.body[..]), (200, &want[..]));
        let range = get(String::new(), vec![("range", format!("bytes={}-{}", from * 8, to * 8 - 1))]).await;
        assert_eq!((range.status, &range.body[..]), (206, &want[..]));
        assert_eq!(range.headers["content-range"], format!("bytes {}-{}/{}", from * 8, to * 8 - 1, rows * 8));
        let wide = get(format!("?rows={from}:{to}&dtype=int32"), vec![]).await;
        let ids: Vec<u8> = wide.body.chunks(4).map(|v| v[0]).collect();
        assert_eq!(ids, want);
        assert_eq!(get(format!("?rows=0:{}", rows + 1), vec![]).await.status, 416);
        let deleted = lab.try_call(http::Method::DELETE, &descriptor.uri, "", &[]).await.unwrap();
        assert_eq!((deleted.status, get(String::new(), vec![]).await.status), (204, 404));
    }
}
