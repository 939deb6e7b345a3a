//! Event streams of a split request joined to one: every event with its right `index`, one usage event, one `[DONE]`.
//!
//! Events go out whole, in the order in which they come. An event that is longer than [`LOOK`] is not held: its beginning shows all that
//! has to change, and the rest follows as it comes.
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::outline::{Outline, Usage};
use r3router_core::sse::{Piece, Splitter};
use r3router_core::wire::{Facts, Route, Span};

use super::join::figure;
use super::stream::error_event;

/// Bytes of an event that are looked at before it is let through.
const LOOK: usize = 64 << 10;

/// One of the streams, and the event that is coming in from it.
struct Leg<S> {
    body: Option<S>,
    splitter: Splitter,
    input: Bytes,
    event: BytesMut,
    /// Where the JSON starts in `event`.
    json: Option<usize>,
    /// The beginning has gone out, the rest goes as it comes.
    open: bool,
    usage: Option<Bytes>,
}

/// Joins the merged event streams of a split request: events as they come with their right `index`, one usage event in sum, one
/// `[DONE]`. A stream that fails, or whose engine says `error`, ends the whole; dropping this drops all of them.
pub struct JoinedStream<S> {
    legs: Vec<Leg<S>>,
    route: Route,
    samples: usize,
    /// Whether events get an index at all.
    indexed: bool,
    /// The leg that has an event half out, or whose turn is next.
    turn: usize,
    done: bool,
}

/// See [`super::join_sse`].
pub(super) fn join<S>(streams: Vec<S>, facts: &Facts) -> JoinedStream<S> {
    let leg = |body| Leg {
        body: Some(body),
        splitter: Splitter::default(),
        input: Bytes::new(),
        event: BytesMut::new(),
        json: None,
        open: false,
        usage: None,
    };
    JoinedStream {
        indexed: facts.route != Route::Generate || facts.listed,
        legs: streams.into_iter().map(leg).collect(),
        route: facts.route,
        samples: facts.samples as usize,
        turn: 0,
        done: false,
    }
}

/// What a leg gave.
enum Given {
    Bytes(Bytes),
    /// Nothing to send, but it moved on.
    Moved,
    /// The whole stream ends behind these bytes.
    Last(Bytes),
    Ended,
}

impl<S> JoinedStream<S>
where
    S: Body<Data = Bytes> + Unpin,
    S::Error: std::fmt::Display,
{
    /// What leg `i` has now.
    fn poll_leg(&mut self, i: usize, cx: &mut Context<'_>) -> Poll<Given> {
        let Some(leg) = self.legs.get_mut(i) else { return Poll::Ready(Given::Ended) };
        let Some(body) = &mut leg.body else { return Poll::Ready(Given::Ended) };
        if leg.input.is_empty() && !leg.splitter.at_end() {
            match Pin::new(body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => {
                    leg.input = frame.into_data().unwrap_or_default();
                    return Poll::Ready(Given::Moved);
                }
                Poll::Ready(None) => {
                    leg.body = None;
                    let rest = std::mem::take(&mut leg.event).freeze();
                    let is_done = rest.trim_ascii() == b"data: [DONE]";
                    return Poll::Ready(if rest.is_empty() || is_done { Given::Ended } else { Given::Bytes(rest) });
                }
                Poll::Ready(Some(Err(e))) => {
                    let message = format!("the stream of one sample broke: {e}");
                    let e = Error::new(Kind::Reset, Source::Decode, message);
                    return Poll::Ready(Given::Last(error_event(&e)));
                }
            }
        }
        if leg.open {
            return Poll::Ready(self.pass(i));
        }
        Poll::Ready(self.take_in(i))
    }

    /// The rest of an event whose beginning is out.
    fn pass(&mut self, i: usize) -> Given {
        let leg = &mut self.legs[i];
        let chunk = leg.input.clone();
        let mut input = &chunk[..];
        while let Some(piece) = leg.splitter.step(&mut input) {
            if piece == Piece::End {
                leg.open = false;
                break;
            }
        }
        let used = chunk.len() - input.len();
        leg.input = chunk.slice(used..);
        if used == 0 { Given::Moved } else { Given::Bytes(chunk.slice(..used)) }
    }

    fn take_in(&mut self, i: usize) -> Given {
        let leg = &mut self.legs[i];
        let chunk = leg.input.clone();
        let mut input = &chunk[..];
        let mut complete = false;
        while let Some(piece) = leg.splitter.step(&mut input) {
            match piece {
                Piece::Raw(raw) => leg.event.extend_from_slice(raw),
                Piece::Data(data) => {
                    leg.json = leg.json.or(Some(leg.event.len()));
                    leg.event.extend_from_slice(data);
                }
                Piece::End => {
                    complete = true;
                    break;
                }
            }
            if leg.event.len() > LOOK {
                leg.open = true;
                break;
            }
        }
        leg.input = chunk.slice(chunk.len() - input.len()..);
        if complete || leg.open { self.event(i, complete) } else { Given::Moved }
    }

    /// An event is complete, or long enough.
    fn event(&mut self, i: usize, complete: bool) -> Given {
        let (route, indexed) = (self.route, self.indexed);
        let leg = &mut self.legs[i];
        let event = std::mem::take(&mut leg.event).freeze();
        let Some(start) = leg.json.take() else { return Given::Bytes(event) };
        let json = &event[start..];
        if complete && json.trim_ascii_end() == b"[DONE]" {
            return Given::Moved;
        }
        let outline = Outline::so_far(json);
        let Some(e) = outline.elements.first() else { return Given::Bytes(event) };
        if e.error && e.choices.is_empty() && e.meta.is_none() {
            return Given::Last(event);
        }
        let alone = e.choices.is_empty() && e.sglext.is_none() && e.meta.is_none();
        if complete && alone && e.usage.is_some() {
            leg.usage = Some(event.slice(start..));
            return Given::Moved;
        }
        if !indexed {
            return Given::Bytes(event);
        }
        let mut edits: Vec<(Span, String)> = Vec::new();
        let behind_brace = |s: Span| Span { start: s.start + 1, end: s.start + 1 };
        if route == Route::Generate {
            let comma = if e.filled { "," } else { "" };
            match e.index {
                Some(index) => edits.push((index, i.to_string())),
                None => edits.push((behind_brace(e.span), format!("\"index\":{i}{comma}"))),
            }
        } else {
            edits.extend(e.choices.iter().filter_map(|c| c.index).map(|index| (index, i.to_string())));
            if let Some(ext) = e.sglext.as_ref().filter(|_| e.choices.is_empty() && self.legs.len() > 1) {
                // The engine knows one such event only; with several the client must know whose it is.
                let comma = if ext.filled { "," } else { "" };
                edits.push((behind_brace(ext.span), format!("\"index\":{i}{comma}")));
            }
        }
        edits.sort_by_key(|(span, _)| span.start);
        let mut out = BytesMut::with_capacity(event.len() + 16);
        let mut at = 0;
        for (span, text) in edits {
            out.extend_from_slice(&event[at..start + span.start]);
            out.extend_from_slice(text.as_bytes());
            at = start + span.end;
        }
        out.extend_from_slice(&event[at..]);
        Given::Bytes(out.freeze())
    }

    /// The usage of all legs and the end mark.
    fn finish(&mut self) -> Bytes {
        let mut out = BytesMut::new();
        let texts: Vec<&Bytes> = self.legs.iter().filter_map(|l| l.usage.as_ref()).collect();
        if !texts.is_empty() && texts.len() == self.legs.len() {
            let outlines: Vec<Outline> = texts.iter().map(|t| Outline::so_far(t)).collect();
            let usages: Vec<(&[u8], &Usage)> = texts
                .iter()
                .zip(&outlines)
                .filter_map(|(t, o)| Some((&t[..], o.elements.first()?.usage.as_ref()?)))
                .collect();
            out.extend_from_slice(b"data: ");
            let mut at = 0;
            for f in usages.first().map_or(&[][..], |(_, u)| &u.figures) {
                out.extend_from_slice(&texts[0][at..f.value.start]);
                out.extend_from_slice(figure(&usages, f, self.samples).to_string().as_bytes());
                at = f.value.end;
            }
            out.extend_from_slice(texts[0][at..].trim_ascii_end());
            out.extend_from_slice(b"\n\n");
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        out.freeze()
    }
}

impl<S> Unpin for JoinedStream<S> {}

impl<S> Body for JoinedStream<S>
where
    S: Body<Data = Bytes> + Unpin,
    S::Error: std::fmt::Display,
{
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        if this.done {
            return Poll::Ready(None);
        }
        let n = this.legs.len();
        let (mut waiting, mut ended) = (false, 0);
        while ended < n {
            // An event that is half out must be finished before another leg may speak.
            let open = this.legs.iter().position(|l| l.open);
            let i = open.unwrap_or(this.turn % n);
            match this.poll_leg(i, cx) {
                Poll::Ready(Given::Bytes(bytes)) => {
                    this.turn = i + usize::from(!this.legs[i].open);
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Poll::Ready(Given::Last(bytes)) => {
                    this.done = true;
                    this.legs.clear();
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Poll::Ready(Given::Moved) => {
                    // It is worth another look at once; the count of legs without anything starts anew.
                    ended = 0;
                    waiting = false;
                }
                Poll::Pending if open.is_some() => return Poll::Pending,
                Poll::Pending => {
                    waiting = true;
                    ended += 1;
                    this.turn = i + 1;
                }
                Poll::Ready(Given::Ended) => {
                    if let Some(leg) = this.legs.get_mut(i) {
                        leg.open = false;
                    }
                    ended += 1;
                    this.turn = i + 1;
                }
            }
        }
        if waiting {
            return Poll::Pending;
        }
        this.done = true;
        Poll::Ready(Some(Ok(Frame::data(this.finish()))))
    }
}
