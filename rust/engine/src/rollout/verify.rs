//! Checks R3 payloads while they are read, against rows that the client can make itself. Nothing is kept but one tile.
use std::sync::Arc;

use crate::emulator::pattern::{Pattern, Rows, TextStream};

/// Rows of narrow bytes that are compared at once.
const NARROW_TILE_ROWS: u32 = 256;

/// What was found in one payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Payload bytes that differ from the expected ones, missing and surplus ones included: raw int32 bytes of a payload in-line,
    /// narrow bytes of a fetched one.
    pub wrong_bytes: u64,
    /// Payload characters or bytes read.
    pub read: u64,
}

/// Compares base64 text as it comes with the text of the expected rows.
#[derive(Debug)]
pub struct TextCheck {
    expected: TextStream,
    tile: Vec<u8>,
    got: Vec<u8>,
    surplus: u64,
    /// Raw bytes that have not been compared yet.
    left: u64,
    findings: Findings,
}

impl TextCheck {
    /// Expects the text of `rows`.
    pub fn new(pattern: Arc<Pattern>, rows: Rows) -> Self {
        Self {
            left: u64::from(rows.len()) * pattern.shape().row_bytes() as u64,
            expected: TextStream::new(pattern, rows),
            tile: Vec::new(),
            got: Vec::new(),
            surplus: 0,
            findings: Findings::default(),
        }
    }

    /// Takes the next characters of the payload.
    pub fn feed(&mut self, mut text: &[u8]) {
        self.findings.read += text.len() as u64;
        while !text.is_empty() {
            if self.tile.is_empty() && !self.expected.next_tile(&mut self.tile) {
                self.surplus += text.len() as u64;
                return;
            }
            let take = (self.tile.len() - self.got.len()).min(text.len());
            self.got.extend_from_slice(&text[..take]);
            text = &text[take..];
            if self.got.len() == self.tile.len() {
                self.compare();
            }
        }
    }

    fn compare(&mut self) {
        let padding = self.tile.iter().rev().take(2).filter(|c| **c == b'=').count();
        self.left -= (self.tile.len() / 4 * 3 - padding) as u64;
        if self.got != self.tile {
            let want = base64_simd::STANDARD.decode_to_vec(&self.tile).unwrap_or_default();
            // Text that is no base64 is wrong as a whole.
            let got = base64_simd::STANDARD.decode_to_vec(&self.got).unwrap_or_default();
            self.findings.wrong_bytes += differing(&want, &got).max(1);
        }
        self.tile.clear();
        self.got.clear();
    }

    /// The payload has ended.
    pub fn finish(mut self) -> Findings {
        // Whole quanta of a tile that was cut short are compared; what is left of one is no byte.
        let whole = self.got.len() / 4 * 4;
        if whole > 0 {
            self.got.truncate(whole);
            self.tile.truncate(whole);
            self.compare();
        }
        self.findings.wrong_bytes += self.left + (self.surplus * 3).div_ceil(4);
        self.findings
    }
}

/// Compares narrow bytes as they come with the expected rows.
#[derive(Debug)]
pub struct NarrowCheck {
    pattern: Arc<Pattern>,
    rows: Rows,
    next: u32,
    end: u32,
    tile: Vec<u8>,
    at: usize,
    crc: crc32fast::Hasher,
    surplus: u64,
    findings: Findings,
}

impl NarrowCheck {
    /// Expects rows `from..to` of `rows` (counted from its first row).
    pub fn new(pattern: Arc<Pattern>, rows: Rows, from: u32, to: u32) -> Self {
        Self {
            pattern,
            next: from.min(rows.len()),
            end: to.min(rows.len()),
            rows,
            tile: Vec::new(),
            at: 0,
            crc: crc32fast::Hasher::new(),
            surplus: 0,
            findings: Findings::default(),
        }
    }

    /// Takes the next bytes.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        self.crc.update(bytes);
        self.findings.read += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.at == self.tile.len() {
                let to = self.end.min(self.next + NARROW_TILE_ROWS);
                self.tile.clear();
                self.at = 0;
                self.pattern.append_narrow(&self.rows, self.next, to, &mut self.tile);
                self.next = to;
                if self.tile.is_empty() {
                    self.surplus += bytes.len() as u64;
                    return;
                }
            }
            let take = (self.tile.len() - self.at).min(bytes.len());
            let want = &self.tile[self.at..self.at + take];
            if want != &bytes[..take] {
                self.findings.wrong_bytes += differing(want, &bytes[..take]);
            }
            self.at += take;
            bytes = &bytes[take..];
        }
    }

    /// The segment has ended: what was found, and the CRC-32 of what was read.
    pub fn finish(mut self) -> (Findings, u32) {
        let width = self.pattern.shape().narrow_row_bytes() as u64;
        let missing = (self.tile.len() - self.at) as u64 + u64::from(self.end - self.next) * width;
        self.findings.wrong_bytes += missing + self.surplus;
        (self.findings, self.crc.finalize())
    }
}

fn differing(want: &[u8], got: &[u8]) -> u64 {
    let common = want.iter().zip(got).filter(|(a, b)| a != b).count();
    (common + want.len().abs_diff(got.len())) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::pattern::R3Shape;

    fn text(pattern: &Arc<Pattern>, rows: Rows) -> Vec<u8> {
        let mut stream = TextStream::new(pattern.clone(), rows);
        let mut out = Vec::new();
        while stream.next_tile(&mut out) {}
        out
    }

    fn check(pattern: &Arc<Pattern>, rows: Rows, text: &[u8], piece: usize) -> Findings {
        let mut check = TextCheck::new(pattern.clone(), rows);
        for chunk in text.chunks(piece) {
            check.feed(chunk);
        }
        check.finish()
    }

    #[test]
    fn the_right_text_passes_at_any_chunking() {
        let pattern = Pattern::new(R3Shape { layers: 3, top_k: 2, experts: 256 });
        for count in [0, 1, 47, 48, 49, 200] {
            let rows = Rows::of(1, 5, count);
            let good = text(&pattern, rows);
            for piece in [1, 7, 1000, 1 << 20] {
                assert_eq!(check(&pattern, rows, &good, piece), Findings { wrong_bytes: 0, read: good.len() as u64 });
            }
        }
    }

    #[test]
    fn a_single_wrong_byte_is_one_wrong_byte() {
        let pattern = Pattern::new(R3Shape { layers: 3, top_k: 2, experts: 256 });
        let rows = Rows::of(1, 0, 100);
        let mut raw = base64_simd::STANDARD.decode_to_vec(text(&pattern, rows)).unwrap();
        for at in [0, 1, 1200, raw.len() - 1] {
            raw[at] ^= 1;
            let bad: String = base64_simd::STANDARD.encode_to_string(&raw);
            assert_eq!(check(&pattern, rows, bad.as_bytes(), 333).wrong_bytes, 1, "byte {at}");
            raw[at] ^= 1;
        }
    }

    #[test]
    fn shifted_missing_surplus_and_junk_rows_are_wrong() {
        let pattern = Pattern::new(R3Shape { layers: 40, top_k: 8, experts: 256 });
        let rows = Rows::of(1, 0, 100);
        let row = pattern.shape().row_bytes() as u64;
        let shifted = check(&pattern, rows, &text(&pattern, Rows::of(1, 1, 100)), 4096).wrong_bytes;
        assert!(shifted > 100 * row / 5, "{shifted}");
        assert_eq!(check(&pattern, rows, &text(&pattern, Rows::of(1, 0, 99)), 4096).wrong_bytes, row);
        // 100 rows end within a quantum; in the longer text that quantum holds a byte of the surplus row.
        let longer = check(&pattern, rows, &text(&pattern, Rows::of(1, 0, 101)), 4096).wrong_bytes;
        assert!((row..=row + 4).contains(&longer), "{longer}");
        let junk = check(&pattern, rows, &text(&pattern, Rows::decode(1, 9, 0, 30, 100)), 4096).wrong_bytes;
        // A quarter of an int32's bytes carry the id, and one id in 256 is right by chance.
        assert!(junk > 30 * row / 5 && junk < 30 * row, "{junk}");
        assert_eq!(check(&pattern, rows, b"", 1).wrong_bytes, 100 * row);
    }

    #[test]
    fn narrow_bytes_are_checked_from_any_row_on() {
        let pattern = Pattern::new(R3Shape { layers: 4, top_k: 2, experts: 512 });
        let rows = Rows::of(3, 0, 700);
        let mut bytes = Vec::new();
        pattern.append_narrow(&rows, 100, 650, &mut bytes);
        let run = |bytes: &[u8]| {
            let mut check = NarrowCheck::new(pattern.clone(), rows, 100, 650);
            bytes.chunks(1000).for_each(|c| check.feed(c));
            check.finish()
        };
        assert_eq!(run(&bytes), (Findings { wrong_bytes: 0, read: bytes.len() as u64 }, crc32fast::hash(&bytes)));
        bytes[5000] ^= 4;
        assert_eq!(run(&bytes).0.wrong_bytes, 1);
        assert_eq!(run(&bytes[..16]).0.wrong_bytes, 549 * 16);
        bytes[5000] ^= 4;
        bytes.extend_from_slice(&[0; 3]);
        assert_eq!(run(&bytes).0.wrong_bytes, 3);
    }
}
