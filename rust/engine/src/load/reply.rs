//! Finds the end of an HTTP/1.1 reply without keeping its body.
use std::io;

/// Longest head that is taken.
const MAX_HEAD: usize = 64 * 1024;

/// A reply that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) status: u16,
    pub(super) body_bytes: u64,
    /// The server will close the connection.
    pub(super) close: bool,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Head,
    /// Bytes of a body with a length that are still to come.
    Length(u64),
    /// The line with a chunk's size.
    ChunkSize(u64),
    /// Bytes of a chunk, with its CRLF, that are still to come.
    Chunk(u64),
    /// Lines after the last chunk; whether the current one is empty so far.
    Trailer(bool),
}

/// Fed with what arrives, says when the reply is over.
#[derive(Debug, Default)]
pub(super) struct ReplyReader {
    state: State,
    head: Vec<u8>,
    status: u16,
    close: bool,
    body_bytes: u64,
}

fn bad(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl ReplyReader {
    /// Takes the next bytes. `Some` when the reply is over.
    pub(super) fn feed(&mut self, mut bytes: &[u8]) -> io::Result<Option<Done>> {
        loop {
            match &mut self.state {
                State::Head => {
                    let before = self.head.len();
                    self.head.extend_from_slice(bytes);
                    let from = before.saturating_sub(3);
                    let Some(end) = memchr::memmem::find(&self.head[from..], b"\r\n\r\n").map(|at| from + at + 4)
                    else {
                        return if self.head.len() > MAX_HEAD {
                            Err(bad("the reply's head is too long"))
                        } else {
                            Ok(None)
                        };
                    };
                    bytes = &bytes[end - before..];
                    self.head.truncate(end);
                    self.state = self.parse_head()?;
                }
                State::Length(left) => {
                    let take = (*left).min(bytes.len() as u64);
                    *left -= take;
                    self.body_bytes += take;
                    return Ok(if *left == 0 { Some(self.done()) } else { None });
                }
                State::ChunkSize(size) => {
                    let Some((&byte, rest)) = bytes.split_first() else { return Ok(None) };
                    bytes = rest;
                    match byte {
                        b'\n' if *size == 0 => self.state = State::Trailer(true),
                        b'\n' => {
                            self.body_bytes += *size;
                            self.state = State::Chunk(*size + 2);
                        }
                        b'\r' => {}
                        digit => {
                            let value =
                                (digit as char).to_digit(16).ok_or_else(|| bad("a chunk size is not hexadecimal"))?;
                            *size = size.checked_mul(16).ok_or_else(|| bad("a chunk size is too large"))?
                                + u64::from(value);
                        }
                    }
                }
                State::Chunk(left) => {
                    let take = (*left).min(bytes.len() as u64);
                    *left -= take;
                    bytes = &bytes[take as usize..];
                    if *left > 0 {
                        return Ok(None);
                    }
                    self.state = State::ChunkSize(0);
                }
                State::Trailer(empty) => {
                    let Some((&byte, rest)) = bytes.split_first() else { return Ok(None) };
                    bytes = rest;
                    match byte {
                        b'\n' if *empty => return Ok(Some(self.done())),
                        b'\n' => *empty = true,
                        b'\r' => {}
                        _ => *empty = false,
                    }
                }
            }
        }
    }

    fn done(&self) -> Done {
        Done { status: self.status, body_bytes: self.body_bytes, close: self.close }
    }

    fn parse_head(&mut self) -> io::Result<State> {
        let head = std::mem::take(&mut self.head);
        let head = std::str::from_utf8(&head).map_err(|_| bad("the reply's head is not text"))?;
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|code| code.parse().ok());
        self.status = status.ok_or_else(|| bad("the reply has no status"))?;
        let mut state = State::Length(0);
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            if name.eq_ignore_ascii_case("content-length") {
                state = State::Length(value.parse().map_err(|_| bad("content-length is not a number"))?);
            } else if name.eq_ignore_ascii_case("transfer-encoding") && value.eq_ignore_ascii_case("chunked") {
                state = State::ChunkSize(0);
            } else if name.eq_ignore_ascii_case("connection") && value.eq_ignore_ascii_case("close") {
                self.close = true;
            }
        }
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_pieces(wire: &[u8], piece: usize) -> Option<Done> {
        let mut reader = ReplyReader::default();
        let mut pieces = wire.chunks(piece).peekable();
        while let Some(bytes) = pieces.next() {
            if let Some(done) = reader.feed(bytes).unwrap() {
                assert!(pieces.peek().is_none(), "the end came early");
                return Some(done);
            }
        }
        None
    }

    #[test]
    fn the_end_is_found_for_both_framings_and_every_piece_size() {
        let length = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
        let chunked = b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n5\r\nhello\r\n1b\r\n0123456789012345678901234\r\n\r\n0\r\n\r\n";
        for piece in 1..64 {
            assert_eq!(in_pieces(length, piece), Some(Done { status: 200, body_bytes: 5, close: false }));
            assert_eq!(in_pieces(chunked, piece), Some(Done { status: 503, body_bytes: 32, close: true }));
            assert_eq!(in_pieces(&length[..length.len() - 1], piece), None);
            assert_eq!(in_pieces(&chunked[..chunked.len() - 1], piece), None);
        }
    }

    #[test]
    fn what_is_not_http_is_an_error() {
        assert!(ReplyReader::default().feed(b"hello\r\n\r\n").is_err());
        assert!(ReplyReader::default().feed(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n").is_err());
        let chunk = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n";
        assert!(ReplyReader::default().feed(chunk).is_err());
    }
}
