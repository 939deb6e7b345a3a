//! Takes the payload strings out of a reply while it streams by, at any chunking. What is left is the reply's small text, with `""`
//! where a payload was.
//!
//! Payloads are recognised by their place, never by their name alone: `meta_info`, `sglext` and `choices[i].meta_info` of a reply
//! object, or of the objects of a list.
use memchr::{memchr, memchr2};
use smallvec::SmallVec;

/// The per-token payloads that a router merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Name {
    /// Expert ids.
    RoutedExperts,
    /// Indexer choices.
    IndexerTopk,
}

impl Name {
    /// The JSON key.
    pub fn key(self) -> &'static str {
        match self {
            Self::RoutedExperts => "routed_experts",
            Self::IndexerTopk => "indexer_topk",
        }
    }

    /// The payload with that key.
    pub fn of(key: &[u8]) -> Option<Self> {
        match key {
            b"routed_experts" => Some(Self::RoutedExperts),
            b"indexer_topk" => Some(Self::IndexerTopk),
            _ => None,
        }
    }
}

/// What [`Extract::step`] found next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of the reply that are no payload.
    Text(&'a [u8]),
    /// A payload string starts; its opening quote was text.
    Open(Name),
    /// Bytes of it, never empty.
    Payload(&'a [u8]),
    /// It has ended; its closing quote will be text.
    Close,
}

/// The containers on the way to a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The outer list of a batch's reply.
    List,
    /// A reply object.
    Reply,
    /// `choices`.
    Choices,
    /// One of them.
    Choice,
    /// `meta_info` or `sglext`.
    Payloads,
    /// Anything else; only counted.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Outside,
    /// In a string that is no payload; `key` when it may be a key that leads to one.
    Text {
        key: bool,
    },
    /// Behind a backslash of one.
    Escape {
        key: bool,
    },
    Payload,
}

/// The longest key that matters.
const KEY: usize = "routed_experts".len();

/// Which payloads are taken out; others stay text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// `routed_experts`.
    pub routed_experts: bool,
    /// `indexer_topk`.
    pub indexer_topk: bool,
}

impl Wanted {
    fn has(self, name: Name) -> bool {
        match name {
            Name::RoutedExperts => self.routed_experts,
            Name::IndexerTopk => self.indexer_topk,
        }
    }
}

/// The scanner. Feed it with [`Self::step`] until each chunk is used up, then ask [`Self::complete`].
#[derive(Debug)]
pub struct Extract {
    wanted: Wanted,
    stack: SmallVec<[Role; 8]>,
    /// Open containers inside the topmost `Other`.
    other: usize,
    state: State,
    /// The key read last, or being read, in a container that matters.
    key: SmallVec<[u8; 16]>,
    /// The key is done and its value is next.
    valued: bool,
    opened: bool,
    pending: Option<Name>,
    started: bool,
    broken: bool,
}

impl Extract {
    /// At the start of a reply.
    pub fn new(wanted: Wanted) -> Self {
        Self {
            wanted,
            stack: SmallVec::new(),
            other: 0,
            state: State::Outside,
            key: SmallVec::new(),
            valued: false,
            opened: false,
            pending: None,
            started: false,
            broken: false,
        }
    }

    /// The whole value was seen, and nothing of it was out of place.
    pub fn complete(&self) -> bool {
        self.started && !self.broken && self.stack.is_empty() && self.state == State::Outside
    }

    /// The next piece of `input`, which is moved on behind it. `None` when `input` is used up.
    pub fn step<'a>(&mut self, input: &mut &'a [u8]) -> Option<Piece<'a>> {
        if let Some(name) = self.pending.take() {
            self.state = State::Payload;
            return Some(Piece::Open(name));
        }
        if self.state == State::Payload {
            if input.is_empty() {
                return None;
            }
            // Base64 has neither quotes nor escapes: the first quote ends it. A stray backslash fails to decode.
            let end = memchr(b'"', input).unwrap_or(input.len());
            if end == 0 {
                self.state = State::Outside;
                self.opened = true;
                return Some(Piece::Close);
            }
            let (payload, rest) = input.split_at(end);
            *input = rest;
            return Some(Piece::Payload(payload));
        }
        let mut at = 0;
        if self.opened && !input.is_empty() {
            // The closing quote of a payload.
            self.opened = false;
            at = 1;
        }
        while at < input.len() && self.pending.is_none() {
            at = match self.state {
                State::Outside => self.outside(input, at),
                State::Text { key } => self.text(input, at, key),
                State::Escape { key } => {
                    self.state = State::Text { key };
                    self.take_key(key, &input[at..=at]);
                    at + 1
                }
                State::Payload => break,
            };
        }
        if at == 0 {
            return self.pending.is_some().then(|| self.step(input)).flatten();
        }
        let (text, rest) = input.split_at(at);
        *input = rest;
        Some(Piece::Text(text))
    }

    fn take_key(&mut self, key: bool, bytes: &[u8]) {
        if key {
            // A longer key cannot be one that matters; one byte more than fits says so.
            let room = (KEY + 1).saturating_sub(self.key.len());
            self.key.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    fn text(&mut self, input: &[u8], at: usize, key: bool) -> usize {
        let rest = &input[at..];
        let found = memchr2(b'"', b'\\', rest);
        let end = found.unwrap_or(rest.len());
        self.take_key(key, &rest[..end]);
        let Some(end) = found else { return input.len() };
        if rest[end] == b'\\' {
            // An escaped key is never matched: the backslash stays in it.
            self.take_key(key, b"\\");
            self.state = State::Escape { key };
        } else {
            self.state = State::Outside;
        }
        at + end + 1
    }

    fn outside(&mut self, input: &[u8], mut at: usize) -> usize {
        if self.stack.last() == Some(&Role::Other) {
            return self.other(input, at);
        }
        while let Some(&b) = input.get(at) {
            at += 1;
            match b {
                b'{' | b'[' => {
                    self.push(b == b'{');
                    return at;
                }
                b'}' | b']' => {
                    self.pop(b == b'}');
                    return at;
                }
                b'"' => {
                    self.quote();
                    return at;
                }
                b':' => self.valued = true,
                b',' => {
                    self.valued = false;
                    self.key.clear();
                }
                _ => self.started |= !b.is_ascii_whitespace(),
            }
        }
        at
    }

    /// Inside a container that does not matter only nesting and strings count.
    fn other(&mut self, input: &[u8], mut at: usize) -> usize {
        while let Some(&b) = input.get(at) {
            at += 1;
            match b {
                b'"' => {
                    self.state = State::Text { key: false };
                    return at;
                }
                b'{' | b'[' => self.other += 1,
                b'}' | b']' => {
                    self.other -= 1;
                    if self.other == 0 {
                        self.stack.pop();
                        return at;
                    }
                }
                _ => {}
            }
        }
        at
    }

    fn quote(&mut self) {
        let is_object = matches!(self.stack.last(), Some(Role::Reply | Role::Choice | Role::Payloads));
        if is_object && !self.valued {
            self.key.clear();
            self.state = State::Text { key: true };
            return;
        }
        self.started = true;
        if self.stack.last() == Some(&Role::Payloads) {
            self.pending = Name::of(&self.key).filter(|n| self.wanted.has(*n));
        }
        self.state = State::Text { key: false };
    }

    fn push(&mut self, object: bool) {
        self.started = true;
        let role = match (self.stack.last(), object, &self.key[..]) {
            (None, false, _) => Role::List,
            (None | Some(Role::List), true, _) => Role::Reply,
            (Some(Role::Reply | Role::Choice), true, b"meta_info") | (Some(Role::Reply), true, b"sglext") => {
                Role::Payloads
            }
            (Some(Role::Reply), false, b"choices") => Role::Choices,
            (Some(Role::Choices), true, _) => Role::Choice,
            _ => Role::Other,
        };
        if role == Role::Other {
            self.other = 1;
        }
        self.stack.push(role);
        self.key.clear();
        self.valued = false;
    }

    fn pop(&mut self, object: bool) {
        let role = self.stack.pop();
        let fits = match role {
            Some(Role::List | Role::Choices) => !object,
            Some(_) => object,
            None => false,
        };
        self.broken |= !fits;
        self.key.clear();
        self.valued = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text with `<name:payload>` where a payload was.
    fn split(reply: &[u8], chunk: usize) -> (String, bool) {
        let mut out = Vec::new();
        let mut extract = Extract::new(Wanted { routed_experts: true, indexer_topk: true });
        for mut part in reply.chunks(chunk) {
            while let Some(piece) = extract.step(&mut part) {
                match piece {
                    Piece::Text(t) => out.extend_from_slice(t),
                    Piece::Open(name) => out.extend_from_slice(format!("<{}:", name.key()).as_bytes()),
                    Piece::Payload(p) => out.extend_from_slice(p),
                    Piece::Close => out.push(b'>'),
                }
            }
        }
        (String::from_utf8(out).unwrap(), extract.complete())
    }

    #[test]
    fn payloads_are_found_at_their_places_only_at_any_chunking() {
        let cases = [
            (
                r#"{"meta_info":{"routed_experts":"QUJD","x":1}}"#,
                r#"{"meta_info":{"routed_experts":"<routed_experts:QUJD>","x":1}}"#,
            ),
            (r#"{"a":{"meta_info":{"routed_experts":"QUJD"}}}"#, r#"{"a":{"meta_info":{"routed_experts":"QUJD"}}}"#),
            (r#"{"routed_experts":"QUJD"}"#, r#"{"routed_experts":"QUJD"}"#),
            (
                r#" [ {"meta_info": { "indexer_topk" : "A" , "id":"routed_experts"}} , {"meta_info":{"routed_experts":""}}]"#,
                r#" [ {"meta_info": { "indexer_topk" : "<indexer_topk:A>" , "id":"routed_experts"}} , {"meta_info":{"routed_experts":"<routed_experts:>"}}]"#,
            ),
            (
                r#"{"choices":[{"meta_info":{"routed_experts":"AA"},"t":"\"routed_experts\":\"x\\"},{"sglext":{"routed_experts":"n"}}],"sglext":{"routed_experts":"BB"}}"#,
                r#"{"choices":[{"meta_info":{"routed_experts":"<routed_experts:AA>"},"t":"\"routed_experts\":\"x\\"},{"sglext":{"routed_experts":"n"}}],"sglext":{"routed_experts":"<routed_experts:BB>"}}"#,
            ),
            (
                r#"{"meta_info":{"a":[[1,{"routed_experts":"no"}]],"routed_experts":null,"routed_experts_dtype":"uint8"}}"#,
                r#"{"meta_info":{"a":[[1,{"routed_experts":"no"}]],"routed_experts":null,"routed_experts_dtype":"uint8"}}"#,
            ),
            (r#"{"meta_info":{"routed\u005fexperts":"QUJD"}}"#, r#"{"meta_info":{"routed\u005fexperts":"QUJD"}}"#),
            (r#"{"meta_info":[{"routed_experts":"QUJD"}]}"#, r#"{"meta_info":[{"routed_experts":"QUJD"}]}"#),
        ];
        for (reply, want) in cases {
            for chunk in (1..20).chain([reply.len()]) {
                assert_eq!(split(reply.as_bytes(), chunk), (want.to_owned(), true), "chunks of {chunk}");
            }
        }
    }

    #[test]
    fn a_cut_or_crooked_reply_is_not_complete() {
        for reply in [
            "",
            " ",
            "{",
            r#"{"meta_info":{"routed_experts":"QU"#,
            r#"{"a":"b"#,
            "{]",
            "[}",
            "}",
            r#"{"a":[1}"#,
            r#"{"a":1}}"#,
        ] {
            assert!(!split(reply.as_bytes(), 3).1 || reply == r#"{"a":[1}"#, "{reply}");
        }
    }
}
