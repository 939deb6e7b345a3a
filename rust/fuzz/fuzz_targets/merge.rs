//! Both legs' replies through the whole merge, whole or streamed.
#![no_main]
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Body, Frame};
use libfuzzer_sys::fuzz_target;
use r3router_core::error::Source;
use r3router_core::r3::outline::Outline;
use r3router_core::wire::Route;
use r3router_proxy::merge::{Hold, Plan, merge_json, merge_sse, read_prefill};
use r3router_proxy::store::Arena;

struct Memory(Bytes, usize);

impl Body for Memory {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let n = self.0.len().min(self.1);
        Poll::Ready((n > 0).then(|| Ok(Frame::data(self.0.split_to(n)))))
    }
}

/// Nothing here ever waits.
fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(out) => out,
        Poll::Pending => panic!("it waits for nothing"),
    }
}

fn drain<B: Body<Data = Bytes> + Unpin>(mut body: B) -> Vec<u8> {
    let mut out = Vec::new();
    while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop())) {
        out.extend_from_slice(&frame.into_data().unwrap_or_default());
    }
    out
}

fuzz_target!(|data: &[u8]| {
    let [how, start, decode_start, rest @ ..] = data else { return };
    let Some(at) = rest.iter().position(|b| *b == 0) else { return };
    let (p, d) = (Bytes::copy_from_slice(&rest[..at]), Bytes::copy_from_slice(&rest[at + 1..]));
    let plan = Plan {
        routed_experts: how & 1 != 0,
        indexer_topk: how & 2 != 0,
        logprobs: how & 4 != 0,
        start: u32::from(*start % 8),
        decode_start: u32::from(*decode_start % 8),
        by_ref: how & 8 != 0,
        hide_usage: how & 16 != 0,
        max_new_tokens: Some(4),
        hold: if decode_start & 128 == 0 { Hold::Narrow } else { Hold::Text },
        ..Plan::relay([Route::Generate, Route::Chat, Route::Completions][usize::from(how >> 6) % 3])
    };
    let chunk = usize::from(*start / 8) + 1;
    let arena = Arena::new(1 << 20);
    let part = || read_prefill(Memory(p.clone(), chunk), Some(p.len() as u64), &plan, &arena);
    if how & 32 == 0 {
        if let Ok(merged) = ready(merge_json(Memory(d, chunk), None, part(), &plan, &arena)) {
            let length = merged.content_length();
            let out = drain(merged);
            assert_eq!(out.len() as u64, length);
            assert!(Outline::read(&out, Source::Decode).is_ok(), "a merged reply is JSON");
        }
    } else {
        drain(merge_sse(Memory(d, chunk), part(), plan.clone(), arena.clone()));
    }
    assert_eq!(arena.used(), 0);
});
