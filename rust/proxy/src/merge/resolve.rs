//! What becomes of one payload: rows from both legs, a reference, nothing, or an error with a name.
use std::sync::Arc;

use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::Name;
use r3router_core::r3::decode::NotBase64;
use r3router_core::r3::rows::{Cut, Legs, cut, widths};

use super::Plan;
use super::intake::{Begin, Held, Payload};
use super::reference::refer;
use super::rope::{Range, Spliced};
use super::text::{Fault, TextCut};
use super::unsplit::unsplit;
use crate::store::{Arena, Pin, Rows};

/// What is known about the sequence that a payload belongs to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sequence {
    /// `prompt_tokens` of prefill's reply, or else of decode's.
    pub(super) prompt: Option<u32>,
    /// `completion_tokens` of decode's reply.
    pub(super) output: Option<u32>,
    pub(super) retractions: u32,
    pub(super) aborted: bool,
}

/// What stands in the reply in the end.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Rows; `row_items` numbers each.
    Rows(Spliced, u32),
    /// A reference in its place, with the number of numbers in a row and the objects that it names.
    Reference(String, u32, Vec<Arc<Pin>>),
    /// The member is taken out, if it is there.
    Absent,
    /// Decode's reply stays as it is.
    Untouched,
}

fn starts(plan: &Plan, name: Name) -> (u32, u32) {
    match name {
        Name::RoutedExperts => (plan.start, plan.decode_start),
        // There is no start for it: always the whole sequence.
        Name::IndexerTopk => (0, 0),
    }
}

fn hint(plan: &Plan, name: Name) -> Option<u32> {
    plan.row_items.filter(|_| name == Name::RoutedExperts)
}

/// How decode's payload is to be read, now that it starts: what comes before the prompt's end is passed over.
pub(super) fn begin(plan: &Plan, name: Name, prefill: Option<&Payload>, seen: Sequence) -> Begin {
    let (start, decode_start) = starts(plan, name);
    let (Some(prefill), Some(prompt)) = (prefill, seen.prompt) else {
        return Begin { discard: true, ..Begin::default() };
    };
    let wire = prefill.wire;
    let item = wire.size() as u64;
    let shown = match &prefill.held {
        // Its length is that of narrow rows, but it says their shape.
        Held::Elsewhere(d) => [Some(u64::from(d.layers) * u64::from(d.top_k) * item), None],
        _ => widths(prompt, start, prefill.len, item, hint(plan, name)),
    };
    let mut rows = shown.into_iter().flatten().filter(|row| *row > 0);
    let Some(first) = rows.next() else { return Begin { wire, ..Begin::default() } };
    // Where both readings of prefill's length are possible the shorter skip loses nothing.
    let row = rows.fold(first, u64::min);
    let known = first == row || plan.row_items.is_some();
    let skip = u64::from(prompt.saturating_sub(decode_start)) * row;
    let most = seen.output.or(plan.max_new_tokens).map(|o| u64::from(prompt.max(decode_start)) + u64::from(o));
    let limit = most.map(|until| until.saturating_sub(1).saturating_sub(u64::from(decode_start)) * row);
    let limit = limit.filter(|_| known).map(|bytes| bytes.saturating_sub(skip));
    let hint = limit.map_or(0, |bytes| usize::try_from(bytes / item).unwrap_or(0));
    // The bound by `max_new_tokens` is no length to reserve for.
    let hint = if seen.output.is_some() { hint } else { 0 };
    Begin { skip, limit, surplus: u64::from(decode_start.min(prompt)) * row, wire, hint, discard: false }
}

/// Decides over one payload when both legs have ended.
pub(super) fn resolve(
    plan: &Plan,
    name: Name,
    prefill: Option<&Payload>,
    decode: Option<&Payload>,
    seq: Sequence,
    text: &[u8],
    arena: &Arena,
) -> Result<Outcome, Error> {
    if plan.unsplit {
        return unsplit(plan, name, decode, seq, text);
    }
    let (start, decode_start) = starts(plan, name);
    if seq.aborted {
        match (prefill, decode) {
            (_, None) => return Ok(Outcome::Untouched),
            (None, Some(_)) => return Ok(Outcome::Absent),
            (Some(_), Some(_)) => {}
        }
    }
    if seq.retractions > 0 {
        let message = format!("decode was pushed out of memory and back, {} are not reliable after that", name.key());
        return Err(at(plan, Error::new(Kind::R3Mismatch, Source::Decode, message))
            .with_limit(0.0, f64::from(seq.retractions))
            .advise("give decode more KV memory or fewer requests"));
    }
    let Some(prefill) = prefill else { return Err(missing(plan, name, Source::Prefill)) };
    let Some(prompt) = seq.prompt else {
        let message = "neither reply says how many prompt tokens there were, so its rows cannot be checked";
        return Err(at(plan, Error::new(Kind::EngineProtocol, Source::Prefill, message)));
    };
    if decode.is_none() {
        // OpenAI routes leave an empty payload out, and every route leaves it out after one output token, wherever it was to start
        // (tests/golden, `gen_one.D`).
        let rows = seq.output.map(|o| (u64::from(prompt) + u64::from(o)).saturating_sub(1 + u64::from(decode_start)));
        if rows != Some(0) && seq.output.is_none_or(|o| o > 1) {
            return Err(missing(plan, name, Source::Decode));
        }
    }
    let decode_start = if decode.is_none() { decode_start.max(prompt) } else { decode_start };
    let legs = |item: usize| Legs {
        prompt,
        output: seq.output,
        max_output: plan.max_new_tokens,
        start,
        decode_start,
        prefill_len: prefill.len,
        decode_len: decode.map_or(0, |d| d.len),
        item: item as u64,
        row_items: hint(plan, name),
    };
    let elsewhere = |p: &Payload| matches!(p.held, Held::Elsewhere(_));
    // Rows of the indexer have no reference form: they stay in the reply.
    let by_ref = plan.by_ref && name == Name::RoutedExperts;
    if by_ref && (plan.refs.is_some() || elsewhere(prefill)) {
        return refer(plan, name, (prefill, decode), legs, text);
    }
    match (&prefill.held, decode.map(|d| &d.held)) {
        (Held::Rows(_) | Held::Text(_), d) => {
            let d = match d {
                None => None,
                Some(Held::Rows(rows)) => Some(rows),
                Some(Held::Elsewhere(_) | Held::Text(_) | Held::Draft(_)) => return Err(apart(plan, name)),
            };
            if let Some(d) = d
                && d.wire() != prefill.wire
                && d.items() > 0
                && prefill.len > 0
            {
                let (one, other) = (prefill.wire.name(), d.wire().name());
                let message = format!("prefill sent {} as {one}, decode as {other}", name.key());
                return Err(at(plan, Error::new(Kind::R3Mismatch, Source::Decode, message))
                    .advise("run one engine version and one routed_experts_dtype on both sides"));
            }
            let item = d.filter(|_| prefill.len == 0).map_or(prefill.wire, |d| d.wire()).size();
            let cut = cut(&legs(item)).map_err(|e| at(plan, e))?;
            rows(plan, arena, prefill, decode.zip(d), &cut, item)
        }
        // Only what goes by reference is a draft.
        (Held::Elsewhere(_) | Held::Draft(_), _) => Err(Error::new(
            Kind::R3Unsupported,
            Source::Router,
            format!("the engines keep {} on their hosts and this client wants it in the reply", name.key()),
        )
        .advise("ask by reference (return_outputs_via_store), or run the engines without the plug-in")),
    }
}

fn rows(
    plan: &Plan,
    arena: &Arena,
    prefill: &Payload,
    decode: Option<(&Payload, &Arc<Rows>)>,
    cut: &Cut,
    item: usize,
) -> Result<Outcome, Error> {
    let (wire, item) = (prefill.wire, item as u64);
    let per_row = cut.row / item;
    let mut spliced = Spliced::default();
    if cut.prefill_rows > 0 {
        let (from, until) = (cut.prefill_skip * cut.row, (cut.prefill_skip + cut.prefill_rows) * cut.row);
        let whole = |rows: Arc<Rows>| Range { rows, from: from / item, items: (until - from) / item };
        match &prefill.held {
            Held::Rows(rows) => spliced.ranges.push(whole(rows.clone())),
            Held::Text(text) => {
                match TextCut::new(text, from, until).map_err(|e| fault(plan, prefill.name, e.into()))? {
                    Some(cut) => spliced.head = Some(cut),
                    // What is taken does not begin where a quantum does: it has to be encoded anew.
                    None => {
                        let rows = text.decode(arena, wire).map_err(|e| fault(plan, prefill.name, e))?;
                        spliced.ranges.push(whole(Arc::new(rows)));
                    }
                }
            }
            Held::Elsewhere(_) | Held::Draft(_) => {}
        }
    }
    if let Some((payload, rows)) = decode
        && cut.decode_rows > 0
    {
        let wanted = cut.decode_skip * cut.row;
        let held = wanted.checked_sub(payload.from).map(|bytes| bytes / item);
        let items = cut.decode_rows * per_row;
        match held {
            Some(from) if from + items <= rows.items() => {
                spliced.ranges.push(Range { rows: rows.clone(), from, items });
            }
            _ => {
                let message = "decode's rows lie where they were not expected after its first bytes";
                return Err(at(plan, Error::new(Kind::R3Mismatch, Source::Decode, message))
                    .with_limit(wanted as f64, payload.from as f64));
            }
        }
    }
    Ok(Outcome::Rows(spliced, u32::try_from(per_row).unwrap_or(0)))
}

pub(super) fn fault(plan: &Plan, name: Name, fault: Fault) -> Error {
    match fault {
        Fault::Arena(e) => e,
        Fault::Text(NotBase64(near)) => {
            let message = format!("{} is not base64, near byte {near} of it", name.key());
            let mut e = Error::new(Kind::R3Mismatch, Source::Prefill, message);
            e.measured = Some(near as f64);
            at(plan, e)
        }
    }
}

/// Names the worker that an error is about.
pub(super) fn at(plan: &Plan, e: Error) -> Error {
    let worker = match e.source {
        Source::Prefill => &plan.prefill,
        Source::Decode => &plan.decode,
        Source::Client | Source::Router => return e,
    };
    if worker.is_empty() || e.worker.is_some() { e } else { e.at_worker(&**worker) }
}

/// A leg's reply has not what was asked for.
pub(super) fn missing(plan: &Plan, name: Name, source: Source) -> Error {
    let leg = if source == Source::Prefill { "prefill" } else { "decode" };
    let message = format!("{leg}'s reply has no {}", name.key());
    // No engine version sends the prompt's indexer rows from prefill.
    let kind = if name == Name::IndexerTopk { Kind::R3Unsupported } else { Kind::R3Mismatch };
    let advice = match (name, source) {
        (Name::IndexerTopk, _) => "do not ask for return_indexer_topk from engines that split prefill and decode",
        (_, Source::Prefill) => {
            "prefill engines send them in SGLang 0.5.23 with --enable-return-routed-experts, not in 0.5.17 and before"
        }
        (_, _) => "start the engine with --enable-return-routed-experts",
    };
    at(plan, Error::new(kind, source, message)).advise(advice)
}

fn apart(plan: &Plan, name: Name) -> Error {
    let message = format!("one engine sent {} and the other a reference to it", name.key());
    at(plan, Error::new(Kind::R3Unsupported, Source::Decode, message))
        .advise("run the plug-in on all engines or on none")
}
