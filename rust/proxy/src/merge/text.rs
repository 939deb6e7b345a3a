//! A payload held as the text that came: for replies that are sent on within a moment, without decoding.
use bytes::Bytes;
use r3router_core::error::Error;
use r3router_core::r3::Dtype;
use r3router_core::r3::decode::{Decoder, NotBase64};

use crate::store::{Arena, Charge, Rows};

/// Either a fault of the text or of the arena.
#[derive(Debug)]
pub(super) enum Fault {
    Text(NotBase64),
    Arena(Error),
}

impl From<NotBase64> for Fault {
    fn from(e: NotBase64) -> Self {
        Self::Text(e)
    }
}

/// Base64 text in the chunks in which it came.
#[derive(Debug)]
pub(super) struct Text {
    chunks: Vec<Bytes>,
    chars: u64,
    padding: u64,
    _charge: Charge,
}

impl Text {
    pub(super) fn new(chunks: Vec<Bytes>, mut charge: Charge) -> Result<Self, NotBase64> {
        let chars = chunks.iter().map(|c| c.len() as u64).sum::<u64>();
        if !chars.is_multiple_of(4) {
            return Err(NotBase64(chars));
        }
        charge.shrink(chars);
        let mut last = chunks.iter().rev().flat_map(|c| c.iter().rev()).take(2);
        let padding = match (last.next(), last.next()) {
            (Some(b'='), Some(b'=')) => 2,
            (Some(b'='), _) => 1,
            _ => 0,
        };
        Ok(Self { chunks, chars, padding, _charge: charge })
    }

    /// Bytes before base64.
    pub(super) fn bytes(&self) -> u64 {
        self.chars / 4 * 3 - self.padding
    }

    /// Characters `[from, to)`.
    fn slice(&self, from: u64, to: u64) -> Vec<Bytes> {
        let mut at = 0;
        let mut out = Vec::new();
        for chunk in &self.chunks {
            let len = chunk.len() as u64;
            let (a, b) = (from.clamp(at, at + len), to.clamp(at, at + len));
            if a < b {
                out.push(chunk.slice((a - at) as usize..(b - at) as usize));
            }
            at += len;
        }
        out
    }

    /// The same as rows.
    pub(super) fn decode(&self, arena: &Arena, wire: Dtype) -> Result<Rows, Fault> {
        let size = wire.size();
        let items = usize::try_from(self.bytes()).unwrap_or(0) / size;
        let mut rows = Rows::new(arena, wire, items);
        let mut decoder = Decoder::skipping(0);
        let mut carry = Vec::new();
        for chunk in &self.chunks {
            decoder.push(chunk, |bytes| {
                // Tiles are small; numbers that straddle two are put together here.
                carry.extend_from_slice(bytes);
                let whole = carry.len() / size * size;
                rows.push(&carry[..whole]).map_err(Fault::Arena)?;
                carry.drain(..whole);
                Ok::<(), Fault>(())
            })?;
        }
        decoder.finish()?;
        Ok(rows)
    }
}

/// Bytes `[from, until)` of a text: whole quanta as they are, and what the last one has beyond.
#[derive(Clone, Debug)]
pub(super) struct TextCut {
    pub(super) chunks: Vec<Bytes>,
    /// Characters in `chunks`, a multiple of four.
    pub(super) chars: u64,
    /// Bytes behind them, fewer than three.
    pub(super) tail: Vec<u8>,
}

impl TextCut {
    /// `None` when `from` is not where a quantum begins.
    pub(super) fn new(text: &Text, from: u64, until: u64) -> Result<Option<Self>, NotBase64> {
        if !from.is_multiple_of(3) {
            return Ok(None);
        }
        let (start, end) = (from / 3 * 4, until / 3 * 4);
        let mut tail = Vec::new();
        let beyond = (until % 3) as usize;
        if beyond > 0 {
            let quantum = text.slice(end, end + 4).concat();
            tail = base64_simd::STANDARD.decode_to_vec(&quantum).map_err(|_| NotBase64(end))?;
            if tail.len() < beyond {
                return Err(NotBase64(end));
            }
            tail.truncate(beyond);
        }
        Ok(Some(Self { chunks: text.slice(start, end), chars: end - start, tail }))
    }
}
