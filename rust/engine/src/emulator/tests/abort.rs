use serde_json::{Value, json};

use super::Lab;

/// A decode request whose prefill half never comes, open until the test says so.
fn lonely(lab: &Lab, rid: &str, room: u64, stream: bool) -> String {
    let port = lab.bootstrap();
    format!(
        r#"{{"rid":"{rid}","input_ids":[1,2,3],"bootstrap_host":"127.0.0.1","bootstrap_port":{port},"bootstrap_room":{room},"stream":{stream}}}"#
    )
}

async fn until(lab: &Lab, engine: usize, what: impl Fn(&Value) -> bool) -> Value {
    loop {
        let truth = lab.truth(engine).await;
        if what(&truth) {
            return truth;
        }
        tokio::task::yield_now().await;
    }
}

fn transfers(truth: &Value) -> u64 {
    truth["ranks"].as_array().unwrap().iter().map(|r| r["transfer"].as_u64().unwrap()).sum()
}

#[tokio::test]
async fn an_abort_of_a_request_in_transfer_is_a_500_in_whole_form() {
    let lab = Lab::pair();
    let body = lonely(&lab, "ab::1", 2, false);
    let (reply, ()) = tokio::join!(lab.post(1, "/generate", &body), async {
        until(&lab, 1, |t| transfers(t) == 1).await;
        let aborted = lab.post(1, "/abort_request", r#"{"rid":"ab::1"}"#).await;
        assert_eq!((aborted.status, aborted.body.len()), (200, 0));
    });
    assert_eq!(reply.status, 500);
    let json = reply.json();
    assert_eq!((json["object"].clone(), json["code"].clone()), (json!("error"), json!(500)));
    let message = json["message"].as_str().unwrap();
    assert!(message.contains("Aborted by AbortReq") && message.contains("ab::1"), "{message}");
    until(&lab, 1, |t| transfers(t) == 0 && t["live_rooms"] == 0).await;
}

#[tokio::test]
async fn the_same_in_a_stream_is_a_200_with_an_abort_and_done() {
    let lab = Lab::pair();
    let body = lonely(&lab, "ab::2", 2, true);
    let (reply, ()) = tokio::join!(lab.post(1, "/generate", &body), async {
        until(&lab, 1, |t| transfers(t) == 1).await;
        lab.post(1, "/abort_request", r#"{"abort_all":true}"#).await;
    });
    assert_eq!(reply.status, 200);
    let events = reply.events();
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!(last["meta_info"]["finish_reason"]["status_code"], 500);
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
}

#[tokio::test]
async fn an_abort_that_comes_before_its_request_is_lost() {
    let lab = Lab::pair();
    assert_eq!(lab.post(1, "/abort_request", r#"{"rid":"early"}"#).await.status, 200);
    let body = r#"{"rid":"early","input_ids":[1,2,3],"sampling_params":{"max_new_tokens":2}"#;
    let (p, d) = lab.both("/generate", body, 4, 0).await;
    assert_eq!((p.status, d.status), (200, 200));
    assert_eq!(d.json()["meta_info"]["finish_reason"]["type"], "length");
}

#[tokio::test]
async fn decodes_clock_ends_a_request_whose_prefill_half_never_comes() {
    let lab = Lab::pair();
    let reply = lab.post(1, "/generate", &lonely(&lab, "w", 2, false)).await;
    assert_eq!(reply.status, 500);
    let message = reply.json()["message"].as_str().unwrap().to_owned();
    assert!(crate::emulator::is_engine_timeout(&message), "{message}");
    let truth = lab.truth(1).await;
    assert_eq!(
        (
            truth["timeouts"].clone(),
            truth["ranks"][0]["peak_transfer"].as_u64().unwrap() + truth["ranks"][1]["peak_transfer"].as_u64().unwrap()
        ),
        (json!(1), 1)
    );
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_and_its_request_goes() {
    let lab = Lab::pair();
    for stream in [false, true] {
        let body = lonely(&lab, "gone", 2, stream);
        let url = format!("{}/generate", lab.url(1));
        tokio::select! {
            reply = lab.try_call(http::Method::POST, &url, &body, &[]) => panic!("{}", reply.unwrap().text()),
            _ = until(&lab, 1, |t| transfers(t) == 1) => {}
        }
        until(&lab, 1, |t| transfers(t) == 0 && t["live_rooms"] == 0).await;
    }
    assert_eq!(lab.truth(1).await["disconnects"], 2);
}

#[tokio::test]
async fn flush_is_refused_while_anything_is_queued() {
    let lab = Lab::pair();
    assert_eq!(lab.post(1, "/flush_cache", "").await.status, 200);
    let body = lonely(&lab, "q", 2, false);
    tokio::select! {
        reply = lab.post(1, "/generate", &body) => panic!("{}", reply.text()),
        status = async {
            until(&lab, 1, |t| transfers(t) == 1).await;
            lab.get(1, "/flush_cache").await.status
        } => assert_eq!(status, 400),
    }
}

#[tokio::test]
async fn pause_continue_and_weight_versions_answer_as_the_engine_does() {
    let lab = Lab::pair();
    let paused = lab.post(1, "/pause_generation", r#"{"mode":"in_place"}"#).await;
    assert_eq!((paused.status, paused.json()["status"].clone()), (200, json!("ok")));
    assert_eq!(lab.post(1, "/continue_generation", "{}").await.status, 200);
    assert_eq!(lab.post(1, "/pause_generation", r#"{"mode":"sideways"}"#).await.status, 400);
    let updated =
        lab.post(0, "/update_weight_version", r#"{"new_version":"v7","abort_all_requests":false}"#).await.json();
    assert_eq!((updated["success"].clone(), updated["new_version"].clone()), (json!(true), json!("v7")));
    assert_eq!(lab.get(0, "/model_info").await.json()["weight_version"], "v7");
}
