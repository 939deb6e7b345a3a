//! JSON strings: reading escapes, writing them.
use std::borrow::Cow;

/// The text of a string's inside. Lone surrogates, which no Rust string can hold, become U+FFFD; only names are read this way, never
/// what is passed on.
pub(crate) fn decode(inside: &[u8], escaped: bool) -> Cow<'_, [u8]> {
    if !escaped {
        return Cow::Borrowed(inside);
    }
    let mut out = Vec::with_capacity(inside.len());
    let mut i = 0;
    while let Some(&b) = inside.get(i) {
        if b != b'\\' {
            out.push(b);
            i += 1;
            continue;
        }
        i += 2;
        match inside.get(i - 1) {
            Some(b'b') => out.push(8),
            Some(b'f') => out.push(12),
            Some(b'n') => out.push(b'\n'),
            Some(b'r') => out.push(b'\r'),
            Some(b't') => out.push(b'\t'),
            Some(b'u') => {
                let first = hex(inside, i);
                i += 4;
                let mut code = first;
                if (0xd800..0xdc00).contains(&first) && inside.get(i..i + 2) == Some(b"\\u") {
                    let second = hex(inside, i + 2);
                    if (0xdc00..0xe000).contains(&second) {
                        code = 0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00);
                        i += 6;
                    }
                }
                let c = char::from_u32(code).unwrap_or('\u{fffd}');
                out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            }
            Some(&other) => out.push(other),
            None => {}
        }
    }
    Cow::Owned(out)
}

fn hex(inside: &[u8], at: usize) -> u32 {
    let digits = inside.get(at..at + 4).unwrap_or_default();
    digits.iter().fold(0, |n, d| n * 16 + char::from(*d).to_digit(16).unwrap_or(0))
}

/// Appends `text` as a JSON string with its quotes.
pub(crate) fn push_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c < ' ' => {
                let n = c as u32;
                out.push_str("\\u00");
                out.push(if n > 15 { '1' } else { '0' });
                out.extend(char::from_digit(n % 16, 16));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_escapes() {
        let inside = br#"a\"\\\/\n\u0041\ud83d\ude00\ud83dx\t"#;
        let text = decode(inside, true);
        assert_eq!(std::str::from_utf8(&text).unwrap(), "a\"\\/\nA\u{1f600}\u{fffd}x\t");
    }

    #[test]
    fn writes_escapes() {
        let mut out = String::new();
        push_string(&mut out, "a\"\\\n\u{1}\u{1f}\u{e9}");
        assert_eq!(out, "\"a\\\"\\\\\\n\\u0001\\u001f\u{e9}\"");
    }
}
