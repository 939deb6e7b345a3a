//! R3 rows that can be checked: every expert id is a function of (request nonce, token position, layer, k), cheap enough to
//! make and to compare that neither the emulator nor the load generator is the bottleneck.
//!
//! Value of a cell: `top(cells[layer * top_k + k] + rows(nonce, position))`, where `cells` is a fixed table of random
//! words, `rows` is a hash of the nonce plus the position times the golden ratio, and `top` takes the highest bits, so that
//! the value is in `0..experts`. A row that is moved by one position, a row of another request and a byte that is off all
//! give different text; whoever knows the nonce compares the text itself and need not decode it.
use std::sync::Arc;

/// Multiplier that spreads positions over 32 bits (2^32 / golden ratio); neighbours always differ in their top byte.
const GOLDEN: u32 = 0x9E37_79B1;
/// Raw bytes of a tile, about: its text stays below the size from which an allocation is a mapping of its own.
const TILE_BYTES: usize = 60 << 10;

/// Layers, experts per token, and the number of experts of the played model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R3Shape {
    /// `num_hidden_layers`; every layer counts, dense ones too.
    pub layers: u32,
    /// `num_experts_per_tok`.
    pub top_k: u32,
    /// Number of experts; ids are `0..experts`.
    pub experts: u32,
}

impl Default for R3Shape {
    /// The 35B-A3B class of the incident report: 40 layers x 8, 1,280 B a row.
    fn default() -> Self {
        Self { layers: 40, top_k: 8, experts: 256 }
    }
}

impl R3Shape {
    /// Expert ids in a row.
    pub fn cells(self) -> usize {
        self.layers as usize * self.top_k as usize
    }

    /// Bytes of a row as the engine sends it (int32).
    pub fn row_bytes(self) -> usize {
        self.cells() * 4
    }

    /// Bytes of an id in the narrow form: 1 up to 256 experts, 2 up to 65,536.
    pub fn narrow_width(self) -> usize {
        if self.experts <= 256 { 1 } else { 2 }
    }

    /// Bytes of a row in the narrow form.
    pub fn narrow_row_bytes(self) -> usize {
        self.cells() * self.narrow_width()
    }

    /// Characters of base64 text for `rows` int32 rows, with padding.
    pub fn text_len(self, rows: u32) -> u64 {
        (u64::from(rows) * self.row_bytes() as u64).div_ceil(3) * 4
    }
}

/// A stretch of rows that come from one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// What the values are derived from.
    pub nonce: u64,
    /// Token position of the first row.
    pub first: u32,
    /// Number of rows.
    pub rows: u32,
}

/// The rows of one reply: at most junk prompt rows and then valid ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    runs: [Option<Run>; 2],
}

impl Rows {
    /// Rows of one source.
    pub fn of(nonce: u64, first: u32, rows: u32) -> Self {
        Self { runs: [Some(Run { nonce, first, rows }), None] }
    }

    /// Rows `[start, end)` of a decode reply: those before `prompt` are whatever the KV slot held last (`junk`), the others are
    /// of the request.
    pub fn decode(nonce: u64, junk: u64, start: u32, prompt: u32, end: u32) -> Self {
        let boundary = prompt.clamp(start.min(end), end);
        let before = Run { nonce: junk, first: start, rows: boundary.saturating_sub(start) };
        let first = boundary.max(start);
        let after = Run { nonce, first, rows: end.saturating_sub(first) };
        match (before.rows, after.rows) {
            (0, _) => Self { runs: [Some(after), None] },
            (_, 0) => Self { runs: [Some(before), None] },
            _ => Self { runs: [Some(before), Some(after)] },
        }
    }

    /// Number of rows.
    pub fn len(&self) -> u32 {
        self.runs.iter().flatten().map(|r| r.rows).sum()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Token position of the first row.
    pub fn first(&self) -> u32 {
        self.runs[0].map_or(0, |r| r.first)
    }

    /// The same rows without the last `n` (the `short R3` fault).
    #[must_use]
    pub fn without_last(mut self, n: u32) -> Self {
        let mut left = n;
        for run in self.runs.iter_mut().rev().flatten() {
            let cut = left.min(run.rows);
            run.rows -= cut;
            left -= cut;
        }
        self
    }

    /// The nonce and position of row `index`, or `None` past the end.
    fn row(&self, index: u32) -> Option<(u64, u32)> {
        let mut at = index;
        for run in self.runs.iter().flatten() {
            if at < run.rows {
                return Some((run.nonce, run.first + at));
            }
            at -= run.rows;
        }
        None
    }
}

/// Makes and compares rows of one shape.
#[derive(Debug)]
pub struct Pattern {
    shape: R3Shape,
    cells: Box<[u32]>,
    /// `Some(bits)` when the number of experts is a power of two: the value is a plain shift.
    shift: Option<u32>,
}

impl Pattern {
    /// The pattern of a shape. Two processes with the same shape make the same rows.
    pub fn new(shape: R3Shape) -> Arc<Self> {
        let cells = (0..shape.cells() as u64).map(|i| (mix(i ^ 0x5EED_CE11) >> 32) as u32).collect();
        let power = shape.experts.is_power_of_two() && shape.experts > 1;
        Arc::new(Self { shape, cells, shift: power.then(|| 32 - shape.experts.trailing_zeros()) })
    }

    /// The shape.
    pub fn shape(&self) -> R3Shape {
        self.shape
    }

    /// The expert id at (position, layer, k) of the request with `nonce`.
    pub fn value(&self, nonce: u64, position: u32, layer: u32, k: u32) -> u32 {
        let cell = (layer * self.shape.top_k + k) as usize;
        self.narrow(self.cells[cell].wrapping_add(row_word(nonce, position)))
    }

    #[inline]
    fn narrow(&self, word: u32) -> u32 {
        match self.shift {
            Some(shift) => word >> shift,
            None => ((word >> 16) * self.shape.experts) >> 16,
        }
    }

    /// Appends rows `[from, to)` of `rows` as little-endian int32, as an engine lays them out.
    pub fn append_int32(&self, rows: &Rows, from: u32, to: u32, out: &mut Vec<u8>) {
        let width = self.shape.row_bytes();
        let at = out.len();
        out.resize(at + width * to.saturating_sub(from) as usize, 0);
        for (index, row) in (from..to).zip(out[at..].chunks_exact_mut(width)) {
            let Some((nonce, position)) = rows.row(index) else { return };
            let word = row_word(nonce, position);
            if let Some(shift) = self.shift {
                for (cell, value) in self.cells.iter().zip(row.as_chunks_mut::<4>().0) {
                    *value = (cell.wrapping_add(word) >> shift).to_le_bytes();
                }
            } else {
                for (cell, value) in self.cells.iter().zip(row.as_chunks_mut::<4>().0) {
                    *value = self.narrow(cell.wrapping_add(word)).to_le_bytes();
                }
            }
        }
    }

    /// Appends rows `[from, to)` in the narrow form (`uint8`, or little-endian `uint16` above 256 experts).
    pub fn append_narrow(&self, rows: &Rows, from: u32, to: u32, out: &mut Vec<u8>) {
        let width = self.shape.narrow_row_bytes();
        let at = out.len();
        out.resize(at + width * to.saturating_sub(from) as usize, 0);
        for (index, row) in (from..to).zip(out[at..].chunks_exact_mut(width)) {
            let Some((nonce, position)) = rows.row(index) else { return };
            let word = row_word(nonce, position);
            match (self.shape.narrow_width(), self.shift) {
                (1, Some(24)) => {
                    for (cell, value) in self.cells.iter().zip(row) {
                        *value = (cell.wrapping_add(word) >> 24) as u8;
                    }
                }
                (1, _) => {
                    for (cell, value) in self.cells.iter().zip(row) {
                        *value = self.narrow(cell.wrapping_add(word)) as u8;
                    }
                }
                _ => {
                    for (cell, value) in self.cells.iter().zip(row.as_chunks_mut::<2>().0) {
                        *value = (self.narrow(cell.wrapping_add(word)) as u16).to_le_bytes();
                    }
                }
            }
        }
    }
}

/// Makes the base64 text of a reply's rows tile by tile, so that no reply is ever held whole.
#[derive(Debug)]
pub struct TextStream {
    pattern: Arc<Pattern>,
    rows: Rows,
    next: u32,
    end: u32,
    /// Rows of a tile: a multiple of 3, so that its bytes are whole base64 quanta.
    tile: u32,
    raw: Vec<u8>,
}

impl TextStream {
    /// Text of all `rows`.
    pub fn new(pattern: Arc<Pattern>, rows: Rows) -> Self {
        let tile = (TILE_BYTES / pattern.shape.row_bytes() / 3 * 3).max(3) as u32;
        Self { end: rows.len(), pattern, rows, next: 0, tile, raw: Vec::new() }
    }

    /// Characters that are still to come.
    pub fn remaining(&self) -> u64 {
        // Tiles are whole quanta, so the rest is encoded as if it stood alone.
        self.pattern.shape.text_len(self.end - self.next)
    }

    /// Appends the next tile of text; `false` at the end.
    pub fn next_tile(&mut self, out: &mut Vec<u8>) -> bool {
        if self.next >= self.end {
            return false;
        }
        let to = self.end.min(self.next + self.tile);
        self.raw.clear();
        self.pattern.append_int32(&self.rows, self.next, to, &mut self.raw);
        self.next = to;
        base64_simd::STANDARD.encode_append(&self.raw, out);
        true
    }
}

/// Finaliser of splitmix64.
pub(crate) fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[inline]
fn row_word(nonce: u64, position: u32) -> u32 {
    ((mix(nonce) >> 32) as u32).wrapping_add(position.wrapping_mul(GOLDEN))
}

/// Nonce of a request that is known by its tokens: a hash of the last eight `input_ids` (the first ones are shared by all who
/// share a prefix). Every router forwards them, whatever it does to rids and unknown fields, so client and engine agree
/// without the router's help.
pub fn nonce_of_ids(ids: &[u32]) -> u64 {
    ids.iter().rev().take(8).fold(0x1D5, |h, id| mix(h ^ u64::from(*id)))
}

/// Nonce of a request that is known by its text (`text`, `prompt`, or the concatenated message contents).
pub fn nonce_of_text(text: &str) -> u64 {
    text.as_bytes().chunks(8).fold(0x7E7, |h, chunk| mix(chunk.iter().fold(h, |h, b| h.rotate_left(8) ^ u64::from(*b))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(pattern: &Arc<Pattern>, rows: Rows) -> Vec<u8> {
        let mut stream = TextStream::new(pattern.clone(), rows);
        let expected = stream.remaining();
        let mut out = Vec::new();
        while stream.next_tile(&mut out) {}
        assert_eq!(out.len() as u64, expected);
        assert_eq!(stream.remaining(), 0);
        out
    }

    #[test]
    fn text_is_the_base64_of_the_int32_rows_for_every_row_count_and_shape() {
        for shape in [
            R3Shape { layers: 2, top_k: 2, experts: 256 },
            R3Shape { layers: 5, top_k: 1, experts: 512 },
            R3Shape { layers: 3, top_k: 3, experts: 160 },
        ] {
            let pattern = Pattern::new(shape);
            for count in [0, 1, 2, 3, 47, 48, 49, 100] {
                let rows = Rows::of(7, 11, count);
                let mut raw = Vec::new();
                for position in 11..11 + count {
                    for layer in 0..shape.layers {
                        for k in 0..shape.top_k {
                            let value = pattern.value(7, position, layer, k);
                            assert!(value < shape.experts);
                            raw.extend_from_slice(&value.to_le_bytes());
                        }
                    }
                }
                let encoded: String = base64_simd::STANDARD.encode_to_string(&raw);
                assert_eq!(text(&pattern, rows), encoded.as_bytes());
            }
        }
    }

    #[test]
    fn narrow_rows_hold_the_same_ids() {
        for (experts, width) in [(256, 1), (100, 1), (512, 2)] {
            let pattern = Pattern::new(R3Shape { layers: 4, top_k: 2, experts });
            let rows = Rows::decode(1, 2, 3, 10, 20);
            let (mut wide, mut narrow) = (Vec::new(), Vec::new());
            pattern.append_int32(&rows, 0, 17, &mut wide);
            pattern.append_narrow(&rows, 0, 17, &mut narrow);
            let ids: Vec<u8> = wide.chunks(4).flat_map(|v| v[..width].to_vec()).collect();
            assert_eq!(narrow, ids);
            assert!(wide.chunks(4).all(|v| v[width..].iter().all(|b| *b == 0)));
        }
    }

    #[test]
    fn neighbouring_rows_other_requests_and_junk_never_look_alike() {
        let pattern = Pattern::new(R3Shape::default());
        let row = |nonce, position| text(&pattern, Rows::of(nonce, position, 1));
        for position in 0..500 {
            for other in 1..20 {
                assert_ne!(row(1, position), row(1, position + other));
            }
            assert_ne!(row(1, position), row(2, position));
        }
        let junk = text(&pattern, Rows::decode(1, 99, 0, 30, 40));
        let clean = text(&pattern, Rows::of(1, 0, 40));
        let boundary = pattern.shape().text_len(30) as usize;
        assert_ne!(junk[..1706], clean[..1706]);
        assert_eq!(junk[boundary..], clean[boundary..]);
    }

    #[test]
    fn decode_rows_start_where_asked_and_count_as_the_engine_counts() {
        for (start, prompt, end, junk) in [(0, 5, 7, 5), (5, 5, 7, 0), (3, 5, 5, 2), (9, 5, 7, 0)] {
            let rows = Rows::decode(1, 2, start, prompt, end);
            assert_eq!(rows.len(), end.saturating_sub(start));
            let from_junk = (0..rows.len()).filter(|i| rows.row(*i).unwrap().0 == 2).count();
            assert_eq!(from_junk, junk as usize, "{start} {prompt} {end}");
        }
        assert_eq!(Rows::decode(1, 2, 0, 5, 8).without_last(4).len(), 4);
    }

    #[test]
    fn ids_use_the_whole_range() {
        let pattern = Pattern::new(R3Shape { layers: 40, top_k: 8, experts: 512 });
        let seen: std::collections::HashSet<u32> =
            (0..200).flat_map(|p| (0..40).map(move |l| (p, l))).map(|(p, l)| pattern.value(3, p, l, 1)).collect();
        assert_eq!(seen.len(), 512);
    }
}
