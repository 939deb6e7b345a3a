//! Whole replies.
use r3router_core::error::{Kind, Source};
use r3router_core::r3::Dtype;
use r3router_core::r3::descriptor::Descriptor;
use r3router_proxy::merge::{Hold, Plan};
use r3router_proxy::store::Arena;

use crate::kit::{Case, Place, base64, merge, prefill_part, rows};

const PLACES: [Place; 4] = [Place::Meta, Place::ChatExt, Place::ChatMeta, Place::Completions];

async fn exact(case: &Case, chunk: usize) {
    for hold in [Hold::Narrow, Hold::Text] {
        let plan = Plan { hold, ..case.plan() };
        let done = merge(&case.prefill(), &case.decode(), &plan, chunk).await.unwrap();
        assert_eq!(done.text(), case.merged(), "{hold:?}");
    }
}

#[tokio::test]
async fn no_junk_row_of_decode_ever_leaves() {
    for place in PLACES {
        for row in 1..=6 {
            for output in [1, 2, 3, 40] {
                for start in [0, 2, 5] {
                    for (decode_start, obeys) in [(start, true), (5, true), (5, false), (start, false)] {
                        let case = Case { output, row, start, decode_start, obeys, ..Case::new(place) };
                        for hold in [Hold::Narrow, Hold::Text] {
                            let known = Plan { row_items: Some(row as u32), hold, ..case.plan() };
                            let done = merge(&case.prefill(), &case.decode(), &known, 7).await.unwrap();
                            assert_eq!(done.text(), case.merged(), "{hold:?}");
                        }
                        // Without the width, small counts that can be read two ways are refused; junk is not an answer.
                        match merge(&case.prefill(), &case.decode(), &case.plan(), usize::MAX).await {
                            Ok(done) => assert_eq!(done.text(), case.merged()),
                            Err(e) => assert!(start > 0 && e.message.contains("cannot say"), "{e}"),
                        }
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn every_chunking_gives_the_same_bytes() {
    for place in PLACES {
        for (row, decode_start) in [(1, 0), (2, 5), (3, 3)] {
            let case = Case { row, decode_start, ..Case::new(place) };
            for chunk in 1..60 {
                exact(&case, chunk).await;
            }
        }
    }
}

#[tokio::test]
async fn narrow_dtypes_pass_as_they_are_wherever_they_are_named() {
    for place in PLACES {
        for dtype in ["uint8", "uint16", "int32"] {
            for row in 1..=4 {
                for decode_start in [0, 5] {
                    let case = Case { dtype: Some(dtype), row, decode_start, ..Case::new(place) };
                    exact(&case, usize::MAX).await;
                    exact(&case, 5).await;
                    // Named in front of the payload as well as behind it.
                    let front = |reply: String| {
                        let reply = reply.replace(&format!(r#","routed_experts_dtype":"{dtype}""#), "");
                        reply.replace(
                            r#""routed_experts":"#,
                            &format!(r#""routed_experts_dtype":"{dtype}","routed_experts":"#),
                        )
                    };
                    let done = merge(&front(case.prefill()), &front(case.decode()), &case.plan(), 11).await.unwrap();
                    assert_eq!(done.text(), front(case.merged()));
                }
            }
        }
    }
    let (eight, sixteen) = (
        Case { dtype: Some("uint8"), ..Case::new(Place::Meta) },
        Case { dtype: Some("uint16"), ..Case::new(Place::Meta) },
    );
    let e = merge(&eight.prefill(), &sixteen.decode(), &eight.plan(), 64).await.err().unwrap();
    assert_eq!((e.kind, e.source), (Kind::R3Mismatch, Source::Decode));
    assert!(e.message.contains("uint8") && e.message.contains("uint16"), "{e}");
    let unnamed = Case { dtype: None, ..eight.clone() };
    assert!(merge(&eight.prefill(), &unnamed.decode(), &eight.plan(), 64).await.is_err());
}

#[tokio::test]
async fn ids_keep_their_values_whatever_width_they_need() {
    let case = Case { row: 3, prompt: 4000, output: 300, ..Case::new(Place::Meta) };
    for (index, odd) in [(17, 256), (11_000, 65_535), (12_500, 65_536), (40, -1), (12_899 - 4, i32::MAX)] {
        let value = |poison: bool| {
            move |p: usize, i: usize| {
                let n = p * 3 + i;
                if n == index {
                    odd
                } else if poison && p < 4000 {
                    9
                } else {
                    (n % 250) as i32
                }
            }
        };
        let text = |from, until, poison| Case::quoted(&base64(&rows(from, until, 3, value(poison))));
        let prefill = case.reply(1, Some(&text(0, 4000, false)), "p");
        let decode = case.reply(300, Some(&text(0, 4299, true)), "d");
        let done = merge(&prefill, &decode, &case.plan(), 10_007).await.unwrap();
        assert_eq!(done.text(), case.reply(300, Some(&text(0, 4299, false)), "d"), "{odd} at {index}");
    }
}

#[tokio::test]
async fn rows_are_held_narrow_and_junk_is_not_held_at_all() {
    let case = Case { row: 16, prompt: 30_000, output: 100, ..Case::new(Place::Meta) };
    for (decode_start, obeys) in [(0, true), (30_000, true), (30_000, false)] {
        let case = Case { decode_start, obeys, ..case.clone() };
        let done = merge(&case.prefill(), &case.decode(), &case.plan(), 65_536).await.unwrap();
        assert!(done.text() == case.merged());
        let text = case.prefill_payload().len() as f64;
        assert!((done.held as f64) < 0.2 * text, "{} bytes held for {text} of text", done.held);
        assert_eq!(done.account.r3_prefill, case.prefill_payload().len() as u64);
        assert_eq!(done.account.r3_decode, case.decode_payload().len() as u64);
        assert_eq!(
            (done.account.row_items, done.account.prompt_tokens, done.account.completion_tokens),
            (Some(16), Some(30_000), Some(100))
        );
    }
}

#[tokio::test]
async fn text_is_held_as_it_came_when_it_fits_and_narrow_when_not() {
    let case = Case { row: 5, prompt: 4001, output: 7, ..Case::new(Place::Meta) };
    let plan = Plan { hold: Hold::Text, ..case.plan() };
    let text = case.prefill_payload().len() as u64;
    // Text takes of the spare half only.
    for (cap, held) in [(3 * text, text), (text + 4096, 20_000), (text / 2, 20_000)] {
        let arena = Arena::new(cap);
        let part = prefill_part(&case.prefill(), &plan, &arena, 1000).await.unwrap();
        assert!((held..held + 4096).contains(&arena.used()), "{} held of {cap}", arena.used());
        let body = crate::kit::Chunks::of(case.decode().as_bytes(), 1000);
        let merged = r3router_proxy::merge::merge_json(body, None, async { Ok(part) }, &plan, &arena).await.unwrap();
        assert!(crate::kit::all(merged).await == case.merged().into_bytes());
        assert_eq!(arena.used(), 0);
    }
}

#[tokio::test]
async fn what_does_not_fit_is_an_error_with_counts_and_worker() {
    let named = |case: &Case| Plan { prefill: "http://p:1@2".into(), decode: "http://d:1@3".into(), ..case.plan() };
    for place in PLACES {
        let case = Case::new(place);
        let shorter = Case { output: 1, ..case.clone() };
        let reply = |payload: &str| case.reply(3, Some(&Case::quoted(payload)), "d");
        let e = merge(&case.prefill(), &reply(&shorter.decode_payload()), &named(&case), 64).await.err().unwrap();
        assert_eq!((e.kind, e.source, e.limit, e.measured), (Kind::R3Mismatch, Source::Decode, Some(7.0), Some(5.0)));
        assert_eq!(e.worker.as_deref(), Some("http://d:1@3"));
        // Decode shorter than prefill's own rows.
        let tiny = Case { prompt: 2, output: 1, ..case.clone() };
        let e = merge(&case.prefill(), &reply(&tiny.decode_payload()), &named(&case), 64).await.err().unwrap();
        assert_eq!((e.limit, e.measured), (Some(7.0), Some(2.0)));
        // Prefill's rows do not fit its prompt.
        let e =
            merge(&case.reply(1, Some("\"AAAAAA==\""), "p"), &case.decode(), &named(&case), 64).await.err().unwrap();
        assert_eq!((e.kind, e.source, e.worker.as_deref()), (Kind::R3Mismatch, Source::Prefill, Some("http://p:1@2")));
        // One side has none.
        for none in [None, Some("null")] {
            let e = merge(&case.reply(1, none, "p"), &case.decode(), &named(&case), 64).await.err().unwrap();
            assert_eq!((e.kind, e.source), (Kind::R3Mismatch, Source::Prefill), "{place:?} {e}");
            let e = merge(&case.prefill(), &case.reply(3, none, "d"), &named(&case), 64).await.err().unwrap();
            assert_eq!((e.kind, e.source), (Kind::R3Mismatch, Source::Decode), "{place:?} {e}");
        }
        for broken in ["\"AA\\/A\"", "\"AAA\"", "\"AAAA=AAA\"", "\"\\u0041AAA\""] {
            let e = merge(&case.reply(1, Some(broken), "p"), &case.decode(), &named(&case), 3).await.err().unwrap();
            assert_eq!((e.kind, e.source), (Kind::R3Mismatch, Source::Prefill), "{broken}");
            let plan = Plan { hold: Hold::Text, ..named(&case) };
            let e = merge(&case.reply(1, Some(broken), "p"), &case.decode(), &plan, 3).await.err().unwrap();
            assert_eq!((e.kind, e.source), (Kind::R3Mismatch, Source::Prefill), "{broken} as text");
        }
        let cut = case.decode();
        for end in [cut.len() - 1, cut.len() / 2, 1] {
            let e = merge(&case.prefill(), &cut[..end], &named(&case), 64).await.err().unwrap();
            assert_eq!((e.kind, e.source), (Kind::EngineProtocol, Source::Decode));
        }
    }
    let case = Case::new(Place::Meta);
    let retracted = case.decode().replace("\"num_retractions\":0", "\"num_retractions\":2");
    let e = merge(&case.prefill(), &retracted, &named(&case), 64).await.err().unwrap();
    assert_eq!((e.kind, e.source, e.measured), (Kind::R3Mismatch, Source::Decode, Some(2.0)));
    // A width that the model has not.
    let plan = Plan { row_items: Some(8), ..named(&case) };
    assert_eq!(merge(&case.prefill(), &case.decode(), &plan, 64).await.err().unwrap().kind, Kind::R3Mismatch);
}

#[tokio::test]
async fn openai_routes_that_leave_an_empty_payload_out_get_it_back() {
    for place in [Place::ChatExt, Place::Completions] {
        let case = Case { output: 1, decode_start: 5, ..Case::new(place) };
        let done = merge(&case.prefill(), &case.reply(1, None, "d"), &case.plan(), 64).await.unwrap();
        assert_eq!(done.text(), case.reply(1, Some(&Case::quoted(&case.prefill_payload())), "d"));
        let other = case.reply(1, None, "d").replace("}}", r#"},"sglext":{"output_ids":[[1]]}}"#);
        let done = merge(&case.prefill(), &other, &case.plan(), 64).await.unwrap();
        let want = other.replace("[[1]]}", &format!(r#"[[1]],"routed_experts":"{}"}}"#, case.prefill_payload()));
        assert_eq!(done.text(), want);
    }
}

#[tokio::test]
async fn an_abort_reaches_the_client_and_no_row_is_invented() {
    let case = Case { decode_start: 5, ..Case::new(Place::Meta) };
    let abort = |output: usize, payload: Option<&str>| {
        let reply = Case { output, ..case.clone() }.reply(output, payload, "");
        reply.replace(r#"{"type":"length","length""#, r#"{"type":"abort","length""#)
    };
    let none = || case.reply(1, None, "p");
    for payload in [None, Some("null")] {
        for prefill in [case.prefill(), none()] {
            let decode = abort(0, payload);
            let done = merge(&prefill, &decode, &case.plan(), 64).await.unwrap();
            assert_eq!(done.text(), decode);
            assert!(done.account.aborted);
        }
    }
    // Two tokens came out before: prefill's rows and decode's one.
    let partial = Case { output: 2, ..case.clone() };
    let (sent, want) = (Case::quoted(&partial.decode_payload()), Case::quoted(&partial.merged_payload()));
    let done = merge(&case.prefill(), &abort(2, Some(&sent)), &case.plan(), 64).await.unwrap();
    assert_eq!(done.text(), abort(2, Some(&want)));
    // None came out, and decode sent an empty string: exactly one row less than prefill.
    let none_out = Case { output: 0, ..case.clone() };
    let done = merge(&case.prefill(), &abort(0, Some("\"\"")), &case.plan(), 64).await.unwrap();
    assert_eq!(done.text(), abort(0, Some(&Case::quoted(&none_out.merged_payload()))));
    // Prefill has none: decode's own rows are not the answer.
    let done = merge(&none(), &abort(2, Some(&sent)), &case.plan(), 64).await.unwrap();
    assert_eq!(done.text(), abort(2, None));
    // Prefill failed.
    let arena = Arena::new(1 << 20);
    let failed = async { Err(r3router_core::error::Error::new(Kind::EngineFailed, Source::Prefill, "gone")) };
    let body = abort(2, Some(&sent));
    let body = crate::kit::Chunks::of(body.as_bytes(), 9);
    let merged = r3router_proxy::merge::merge_json(body, None, failed, &case.plan(), &arena).await.unwrap();
    assert_eq!(String::from_utf8(crate::kit::all(merged).await).unwrap(), abort(2, None));
    // The same failure with a reply that is no abort is the failure.
    let failed = async { Err(r3router_core::error::Error::new(Kind::EngineFailed, Source::Prefill, "gone")) };
    let body = crate::kit::Chunks::of(case.decode().as_bytes(), 9);
    let e = r3router_proxy::merge::merge_json(body, None, failed, &case.plan(), &arena).await.err().unwrap();
    assert_eq!(e.kind, Kind::EngineFailed);
}

#[tokio::test]
async fn indexer_rows_are_merged_when_both_have_them_and_refused_when_prefill_has_not() {
    let both = |reply: String, payload: &str| {
        reply.replace(r#","dp_rank""#, &format!(r#","indexer_topk":"{payload}","dp_rank""#))
    };
    let case = Case { decode_start: 5, ..Case::new(Place::Meta) };
    let plan = Plan { indexer_topk: true, ..case.plan() };
    let whole = Case { row: 3, ..Case::new(Place::Meta) };
    let prefill = both(case.prefill(), &whole.prefill_payload());
    let decode = both(case.decode(), &whole.decode_payload());
    for chunk in [1, 13, 4096] {
        let done = merge(&prefill, &decode, &plan, chunk).await.unwrap();
        assert_eq!(done.text(), both(case.merged(), &whole.merged_payload()));
    }
    let e = merge(&case.prefill(), &decode, &plan, 64).await.err().unwrap();
    assert_eq!((e.kind, e.source), (Kind::R3Unsupported, Source::Prefill));
    // Not asked for: it is none of the merge's business.
    let done = merge(&prefill, &decode, &case.plan(), 5).await.unwrap();
    assert_eq!(done.text(), both(case.merged(), &whole.decode_payload()));
}

#[tokio::test]
async fn all_prompt_logprobs_come_from_prefill_and_all_others_from_decode() {
    let plan = Plan { logprobs: true, routed_experts: false, ..Case::new(Place::Meta).plan() };
    let reply = |input: &str, output: &str, more: &str| {
        format!(
            r#"{{"text":"t","meta_info":{{"id":"r","input_token_logprobs":{input},"output_token_logprobs":{output},"input_top_logprobs": {input} ,"output_top_logprobs":{output},"input_token_ids_logprobs":{input}{more},"e2e":1}}}}"#
        )
    };
    let prefill =
        reply("[[-0.5,1000,null],[-1,1001,\"x]\"]]", "[[-2,1002,null]]", r#","input_top_logprobs_shape":[2,1]"#);
    let decode = reply("[]", "[[-3,2000,null],[-4,2001,null]]", "");
    let want = reply("[[-0.5,1000,null],[-1,1001,\"x]\"]]", "[[-3,2000,null],[-4,2001,null]]", "");
    let want = want.replace(r#""e2e":1"#, r#""e2e":1,"input_top_logprobs_shape":[2,1]"#);
    for chunk in [1, 17, 4096] {
        assert_eq!(merge(&prefill, &decode, &plan, chunk).await.unwrap().text(), want);
    }
    // Element by element in a list.
    let list = |a: &str, b: &str| format!("[{a}, {b}]");
    let other = reply("[[-9,1009,null]]", "[]", "");
    let done = merge(&list(&prefill, &other), &list(&decode, &reply("[]", "[7]", "")), &plan, 64).await.unwrap();
    assert_eq!(done.text(), list(&want, &reply("[[-9,1009,null]]", "[7]", "")));
    // In a chat choice's meta_info.
    let chat = |meta: &str| format!(r#"{{"choices":[{{"index":0,"meta_info":{{"input_token_logprobs":{meta}}}}}]}}"#);
    let plan = Plan { route: r3router_core::wire::Route::Chat, ..plan };
    assert_eq!(merge(&chat("[[-1,5,null]]"), &chat("[]"), &plan, 64).await.unwrap().text(), chat("[[-1,5,null]]"));
}

#[tokio::test]
async fn completions_with_echo_begin_with_the_prompts_logprobs() {
    let plan = Plan { logprobs: true, routed_experts: false, ..Case::new(Place::Completions).plan() };
    let reply = |tokens: &str, values: &str, tops: &str, n: usize| {
        format!(
            r#"{{"choices":[{{"index":0,"text":"t","logprobs":{{"text_offset":[-1],"token_logprobs":{values},"tokens":{tokens},"top_logprobs":{tops}}}}}],"usage":{{"completion_tokens":{n}}}}}"#
        )
    };
    let prefill = reply(r#"["a","b,","c"]"#, "[null,-1.5,-2]", r#"[null,{"b":-1.5},{"c":-2}]"#, 1);
    let decode = reply(r#"["c","d"]"#, "[-2,-3]", r#"[{"c":-2},{"d":-3}]"#, 2);
    let want = reply(r#"["a","b,","c","d"]"#, "[null,-1.5,-2,-3]", r#"[null,{"b":-1.5},{"c":-2},{"d":-3}]"#, 2);
    assert_eq!(merge(&prefill, &decode, &plan, 19).await.unwrap().text(), want);
    let empty = reply("[]", "[]", "[]", 0);
    let want = reply(r#"["a","b,"]"#, "[null,-1.5]", r#"[null,{"b":-1.5}]"#, 0);
    assert_eq!(merge(&prefill, &empty, &plan, 19).await.unwrap().text(), want);
}

fn descriptor(uri: &str, pos: u32, rows: u32) -> Descriptor {
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
}

#[tokio::test]
async fn rows_that_stay_on_the_engines_go_by_reference() {
    for place in PLACES {
        for (pos, rows, chunk) in [(5u32, 2, 3), (0, 7, 4096)] {
            let case = Case { decode_start: pos as usize, ..Case::new(place) };
            let plan = Plan { by_ref: true, ..case.plan() };
            let prefill = case.reply(1, Some(&Case::quoted(&descriptor("r3://p/1", 0, 5).encode_base64())), "p");
            let decode = case.reply(3, Some(&Case::quoted(&descriptor("r3://d/\"2", pos, rows).encode_base64())), "d");
            let done = merge(&prefill, &decode, &plan, chunk).await.unwrap();
            // Decode's object begins with prompt rows that it never computed: its address and its offset skip them.
            let (part, offset, crc) = if pos == 0 { ("?rows=5:7", 276, "null") } else { ("", 256, "9") };
            let envelope = format!(
                r#""output_store_ref":{{"handle":{{"type":"r3router","v":1,"segments":[{{"uri":"r3://p/1","offset":256,"pos":0,"rows":5,"dtype":"uint8","crc32":9}},{{"uri":"r3://d/\"2{part}","offset":{offset},"pos":5,"rows":2,"dtype":"uint8","crc32":{crc}}}],"expires_s":600}},"fields":{{"routed_experts":{{"dtype":"uint8","shape":[7,2,2]}}}}}}"#
            );
            let want = case.reply(3, Some("@"), "d").replace(r#""routed_experts":@"#, &envelope);
            assert_eq!(done.text(), want);
            assert_eq!((done.held, done.account.row_items), (0, Some(4)));
            // Unmodified clients cannot be served from there, and are told so.
            let e = merge(&prefill, &decode, &case.plan(), chunk).await.err().unwrap();
            assert_eq!(e.kind, Kind::R3Unsupported);
            // Rows missing, or the plug-in on one side only.
            let short = case.reply(3, Some(&Case::quoted(&descriptor("d", pos, rows - 1).encode_base64())), "d");
            assert_eq!(merge(&prefill, &short, &plan, chunk).await.err().unwrap().kind, Kind::R3Mismatch);
            assert_eq!(merge(&case.prefill(), &decode, &plan, chunk).await.err().unwrap().kind, Kind::R3Unsupported);
            assert_eq!(merge(&prefill, &case.decode(), &plan, chunk).await.err().unwrap().kind, Kind::R3Unsupported);
        }
    }
}

#[tokio::test]
async fn a_full_arena_refuses_the_reply_and_keeps_nothing() {
    let case = Case { row: 64, prompt: 2000, ..Case::new(Place::Meta) };
    let arena = Arena::new(100 << 10);
    let e = prefill_part(&case.prefill(), &case.plan(), &arena, 4096).await.err().unwrap();
    assert_eq!((e.kind, e.limit), (Kind::R3ArenaTooSmall, Some(102_400.0)));
    assert_eq!(arena.used(), 0);
}
