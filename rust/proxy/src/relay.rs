//! Replies on their way to the client, each owning the attempt that feeds it: at its end the attempt is accounted, dropped before it is
//! aborted.
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use memchr::memmem;
use r3router_core::admission::Outcome;
use r3router_core::error::Error;
use r3router_core::topology::Role;

use crate::body::{Cut, Pieces};
use crate::context::{Count, Shared};
use crate::dispatch::{Prefill, Started, Watch, end, linger};
use crate::errors::error_json;
use crate::events::WholeEvents;
use crate::leg::{LegBody, fault_error};
use crate::live::Owner;
use crate::merge::{MergedStream, merge_sse};
use crate::metrics::{ClientOutcome, LegResult};
use crate::timer::Timer;

/// Where the bytes come from.
enum Feed {
    /// Decode's bytes as they are.
    Plain { decode: LegBody, prefill: Prefill },
    /// Decode's events with prefill's part merged in.
    Merged(Pin<Box<MergedStream<LegBody, Prefill>>>),
    /// Over.
    Ended,
}

/// Decode's reply relayed piece by piece.
pub struct Relay {
    feed: Feed,
    events: bool,
    /// Holds half an event back, so that an error of ours can follow what was sent.
    whole: WholeEvents,
    length: Option<u64>,
    timer: Timer,
    watch: Watch,
    tokens: Option<u32>,
    shared: Arc<Shared>,
    sub: Option<Owner>,
    count: Arc<Count>,
    name: Arc<str>,
}

impl std::fmt::Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relay").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Relay {
    /// Relays what has started, `length` bytes of it when that is known. Event streams end with an error event when something breaks, other replies are cut.
    pub fn new(started: Started, length: Option<u64>, shared: Arc<Shared>, sub: Owner, count: Arc<Count>) -> Self {
        let Started { decode, prefill, timer, plan, .. } = started;
        let events = shared.facts.stream;
        let name = Arc::clone(&plan.decode);
        let feed = if events && plan.merges() {
            sub.spans(crate::trace::Attempt::merging);
            Feed::Merged(Box::pin(merge_sse(decode, prefill, plan, shared.app.arena.clone())))
        } else {
            Feed::Plain { decode, prefill }
        };
        let (whole, watch) = (WholeEvents::default(), Watch::default());
        Self { feed, events, whole, length, timer, watch, tokens: None, shared, sub: Some(sub), count, name }
    }

    /// Everything has come: the attempt is complete.
    fn complete(&mut self) {
        let feed = std::mem::replace(&mut self.feed, Feed::Ended);
        let Some(sub) = self.sub.take() else { return };
        let prefill = match feed {
            Feed::Plain { prefill, .. } => prefill,
            Feed::Merged(stream) => {
                let account = stream.account();
                self.tokens = account.completion_tokens.or(self.tokens);
                note_account(&self.shared, &account);
                sub.spans(|spans| spans.merged(account.r3_prefill, account.r3_decode, true));
                Prefill::None
            }
            Feed::Ended => Prefill::None,
        };
        note(&self.count, &sub, self.tokens);
        let output_tokens = self.tokens.unwrap_or(0);
        if prefill.is_running() {
            sub.leg_ended(Role::Decode, LegResult::Ok);
            self.shared.app.runtime.spawn(linger(sub, prefill, output_tokens));
        } else {
            sub.finish(Outcome::Completed { output_tokens }, LegResult::Ok);
        }
    }

    /// Something broke after bytes were handed out. Sockets close first, then the engines are told.
    fn fail(&mut self, error: &Error) {
        let feed = std::mem::replace(&mut self.feed, Feed::Ended);
        if let (Some(sub), Feed::Merged(stream)) = (&self.sub, &feed) {
            let account = stream.account();
            sub.spans(|spans| spans.merged(account.r3_prefill, account.r3_decode, false));
        }
        drop(feed);
        if let Some(sub) = self.sub.take() {
            note(&self.count, &sub, self.tokens);
            end(&sub, error);
        }
        self.count.failed(error.kind, error.http_status());
    }

    fn broken(&mut self, error: &Error) -> Poll<Option<Result<Bytes, Cut>>> {
        self.fail(error);
        if !self.events {
            return Poll::Ready(Some(Err(Cut(error.to_string()))));
        }
        let event = error_event(error);
        let open = self.whole.broken();
        Poll::Ready(Some(Ok(if open { [b"\n\n", &event[..]].concat().into() } else { event })))
    }
}

impl Relay {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        let Some(sub) = &self.sub else { return Poll::Ready(None) };
        if let Poll::Ready(error) = self.watch.poll(cx, &self.shared, sub, &mut self.timer) {
            return self.broken(&error);
        }
        match &mut self.feed {
            Feed::Plain { decode, prefill } => loop {
                // Decode has spoken, so prefill's end changes nothing any more; it is only accounted.
                let _ = prefill.poll_error(cx);
                match std::task::ready!(decode.poll_piece(cx)) {
                    Some(Ok(mut piece)) => {
                        if self.events {
                            piece = self.whole.push(piece);
                        }
                        if piece.is_empty() {
                            continue;
                        }
                        if let Some(tokens) = completion_tokens(&piece) {
                            self.tokens = Some(tokens);
                        }
                        break Poll::Ready(Some(Ok(piece)));
                    }
                    Some(Err(fault)) => {
                        let error = fault_error(Role::Decode, &self.name, &fault);
                        break self.broken(&error);
                    }
                    None => {
                        // What an engine ends without a last empty line is still its own.
                        let rest = self.whole.rest();
                        self.complete();
                        break Poll::Ready((!rest.is_empty()).then_some(Ok(rest)));
                    }
                }
            },
            Feed::Merged(stream) => match std::task::ready!(stream.as_mut().poll_frame(cx)) {
                Some(Ok(frame)) => Poll::Ready(frame.into_data().ok().map(Ok)),
                Some(Err(never)) => match never {},
                None => {
                    match stream.error().cloned() {
                        // The merge has written the event itself.
                        Some(error) => self.fail(&error),
                        None => self.complete(),
                    }
                    Poll::Ready(None)
                }
            },
            Feed::Ended => Poll::Ready(None),
        }
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        self.poll_piece(cx).map(|piece| piece.map(|p| p.map(Frame::data)))
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// One SSE event with an error object.
pub fn error_event(error: &Error) -> Bytes {
    Bytes::from(format!("data: {}\n\n", error_json(error)))
}

/// Puts what is known of a sub-request's last attempt into the log line.
pub fn note(count: &Count, sub: &Owner, tokens: Option<u32>) {
    let trace = sub.trace();
    count.note(|line| {
        line.trace = trace;
        line.output_tokens = tokens.map(|t| t + line.output_tokens.unwrap_or(0)).or(line.output_tokens);
    });
}

/// Learns from a merge, and counts its bytes.
pub fn note_account(shared: &Shared, account: &crate::merge::Account) {
    let app = &shared.app;
    if let Some(items) = account.row_items {
        app.rows.learn(&shared.model, items);
    }
    app.metrics.r3_bytes.add(0, account.r3_prefill);
    app.metrics.r3_bytes.add(1, account.r3_decode);
}

/// The last `completion_tokens` in a piece of a reply.
pub fn completion_tokens(piece: &[u8]) -> Option<u32> {
    const NAME: &[u8] = b"\"completion_tokens\":";
    let at = memmem::rfind(piece, NAME)?;
    let digits = piece.get(at + NAME.len()..)?.trim_ascii_start();
    let len = digits.iter().take(9).take_while(|b| b.is_ascii_digit()).count();
    std::str::from_utf8(digits.get(..len)?).ok()?.parse().ok()
}

/// A reply's body with its bytes counted, and its end as the request's.
pub struct ClientBody<B> {
    inner: B,
    count: Arc<Count>,
    status: u16,
    left: Option<u64>,
    over: bool,
}

impl<B: Body<Data = Bytes>> ClientBody<B> {
    /// `inner` is what the client gets with `status`.
    pub fn new(inner: B, count: Arc<Count>, status: u16) -> Self {
        let left = inner.size_hint().exact();
        count.replied(status);
        Self { inner, count, status, left, over: false }
    }
}

impl<B> Pieces for ClientBody<B>
where
    B: Body<Data = Bytes> + Unpin + Send,
    B::Error: std::fmt::Display,
{
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        if self.over {
            return Poll::Ready(None);
        }
        loop {
            let frame = std::task::ready!(Pin::new(&mut self.inner).poll_frame(cx));
            match frame {
                Some(Ok(frame)) => {
                    let Ok(piece) = frame.into_data() else { continue };
                    if piece.is_empty() {
                        continue;
                    }
                    self.count.bytes(piece.len() as u64);
                    // One failed part of a joined reply fails the whole: what follows its error event is not sent.
                    self.over = self.count.has_outcome();
                    if let Some(left) = &mut self.left {
                        *left = left.saturating_sub(piece.len() as u64);
                        if *left == 0 {
                            // With a length the server does not ask for the end of the body.
                            self.end();
                        }
                    }
                    return Poll::Ready(Some(Ok(piece)));
                }
                Some(Err(error)) => {
                    self.over = true;
                    return Poll::Ready(Some(Err(Cut(error.to_string()))));
                }
                None => {
                    self.end();
                    self.over = true;
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn length(&self) -> Option<u64> {
        self.left
    }
}

impl<B> ClientBody<B> {
    fn end(&self) {
        if !self.count.has_outcome() {
            self.count.outcome(ClientOutcome::Ok, self.status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::completion_tokens;

    #[test]
    fn the_last_count_of_a_piece_is_taken() {
        assert_eq!(completion_tokens(br#"{"completion_tokens": 3}{"completion_tokens":17,"x"#), Some(17));
        assert_eq!(completion_tokens(br#"{"completion_tokens":null}"#), None);
        assert_eq!(completion_tokens(b"{}"), None);
    }
}
