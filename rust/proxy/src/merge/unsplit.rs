//! Rows of an engine that ran the whole request: there is nothing to merge, but they may have to become a reference, or come from its host.
use std::sync::Arc;

use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::Name;
use r3router_core::r3::rows::{Legs, cut};

use super::Plan;
use super::intake::{Held, Payload};
use super::reference::refer;
use super::resolve::{Outcome, Sequence, at, missing};
use super::rope::{Range, Spliced};

/// Decides over the payload of an unsplit engine. Asked for in-line it goes on as it came, whatever it is.
pub(super) fn unsplit(
    plan: &Plan,
    name: Name,
    sent: Option<&Payload>,
    seq: Sequence,
    text: &[u8],
) -> Result<Outcome, Error> {
    let by_ref = plan.by_ref && name == Name::RoutedExperts;
    let tokens = seq.prompt.zip(seq.output).map(|(p, o)| u64::from(p) + u64::from(o));
    let rows = tokens.map(|n| n.saturating_sub(1 + u64::from(plan.start)));
    let Some(sent) = sent else {
        let owed = by_ref && !seq.aborted && rows != Some(0);
        return if owed { Err(missing(plan, name, Source::Decode)) } else { Ok(Outcome::Untouched) };
    };
    if !by_ref {
        return in_line(plan, name, sent);
    }
    if sent.len == 0 {
        // An aborted request, or no rows at all: the empty text says so as well as any reference.
        return Ok(Outcome::Rows(Spliced::default(), 0));
    }
    let size = sent.wire.size() as u64;
    // A stream may not say how many tokens there were; then the width must be known.
    let rows = rows.or_else(|| {
        let row = u64::from(plan.row_items.or_else(|| plan.refs.as_ref()?.shape.items())?) * size;
        (row > 0 && sent.len.is_multiple_of(row)).then(|| sent.len / row)
    });
    let rows = match &sent.held {
        Held::Elsewhere(d) => rows.or(Some(u64::from(d.rows))),
        _ => rows,
    };
    let Some(rows) = rows else {
        let message =
            "the reply does not say its tokens, and the width of a row is not known, so its rows cannot be told apart";
        return Err(at(plan, Error::new(Kind::R3Mismatch, Source::Decode, message))
            .advise("set --r3-layers and --r3-top-k, or ask for stream_options.include_usage"));
    };
    // As of a prefill whose prompt is all of the sequence but the last token.
    let whole = u32::try_from(rows + u64::from(plan.start)).unwrap_or(u32::MAX);
    let legs = |item: usize| Legs {
        prompt: whole,
        output: Some(1),
        max_output: None,
        start: plan.start,
        decode_start: whole,
        prefill_len: sent.len,
        decode_len: 0,
        item: item as u64,
        row_items: plan.row_items,
    };
    if !matches!(sent.held, Held::Elsewhere(_)) && cut(&legs(sent.wire.size())).is_err() {
        let message = format!("the engine's {} are no {rows} rows", name.key());
        return Err(at(plan, Error::new(Kind::R3Mismatch, Source::Decode, message))
            .with_limit(rows as f64, sent.len as f64 / size as f64));
    }
    refer(plan, name, (sent, None), legs, text).map_err(|mut e| {
        if e.source == Source::Prefill {
            e.source = Source::Decode;
        }
        at(plan, e)
    })
}

fn in_line(plan: &Plan, name: Name, sent: &Payload) -> Result<Outcome, Error> {
    match &sent.held {
        Held::Rows(rows) if sent.tail.is_empty() => {
            let whole = Range { rows: Arc::clone(rows), from: 0, items: rows.items() };
            Ok(Outcome::Rows(Spliced { ranges: vec![whole], ..Spliced::default() }, 0))
        }
        Held::Rows(_) | Held::Text(_) | Held::Draft(_) => {
            let message = format!("the engine's {} has bytes that are no whole number", name.key());
            Err(at(plan, Error::new(Kind::R3Mismatch, Source::Decode, message)))
        }
        Held::Elsewhere(_) => {
            let message = format!("the engine keeps {} on its host and this client wants it in the reply", name.key());
            Err(at(plan, Error::new(Kind::R3Unsupported, Source::Decode, message)).advise("ask by reference"))
        }
    }
}
