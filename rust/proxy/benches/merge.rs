//! CPU seconds of one in-line R3 merge of 100 MB of text from each leg, from memory, and what the arena and the heap hold meanwhile.
//!
//! `cargo bench -p r3router-proxy --bench merge`
#![allow(clippy::unwrap_used, clippy::print_stdout)]
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use r3router_core::wire::Route;
use r3router_proxy::merge::{Hold, Merged, Plan, PrefillPart, merge_json, read_prefill};
use r3router_proxy::store::Arena;

/// Chunks as a socket gives them.
const CHUNK: usize = 128 << 10;
/// 40 layers x 8 experts of 256: Qwen3.5-35B-A3B.
const ROW: usize = 320;
const PROMPT: usize = 58_600;
const OUTPUT: usize = 1_000;

struct Memory(Bytes);

impl Body for Memory {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let n = self.0.len().min(CHUNK);
        Poll::Ready((n > 0).then(|| Ok(Frame::data(self.0.split_to(n)))))
    }
}

/// CPU time of this thread, seconds.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split_ascii_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// Resident bytes of the process.
fn resident() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/statm").unwrap();
    stat.split_ascii_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 4096.0
}

fn reply(rows: usize, output: usize, row: usize) -> Bytes {
    let numbers: Vec<u8> =
        (0..rows * row).flat_map(|i| (((i * 2_654_435_761) >> 11) as u32 & 0xff).to_le_bytes()).collect();
    let text = base64_simd::STANDARD.encode_to_string(numbers);
    Bytes::from(format!(
        r#"{{"text":"t","meta_info":{{"id":"r","finish_reason":{{"type":"stop"}},"prompt_tokens":{PROMPT},"num_retractions":0,"completion_tokens":{output},"routed_experts":"{text}","dp_rank":0}}}}"#
    ))
}

async fn drain(mut merged: Merged) -> u64 {
    let mut bytes = 0;
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut merged).poll_frame(cx)).await {
        bytes += frame.unwrap().into_data().unwrap().len() as u64;
    }
    bytes
}

async fn prefill(leg: &Bytes, plan: &Plan, arena: &Arena) -> PrefillPart {
    read_prefill(Memory(leg.clone()), Some(leg.len() as u64), plan, arena).await.unwrap()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    for (name, row, decode_start, hold) in [
        ("arena, decode obeys its start", ROW, PROMPT, Hold::Narrow),
        ("arena, decode sends the prompt's rows too", ROW, 0, Hold::Narrow),
        ("arena, row bytes % 3 = 2", ROW - 3, 0, Hold::Narrow),
        ("text, decode sends the prompt's rows too", ROW, 0, Hold::Text),
    ] {
        let (p, d) = (reply(PROMPT, 1, row), reply(PROMPT + OUTPUT - 1 - decode_start, OUTPUT, row));
        let plan =
            Plan { routed_experts: true, decode_start: decode_start as u32, hold, ..Plan::relay(Route::Generate) };
        let arena = Arena::new(1 << 30);
        let mut best = [f64::MAX; 3];
        let (mut held, mut grown, mut out) = (0, 0.0, 0);
        for _ in 0..7 {
            let before = resident();
            let start = cpu();
            let part = prefill(&p, &plan, &arena).await;
            let read = cpu();
            let merged = merge_json(Memory(d.clone()), None, async { Ok(part) }, &plan, &arena).await.unwrap();
            let merge = cpu();
            held = arena.used();
            grown = resident() - before;
            out = drain(merged).await;
            let end = cpu();
            best = [best[0].min(read - start), best[1].min(merge - read), best[2].min(end - merge)];
        }
        println!(
            "{name}: {:.0} + {:.0} MB in, {:.0} MB out: CPU {:.3} s (prefill {:.3}, decode {:.3}, encode {:.3}); arena {:.1} MB = {:.3} of prefill's text; resident +{:.1} MB",
            p.len() as f64 / 1e6,
            d.len() as f64 / 1e6,
            out as f64 / 1e6,
            best.iter().sum::<f64>(),
            best[0],
            best[1],
            best[2],
            held as f64 / 1e6,
            held as f64 / p.len() as f64,
            grown / 1e6,
        );
    }
}
