//! Reply bodies: prepared bytes and R3 text that is made while it is written, so that no payload is ever held whole.
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc::UnboundedReceiver;

use super::pattern::TextStream;

/// A part of a body.
#[derive(Debug)]
pub(crate) enum Piece {
    /// Bytes as they are.
    Bytes(Bytes),
    /// R3 rows as base64 text.
    Text(TextStream),
    /// The connection breaks here.
    Break,
}

impl Piece {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Text(text) => text.remaining(),
            Self::Break => 0,
        }
    }
}

impl From<Vec<u8>> for Piece {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

/// Runs its closure when it is dropped: tells the engine that nobody reads the reply any more.
pub(crate) struct OnDrop(Option<Box<dyn FnOnce() + Send + Sync>>);

impl OnDrop {
    pub(crate) fn new(f: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(f)))
    }

    /// The exchange ended well; nothing is told.
    pub(crate) fn defuse(&mut self) {
        self.0 = None;
    }
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(f) = self.0.take() {
            f();
        }
    }
}

/// Where a body's pieces come from.
enum Source {
    /// All of them are known; the length goes into `content-length`.
    Known { left: u64 },
    /// More may come (SSE); ends when the sender is dropped.
    Stream(UnboundedReceiver<Piece>),
}

/// The body of every reply.
pub(crate) struct EngineBody {
    pieces: VecDeque<Piece>,
    source: Source,
    /// Bytes after which the connection is broken (the `cut` fault).
    cut_after: Option<u64>,
    guard: Option<OnDrop>,
}

impl EngineBody {
    pub(crate) fn pieces(pieces: Vec<Piece>) -> Self {
        let left = pieces.iter().map(Piece::len).sum();
        Self { pieces: pieces.into(), source: Source::Known { left }, cut_after: None, guard: None }
    }

    pub(crate) fn bytes(bytes: impl Into<Bytes>) -> Self {
        Self::pieces(vec![Piece::Bytes(bytes.into())])
    }

    pub(crate) fn stream(pieces: UnboundedReceiver<Piece>) -> Self {
        Self { pieces: VecDeque::new(), source: Source::Stream(pieces), cut_after: None, guard: None }
    }

    /// `guard` fires when the body is dropped before its end.
    pub(crate) fn guarded(mut self, guard: OnDrop) -> Self {
        self.guard = Some(guard);
        self
    }

    /// Breaks the connection after `bytes` of this body, which must be more than 0.
    pub(crate) fn cut_after(mut self, bytes: u64) -> Self {
        self.cut_after = Some(bytes.max(1));
        self
    }

    fn next_bytes(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            match self.pieces.front_mut()? {
                Piece::Bytes(bytes) => {
                    let bytes = std::mem::take(bytes);
                    self.pieces.pop_front();
                    if !bytes.is_empty() {
                        return Some(Ok(bytes));
                    }
                }
                Piece::Text(text) => {
                    let left = usize::try_from(text.remaining()).unwrap_or(usize::MAX);
                    let mut out = Vec::with_capacity(left.min(84 << 10));
                    if !text.next_tile(&mut out) {
                        self.pieces.pop_front();
                    }
                    if !out.is_empty() {
                        return Some(Ok(out.into()));
                    }
                }
                Piece::Break => return Some(Err(io::ErrorKind::ConnectionReset.into())),
            }
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        loop {
            if let Some(bytes) = this.next_bytes() {
                let mut bytes = match bytes {
                    Ok(bytes) => bytes,
                    Err(error) => return Poll::Ready(Some(Err(error))),
                };
                if let Some(left) = &mut this.cut_after {
                    bytes.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= bytes.len() as u64;
                    if *left == 0 {
                        this.pieces.push_front(Piece::Break);
                    }
                }
                if let Source::Known { left } = &mut this.source {
                    *left -= bytes.len() as u64;
                    if *left == 0
                        && let Some(guard) = &mut this.guard
                    {
                        guard.defuse();
                    }
                }
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            match &mut this.source {
                Source::Known { .. } => return Poll::Ready(None),
                Source::Stream(more) => match more.poll_recv(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Some(piece)) => this.pieces.push_back(piece),
                    Poll::Ready(None) => {
                        if let Some(guard) = &mut this.guard {
                            guard.defuse();
                        }
                        return Poll::Ready(None);
                    }
                },
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self.source {
            Source::Known { left } => SizeHint::with_exact(left),
            Source::Stream(_) => SizeHint::default(),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.source, Source::Known { left: 0 })
    }
}
