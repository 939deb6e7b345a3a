//! Engine replies.
#![no_main]
use libfuzzer_sys::fuzz_target;
use r3router_core::error::Source;
use r3router_core::r3::decode::{Decoder, NotBase64};
use r3router_core::r3::outline::Outline;
use r3router_core::r3::{Extract, Piece, Wanted};

type Found = (Vec<u8>, Vec<Vec<u8>>, Vec<u8>, bool);

fn split(reply: &[u8], chunk: usize) -> Found {
    let mut extract = Extract::new(Wanted { routed_experts: true, indexer_topk: true });
    let (mut text, mut payloads, mut all) = (Vec::new(), Vec::<Vec<u8>>::new(), Vec::new());
    for mut part in reply.chunks(chunk) {
        while let Some(piece) = extract.step(&mut part) {
            match piece {
                Piece::Text(t) => {
                    text.extend_from_slice(t);
                    all.extend_from_slice(t);
                }
                Piece::Open(_) => payloads.push(Vec::new()),
                Piece::Payload(p) => {
                    payloads.last_mut().expect("opened").extend_from_slice(p);
                    all.extend_from_slice(p);
                }
                Piece::Close => {}
            }
        }
    }
    (text, payloads, all, extract.complete())
}

fn decode(text: &[u8], skip: u64, chunk: usize) -> Result<Vec<u8>, NotBase64> {
    let mut d = Decoder::skipping(skip);
    let mut out = Vec::new();
    for part in text.chunks(chunk) {
        d.push(part, |b| {
            out.extend_from_slice(b);
            Ok::<(), NotBase64>(())
        })?;
    }
    d.finish()?;
    Ok(out)
}

fuzz_target!(|data: &[u8]| {
    let Some((first, reply)) = data.split_first() else { return };
    let chunk = usize::from(first % 32) + 1;
    let whole = split(reply, usize::MAX);
    assert_eq!(split(reply, chunk), whole);
    let (text, payloads, all, _) = whole;
    assert_eq!(all, reply);
    let _ = Outline::so_far(&text);
    if let Ok(outline) = Outline::read(&text, Source::Decode) {
        assert!(serde_json::from_slice::<serde_json::Value>(&text).is_ok() || !outline.elements.is_empty() || outline.listed);
    }
    for p in payloads {
        if let Ok(bytes) = base64_simd::STANDARD.decode_to_vec(&p) {
            let skip = usize::from(*first).min(bytes.len());
            assert_eq!(decode(&p, 0, chunk).as_deref(), Ok(&bytes[..]));
            assert_eq!(decode(&p, skip as u64, chunk).as_deref(), Ok(&bytes[skip..]));
        } else {
            assert!(decode(&p, 0, chunk).is_err());
        }
    }
});
