//! A strict JSON reader over a whole body: positions, no values, no recursion.
//!
//! It takes what Python's `json.loads` takes (so `NaN`, `Infinity` and `-Infinity` too, which Python clients do write), because what
//! an engine would read must not be refused here.
use smallvec::SmallVec;

use super::Span;

/// Containers inside one another; deeper bodies are refused (Python's own reader gives up at about 1,000).
pub(crate) const MAX_DEPTH: usize = 10_000;

/// Why and where reading stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bad {
    /// Byte position.
    pub(crate) at: usize,
    /// What was expected there.
    pub(crate) why: &'static str,
}

/// A string's inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    /// Between the quotes.
    pub(crate) span: Span,
    /// Whether it has backslashes.
    pub(crate) escaped: bool,
}

/// Which containers are open, one bit each: set for objects.
#[derive(Default)]
struct Nest {
    bits: SmallVec<[u64; 2]>,
    depth: usize,
}

impl Nest {
    fn push(&mut self, object: bool) {
        let (word, bit) = (self.depth / 64, self.depth % 64);
        if word == self.bits.len() {
            self.bits.push(0);
        }
        if let Some(w) = self.bits.get_mut(word) {
            *w = (*w & !(1 << bit)) | (u64::from(object) << bit);
        }
        self.depth += 1;
    }

    fn pop(&mut self) {
        self.depth -= 1;
    }

    fn in_object(&self) -> bool {
        let top = self.depth - 1;
        self.bits.get(top / 64).is_some_and(|w| w >> (top % 64) & 1 == 1)
    }
}

/// A reading position in a body.
pub(crate) struct Cursor<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) pos: usize,
}

const ONES: u64 = u64::from_le_bytes([1; 8]);
const HIGH: u64 = u64::from_le_bytes([0x80; 8]);

/// A high bit in every byte of `w` that is `"`, `\` or below 0x20 (exact up to the first such byte).
fn special(w: u64) -> u64 {
    let quote = w ^ (ONES * u64::from(b'"'));
    let slash = w ^ (ONES * u64::from(b'\\'));
    let low = w.wrapping_sub(ONES * 0x20) & !w;
    ((quote.wrapping_sub(ONES) & !quote) | (slash.wrapping_sub(ONES) & !slash) | low) & HIGH
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, pos: 0 }
    }

    pub(crate) fn bad<T>(&self, why: &'static str) -> Result<T, Bad> {
        Err(Bad { at: self.pos, why })
    }

    pub(crate) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.pos).copied()
    }

    pub(crate) fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.pos += 1;
        }
    }

    /// Takes `byte`, which must be next.
    pub(crate) fn take(&mut self, byte: u8, why: &'static str) -> Result<(), Bad> {
        if self.peek() == Some(byte) {
            self.pos += 1;
            return Ok(());
        }
        self.bad(why)
    }

    /// Takes `byte` if it is next.
    pub(crate) fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.pos += usize::from(found);
        found
    }

    fn word(&mut self, word: &'static [u8]) -> Result<(), Bad> {
        if self.bytes[self.pos..].starts_with(word) {
            self.pos += word.len();
            return Ok(());
        }
        self.bad("a JSON value was expected")
    }

    /// A string; the cursor is at its opening quote.
    pub(crate) fn string(&mut self) -> Result<Text, Bad> {
        self.take(b'"', "a string was expected")?;
        let start = self.pos;
        let mut escaped = false;
        loop {
            while let Some(chunk) = self.bytes.get(self.pos..self.pos + 8) {
                let mut w = [0; 8];
                w.copy_from_slice(chunk);
                let hit = special(u64::from_le_bytes(w));
                if hit != 0 {
                    self.pos += hit.trailing_zeros() as usize / 8;
                    break;
                }
                self.pos += 8;
            }
            match self.peek() {
                Some(b'"') => {
                    let span = Span { start, end: self.pos };
                    self.pos += 1;
                    return Ok(Text { span, escaped });
                }
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                Some(0..=0x1f) => return self.bad("a control character must be escaped in a string"),
                Some(_) => self.pos += 1,
                None => return self.bad("the body ends inside a string"),
            }
        }
    }

    fn escape(&mut self) -> Result<(), Bad> {
        match self.bytes.get(self.pos + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.pos += 2,
            Some(b'u') => {
                let digits = self.bytes.get(self.pos + 2..self.pos + 6);
                if !digits.is_some_and(|d| d.iter().all(u8::is_ascii_hexdigit)) {
                    return self.bad("four hexadecimal digits must follow \\u");
                }
                self.pos += 6;
            }
            _ => return self.bad("this is no JSON escape"),
        }
        Ok(())
    }

    /// A number; gives its span and whether it is an integer.
    pub(crate) fn number(&mut self) -> Result<(Span, bool), Bad> {
        let start = self.pos;
        let negative = self.eat(b'-');
        if negative && self.peek() == Some(b'I') {
            self.word(b"Infinity")?;
            return Ok((Span { start, end: self.pos }, false));
        }
        let mut integer = true;
        if !self.eat(b'0') && self.digits() == 0 {
            return self.bad("a digit was expected");
        }
        if self.eat(b'.') {
            integer = false;
            if self.digits() == 0 {
                return self.bad("a digit must follow the decimal point");
            }
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            integer = false;
            self.pos += 1;
            if !self.eat(b'+') {
                self.eat(b'-');
            }
            if self.digits() == 0 {
                return self.bad("a digit must follow the exponent");
            }
        }
        Ok((Span { start, end: self.pos }, integer))
    }

    fn digits(&mut self) -> usize {
        let start = self.pos;
        while self.peek().is_some_and(|b| b.is_ascii_digit()) {
            self.pos += 1;
        }
        self.pos - start
    }

    /// An object's key and its colon; the cursor ends at the value.
    pub(crate) fn key(&mut self) -> Result<Text, Bad> {
        if self.peek() != Some(b'"') {
            return self.bad("a key in double quotes was expected");
        }
        let key = self.string()?;
        self.space();
        self.take(b':', "a colon was expected after a key")?;
        self.space();
        Ok(key)
    }

    /// Any value; white space around it is not taken.
    pub(crate) fn value(&mut self) -> Result<Span, Bad> {
        let start = self.pos;
        let mut nest = Nest::default();
        loop {
            match self.peek() {
                Some(open @ (b'{' | b'[')) => {
                    let object = open == b'{';
                    self.pos += 1;
                    self.space();
                    if !self.eat(if object { b'}' } else { b']' }) {
                        if nest.depth == MAX_DEPTH {
                            return self.bad("containers are nested too deeply");
                        }
                        nest.push(object);
                        if object {
                            self.key()?;
                        }
                        continue;
                    }
                }
                Some(b'"') => {
                    self.string()?;
                }
                Some(b'-' | b'0'..=b'9') => {
                    self.number()?;
                }
                Some(b't') => self.word(b"true")?,
                Some(b'f') => self.word(b"false")?,
                Some(b'n') => self.word(b"null")?,
                Some(b'N') => self.word(b"NaN")?,
                Some(b'I') => self.word(b"Infinity")?,
                Some(_) => return self.bad("a JSON value was expected"),
                None => return self.bad("the body ends where a value was expected"),
            }
            loop {
                if nest.depth == 0 {
                    return Ok(Span { start, end: self.pos });
                }
                self.space();
                let object = nest.in_object();
                if self.eat(b',') {
                    self.space();
                    if object {
                        self.key()?;
                    }
                    break;
                }
                if !self.eat(if object { b'}' } else { b']' }) {
                    let why = if object { "a comma or } was expected" } else { "a comma or ] was expected" };
                    return self.bad(why);
                }
                nest.pop();
            }
        }
    }

    /// A list's elements, each read by `each` (which must take one value). The cursor is at the opening bracket.
    pub(crate) fn list<E: From<Bad>>(&mut self, mut each: impl FnMut(&mut Self) -> Result<(), E>) -> Result<Span, E> {
        let start = self.pos;
        self.take(b'[', "a list was expected")?;
        self.space();
        if !self.eat(b']') {
            loop {
                each(self)?;
                self.space();
                if self.eat(b']') {
                    break;
                }
                self.take(b',', "a comma or ] was expected")?;
                self.space();
            }
        }
        Ok(Span { start, end: self.pos })
    }

    /// An object's members; `each` gets the key and where it starts, and must take the value. The cursor is at the opening brace.
    pub(crate) fn object<E: From<Bad>>(
        &mut self,
        mut each: impl FnMut(&mut Self, Text, usize) -> Result<(), E>,
    ) -> Result<Span, E> {
        let start = self.pos;
        self.take(b'{', "an object was expected")?;
        self.space();
        if !self.eat(b'}') {
            loop {
                let at = self.pos;
                let key = self.key()?;
                each(self, key, at)?;
                self.space();
                if self.eat(b'}') {
                    break;
                }
                self.take(b',', "a comma or } was expected")?;
                self.space();
            }
        }
        Ok(Span { start, end: self.pos })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &[u8]) -> Result<(), Bad> {
        let mut c = Cursor::new(text);
        c.space();
        c.value()?;
        c.space();
        if c.pos == text.len() { Ok(()) } else { c.bad("trailing") }
    }

    #[test]
    fn takes_what_is_json_and_refuses_what_is_not() {
        for good in [
            "null",
            "true",
            " [ ] ",
            "{}",
            "-0",
            "0.5e+7",
            "1E9",
            r#""\u0000\ud83d""#,
            r#"{"a":[{"b":[[],{}]},1]}"#,
            "NaN",
            "[-Infinity,Infinity]",
            "\"\u{7f}\u{e9}\"",
        ] {
            assert_eq!(whole(good.as_bytes()), Ok(()), "{good}");
        }
        for (bad, at) in [
            ("", 0),
            ("{", 1),
            ("[1,]", 3),
            ("{\"a\"}", 4),
            ("{\"a\":1,}", 7),
            ("01", 1),
            ("1.", 2),
            ("-", 1),
            ("\"\\x\"", 1),
            ("\"\\u12g4\"", 1),
            ("\"abc\ndefgh\"", 4),
            ("nul", 0),
            ("[1 2]", 3),
            ("{1:2}", 1),
            ("\"abcdefghij", 11),
            ("[}", 1),
            ("{]", 1),
            ("'a'", 0),
            ("1e", 2),
        ] {
            assert_eq!(whole(bad.as_bytes()).unwrap_err().at, at, "{bad}");
        }
    }

    #[test]
    fn deep_nesting_is_refused_and_does_not_overflow() {
        let deep = "[".repeat(2_000_000);
        assert_eq!(whole(deep.as_bytes()).unwrap_err().why, "containers are nested too deeply");
        let fine = format!("{}{}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH));
        assert_eq!(whole(fine.as_bytes()), Ok(()));
    }
}
