//! Prefill's reply: what of it the merge needs, and nothing else.
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::descriptor::Descriptor;
use r3router_core::r3::outline::Outline;
use r3router_core::r3::{Dtype, Name, Wanted};

use super::intake::{As, Begin, Fed, Held, Intake, Payload};
use super::place::{Place, payload};
use super::read::next;
use super::{Hold, Plan};
use crate::store::{Draft, Rows};

/// Less text than this is not worth a moment's wait.
const LARGE_TEXT: u64 = 1 << 20;
/// How long large rows wait for a sign of decode's reply.
const MOMENT: Duration = Duration::from_millis(10);

/// What prefill's reply gives to the merge. Dropping it gives its arena bytes back.
#[derive(Debug, Default)]
pub struct PrefillPart {
    /// `prompt_tokens` as the engine counted them.
    pub prompt_tokens: Option<u32>,
    /// `cached_tokens`.
    pub cached_tokens: Option<u32>,
    /// Bytes of the reply.
    pub bytes: u64,
    pub(super) text: Bytes,
    pub(super) outline: Outline,
    pub(super) payloads: Vec<Payload>,
}

impl PrefillPart {
    /// The payload for a place of decode's reply.
    pub(super) fn payload(&self, element: usize, place: Place, name: Name) -> Option<&Payload> {
        let e = self.outline.elements.get(element)?;
        let at = |place: Place| payload(&self.payloads, name, place.of(e).and_then(|m| m.payload(name)));
        at(place).or_else(|| {
            // A streamed reply may carry at response level what a whole one carries in its only choice.
            let mut found = Place::all(e).filter_map(at);
            found.next().filter(|_| found.next().is_none())
        })
    }
}

/// See [`super::read_prefill`].
pub(super) async fn read<B>(
    mut body: B,
    content_length: Option<u64>,
    plan: &Plan,
    arena: &crate::store::Arena,
) -> Result<PrefillPart, Error>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let mut intake = Intake::new(plan.wanted(), Source::Prefill, plan.prefill.clone(), arena);
    while let Some(chunk) = next(&mut body, Source::Prefill, plan).await? {
        let mut input = &chunk[..];
        while let Fed::Opened(name) = intake.feed(&chunk, &mut input)? {
            // What is left of the reply bounds the numbers: four text bytes are three bytes, four bytes are a number.
            let left = content_length.map_or(0, |len| len.saturating_sub(intake.bytes));
            let hint = usize::try_from(left / 4 * 3 / 4).unwrap_or(0);
            // A text that does not fit is decoded after all.
            let text = if holds_text(plan, left).await { arena.charge_spare(left).ok() } else { None };
            let held = text.map_or_else(|| draft(plan, name), |charge| Ok(As::Text(charge)))?;
            intake.begin(name, Begin { hint, ..Begin::default() }, held);
        }
    }
    let mut part = finish(intake, plan)?;
    pull(&mut part.payloads, plan, Source::Prefill, arena).await?;
    Ok(part)
}

/// Whether rows in the `left` bytes of a reply wait as text: where decode's reply is there already, as with one token of output, or
/// comes within a moment.
async fn holds_text(plan: &Plan, left: u64) -> bool {
    match &plan.due {
        _ if plan.by_ref || left == 0 => false,
        Some(due) if left >= LARGE_TEXT => due.within(MOMENT).await,
        _ => plan.hold == Hold::Text,
    }
}

/// Rows that become an object go straight into its file, where their dtype is known before they come.
pub(super) fn draft(plan: &Plan, name: Name) -> Result<As, Error> {
    let refs = plan.refs.as_ref().filter(|refs| plan.by_ref && name == Name::RoutedExperts && !refs.store.spills());
    match refs.and_then(|refs| Some((refs, refs.shape.experts?))) {
        Some((refs, experts)) => Ok(As::Draft(Draft::new(&refs.store, Dtype::for_experts(experts))?)),
        None => Ok(As::Rows),
    }
}

/// Whether rows must be pulled from an engine's host before the reply can be made.
pub(super) fn far(payloads: &[Payload], plan: &Plan) -> bool {
    plan.agents.is_some() && payloads.iter().any(|p| is_far(p, plan))
}

/// Rows of the indexer have no reference form: they go in the reply whatever was asked.
fn is_far(payload: &Payload, plan: &Plan) -> bool {
    matches!(payload.held, Held::Elsewhere(_)) && !(plan.by_ref && payload.name == Name::RoutedExperts)
}

/// Pulls rows that an engine keeps on its host, when the client wants them in the reply.
pub(super) async fn pull(
    payloads: &mut [Payload],
    plan: &Plan,
    source: Source,
    arena: &crate::store::Arena,
) -> Result<(), Error> {
    if !far(payloads, plan) {
        return Ok(());
    }
    let Some(agents) = &plan.agents else { return Ok(()) };
    // A chat reply with `return_meta_info` of SGLang before 0.5.23 says its rows twice, and an object is let go when it has been read.
    let mut pulled: Vec<(Descriptor, Arc<Rows>)> = Vec::new();
    for payload in payloads {
        if !is_far(payload, plan) {
            continue;
        }
        let Held::Elsewhere(d) = &payload.held else { continue };
        let rows = match pulled.iter().find(|(known, _)| known == d) {
            Some((_, rows)) => Arc::clone(rows),
            None => {
                let rows = agents.pull(d, source, arena).await.map_err(|e| super::resolve::at(plan, e))?;
                let rows = Arc::new(rows);
                pulled.push((d.clone(), Arc::clone(&rows)));
                rows
            }
        };
        payload.len = rows.items() * Dtype::I32.size() as u64;
        (payload.from, payload.wire, payload.held) = (0, Dtype::I32, Held::Rows(rows));
    }
    Ok(())
}

fn finish(mut intake: Intake, plan: &Plan) -> Result<PrefillPart, Error> {
    let text = intake.take_text();
    if !intake.complete() {
        return Err(cut_short(Source::Prefill, plan, intake.bytes));
    }
    let outline = Outline::read(&text, Source::Prefill).map_err(|e| super::resolve::at(plan, e))?;
    settle(&mut intake.payloads, &outline)?;
    let first = outline.elements.first();
    let cached = first.and_then(|e| e.metas().find_map(|m| m.cached_tokens));
    Ok(PrefillPart {
        prompt_tokens: first.and_then(r3router_core::r3::outline::Element::prompt_tokens),
        cached_tokens: cached,
        bytes: intake.bytes,
        text,
        outline,
        payloads: intake.payloads,
    })
}

/// Reads every payload as the dtype that its object names.
pub(super) fn settle(payloads: &mut [Payload], outline: &Outline) -> Result<(), Error> {
    for e in &outline.elements {
        for meta in Place::all(e).filter_map(|p| p.of(e)) {
            let at = meta.routed_experts.map(|m| m.value.start + 1);
            for p in payloads.iter_mut().filter(|p| p.name == Name::RoutedExperts && Some(p.at) == at) {
                p.settle(meta.dtype)?;
            }
        }
    }
    Ok(())
}

/// A reply ended before its JSON did.
pub(super) fn cut_short(source: Source, plan: &Plan, bytes: u64) -> Error {
    let mut e = Error::new(Kind::EngineProtocol, source, "the engine's reply is no whole JSON value");
    e.measured = Some(bytes as f64);
    super::resolve::at(plan, e)
}

impl Plan {
    pub(super) fn wanted(&self) -> Wanted {
        Wanted { routed_experts: self.routed_experts, indexer_topk: self.indexer_topk }
    }
}
