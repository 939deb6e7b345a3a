//! What clients do: leave at any moment, send too much, stream, abort by their own ids.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::format_collect, clippy::unused_async)]
#![allow(missing_docs)]
mod common;
use std::time::{Duration, Instant};

use common::{
    Act, DECODED, Engine, Running, Seen, chunk, decode_reply, pd, post_bytes, prefill_reply, regular, reply, run,
    sse_head, until,
};
use serde_json::json;
use tokio::io::AsyncWriteExt;

const BODY: &str = r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":2}}"#;

fn prefill(seen: &Seen) -> Act {
    if seen.path == "/generate" { prefill_reply(seen) } else { Act::Hold }
}

#[test]
fn a_client_that_leaves_frees_both_engines_within_200_ms() {
    run(async {
        for stream in [false, true] {
            let (p, d) = (Engine::start(|_| Act::Hold).await, Engine::start(|_| Act::Hold).await);
            let router = Running::start(pd(&[&p], &[&d])).await;
            let mut client = router.client().await;
            let body = format!(r#"{{"input_ids":[1,2,3],"stream":{stream}}}"#);
            client.send_post("/generate", &body).await;
            until("both legs are out", || p.legs().len() == 1 && d.legs().len() == 1).await;
            let left = Instant::now();
            drop(client);
            until("both are aborted", || !p.aborts().is_empty() && !d.aborts().is_empty()).await;
            for engine in [&p, &d] {
                let told = engine.seen("/abort_request")[0].at.duration_since(left);
                assert!(told < Duration::from_millis(200), "told after {told:?}");
                let leg = &engine.legs()[0];
                until("the leg is closed", || engine.closed(leg.connection).is_some()).await;
                assert!(engine.closed(leg.connection).unwrap().duration_since(left) < Duration::from_millis(200));
                assert_eq!(engine.aborts()[0], leg.json()["rid"].as_str().unwrap());
            }
            router.zero().await;
            router.stop().await;
        }
    });
}

#[test]
fn a_request_that_was_left_in_the_queue_is_never_sent() {
    run(async {
        let (p, d) = (
            Engine::start(prefill).await,
            Engine::start(|s: &Seen| if s.path == "/generate" { decode_reply(s) } else { Act::Hold }).await,
        );
        let router = Running::start(pd(&[&p], &[&d])).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 404, "the scripted engines do not know it");
        let mut waiting = Vec::new();
        for _ in 0..20 {
            let mut client = router.client().await;
            client.send_post("/generate", BODY).await;
            waiting.push(client);
        }
        until("all wait", || router.app.gate.snapshot().queued == 20).await;
        let kept = waiting.split_off(15);
        let left = Instant::now();
        drop(waiting);
        until("those who left are out", || router.app.gate.snapshot().queued == 5).await;
        assert!(left.elapsed() < Duration::from_millis(200));
        router.app.gate.set_paused(false);
        for mut client in kept {
            assert_eq!(client.reply().await.status, 200);
        }
        until("prefill has read its own", || p.legs().len() >= 5).await;
        assert_eq!((p.legs().len(), d.legs().len()), (5, 5));
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn a_stream_is_relayed_byte_for_byte_however_it_is_cut() {
    run(async {
        let text =
            "data: {\"text\":\"write data: [DONE] at the end\"}\n\ndata: {\"text\":\"more\"}\n\ndata: [DONE]\n\n";
        let p = Engine::start(prefill).await;
        let cut = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(1));
        let at = std::sync::Arc::clone(&cut);
        let d = Engine::start(move |seen: &Seen| {
            if seen.path != "/generate" {
                return Act::Hold;
            }
            let (a, b) = text.as_bytes().split_at(at.load(std::sync::atomic::Ordering::Relaxed));
            let pause = Duration::from_millis(2);
            Act::Paced(vec![
                (Duration::ZERO, [sse_head(), chunk(a)].concat()),
                (pause, chunk(b)),
                (Duration::ZERO, b"0\r\n\r\n".to_vec()),
            ])
        })
        .await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        let mut client = router.client().await;
        for at in 1..text.len() {
            cut.store(at, std::sync::atomic::Ordering::Relaxed);
            let got = client.post("/generate", r#"{"input_ids":[1,2,3],"stream":true}"#).await;
            assert_eq!((got.status, got.text().as_str(), got.cut), (200, text, false), "cut at {at}");
            assert_eq!(got.header("content-type"), Some("text/event-stream; charset=utf-8"));
        }
        assert!(p.legs().iter().all(|l| l.json()["stream"] == json!(false)), "prefill is never streamed");
        assert!(d.legs().iter().all(|l| l.json()["stream"] == json!(true)));
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn a_stream_that_fails_before_its_first_event_is_a_plain_error_and_after_it_one_error_event() {
    run(async {
        let p = Engine::start(prefill).await;
        let d = Engine::start(|s: &Seen| match s.path.as_str() {
            "/generate" => Act::Send(reply(400, r#"{"error":{"message":"bad value of a field, refused"}}"#)),
            _ => Act::Hold,
        })
        .await;
        let mut settings = pd(&[&p], &[&d]);
        settings.disable_retries = true;
        let router = Running::start(settings).await;
        let body = r#"{"input_ids":[1,2,3],"stream":true}"#;
        let got = router.post("/generate", body).await;
        assert_eq!((got.status, got.header("content-type")), (400, Some("application/json")));
        assert_eq!(got.json()["error"]["message"], "bad value of a field, refused");

        // SGLang says 200 before it knows that the transfer will fail.
        let failed = "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"Decode transfer failed\",\"status_code\":500}}}\n\n";
        d.script(move |s: &Seen| match s.path.as_str() {
            "/generate" => Act::Send([sse_head(), chunk(failed.as_bytes()), b"0\r\n\r\n".to_vec()].concat()),
            _ => Act::Hold,
        });
        let got = router.post("/generate", body).await;
        assert_eq!((got.status, got.code().as_str()), (500, "engine_failed"));
        assert_eq!(got.json()["error"]["message"], "Decode transfer failed");

        d.script(|s: &Seen| match s.path.as_str() {
            "/generate" => Act::SendAndClose([sse_head(), chunk(b"data: {\"text\":\"a\"}\n\n")].concat()),
            _ => Act::Hold,
        });
        let got = router.post("/generate", body).await;
        assert_eq!((got.status, got.cut), (200, false));
        let text = got.text();
        let events: Vec<&str> = text.split_terminator("\n\n").collect();
        assert_eq!((events.len(), events[0]), (2, "data: {\"text\":\"a\"}"));
        let error: serde_json::Value = serde_json::from_str(events[1].strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(error["error"]["code"], "connection_reset");
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn one_limit_holds_for_every_route_and_framing_and_the_client_can_read_the_answer() {
    run(async {
        let engine =
            Engine::start(|s: &Seen| if s.path == "/generate" { Act::Send(reply(200, "{}")) } else { Act::Hold }).await;
        let mut settings = regular(&[&engine]);
        settings.max_payload_size = 3_000_000;
        let router = Running::start(settings).await;
        let body = |size: usize| {
            let fill = size - r#"{"text":""}"#.len();
            format!(r#"{{"text":"{}"}}"#, "x".repeat(fill))
        };
        let mut client = router.client().await;
        for path in ["/generate", "/v1/chat/completions", "/flush_cache", "/workers"] {
            let got = client.post(path, &body(3_000_001)).await;
            assert_eq!((got.status, got.code().as_str()), (413, "body_too_large"), "{path}");
            assert_eq!(
                (got.json()["error"]["limit"].as_u64(), got.json()["error"]["measured"].as_u64()),
                (Some(3_000_000), Some(3_000_001))
            );
        }
        let chunked = |text: &str| {
            let mut bytes = b"POST /generate HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
            for piece in text.as_bytes().chunks(100_000) {
                bytes.extend_from_slice(&chunk(piece));
            }
            bytes.extend_from_slice(b"0\r\n\r\n");
            bytes
        };
        client.send(&chunked(&body(3_000_001))).await;
        assert_eq!(client.reply().await.status, 413);
        assert!(engine.legs().is_empty(), "a refused body reached an engine");
        client.send(&chunked(&body(3_000_000))).await;
        assert_eq!(client.reply().await.status, 200);
        assert_eq!(client.post("/generate", &body(3_000_000)).await.status, 200);
        for leg in engine.legs() {
            assert!(leg.json()["text"].as_str().unwrap().len() == 3_000_000 - 11, "the body did not arrive whole");
        }
        router.stop().await;
    });
}

#[test]
fn what_is_no_json_costs_nothing_but_its_answer() {
    run(async {
        let engine =
            Engine::start(|s: &Seen| if s.path == "/generate" { Act::Send(reply(200, "{}")) } else { Act::Hold }).await;
        let router = Running::start(regular(&[&engine])).await;
        let mut client = router.client().await;
        for body in ["", "{", "[]", "{\"text\": tru}", "{\"text\":\"a\"} x"] {
            let got = client.post("/generate", body).await;
            assert_eq!(got.status, 400, "{body:?}");
            assert!(["invalid_json", "invalid_field"].contains(&got.code().as_str()), "{}", got.text());
        }
        let mut raw = post_bytes("/generate", "content-type: text/plain\r\n", "{\"text\":\"a?\"}");
        let at = raw.len() - 3;
        raw[at] = 0xff;
        client.send(&raw).await;
        assert_eq!(client.reply().await.status, 400);
        assert!(engine.legs().is_empty());
        assert_eq!(client.post("/generate", r#"{"text":"a"}"#).await.status, 200);
        router.stop().await;
    });
}

#[test]
fn a_regular_engines_reply_is_relayed_untouched_with_its_headers() {
    run(async {
        let big: Vec<u8> = (0..3_000_000u32).map(|i| b"0123456789abcdef"[(i % 16) as usize]).collect();
        let small = r#"{"text":"a"  ,"meta_info":{}}"#;
        let answer = big.clone();
        let engine = Engine::start(move |s: &Seen| match s.path.as_str() {
            "/generate" if s.body.windows(3).any(|w| w == b"big") => Act::Send(common::reply_with(
                200,
                "content-type: application/json\r\nx-engine: e1\r\nkeep-alive: timeout=5\r\n",
                &answer,
            )),
            "/generate" => Act::Send(common::reply_with(
                200,
                "content-type: application/json\r\nx-engine: e1\r\n",
                small.as_bytes(),
            )),
            _ => Act::Hold,
        })
        .await;
        let router = Running::start(regular(&[&engine])).await;
        let mut client = router.client().await;
        client.send(&post_bytes("/generate", "x-request-id: abc\r\n", r#"{"text":"a"}"#)).await;
        let got = client.reply().await;
        assert_eq!((got.status, got.text().as_str()), (200, small));
        assert_eq!((got.header("x-engine"), got.header("x-request-id")), (Some("e1"), Some("abc")));
        let got = client.post("/generate", r#"{"text":"big"}"#).await;
        assert_eq!(got.body, big);
        assert_eq!((got.header("keep-alive"), got.header("x-engine")), (None, Some("e1")));
        assert_eq!(got.header("content-length"), Some("3000000"));
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn an_abort_by_the_clients_id_ends_its_attempts_and_no_others() {
    run(async {
        let (p, d) = (
            Engine::start(prefill).await,
            Engine::start(
                |s: &Seen| if s.path == "/generate" { Act::UntilAborted(reply(200, DECODED)) } else { Act::Hold },
            )
            .await,
        );
        let router = Running::start(pd(&[&p], &[&d])).await;
        let mut short = router.client().await;
        short.send_post("/generate", r#"{"input_ids":[1],"rid":"ep-7::t3"}"#).await;
        let mut long = router.client().await;
        long.send_post("/generate", r#"{"input_ids":[1],"rid":"ep-7::t30"}"#).await;
        until("both run", || d.legs().len() == 2).await;
        let got = router.post("/abort_request", r#"{"rid":"ep-7::t3"}"#).await;
        assert_eq!((got.status, got.json()["aborted"]["running"].as_u64()), (200, Some(1)));
        let start = Instant::now();
        assert_eq!(short.reply().await.text(), DECODED);
        assert!(start.elapsed() < Duration::from_secs(1));
        let rids: Vec<String> = d.legs().iter().map(|l| l.json()["rid"].as_str().unwrap().to_owned()).collect();
        assert!(rids[0].starts_with("ep-7::t3~") || rids[1].starts_with("ep-7::t3~"), "{rids:?}");
        assert!(d.aborts().iter().all(|r| r.starts_with("ep-7::t3~")), "{:?}", d.aborts());
        // A prefix hits the other one.
        router.post("/abort_request", r#"{"rid":"ep-7::","prefix":true}"#).await;
        assert_eq!(long.reply().await.status, 200);
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn a_half_closed_connection_counts_as_left() {
    run(async {
        let (p, d) = (Engine::start(|_| Act::Hold).await, Engine::start(|_| Act::Hold).await);
        let router = Running::start(pd(&[&p], &[&d])).await;
        let mut client = router.client().await;
        client.send_post("/generate", BODY).await;
        until("both legs are out", || p.legs().len() == 1 && d.legs().len() == 1).await;
        client.stream.shutdown().await.unwrap();
        until("both are aborted", || !p.aborts().is_empty() && !d.aborts().is_empty()).await;
        router.zero().await;
        router.stop().await;
    });
}
