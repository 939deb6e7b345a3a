//! A server for benchmarks that plays one prefill, decode or regular engine with prepared bytes: no model, no delays but the one asked
//! for, so that what is measured is the router. The replies have SGLang's shapes; the R3 rows are valid and the same in each reply.
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Read buffer of a connection, bytes.
const READ_BYTES: usize = 256 * 1024;
/// Longest request head that is taken.
const MAX_HEAD: usize = 64 * 1024;

/// One engine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendPlan {
    /// `prefill`, `decode` or `regular`.
    pub role: String,
    /// Loopback port.
    pub port: u16,
    /// Prompt tokens that the replies speak of.
    pub prompt_tokens: usize,
    /// Output tokens that the replies speak of.
    pub output_tokens: usize,
    /// R3 ids per token (layers x top-k); 0 leaves R3 out.
    #[serde(default)]
    pub row_ids: usize,
    /// Seconds between a request and its reply.
    #[serde(default)]
    pub hold_seconds: f64,
    /// Whether `routed_experts_start_len` shortens the reply, as engines since 0.5.12 do.
    #[serde(default)]
    pub honours_start_len: bool,
    /// The prefill engine's bootstrap port (answers `/route`), 0 for none.
    #[serde(default)]
    pub bootstrap_port: u16,
    /// What stands in the place of the rows, a reply each, in turn: base64 of descriptors, as engines with the plug-in send them.
    #[serde(default)]
    pub descriptors: Vec<String>,
}

struct Replies {
    /// The next of the plan's descriptors.
    next: AtomicUsize,
    full: Bytes,
    tail: Bytes,
    info: Bytes,
    route: Bytes,
    plan: BackendPlan,
}

/// Serves until the process ends. Calls `ready` once all ports listen.
///
/// # Errors
/// When a port cannot be bound.
pub fn serve_blocking(plans: Vec<BackendPlan>, ready: impl FnOnce()) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async move {
        for plan in plans {
            let ports = [plan.port, plan.bootstrap_port];
            let replies = Arc::new(prepare(plan));
            for port in ports.into_iter().filter(|port| *port != 0) {
                let listener = TcpListener::bind(("127.0.0.1", port)).await?;
                tokio::spawn(accept(listener, Arc::clone(&replies)));
            }
        }
        ready();
        std::future::pending::<()>().await;
        Ok(())
    })
}

/// The id at `(token, slot)`: below 256, different from row to row.
fn id(token: usize, slot: usize) -> i32 {
    ((token * 31 + slot * 7) % 251) as i32
}

fn r3_text(first: usize, end: usize, junk_below: usize, row_ids: usize) -> String {
    let mut raw = Vec::with_capacity((end - first) * row_ids * 4);
    for token in first..end {
        for slot in 0..row_ids {
            let value = if token < junk_below { 255 } else { id(token, slot) };
            raw.extend_from_slice(&value.to_le_bytes());
        }
    }
    base64_simd::STANDARD.encode_to_string(&raw)
}

fn reply(plan: &BackendPlan, first: usize) -> Bytes {
    let (end, junk_below) = match plan.role.as_str() {
        "prefill" => (plan.prompt_tokens, 0),
        "decode" => (plan.prompt_tokens + plan.output_tokens - 1, plan.prompt_tokens),
        _ => (plan.prompt_tokens + plan.output_tokens - 1, 0),
    };
    let text = (plan.row_ids > 0).then(|| r3_text(first, end, junk_below, plan.row_ids));
    reply_with(plan, text.as_deref())
}

fn reply_with(plan: &BackendPlan, r3: Option<&str>) -> Bytes {
    let prefill = plan.role == "prefill";
    let output = if prefill { 1 } else { plan.output_tokens };
    let r3 = r3.map_or_else(String::new, |text| format!(r#","routed_experts":"{text}""#));
    let ids: Vec<String> = (0..output).map(|n| n.to_string()).collect();
    let finish = if prefill {
        r#"{"type":"length","length":0}"#.to_owned()
    } else {
        format!(r#"{{"type":"length","length":{output}}}"#)
    };
    let body = format!(
        r#"{{"text":"benchmark","output_ids":[{}],"meta_info":{{"id":"b","finish_reason":{finish},"prompt_tokens":{},"weight_version":"default","total_retractions":0,"completion_tokens":{output},"cached_tokens":0{r3},"dp_rank":0,"e2e_latency":0.01}}}}"#,
        ids.join(","),
        plan.prompt_tokens,
    );
    wire("200 OK", &body)
}

fn wire(status: &str, body: &str) -> Bytes {
    Bytes::from(format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ))
}

fn prepare(plan: BackendPlan) -> Replies {
    let mode = if plan.role == "regular" { "null" } else { &plan.role };
    let info = format!(
        r#"{{"model_path":"benchmark","disaggregation_mode":"{mode}","dp_size":1,"tp_size":1,"page_size":64,"max_running_requests":8192,"max_total_num_tokens":2000000000,"enable_return_routed_experts":true,"internal_states":[{{"effective_max_running_requests_per_dp":8192}}],"version":"0.5.23"}}"#
    );
    let route = r#"{"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":64,"kv_cache_dtype":"bfloat16","follow_bootstrap_room":true,"decode_allocation_policy":"early"}"#;
    let first_of_tail = if plan.role == "decode" { plan.prompt_tokens } else { 0 };
    let rows = plan.descriptors.is_empty();
    Replies {
        next: AtomicUsize::new(0),
        full: if rows { reply(&plan, 0) } else { Bytes::new() },
        tail: if rows { reply(&plan, first_of_tail) } else { Bytes::new() },
        info: wire("200 OK", &info),
        route: wire("200 OK", route),
        plan,
    }
}

async fn accept(listener: TcpListener, replies: Arc<Replies>) {
    while let Ok((stream, _)) = listener.accept().await {
        let replies = Arc::clone(&replies);
        tokio::spawn(async move {
            // A peer that closes is the normal end of a connection.
            let _closed = connection(stream, &replies).await;
        });
    }
}

async fn connection(mut stream: TcpStream, replies: &Replies) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(READ_BYTES);
    loop {
        let (head_end, length) = loop {
            if let Some(head) = memchr::memmem::find(&buffer, b"\r\n\r\n") {
                break (head + 4, content_length(&buffer[..head]));
            }
            if buffer.len() > MAX_HEAD || stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        while buffer.len() < head_end + length {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        }
        let (head, rest) = buffer.split_at(head_end);
        let answer = choose(head, &rest[..length], replies);
        if replies.plan.hold_seconds > 0.0 && head.starts_with(b"POST /generate") {
            tokio::time::sleep(Duration::from_secs_f64(replies.plan.hold_seconds)).await;
        }
        stream.write_all(&answer).await?;
        buffer.drain(..head_end + length);
    }
}

pub(super) fn content_length(head: &[u8]) -> usize {
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    head.split("\r\n")
        .find_map(|line| line.strip_prefix("content-length:"))
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(0)
}

fn choose(head: &[u8], body: &[u8], replies: &Replies) -> Bytes {
    let target = head.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    match path {
        b"/generate" if !replies.plan.descriptors.is_empty() => {
            match replies.plan.descriptors.get(replies.next.fetch_add(1, Ordering::Relaxed)) {
                Some(text) => reply_with(&replies.plan, Some(text)),
                None => wire("503 Service Unavailable", r#"{"error":"there are no more descriptors"}"#),
            }
        }
        b"/generate" => {
            let shortened = replies.plan.honours_start_len && start_len(body) >= replies.plan.prompt_tokens;
            if shortened { replies.tail.clone() } else { replies.full.clone() }
        }
        b"/server_info" | b"/get_server_info" | b"/model_info" | b"/get_model_info" => replies.info.clone(),
        b"/route" => replies.route.clone(),
        b"/health" | b"/health_generate" | b"/abort_request" => wire("200 OK", "{}"),
        _ => wire("404 Not Found", "{}"),
    }
}

fn start_len(body: &[u8]) -> usize {
    let name = br#""routed_experts_start_len":"#;
    let Some(at) = memchr::memmem::rfind(body, name) else { return 0 };
    body[at + name.len()..]
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .fold(0, |value, byte| value * 10 + usize::from(byte - b'0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(role: &str) -> BackendPlan {
        BackendPlan {
            role: role.into(),
            port: 1,
            prompt_tokens: 5,
            output_tokens: 3,
            row_ids: 4,
            hold_seconds: 0.0,
            honours_start_len: true,
            bootstrap_port: 0,
            descriptors: Vec::new(),
        }
    }

    fn rows(reply: &Bytes) -> usize {
        let body = &reply[memchr::memmem::find(reply, b"\r\n\r\n").unwrap() + 4..];
        let json: serde_json::Value = serde_json::from_slice(body).unwrap();
        let text = json["meta_info"]["routed_experts"].as_str().unwrap();
        base64_simd::STANDARD.decode_to_vec(text).unwrap().len() / 16
    }

    #[test]
    fn replies_have_the_rows_that_sglang_sends() {
        assert_eq!(rows(&prepare(plan("prefill")).full), 5);
        assert_eq!(rows(&prepare(plan("decode")).full), 7);
        assert_eq!(rows(&prepare(plan("decode")).tail), 2);
        assert_eq!(rows(&prepare(plan("regular")).full), 7);
    }

    #[test]
    fn descriptors_are_sent_once_each_in_the_place_of_rows() {
        let mut decode = plan("decode");
        decode.descriptors = vec!["AAAA".into(), "BBBB".into()];
        let replies = prepare(decode);
        let next = || String::from_utf8(choose(b"POST /generate HTTP/1.1\r\n\r\n", b"{}", &replies).to_vec()).unwrap();
        assert!(next().contains(r#""routed_experts":"AAAA""#));
        assert!(next().contains(r#""routed_experts":"BBBB""#));
        assert!(next().starts_with("HTTP/1.1 503"));
    }

    #[test]
    fn start_len_picks_the_short_reply_only_when_it_is_honoured() {
        let body = br#"{"routed_experts_start_len":5}"#;
        let mut decode = plan("decode");
        assert_eq!(rows(&choose(b"POST /generate HTTP/1.1\r\n\r\n", body, &prepare(decode.clone()))), 2);
        decode.honours_start_len = false;
        assert_eq!(rows(&choose(b"POST /generate HTTP/1.1\r\n\r\n", body, &prepare(decode))), 7);
    }
}
