//! Whole replies: both legs read to their ends, checked, and merged to a body with an exact length.
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use r3router_core::error::{Error, Source};
use r3router_core::r3::Name;
use r3router_core::r3::outline::Outline;

use super::intake::{As, Begin, Fed, Intake};
use super::place::{self, Place};
use super::prefill::{PrefillPart, cut_short, draft, pull, settle};
use super::read::poll_next;
use super::resolve::{Sequence, begin};
use super::rope::{Rope, Unwind};
use super::weave::{self, Reply, weave};
use super::{Account, Plan};
use crate::sink::Sink;
use crate::store::Arena;

/// A reply ready to be sent: everything is checked. A body with an exact length.
#[derive(Debug)]
pub struct Merged {
    /// Figures.
    pub account: Account,
    pub(super) rope: Rope,
    unwind: Option<Unwind>,
}

impl Merged {
    pub(super) fn new(rope: Rope, account: Account) -> Self {
        Self { account, rope, unwind: None }
    }

    /// The same reply with its references put into another store. The objects that it named are let go: the sink has read them.
    ///
    /// # Errors
    /// As [`Sink::replace`].
    pub async fn sunk(self, sink: &Sink) -> Result<Self, Error> {
        if !self.rope.holes.is_empty() {
            // Rows that stand in the reply are not for the sink, and a reply with both is not asked for.
            return Ok(self);
        }
        let text = sink.replace(&self.rope.text).await?;
        Ok(Self::new(Rope { text: text.into(), ..Rope::default() }, self.account))
    }

    /// The exact `content-length` of what has not been taken out yet.
    pub fn content_length(&self) -> u64 {
        self.unwind.as_ref().map_or_else(|| self.rope.len(), Unwind::left)
    }
}

impl Body for Merged {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        let unwind = this.unwind.get_or_insert_with(|| Unwind::new(std::mem::take(&mut this.rope)));
        Poll::Ready(unwind.chunk().map(|chunk| Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.content_length() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.content_length())
    }
}

/// Prefill's part, while it is waited for and after.
pub(super) enum Waiting<F> {
    Pending(Pin<Box<F>>),
    Done(Box<Result<PrefillPart, Error>>),
}

impl<F: Future<Output = Result<PrefillPart, Error>>> Waiting<F> {
    /// Moves it on, whether or not anybody waits for it: it may be what drives the other leg.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Self::Pending(future) = self {
            match future.as_mut().poll(cx) {
                Poll::Ready(part) => *self = Self::Done(Box::new(part)),
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(())
    }

    /// The part, when it came and is good.
    pub(super) fn part(&self) -> Option<&PrefillPart> {
        match self {
            Self::Done(part) => part.as_ref().as_ref().ok(),
            Self::Pending(_) => None,
        }
    }
}

/// How the payload that has just started in decode's text is to be read.
pub(super) fn begin_payload(
    plan: &Plan,
    intake: &Intake,
    from: usize,
    name: Name,
    prefill: Option<&PrefillPart>,
) -> Begin {
    if plan.unsplit {
        return Begin::default();
    }
    let text = &intake.text[from..];
    let outline = Outline::so_far(text);
    let Some((i, place)) = place::opened(&outline, name, text.len()) else {
        return Begin { discard: true, ..Begin::default() };
    };
    let e = &outline.elements[i];
    let own = place.of(e).filter(|_| place != Place::Ext);
    let seen = Sequence {
        prompt: prefill.and_then(|p| weave::prompt(p, i, place)),
        output: own.and_then(|m| m.completion_tokens).or(e.completion_tokens()),
        ..Sequence::default()
    };
    begin(plan, name, prefill.and_then(|p| p.payload(i, place, name)), seen)
}

/// See [`super::merge_json`].
pub(super) async fn merge<B, F>(
    mut body: B,
    content_length: Option<u64>,
    prefill: F,
    plan: &Plan,
    arena: &Arena,
) -> Result<Merged, Error>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    F: Future<Output = Result<PrefillPart, Error>>,
{
    let mut prefill = pin!(Waiting::Pending(Box::pin(prefill)));
    let mut intake = Intake::new(plan.wanted(), Source::Decode, plan.decode.clone(), arena);
    loop {
        let chunk = poll_fn(|cx| {
            let _ = prefill.poll(cx);
            poll_next(&mut body, cx, Source::Decode, plan)
        })
        .await?;
        let Some(chunk) = chunk else { break };
        let mut input = &chunk[..];
        while let Fed::Opened(name) = intake.feed(&chunk, &mut input)? {
            // Prefill's rows show how wide a row is, and so how far decode's junk goes.
            poll_fn(|cx| prefill.poll(cx)).await;
            let mut how = begin_payload(plan, &intake, 0, name, prefill.part());
            if how.hint == 0 {
                // What is left of the reply bounds what comes: four text bytes are three bytes, four bytes are a number.
                let left = content_length.map_or(0, |len| len.saturating_sub(intake.bytes) / 4 * 3);
                how.hint = usize::try_from(left.saturating_sub(how.skip) / 4).unwrap_or(0);
            }
            let held = if plan.unsplit { draft(plan, name)? } else { As::Rows };
            intake.begin(name, how, held);
        }
    }
    let text = intake.take_text();
    if !intake.complete() {
        return Err(cut_short(Source::Decode, plan, intake.bytes));
    }
    let outline = Outline::read(&text, Source::Decode).map_err(|e| super::resolve::at(plan, e))?;
    settle(&mut intake.payloads, &outline)?;
    pull(&mut intake.payloads, plan, Source::Decode, arena).await?;
    poll_fn(|cx| prefill.poll(cx)).await;
    let aborted = outline.elements.iter().all(r3router_core::r3::outline::Element::aborted);
    if let Waiting::Done(part) = &*prefill
        && let Err(e) = &**part
        && !aborted
    {
        return Err(e.clone());
    }
    let mut account = Account::default();
    let reply = Reply { text: &text, outline: &outline, payloads: &intake.payloads };
    let context = weave::Context { whole: true, ..weave::Context::default() };
    let rope = weave(plan, &reply, prefill.part(), context, &mut account, arena)?;
    Ok(Merged::new(rope, account))
}
