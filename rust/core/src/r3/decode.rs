//! Base64 text of a payload to its bytes, tile by tile, from any chunking and from any byte on.
/// Bytes of a full tile; its text is 64 KiB.
pub const TILE: usize = 48 << 10;
const TILE_TEXT: usize = TILE / 3 * 4;

/// The text of a payload is not base64; the offset is of the text's byte near which it broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotBase64(pub u64);

/// Length of the base64 text of `bytes` bytes.
pub fn text_len(bytes: u64) -> u64 {
    bytes.div_ceil(3) * 4
}

/// A streaming decoder. Text goes in by [`Self::push`]; tiles of bytes come out through the callback.
#[derive(Debug)]
pub struct Decoder {
    /// Text bytes that are passed over without a look.
    skip_text: u64,
    /// Bytes of the first decoded quantum that belong to what was passed over.
    skip_bytes: usize,
    /// Padding at the end of what was passed over so far, for a text that ends before it should.
    skip_padding: u64,
    /// Text seen, and bytes decoded or passed over.
    text: u64,
    bytes: u64,
    /// A quantum that is not complete yet.
    carry: [u8; 4],
    carried: usize,
    /// Padding was seen; nothing may follow.
    ended: bool,
    tile: Vec<u8>,
}

impl Decoder {
    /// A decoder that passes over the first `skip` bytes of the payload by position.
    pub fn skipping(skip: u64) -> Self {
        let skip_text = skip / 3 * 4;
        Self {
            skip_text,
            skip_bytes: (skip % 3) as usize,
            skip_padding: 0,
            text: 0,
            bytes: skip / 3 * 3,
            carry: [0; 4],
            carried: 0,
            ended: false,
            tile: Vec::new(),
        }
    }

    /// Text bytes seen.
    pub fn text(&self) -> u64 {
        self.text
    }

    /// The bytes of the whole payload so far, what was passed over included. Less than `skip` when the text ended before.
    pub fn bytes(&self) -> u64 {
        if self.skip_text > 0 { (self.text / 4 * 3).saturating_sub(self.skip_padding) } else { self.bytes }
    }

    /// Passes over all that is still to come.
    pub fn skip_rest(&mut self) {
        self.skip_text = u64::MAX;
        self.carried = 0;
    }

    /// Decodes `text`, and gives the bytes to `out` in tiles of at most [`TILE`] bytes.
    ///
    /// # Errors
    /// What `out` fails with, or `NotBase64` turned into it.
    pub fn push<E: From<NotBase64>>(
        &mut self,
        mut text: &[u8],
        mut out: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let before = self.text;
        self.text += text.len() as u64;
        let skip = self.skip_text.min(text.len() as u64);
        if self.skip_text != u64::MAX {
            self.skip_text -= skip;
        }
        let (skipped, rest) = text.split_at(skip as usize);
        if !skipped.is_empty() {
            let padding = skipped.iter().rev().take_while(|b| **b == b'=').count();
            self.skip_padding = padding as u64 + if padding == skipped.len() { self.skip_padding } else { 0 };
        }
        text = rest;
        if text.is_empty() {
            return Ok(());
        }
        if self.ended {
            return Err(NotBase64(before).into());
        }
        if self.carried > 0 {
            let take = (4 - self.carried).min(text.len());
            self.carry[self.carried..self.carried + take].copy_from_slice(&text[..take]);
            self.carried += take;
            text = &text[take..];
            if self.carried < 4 {
                return Ok(());
            }
            self.carried = 0;
            let quantum = self.carry;
            self.decode(&quantum, before, &mut out)?;
        }
        let whole = text.len() / 4 * 4;
        for chunk in text[..whole].chunks(TILE_TEXT) {
            self.decode(chunk, before, &mut out)?;
        }
        let rest = &text[whole..];
        if self.ended && !rest.is_empty() {
            return Err(NotBase64(self.text).into());
        }
        self.carry[..rest.len()].copy_from_slice(rest);
        self.carried = rest.len();
        Ok(())
    }

    /// The text has ended; it must have been whole.
    ///
    /// # Errors
    /// `NotBase64` when a quantum is cut.
    pub fn finish(&self) -> Result<(), NotBase64> {
        // What is passed over by position is not decoded, but its length must be that of base64.
        let whole = self.carried == 0 && self.text.is_multiple_of(4);
        if whole { Ok(()) } else { Err(NotBase64(self.text)) }
    }

    fn decode<E: From<NotBase64>>(
        &mut self,
        text: &[u8],
        near: u64,
        out: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.ended {
            return Err(NotBase64(near).into());
        }
        let want = text.len() / 4 * 3;
        self.tile.resize(want.max(self.tile.len()), 0);
        let tile = &mut self.tile[..want];
        let bytes =
            base64_simd::STANDARD.decode(text, base64_simd::AsOut::as_out(tile)).map_err(|_| NotBase64(near))?;
        self.ended = bytes.len() < want;
        self.bytes += bytes.len() as u64;
        let skip = self.skip_bytes.min(bytes.len());
        self.skip_bytes -= skip;
        out(&bytes[skip..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl From<NotBase64> for String {
        fn from(e: NotBase64) -> Self {
            format!("{e:?}")
        }
    }

    fn decode(text: &[u8], skip: u64, chunk: usize) -> Result<(Vec<u8>, u64), String> {
        let mut d = Decoder::skipping(skip);
        let mut out = Vec::new();
        for part in text.chunks(chunk.max(1)) {
            d.push(part, |b| {
                out.extend_from_slice(b);
                Ok::<(), String>(())
            })?;
        }
        d.finish()?;
        Ok((out, d.bytes()))
    }

    #[test]
    fn any_chunking_and_any_start_give_the_same_bytes() {
        for len in [0usize, 1, 2, 3, 4, 5, 12, 100, 101, 102] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 37 + 11) as u8).collect();
            let text = base64_simd::STANDARD.encode_to_string(&bytes);
            assert_eq!(text.len() as u64, text_len(len as u64));
            for chunk in 1..9 {
                for skip in 0..=len {
                    let (out, seen) = decode(text.as_bytes(), skip as u64, chunk).unwrap();
                    assert_eq!(
                        (&out[..], seen),
                        (&bytes[skip..], len as u64),
                        "{len} bytes from {skip} in chunks of {chunk}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_large_payload_comes_in_tiles() {
        let bytes: Vec<u8> = (0..300_001u32).map(|i| (i * 7) as u8).collect();
        let text = base64_simd::STANDARD.encode_to_string(&bytes);
        let (out, _) = decode(text.as_bytes(), 0, 1 << 20).unwrap();
        assert!(out == bytes);
    }

    #[test]
    fn what_is_not_base64_is_refused() {
        for bad in ["QUJ", "QUJD\\/AA", "QU==QUJD", "QUI=A", "QUI=AAAA", "Q===", "QUJ\"", "QUJDQ"] {
            for chunk in 1..9 {
                assert!(decode(bad.as_bytes(), 0, chunk).is_err(), "{bad} in chunks of {chunk}");
            }
        }
    }
}
