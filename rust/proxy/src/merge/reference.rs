//! The reference form of a payload: an envelope in the place of the string, with the legs' rows as segments where they lie - in the
//! router's store, or on an engine's host.
use std::fmt::Write;
use std::sync::Arc;

use memchr::memmem;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::descriptor::{Descriptor, ROWS_AT};
use r3router_core::r3::rows::{Cut, Legs, cut};
use r3router_core::r3::{Dtype, Name};

use super::Plan;
use super::intake::{Held, Payload};
use super::resolve::{Outcome, at, fault};
use crate::store::{Draft, Meta, Part, Pin, Rows, Store, id_text};

/// How long engines keep rows for a reference, seconds; their agents' default.
const EXPIRES_S: u64 = 600;

/// What is known of a model's routing: rows on the wire say none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Layers of a row.
    pub layers: Option<u32>,
    /// Experts of a layer.
    pub top_k: Option<u32>,
    /// Experts of the model; their number decides the dtype. Unknown: int32.
    pub experts: Option<u32>,
}

impl Shape {
    /// Layers and experts a layer of rows of `items` numbers: as set, where that fits; else one layer of them all.
    fn of(self, items: u32) -> (u32, u32) {
        let other = |known: Option<u32>| known.filter(|n| *n > 0 && items.is_multiple_of(*n)).map(|n| items / n);
        match (other(self.layers), other(self.top_k)) {
            (Some(top_k), _) => (items / top_k.max(1), top_k),
            (None, Some(layers)) => (layers, items / layers.max(1)),
            (None, None) => (1, items),
        }
    }

    /// Numbers of a row, when the settings say them.
    pub fn items(self) -> Option<u32> {
        self.layers?.checked_mul(self.top_k?)
    }

    /// Bytes of a number in an object.
    pub fn width(self) -> u64 {
        self.dtype(Dtype::I32).size() as u64
    }

    fn dtype(self, wire: Dtype) -> Dtype {
        if wire == Dtype::I32 { self.experts.map_or(Dtype::I32, Dtype::for_experts) } else { wire }
    }
}

/// How rows become objects of the router's store.
#[derive(Clone, Debug)]
pub struct Refs {
    /// Where they are kept.
    pub store: Store,
    /// Under which address the client fetches: `http://host:port`.
    pub base: Arc<str>,
    /// Boot id of this machine, for clients that may map the file.
    pub host: Arc<str>,
    /// What is known of the model.
    pub shape: Shape,
    /// The attempt's id on the engines.
    pub rid: Arc<str>,
    /// Tells attempts apart.
    pub attempt: u32,
}

struct Segment {
    uri: String,
    path: Option<String>,
    host: Option<String>,
    offset: u64,
    pos: u64,
    rows: u64,
    dtype: Dtype,
    crc32: Option<u32>,
}

impl Segment {
    /// `rows` rows of an engine's object from its row `skip` on. The checksum is of all rows of it; a part of it has none.
    /// The address of a part says which rows it is, so that whoever GETs it, and knows nothing of `offset`, has these rows and no others.
    ///
    /// # Errors
    /// `R3Mismatch` when the descriptor's rows begin inside a row of its object: no address can name them.
    fn of(d: &Descriptor, source: Source, skip: u64, rows: u64, pos: u64) -> Result<Self, Error> {
        let row = u64::from(d.layers) * u64::from(d.top_k) * d.dtype.size() as u64;
        let before = d.offset.saturating_sub(ROWS_AT);
        if row == 0 || !before.is_multiple_of(row) {
            let message =
                format!("the R3 descriptor's rows begin at byte {before} of its object, which is no row's first");
            return Err(Error::new(Kind::R3Mismatch, source, message).with_limit(row as f64, before as f64));
        }
        let first = before / row + skip;
        // An object whose first rows are another payload's may have others behind these too.
        let whole = first == 0 && rows == u64::from(d.rows);
        let uri = if whole {
            d.uri.clone()
        } else {
            format!("{}{}rows={first}:{}", d.uri, if d.uri.contains('?') { '&' } else { '?' }, first + rows)
        };
        Ok(Self {
            uri,
            path: d.path.clone(),
            host: d.host.clone(),
            offset: d.offset + skip * row,
            pos,
            rows,
            dtype: d.dtype,
            crc32: d.crc32.filter(|_| rows == u64::from(d.rows)),
        })
    }
}

/// One leg's rows, wherever they lie.
enum Leg<'a> {
    There(&'a Descriptor),
    Here(&'a Payload, Arc<Rows>),
    /// In the file of an object that is not finished.
    Begun(&'a Payload),
}

impl<'a> Leg<'a> {
    fn new(plan: &Plan, payload: &'a Payload) -> Result<Self, Error> {
        Ok(match &payload.held {
            Held::Elsewhere(d) => Self::There(d),
            Held::Rows(rows) => Self::Here(payload, Arc::clone(rows)),
            Held::Draft(_) => Self::Begun(payload),
            Held::Text(text) => {
                let refs = plan.refs.as_ref().ok_or_else(|| none(plan))?;
                let rows = text.decode(refs.store.arena(), payload.wire).map_err(|e| fault(plan, payload.name, e))?;
                Self::Here(payload, Arc::new(rows))
            }
        })
    }

    fn dtype(&self) -> Dtype {
        match self {
            Self::There(d) => d.dtype,
            Self::Here(payload, _) | Self::Begun(payload) => payload.wire,
        }
    }

    /// Whether the router has the rows.
    fn ours(&self) -> bool {
        !matches!(self, Self::There(_))
    }

    /// Numbers that the leg sent.
    fn items(&self) -> u64 {
        match self {
            Self::There(d) => u64::from(d.rows) * u64::from(d.layers) * u64::from(d.top_k),
            Self::Here(payload, _) | Self::Begun(payload) => payload.len / payload.wire.size() as u64,
        }
    }

    fn shape(&self) -> Option<(u32, u32)> {
        match self {
            Self::There(d) => Some((d.layers, d.top_k)),
            Self::Here(..) | Self::Begun(_) => None,
        }
    }
}

/// The object that a payload's rows are in, to be finished.
fn taken(payload: &Payload) -> Option<Draft> {
    match &payload.held {
        Held::Draft(draft) => draft.lock().take(),
        _ => None,
    }
}

/// Decides over a payload that goes by reference. `legs` takes the bytes of one number; `text` is decode's reply without payloads.
pub(super) fn refer(
    plan: &Plan,
    name: Name,
    (prefill, decode): (&Payload, Option<&Payload>),
    legs: impl Fn(usize) -> Legs,
    text: &[u8],
) -> Result<Outcome, Error> {
    if name != Name::RoutedExperts {
        return Err(Error::new(Kind::R3Unsupported, Source::Router, format!("{} cannot go by reference", name.key())));
    }
    let (p, d) = (Leg::new(plan, prefill)?, decode.map(|d| Leg::new(plan, d)).transpose()?);
    // An empty payload says nothing about its rows.
    let d = d.filter(|d| d.items() > 0);
    if let Some(d) = &d
        && let (Some(one), Some(other)) = (p.shape(), d.shape())
        && one != other
    {
        let message = format!("prefill's rows are {one:?}, decode's {other:?} (layers, experts)");
        return Err(at(plan, Error::new(Kind::R3Mismatch, Source::Decode, message)));
    }
    if p.ours() && d.as_ref().is_some_and(|d| d.ours() && d.dtype() != p.dtype()) && p.items() > 0 {
        let other = d.as_ref().map_or("", |d| d.dtype().name());
        let message = format!("prefill sent {} as {}, decode as {other}", name.key(), p.dtype().name());
        return Err(at(plan, Error::new(Kind::R3Mismatch, Source::Decode, message))
            .advise("run one engine version and one routed_experts_dtype on both sides"));
    }
    // Texts are compared in bytes, so that one too many is seen; an object and a text can only be compared in numbers.
    let texts = p.ours() && d.as_ref().is_none_or(Leg::ours);
    let width =
        if texts { if p.items() > 0 { p.dtype() } else { d.as_ref().map_or(p.dtype(), Leg::dtype) }.size() } else { 1 };
    let legs = if texts {
        legs(width)
    } else {
        Legs { item: 1, prefill_len: p.items(), decode_len: d.as_ref().map_or(0, Leg::items), ..legs(1) }
    };
    for (payload, source) in [(Some(prefill), Source::Prefill), (decode, Source::Decode)] {
        let Some(payload) = payload.filter(|p| !matches!(p.held, Held::Elsewhere(_))) else { continue };
        if !payload.len.is_multiple_of(payload.wire.size() as u64) {
            let leg = if source == Source::Prefill { "prefill" } else { "decode" };
            let message = format!("{leg}'s {} has bytes that are no whole number", name.key());
            return Err(at(plan, Error::new(Kind::R3Mismatch, source, message)));
        }
    }
    let cut = cut(&legs).map_err(|e| at(plan, e))?;
    let wire = p.dtype();
    let items = u32::try_from(cut.row / width as u64).unwrap_or(0);
    let known = p.shape().or_else(|| d.as_ref().and_then(Leg::shape));
    if let Some((layers, top_k)) = known
        && items != 0
        && layers.saturating_mul(top_k) != items
    {
        let message = "a row of the descriptor's shape is not as wide as its bytes";
        return Err(at(plan, Error::new(Kind::R3Mismatch, Source::Prefill, message))
            .with_limit(f64::from(layers) * f64::from(top_k), f64::from(items)));
    }
    let of = plan.refs.as_ref().map(|refs| refs.shape).unwrap_or_default();
    let (layers, top_k) = known.unwrap_or_else(|| of.of(items));
    let mut out = Envelope { plan, layers, top_k, text, segments: Vec::new(), pins: Vec::new(), expires_s: EXPIRES_S };
    let start = u64::from(plan.start);
    let mut d = d.filter(|_| cut.decode_rows > 0);
    let p = match p {
        Leg::Begun(payload) => {
            let draft = taken(payload).ok_or_else(|| none(plan))?;
            if cut.prefill_rows > 0 && cut.prefill_skip == 0 && cut.prefill_rows * u64::from(items) == draft.items() {
                // Decode's rows go into the same file, so that a client of this host finds all of them in one piece.
                let more = match &d {
                    Some(Leg::Here(payload, held)) => {
                        Some(out.part(payload, held, (cut.decode_skip, cut.decode_rows))?)
                    }
                    _ => None,
                };
                let rows = cut.prefill_rows + if more.is_some() { cut.decode_rows } else { 0 };
                let meta = out.meta(out.plan.refs.as_ref().ok_or_else(|| none(plan))?, Dtype::I32, start, rows);
                let pin = draft.finish(meta, more.as_ref()).map_err(|e| at(plan, e))?;
                out.made(pin, start, rows)?;
                if more.is_some() {
                    d = None;
                }
                None
            } else {
                Some(Leg::Here(payload, Arc::new(draft.into_rows()?)))
            }
        }
        p => Some(p),
    };
    if let Some(p) = &p
        && cut.prefill_rows > 0
    {
        out.add(p, Source::Prefill, (cut.prefill_skip, cut.prefill_rows), start)?;
    }
    if let Some(d) = &d {
        out.add(d, Source::Decode, (cut.decode_skip, cut.decode_rows), start + cut.prefill_rows)?;
    }
    let dtype = out.segments.iter().map(|s| s.dtype).max().unwrap_or(wire);
    let member = out.write(&cut, dtype);
    Ok(Outcome::Reference(member, items, out.pins))
}

struct Envelope<'a> {
    plan: &'a Plan,
    layers: u32,
    top_k: u32,
    text: &'a [u8],
    segments: Vec<Segment>,
    pins: Vec<Arc<Pin>>,
    expires_s: u64,
}

impl Envelope<'_> {
    fn add(&mut self, leg: &Leg<'_>, source: Source, (skip, rows): (u64, u64), pos: u64) -> Result<(), Error> {
        let (payload, held) = match leg {
            Leg::There(d) => {
                self.segments.push(Segment::of(d, source, skip, rows, pos).map_err(|e| at(self.plan, e))?);
                return Ok(());
            }
            Leg::Here(payload, rows) => (payload, rows),
            // Prefill's only, and that one is finished or in memory by now.
            Leg::Begun(_) => return Err(none(self.plan)),
        };
        let refs = self.plan.refs.as_ref().ok_or_else(|| none(self.plan))?;
        let part = self.part(payload, held, (skip, rows))?;
        let meta = self.meta(refs, payload.wire, pos, rows);
        let pin = refs.store.put(meta, &part).map_err(|e| at(self.plan, e))?;
        self.made(pin, pos, rows)
    }

    /// Rows `[skip, skip + rows)` of what a leg sent, of which `held` may have the end only.
    fn part(&self, payload: &Payload, held: &Arc<Rows>, (skip, rows): (u64, u64)) -> Result<Part, Error> {
        let per_row = u64::from(self.layers) * u64::from(self.top_k);
        let (wanted, from) = (skip * per_row, payload.from / payload.wire.size() as u64);
        match wanted.checked_sub(from) {
            Some(first) if first + rows * per_row <= held.items() => {
                Ok(Part { rows: Arc::clone(held), from: first, items: rows * per_row })
            }
            _ => {
                let message = "an engine's rows lie where they were not expected after its first bytes";
                Err(at(self.plan, Error::new(Kind::R3Mismatch, Source::Decode, message))
                    .with_limit(wanted as f64, from as f64))
            }
        }
    }

    fn meta(&self, refs: &Refs, wire: Dtype, pos: u64, rows: u64) -> Meta {
        Meta {
            dtype: refs.shape.dtype(wire),
            layers: self.layers,
            top_k: self.top_k,
            start: u32::try_from(pos).unwrap_or(u32::MAX),
            rows,
            attempt: refs.attempt,
            weight_version: weights(self.text),
            rid: refs.rid.to_string(),
        }
    }

    /// Names an object of this router's.
    fn made(&mut self, pin: Pin, pos: u64, rows: u64) -> Result<(), Error> {
        let refs = self.plan.refs.as_ref().ok_or_else(|| none(self.plan))?;
        let object = pin.object();
        self.segments.push(Segment {
            uri: format!("{}/r3/{}", refs.base, id_text(object.id)),
            path: object.path.to_str().map(str::to_owned),
            host: Some(refs.host.to_string()).filter(|h| !h.is_empty()),
            offset: ROWS_AT,
            pos,
            rows,
            dtype: object.meta.dtype,
            crc32: Some(object.crc32),
        });
        self.expires_s = self.expires_s.min(refs.store.keeps().as_secs());
        if self.segments.iter().all(|s| s.uri.starts_with(&*refs.base)) {
            self.expires_s = refs.store.keeps().as_secs();
        }
        self.pins.push(Arc::new(pin));
        Ok(())
    }

    /// `"output_store_ref":{...}`: the whole member.
    fn write(&self, cut: &Cut, dtype: Dtype) -> String {
        let mut out = String::from("\"output_store_ref\":{\"handle\":{\"type\":\"r3router\",\"v\":1,\"segments\":[");
        for (i, s) in self.segments.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = write!(out, "{}{{\"uri\":{}", if i > 0 { "," } else { "" }, Json(&s.uri));
            for (name, value) in [("path", &s.path), ("host", &s.host)] {
                if let Some(value) = value {
                    let _ = write!(out, ",\"{name}\":{}", Json(value));
                }
            }
            let crc = s.crc32.map_or_else(|| "null".to_owned(), |c| c.to_string());
            let _ = write!(
                out,
                ",\"offset\":{},\"pos\":{},\"rows\":{},\"dtype\":\"{}\",\"crc32\":{crc}}}",
                s.offset,
                s.pos,
                s.rows,
                s.dtype.name()
            );
        }
        let _ = write!(
            out,
            "],\"expires_s\":{}}},\"fields\":{{\"routed_experts\":{{\"dtype\":\"{}\",\"shape\":[{},{},{}]}}}}}}",
            self.expires_s,
            dtype.name(),
            cut.rows(),
            self.layers,
            self.top_k
        );
        out
    }
}

fn none(plan: &Plan) -> Error {
    at(plan, Error::new(Kind::R3Unsupported, Source::Router, "this router keeps no payloads"))
        .advise("ask for payloads in the reply")
}

/// `meta_info.weight_version` of a reply's text.
fn weights(text: &[u8]) -> String {
    const NAME: &[u8] = b"\"weight_version\":\"";
    let value = memmem::find(text, NAME).and_then(|at| text.get(at + NAME.len()..)).unwrap_or_default();
    let end = memchr::memchr2(b'"', b'\\', value).unwrap_or(0);
    String::from_utf8_lossy(value.get(..end).unwrap_or_default()).into_owned()
}

/// A string as JSON.
struct Json<'a>(&'a str);

impl std::fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match serde_json::to_string(self.0) {
            Ok(text) => f.write_str(&text),
            Err(_) => Err(std::fmt::Error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Segment, Shape, weights};
    use r3router_core::error::{Kind, Source};
    use r3router_core::r3::Dtype;
    use r3router_core::r3::descriptor::Descriptor;

    #[test]
    fn the_address_of_a_part_says_which_rows_it_is() {
        let of = |offset, rows, skip, wanted| {
            let d = Descriptor {
                uri: "r3://h:1/ab".into(),
                offset,
                pos: 0,
                rows,
                dtype: Dtype::U16,
                layers: 3,
                top_k: 2,
                crc32: Some(5),
                path: None,
                host: None,
            };
            Segment::of(&d, Source::Decode, skip, wanted, skip).map(|s| (s.uri, s.offset, s.crc32)).map_err(|e| e.kind)
        };
        assert_eq!(of(256, 9, 0, 9), Ok(("r3://h:1/ab".into(), 256, Some(5))));
        assert_eq!(of(256, 9, 4, 5), Ok(("r3://h:1/ab?rows=4:9".into(), 256 + 4 * 12, None)));
        assert_eq!(of(256, 9, 0, 8), Ok(("r3://h:1/ab?rows=0:8".into(), 256, None)));
        // Rows of one object that several payloads share.
        assert_eq!(of(256 + 24, 9, 0, 9), Ok(("r3://h:1/ab?rows=2:11".into(), 280, Some(5))));
        assert_eq!(of(256 + 24, 9, 4, 5), Ok(("r3://h:1/ab?rows=6:11".into(), 280 + 48, None)));
        assert_eq!(of(256 + 5, 9, 0, 9), Err(Kind::R3Mismatch));
    }

    #[test]
    fn a_row_is_cut_into_layers_by_what_is_set_and_fits() {
        let shape = |layers, top_k| Shape { layers, top_k, experts: None }.of(384);
        assert_eq!(shape(Some(48), Some(8)), (48, 8));
        assert_eq!(shape(Some(48), None), (48, 8));
        assert_eq!(shape(None, Some(8)), (48, 8));
        assert_eq!(shape(Some(47), Some(8)), (48, 8));
        assert_eq!(shape(Some(47), None), (1, 384));
        assert_eq!(shape(None, None), (1, 384));
        let of = |experts, wire| Shape { experts, ..Shape::default() }.dtype(wire);
        assert_eq!([Some(256), Some(257), None].map(|e| of(e, Dtype::I32)), [Dtype::U8, Dtype::U16, Dtype::I32]);
        assert_eq!(of(Some(256), Dtype::U16), Dtype::U16);
    }

    #[test]
    fn the_weight_version_is_read_from_the_text() {
        assert_eq!(weights(br#"{"meta_info":{"weight_version":"v7","x":1}}"#), "v7");
        assert_eq!(weights(br#"{"meta_info":{"weight_version":null}}"#), "");
    }
}
