//! What decoding a payload costs at least.
use std::time::Instant;

/// Characters of a quantum.
const QUANTUM: usize = 4;

/// Seconds of each of `repeats` calls of base64-simd over a text of about `text_bytes` bytes (whole quanta), from text to bytes in
/// memory of their own. Wall time: on a quiet machine it is the thread's CPU time.
///
/// # Errors
/// What the library says of the text; it is its own.
pub fn decode_seconds(text_bytes: usize, repeats: usize) -> Result<Vec<f64>, String> {
    let raw: Vec<u8> =
        (0..text_bytes / QUANTUM * 3).map(|i| if i % 4 == 0 { (i / 4 * 31 % 251) as u8 } else { 0 }).collect();
    let text = base64_simd::STANDARD.encode_to_string(&raw);
    drop(raw);
    (0..repeats)
        .map(|_| {
            let began = Instant::now();
            let bytes = base64_simd::STANDARD.decode_to_vec(&text).map_err(|e| e.to_string())?;
            let took = began.elapsed().as_secs_f64();
            drop(std::hint::black_box(bytes));
            Ok(took)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::decode_seconds;

    #[test]
    fn every_repeat_takes_time() {
        let took = decode_seconds(1 << 20, 3).unwrap();
        assert_eq!(took.len(), 3);
        assert!(took.iter().all(|t| *t > 0.0));
    }
}
