//! What is sent to every engine: once to each process, each with its own status in the reply, and the gate closed first and opened last.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unused_async)]
#![allow(missing_docs)]
mod common;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{
    Act, Engine, Running, Seen, chunk, decode_reply, pd, prefill_reply, regular, reply, run, sse_head, until,
};
use r3router_proxy::control::BROADCAST;
use r3router_proxy::passthrough::{ANY_ENGINE, REGULAR_ONLY};
use r3router_proxy::settings::Settings;
use r3router_proxy::workers::Phase;
use serde_json::{Value, json};

const BODY: &str = r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":2}}"#;

fn with(generate: fn(&Seen) -> Act, control: fn(&Seen) -> Act) -> impl Fn(&Seen) -> Act + Send + Sync {
    move |seen| match seen.path.split('?').next().unwrap_or_default() {
        "/generate" => generate(seen),
        path if BROADCAST.contains(&path) => control(seen),
        _ => Act::Hold,
    }
}

fn fine(_: &Seen) -> Act {
    Act::Send(reply(200, r#"{"success":true}"#))
}

async fn engines() -> (Engine, Engine) {
    (Engine::start(with(prefill_reply, fine)).await, Engine::start(with(decode_reply, fine)).await)
}

fn line(reply: &Value, engine: &Engine) -> Value {
    let lines = reply["workers"].as_array().unwrap();
    let mine: Vec<&Value> = lines.iter().filter(|l| l["url"] == engine.url()).collect();
    assert_eq!(mine.len(), 1, "{lines:?}");
    mine[0].clone()
}

#[test]
fn each_call_reaches_each_engine_once_whatever_it_is() {
    run(async {
        let (p, d) = engines().await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        for path in BROADCAST {
            let body = if path.contains("open_session") { r#"{"session_id":"s"}"# } else { r#"{"a":1}"# };
            let got = router.post(path, body).await;
            assert_eq!((got.status, got.json()["success"].as_bool()), (200, Some(true)), "{path}: {}", got.text());
            for engine in [&p, &d] {
                let seen = engine.seen(path);
                assert_eq!(seen.len(), 1, "{path}");
                assert_eq!(String::from_utf8_lossy(&seen[0].body), body, "{path}");
                assert_eq!(line(&got.json(), engine)["status"], 200);
            }
        }
        router.stop().await;
    });
}

#[test]
fn an_engine_under_two_names_is_registered_and_told_once() {
    run(async {
        let (p, d) = engines().await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        let other = format!("http://localhost:{}", d.address.port());
        for role in ["decode", "prefill"] {
            let body = json!({"url": other, "worker_type": role, "bootstrap_port": 8998}).to_string();
            assert_eq!(router.post("/workers", &body).await.status, 202);
            let entry = router.app.registry.find(&other).unwrap();
            until("it is refused", || entry.phase() == Phase::Failed).await;
            let why = entry.state().message;
            assert!(why.contains(&d.url()) && why.contains("another name"), "{why}");
            let mut client = router.client().await;
            client.send(format!("DELETE /workers/{} HTTP/1.1\r\nhost: r\r\n\r\n", entry.id).as_bytes()).await;
            assert_eq!(client.reply().await.status, 202);
        }
        assert_eq!(router.app.gate.snapshot().ranks.len(), 2, "its room would be promised twice");
        assert_eq!(router.post("/flush_cache", "").await.status, 200);
        assert_eq!((p.seen("/flush_cache").len(), d.seen("/flush_cache").len()), (1, 1));
        router.stop().await;
    });
}

#[test]
fn status_and_body_say_which_engine_refused_which_hung_and_which_cannot_be_reached() {
    run(async {
        let (p, d) = engines().await;
        let failing = |_: &Seen| Act::Send(reply(500, r#"{"message":"CUDA out of memory"}"#));
        let refuses = Engine::start(with(decode_reply, failing)).await;
        let hangs =
            Engine::start(with(decode_reply, |_| Act::Paced(vec![(Duration::from_secs(60), Vec::new())]))).await;
        let dead = Engine::start(with(decode_reply, fine)).await;
        let mut settings = pd(&[&p], &[&d, &refuses, &hangs, &dead]);
        settings.control_timeout_secs = Duration::from_millis(300);
        // Nothing but the call itself may find out that one is dead.
        settings.poll_interval_ms = Duration::from_secs(60);
        let router = Running::start(settings).await;
        dead.die().await;
        for known in [false, true] {
            let got = router.post("/update_weights_from_disk", r#"{"model_path":"/m"}"#).await;
            assert_eq!((got.status, got.json()["success"].as_bool()), (500, Some(false)), "{}", got.text());
            assert!(got.json()["message"].as_str().unwrap().contains("2 of 5 engines"), "{}", got.text());
            for engine in [&p, &d] {
                assert_eq!(line(&got.json(), engine)["status"], 200);
            }
            let refused = line(&got.json(), &refuses);
            assert_eq!(
                (refused["status"].as_u64(), refused["body"]["message"].as_str()),
                (Some(500), Some("CUDA out of memory"))
            );
            let hung = line(&got.json(), &hangs);
            assert!(hung["status"].is_null() && hung["error"].as_str().unwrap().contains("no answer within"), "{hung}");
            let away = line(&got.json(), &dead);
            let said = if known { "not sent, the engine is down" } else { "cannot connect" };
            assert!(away["status"].is_null() && away["error"].as_str().unwrap().contains(said), "{away}");
            let entry = router.app.registry.find(&dead.url()).unwrap();
            until("it is out of choice", || entry.phase() == Phase::Down).await;
        }
        for engine in [&p, &d, &refuses, &hangs] {
            assert_eq!(engine.seen("/update_weights_from_disk").len(), 2, "once for each call");
        }
        // All that answer are fine, and one is missing: no success.
        for engine in [&refuses, &hangs] {
            engine.script(with(decode_reply, fine));
        }
        let got = router.post("/update_weights_from_disk", r#"{"model_path":"/m"}"#).await;
        assert_eq!((got.status, got.json()["success"].as_bool()), (502, Some(false)), "{}", got.text());
        router.stop().await;
    });
}

#[test]
fn the_gate_stays_closed_while_an_engine_that_answers_has_not_gone_on_and_a_dead_one_keeps_it_not() {
    run(async {
        let (p, d) = engines().await;
        let dead = Engine::start(with(decode_reply, fine)).await;
        let router = Running::start(pd(&[&p], &[&d, &dead])).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        dead.die().await;
        let refuses = |_: &Seen| Act::Send(reply(400, r#"{"message":"not yet"}"#));
        d.script(with(decode_reply, refuses));
        let got = router.post("/continue_generation", "{}").await;
        assert_eq!(got.json()["paused"], true, "{}", got.text());
        assert!(router.app.gate.is_paused());
        d.script(with(decode_reply, fine));
        let got = router.post("/continue_generation", "{}").await;
        assert_eq!((got.status, got.json()["paused"].as_bool()), (502, Some(false)), "{}", got.text());
        assert_eq!(router.post("/generate", BODY).await.status, 200);
        router.stop().await;
    });
}

#[test]
fn giving_memory_back_closes_the_gate_until_all_of_it_is_there_again() {
    run(async {
        let (p, d) = engines().await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        let told = |path: &'static str, body: &'static str| {
            let router = &router;
            async move {
                let got = router.post(path, body).await;
                assert_eq!(got.status, 200);
                assert_eq!(got.json()["paused"], router.app.gate.is_paused());
                router.app.gate.is_paused()
            }
        };
        let (release, resume) = ("/release_memory_occupation", "/resume_memory_occupation");
        assert!(told(release, "").await);
        assert!(told(resume, r#"{"tags":["weights"]}"#).await, "no cache yet");
        assert!(!told(resume, r#"{"tags":["kv_cache"]}"#).await);
        assert!(told(release, r#"{"tags":["kv_cache"]}"#).await);
        assert!(told("/pause_generation", "{}").await);
        assert!(told("/continue_generation", "{}").await, "there is still no cache");
        assert!(!told(resume, "").await);
        router.stop().await;
    });
}

#[test]
fn a_client_that_leaves_in_the_middle_of_a_continue_leaves_no_closed_gate() {
    run(async {
        let (p, d) = engines().await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        d.script(with(decode_reply, |_| Act::Paced(vec![(Duration::from_millis(200), reply(200, "{}"))])));
        let mut client = router.client().await;
        client.send_post("/continue_generation", "{}").await;
        until("decode has it", || d.seen("/continue_generation").len() == 1).await;
        drop(client);
        until("the gate is open", || !router.app.gate.is_paused()).await;
        assert_eq!(router.post("/generate", BODY).await.status, 200);
        router.stop().await;
    });
}

#[test]
fn a_pause_that_comes_while_a_continue_is_under_way_wins() {
    run(async {
        let (p, d) = engines().await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        d.script(with(decode_reply, |seen| {
            let slow = if seen.path == "/continue_generation" { 300 } else { 0 };
            Act::Paced(vec![(Duration::from_millis(slow), reply(200, "{}"))])
        }));
        let mut late = router.client().await;
        late.send_post("/continue_generation", "{}").await;
        until("decode has it", || d.seen("/continue_generation").len() == 1).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        let got = late.reply().await;
        assert_eq!((got.status, got.json()["paused"].as_bool()), (200, Some(true)), "the engines were paused last");
        router.stop().await;
    });
}

#[test]
fn no_limit_of_a_request_runs_while_the_fleet_is_paused() {
    run(async {
        let p = Engine::start(with(|_| Act::Hold, fine)).await;
        let d = Engine::start(with(|_| Act::Hold, fine)).await;
        let mut settings = pd(&[&p], &[&d]);
        settings.disable_retries = true;
        settings.request_timeout_secs = Duration::from_millis(1500);
        settings.queue_timeout_secs = Duration::from_secs(1);
        settings.delivery_timeout_secs = Some(Duration::from_secs(1));
        let router = Running::start(settings).await;
        // One runs when the pause comes, one comes while it lasts.
        let mut running = router.client().await;
        running.send_post("/generate", BODY).await;
        until("it runs", || d.legs().len() == 1).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        let mut waiting = router.client().await;
        waiting.send_post("/generate", BODY).await;
        until("it waits", || router.app.gate.snapshot().queued == 1).await;
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert!(p.aborts().is_empty() && d.aborts().is_empty(), "a limit ran on");
        assert_eq!(router.app.gate.snapshot().queued, 1);
        p.script(with(prefill_reply, fine));
        d.script(with(decode_reply, fine));
        assert_eq!(router.post("/continue_generation", "{}").await.status, 200);
        assert_eq!(waiting.reply().await.status, 200, "it has its whole time left");
        // The limits hold again afterwards: what runs has what was left of them.
        let got = running.reply().await;
        assert_eq!((got.status, got.code().as_str()), (504, "delivery_timeout"), "{}", got.text());
        assert_eq!(router.post("/generate", BODY).await.status, 200);
        router.stop().await;
    });
}

/// Answers a route that one regular engine serves by itself, once a text can be found by.
fn alone(seen: &Seen) -> Act {
    match seen.path.split('?').next().unwrap_or_default() {
        path if REGULAR_ONLY.contains(&path) || ANY_ENGINE.contains(&path) => Act::Send(reply(200, "{\"by\":1}")),
        path if BROADCAST.contains(&path) => fine(seen),
        _ => Act::Hold,
    }
}

#[test]
fn what_one_engine_serves_waits_for_the_end_of_a_pause_unless_no_model_is_needed_for_it() {
    run(async {
        let engine = Engine::start(alone).await;
        let router = Running::start(regular(&[&engine])).await;
        for (close, open) in
            [("/pause_generation", "/continue_generation"), ("/release_memory_occupation", "/resume_memory_occupation")]
        {
            let before: Vec<usize> = REGULAR_ONLY.iter().map(|path| engine.seen(path).len()).collect();
            assert_eq!(router.post(close, "{}").await.status, 200);
            let mut waiting = Vec::new();
            for path in REGULAR_ONLY {
                let mut client = router.client().await;
                client.send_post(path, r#"{"input":"a"}"#).await;
                waiting.push(client);
            }
            until("all wait", || router.app.gate.waiting_outside() == REGULAR_ONLY.len()).await;
            for path in ANY_ENGINE {
                assert_eq!(router.post(path, r#"{"text":"a"}"#).await.status, 200, "{path} needs no model");
            }
            for (path, before) in REGULAR_ONLY.iter().zip(&before) {
                assert_eq!(engine.seen(path).len(), *before, "{path} reached a paused engine");
            }
            // One whose client leaves is not sent afterwards.
            drop(waiting.pop());
            until("it has left", || router.app.gate.waiting_outside() == REGULAR_ONLY.len() - 1).await;
            assert_eq!(router.post(open, "{}").await.status, 200);
            for (client, path) in waiting.iter_mut().zip(REGULAR_ONLY) {
                assert_eq!(client.reply().await.status, 200, "{path}");
            }
            let after: Vec<usize> = REGULAR_ONLY.iter().map(|path| engine.seen(path).len()).collect();
            assert_eq!(after.iter().sum::<usize>(), before.iter().sum::<usize>() + REGULAR_ONLY.len() - 1);
            assert_eq!(router.app.gate.waiting_outside(), 0);
        }
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn no_more_calls_wait_for_the_end_of_a_pause_than_the_queue_may_hold() {
    run(async {
        let engine = Engine::start(alone).await;
        let router = Running::start(Settings { queue_size: 1, ..regular(&[&engine]) }).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        let mut first = router.client().await;
        first.send_post("/v1/embeddings", "{}").await;
        until("it waits", || router.app.gate.waiting_outside() == 1).await;
        let got = router.post("/v1/embeddings", "{}").await;
        assert_eq!((got.status, got.code().as_str()), (429, "queue_full"), "{}", got.text());
        assert_eq!(got.json()["error"]["limit"], 1.0);
        assert_eq!(router.post("/continue_generation", "{}").await.status, 200);
        assert_eq!(first.reply().await.status, 200);
        router.stop().await;
    });
}

#[test]
fn the_limit_of_what_one_engine_serves_stands_still_while_the_fleet_is_paused() {
    run(async {
        // One has not begun to answer when the pause comes, one is half answered, one comes while it lasts.
        let engine = Engine::start(|seen: &Seen| match seen.path.as_str() {
            "/v1/embeddings" => Act::Paced(vec![(Duration::from_millis(2500), reply(200, "{}"))]),
            "/v1/responses" => Act::Paced(vec![
                (Duration::ZERO, sse_head()),
                (Duration::ZERO, chunk(b"data: 1\n\n")),
                (Duration::from_millis(2500), chunk(b"data: [DONE]\n\n")),
                (Duration::ZERO, chunk(b"")),
            ]),
            "/v1/score" => Act::Paced(vec![(Duration::from_secs(60), Vec::new())]),
            _ => alone(seen),
        })
        .await;
        let limit = Duration::from_millis(1500);
        let router = Running::start(Settings { request_timeout_secs: limit, ..regular(&[&engine]) }).await;
        let mut calls = Vec::new();
        for path in ["/v1/embeddings", "/v1/responses"] {
            let mut client = router.client().await;
            client.send_post(path, r#"{"input":"a"}"#).await;
            until("it has it", || engine.seen(path).len() == 1).await;
            calls.push(client);
        }
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        let mut waiting = router.client().await;
        waiting.send_post("/v1/classify", "{}").await;
        until("it waits", || router.app.gate.waiting_outside() == 1).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(router.post("/continue_generation", "{}").await.status, 200);
        assert_eq!(waiting.reply().await.status, 200);
        let plain = calls[0].reply().await;
        assert_eq!((plain.status, plain.text().as_str()), (200, "{}"));
        let stream = calls[1].reply().await;
        assert_eq!((stream.status, stream.text().as_str()), (200, "data: 1\n\ndata: [DONE]\n\n"));
        // Without a pause the limit holds.
        let got = router.post("/v1/score", "{}").await;
        assert_eq!((got.status, got.code().as_str()), (504, "request_timeout"), "{}", got.text());
        assert_eq!(got.json()["error"]["limit"], 1.5);
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn a_session_has_one_name_on_all_engines() {
    run(async {
        let (p, d) = engines().await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        let got = router.post("/open_session", r#"{"capacity_of_str_len":1000}"#).await;
        let name = got.json()["session_id"].as_str().unwrap().to_owned();
        assert_eq!(name.len(), 32);
        for engine in [&p, &d] {
            assert_eq!(
                engine.seen("/open_session")[0].json(),
                json!({"capacity_of_str_len": 1000, "session_id": name})
            );
        }
        let body = json!({"session_id": name}).to_string();
        assert_eq!(router.post("/close_session", &body).await.status, 200);
        router.stop().await;
    });
}

#[test]
fn an_engine_that_is_not_up_yet_is_listed_and_fails_nothing() {
    run(async {
        let (p, d) = engines().await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        let late = Engine::start(|seen: &Seen| match seen.path.as_str() {
            "/health" => Act::Send(reply(503, "")),
            _ => Act::Hold,
        })
        .await;
        router.post("/workers", &json!({"url": late.url(), "worker_type": "decode"}).to_string()).await;
        let got = router.post("/load_lora_adapter", r#"{"lora_name":"a","lora_path":"/a"}"#).await;
        assert_eq!((got.status, got.json()["success"].as_bool()), (200, Some(true)), "{}", got.text());
        let away = line(&got.json(), &late);
        assert_eq!((away["state"].as_str(), away["status"].is_null()), (Some("pending"), true));
        assert!(late.seen("/load_lora_adapter").is_empty());
        router.stop().await;
    });
}

/// An engine whose health fails from a pause until it goes on, as that of real ones does.
async fn pausable(generate: fn(&Seen) -> Act) -> Engine {
    let paused = AtomicBool::new(false);
    Engine::start(move |seen: &Seen| match seen.path.split('?').next().unwrap_or_default() {
        "/generate" => generate(seen),
        "/health" if paused.load(Ordering::SeqCst) => Act::Send(reply(503, "")),
        path if BROADCAST.contains(&path) => {
            match path {
                "/pause_generation" => paused.store(true, Ordering::SeqCst),
                "/continue_generation" => paused.store(false, Ordering::SeqCst),
                _ => {}
            }
            fine(seen)
        }
        _ => Act::Hold,
    })
    .await
}

#[test]
fn a_router_that_restarts_while_the_fleet_is_paused_has_it_go_on() {
    run(async {
        let (p, d) = (pausable(prefill_reply).await, pausable(decode_reply).await);
        let first = Running::start(pd(&[&p], &[&d])).await;
        assert_eq!(first.post("/pause_generation", "{}").await.status, 200);
        first.stop().await;
        let next = Running::begin(pd(&[&p], &[&d])).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(next.app.registry.active().is_empty(), "a paused engine fails its health check");
        let got = next.post("/continue_generation", "{}").await;
        assert_eq!((got.status, got.json()["success"].as_bool()), (200, Some(true)), "{}", got.text());
        assert_eq!(line(&got.json(), &p)["status"], 200);
        until("both engines", || next.app.registry.active().len() == 2).await;
        assert_eq!(next.post("/generate", BODY).await.status, 200);
        next.stop().await;
    });
}

#[test]
fn a_continue_with_no_engine_in_choice_leaves_no_closed_gate() {
    run(async {
        let (p, d) = engines().await;
        let router = Running::start(pd(&[&p], &[&d])).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        for engine in [&p, &d] {
            router.post(&format!("/remove_worker?url={}", engine.url()), "").await;
        }
        let got = router.post("/continue_generation", "{}").await;
        assert_eq!((got.status, got.json()["paused"].as_bool()), (503, Some(false)), "{}", got.text());
        router.stop().await;
    });
}

#[test]
fn an_engine_that_was_out_of_reach_for_a_moment_of_a_pause_goes_on_too() {
    run(async {
        let (p, d, other) = (pausable(prefill_reply).await, pausable(decode_reply).await, pausable(decode_reply).await);
        let router = Running::start(pd(&[&p], &[&d, &other])).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        let lost = router.app.registry.active().into_iter().find(|w| *w.url == *other.url()).unwrap();
        router.app.suspect(&lost);
        until("it is down", || router.app.registry.active().len() == 2).await;
        let got = router.post("/continue_generation", "{}").await;
        assert_eq!((got.status, got.json()["success"].as_bool()), (200, Some(true)), "{}", got.text());
        assert_eq!(line(&got.json(), &other)["status"], 200);
        until("all engines", || router.app.registry.active().len() == 3).await;
        router.stop().await;
    });
}

#[test]
fn the_gate_does_not_wait_for_an_engine_that_is_out_of_choice() {
    run(async {
        let (p, d) = engines().await;
        let hangs = Engine::start(|seen: &Seen| match seen.path.as_str() {
            "/health" => Act::Send(reply(503, "")),
            // Nobody aborts it.
            "/continue_generation" => Act::UntilAborted(Vec::new()),
            _ => Act::Hold,
        })
        .await;
        let mut settings = pd(&[&p], &[&d]);
        settings.control_timeout_secs = Duration::from_secs(20);
        let router = Running::start(settings).await;
        assert_eq!(router.post("/pause_generation", "{}").await.status, 200);
        router.post("/workers", &json!({"url": hangs.url(), "worker_type": "decode"}).to_string()).await;
        let told = tokio::spawn({
            let mut client = router.client().await;
            async move { client.post("/continue_generation", "{}").await }
        });
        until("the engine hears of it", || !hangs.seen("/continue_generation").is_empty()).await;
        assert!(!told.is_finished());
        assert!(!router.app.gate.is_paused());
        assert_eq!(router.post("/generate", BODY).await.status, 200);
        told.abort();
        router.stop().await;
    });
}
