//! Event streams.
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use http_body::Body;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::Dtype;
use r3router_core::r3::descriptor::Descriptor;
use r3router_proxy::merge::{Account, MergedStream, Plan, merge_sse};
use r3router_proxy::store::Arena;
use serde_json::Value;

use crate::kit::{Case, Chunks, Place, all, base64, prefill_part, rows};

struct Streamed {
    text: String,
    account: Account,
    error: Option<Error>,
}

async fn collect<F>(mut stream: MergedStream<Chunks, F>) -> Streamed
where
    F: Future<Output = Result<r3router_proxy::merge::PrefillPart, Error>>,
{
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut stream).poll_frame(cx)).await {
        bytes.extend_from_slice(&frame.unwrap().into_data().unwrap());
    }
    Streamed { text: String::from_utf8(bytes).unwrap(), account: stream.account(), error: stream.error().cloned() }
}

async fn stream(prefill: &str, decode: &str, plan: &Plan, chunk: usize) -> Streamed {
    let arena = Arena::new(64 << 20);
    let part = prefill_part(prefill, plan, &arena, chunk);
    let out = collect(merge_sse(Chunks::of(decode.as_bytes(), chunk), part, plan.clone(), arena.clone())).await;
    assert_eq!(arena.used(), 0);
    out
}

fn events(list: &[&str]) -> String {
    list.iter().map(|e| format!("data: {e}\n\n")).collect()
}

/// The reply of `case` as a `/generate` stream: cumulative events, the payload in the last.
fn generate(case: &Case, payload: &str) -> String {
    let event = |n: usize, last: Option<&str>| {
        let finish = last.map_or("null".to_owned(), |_| format!(r#"{{"type":"length","length":{n}}}"#));
        let payload = last.map_or_else(String::new, |p| format!(r#","routed_experts":"{p}""#));
        format!(
            r#"{{"text":"data: [DONE]\n{n}","meta_info":{{"id":"r","finish_reason":{finish},"prompt_tokens":{},"num_retractions":0,"completion_tokens":{n}{payload}}}}}"#,
            case.prompt
        )
    };
    events(&[&event(1, None), &event(2, None), &event(case.output, Some(payload)), "[DONE]"])
}

/// The same as a chat or completions stream: the payload in an event of its own, then usage when it was asked for.
fn openai(case: &Case, payload: &str, usage: bool) -> String {
    let head = r#""id":"r","object":"x","created":1,"#;
    let delta = |n: usize, finish: &str| {
        format!(
            r#"{{{head}"choices":[{{"index":0,"delta":{{"content":"{n}"}},"finish_reason":{finish}}}],"usage":null}}"#
        )
    };
    let ext = format!(r#"{{{head}"choices":[],"usage":null,"sglext":{{"routed_experts":"{payload}"}}}}"#);
    let total = format!(
        r#"{{{head}"choices":[],"usage":{{"prompt_tokens":{},"completion_tokens":{}}}}}"#,
        case.prompt, case.output
    );
    let (one, two) = (delta(1, "null"), delta(2, r#""length""#));
    let mut list = vec![one.as_str(), &two, &ext];
    if usage {
        list.push(&total);
    }
    list.push("[DONE]");
    events(&list)
}

#[tokio::test]
async fn what_carries_no_merged_field_passes_byte_for_byte_cut_anywhere() {
    let plan = Plan { routed_experts: false, ..Case::new(Place::Meta).plan() };
    let texts = [
        events(&[r#"{"text":"write data: [DONE] at the end"}"#, r#"{"text":"more"}"#, "[DONE]"]),
        ": ping\n\ndata: {\"a\":1}\r\n\r\nevent: sglext_ids\ndata:{\"choices\":[],\"sglext\":{\"input_ids\":[1]}}\n\ndata: not json \"usage\":{\n\ndata: [DONE]\n\n".to_owned(),
        "data: {\"a\":1}\n\ndata: [DONE]".to_owned(),
        "data: {\"usage\":{\ndata: \"a\":1}}\n\n".to_owned(),
        String::new(),
    ];
    for text in &texts {
        for plan in [plan.clone(), Plan { logprobs: true, ..plan.clone() }] {
            for cut in 0..=text.len() {
                let arena = Arena::new(1 << 20);
                let parts = vec![text.as_bytes()[..cut].to_vec(), Vec::new(), text.as_bytes()[cut..].to_vec()];
                let part = prefill_part("{}", &plan, &arena, 64);
                let out = collect(merge_sse(Chunks::list(parts), part, plan.clone(), arena.clone())).await;
                assert_eq!(&out.text, text, "cut at {cut}");
                assert!(out.error.is_none());
            }
        }
    }
}

#[tokio::test]
async fn a_generate_stream_ends_with_the_merged_rows() {
    for row in 1..=4 {
        for (decode_start, obeys) in [(0, true), (5, true), (5, false)] {
            let case = Case { row, decode_start, obeys, ..Case::new(Place::Meta) };
            let (decode, want) = (generate(&case, &case.decode_payload()), generate(&case, &case.merged_payload()));
            for chunk in [1, 2, 3, 50, 4096] {
                let out = stream(&case.prefill(), &decode, &case.plan(), chunk).await;
                assert_eq!(out.text, want, "row {row}, chunks of {chunk}");
                let a = out.account;
                assert_eq!((a.events, a.completion_tokens, a.row_items), (3, Some(3), Some(row as u32)));
            }
        }
    }
    let case = Case { output: 1, decode_start: 5, ..Case::new(Place::Meta) };
    let out = stream(&case.prefill(), &generate(&case, ""), &case.plan(), 7).await;
    assert_eq!(out.text, generate(&case, &case.prefill_payload()));
}

#[tokio::test]
async fn an_openai_stream_carries_merged_rows_and_usage_only_when_the_client_asked() {
    for place in [Place::ChatExt, Place::Completions] {
        for row in 1..=3 {
            for (decode_start, obeys) in [(0, true), (5, true), (5, false)] {
                let case = Case { row, decode_start, obeys, ..Case::new(place) };
                let (sent, merged) = (case.decode_payload(), case.merged_payload());
                let hide = Plan { hide_usage: true, ..case.plan() };
                for chunk in [1, 9, 4096] {
                    let out = stream(&case.prefill(), &openai(&case, &sent, true), &case.plan(), chunk).await;
                    assert_eq!(out.text, openai(&case, &merged, true));
                    let out = stream(&case.prefill(), &openai(&case, &sent, true), &hide, chunk).await;
                    assert_eq!(out.text, openai(&case, &merged, false));
                    assert_eq!(out.account.completion_tokens, Some(3));
                    // Without any count the limit on new tokens tells an obeyed start from an ignored one.
                    let bounded = Plan { max_new_tokens: Some(4), ..case.plan() };
                    let out = stream(&case.prefill(), &openai(&case, &sent, false), &bounded, chunk).await;
                    assert_eq!(out.text, openai(&case, &merged, false));
                }
            }
        }
    }
}

#[tokio::test]
async fn prompt_logprobs_stand_in_every_event_that_has_them_as_one_engine_sends_them() {
    let plan = Plan { routed_experts: false, logprobs: true, ..Case::new(Place::Meta).plan() };
    let event = |input: &str, n: usize| {
        format!(
            r#"{{"text":"t","meta_info":{{"id":"r","input_token_logprobs":{input},"input_top_logprobs":{input},"output_token_logprobs":[[{n}]],"completion_tokens":{n}}}}}"#
        )
    };
    let all = |input: &str| events(&[&event(input, 1), &event(input, 2), "[DONE]"]);
    let prefill = event("[[-1,1000,null]]", 1);
    for chunk in [1, 10, 1000] {
        let out = stream(&prefill, &all("[]"), &plan, chunk).await;
        assert_eq!(out.text, all("[[-1,1000,null]]"));
    }
}

#[tokio::test]
async fn echoed_logprobs_stand_in_the_first_event_only() {
    let plan = Plan { routed_experts: false, logprobs: true, ..Case::new(Place::Completions).plan() };
    let event = |tokens: &str, values: &str| {
        format!(
            r#"{{"choices":[{{"index":0,"text":"t","logprobs":{{"tokens":{tokens},"token_logprobs":{values}}}}}]}}"#
        )
    };
    let prefill = event(r#"["a","b","c"]"#, "[null,-1,-2]").replace("}]}", r#"}],"usage":{"completion_tokens":1}}"#);
    let decode = events(&[&event(r#"["c"]"#, "[-2]"), &event(r#"["d"]"#, "[-3]"), "[DONE]"]);
    let want = events(&[&event(r#"["a","b","c"]"#, "[null,-1,-2]"), &event(r#"["d"]"#, "[-3]"), "[DONE]"]);
    for chunk in [1, 10, 1000] {
        assert_eq!(stream(&prefill, &decode, &plan, chunk).await.text, want);
    }
}

fn error_in(text: &str) -> (usize, Value) {
    let list: Vec<&str> = text.split_terminator("\n\n").collect();
    let last = list.last().unwrap().strip_prefix("data: ").unwrap();
    (list.len(), serde_json::from_str(last).unwrap())
}

#[tokio::test]
async fn a_failure_is_one_error_event_and_the_end() {
    let case = Case { decode_start: 5, ..Case::new(Place::Meta) };
    let whole = generate(&case, &case.decode_payload());
    // The option is off on the engine: no payload came.
    let without = whole.replace(&format!(r#","routed_experts":"{}""#, case.decode_payload()), "");
    let out = stream(&case.prefill(), &without, &case.plan(), 64).await;
    let (n, error) = error_in(&out.text);
    assert_eq!((n, &error["error"]["code"]), (4, &Value::from("r3_mismatch")));
    assert!(
        out.text.starts_with(without.split_once("data: [DONE]\n\n").unwrap().0)
            && !out.text.contains("data: [DONE]\n\n")
    );
    assert_eq!(out.error.unwrap().source, Source::Decode);
    // One row too few.
    let short = Case { output: 2, ..case.clone() };
    let out = stream(&case.prefill(), &generate(&case, &short.decode_payload()), &case.plan(), 64).await;
    let (n, error) = error_in(&out.text);
    assert_eq!((n, &error["error"]["limit"], &error["error"]["measured"]), (3, &Value::from(2), &Value::from(1)));
    // Prefill has none.
    let out = stream(&case.reply(1, None, "p"), &whole, &case.plan(), 64).await;
    assert_eq!((error_in(&out.text).0, out.error.unwrap().source), (3, Source::Prefill));
    // Cut off inside an event, at any byte of it.
    let last = whole.find("routed_experts").unwrap();
    for cut in [last - 1, last + 17, last + 20, whole.len() - 18] {
        let out = stream(&case.prefill(), &whole[..cut], &case.plan(), 64).await;
        let (n, error) = error_in(&out.text);
        assert_eq!((n, &error["error"]["code"]), (3, &Value::from("connection_reset")), "cut at {cut}");
    }
    // Prefill's leg failed before decode's first token: at once, and not as a stream's end without a word.
    let arena = Arena::new(1 << 20);
    let failed = async { Err(Error::new(Kind::EngineFailed, Source::Prefill, "gone")) };
    let out = collect(merge_sse(Chunks::list(Vec::new()), failed, case.plan(), arena)).await;
    assert_eq!((error_in(&out.text).0, out.error.unwrap().kind, out.account.events), (1, Kind::EngineFailed, 0));
}

#[tokio::test]
async fn an_aborted_stream_and_an_engines_own_error_pass() {
    let case = Case { decode_start: 5, ..Case::new(Place::Meta) };
    let abort = events(&[
        r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"m"},"prompt_tokens":5,"completion_tokens":0}}"#,
        "[DONE]",
    ]);
    let out = stream(&case.prefill(), &abort, &case.plan(), 5).await;
    assert!(out.text == abort && out.account.aborted && out.error.is_none());
    let error = events(&[r#"{"error":{"message":"too long","code":400}}"#, "[DONE]"]);
    let out = stream(&case.prefill(), &error, &case.plan(), 5).await;
    assert!(out.text == error && out.account.engine_error && out.error.is_none());
}

#[tokio::test]
async fn events_go_out_before_prefills_reply_has_come() {
    let case = Case { decode_start: 5, ..Case::new(Place::Meta) };
    let decode = generate(&case, &case.decode_payload());
    let arena = Arena::new(1 << 20);
    let (send, receive) = tokio::sync::oneshot::channel();
    let part = async { receive.await.unwrap() };
    let mut stream = Box::pin(merge_sse(Chunks::of(decode.as_bytes(), 16), part, case.plan(), arena.clone()));
    let mut seen = Vec::new();
    poll_fn(|cx| {
        while let Poll::Ready(Some(frame)) = stream.as_mut().poll_frame(cx) {
            seen.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
        Poll::Ready(())
    })
    .await;
    let first_two = decode.match_indices("\n\n").nth(1).unwrap().0 + 2;
    assert_eq!(String::from_utf8(seen).unwrap(), decode[..first_two]);
    assert_eq!(stream.account().events, 2);
    assert!(send.send(prefill_part(&case.prefill(), &case.plan(), &arena, 64).await).is_ok());
    let rest = String::from_utf8(all(stream).await).unwrap();
    assert_eq!(rest, generate(&case, &case.merged_payload())[first_two..]);
}

#[tokio::test]
async fn a_stream_ends_with_the_reference_when_the_rows_stay_on_the_engines() {
    let descriptor = |uri: &str, pos, rows| {
        Descriptor {
            uri: uri.into(),
            offset: 256,
            pos,
            rows,
            dtype: Dtype::U8,
            layers: 2,
            top_k: 2,
            crc32: Some(9),
            path: None,
            host: None,
        }
        .encode_base64()
    };
    for place in [Place::Meta, Place::ChatExt] {
        let case = Case { decode_start: 5, ..Case::new(place) };
        let plan = Plan { by_ref: true, ..case.plan() };
        let prefill = case.reply(1, Some(&Case::quoted(&descriptor("r3://p/1", 0, 5))), "p");
        let stream_of =
            |payload: &str| if place == Place::Meta { generate(&case, payload) } else { openai(&case, payload, true) };
        for chunk in [1, 40, 4096] {
            let out = stream(&prefill, &stream_of(&descriptor("r3://d/2", 5, 2)), &plan, chunk).await;
            let segment = |uri: &str, pos, rows| {
                format!(r#"{{"uri":"{uri}","offset":256,"pos":{pos},"rows":{rows},"dtype":"uint8","crc32":9}}"#)
            };
            let envelope = format!(
                r#""output_store_ref":{{"handle":{{"type":"r3router","v":1,"segments":[{},{}],"expires_s":600}},"fields":{{"routed_experts":{{"dtype":"uint8","shape":[7,2,2]}}}}}}"#,
                segment("r3://p/1", 0, 5),
                segment("r3://d/2", 5, 2)
            );
            assert_eq!(out.text, stream_of("@").replace(r#""routed_experts":"@""#, &envelope));
        }
    }
}

#[tokio::test]
async fn a_large_payload_streams_through_the_arena() {
    let case = Case { row: 16, prompt: 20_000, output: 3, ..Case::new(Place::Meta) };
    let value = |p: usize, i: usize| ((p * 16 + i) % 256) as i32;
    let text = |poison: bool| base64(&rows(0, 20_002, 16, |p, i| if poison && p < 20_000 { 5 } else { value(p, i) }));
    let prefill = case.reply(1, Some(&Case::quoted(&base64(&rows(0, 20_000, 16, value)))), "p");
    let out = stream(&prefill, &generate(&case, &text(true)), &case.plan(), 65_536).await;
    assert!(out.text == generate(&case, &text(false)));
}
