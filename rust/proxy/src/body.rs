//! Bodies without copies: a request to an engine is a list of pieces, a reply to a client is whole or a stream of pieces.
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// What a connection to an engine has seen of the current exchange. Shared with the pieces that travel on it.
#[derive(Debug, Default)]
pub struct WireStats {
    /// Bytes read since the connection was opened.
    pub received: AtomicU64,
    /// Whether the whole request body was handed to the socket's writer.
    pub body_sent: AtomicBool,
}

/// A request body: the pieces in order, sent with their total as `content-length`.
#[derive(Debug)]
pub struct PiecesBody {
    pieces: Arc<[Bytes]>,
    next: usize,
    left: u64,
    stats: Arc<WireStats>,
}

impl PiecesBody {
    /// The body of `pieces`. `stats.body_sent` is set once the last piece was taken.
    pub fn new(pieces: Arc<[Bytes]>, stats: Arc<WireStats>) -> Self {
        let left = pieces.iter().map(|p| p.len() as u64).sum();
        stats.body_sent.store(left == 0, Ordering::Relaxed);
        Self { pieces, next: 0, left, stats }
    }
}

impl Body for PiecesBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        while let Some(piece) = self.pieces.get(self.next).cloned() {
            self.next += 1;
            if !piece.is_empty() {
                self.left = self.left.saturating_sub(piece.len() as u64);
                if self.left == 0 {
                    self.stats.body_sent.store(true, Ordering::Relaxed);
                }
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// Why a reply that had begun cannot be completed. The connection to the client is closed, so that it sees the cut.
#[derive(Debug)]
pub struct Cut(pub String);

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "reply cut short: {}", self.0)
    }
}

impl std::error::Error for Cut {}

/// A source of a reply's pieces; it owns everything that must be given back when the reply ends or is dropped.
pub trait Pieces: Send {
    /// The next piece, `None` at the end.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>>;

    /// Total length, when it is known before.
    fn length(&self) -> Option<u64> {
        None
    }
}

/// A reply body.
pub enum ReplyBody {
    /// Known as a whole.
    Whole(Option<Bytes>),
    /// Comes in pieces.
    Stream(Box<dyn Pieces>),
}

impl std::fmt::Debug for ReplyBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::Whole(_)) { "Whole" } else { "Stream" })
    }
}

impl ReplyBody {
    /// No body.
    pub fn empty() -> Self {
        Self::Whole(None)
    }
}

impl From<Bytes> for ReplyBody {
    fn from(bytes: Bytes) -> Self {
        Self::Whole(Some(bytes).filter(|b| !b.is_empty()))
    }
}

impl From<String> for ReplyBody {
    fn from(text: String) -> Self {
        Bytes::from(text).into()
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Self::Stream(pieces) => pieces.poll_piece(cx).map(|piece| piece.map(|p| p.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64)),
            Self::Stream(pieces) => pieces.length().map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}
