use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Lab, Reply};
use crate::emulator::EmulateOptions;
use crate::emulator::pattern::{Pattern, R3Shape, Rows, nonce_of_ids};
use crate::rollout::verify::TextCheck;

const BODY: &str = r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":4},"return_routed_experts":true"#;

fn lab() -> Lab {
    Lab::start(&EmulateOptions { prefill: 0, decode: 0, regular: 1, ..Lab::options() })
}

async fn send(lab: &Lab) -> Result<Reply, String> {
    lab.try_call(http::Method::POST, &format!("{}/generate", lab.url(0)), &format!("{BODY}}}"), &[]).await
}

fn rows(reply: &Reply) -> Option<usize> {
    let text = reply.json()["meta_info"].get("routed_experts")?.as_str()?.to_owned();
    Some(base64_simd::STANDARD.decode_to_vec(text).unwrap().len() / 32)
}

fn wrong_bytes(reply: &Reply) -> u64 {
    let pattern = Pattern::new(R3Shape { layers: 4, top_k: 2, experts: 256 });
    let mut check = TextCheck::new(pattern, Rows::of(nonce_of_ids(&[1, 2, 3]), 0, 6));
    check.feed(reply.json()["meta_info"]["routed_experts"].as_str().unwrap().as_bytes());
    check.finish().wrong_bytes
}

#[tokio::test]
async fn statuses_resets_cuts_and_delays_hit_as_often_as_asked() {
    let lab = lab();
    lab.fault(0, r#"{"kind":"status","status":503,"body":"{\"x\":1}","count":1}"#).await;
    let reply = send(&lab).await.unwrap();
    assert_eq!((reply.status, reply.text().as_str()), (503, r#"{"x":1}"#));
    lab.fault(0, r#"{"kind":"reset","count":1}"#).await;
    assert!(send(&lab).await.unwrap_err().contains("ConnectionReset"));
    lab.fault(0, r#"{"kind":"reset","after_bytes":50,"count":1}"#).await;
    assert!(send(&lab).await.is_err());
    lab.fault(0, r#"{"kind":"delay","seconds":0.15,"count":1}"#).await;
    let began = Instant::now();
    assert_eq!(send(&lab).await.unwrap().status, 200);
    assert!(began.elapsed() >= Duration::from_millis(150));
    assert_eq!(send(&lab).await.unwrap().status, 200);
}

#[tokio::test]
async fn a_hanging_request_is_never_answered_and_others_are() {
    let lab = lab();
    lab.fault(0, r#"{"kind":"hang","count":1}"#).await;
    let hung = tokio::time::timeout(Duration::from_millis(300), send(&lab)).await;
    assert!(hung.is_err());
    assert_eq!(send(&lab).await.unwrap().status, 200);
}

#[tokio::test]
async fn r3_is_dropped_cut_short_or_wrong_as_asked() {
    let lab = lab();
    let good = send(&lab).await.unwrap();
    assert_eq!((rows(&good), wrong_bytes(&good)), (Some(6), 0));
    lab.fault(0, r#"{"kind":"drop_r3","count":1}"#).await;
    assert_eq!(rows(&send(&lab).await.unwrap()), None);
    lab.fault(0, r#"{"kind":"short_r3","rows":2,"count":1}"#).await;
    let short = send(&lab).await.unwrap();
    assert_eq!((rows(&short), wrong_bytes(&short)), (Some(4), 2 * 32));
    lab.fault(0, r#"{"kind":"wrong_r3","count":1}"#).await;
    let wrong = send(&lab).await.unwrap();
    assert_eq!(rows(&wrong), Some(6));
    assert!(wrong_bytes(&wrong) > 0);
    assert_eq!(wrong_bytes(&send(&lab).await.unwrap()), 0);
}

#[tokio::test]
async fn start_len_can_be_ignored() {
    let lab = lab();
    let body = format!(r#"{BODY},"routed_experts_start_len":3}}"#);
    assert_eq!(rows(&lab.post(0, "/generate", &body).await), Some(3));
    lab.fault(0, r#"{"kind":"ignore_start_len"}"#).await;
    assert_eq!(rows(&lab.post(0, "/generate", &body).await), Some(6));
    lab.fault(0, r#"{"kind":"clear"}"#).await;
    assert_eq!(rows(&lab.post(0, "/generate", &body).await), Some(3));
}

#[tokio::test]
async fn a_closed_port_refuses_and_opens_again() {
    let lab = lab();
    lab.fault(0, r#"{"kind":"refuse","seconds":0.2}"#).await;
    // A connection that is open already stays; only new ones are refused.
    let address = lab.url(0).replace("http://", "");
    let refused = async { while tokio::net::TcpStream::connect(&address).await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(10), refused).await.unwrap();
    let opened = async {
        while tokio::net::TcpStream::connect(&address).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), opened).await.unwrap();
}

#[tokio::test]
async fn a_killed_engine_resets_what_is_open_and_comes_back_empty() {
    let lab = Lab::pair();
    let port = lab.bootstrap();
    let body =
        format!(r#"{{"input_ids":[1,2],"bootstrap_host":"127.0.0.1","bootstrap_port":{port},"bootstrap_room":2}}"#);
    let url = format!("{}/generate", lab.url(1));
    let killed = async {
        while lab.truth(1).await["live_rooms"] != 1 {
            tokio::task::yield_now().await;
        }
        lab.fleet.fault(1, crate::emulator::FaultRequest::Kill).unwrap();
    };
    let (reply, ()) = tokio::join!(lab.try_call(http::Method::POST, &url, &body, &[]), killed);
    assert!(reply.is_err());
    lab.fleet.fault(1, crate::emulator::FaultRequest::Revive).unwrap();
    while lab.try_call(http::Method::GET, &format!("{}/ready", lab.url(1)), "", &[]).await.is_err() {
        tokio::task::yield_now().await;
    }
    let truth = lab.truth(1).await;
    assert_eq!(truth["live_rooms"], 0);
    assert!(truth["ranks"].as_array().unwrap().iter().all(|r| r["transfer"] == 0));
}

#[tokio::test]
async fn a_stuck_transfer_answers_on_prefill_and_never_on_decode_until_it_is_let_go() {
    let lab = Lab::pair();
    lab.fault(0, r#"{"kind":"stuck_transfer","count":1}"#).await;
    let body = r#"{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":2}"#;
    let both = lab.both("/generate", body, 2, 0);
    let watched = async {
        while lab.truth(0).await["completed"] != 1 {
            tokio::task::yield_now().await;
        }
        // Prefill has answered; decode waits past its clock of 3 s.
        tokio::time::sleep(Duration::from_millis(3_300)).await;
        assert_eq!(lab.truth(1).await["live_rooms"], 1);
        lab.fault(1, r#"{"kind":"unstick"}"#).await;
    };
    let ((p, d), ()) = tokio::join!(both, watched);
    assert_eq!((p.status, d.status), (200, 500));
    assert!(d.text().contains("let go"), "{}", d.text());
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_the_keep_alive_time() {
    let mut config = EmulateOptions { prefill: 0, decode: 0, regular: 1, ..Lab::options() }.fleet().unwrap();
    config.keep_alive = Duration::from_millis(100);
    let fleet = crate::emulator::RunningFleet::start(config).unwrap();
    let address = fleet.addresses()[0].url.replace("http://", "");
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut buffer = [0; 1024];
    assert!(stream.read(&mut buffer).await.unwrap() > 0);
    let began = Instant::now();
    assert_eq!(stream.read(&mut buffer).await.unwrap(), 0);
    assert!(began.elapsed() >= Duration::from_millis(90));
}
