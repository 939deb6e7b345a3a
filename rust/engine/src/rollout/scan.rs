//! Reads a reply as it comes: the payload's text goes to the check, the rest is kept and parsed as JSON at the end.
use super::verify::{Findings, TextCheck};

/// Key of the payload in every reply.
const KEY: &[u8] = b"\"routed_experts\":";
/// Most bytes of a reply apart from its payload.
const MAX_REST: usize = 16 << 20;

/// A reply while it is read.
#[derive(Debug)]
pub(crate) struct ReplyScan {
    /// Everything but the payload's characters; the payload is an empty string in it.
    rest: Vec<u8>,
    /// Where the search for the key goes on.
    searched: usize,
    check: Option<TextCheck>,
    state: State,
    found: Option<Findings>,
    /// Payload characters that were read although another payload had been checked already.
    extra: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Between payloads.
    Outside,
    /// After the key, before the quote.
    Value,
    /// In the payload.
    Payload,
}

impl ReplyScan {
    /// `check` knows what the payload must be.
    pub(crate) fn new(check: TextCheck) -> Self {
        Self { rest: Vec::new(), searched: 0, check: Some(check), state: State::Outside, found: None, extra: 0 }
    }

    /// Takes the next bytes of the body.
    ///
    /// # Errors
    /// When the reply is too large apart from its payload.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            match self.state {
                State::Outside => {
                    self.rest.extend_from_slice(bytes);
                    if self.rest.len() > MAX_REST {
                        return Err(format!("the reply has more than {MAX_REST} bytes apart from its payload"));
                    }
                    let Some(at) = memchr::memmem::find(&self.rest[self.searched..], KEY) else {
                        self.searched = self.rest.len().saturating_sub(KEY.len() - 1);
                        return Ok(());
                    };
                    let end = self.searched + at + KEY.len();
                    let back = self.rest.len() - end;
                    self.rest.truncate(end);
                    self.searched = end;
                    bytes = &bytes[bytes.len() - back..];
                    self.state = State::Value;
                }
                State::Value => {
                    let first = bytes[0];
                    self.rest.push(first);
                    self.searched = self.rest.len();
                    bytes = &bytes[1..];
                    self.state = match first {
                        b' ' => State::Value,
                        b'"' => State::Payload,
                        // null, or something that is not a payload.
                        _ => State::Outside,
                    };
                }
                State::Payload => {
                    let end = memchr::memchr(b'"', bytes).unwrap_or(bytes.len());
                    match &mut self.check {
                        Some(check) => check.feed(&bytes[..end]),
                        None => self.extra += end as u64,
                    }
                    if end < bytes.len() {
                        self.found = self.found.or(self.check.take().map(TextCheck::finish));
                        self.state = State::Outside;
                    }
                    bytes = &bytes[end..];
                }
            }
        }
        Ok(())
    }

    /// The body has ended: what the payload held (`None` when there was none), and the rest of the reply.
    pub(crate) fn finish(mut self) -> (Option<Findings>, Vec<u8>) {
        if let Some(found) = &mut self.found {
            found.wrong_bytes += self.extra;
        }
        (self.found, self.rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::pattern::{Pattern, R3Shape, Rows, TextStream};

    fn reply(rows: Rows, space: &str) -> (Vec<u8>, std::sync::Arc<Pattern>) {
        let pattern = Pattern::new(R3Shape { layers: 2, top_k: 2, experts: 256 });
        let mut body = format!(r#"{{"text":"a","meta_info":{{"id":"x","routed_experts":{space}""#).into_bytes();
        let mut stream = TextStream::new(pattern.clone(), rows);
        while stream.next_tile(&mut body) {}
        body.extend_from_slice(br#"","dp_rank":3}}"#);
        (body, pattern)
    }

    #[test]
    fn the_payload_is_checked_and_the_rest_is_json_at_any_chunking() {
        let rows = Rows::of(4, 0, 150);
        for space in ["", " "] {
            let (body, pattern) = reply(rows, space);
            for piece in [1, 2, 17, 4096] {
                let mut scan = ReplyScan::new(TextCheck::new(pattern.clone(), rows));
                body.chunks(piece).for_each(|c| scan.feed(c).unwrap());
                let (found, rest) = scan.finish();
                assert_eq!(found.unwrap().wrong_bytes, 0, "pieces of {piece}");
                let json: serde_json::Value = serde_json::from_slice(&rest).unwrap();
                assert_eq!(json["meta_info"]["dp_rank"], 3);
                assert_eq!(json["meta_info"]["routed_experts"], "");
            }
        }
    }

    #[test]
    fn a_missing_or_null_payload_is_told_from_a_wrong_one() {
        let pattern = Pattern::new(R3Shape { layers: 2, top_k: 2, experts: 256 });
        for body in [r#"{"meta_info":{}}"#, r#"{"meta_info":{"routed_experts":null}}"#] {
            let mut scan = ReplyScan::new(TextCheck::new(pattern.clone(), Rows::of(1, 0, 5)));
            scan.feed(body.as_bytes()).unwrap();
            let (found, rest) = scan.finish();
            assert_eq!(found, None);
            assert!(serde_json::from_slice::<serde_json::Value>(&rest).is_ok());
        }
        let mut scan = ReplyScan::new(TextCheck::new(pattern, Rows::of(1, 0, 5)));
        scan.feed(br#"{"meta_info":{"routed_experts":""}}"#).unwrap();
        assert_eq!(scan.finish().0.unwrap().wrong_bytes, 5 * 16);
    }
}
