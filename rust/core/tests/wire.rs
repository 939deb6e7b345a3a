//! Request scanning and splicing, byte by byte: what the router owns changes, everything else arrives as it was sent.
#![allow(clippy::unwrap_used)]
use bytes::Bytes;
use proptest::prelude::*;
use r3router_core::error::Kind;
use r3router_core::wire::{Bootstrap, Facts, Owned, PromptKind, Route, prefix_hashes, scan, splice};
use serde_json::{Map, Value, json};

/// The fields that never come from the client.
const OWNED: [&str; 9] = [
    "rid",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "return_outputs_via_store",
];

fn leg(sub: usize, rid: &str, room: u64) -> Owned<'_> {
    Owned {
        sub,
        rid: Some(rid),
        bootstrap: Some(Bootstrap { host: "10.1.2.3", port: Some(8998), room }),
        routed_dp_rank: Some(2),
        disagg_prefill_dp_rank: Some(3),
        ..Owned::default()
    }
}

fn text(body: &str, route: Route, owned: &Owned<'_>) -> String {
    let bytes = Bytes::copy_from_slice(body.as_bytes());
    let facts = scan(&bytes, route).unwrap();
    spliced(&bytes, &facts, owned)
}

fn spliced(body: &Bytes, facts: &Facts, owned: &Owned<'_>) -> String {
    let parts = splice(body, facts, owned);
    let out = parts.pieces.concat();
    assert_eq!(out.len(), parts.len);
    assert!(parts.pieces.iter().all(|p| !p.is_empty()));
    String::from_utf8(out).unwrap()
}

fn refused(body: &[u8], route: Route) -> (Kind, String, Option<f64>) {
    let e = scan(body, route).unwrap_err();
    (e.kind, e.to_string(), e.measured)
}

#[test]
fn owned_fields_go_in_front_and_the_rest_is_untouched() {
    let body = r#" {"text" : "hi\u0041" , "future_field":{"a":[1,{"b":null}]}, "x":1.50e+3 } "#;
    let out = text(body, Route::Generate, &leg(0, "r-1", 9_223_372_036_854_775_806));
    let owned = r#""rid":"r-1","bootstrap_host":"10.1.2.3","bootstrap_port":8998,"bootstrap_room":9223372036854775806,"routed_dp_rank":2,"disagg_prefill_dp_rank":3,"#;
    assert_eq!(out, body.replacen('{', &format!("{{{owned}"), 1));
    assert_eq!(text(body, Route::Generate, &Owned::default()), body);
}

#[test]
fn client_pd_fields_of_any_type_are_removed_wherever_they_stand() {
    for value in ["9007199254740993", "9223372036854775807", "[1,2]", "null", "\"x\"", "{\"a\":[1]}", "1e400", "-5"] {
        for field in OWNED.iter().filter(|f| **f != "return_outputs_via_store") {
            for body in [
                format!(r#"{{"{field}":{value},"text":"hi"}}"#),
                format!(r#"{{"text":"hi","{field}":{value}}}"#),
                format!(r#"{{ "{field}" : {value} , "text":"hi" , "{field}": {value} }}"#),
                format!(r#"{{"text":"hi","{field}":{value},"bootstrap_port":1,"rid":null}}"#),
            ] {
                let out = text(&body, Route::Generate, &leg(0, "r", 7));
                let one = out.matches(&format!("\"{field}\"")).count();
                let sent = !matches!(*field, "bootstrap_pair_key" | "data_parallel_rank");
                assert_eq!(one, usize::from(sent), "{out}");
                let got: Value = serde_json::from_str(&out).unwrap();
                assert_eq!(got["bootstrap_room"], json!(7), "{out}");
                assert_eq!(got["text"], json!("hi"), "{out}");
                let bare: Value = serde_json::from_str(&text(&body, Route::Generate, &Owned::default())).unwrap();
                assert_eq!(bare, json!({"text": "hi"}));
            }
        }
    }
    assert_eq!(
        text(r#"{"rid":"a"}"#, Route::Chat, &Owned { rid: Some("b\"\n"), ..Owned::default() }),
        r#"{"rid":"b\"\n"}"#
    );
    assert_eq!(text(r#"{ "rid":"a" }"#, Route::Chat, &Owned::default()), "{  }");
}

#[test]
fn an_owned_name_spelled_with_escapes_is_still_owned() {
    let out = text(r#"{"boot\u0073trap_room":4,"\u0072id":"x","text":"t"}"#, Route::Generate, &leg(0, "r", 9));
    let got: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&got["bootstrap_room"], &got["rid"]), (&json!(9), &json!("r")));
    assert_eq!(out.matches("\\u00").count(), 0);
}

#[test]
fn escapes_arrive_as_they_were_sent() {
    for inner in
        [r"cut \ud83d here", r"\ude00", r"\u0000", r"\u2028", "\u{2028}\u{feff}\u{7f}", r"\/\b\f\n\r\t\\\u00E9"]
    {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{inner}"}}]}}"#);
        let out = text(&body, Route::Chat, &leg(0, "r", 1));
        assert!(out.ends_with(&body[1..]), "{out}");
    }
}

#[test]
fn what_is_not_json_is_refused_with_its_position() {
    let cases: [(&[u8], f64); 12] = [
        (b"", 0.0),
        (b"\xef\xbb\xbf{}", 0.0),
        (b"{\"text\":\"a\xff\"}", 10.0),
        (b"{\"text\":\"\xed\xa0\x80\"}", 9.0),
        (b"{\"text\":\"hi\"", 12.0),
        (b"{\"text\":\"hi\"} x", 14.0),
        (b"{\"text\":\"h\ni\"}", 10.0),
        (b"{\"text\":'hi'}", 8.0),
        (b"{\"a\":1,}", 7.0),
        (b"{\"a\":[1,2}", 9.0),
        (b"{\"a\":\"\\ud83\"}", 6.0),
        (b"{\"input_ids\":[1,02]}", 17.0),
    ];
    for (body, at) in cases {
        let (kind, message, measured) = refused(body, Route::Generate);
        assert_eq!((kind, measured), (Kind::InvalidJson, Some(at)), "{message}");
    }
}

#[test]
fn wrong_types_are_refused_by_name() {
    let generate = [
        ("[1]", "body"),
        ("\"x\"", "body"),
        (r#"{"stream":"yes"}"#, "stream"),
        (r#"{"text":5}"#, "text"),
        (r#"{"text":["a",1]}"#, "text"),
        (r#"{"text":[]}"#, "text"),
        (r#"{"input_ids":[]}"#, "input_ids"),
        (r#"{"input_ids":{}}"#, "input_ids"),
        (r#"{"input_ids":[1,2.5]}"#, "input_ids"),
        (r#"{"input_ids":[1,"2"]}"#, "input_ids"),
        (r#"{"input_ids":[[1],2]}"#, "input_ids"),
        (r#"{"input_ids":[[1],[2]],"text":["a"]}"#, "input_ids"),
        (r#"{"text":"a","sampling_params":[1]}"#, "sampling_params"),
        (r#"{"text":"a","sampling_params":"n"}"#, "sampling_params"),
        (r#"{"text":"a","sampling_params":{"n":0}}"#, "sampling_params.n"),
        (r#"{"text":"a","sampling_params":{"n":-1}}"#, "sampling_params.n"),
        (r#"{"text":"a","sampling_params":{"n":"2"}}"#, "sampling_params.n"),
        (r#"{"text":"a","sampling_params":{"n":1000000}}"#, "n"),
        (r#"{"text":["a","b"],"sampling_params":[{"n":1},{"n":2}]}"#, "sampling_params.n"),
        (r#"{"text":["a","b"],"sampling_params":[{}]}"#, "sampling_params"),
        (r#"{"text":"a","sampling_params":{"max_new_tokens":[1]}}"#, "sampling_params.max_new_tokens"),
        (r#"{"text":"a","routed_experts_start_len":-1}"#, "routed_experts_start_len"),
        (r#"{"text":"a","return_routed_experts":"no"}"#, "return_routed_experts"),
        (r#"{"text":["a","b"],"lora_path":["x"]}"#, "lora_path"),
        (r#"{"text":["a","b"],"image_data":["x","y","z"]}"#, "image_data"),
    ];
    for (body, name) in generate {
        let (kind, message, _) = refused(body.as_bytes(), Route::Generate);
        assert_eq!(kind, Kind::InvalidField, "{body}");
        assert!(message.contains(&format!(" {name}: ")), "{message}");
    }
    for body in [
        r#"{"prompt":[]}"#,
        r#"{"prompt":[1,"a"]}"#,
        r#"{"prompt":["a",1]}"#,
        r#"{"prompt":{}}"#,
        r#"{"prompt":"a","n":0}"#,
    ] {
        assert_eq!(refused(body.as_bytes(), Route::Completions).0, Kind::InvalidField, "{body}");
    }
    assert_eq!(refused(br#"{"input_ids":[[1]]}"#, Route::Chat).0, Kind::InvalidField);
}

#[test]
fn facts_of_generate() {
    let body = br#"{"input_ids":[1, 22,333],"sampling_params":{"max_new_tokens":16.0,"n":2},"stream":true,"return_logprob":true,
        "return_routed_experts":true,"routed_experts_start_len":2,"return_indexer_topk":true,"rid":"abc","return_outputs_via_store":true,
        "model":"m","stream_options":{"include_usage":true}}"#;
    let f = scan(body, Route::Generate).unwrap();
    assert!(f.stream && f.logprobs && f.routed_experts && f.indexer_topk && f.via_store && f.include_usage && f.listed);
    assert_eq!((f.samples, f.subs(), f.routed_experts_start), (2, 2, 2));
    let p = f.prompt(1);
    assert_eq!((p.kind, p.ids, p.exact, p.max_new_tokens), (PromptKind::Ids, Some(3), true, Some(16)));
    assert_eq!((f.rid(0).unwrap(), f.rid(1).unwrap()), ("abc_0".into(), "abc_1".into()));
    let model = f.model.unwrap();
    assert_eq!(&body[model.start..model.end], b"\"m\"");

    let one = |body: &str| scan(body.as_bytes(), Route::Generate).unwrap();
    let f = one(r#"{"text":"hi","return_logprob":[false],"stream":null,"rid":["x"]}"#);
    assert!(!f.stream && !f.logprobs && !f.listed);
    assert_eq!((f.prompt(0).kind, f.prompt(0).ids, f.prompt(0).max_new_tokens), (PromptKind::Text, None, Some(128)));
    assert_eq!(f.rid(0).unwrap(), "x");
    assert_eq!(one(r#"{"text":"a","sampling_params":{"max_new_tokens":null}}"#).prompt(0).max_new_tokens, None);
    assert_eq!(
        one(r#"{"text":"a","sampling_params":{"max_new_tokens":99999999999}}"#).prompt(0).max_new_tokens,
        Some(u32::MAX)
    );
    // Beams are one request, whatever n says.
    assert_eq!(one(r#"{"text":"a","sampling_params":{"n":3,"beam_width":4}}"#).subs(), 1);
    // With history or images the engine's prompt is longer than the ids.
    for more in [r#""session_params":{"id":"s"}"#, r#""image_data":"u""#, r#""image_data":["u"]"#] {
        let f = one(&format!(r#"{{"input_ids":[1],{more}}}"#));
        assert_eq!((f.prompt(0).ids, f.prompt(0).exact), (Some(1), false));
    }
    assert!(one(r#"{"input_ids":[1],"image_data":null,"session_params":{},"session_id":"s"}"#).prompt(0).exact);
    assert_eq!(one(r#"{"input_ids":[],"session_params":{"id":"s"}}"#).prompt(0).ids, Some(0));
    assert_eq!(one(r#"{"input_ids":[-1, 0 ,7]}"#).prompt(0).ids, Some(3));
    // Of a field that is spelled twice the last counts, as for the engines.
    assert!(one(r#"{"text":"a","stream":false,"stream":true}"#).stream);
}

#[test]
fn facts_of_chat_and_completions() {
    let f = scan(
        br#"{"messages":[{"role":"user","content":"x"}],"n":4,"max_tokens":9,"max_completion_tokens":7}"#,
        Route::Chat,
    )
    .unwrap();
    assert_eq!(
        (f.subs(), f.prompt(3).kind, f.prompt(0).max_new_tokens, f.listed),
        (4, PromptKind::Messages, Some(7), false)
    );
    let f = scan(br#"{"messages":[],"input_ids":[1,2],"return_meta_info":true,"logprobs":true}"#, Route::Chat).unwrap();
    assert_eq!((f.prompt(0).ids, f.prompt(0).max_new_tokens, f.meta_info, f.logprobs), (Some(2), None, true, true));
    let ids = |body: &str| {
        let f = scan(body.as_bytes(), Route::Completions).unwrap();
        (f.prompts.iter().map(|p| p.ids).collect::<Vec<_>>(), f.prompts[0].max_new_tokens)
    };
    assert_eq!(ids(r#"{"prompt":"a"}"#), (vec![None], Some(16)));
    assert_eq!(ids(r#"{"prompt":["a","b"],"max_tokens":3}"#), (vec![None, None], Some(3)));
    assert_eq!(ids(r#"{"prompt":[1,2,3]}"#).0, [Some(3)]);
    assert_eq!(ids(r#"{"prompt":[[1,2],[3]]}"#).0, [Some(2), Some(1)]);
    let echo = |body: &str| scan(body.as_bytes(), Route::Completions).unwrap().logprobs;
    assert!(echo(r#"{"prompt":"a","echo":true,"logprobs":1}"#) && !echo(r#"{"prompt":"a","echo":true,"logprobs":0}"#));
    assert!(!echo(r#"{"prompt":"a","logprobs":5}"#));
}

#[test]
fn a_batch_is_taken_apart_prompt_by_prompt_and_sample_by_sample() {
    let body = r#"{"input_ids":[[11,12,13,14],[21,22]],"sampling_params":[{"n": 2,"seed":1},{"seed":2,"n":2.0}],"rid":["a","b"],
 "return_logprob":[true,false],"logprob_start_len":0,"top_logprobs_num":[1,2],"token_ids_logprob":[[5],[6,7]],"lora_path":["x",null],
 "image_data":[],"extra_key":"k","kv_hints":[{"v":1},null],"stream":false}"#;
    let bytes = Bytes::copy_from_slice(body.as_bytes());
    let facts = scan(&bytes, Route::Generate).unwrap();
    assert_eq!((facts.subs(), facts.listed), (4, true));
    let get = |sub| serde_json::from_str::<Value>(&spliced(&bytes, &facts, &leg(sub, "r", 5 + sub as u64))).unwrap();
    let (first, last) = (get(1), get(2));
    let mut want = json!({"input_ids":[11,12,13,14],"sampling_params":{"n":1,"seed":1},"return_logprob":true,"logprob_start_len":0,
        "top_logprobs_num":1,"token_ids_logprob":[5],"lora_path":"x","image_data":[],"extra_key":"k","kv_hints":{"v":1},"stream":false,
        "rid":"r","bootstrap_host":"10.1.2.3","bootstrap_port":8998,"bootstrap_room":6,"routed_dp_rank":2,"disagg_prefill_dp_rank":3});
    assert_eq!(first, want);
    for (key, value) in [
        ("input_ids", json!([21, 22])),
        ("sampling_params", json!({"n":1,"seed":2})),
        ("return_logprob", json!(false)),
        ("top_logprobs_num", json!(2)),
        ("token_ids_logprob", json!([6, 7])),
        ("lora_path", json!(null)),
        ("kv_hints", json!(null)),
        ("bootstrap_room", json!(7)),
    ] {
        want[key] = value;
    }
    assert_eq!(last, want);
    // A flat list of ids is one value for the whole batch; a batch of one still is a batch.
    let one = r#"{"text":["t"],"token_ids_logprob":[5,6]}"#;
    let facts = scan(one.as_bytes(), Route::Generate).unwrap();
    assert!(facts.listed);
    assert_eq!(text(one, Route::Generate, &Owned::default()), r#"{"text":"t","token_ids_logprob":[5,6]}"#);
    // A single prompt keeps its lists.
    let single = r#"{"text":"t","image_data":["a","b"]}"#;
    assert_eq!(text(single, Route::Generate, &Owned::default()), single);
}

#[test]
fn completions_and_chat_are_split() {
    let body = r#"{"model":"m","prompt":["a","b"],"n":2,"cache_salt":["s","t"],"echo":true}"#;
    let at = |sub| text(body, Route::Completions, &Owned { sub, ..Owned::default() });
    assert_eq!(at(0), r#"{"model":"m","prompt":"a","n":1,"cache_salt":"s","echo":true}"#);
    assert_eq!(at(3), r#"{"model":"m","prompt":"b","n":1,"cache_salt":"t","echo":true}"#);
    let ids = r#"{"prompt":[[1,2],[3]]}"#;
    assert_eq!(text(ids, Route::Completions, &Owned { sub: 1, ..Owned::default() }), r#"{"prompt":[3]}"#);
    let chat = r#"{"n": 3, "messages":[]}"#;
    assert_eq!(text(chat, Route::Chat, &Owned { sub: 2, ..Owned::default() }), r#"{"n": 1, "messages":[]}"#);
    let one = r#"{"n":1,"messages":[]}"#;
    assert_eq!(text(one, Route::Chat, &Owned::default()), one);
}

#[test]
fn each_leg_gets_its_own_stream_and_start() {
    let body = r#"{"stream":true,"stream_options":{"include_usage":false},"text":"t","routed_experts_start_len":0}"#;
    let prefill = Owned { stream: Some(false), ..Owned::default() };
    assert_eq!(
        text(body, Route::Generate, &prefill),
        r#"{"stream":false,"stream_options":null,"text":"t","routed_experts_start_len":0}"#
    );
    let decode = Owned { routed_experts_start_len: Some(57), include_usage: true, ..Owned::default() };
    assert_eq!(
        text(body, Route::Generate, &decode),
        r#"{"stream":true,"stream_options":{"include_usage":true},"text":"t","routed_experts_start_len":57}"#
    );
    let both = Owned { stream: Some(true), routed_experts_start_len: Some(5), include_usage: true, ..Owned::default() };
    let wanted =
        r#"{"stream":true,"routed_experts_start_len":5,"stream_options":{"include_usage":true},"messages":[]}"#;
    assert_eq!(text(r#"{"messages":[]}"#, Route::Chat, &both), wanted);
    for (have, want) in [
        ("null", r#"{"include_usage":true}"#),
        ("{ }", r#"{"include_usage":true }"#),
        (r#"{"continuous_usage_stats":true}"#, r#"{"include_usage":true,"continuous_usage_stats":true}"#),
    ] {
        let body = format!(r#"{{"stream":true,"stream_options":{have}}}"#);
        let want = format!(r#"{{"stream":true,"stream_options":{want}}}"#);
        assert_eq!(text(&body, Route::Chat, &Owned { include_usage: true, ..Owned::default() }), want);
    }
}

#[test]
fn equal_prefixes_hash_alike_and_others_do_not() {
    let hash = |body: &str, route| {
        let facts = scan(body.as_bytes(), route).unwrap();
        prefix_hashes(body.as_bytes(), &facts, 0)
    };
    let ids = |n: usize, sep: &str, from: usize| {
        let list = (0..n).map(|i| (i + from).to_string()).collect::<Vec<_>>().join(sep);
        format!("{{\"input_ids\":[{list}]}}")
    };
    let a = hash(&ids(1000, ",", 5), Route::Generate);
    assert_eq!(a.len(), 3);
    assert_eq!(hash(&ids(1000, " , ", 5), Route::Generate), a);
    assert_eq!(hash(&ids(600, ",", 5), Route::Generate), a[..2]);
    assert!(hash(&ids(1000, ",", 6), Route::Generate).iter().all(|h| !a.contains(h)));
    let swapped = ids(1000, ",", 5).replacen("[5,6,", "[6,5,", 1);
    assert!(hash(&swapped, Route::Generate).iter().all(|h| !a.contains(h)));
    let t = "x".repeat(5000);
    let long = hash(&format!("{{\"text\":\"{t}\"}}"), Route::Generate);
    assert_eq!(long.len(), 4);
    assert_eq!(hash(&format!("{{\"text\":\"{}y\"}}", &t[..3000]), Route::Generate), long[..2]);
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e300..1e300f64).prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::vec((".{0,8}", inner), 0..6).prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

/// A field name that means nothing to the router, or one of its own.
fn name() -> impl Strategy<Value = String> {
    let free = |n: &String| {
        !matches!(n.as_str(), "stream" | "text" | "n" | "prompt" | "model" | "echo" | "logprobs" | "messages")
    };
    prop_oneof![
        "[a-z_]{1,12}".prop_filter("free", free),
        ".{0,6}".prop_filter("free", free),
        proptest::sample::select(OWNED[..8].to_vec()).prop_map(str::to_owned),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_extra_fields_pass_unchanged(
        fields in proptest::collection::vec((name(), value()), 0..12),
        route in proptest::sample::select(vec![Route::Generate, Route::Chat, Route::Completions]),
        pretty in any::<bool>(),
        at in any::<proptest::sample::Index>(),
    ) {
        let mut map: Map<String, Value> = fields.into_iter().collect();
        let (key, prompt) = match route {
            Route::Generate => ("input_ids", json!([1, 2, 3])),
            Route::Chat => ("messages", json!([{"role": "user", "content": "\u{1f600}\\"}])),
            Route::Completions => ("prompt", json!("p")),
        };
        map.insert(key.to_owned(), prompt);
        let whole = Value::Object(map.clone());
        let body = if pretty { serde_json::to_string_pretty(&whole).unwrap() } else { whole.to_string() };
        let mut map: Map<String, Value> = serde_json::from_str(&body).unwrap();
        let bytes = Bytes::from(body.clone());
        let facts = scan(&bytes, route).unwrap();
        let out = spliced(&bytes, &facts, &leg(0, "rid-9", u64::MAX >> 1));
        let mut got: Map<String, Value> = serde_json::from_str(&out).unwrap();
        prop_assert_eq!(&got["bootstrap_room"], &json!(i64::MAX));
        prop_assert_eq!(&got["rid"], &json!("rid-9"));
        for owned in OWNED {
            map.remove(owned);
            got.remove(owned);
        }
        prop_assert_eq!(Value::Object(map), Value::Object(got));
        // A body that is cut short is never taken, and never a panic.
        let cut = at.index(body.len());
        if body.trim_end().len() > cut {
            let cut = (0..=cut).rev().find(|i| body.is_char_boundary(*i)).unwrap_or(0);
            prop_assert!(scan(&body.as_bytes()[..cut], route).is_err());
        }
    }

    #[test]
    fn whatever_the_bytes_are_scan_agrees_with_serde_json(body in ".{0,60}", route in 0..3) {
        let route = [Route::Generate, Route::Chat, Route::Completions][route as usize];
        for text in [body.clone(), format!("{{{body}}}"), format!("{{\"a\":{body}}}"), format!("{{\"input_ids\":[{body}]}}")] {
            let ours = scan(text.as_bytes(), route);
            let json = matches!(&ours, Err(e) if e.kind == Kind::InvalidJson);
            let theirs = serde_json::from_str::<Value>(&text).is_err();
            // Ours also takes NaN and infinities, as Python does.
            let python = text.contains("NaN") || text.contains("Infinity");
            prop_assert!(!json || theirs, "refused: {}", text);
            prop_assert!(ours.is_err() || !theirs || python, "taken: {}", text);
        }
    }
}
