//! Server-sent events cut out of a byte stream at any chunking. Every byte comes out again, in order.
use memchr::memchr;

/// What [`Splitter::step`] found next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of the stream that are no data: field names, comments, line ends.
    Raw(&'a [u8]),
    /// Bytes of a `data` line's value. A carriage return at its end is still in it.
    Data(&'a [u8]),
    /// An empty line was read: the event is complete.
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In a line of which so many bytes are the beginning of `data:`.
    Name(usize),
    /// Behind a carriage return that is the first byte of its line.
    Return,
    /// Behind `data:`.
    Colon,
    Data,
    /// In a line that is no data.
    Other,
}

const NAME: &[u8] = b"data:";

/// Cuts a stream into events.
#[derive(Debug)]
pub struct Splitter {
    state: State,
    end: bool,
}

impl Default for Splitter {
    fn default() -> Self {
        Self { state: State::Name(0), end: false }
    }
}

impl Splitter {
    /// A complete event is still to be reported by the next [`Self::step`], which needs no input.
    pub fn at_end(&self) -> bool {
        self.end
    }

    /// Goes on as inside a `data` line: for a caller that gives back a part of the last [`Piece::Data`].
    pub fn in_data(&mut self) {
        self.state = State::Data;
    }

    /// The next piece of `input`, which is moved on behind it. `None` when `input` is used up.
    pub fn step<'a>(&mut self, input: &mut &'a [u8]) -> Option<Piece<'a>> {
        if std::mem::take(&mut self.end) {
            return Some(Piece::End);
        }
        if input.is_empty() {
            return None;
        }
        if self.state == State::Data {
            let end = memchr(b'\n', input).unwrap_or(input.len());
            if end > 0 {
                let (data, rest) = input.split_at(end);
                *input = rest;
                return Some(Piece::Data(data));
            }
        }
        let mut at = 0;
        while let Some(&b) = input.get(at) {
            if self.state == State::Data && b != b'\n' {
                break;
            }
            if self.state == State::Other {
                let Some(end) = memchr(b'\n', &input[at..]) else {
                    at = input.len();
                    break;
                };
                at += end;
            }
            at += 1;
            let newline = input[at - 1] == b'\n';
            self.state = match self.state {
                State::Name(0) | State::Return if newline => {
                    self.end = true;
                    State::Name(0)
                }
                _ if newline => State::Name(0),
                State::Name(0) if b == b'\r' => State::Return,
                State::Name(n) if b == NAME[n] => {
                    if n + 1 == NAME.len() {
                        State::Colon
                    } else {
                        State::Name(n + 1)
                    }
                }
                State::Colon if b == b' ' => State::Data,
                State::Colon => {
                    // No space: this byte is data already.
                    at -= 1;
                    State::Data
                }
                State::Data => State::Data,
                State::Name(_) | State::Return | State::Other => State::Other,
            };
            if self.end {
                break;
            }
        }
        if at == 0 {
            return self.step(input);
        }
        let (raw, rest) = input.split_at(at);
        *input = rest;
        Some(Piece::Raw(raw))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data of every event, and all bytes.
    fn split(stream: &[u8], chunk: usize) -> (Vec<String>, Vec<u8>) {
        let (mut events, mut data, mut all) = (Vec::new(), Vec::new(), Vec::new());
        let mut splitter = Splitter::default();
        for mut part in stream.chunks(chunk) {
            while let Some(piece) = splitter.step(&mut part) {
                match piece {
                    Piece::Raw(raw) => all.extend_from_slice(raw),
                    Piece::Data(d) => {
                        all.extend_from_slice(d);
                        data.extend_from_slice(d);
                    }
                    Piece::End => events.push(String::from_utf8(std::mem::take(&mut data)).unwrap()),
                }
            }
        }
        (events, all)
    }

    #[test]
    fn events_are_whole_lines_at_any_chunking() {
        let stream = b"data: {\"text\":\"write data: [DONE] at the end\"}\n\n: ping\n\nevent: x\r\ndata:no space\r\n\r\n\ndatas: n\ndata\n\ndata: \n\ndata:  two\ndata: lines\n\ndata: [DONE]\n\ndata: cut";
        for chunk in (1..40).chain([stream.len()]) {
            let (events, all) = split(stream, chunk);
            assert_eq!(
                events,
                ["{\"text\":\"write data: [DONE] at the end\"}", "", "no space\r", "", "", "", " twolines", "[DONE]"],
                "chunks of {chunk}"
            );
            assert_eq!(all, stream);
        }
    }
}
