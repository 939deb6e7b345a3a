//! The body of one leg: the client's bytes with owned fields cut out and put in, as slices without a copy.
use std::fmt::Write;

use bytes::Bytes;
use smallvec::SmallVec;

use super::text::push_string;
use super::{Facts, Owned, Parts, Span};

/// What stands in the place of a cut.
enum Put {
    Nothing,
    Fixed(&'static str),
    Number(u32),
    /// A part of the body from elsewhere.
    Slice(Span),
    /// The same, with a value inside it replaced by 1.
    SliceWithOne(Span, Span),
}

struct Edit {
    cut: Span,
    put: Put,
}

fn bool_text(on: bool) -> &'static str {
    if on { "true" } else { "false" }
}

/// See [`super::splice`].
pub(super) fn splice(body: &Bytes, facts: &Facts, owned: &Owned<'_>) -> Parts {
    let layout = &*facts.layout;
    let prompt = owned.sub / facts.samples as usize;
    let mut edits = SmallVec::<[Edit; 16]>::new();
    let mut head = String::new();
    edits.extend(layout.cuts.iter().map(|cut| Edit { cut: *cut, put: Put::Nothing }));
    for list in &layout.lists {
        edits.extend(list.elements.get(prompt).map(|e| Edit { cut: list.value, put: Put::Slice(*e) }));
    }
    let n = |i: usize| layout.sampling.n.get(i).copied().flatten().filter(|_| facts.samples > 1);
    if let Some((value, elements)) = &layout.sampling.list {
        if let Some(element) = elements.get(prompt) {
            let put = n(prompt).map_or(Put::Slice(*element), |n| Put::SliceWithOne(*element, n));
            edits.push(Edit { cut: *value, put });
        }
    } else {
        edits.extend(n(0).map(|cut| Edit { cut, put: Put::Fixed("1") }));
    }
    edits.extend(layout.n.filter(|_| facts.samples > 1).map(|cut| Edit { cut, put: Put::Fixed("1") }));

    own(&mut head, owned);
    if let Some(stream) = owned.stream {
        match layout.stream {
            Some(cut) => edits.push(Edit { cut, put: Put::Fixed(bool_text(stream)) }),
            None => member(&mut head, "stream", bool_text(stream)),
        }
    }
    if let Some(start) = owned.routed_experts_start_len {
        match layout.start_len {
            Some(cut) => edits.push(Edit { cut, put: Put::Number(start) }),
            None => member(&mut head, "routed_experts_start_len", start),
        }
    }
    if owned.stream == Some(false) {
        // Engines refuse or ignore it without a stream; it says nothing to a leg that answers once.
        edits.extend(layout.stream_options.map(|o| Edit { cut: o.value, put: Put::Fixed("null") }));
    } else if owned.include_usage {
        match layout.stream_options {
            Some(o) => edits.push(match (o.include_usage, o.object) {
                (Some(cut), _) => Edit { cut, put: Put::Fixed("true") },
                (None, Some(empty)) => {
                    let cut = Span { start: o.value.start, end: o.value.start + 1 };
                    let put = if empty { "{\"include_usage\":true" } else { "{\"include_usage\":true," };
                    Edit { cut, put: Put::Fixed(put) }
                }
                (None, None) => Edit { cut: o.value, put: Put::Fixed("{\"include_usage\":true}") },
            }),
            None => member(&mut head, "stream_options", "{\"include_usage\":true}"),
        }
    }
    if !head.is_empty() && layout.kept {
        head.push(',');
    }
    assemble(body, layout.open, head, edits)
}

fn member(head: &mut String, name: &str, value: impl std::fmt::Display) {
    if !head.is_empty() {
        head.push(',');
    }
    // Writing to a string cannot fail.
    let _ = write!(head, "\"{name}\":{value}");
}

/// The router's own fields.
fn own(head: &mut String, owned: &Owned<'_>) {
    let text = |t: &str| {
        let mut out = String::with_capacity(t.len() + 2);
        push_string(&mut out, t);
        out
    };
    if let Some(rid) = owned.rid {
        member(head, "rid", text(rid));
    }
    if let Some(b) = owned.bootstrap {
        member(head, "bootstrap_host", text(b.host));
        match b.port {
            Some(port) => member(head, "bootstrap_port", port),
            None => member(head, "bootstrap_port", "null"),
        }
        member(head, "bootstrap_room", b.room);
    }
    if let Some(rank) = owned.routed_dp_rank {
        member(head, "routed_dp_rank", rank);
    }
    if let Some(rank) = owned.disagg_prefill_dp_rank {
        member(head, "disagg_prefill_dp_rank", rank);
    }
}

fn assemble(body: &Bytes, open: usize, head: String, mut edits: SmallVec<[Edit; 16]>) -> Parts {
    edits.sort_unstable_by_key(|e| e.cut.start);
    let mut parts = Parts { pieces: Vec::with_capacity(2 * edits.len() + 3), len: 0 };
    let mut add = |piece: Bytes| {
        if !piece.is_empty() {
            parts.len += piece.len();
            parts.pieces.push(piece);
        }
    };
    add(body.slice(..open));
    add(Bytes::from(head));
    let mut at = open;
    for edit in edits {
        add(body.slice(at..edit.cut.start));
        at = edit.cut.end;
        match edit.put {
            Put::Nothing => {}
            Put::Fixed(text) => add(Bytes::from_static(text.as_bytes())),
            Put::Number(n) => add(Bytes::from(n.to_string())),
            Put::Slice(s) => add(body.slice(s.start..s.end)),
            Put::SliceWithOne(s, one) => {
                add(body.slice(s.start..one.start));
                add(Bytes::from_static(b"1"));
                add(body.slice(one.end..s.end));
            }
        }
    }
    add(body.slice(at..));
    parts
}
