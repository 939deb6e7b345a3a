//! Workers that come, go and are controlled.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::format_collect, clippy::unused_async)]
#![allow(missing_docs)]
mod common;
use std::time::Duration;

use common::{Act, Engine, Running, Seen, base, decode_reply, pd, post_bytes, prefill_reply, reply, run, until};
use r3router_proxy::settings::{Secret, Settings};
use serde_json::json;

const BODY: &str = r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":2}}"#;

fn knows_control(answer: fn(&Seen) -> Act) -> impl Fn(&Seen) -> Act + Send + Sync {
    move |seen| match seen.path.as_str() {
        "/generate" => answer(seen),
        "/pause_generation" | "/continue_generation" | "/flush_cache" => Act::Send(reply(200, "{}")),
        _ => Act::Hold,
    }
}

#[test]
fn a_pause_closes_the_gate_and_every_engine_hears_each_call_once() {
    run(async {
        let (p, d) =
            (Engine::start(knows_control(prefill_reply)).await, Engine::start(knows_control(decode_reply)).await);
        let router = Running::start(pd(&[&p], &[&d])).await;
        let got = router.post("/pause_generation", r#"{"mode":"retract"}"#).await;
        assert_eq!((got.status, got.json()["workers"].as_array().map(Vec::len)), (200, Some(2)));
        let mut waiting = Vec::new();
        for _ in 0..10 {
            let mut client = router.client().await;
            client.send_post("/generate", BODY).await;
            waiting.push(client);
        }
        until("all wait", || router.app.gate.snapshot().queued == 10).await;
        // One engine cannot flush yet: its status and text come back, and nothing is repeated.
        d.script(|seen: &Seen| match seen.path.as_str() {
            "/flush_cache" => Act::Send(reply(400, r#"{"message":"queue is not empty"}"#)),
            "/continue_generation" => Act::Send(reply(200, "{}")),
            "/generate" => decode_reply(seen),
            _ => Act::Hold,
        });
        let got = router.post("/flush_cache", "").await;
        assert_eq!(got.status, 400);
        let lines = got.json()["workers"].clone();
        assert!(
            lines
                .as_array()
                .unwrap()
                .iter()
                .any(|l| l["status"] == 400 && l["body"]["message"] == "queue is not empty"),
            "{lines}"
        );
        assert!(p.legs().is_empty() && d.legs().is_empty(), "a paused fleet was sent something");
        assert_eq!(router.post("/continue_generation", "{}").await.status, 200);
        for mut client in waiting {
            assert_eq!(client.reply().await.status, 200);
        }
        for engine in [&p, &d] {
            for path in ["/pause_generation", "/continue_generation", "/flush_cache"] {
                assert_eq!(engine.seen(path).len(), 1, "{path}");
            }
            assert_eq!(engine.seen("/pause_generation")[0].json()["mode"], "retract");
            assert!(engine.legs()[0].at > engine.seen("/continue_generation")[0].at);
        }
        router.zero().await;
        router.stop().await;
    });
}

#[test]
fn a_pd_router_without_workers_answers_503_and_takes_them_as_they_come() {
    run(async {
        let router = Running::start(Settings { pd_disaggregation: true, ..base() }).await;
        assert_eq!(router.get("/readiness").await.status, 503);
        let got = router.post("/generate", BODY).await;
        assert_eq!((got.status, got.code().as_str()), (503, "no_available_workers"));
        let (p, d) =
            (Engine::start(knows_control(prefill_reply)).await, Engine::start(knows_control(decode_reply)).await);
        let mut ids = Vec::new();
        for (engine, role) in [(&p, "prefill"), (&d, "decode")] {
            let body =
                json!({"url": format!("{}/", engine.url()), "worker_type": role, "bootstrap_port": 8998}).to_string();
            let got = router.post("/workers", &body).await;
            assert_eq!(got.status, 202);
            let again = router.post("/workers", &body).await;
            assert_eq!(got.json()["worker_id"], again.json()["worker_id"]);
            ids.push(got.json()["worker_id"].as_str().unwrap().to_owned());
        }
        until("both are active", || router.app.registry.active().len() == 2).await;
        assert_eq!(router.get("/readiness").await.status, 200);
        assert_eq!(router.post("/generate", BODY).await.status, 200);
        let listed = router.get("/workers").await.json();
        assert_eq!(listed["total"], 2);
        assert_eq!(listed["workers"][0]["url"], p.url());
        assert_eq!(listed["workers"][0]["state"], "active");
        let mut client = router.client().await;
        client.send(format!("DELETE /workers/{} HTTP/1.1\r\nhost: r\r\n\r\n", ids[1]).as_bytes()).await;
        assert_eq!(client.reply().await.status, 202);
        let got = router.post("/generate", BODY).await;
        assert_eq!((got.status, got.code().as_str()), (503, "no_available_workers"));
        assert!(got.json()["error"]["message"].as_str().unwrap().contains("decode"), "{}", got.text());
        router.stop().await;
    });
}

#[test]
fn a_worker_deleted_while_pending_never_becomes_active() {
    run(async {
        let slow = Engine::start(|s: &Seen| match s.path.as_str() {
            "/health" => Act::Send(reply(503, "")),
            _ => Act::Hold,
        })
        .await;
        let router = Running::start(base()).await;
        let got = router.post("/workers", &json!({"url": slow.url()}).to_string()).await;
        let id = got.json()["worker_id"].as_str().unwrap().to_owned();
        until("it was asked", || slow.seen("/health").len() > 1).await;
        assert_eq!(router.get(&format!("/workers/{id}")).await.json()["state"], "pending");
        let entry = router.app.registry.find(&id).unwrap();
        let mut client = router.client().await;
        client.send(format!("DELETE /workers/{id} HTTP/1.1\r\nhost: r\r\n\r\n").as_bytes()).await;
        assert_eq!(client.reply().await.status, 202);
        slow.script(|_| Act::Hold);
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(entry.active().is_none());
        assert_eq!(router.get(&format!("/workers/{id}")).await.status, 404);
        assert!(router.app.gate.snapshot().ranks.is_empty());
        router.stop().await;
    });
}

#[test]
fn the_routers_own_calls_carry_the_workers_key_and_the_clients_key_stays_here() {
    run(async {
        let keyed = |answer: fn(&Seen) -> Act| {
            move |seen: &Seen| {
                if seen.header("authorization") != Some("Bearer k-eng") {
                    return Act::Send(reply(401, r#"{"error":"Unauthorized"}"#));
                }
                knows_control(answer)(seen)
            }
        };
        let (p, d) = (Engine::start(keyed(prefill_reply)).await, Engine::start(keyed(decode_reply)).await);
        let mut settings = pd(&[&p], &[&d]);
        settings.worker_api_key = Some(Secret::new("k-eng"));
        settings.api_key = Some(Secret::new("k-client"));
        let router = Running::start(settings).await;
        let got = router.post("/generate", BODY).await;
        assert_eq!((got.status, got.code().as_str()), (401, "unauthorized"));
        assert!(p.legs().is_empty());
        assert_eq!(router.get("/health").await.status, 200);
        let mut client = router.client().await;
        client.send(&post_bytes("/generate", "authorization: Bearer k-client\r\n", BODY)).await;
        assert_eq!(client.reply().await.status, 200);
        client.send(&post_bytes("/flush_cache", "authorization: Bearer k-client\r\n", "")).await;
        assert_eq!(client.reply().await.status, 200);
        for engine in [&p, &d] {
            for path in ["/health", "/server_info", "/v1/loads", "/generate", "/flush_cache"] {
                for seen in engine.seen(path) {
                    assert_eq!(seen.header("authorization"), Some("Bearer k-eng"), "{path}");
                }
            }
        }
        router.stop().await;

        let wrong = Running::start(Settings { pd_disaggregation: true, ..base() }).await;
        wrong.post("/workers", &json!({"url": p.url(), "worker_type": "prefill"}).to_string()).await;
        let entry = wrong.app.registry.find(&p.url()).unwrap();
        until("it has failed", || entry.phase() == r3router_proxy::workers::Phase::Failed).await;
        assert!(entry.state().message.contains("401"), "{}", entry.state().message);
        wrong.stop().await;
    });
}

#[test]
fn a_router_that_stops_is_not_ready_finishes_what_runs_and_aborts_what_does_not_end() {
    run(async {
        let slow = |s: &Seen| match s.path.as_str() {
            "/generate" if s.body.windows(7).any(|w| w == b"forever") => Act::Hold,
            "/generate" => Act::Paced(vec![(Duration::from_millis(300), reply(200, "{}"))]),
            _ => Act::Hold,
        };
        let engine = Engine::start(slow).await;
        let mut settings = common::regular(&[&engine]);
        settings.shutdown_grace_period_secs = Duration::from_secs(1);
        let mut router = Running::start(settings).await;
        let mut running = router.client().await;
        running.send_post("/generate", r#"{"text":"a"}"#).await;
        let mut forever = router.client().await;
        forever.send_post("/generate", r#"{"text":"forever"}"#).await;
        until("both run", || engine.legs().len() == 2).await;
        router.begin_stop();
        until("it drains", || router.app.drain.started()).await;
        assert_eq!(router.get("/readiness").await.status, 503);
        let got = router.post("/generate", r#"{"text":"b"}"#).await;
        assert_eq!((got.status, got.code().as_str()), (503, "draining"));
        assert_eq!(running.reply().await.status, 200);
        until("what does not end is aborted", || engine.aborts().len() == 2).await;
        assert_eq!(engine.legs().len(), 2);
    });
}

#[test]
fn unknown_paths_and_methods_are_json_errors_that_name_them() {
    run(async {
        let router = Running::start(base()).await;
        let got = router.get("/nowhere").await;
        assert_eq!((got.status, got.code().as_str()), (404, "not_found"));
        assert!(got.text().contains("/nowhere"));
        let got = router.get("/generate").await;
        assert_eq!((got.status, got.code().as_str()), (405, "method_not_allowed"));
        router.stop().await;
    });
}
