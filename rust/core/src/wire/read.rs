//! Values of the fields that the router reads, with the types that engines take for them.
use std::borrow::Cow;

use super::Span;
use super::cursor::{Bad, Cursor, Text};
use super::text::decode;
use crate::error::{Error, Kind, Source};

/// A prompt field as it was read.
#[derive(Default)]
pub(super) struct Input {
    /// The whole value.
    pub(super) span: Span,
    /// One a prompt, when the value is a batch.
    pub(super) batch: Option<Vec<(Span, u32)>>,
    /// Token ids of a single prompt.
    pub(super) ids: u32,
}

/// A named limit on new tokens; `None` when null was named, and the engine fills the context.
#[derive(Clone, Copy)]
pub(super) struct Limit(pub(super) Option<u32>);

/// `sampling_params`, or one element of it.
#[derive(Clone, Copy, Default)]
pub(super) struct Params {
    pub(super) n: Option<(Span, u64)>,
    pub(super) max_new_tokens: Option<Limit>,
    pub(super) beams: u64,
}

pub(super) enum Fault {
    Json(Bad),
    Field(Box<Error>),
}

impl From<Bad> for Fault {
    fn from(bad: Bad) -> Self {
        Self::Json(bad)
    }
}

pub(super) fn field(name: &[u8], what: &str) -> Error {
    let name = String::from_utf8_lossy(name);
    Error::new(Kind::InvalidField, Source::Client, format!("{name}: {what}"))
}

pub(super) fn fault<T>(name: &[u8], what: &str) -> Result<T, Fault> {
    Err(Fault::Field(Box::new(field(name, what))))
}

pub(super) fn clip(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

pub(super) fn string<'a>(c: &Cursor<'a>, text: Text) -> Cow<'a, str> {
    match decode(&c.bytes[text.span.start..text.span.end], text.escaped) {
        Cow::Borrowed(b) => String::from_utf8_lossy(b),
        Cow::Owned(b) => Cow::Owned(String::from_utf8_lossy(&b).into_owned()),
    }
}

/// A boolean as engines read one: null is false, and so are 0 and 1 what they mean.
pub(super) fn flag(c: &mut Cursor<'_>, name: &[u8]) -> Result<(bool, Span), Fault> {
    let span = c.value()?;
    match &c.bytes[span.start..span.end] {
        b"true" | b"1" => Ok((true, span)),
        b"false" | b"0" | b"null" => Ok((false, span)),
        _ => fault(name, "it must be true or false"),
    }
}

pub(super) fn any_flag(c: &mut Cursor<'_>, name: &[u8]) -> Result<bool, Fault> {
    if c.peek() != Some(b'[') {
        return Ok(flag(c, name)?.0);
    }
    let mut any = false;
    c.list::<Fault>(|c| {
        any |= flag(c, name)?.0;
        Ok(())
    })?;
    Ok(any)
}

/// A non-negative integer, also when it is spelled `16.0`; null is none. Saturates.
pub(super) fn count(c: &mut Cursor<'_>, name: &[u8]) -> Result<(Option<u64>, Span), Fault> {
    let span = c.value()?;
    let text = &c.bytes[span.start..span.end];
    if text == b"null" {
        return Ok((None, span));
    }
    if text.iter().all(u8::is_ascii_digit) {
        let value = text.iter().fold(0u64, |n, d| n.saturating_mul(10).saturating_add(u64::from(d - b'0')));
        return Ok((Some(value), span));
    }
    let float = std::str::from_utf8(text).ok().filter(|t| !t.starts_with('"')).and_then(|t| t.parse::<f64>().ok());
    match float {
        Some(f) if f >= 0.0 && f.fract() == 0.0 => Ok((Some(f as u64), span)),
        _ => fault(name, "it must be a whole number, 0 or more"),
    }
}

/// Whether a value is more than null or an empty list or object.
pub(super) fn filled(c: &mut Cursor<'_>) -> Result<bool, Fault> {
    let span = c.value()?;
    let text = &c.bytes[span.start..span.end];
    let empty = |t: &[u8]| t.iter().all(u8::is_ascii_whitespace);
    Ok(match text {
        b"null" => false,
        [b'[', inside @ .., b']'] | [b'{', inside @ .., b'}'] => !empty(inside),
        _ => true,
    })
}

pub(super) fn params(c: &mut Cursor<'_>) -> Result<Params, Fault> {
    let mut p = Params::default();
    c.object::<Fault>(|c, key, _| {
        let name = decode(&c.bytes[key.span.start..key.span.end], key.escaped);
        match &*name {
            b"n" => {
                let (value, span) = count(c, b"sampling_params.n")?;
                p.n = value.map(|v| (span, v));
            }
            b"max_new_tokens" => {
                p.max_new_tokens = Some(Limit(count(c, b"sampling_params.max_new_tokens")?.0.map(clip)));
            }
            b"beam_width" => p.beams = count(c, b"sampling_params.beam_width")?.0.unwrap_or(0),
            _ => {
                c.value()?;
            }
        }
        Ok(())
    })?;
    Ok(p)
}

/// How many digits stand at `from`, looked at eight at a time: a prompt has tens of thousands of ids.
fn digits(bytes: &[u8], from: usize) -> usize {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    let mut n = 0;
    while let Some(eight) = bytes.get(from + n..).and_then(<[u8]>::first_chunk) {
        // A digit becomes 0 to 9; the high bit of a byte is set where it is more.
        let low = u64::from_le_bytes(*eight) ^ (ONES * 0x30);
        let other = (((low & (ONES * 0x7f)) + ONES * 0x76) | low) & (ONES * 0x80);
        if other != 0 {
            return n + other.trailing_zeros() as usize / 8;
        }
        n += 8;
    }
    n + bytes.get(from + n..).unwrap_or_default().iter().take_while(|b| b.is_ascii_digit()).count()
}

/// One flat list of token ids; the number of them. The cursor is at the opening bracket.
pub(super) fn flat_ids(c: &mut Cursor<'_>, name: &[u8]) -> Result<(Span, u32), Fault> {
    let start = c.pos;
    c.take(b'[', "a list was expected")?;
    let mut n = 0u32;
    c.space();
    if c.eat(b']') {
        return Ok((Span { start, end: c.pos }, 0));
    }
    loop {
        // The fast way: digits without a sign or a leading zero, then a comma or a bracket.
        let first = c.pos;
        c.pos += digits(c.bytes, first);
        let plain = c.pos > first && (c.bytes[first] != b'0' || c.pos == first + 1);
        if !plain || matches!(c.peek(), Some(b'.' | b'e' | b'E')) {
            c.pos = first;
            let at = c.value()?;
            let mut again = Cursor { bytes: c.bytes, pos: at.start };
            if !matches!(c.bytes[at.start], b'-' | b'0'..=b'9') || !again.number()?.1 {
                return fault(name, "every token id must be a whole number");
            }
        }
        n = n.saturating_add(1);
        c.space();
        if c.eat(b',') {
            c.space();
        } else if c.eat(b']') {
            return Ok((Span { start, end: c.pos }, n));
        } else {
            return Ok(c.bad("a comma or ] was expected")?);
        }
    }
}

/// Token ids: one flat list, or a list of such.
pub(super) fn ids(c: &mut Cursor<'_>, name: &[u8]) -> Result<Option<Input>, Fault> {
    let start = c.pos;
    if c.peek() != Some(b'[') {
        let span = c.value()?;
        if c.bytes[span.start..].starts_with(b"null") {
            return Ok(None);
        }
        return fault(name, "it must be a list of token ids, or a list of such lists");
    }
    c.pos += 1;
    c.space();
    let nested = c.peek() == Some(b'[');
    c.pos = start;
    if !nested {
        let (span, ids) = flat_ids(c, name)?;
        return Ok(Some(Input { span, batch: None, ids }));
    }
    let mut batch = Vec::new();
    let span = c.list::<Fault>(|c| {
        if c.peek() != Some(b'[') {
            c.value()?;
            return fault(name, "every element must be a list of token ids");
        }
        batch.push(flat_ids(c, name)?);
        Ok(())
    })?;
    Ok(Some(Input { span, batch: Some(batch), ids: 0 }))
}

/// A string, or a list of strings.
pub(super) fn texts(c: &mut Cursor<'_>, name: &[u8]) -> Result<Option<Input>, Fault> {
    match c.peek() {
        Some(b'"') => {
            let span = c.value()?;
            Ok(Some(Input { span, batch: None, ids: 0 }))
        }
        Some(b'[') => {
            let mut batch = Vec::new();
            let span = c.list::<Fault>(|c| {
                let text = c.peek() == Some(b'"');
                let span = c.value()?;
                batch.push((span, 0));
                if text { Ok(()) } else { fault(name, "every element must be a string") }
            })?;
            Ok(Some(Input { span, batch: Some(batch), ids: 0 }))
        }
        _ => {
            let span = c.value()?;
            if c.bytes[span.start..].starts_with(b"null") {
                return Ok(None);
            }
            fault(name, "it must be a string, or a list")
        }
    }
}

/// Embeddings: two lists deep for one prompt, three for a batch.
pub(super) fn embeds(c: &mut Cursor<'_>) -> Result<Option<Input>, Fault> {
    if c.peek() != Some(b'[') {
        let span = c.value()?;
        if c.bytes[span.start..].starts_with(b"null") {
            return Ok(None);
        }
        return fault(b"input_embeds", "it must be a list of lists");
    }
    let mut look = Cursor { bytes: c.bytes, pos: c.pos };
    let mut depth = 0;
    while depth < 3 && look.eat(b'[') {
        depth += 1;
        look.space();
    }
    if depth < 3 {
        let span = c.value()?;
        return Ok(Some(Input { span, batch: None, ids: 0 }));
    }
    let mut batch = Vec::new();
    let span = c.list::<Fault>(|c| {
        batch.push((c.value()?, 0));
        Ok(())
    })?;
    Ok(Some(Input { span, batch: Some(batch), ids: 0 }))
}

#[cfg(test)]
mod tests {
    use super::digits;

    #[test]
    fn digits_end_at_every_byte_that_is_none() {
        for length in 0..20 {
            for other in 0..=255u8 {
                let mut text = vec![b'x'; 3];
                text.extend((0..length).map(|i| b'0' + (i * 7 % 10) as u8));
                text.push(other);
                text.extend_from_slice(b"12");
                let expected = length + if other.is_ascii_digit() { 3 } else { 0 };
                assert_eq!(digits(&text, 3), expected, "{length} digits before byte {other}");
                text.truncate(3 + length);
                assert_eq!(digits(&text, 3), length);
            }
        }
        assert_eq!(digits(b"1", 5), 0);
    }
}
