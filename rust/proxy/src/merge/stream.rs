//! Event streams: decode's events as they come, byte for byte; those with a field that prefill alone knows wait for it.
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame};
use memchr::memmem;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::Name;
use r3router_core::r3::outline::Outline;
use r3router_core::sse::{Piece, Splitter};
use r3router_core::wire::Route;

use super::intake::{As, Fed, Intake, Payload};
use super::json::{Waiting, begin_payload};
use super::prefill::{PrefillPart, draft, far, pull, settle};
use super::read::poll_next;
use super::rope::{Rope, Unwind, Weaver};
use super::weave::{self, Reply, weave};
use super::{Account, Plan};
use crate::errors::error_json;
use crate::store::Arena;

/// An event that is complete: its bytes, and where its JSON is.
#[derive(Debug)]
struct Event {
    text: Bytes,
    json: std::ops::Range<usize>,
    /// Their offsets count from the JSON's start.
    payloads: Vec<Payload>,
}

impl Event {
    fn json(&self) -> &[u8] {
        &self.text[self.json.clone()]
    }
}

type Pulling = Pin<Box<dyn Future<Output = Result<Event, Error>> + Send>>;

/// Decode's events with prefill's part merged in; a body without a length. An error after the start is one event
/// `data: {"error": ...}` and the end; the body itself never fails.
pub struct MergedStream<B, F> {
    body: B,
    prefill: Waiting<F>,
    plan: Plan,
    arena: Arena,
    splitter: Splitter,
    intake: Intake,
    /// Where the JSON of the event that is coming in starts and, after its line, ends.
    json: Option<(usize, usize)>,
    /// What is left of a chunk.
    input: Bytes,
    /// A payload has started, and prefill's part must tell how to read it.
    opened: Option<Name>,
    /// An event that waits for prefill's part.
    waiting: Option<Event>,
    /// An event whose rows are being pulled from the engine's host.
    pulling: Option<Pulling>,
    /// An event with a payload that waits for the one behind it, which may count the tokens.
    held: Option<Event>,
    out: VecDeque<Unwind>,
    account: Account,
    error: Option<Error>,
    /// A payload was merged, or the reply has none for a reason.
    settled: bool,
    echoed: bool,
    ended: bool,
}

impl<B, F> MergedStream<B, F> {
    /// Figures so far; complete when the stream has ended.
    pub fn account(&self) -> Account {
        self.account
    }

    /// The error that ended the stream, when one did.
    pub fn error(&self) -> Option<&Error> {
        self.error.as_ref()
    }
}

/// See [`super::merge_sse`].
pub(super) fn merge<B, F>(body: B, prefill: F, plan: Plan, arena: Arena) -> MergedStream<B, F>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    F: Future<Output = Result<PrefillPart, Error>>,
{
    MergedStream {
        body,
        prefill: Waiting::Pending(Box::pin(prefill)),
        splitter: Splitter::default(),
        intake: Intake::new(plan.wanted(), Source::Decode, plan.decode.clone(), &arena),
        arena,
        json: None,
        input: Bytes::new(),
        opened: None,
        waiting: None,
        pulling: None,
        held: None,
        out: VecDeque::new(),
        account: Account::default(),
        error: None,
        // What one engine sends in-line is its own affair.
        settled: !(plan.routed_experts || plan.indexer_topk) || (plan.unsplit && !(plan.by_ref && plan.routed_experts)),
        echoed: false,
        ended: false,
        plan,
    }
}

/// The one event that tells a client that its stream has failed.
pub fn error_event(e: &Error) -> Bytes {
    Bytes::from(format!("data: {}\n\n", error_json(e)))
}

impl<B, F> MergedStream<B, F>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    F: Future<Output = Result<PrefillPart, Error>>,
{
    fn fail(&mut self, e: Error) {
        self.held = None;
        self.send(Rope { text: error_event(&e), ..Rope::default() });
        self.error = Some(e);
        self.ended = true;
    }

    fn send(&mut self, rope: Rope) {
        if rope.len() > 0 {
            self.out.push_back(Unwind::new(rope));
        }
    }

    /// Takes in what is left of the chunk, up to the next event or payload. `true` when an event is complete.
    fn take_in(&mut self) -> Result<bool, Error> {
        let chunk = self.input.clone();
        let mut input = &chunk[..];
        let mut complete = false;
        while let Some(piece) = self.splitter.step(&mut input) {
            match piece {
                Piece::Raw(raw) => {
                    // A line of data has ended; a second one would be another piece of the same value.
                    self.intake.text.extend_from_slice(raw);
                }
                Piece::Data(mut data) => {
                    if self.json.is_none() {
                        self.intake.restart();
                        self.json = Some((self.intake.text.len(), 0));
                    }
                    let before = data;
                    let opened = self.intake.feed(&chunk, &mut data)?;
                    if let Some(json) = &mut self.json {
                        json.1 = self.intake.text.len();
                    }
                    if let Fed::Opened(name) = opened {
                        self.opened = Some(name);
                        // The splitter has passed this data on already: what is left of it is still to be fed.
                        let used = before.len() - data.len();
                        let at = chunk.len() - input.len() - before.len() + used;
                        self.input = chunk.slice(at..);
                        // It is inside a data line, and stays there for what comes again.
                        self.splitter.in_data();
                        return Ok(false);
                    }
                }
                Piece::End => {
                    complete = true;
                    break;
                }
            }
        }
        self.input = chunk.slice(chunk.len() - input.len()..);
        Ok(complete)
    }

    /// The event that has come in.
    fn take_event(&mut self) -> Event {
        let (start, end) = self.json.take().unwrap_or((0, 0));
        let mut payloads = std::mem::take(&mut self.intake.payloads);
        for p in &mut payloads {
            p.at -= start;
        }
        let text = self.intake.take_text();
        let json = &text[start..end];
        let end = start + json.trim_ascii_end().len();
        Event { text, json: start..end, payloads }
    }

    /// Deals with an event that is complete. It may come back in `held`.
    fn event(&mut self, mut event: Event) -> Result<(), Error> {
        let json = event.json();
        let done = json == b"[DONE]";
        let has = |what: &[u8]| memmem::find(json, what).is_some();
        let echo =
            self.plan.logprobs && self.plan.route == Route::Completions && !self.echoed && has(b"\"logprobs\":{");
        let inputs = self.plan.logprobs && self.plan.route != Route::Completions && has(b"\"input_");
        let counts =
            has(b"\"finish_reason\":{") || has(b"\"finish_reason\":\"") || has(b"\"usage\":{") || has(b"\"error\"");
        if !json.is_empty() && !done {
            self.account.events += 1;
        }
        if done {
            // The end is where upstream ends: reading on to it keeps the connection good for the next request.
            self.flush(None)?;
            self.missing()?;
        } else if echo || inputs || counts || !event.payloads.is_empty() {
            let finished = self.lacks() && self.plan.route == Route::Generate && has(b"\"finish_reason\":{");
            let merges = echo || inputs || finished || !event.payloads.is_empty();
            let outline = match Outline::read(json, Source::Decode) {
                Ok(outline) => outline,
                Err(e) if merges => return Err(super::resolve::at(&self.plan, e)),
                // Whatever it is, it passes as it is.
                Err(_) => Outline::default(),
            };
            settle(&mut event.payloads, &outline)?;
            self.note(&outline);
            let first = outline.elements.first();
            let output = first.and_then(r3router_core::r3::outline::Element::completion_tokens);
            self.flush(output)?;
            let usage = first
                .is_some_and(|e| e.usage.is_some() && e.choices.is_empty() && e.sglext.is_none() && e.meta.is_none());
            if usage && self.lacks() && output.is_some_and(|o| o <= 1) {
                self.put_in(&event, output)?;
            }
            if usage && self.plan.hide_usage {
                return Ok(());
            }
            if !event.payloads.is_empty() && output.is_none() {
                // The event behind it may count the tokens.
                self.held = Some(event);
                return Ok(());
            }
            if merges {
                // After one output token decode has no payload: prefill's rows are all there are, and have no place of their own.
                let lone = finished && event.payloads.is_empty() && output.is_some_and(|o| o <= 1);
                return self.merged(&event, &outline, None, lone);
            }
        } else if !json.is_empty() {
            self.flush(None)?;
        }
        self.send(Rope { text: event.text, ..Rope::default() });
        Ok(())
    }

    fn note(&mut self, outline: &Outline) {
        for e in &outline.elements {
            self.account.prompt_tokens = e.prompt_tokens().or(self.account.prompt_tokens);
            self.account.completion_tokens = e.completion_tokens().or(self.account.completion_tokens);
            self.account.aborted |= e.aborted();
            if e.error {
                self.account.engine_error = true;
                self.settled = true;
            }
        }
        self.settled |= self.account.aborted;
    }

    /// Merges the event that was held, now that the one behind it is known.
    fn flush(&mut self, output: Option<u32>) -> Result<(), Error> {
        let Some(event) = self.held.take() else { return Ok(()) };
        let outline = Outline::read(event.json(), Source::Decode).map_err(|e| super::resolve::at(&self.plan, e))?;
        self.merged(&event, &outline, output, false)
    }

    /// Whether a payload is owed and has not come.
    fn lacks(&self) -> bool {
        !self.settled && (self.plan.routed_experts || self.plan.indexer_topk)
    }

    /// The event that OpenAI routes send a payload in, in front of the `usage` event and made of it, for prefill's rows alone.
    fn put_in(&mut self, usage: &Event, output: Option<u32>) -> Result<(), Error> {
        const USAGE: &[u8] = b"\"usage\":";
        let json = usage.json();
        let Some(at) = memmem::rfind(json, USAGE) else { return Ok(()) };
        let json = [&json[..at], USAGE, b"null}"].concat();
        let outline = Outline::read(&json, Source::Decode).map_err(|e| super::resolve::at(&self.plan, e))?;
        let text = [b"data: ", &json[..], b"\n\n"].concat();
        let event = Event { text: text.into(), json: 6..6 + json.len(), payloads: Vec::new() };
        self.merged(&event, &outline, output, true)
    }

    /// `whole`: a payload that is owed is put into this event, since decode has none.
    fn merged(&mut self, event: &Event, outline: &Outline, output: Option<u32>, whole: bool) -> Result<(), Error> {
        self.settled |= whole || !event.payloads.is_empty();
        let reply = Reply { text: event.json(), outline, payloads: &event.payloads };
        let output = output.or(self.account.completion_tokens);
        let context = weave::Context { output, whole, echoed: self.echoed };
        let (prefill, account) = (self.prefill.part(), &mut self.account);
        if let Waiting::Done(part) = &self.prefill
            && let Err(e) = &**part
            && !account.aborted
        {
            return Err(e.clone());
        }
        let merged = weave(&self.plan, &reply, prefill, context, account, &self.arena)?;
        self.echoed |= outline.elements.iter().any(|e| e.choices.iter().any(|c| !c.logprobs.is_empty()));
        let whole = Rope { text: event.text.clone(), ..Rope::default() };
        let mut out = Weaver::default();
        out.slice(&whole, 0, event.json.start);
        out.slice(&merged, 0, merged.text.len());
        out.slice(&whole, event.json.end, event.text.len());
        let rope = out.finish();
        self.send(rope);
        Ok(())
    }

    /// The stream is over: what was asked for must have come.
    fn missing(&self) -> Result<(), Error> {
        if self.settled {
            return Ok(());
        }
        let name = if self.plan.routed_experts { Name::RoutedExperts } else { Name::IndexerTopk };
        Err(super::resolve::missing(&self.plan, name, Source::Decode))
    }

    /// Whether the next event needs prefill's part.
    fn waits(&self, event: &Event) -> bool {
        let has = |what: &[u8]| memmem::find(event.json(), what).is_some();
        let held = self.held.is_some();
        let logprobs = self.plan.logprobs
            && (has(b"\"input_") || (self.plan.route == Route::Completions && has(b"\"logprobs\":{")));
        let lacks = self.lacks() && (has(b"\"finish_reason\":{") || has(b"\"usage\":{"));
        held || logprobs || lacks || !event.payloads.is_empty()
    }

    fn end(&mut self) -> Result<(), Error> {
        self.ended = true;
        if self.intake.text.is_empty() {
            self.flush(None)?;
            return self.missing();
        }
        // The last event came without its empty line; what is whole passes as it is.
        let whole = self.json.is_none() || self.intake.complete();
        let event = self.take_event();
        if event.json() != b"[DONE]" && !whole {
            let message = "the engine's stream ended in the middle of an event";
            return Err(super::resolve::at(&self.plan, Error::new(Kind::Reset, Source::Decode, message)));
        }
        self.event(event)?;
        self.flush(None)?;
        self.missing()
    }
}

impl<B, F> Body for MergedStream<B, F>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    F: Future<Output = Result<PrefillPart, Error>>,
{
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        loop {
            while let Some(front) = this.out.front_mut() {
                if let Some(chunk) = front.chunk() {
                    return Poll::Ready(Some(Ok(Frame::data(chunk))));
                }
                this.out.pop_front();
            }
            if this.ended {
                return Poll::Ready(None);
            }
            if let Err(e) = ready!(this.step(cx)) {
                this.fail(e);
            }
        }
    }
}

impl<B, F> Unpin for MergedStream<B, F> {}

impl<B, F> MergedStream<B, F>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    F: Future<Output = Result<PrefillPart, Error>>,
{
    /// One move: something was sent, or something came in, or the stream has ended.
    fn step(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let prefill = self.prefill.poll(cx);
        if let Waiting::Done(part) = &self.prefill
            && let Err(e) = &**part
            && self.account.events == 0
            && self.plan.merges()
        {
            // Before the first token decode waits for prefill's KV, which will not come.
            return Poll::Ready(Err(e.clone()));
        }
        if let Some(name) = self.opened {
            ready!(prefill);
            let from = self.json.map_or(0, |(start, _)| start);
            let begin = begin_payload(&self.plan, &self.intake, from, name, self.prefill.part());
            let held = match self.plan.unsplit.then(|| draft(&self.plan, name)).transpose() {
                Ok(held) => held.unwrap_or(As::Rows),
                Err(e) => return Poll::Ready(Err(e)),
            };
            self.intake.begin(name, begin, held);
            self.opened = None;
        }
        if let Some(pulling) = &mut self.pulling {
            let event = ready!(pulling.as_mut().poll(cx));
            self.pulling = None;
            self.waiting = Some(event?);
        }
        if let Some(event) = self.waiting.take() {
            if prefill.is_pending() {
                self.waiting = Some(event);
                return Poll::Pending;
            }
            return Poll::Ready(self.event(event));
        }
        if self.input.is_empty() && !self.splitter.at_end() {
            match ready!(poll_next(&mut self.body, cx, Source::Decode, &self.plan))? {
                Some(chunk) => self.input = chunk,
                None => return Poll::Ready(self.end()),
            }
        }
        if self.take_in()? {
            let mut event = self.take_event();
            if far(&event.payloads, &self.plan) {
                let (plan, arena) = (self.plan.clone(), self.arena.clone());
                self.pulling = Some(Box::pin(async move {
                    pull(&mut event.payloads, &plan, Source::Decode, &arena).await?;
                    Ok(event)
                }));
                return Poll::Ready(Ok(()));
            }
            if self.waits(&event) && prefill.is_pending() {
                self.waiting = Some(event);
                return Poll::Pending;
            }
            return Poll::Ready(self.event(event));
        }
        Poll::Ready(Ok(()))
    }
}
