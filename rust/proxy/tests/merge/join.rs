//! Replies of split requests, joined.
use r3router_core::error::{Error, Kind};
use r3router_core::wire::{Facts, Route, scan};
use r3router_proxy::merge::{Merged, join_json, join_sse, merge_json, merge_sse};
use r3router_proxy::store::Arena;
use serde_json::{Value, json};

use crate::kit::{Case, Chunks, Place, all, prefill_part};

fn facts(body: &str, route: Route) -> Facts {
    scan(body.as_bytes(), route).unwrap()
}

async fn merged(case: &Case, arena: &Arena) -> Merged {
    let part = prefill_part_of(case, arena);
    merge_json(Chunks::of(case.decode().as_bytes(), 64), None, part, &case.plan(), arena).await.unwrap()
}

async fn prefill_part_of(case: &Case, arena: &Arena) -> Result<r3router_proxy::merge::PrefillPart, Error> {
    prefill_part(&case.prefill(), &case.plan(), arena, 64).await
}

async fn text(merged: Merged) -> String {
    let length = merged.content_length();
    let bytes = all(merged).await;
    assert_eq!(bytes.len() as u64, length);
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn a_generate_batch_is_a_list_in_order() {
    let arena = Arena::new(1 << 20);
    let cases: Vec<Case> =
        (1..=3).map(|row| Case { row, prompt: 4 + row, output: row, ..Case::new(Place::Meta) }).collect();
    let mut replies = Vec::new();
    for case in &cases {
        replies.push(merged(case, &arena).await);
    }
    let joined = join_json(replies, &facts(r#"{"text":["a","b","c"]}"#, Route::Generate)).unwrap();
    assert_eq!((joined.account.prompt_tokens, joined.account.completion_tokens), (Some(5 + 6 + 7), Some(6)));
    let want = cases.iter().map(Case::merged).collect::<Vec<_>>().join(",");
    assert_eq!(text(joined).await, format!("[{want}]"));
    assert_eq!(arena.used(), 0);
    // A batch of one is a list of one; a single prompt is no list.
    let one = join_json(vec![merged(&cases[0], &arena).await], &facts(r#"{"text":["a"]}"#, Route::Generate)).unwrap();
    assert_eq!(text(one).await, format!("[{}]", cases[0].merged()));
    let one = join_json(vec![merged(&cases[0], &arena).await], &facts(r#"{"text":"a"}"#, Route::Generate)).unwrap();
    assert_eq!(text(one).await, cases[0].merged());
}

#[tokio::test]
async fn choices_have_their_index_and_their_own_rows_and_usage_is_summed() {
    let arena = Arena::new(1 << 20);
    for (place, route, body, samples) in [
        (Place::ChatExt, Route::Chat, r#"{"messages":[],"n":3}"#, 3),
        (Place::ChatMeta, Route::Chat, r#"{"messages":[],"n":3}"#, 3),
        (Place::Completions, Route::Completions, r#"{"prompt":["a","b","c"]}"#, 1),
    ] {
        let cases: Vec<Case> = (0..3).map(|i| Case { row: i + 1, output: i + 2, ..Case::new(place) }).collect();
        let mut replies = Vec::new();
        for case in &cases {
            replies.push(merged(case, &arena).await);
        }
        let joined = join_json(replies, &facts(body, route)).unwrap();
        let got: Value = serde_json::from_str(&text(joined).await).unwrap();
        let prompts = if samples == 3 { 5 } else { 15 };
        assert_eq!(
            got["usage"],
            json!({"prompt_tokens": prompts, "completion_tokens": 9, "total_tokens": prompts + 9})
        );
        assert_eq!(got["choices"].as_array().unwrap().len(), 3);
        for (i, case) in cases.iter().enumerate() {
            let choice = &got["choices"][i];
            assert_eq!(choice["index"], json!(i));
            let payload = match (place, i) {
                (Place::ChatMeta, _) => &choice["meta_info"]["routed_experts"],
                (_, 0) => &got["sglext"]["routed_experts"],
                _ => &choice["sglext"]["routed_experts"],
            };
            assert_eq!(payload, &json!(case.merged_payload()), "{place:?} choice {i}");
        }
    }
}

#[tokio::test]
async fn details_of_usage_and_ids_of_all_choices_are_kept() {
    let arena = Arena::new(1 << 20);
    let reply = |n: u32| {
        format!(
            r#"{{"id":"{n}","choices":[{{"index":0,"text":"{n}"}}],"usage":{{"prompt_tokens":7,"total_tokens":{},"completion_tokens":{n},"prompt_tokens_details":{{"cached_tokens":4}},"reasoning_tokens":{n},"completion_tokens_details":null}},"sglext":{{"output_ids":[[{n}]]}}}}"#,
            7 + n
        )
    };
    let plan = r3router_proxy::merge::Plan::relay(Route::Completions);
    let mut replies = Vec::new();
    for n in 1..=4 {
        let part = prefill_part("{}", &plan, &arena, 64);
        replies.push(merge_json(Chunks::of(reply(n).as_bytes(), 50), None, part, &plan, &arena).await.unwrap());
    }
    let joined = join_json(replies, &facts(r#"{"prompt":["a","b"],"n":2}"#, Route::Completions)).unwrap();
    let want = concat!(
        r#"{"id":"1","choices":[{"index":0,"text":"1"},{"index":1,"text":"2","sglext":{"output_ids":[[2]]}},"#,
        r#"{"index":2,"text":"3","sglext":{"output_ids":[[3]]}},{"index":3,"text":"4","sglext":{"output_ids":[[4]]}}],"#,
        r#""usage":{"prompt_tokens":14,"total_tokens":24,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":8},"#,
        r#""reasoning_tokens":10,"completion_tokens_details":null},"sglext":{"output_ids":[[1],[2],[3],[4]]}}"#
    );
    assert_eq!(text(joined).await, want);
    let part = prefill_part("{}", &plan, &arena, 64);
    let odd = merge_json(Chunks::of(b"{\"choices\":[]}", 5), None, part, &plan, &arena).await.unwrap();
    let part = prefill_part("{}", &plan, &arena, 64);
    let good = merge_json(Chunks::of(reply(1).as_bytes(), 5), None, part, &plan, &arena).await.unwrap();
    let e = join_json(vec![good, odd], &facts(r#"{"prompt":["a","b"]}"#, Route::Completions)).err().unwrap();
    assert_eq!(e.kind, Kind::EngineProtocol);
}

fn events(list: &[String]) -> String {
    list.iter().map(|e| format!("data: {e}\n\n")).collect()
}

async fn joined(streams: &[String], facts: &Facts, chunk: usize) -> Vec<Value> {
    let streams = streams.iter().map(|s| Chunks::of(s.as_bytes(), chunk)).collect();
    let text = String::from_utf8(all(join_sse(streams, facts)).await).unwrap();
    text.split_terminator("\n\n")
        .map(|e| e.strip_prefix("data: ").unwrap())
        .map(|e| if e == "[DONE]" { json!("[DONE]") } else { serde_json::from_str(e).unwrap() })
        .collect()
}

#[tokio::test]
async fn streams_of_a_batch_carry_the_index_and_one_end_mark() {
    let stream = |name: &str| {
        events(&[
            format!(r#"{{"text":"{name}1","meta_info":{{}}}}"#),
            format!(r#"{{"text":"{name}2 data: [DONE]","meta_info":{{}}}}"#),
            "[DONE]".into(),
        ])
    };
    let facts = facts(r#"{"text":["a","b"],"stream":true}"#, Route::Generate);
    for chunk in [1, 7, 4096] {
        let got = joined(&[stream("a"), stream("b")], &facts, chunk).await;
        assert_eq!(got.len(), 5);
        assert_eq!(got[4], json!("[DONE]"));
        for (i, name) in ["a", "b"].iter().enumerate() {
            let of: Vec<&Value> = got.iter().filter(|e| e["index"] == json!(i)).map(|e| &e["text"]).collect();
            assert_eq!(of, [&json!(format!("{name}1")), &json!(format!("{name}2 data: [DONE]"))]);
        }
    }
}

#[tokio::test]
async fn chat_streams_share_usage_and_say_whose_rows_are_whose() {
    let stream = |n: usize| {
        events(&[
            format!(
                r#"{{"id":"{n}","choices":[{{"index":0,"delta":{{"role":"assistant","content":""}}}}],"usage":null}}"#
            ),
            format!(r#"{{"id":"{n}","choices":[{{"delta":{{"content":"x{n}"}},"index":0}}]}}"#),
            format!(r#"{{"id":"{n}","choices":[],"sglext":{{"routed_experts":"{n}{}"}}}}"#, "A".repeat(200_000)),
            format!(
                r#"{{"id":"{n}","choices":[],"usage":{{"prompt_tokens":5,"completion_tokens":{n},"total_tokens":{}}}}}"#,
                5 + n
            ),
            "[DONE]".into(),
        ])
    };
    let facts = facts(r#"{"messages":[],"n":2,"stream":true}"#, Route::Chat);
    for chunk in [13, 4096, 1 << 20] {
        let got = joined(&[stream(3), stream(4)], &facts, chunk).await;
        assert_eq!(got.len(), 8);
        let usage = json!({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12});
        assert_eq!((&got[6]["usage"], &got[7]), (&usage, &json!("[DONE]")));
        for (i, n) in [3, 4].into_iter().enumerate() {
            let id = json!(n.to_string());
            let of: Vec<&Value> = got[..6].iter().filter(|e| e["id"] == id).collect();
            assert_eq!((&of[0]["choices"][0]["index"], &of[1]["choices"][0]["index"]), (&json!(i), &json!(i)));
            assert_eq!(of[1]["choices"][0]["delta"]["content"], json!(format!("x{n}")));
            assert_eq!(of[2]["sglext"]["index"], json!(i));
            assert!(of[2]["sglext"]["routed_experts"].as_str().unwrap() == format!("{n}{}", "A".repeat(200_000)));
        }
    }
}

#[tokio::test]
async fn one_failing_stream_ends_the_whole_with_its_error() {
    let good = events(&[r#"{"text":"a"}"#.into(), r#"{"text":"b"}"#.into(), "[DONE]".into()]);
    let bad = events(&[r#"{"error":{"message":"m"}}"#.into(), "[DONE]".into()]);
    let facts = facts(r#"{"text":["a","b"],"stream":true}"#, Route::Generate);
    let got = joined(&[good, bad], &facts, 4096).await;
    assert_eq!(got.last().unwrap()["error"]["message"], json!("m"));
    assert!(got.len() <= 3);
}

#[tokio::test]
async fn merged_streams_join() {
    let arena = Arena::new(1 << 20);
    let case = Case::new(Place::Meta);
    let event = |payload: &str| case.reply(3, Some(&Case::quoted(payload)), "d");
    let decode = events(&[event(&case.decode_payload()), "[DONE]".into()]);
    let streams = (0..2)
        .map(|_| {
            merge_sse(Chunks::of(decode.as_bytes(), 9), prefill_part_of(&case, &arena), case.plan(), arena.clone())
        })
        .collect();
    let facts = facts(r#"{"text":"a","sampling_params":{"n":2},"stream":true}"#, Route::Generate);
    let got = String::from_utf8(all(join_sse(streams, &facts)).await).unwrap();
    let at = |i: usize| event(&case.merged_payload()).replacen('{', &format!("{{\"index\":{i},"), 1);
    assert_eq!(got, events(&[at(0), at(1), "[DONE]".into()]));
}
