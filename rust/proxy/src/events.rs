//! Event streams handed on in whole events, so that an error of the router's own can follow at any time and be read.
use bytes::Bytes;
use memchr::memmem;

/// An event longer than this is handed on in pieces: it is a payload, and holding it would cost its size.
const MOST_HELD: usize = 64 << 10;
/// Ends of an event, longest first.
const ENDS: [&[u8]; 2] = [b"\r\n\r\n", b"\n\n"];

/// See the module's text. Bytes come out as they went in.
#[derive(Debug, Default)]
pub struct WholeEvents {
    held: Vec<u8>,
    /// The beginning of the event that comes was handed on.
    open: bool,
}

impl WholeEvents {
    /// Takes a piece; returns what can be handed on, which may be nothing.
    pub fn push(&mut self, piece: Bytes) -> Bytes {
        if self.held.is_empty() {
            let whole = ends_at(&piece, 0);
            if whole == piece.len() {
                self.open = false;
                return piece;
            }
            if piece.len() - whole > MOST_HELD {
                self.open = true;
                return piece;
            }
            self.held.extend_from_slice(piece.get(whole..).unwrap_or_default());
            self.open &= whole == 0;
            return piece.slice(..whole);
        }
        // An end may lie across the seam.
        let from = self.held.len().saturating_sub(3);
        self.held.extend_from_slice(&piece);
        let whole = ends_at(&self.held, from);
        if self.held.len() - whole > MOST_HELD {
            self.open = true;
            return std::mem::take(&mut self.held).into();
        }
        self.open &= whole == 0;
        let rest = self.held.split_off(whole);
        std::mem::replace(&mut self.held, rest).into()
    }

    /// The stream has ended: what is left.
    pub fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.held).into()
    }

    /// The stream has broken: half an event is dropped; one whose beginning was handed on must be ended first.
    pub fn broken(&mut self) -> bool {
        self.held.clear();
        std::mem::take(&mut self.open)
    }
}

/// One past the end of the last whole event, looked for from `from`; 0 when there is none.
fn ends_at(bytes: &[u8], from: usize) -> usize {
    let tail = bytes.get(from..).unwrap_or_default();
    ENDS.iter().filter_map(|end| memmem::rfind(tail, end).map(|at| from + at + end.len())).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{MOST_HELD, WholeEvents};
    use bytes::Bytes;

    const STREAM: &[u8] = b"data: a\n\ndata: {\"x\":1}\r\n\r\n: c\n\ndata: half";

    #[test]
    fn only_whole_events_come_out_at_any_cut_and_no_byte_is_lost() {
        for size in 1..STREAM.len() {
            let mut events = WholeEvents::default();
            let mut out = Vec::new();
            for piece in STREAM.chunks(size) {
                out.extend_from_slice(&events.push(Bytes::copy_from_slice(piece)));
                assert!(out.is_empty() || out.ends_with(b"\n\n") || out.ends_with(b"\r\n\r\n"), "pieces of {size}");
            }
            assert!(out.ends_with(b": c\n\n"));
            out.extend_from_slice(&events.rest());
            assert_eq!(out, STREAM, "pieces of {size}");
        }
    }

    #[test]
    fn a_broken_stream_drops_half_an_event_and_says_whether_one_is_open() {
        let mut events = WholeEvents::default();
        assert_eq!(&events.push(Bytes::from_static(b"data: a\n\ndata: h"))[..], b"data: a\n\n");
        assert!(!events.broken());
        assert!(events.rest().is_empty());
        let payload = Bytes::from(vec![b'x'; MOST_HELD + 1]);
        assert_eq!(events.push(payload.clone()), payload);
        assert!(events.broken(), "its beginning was handed on");
    }
}
