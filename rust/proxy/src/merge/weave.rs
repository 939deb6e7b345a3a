//! One JSON value of decode's with prefill's part woven in. Bytes that are not merged stay as they are.
use std::sync::Arc;

use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::outline::{Element, Member, Meta, Outline, elements};
use r3router_core::r3::{Dtype, Name};
use r3router_core::wire::{Route, Span};

use super::intake::Payload;
use super::place::{Place, payload};
use super::prefill::PrefillPart;
use super::resolve::{Outcome, Sequence, resolve};
use super::rope::{Rope, Spliced, Weaver};
use super::{Account, Plan};
use crate::store::{Arena, Pin};

/// A change of decode's text: `[cut.start, cut.end)` goes, `put` comes.
struct Edit {
    cut: Span,
    put: Put,
}

enum Put {
    Text(Vec<u8>),
    Payload(Spliced),
    /// `before`, the payload in quotes, `after`.
    Member(String, Spliced, String),
}

/// A JSON value of decode's: its text, the base of its offsets, its payloads.
pub(super) struct Reply<'a> {
    pub(super) text: &'a [u8],
    pub(super) outline: &'a Outline,
    pub(super) payloads: &'a [Payload],
}

/// What the caller knows beside the value itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Context {
    /// `completion_tokens`, where the value does not say it.
    pub(super) output: Option<u32>,
    /// The value has to have the payloads (it is a whole reply).
    pub(super) whole: bool,
    /// Log-probabilities of choices were merged before (streams: only the first event has them).
    pub(super) echoed: bool,
}

/// Merges one value. `prefill` is `None` when its leg failed, which only an aborted reply survives.
pub(super) fn weave(
    plan: &Plan,
    reply: &Reply<'_>,
    prefill: Option<&PrefillPart>,
    context: Context,
    account: &mut Account,
    arena: &Arena,
) -> Result<Rope, Error> {
    let mut edits = Vec::new();
    let mut pins = Vec::new();
    for (i, e) in reply.outline.elements.iter().enumerate() {
        account.prompt_tokens = e.prompt_tokens().or(account.prompt_tokens);
        account.completion_tokens = e.completion_tokens().or(account.completion_tokens);
        account.aborted |= e.aborted();
        if plan.logprobs
            && let Some(p) = prefill
        {
            logprobs(plan, reply, i, e, p, context, &mut edits)?;
        }
        for name in [Name::RoutedExperts, Name::IndexerTopk] {
            let wanted = match name {
                Name::RoutedExperts => plan.routed_experts,
                Name::IndexerTopk => plan.indexer_topk,
            };
            if wanted {
                payloads(plan, reply, i, name, prefill, context, &mut edits, account, arena, &mut pins)?;
            }
        }
    }
    edits.sort_by_key(|e| e.cut.start);
    let mut out = Weaver::default();
    let mut at = 0;
    for edit in edits {
        out.text(&reply.text[at..edit.cut.start]);
        at = edit.cut.end;
        match edit.put {
            Put::Text(text) => out.text(&text),
            Put::Payload(p) => out.payload(p),
            Put::Member(before, p, after) => {
                out.text(before.as_bytes());
                out.payload(p);
                out.text(after.as_bytes());
            }
        }
    }
    out.text(&reply.text[at..]);
    out.pins(pins);
    Ok(out.finish())
}

#[allow(clippy::too_many_arguments)]
fn payloads(
    plan: &Plan,
    reply: &Reply<'_>,
    i: usize,
    name: Name,
    prefill: Option<&PrefillPart>,
    context: Context,
    edits: &mut Vec<Edit>,
    account: &mut Account,
    arena: &Arena,
    pins: &mut Vec<Arc<Pin>>,
) -> Result<(), Error> {
    let e = &reply.outline.elements[i];
    let mut places: Vec<Place> = Place::all(e)
        .filter(|p| payload(reply.payloads, name, p.of(e).and_then(|m| m.payload(name))).is_some())
        .collect();
    if places.is_empty() {
        if !context.whole || e.error {
            return Ok(());
        }
        places.push(Place::expected(plan.route, e));
    }
    // SGLang before 0.5.23 says the rows of a chat reply with `return_meta_info` in the choice and in `sglext`. A second reference to one
    // object would be one too many: who has read it by the first lets it go.
    let twice = plan.by_ref && name == Name::RoutedExperts && places.len() > 1;
    for place in places {
        let meta = place.of(e);
        let member = meta.and_then(|m| m.payload(name));
        if twice && place == Place::Ext {
            edits.extend(member.zip(meta).map(|(m, meta)| remove(reply.text, m, meta)));
            continue;
        }
        let decode = payload(reply.payloads, name, member);
        let own = meta.filter(|_| place != Place::Ext);
        let seq = Sequence {
            prompt: prefill.and_then(|p| prompt(p, i, place)).or(e.prompt_tokens()),
            output: own.and_then(|m| m.completion_tokens).or(e.completion_tokens()).or(context.output),
            retractions: own.map_or(0, |m| m.retractions),
            aborted: own.is_some_and(|m| m.aborted) || (own.is_none() && e.aborted()),
        };
        let prefill = prefill.and_then(|p| p.payload(i, place, name));
        account.r3_prefill += prefill.map_or(0, |p| p.text);
        account.r3_decode += decode.map_or(0, |p| p.text);
        match resolve(plan, name, prefill, decode, seq, reply.text, arena)? {
            Outcome::Untouched => {}
            Outcome::Absent => edits.extend(member.zip(meta).map(|(m, meta)| remove(reply.text, m, meta))),
            Outcome::Rows(spliced, items) => {
                if name == Name::RoutedExperts && items > 0 {
                    account.row_items = Some(items);
                }
                // Where decode has no rows it has not said either how to read them.
                let narrow = prefill.map(|p| p.wire).filter(|w| *w != Dtype::I32 && name == Name::RoutedExperts);
                let unnamed = narrow.filter(|_| decode.is_none() && meta.is_none_or(|m| m.dtype.is_none()));
                edits.push(put(e, place, name, member, decode.is_some(), spliced, unnamed));
            }
            Outcome::Reference(envelope, items, named) => {
                if items > 0 {
                    account.row_items = Some(items);
                }
                pins.extend(named);
                edits.push(refer(e, place, member, envelope));
            }
        }
    }
    Ok(())
}

pub(super) fn prompt(p: &PrefillPart, i: usize, place: Place) -> Option<u32> {
    let e = p.outline.elements.get(i)?;
    place.of(e).filter(|_| place != Place::Ext).and_then(|m| m.prompt_tokens).or(e.prompt_tokens())
}

/// The rows in their place: in decode's string, in the place of null, or as a member that decode left out; then with their dtype, when
/// decode has not named it.
fn put(
    e: &Element,
    place: Place,
    name: Name,
    member: Option<Member>,
    string: bool,
    spliced: Spliced,
    unnamed: Option<Dtype>,
) -> Edit {
    let dtype = unnamed.map_or_else(String::new, |d| format!(",\"{}_dtype\":\"{}\"", name.key(), d.name()));
    if let Some(m) = member {
        if string {
            let at = m.value.start + 1;
            return Edit { cut: Span { start: at, end: at }, put: Put::Payload(spliced) };
        }
        return Edit { cut: m.value, put: Put::Member("\"".to_owned(), spliced, format!("\"{dtype}")) };
    }
    let (at, before, after) = insertion(e, place);
    let before = format!("{before}\"{}\":\"", name.key());
    let after = format!("\"{dtype}{after}");
    Edit { cut: Span { start: at, end: at }, put: Put::Member(before, spliced, after) }
}

fn refer(e: &Element, place: Place, member: Option<Member>, envelope: String) -> Edit {
    if let Some(m) = member {
        return Edit { cut: Span { start: m.key.start, end: m.value.end }, put: Put::Text(envelope.into_bytes()) };
    }
    let (at, before, after) = insertion(e, place);
    Edit { cut: Span { start: at, end: at }, put: Put::Text(format!("{before}{envelope}{after}").into_bytes()) }
}

/// Where a new member of a place goes, and what has to stand around it.
fn insertion(e: &Element, place: Place) -> (usize, String, &'static str) {
    if let Some(meta) = place.of(e) {
        return (meta.span.end - 1, if meta.filled { "," } else { "" }.to_owned(), "");
    }
    let key = if place == Place::Meta { "meta_info" } else { "sglext" };
    (e.span.end - 1, format!("{}\"{key}\":{{", if e.filled { "," } else { "" }), "}")
}

/// Takes a member out of an object, with one of the commas beside it.
fn remove(text: &[u8], m: Member, meta: &Meta) -> Edit {
    let blank = |b: &u8| b.is_ascii_whitespace();
    let behind = text[m.value.end..meta.span.end].iter().take_while(|b| blank(b)).count();
    let mut cut = Span { start: m.key.start, end: m.value.end };
    if text[m.value.end + behind] == b',' {
        cut.end += behind + 1;
    } else {
        let before = text[meta.span.start..m.key.start].iter().rev().take_while(|b| blank(b)).count();
        if text[m.key.start - before - 1] == b',' {
            cut.start -= before + 1;
        }
    }
    Edit { cut, put: Put::Text(Vec::new()) }
}

fn logprobs(
    plan: &Plan,
    reply: &Reply<'_>,
    i: usize,
    e: &Element,
    prefill: &PrefillPart,
    context: Context,
    edits: &mut Vec<Edit>,
) -> Result<(), Error> {
    let from = prefill.outline.elements.get(i);
    let key = |text: &[u8], m: &Member| text[m.key.start..m.key.end].to_vec();
    for place in Place::all(e).filter(|p| *p != Place::Ext) {
        let Some(to) = place.of(e) else { continue };
        let p = from.and_then(|from| place.of(from));
        // Decode's own list is empty, so one that prefill does not have would be silently lost.
        let has =
            |own: &Member| p.is_some_and(|p| p.inputs.iter().any(|m| key(&prefill.text, m) == key(reply.text, own)));
        if let Some(lost) = to.inputs.iter().find(|own| !has(own) && !e.aborted()) {
            let name = String::from_utf8_lossy(&key(reply.text, lost)).into_owned();
            let e = Error::new(Kind::EngineProtocol, Source::Prefill, format!("prefill's reply has no {name}"));
            return Err(super::resolve::at(plan, e));
        }
        let Some(p) = p else { continue };
        if to.inputs.is_empty() && !context.whole {
            continue;
        }
        let mut missing = Vec::new();
        for m in &p.inputs {
            let value = &prefill.text[m.value.start..m.value.end];
            let name = key(&prefill.text, m);
            if let Some(own) = to.inputs.iter().find(|o| key(reply.text, o) == name) {
                edits.push(Edit { cut: own.value, put: Put::Text(value.to_vec()) });
            } else {
                if to.filled || !missing.is_empty() {
                    missing.push(b',');
                }
                missing.extend_from_slice(&name);
                missing.push(b':');
                missing.extend_from_slice(value);
            }
        }
        if !missing.is_empty() {
            let at = to.span.end - 1;
            edits.push(Edit { cut: Span { start: at, end: at }, put: Put::Text(missing) });
        }
    }
    if plan.route == Route::Completions
        && !context.echoed
        && let Some(from) = from
    {
        echo(reply, e, from, prefill, edits);
    }
    Ok(())
}

/// Completions with echo: every list of `logprobs` begins with the prompt's entries, which only prefill has. Prefill's own lists end
/// with the entries of the one token that it sampled; decode has that token too.
fn echo(reply: &Reply<'_>, e: &Element, from: &Element, prefill: &PrefillPart, edits: &mut Vec<Edit>) {
    let sampled = from.completion_tokens().unwrap_or(1) as usize;
    for (to, from) in e.choices.iter().zip(&from.choices) {
        for own in &to.logprobs {
            let name = &reply.text[own.key.start..own.key.end];
            let Some(theirs) = from.logprobs.iter().find(|m| &prefill.text[m.key.start..m.key.end] == name) else {
                continue;
            };
            let spans = elements(&prefill.text, theirs.value);
            let Some(last) = spans.len().checked_sub(sampled + 1).and_then(|n| spans.get(n)) else { continue };
            let mut put = prefill.text[theirs.value.start + 1..last.end].to_vec();
            let empty = elements(reply.text, own.value).is_empty();
            if !empty {
                put.push(b',');
            }
            let at = own.value.start + 1;
            edits.push(Edit { cut: Span { start: at, end: at }, put: Put::Text(put) });
        }
    }
}
