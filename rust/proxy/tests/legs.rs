//! The two legs of an attempt: what they carry, and how one that fails ends the other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::format_collect, clippy::unused_async)]
#![allow(missing_docs)]
mod common;
use std::time::{Duration, Instant};

use common::{Act, DECODED, Engine, Running, Seen, decode_reply, pd, prefill_reply, reply, run, until};
use serde_json::{Value, json};

const BODY: &str = r#"{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "stream": false}"#;
/// Fields that no strict parser takes and every engine does.
const ODD: &str =
    r#"{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "future": {"a": [1e400, "\ud83d"]}}"#;

fn info(dp: u16) -> impl Fn(&Seen) -> Act + Send + Sync {
    move |seen| match seen.path.as_str() {
        "/server_info" => {
            Act::Send(reply(200, &json!({"dp_size": dp, "version": "0.5.23", "page_size": 1}).to_string()))
        }
        _ => Act::Hold,
    }
}

/// A prefill engine of `dp` ranks that answers generation by `script`.
async fn engine(dp: u16, script: impl Fn(&Seen) -> Act + Send + Sync + 'static) -> Engine {
    let about = info(dp);
    Engine::start(
        move |seen| if seen.method == "POST" && seen.path != "/abort_request" { script(seen) } else { about(seen) },
    )
    .await
}

#[test]
fn both_legs_carry_one_room_that_names_the_prefill_rank_and_their_own_ranks() {
    run(async {
        let (p, d) = (engine(3, prefill_reply).await, engine(4, decode_reply).await);
        let router = Running::start(pd(&[&p], &[&d])).await;
        for _ in 0..60 {
            let got = router.post("/generate", ODD).await;
            assert_eq!((got.status, got.text().as_str()), (200, DECODED));
        }
        let (ps, ds) = (p.legs(), d.legs());
        assert_eq!((ps.len(), ds.len()), (60, 60));
        let mut rooms = std::collections::HashSet::new();
        for (p_leg, d_leg) in ps.iter().zip(&ds) {
            let (p_text, d_text) =
                (String::from_utf8_lossy(&p_leg.body).into_owned(), String::from_utf8_lossy(&d_leg.body).into_owned());
            let room = |text: &str| {
                let at = text.find("\"bootstrap_room\":").unwrap() + 17;
                text[at..].chars().take_while(char::is_ascii_digit).collect::<String>()
            };
            let (p_room, d_room) = (room(&p_text), room(&d_text));
            assert_eq!(p_room, d_room, "to the last digit");
            let number: u64 = p_room.parse().unwrap();
            assert!((1..1 << 63).contains(&number) && rooms.insert(number));
            for text in [&p_text, &d_text] {
                assert!(
                    text.contains(r#""future": {"a": [1e400, "\ud83d"]}"#),
                    "bytes that are not the router's changed: {text}"
                );
                assert!(
                    text.contains(r#""bootstrap_host":"127.0.0.1""#) && text.contains(r#""bootstrap_port":8998"#),
                    "{text}"
                );
            }
            let field = |text: &str, name: &str| -> Option<u64> {
                let at = text.find(&format!("\"{name}\":"))? + name.len() + 3;
                text[at..].chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok()
            };
            assert_eq!(field(&p_text, "routed_dp_rank"), Some(number % 3));
            assert_eq!(field(&d_text, "disagg_prefill_dp_rank"), Some(number % 3));
            assert!(field(&d_text, "routed_dp_rank").unwrap() < 4);
        }
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn prefills_refusal_reaches_the_client_as_it_is_and_decode_is_closed_and_aborted() {
    run(async {
        for (status, code) in [(400, 400), (422, 422), (500, 500), (503, 503)] {
            let body = r#"{"error":{"message":"the prompt is too long","code":400}}"#;
            let p = Engine::start(move |seen| match seen.path.as_str() {
                "/generate" => Act::Paced(vec![(Duration::from_millis(50), reply(status, body))]),
                _ => Act::Hold,
            })
            .await;
            let d = Engine::start(|_| Act::Hold).await;
            let mut settings = pd(&[&p], &[&d]);
            settings.disable_retries = true;
            let router = Running::start(settings).await;
            let start = Instant::now();
            let got = router.post("/generate", BODY).await;
            assert_eq!(got.status, code);
            assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
            if status < 500 {
                assert_eq!(got.text(), body, "4xx passes as the engine wrote it");
                assert_eq!(got.header("content-type"), Some("application/json"));
            } else {
                assert_eq!(got.json()["error"]["message"], "the prompt is too long");
                assert_eq!(got.code(), "engine_failed");
                assert_eq!(got.json()["error"]["worker"], format!("{}@0", p.url()));
            }
            until("decode is told twice", || d.aborts().len() == 2).await;
            let leg = &d.legs()[0];
            let rid = leg.json()["rid"].as_str().unwrap().to_owned();
            assert_eq!(d.aborts(), [rid.clone(), rid]);
            assert!(d.closed(leg.connection).is_some(), "the leg was not closed");
            assert!(p.aborts().is_empty(), "prefill had ended by itself");
            router.zero().await;
            router.stop().await;
        }
    });
}

#[test]
fn a_failed_attempt_is_tried_again_as_a_whole_with_a_new_room_and_new_ids() {
    run(async {
        let p = Engine::start(|seen: &Seen| {
            if seen.path != "/generate" {
                return Act::Hold;
            }
            // The first attempt's prefill waits for a decode that never comes.
            Act::Paced(vec![(
                Duration::from_millis(200),
                match prefill_reply(seen) {
                    Act::Send(bytes) => bytes,
                    _ => unreachable!(),
                },
            )])
        })
        .await;
        let d0 = Engine::start(|seen: &Seen| match seen.path.as_str() {
            "/generate" => Act::Send(reply(503, r#"{"detail":"Retracted under decode memory pressure"}"#)),
            _ => Act::Hold,
        })
        .await;
        let d1 = Engine::start(decode_or_info).await;
        let router = Running::start(pd(&[&p], &[&d0, &d1])).await;
        for _ in 0..12 {
            let got = router.post("/generate", BODY).await;
            assert_eq!((got.status, got.text().as_str()), (200, DECODED));
        }
        let failed = d0.legs().len();
        assert!(failed >= 1, "the failing engine was never chosen");
        let ids: Vec<(String, String)> = p
            .legs()
            .iter()
            .map(|l| (l.json()["rid"].as_str().unwrap().to_owned(), l.json()["bootstrap_room"].to_string()))
            .collect();
        assert_eq!(ids.len(), 12 + failed);
        for (at, a) in ids.iter().enumerate() {
            for b in &ids[at + 1..] {
                assert!(!a.0.starts_with(&b.0) && !b.0.starts_with(&a.0), "{} and {}", a.0, b.0);
                assert_ne!(a.1, b.1);
            }
        }
        for leg in p.legs().iter().chain(&d1.legs()) {
            assert_eq!(leg.header("content-length"), Some(leg.body.len().to_string().as_str()));
        }
        let aborted: Vec<String> = d0.legs().iter().map(|l| l.json()["rid"].as_str().unwrap().to_owned()).collect();
        until("prefill's legs of failed attempts are aborted", || aborted.iter().all(|r| p.aborts().contains(r))).await;
        assert!(d1.aborts().is_empty());
        router.zero().await;
        router.stop().await;
    });
}

fn decode_or_info(seen: &Seen) -> Act {
    if seen.path == "/generate" { decode_reply(seen) } else { Act::Hold }
}

#[test]
fn a_reused_connection_that_dies_is_replaced_once_and_no_client_sees_it() {
    run(async {
        // Each engine closes every second request's connection without a word, as one whose idle timer fired.
        let flaky = |answer: fn(&Seen) -> Act| {
            let count = std::sync::atomic::AtomicUsize::new(0);
            let last = parking_lot::Mutex::new(None::<usize>);
            move |seen: &Seen| {
                if seen.path != "/generate" {
                    return Act::Hold;
                }
                let reused = last.lock().replace(seen.connection) == Some(seen.connection);
                if reused && count.fetch_add(1, std::sync::atomic::Ordering::Relaxed).is_multiple_of(2) {
                    Act::Reset
                } else {
                    answer(seen)
                }
            }
        };
        let (p, d) = (Engine::start(flaky(prefill_reply)).await, Engine::start(flaky(decode_reply)).await);
        let mut settings = pd(&[&p], &[&d]);
        settings.disable_retries = true;
        let router = Running::start(settings).await;
        for _ in 0..40 {
            assert_eq!(router.post("/generate", BODY).await.status, 200);
        }
        let worker = &router.app.registry.active()[1];
        assert!(worker.pool.stats.resent.load(std::sync::atomic::Ordering::Relaxed) >= 5);
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn a_refused_connect_takes_the_engine_out_at_once_and_its_return_is_a_new_generation() {
    run(async {
        let p = Engine::start(|s: &Seen| if s.path == "/generate" { prefill_reply(s) } else { Act::Hold }).await;
        let (d0, d1) = (Engine::start(decode_or_info).await, Engine::start(decode_or_info).await);
        let mut settings = pd(&[&p], &[&d0, &d1]);
        settings.poll_interval_ms = Duration::from_secs(60);
        let router = Running::start(settings).await;
        let before = router.app.registry.find(&d0.url()).unwrap().active().unwrap().id;
        let address = d0.address.to_string();
        d0.die().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        for _ in 0..20 {
            assert_eq!(router.post("/generate", BODY).await.status, 200);
        }
        let retries = router.app.metrics.retries.get(r3router_proxy::metrics::LegResult::Connect as usize);
        assert!(retries <= 1, "{retries} connects to a dead engine");
        let again = Engine::start_on(&address, decode_or_info).await;
        until("it is back", || router.app.registry.find(&d0.url()).unwrap().active().is_some_and(|w| w.id != before))
            .await;
        until_served(&router, &again).await;
        router.zero().await;
        router.stop().await;
    });
}

async fn until_served(router: &Running, engine: &Engine) {
    for _ in 0..200 {
        assert_eq!(router.post("/generate", BODY).await.status, 200);
        if !engine.legs().is_empty() {
            return;
        }
    }
    panic!("the engine that came back gets nothing");
}

#[test]
fn decode_hears_nothing_of_a_request_that_prefill_did_not_get() {
    run(async {
        let p = Engine::start(|_| Act::Hold).await;
        let d = Engine::start(decode_or_info).await;
        let mut settings = pd(&[&p], &[&d]);
        settings.poll_interval_ms = Duration::from_secs(60);
        settings.disable_retries = true;
        let router = Running::start(settings).await;
        p.die().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let got = router.post("/generate", BODY).await;
        assert_eq!((got.status, got.code().as_str()), (502, "connect_failed"));
        assert_eq!(got.json()["error"]["source"], "prefill");
        assert!(d.legs().is_empty() && d.aborts().is_empty());
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn nothing_delivered_in_time_is_504_and_both_legs_are_aborted() {
    run(async {
        // Decode goes on counting the transfer after the router has given it up.
        let stuck = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let reported = std::sync::Arc::clone(&stuck);
        let p = Engine::start(|_| Act::Hold).await;
        let d = Engine::start(move |seen: &Seen| match seen.path.split('?').next() {
            Some("/generate") => {
                reported.store(1, std::sync::atomic::Ordering::Relaxed);
                Act::Hold
            }
            Some("/v1/loads") => {
                let transfer = reported.load(std::sync::atomic::Ordering::Relaxed);
                let load = json!({"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": transfer, "max_running_requests": 8,
                    "max_total_num_tokens": 100_000, "disaggregation": {"decode_transfer_queue_reqs": transfer}});
                Act::Send(reply(200, &json!({ "loads": [load] }).to_string()))
            }
            _ => Act::Hold,
        })
        .await;
        let mut settings = pd(&[&p], &[&d]);
        settings.delivery_timeout_secs = Some(Duration::from_millis(300));
        let router = Running::start(settings).await;
        let got = router.post("/generate", BODY).await;
        assert_eq!((got.status, got.code().as_str()), (504, "delivery_timeout"));
        assert_eq!(got.json()["error"]["limit"], json!(0.3));
        until("both are aborted", || p.aborts().len() == 2 && d.aborts().len() == 2).await;
        until("both are closed", || {
            p.closed(p.legs()[0].connection).is_some() && d.closed(d.legs()[0].connection).is_some()
        })
        .await;
        assert_eq!(p.legs().len(), 1, "a deadline is not tried again");
        let in_transfer = || {
            let ranks = router.app.gate.snapshot().ranks;
            ranks.iter().filter(|r| r.role == "decode").map(|r| r.in_transfer + r.foreign).sum::<u32>()
        };
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(in_transfer(), 1, "the slot is back before the engine has freed it");
        stuck.store(0, std::sync::atomic::Ordering::Relaxed);
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn a_reply_that_is_cut_short_is_an_error_and_never_half_a_reply() {
    run(async {
        let p = Engine::start(|s: &Seen| if s.path == "/generate" { prefill_reply(s) } else { Act::Hold }).await;
        let d = Engine::start(|s: &Seen| match s.path.as_str() {
            "/generate" => Act::SendAndClose(reply(200, DECODED)[..120].to_vec()),
            _ => Act::Hold,
        })
        .await;
        let mut settings = pd(&[&p], &[&d]);
        settings.disable_retries = true;
        let router = Running::start(settings).await;
        let got = router.post("/generate", BODY).await;
        assert_eq!((got.status, got.code().as_str()), (502, "connection_reset"));
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn n_samples_are_n_pairs_and_one_that_fails_ends_the_others() {
    run(async {
        let p = Engine::start(|s: &Seen| if s.path == "/generate" { prefill_reply(s) } else { Act::Hold }).await;
        let d = Engine::start(decode_or_info).await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        let body = r#"{"text":"x","sampling_params":{"n":4,"max_new_tokens":2}}"#;
        let got = router.post("/generate", body).await;
        assert_eq!(got.status, 200, "{}", got.text());
        assert_eq!(got.json().as_array().map(Vec::len), Some(4));
        let rooms: std::collections::HashSet<String> =
            d.legs().iter().map(|l| l.json()["bootstrap_room"].to_string()).collect();
        assert_eq!(rooms.len(), 4);
        assert!(d.legs().iter().all(|l| l.json()["sampling_params"].get("n").is_none_or(|n| n == &Value::from(1))));
        router.zero().await;

        // The third is refused, the others would wait for ever.
        let count = std::sync::atomic::AtomicUsize::new(0);
        d.script(move |seen: &Seen| match seen.path.as_str() {
            "/generate" if count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 2 => {
                Act::Send(reply(400, r#"{"detail":"no"}"#))
            }
            _ => Act::Hold,
        });
        p.script(|_| Act::Hold);
        let got = router.post("/generate", body).await;
        assert_eq!((got.status, got.text().as_str()), (400, r#"{"detail":"no"}"#));
        router.zero().await;
        let open: Vec<String> = d.legs()[4..].iter().map(|l| l.json()["rid"].as_str().unwrap().to_owned()).collect();
        until("the others are aborted", || open.iter().filter(|r| d.aborts().contains(r)).count() >= open.len() - 1)
            .await;
        router.stop().await;
    });
}
