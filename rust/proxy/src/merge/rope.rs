//! A reply that goes out: small text, and rows that are encoded again tile by tile at their places in it.
use std::sync::Arc;

use bytes::Bytes;
use r3router_core::r3::decode::{TILE, text_len};

use super::text::TextCut;
use crate::store::{Pin, Reader, Rows};

/// Numbers `[from, from + items)` of some rows.
#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) rows: Arc<Rows>,
    pub(super) from: u64,
    pub(super) items: u64,
}

/// A merged payload: prefill's rows, then decode's, as one base64 text.
#[derive(Clone, Debug, Default)]
pub(super) struct Spliced {
    /// What goes first, as text.
    pub(super) head: Option<TextCut>,
    pub(super) ranges: Vec<Range>,
}

impl Spliced {
    fn bytes(&self) -> u64 {
        let head = self.head.as_ref().map_or(0, |h| h.chars / 4 * 3 + h.tail.len() as u64);
        head + self.ranges.iter().map(|r| r.items * r.rows.wire().size() as u64).sum::<u64>()
    }

    /// Length of its text.
    pub(super) fn len(&self) -> u64 {
        text_len(self.bytes())
    }
}

/// Text with payloads at offsets of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Rope {
    pub(super) text: Bytes,
    /// Ascending.
    pub(super) holes: Vec<(usize, Spliced)>,
    /// Objects that the text names; they live on once all of it has gone out.
    pub(super) pins: Vec<Arc<Pin>>,
}

impl Rope {
    pub(super) fn len(&self) -> u64 {
        self.text.len() as u64 + self.holes.iter().map(|(_, s)| s.len()).sum::<u64>()
    }
}

/// Puts ropes together from pieces of others.
#[derive(Debug, Default)]
pub(super) struct Weaver {
    text: Vec<u8>,
    holes: Vec<(usize, Spliced)>,
    pins: Vec<Arc<Pin>>,
}

impl Weaver {
    pub(super) fn text(&mut self, text: &[u8]) {
        self.text.extend_from_slice(text);
    }

    pub(super) fn payload(&mut self, payload: Spliced) {
        self.holes.push((self.text.len(), payload));
    }

    /// Bytes `[from, to)` of `rope`'s text with the payloads between.
    pub(super) fn slice(&mut self, rope: &Rope, from: usize, to: usize) {
        let shift = self.text.len();
        let inside = rope.holes.iter().filter(|(at, _)| (from..to).contains(at));
        self.holes.extend(inside.map(|(at, s)| (at - from + shift, s.clone())));
        self.text.extend_from_slice(&rope.text[from..to]);
        for pin in &rope.pins {
            if !self.pins.iter().any(|p| Arc::ptr_eq(p, pin)) {
                self.pins.push(Arc::clone(pin));
            }
        }
    }

    pub(super) fn pins(&mut self, pins: Vec<Arc<Pin>>) {
        self.pins.extend(pins);
    }

    pub(super) fn finish(self) -> Rope {
        Rope { text: Bytes::from(self.text), holes: self.holes, pins: self.pins }
    }
}

/// Gives a rope out in chunks.
#[derive(Debug, Default)]
pub(super) struct Unwind {
    text: Bytes,
    at: usize,
    holes: std::vec::IntoIter<(usize, Spliced)>,
    next: Option<(usize, Spliced)>,
    /// Text of the payload that is going out.
    head: std::vec::IntoIter<Bytes>,
    readers: std::vec::IntoIter<Reader>,
    reader: Option<Reader>,
    tile: Vec<u8>,
    /// Bytes at the beginning of `tile` that are still to be encoded.
    carried: usize,
    left: u64,
    pins: Vec<Arc<Pin>>,
}

impl Unwind {
    pub(super) fn new(rope: Rope) -> Self {
        let left = rope.len();
        let mut holes = rope.holes.into_iter();
        let next = holes.next();
        Self { text: rope.text, holes, next, left, pins: rope.pins, ..Self::default() }
    }

    /// Bytes that are still to come.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// The next chunk, not empty.
    pub(super) fn chunk(&mut self) -> Option<Bytes> {
        let chunk = self.cut();
        if self.left == 0 {
            self.pins.drain(..).for_each(|pin| pin.keep());
        }
        chunk
    }

    fn cut(&mut self) -> Option<Bytes> {
        loop {
            if let Some(text) = self.head.next().or_else(|| self.encode()) {
                self.left -= text.len() as u64;
                return Some(text);
            }
            let until = self.next.as_ref().map_or(self.text.len(), |(at, _)| *at);
            if until > self.at {
                let text = self.text.slice(self.at..until);
                self.at = until;
                self.left -= text.len() as u64;
                return Some(text);
            }
            let (_, payload) = self.next.take()?;
            self.next = self.holes.next();
            let readers = payload.ranges.into_iter().map(|r| Reader::new(r.rows, r.from, r.items));
            self.readers = readers.collect::<Vec<_>>().into_iter();
            self.reader = self.readers.next();
            self.tile.resize(TILE, 0);
            if let Some(head) = payload.head {
                self.carried = head.tail.len();
                self.tile[..self.carried].copy_from_slice(&head.tail);
                self.head = head.chunks.into_iter();
            }
        }
    }

    /// One tile of the payload that is being encoded. Every tile but the last is a multiple of three bytes.
    fn encode(&mut self) -> Option<Bytes> {
        let mut have = std::mem::take(&mut self.carried);
        while let Some(reader) = &mut self.reader {
            have += reader.fill(&mut self.tile[have..]);
            if reader.left() > 0 {
                break;
            }
            self.reader = self.readers.next();
        }
        if have == 0 {
            return None;
        }
        let now = if self.reader.is_some() { have / 3 * 3 } else { have };
        let text = base64_simd::STANDARD.encode_to_string(&self.tile[..now]);
        self.tile.copy_within(now..have, 0);
        self.carried = have - now;
        Some(Bytes::from(text.into_bytes()))
    }
}
