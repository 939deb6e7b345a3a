//! Event streams.
#![no_main]
use libfuzzer_sys::fuzz_target;
use r3router_core::sse::{Piece, Splitter};

fn split(stream: &[u8], chunk: usize) -> (Vec<Vec<u8>>, Vec<u8>) {
    let (mut events, mut data, mut all) = (Vec::new(), Vec::new(), Vec::new());
    let mut splitter = Splitter::default();
    for mut part in stream.chunks(chunk) {
        while let Some(piece) = splitter.step(&mut part) {
            match piece {
                Piece::Raw(raw) => all.extend_from_slice(raw),
                Piece::Data(d) => {
                    all.extend_from_slice(d);
                    data.extend_from_slice(d);
                }
                Piece::End => events.push(std::mem::take(&mut data)),
            }
        }
    }
    (events, all)
}

fuzz_target!(|data: &[u8]| {
    let Some((first, stream)) = data.split_first() else { return };
    let (events, all) = split(stream, usize::MAX);
    assert_eq!(all, stream);
    assert_eq!(split(stream, usize::from(first % 16) + 1), (events, all));
});
