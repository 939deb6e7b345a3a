//! Speeds of the byte work, one thread: scanning and splicing a request, prefix hashes, decoding and narrowing rows, encoding them.
//!
//! `cargo bench -p r3router-core --bench bytes`
#![allow(clippy::unwrap_used, clippy::print_stdout)]
use std::hint::black_box;
use std::time::Instant;

use bytes::Bytes;
use r3router_core::r3::decode::{Decoder, NotBase64, TILE};
use r3router_core::r3::{Dtype, Extract, Wanted, narrow};
use r3router_core::wire::{Bootstrap, Owned, Route, prefix_hashes, scan, splice};

/// The best of some runs, seconds.
fn best(mut run: impl FnMut()) -> f64 {
    let time = |run: &mut dyn FnMut()| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    let mut best = f64::MAX;
    let begun = Instant::now();
    while begun.elapsed().as_secs_f64() < 0.7 {
        best = best.min(time(&mut run));
    }
    best
}

fn speed(name: &str, bytes: usize, secs: f64) {
    println!("{name}: {:.1} us, {:.0} MB/s", secs * 1e6, bytes as f64 / secs / 1e6);
}

fn main() {
    if std::env::args().any(|a| a == "rows") {
        return rows();
    }
    let ids: Vec<String> = (0..57_000).map(|i| ((i * 7919) % 150_000).to_string()).collect();
    let sampling = r#""sampling_params":{"max_new_tokens":2048,"temperature":1.0},"return_logprob":true,"return_routed_experts":true"#;
    for (name, route, body) in [
        ("small /generate", Route::Generate, format!(r#"{{"input_ids":[1,2,3,4,5,6,7,8],{sampling},"stream":false}}"#)),
        ("/generate, 57k ids", Route::Generate, format!(r#"{{"input_ids":[{}],{sampling}}}"#, ids.join(","))),
        (
            "/generate, 57k ids, spaced",
            Route::Generate,
            format!(r#"{{"input_ids": [{}], {sampling}}}"#, ids.join(", ")),
        ),
        (
            "chat, 1 MB of text",
            Route::Chat,
            format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}]}}"#,
                "some words of a prompt \\n".repeat(40_000)
            ),
        ),
    ] {
        let bytes = Bytes::from(body);
        speed(&format!("scan {name}"), bytes.len(), best(|| drop(black_box(scan(&bytes, route).unwrap()))));
        let facts = scan(&bytes, route).unwrap();
        let owned = Owned {
            rid: Some("0123456789abcdef"),
            bootstrap: Some(Bootstrap { host: "10.0.0.1", port: Some(8998), room: 1 << 60 }),
            routed_dp_rank: Some(3),
            routed_experts_start_len: Some(57_000),
            ..Owned::default()
        };
        speed(&format!("splice {name}"), bytes.len(), best(|| drop(black_box(splice(&bytes, &facts, &owned)))));
        speed(
            &format!("prefix hashes {name}"),
            bytes.len(),
            best(|| drop(black_box(prefix_hashes(&bytes, &facts, 0)))),
        );
    }
    rows();
}

fn rows() {
    let numbers: Vec<u8> =
        (0..8_000_000u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) >> 24).to_le_bytes()).collect();
    let text = base64_simd::STANDARD.encode_to_string(&numbers);
    let mut held = vec![0; numbers.len() / 4];
    let secs = best(|| {
        let (mut at, mut all) = (0, 0);
        let mut d = Decoder::skipping(0);
        for part in text.as_bytes().chunks(128 << 10) {
            let _ = d.push(part, |bytes| {
                let n = bytes.len() / 4;
                all |= narrow::to_u8(bytes, &mut held[at..at + n]);
                at += n;
                Ok::<(), NotBase64>(())
            });
        }
        black_box((all, at));
    });
    speed("decode base64 and narrow to uint8 (MB of text)", text.len(), secs);
    let secs = best(|| {
        let mut d = Decoder::skipping(0);
        for part in text.as_bytes().chunks(128 << 10) {
            let _ = d.push(part, |bytes| {
                black_box(bytes);
                Ok::<(), NotBase64>(())
            });
        }
    });
    speed("decode base64 alone (MB of text)", text.len(), secs);
    let secs = best(|| {
        let mut all = 0;
        for part in numbers.chunks(TILE) {
            all |= narrow::to_u8(part, &mut held[..part.len() / 4]);
        }
        black_box(all);
    });
    speed("narrow to uint8 alone (MB of int32)", numbers.len(), secs);
    let mut tile = vec![0; TILE];
    let secs = best(|| {
        for part in held.chunks(TILE / 4) {
            narrow::to_i32(Dtype::U8, part, &mut tile[..part.len() * 4]);
            black_box(base64_simd::STANDARD.encode_to_string(&tile[..part.len() * 4]));
        }
    });
    speed("widen to int32 and encode (MB of text)", text.len(), secs);
    let reply = format!(r#"{{"text":"t","meta_info":{{"prompt_tokens":1,"routed_experts":"{text}"}}}}"#);
    let secs = best(|| {
        let mut extract = Extract::new(Wanted { routed_experts: true, indexer_topk: false });
        for mut part in reply.as_bytes().chunks(128 << 10) {
            while let Some(piece) = extract.step(&mut part) {
                black_box(piece);
            }
        }
    });
    speed("find the payload in a reply", reply.len(), secs);
    let logprobs = format!(
        r#"{{"meta_info":{{"output_token_logprobs":[{}]}}}}"#,
        vec!["[-0.123456789,12345,null]"; 40_000].join(",")
    );
    let secs = best(|| {
        let mut extract = Extract::new(Wanted { routed_experts: true, indexer_topk: false });
        let mut part = logprobs.as_bytes();
        while let Some(piece) = extract.step(&mut part) {
            black_box(piece);
        }
    });
    speed("pass over 40k logprobs", logprobs.len(), secs);
    let secs = best(|| {
        let outline =
            r3router_core::r3::outline::Outline::read(logprobs.as_bytes(), r3router_core::error::Source::Decode);
        drop(black_box(outline));
    });
    speed("outline of 40k logprobs", logprobs.len(), secs);
}
