//! Replies of a split request joined to the one reply that an engine would give.
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::outline::{Element, Figure, Outline, Usage};
use r3router_core::wire::{Facts, Route, Span};

use super::Account;
use super::json::Merged;
use super::rope::{Rope, Weaver};

/// See [`super::join_json`].
pub(super) fn join(replies: Vec<Merged>, facts: &Facts) -> Result<Merged, Error> {
    let account = sum(replies.iter().map(|m| m.account), facts.samples as usize);
    let ropes: Vec<Rope> = replies.into_iter().map(|m| m.rope).collect();
    let rope = match facts.route {
        Route::Generate if facts.listed => list(&ropes),
        Route::Generate => ropes.into_iter().next().ok_or_else(|| broken("there is no reply"))?,
        Route::Chat | Route::Completions if ropes.len() == 1 => ropes.into_iter().next().unwrap_or_default(),
        Route::Chat | Route::Completions => choices(&ropes, facts.samples as usize)?,
    };
    Ok(Merged::new(rope, account))
}

fn broken(what: &str) -> Error {
    Error::new(Kind::EngineProtocol, Source::Decode, format!("the replies of a split request cannot be joined: {what}"))
}

/// Tokens in sum, the prompt's once for all of its samples.
fn sum(accounts: impl Iterator<Item = Account>, samples: usize) -> Account {
    let add = |a: Option<u32>, b: Option<u32>| a.or(b).map(|_| a.unwrap_or(0).saturating_add(b.unwrap_or(0)));
    let mut total = Account::default();
    for (i, a) in accounts.enumerate() {
        if i % samples == 0 {
            total.prompt_tokens = add(total.prompt_tokens, a.prompt_tokens);
        }
        total.completion_tokens = add(total.completion_tokens, a.completion_tokens);
        total.r3_prefill += a.r3_prefill;
        total.r3_decode += a.r3_decode;
        total.row_items = total.row_items.or(a.row_items);
        total.aborted |= a.aborted;
        total.events += a.events;
        total.engine_error |= a.engine_error;
    }
    total
}

fn list(ropes: &[Rope]) -> Rope {
    let mut out = Weaver::default();
    for (i, rope) in ropes.iter().enumerate() {
        out.text(if i == 0 { b"[" } else { b"," });
        out.slice(rope, 0, rope.text.len());
    }
    out.text(b"]");
    out.finish()
}

/// A stretch of the first reply that is replaced.
enum Change {
    Choices,
    OutputIds,
    Number(u64),
}

fn choices(ropes: &[Rope], samples: usize) -> Result<Rope, Error> {
    let outlines = ropes.iter().map(|r| Outline::read(&r.text, Source::Decode)).collect::<Result<Vec<_>, _>>()?;
    let replies: Vec<(&Rope, &Element)> =
        ropes.iter().zip(&outlines).filter_map(|(r, o)| Some((r, o.elements.first()?))).collect();
    let Some((first, base)) = replies.first().copied() else { return Err(broken("there is no reply")) };
    let Some(list) = base.choices_span else { return Err(broken("the first has no choices")) };
    let usages: Vec<(&[u8], &Usage)> =
        replies.iter().filter_map(|(r, e)| Some((&r.text[..], e.usage.as_ref()?))).collect();
    if usages.len() != replies.len() {
        return Err(broken("one has no usage"));
    }
    let mut changes = vec![(Span { start: list.start + 1, end: list.end - 1 }, Change::Choices)];
    changes.extend(
        base.sglext
            .as_ref()
            .and_then(|e| e.output_ids)
            .map(|s| (Span { start: s.end - 1, end: s.end - 1 }, Change::OutputIds)),
    );
    changes.extend(usages[0].1.figures.iter().map(|f| (f.value, Change::Number(figure(&usages, f, samples)))));
    changes.sort_by_key(|(span, _)| span.start);
    let mut out = Weaver::default();
    let mut at = 0;
    for (span, change) in changes {
        out.slice(first, at, span.start);
        at = span.end;
        match change {
            Change::Choices => all_choices(&replies, &mut out)?,
            Change::OutputIds => {
                for (rope, e) in &replies[1..] {
                    if let Some(ids) = e.sglext.as_ref().and_then(|e| e.output_ids) {
                        out.text(b",");
                        out.text(&rope.text[ids.start + 1..ids.end - 1]);
                    }
                }
            }
            Change::Number(n) => out.text(n.to_string().as_bytes()),
        }
    }
    out.slice(first, at, first.text.len());
    Ok(out.finish())
}

/// The choices of all replies, with the index that they have in the whole.
fn all_choices(replies: &[(&Rope, &Element)], out: &mut Weaver) -> Result<(), Error> {
    for (i, (rope, e)) in replies.iter().enumerate() {
        let [choice] = &e.choices[..] else { return Err(broken("one has not exactly one choice")) };
        let Some(index) = choice.index else { return Err(broken("a choice has no index")) };
        if i > 0 {
            out.text(b",");
        }
        out.slice(rope, choice.span.start, index.start);
        out.text(i.to_string().as_bytes());
        out.slice(rope, index.end, choice.span.end - 1);
        if let Some(ext) = e.sglext_member.filter(|_| i > 0) {
            out.text(b",\"sglext\":");
            let start = ext.value.start + rope.text[ext.value.start..].iter().take_while(|b| **b != b'{').count();
            out.slice(rope, start, ext.value.end);
        }
        out.text(b"}");
    }
    Ok(())
}

/// One number of `usage` over all replies.
pub(super) fn figure(usages: &[(&[u8], &Usage)], of: &Figure, samples: usize) -> u64 {
    let name = |text: &[u8], f: &Figure| {
        let part = |s: Span| text[s.start..s.end].to_vec();
        (f.group.map(part), part(f.key))
    };
    let wanted = name(usages[0].0, of);
    let total = |wanted: &(Option<Vec<u8>>, Vec<u8>)| -> u64 {
        let group = wanted.0.as_deref().unwrap_or(&wanted.1);
        let once = group.starts_with(b"prompt_tokens");
        let step = if once { samples } else { 1 };
        let each = usages.iter().step_by(step);
        each.filter_map(|(text, u)| u.figures.iter().find(|f| name(text, f) == *wanted)).map(|f| f.number).sum()
    };
    if wanted.0.is_none() && wanted.1 == b"total_tokens" {
        return total(&(None, b"prompt_tokens".to_vec())) + total(&(None, b"completion_tokens".to_vec()));
    }
    total(&wanted)
}
