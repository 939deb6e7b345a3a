//! `GET`, `HEAD` and `DELETE /r3/{id}`: rows that a reply named by reference.
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, header};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::{Dtype, narrow};

use crate::app::App;
use crate::body::{Cut, Pieces, ReplyBody};
use crate::errors::{Reply, error_reply};
use crate::store::{Absent, HEADER, Meta, Object, id_of};

/// Bytes that are read at once.
const TILE: u64 = 256 << 10;

const DTYPE: HeaderName = HeaderName::from_static("x-r3-dtype");
const SHAPE: HeaderName = HeaderName::from_static("x-r3-shape");
const POS: HeaderName = HeaderName::from_static("x-r3-pos");
const CRC: HeaderName = HeaderName::from_static("x-r3-crc32");

/// Answers `/r3/{id}`.
///
/// # Errors
/// `R3Unknown`, `R3Deleted`, `R3Expired`, `MethodNotAllowed`. A range that cannot be given is a reply, with its length beside it.
pub fn handle(app: &Arc<App>, method: &Method, uri: &Uri, headers: &HeaderMap, text: &str) -> Result<Reply, Error> {
    let absent = |why: Absent| {
        match why {
        Absent::Unknown => Error::new(Kind::R3Unknown, Source::Client, format!("there are no rows under {text}"))
            .advise("rows live in the router that wrote the reference, and in one that took over from it by --handover-socket; after any other restart there are none of the old ones"),
        Absent::Deleted => Error::new(Kind::R3Deleted, Source::Client, format!("the rows of {text} were deleted"))
            .advise("whoever has read them last deletes them; make the sample again, or delete later"),
        Absent::Expired => {
            let kept = app.store.keeps().as_secs_f64();
            Error::new(Kind::R3Expired, Source::Client, format!("the rows of {text} have expired, {kept} s after their reply"))
                .with_limit(kept, kept)
                .advise("fetch sooner, or raise --r3-ref-expiry-secs")
        }
    }
    };
    let id = id_of(text).ok_or_else(|| absent(Absent::Unknown))?;
    match *method {
        Method::DELETE => {
            app.store.delete(id).map_err(absent)?;
            let mut reply = Response::new(ReplyBody::empty());
            *reply.status_mut() = StatusCode::NO_CONTENT;
            Ok(reply)
        }
        Method::GET | Method::HEAD => {
            let object = app.store.get(id).map_err(absent)?;
            let view = match View::parse(&object.meta, uri.query(), headers.get(header::RANGE)) {
                Ok(view) => view,
                Err(error) => return Ok(refused(&error, &object.meta, uri.query())),
            };
            let mut reply = match read(&object, view, *method == Method::HEAD) {
                Ok(reply) => reply,
                // Another router, after a restart by overlap, or a person.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    app.store.forget(id);
                    return Err(absent(Absent::Deleted));
                }
                Err(e) => {
                    let (path, advice) =
                        (object.path.display(), "see why it cannot be; limits of open files count too");
                    let message = format!("the rows of {text} are in {path}, which cannot be opened: {e}");
                    return Err(Error::new(Kind::R3StoreFailed, Source::Router, message).advise(advice));
                }
            };
            if *method == Method::GET {
                app.metrics.r3_fetched.fetch_add(1, Ordering::Relaxed);
            }
            reply.headers_mut().insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
            Ok(reply)
        }
        _ => Err(crate::errors::wrong_method(method, "/r3/{id}", "GET, HEAD or DELETE")),
    }
}

/// The reply to a range that cannot be given; to one that lies outside it says how long the whole is (RFC 9110, 15.5.17).
fn refused(error: &Error, meta: &Meta, query: Option<&str>) -> Reply {
    let mut reply = error_reply(error);
    if error.kind == Kind::R3Range {
        // Of the part that the query selects, or of everything when the query itself is outside.
        let length = View::parse(meta, query, None).map_or(meta.bytes(), |view| view.length);
        let value = format!("bytes */{length}");
        reply
            .headers_mut()
            .insert(header::CONTENT_RANGE, HeaderValue::from_str(&value).unwrap_or(HeaderValue::from_static("")));
    }
    reply
}

/// What of an object is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct View {
    /// Rows `[from, to)`.
    rows: (u64, u64),
    /// Layers `[from, to)`.
    layers: (u32, u32),
    dtype: Dtype,
    /// Bytes `[from, to)` of what the rest selects.
    bytes: Option<(u64, u64)>,
    /// Bytes of what the rest selects.
    length: u64,
}

impl View {
    fn parse(meta: &Meta, query: Option<&str>, range: Option<&HeaderValue>) -> Result<Self, Error> {
        let mut view =
            Self { rows: (0, meta.rows), layers: (0, meta.layers), dtype: meta.dtype, bytes: None, length: 0 };
        let pairs = || query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        for (at, (name, value)) in pairs().enumerate() {
            // The address in a reference may have `rows` already: neither of two is to be preferred in silence.
            if matches!(name, "rows" | "layers" | "dtype") && pairs().take(at).any(|(earlier, _)| earlier == name) {
                return Err(Error::new(Kind::InvalidField, Source::Client, format!("{name} is said twice"))
                    .advise("replace the one in the address by a part of it"));
            }
            match name {
                "rows" => view.rows = span(name, value, meta.rows)?,
                "layers" => {
                    let (from, to) = span(name, value, u64::from(meta.layers))?;
                    view.layers = (from as u32, to as u32);
                }
                "dtype" => {
                    view.dtype =
                        Dtype::of(value).filter(|d| *d == meta.dtype || *d == Dtype::I32).ok_or_else(|| {
                            Error::new(Kind::InvalidField, Source::Client, format!("dtype={value} cannot be given"))
                                .advise(format!("leave it out for {}, or ask for int32", meta.dtype.name()))
                        })?;
                }
                _ => {}
            }
        }
        let row = u64::from(view.layers.1 - view.layers.0) * u64::from(meta.top_k) * view.dtype.size() as u64;
        view.length = (view.rows.1 - view.rows.0) * row;
        if let Some(range) = range {
            view.bytes = byte_range(range, view.length)?;
        }
        Ok(view)
    }

    /// Whether the bytes lie in the file as they are wanted.
    fn is_plain(&self, meta: &Meta) -> bool {
        self.dtype == meta.dtype && self.layers == (0, meta.layers)
    }
}

fn outside(what: &str, limit: u64, measured: u64) -> Error {
    Error::new(Kind::R3Range, Source::Client, format!("{what} lies outside of the rows"))
        .with_limit(limit as f64, measured as f64)
}

/// `a:b`, either of which may be left out.
fn span(name: &str, value: &str, end: u64) -> Result<(u64, u64), Error> {
    let bad = || {
        Error::new(Kind::InvalidField, Source::Client, format!("{name}={value} is not a:b"))
            .advise("send two whole numbers with a colon between")
    };
    let (from, to) = value.split_once(':').ok_or_else(bad)?;
    let number = |text: &str, none: u64| if text.is_empty() { Ok(none) } else { text.parse().map_err(|_| bad()) };
    let (from, to) = (number(from, 0)?, number(to, end)?);
    if from > to || to > end {
        return Err(outside(&format!("{name}={value}"), end, to.max(from)));
    }
    Ok((from, to))
}

/// One range of RFC 9110; several are answered with the whole, as the RFC allows.
fn byte_range(value: &HeaderValue, length: u64) -> Result<Option<(u64, u64)>, Error> {
    let Some(spec) = value.to_str().ok().and_then(|v| v.strip_prefix("bytes=")) else { return Ok(None) };
    let Some((from, to)) = spec.split_once('-').filter(|_| !spec.contains(',')) else { return Ok(None) };
    let unsatisfiable = || outside(&format!("the range {spec}"), length, from.parse().unwrap_or(0));
    let range = match (from.trim(), to.trim()) {
        ("", last) => {
            let Ok(last) = last.parse::<u64>() else { return Ok(None) };
            (length.saturating_sub(last), length)
        }
        (from, to) => {
            let Ok(from) = from.parse::<u64>() else { return Ok(None) };
            let to = if to.is_empty() {
                length
            } else {
                to.parse::<u64>().map_or(length, |t| t.saturating_add(1)).min(length)
            };
            (from, to)
        }
    };
    if range.0 >= range.1 { Err(unsatisfiable()) } else { Ok(Some(range)) }
}

fn read(object: &Arc<Object>, view: View, head: bool) -> std::io::Result<Reply> {
    let file = object.open()?;
    let meta = &object.meta;
    let (from, to) = view.bytes.unwrap_or((0, view.length));
    let number = |n: u64| HeaderValue::from(n);
    let text = |t: String| HeaderValue::from_str(&t).unwrap_or_else(|_| HeaderValue::from_static(""));
    let body = if head {
        ReplyBody::empty()
    } else {
        ReplyBody::Stream(Box::new(Rows { file, object: Arc::clone(object), view, at: from, to }))
    };
    let mut reply = Response::new(body);
    if view.bytes.is_some() {
        *reply.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    let headers = reply.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(DTYPE, HeaderValue::from_static(view.dtype.name()));
    let (rows, layers) = (view.rows.1 - view.rows.0, view.layers.1 - view.layers.0);
    headers.insert(SHAPE, text(format!("{rows},{layers},{}", meta.top_k)));
    headers.insert(POS, number(u64::from(meta.start) + view.rows.0));
    if view.is_plain(meta) && view.rows == (0, meta.rows) {
        headers.insert(CRC, number(u64::from(object.crc32)));
    }
    if view.bytes.is_some() {
        headers.insert(header::CONTENT_RANGE, text(format!("bytes {from}-{}/{}", to - 1, view.length)));
    }
    if head {
        headers.insert(header::CONTENT_LENGTH, number(to - from));
    }
    Ok(reply)
}

/// Rows on their way out of the file. The file is open, so that deleting the object meanwhile changes nothing.
struct Rows {
    file: File,
    object: Arc<Object>,
    view: View,
    /// Bytes `[at, to)` of the view are still to come.
    at: u64,
    to: u64,
}

impl Rows {
    fn next(&mut self) -> std::io::Result<Bytes> {
        let meta = &self.object.meta;
        let take = (self.to - self.at).min(TILE);
        if self.view.is_plain(meta) {
            let mut out = vec![0; take as usize];
            let at = HEADER as u64 + self.view.rows.0 * meta.row() + self.at;
            self.file.read_exact_at(&mut out, at)?;
            self.at += take;
            return Ok(out.into());
        }
        // Whole rows around the bytes that are wanted, some at a time.
        let (first, last) = self.view.layers;
        let numbers = (u64::from(last - first) * u64::from(meta.top_k)) as usize;
        let width = (numbers * self.view.dtype.size()) as u64;
        let row = self.at / width.max(1);
        let rows = ((self.at + take).div_ceil(width.max(1)) - row) as usize;
        let mut source = vec![0; rows * meta.row() as usize];
        self.file.read_exact_at(&mut source, HEADER as u64 + (self.view.rows.0 + row) * meta.row())?;
        let mut out = vec![0; rows * width as usize];
        let skip = first as usize * meta.top_k as usize * meta.dtype.size();
        for (from, to) in
            source.chunks_exact(meta.row().max(1) as usize).zip(out.chunks_exact_mut(width.max(1) as usize))
        {
            let from = from.get(skip..skip + numbers * meta.dtype.size()).unwrap_or_default();
            if self.view.dtype == meta.dtype {
                to.copy_from_slice(from);
            } else {
                narrow::to_i32(meta.dtype, from, to);
            }
        }
        let begin = (self.at - row * width) as usize;
        self.at += take;
        Ok(Bytes::from(out).slice(begin..begin + take as usize))
    }
}

impl Pieces for Rows {
    fn poll_piece(&mut self, _cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        if self.at >= self.to {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(self.next().map_err(|e| Cut(format!("the file of the rows broke off: {e}")))))
    }

    fn length(&self) -> Option<u64> {
        Some(self.to - self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::{View, byte_range};
    use crate::store::Meta;
    use http::HeaderValue;
    use r3router_core::error::Kind;
    use r3router_core::r3::Dtype;

    fn meta() -> Meta {
        let (weight_version, rid) = (String::new(), String::new());
        Meta { dtype: Dtype::U8, layers: 4, top_k: 2, start: 0, rows: 10, attempt: 0, weight_version, rid }
    }

    #[test]
    fn ranges_of_rows_layers_and_bytes_are_read_and_bounded() {
        let of = |query: &str| View::parse(&meta(), Some(query), None);
        assert_eq!(of("").unwrap().length, 80);
        assert_eq!((of("rows=2:5").unwrap().rows, of("rows=2:5").unwrap().length), ((2, 5), 24));
        assert_eq!(of("rows=:5").unwrap().rows, (0, 5));
        assert_eq!(of("rows=7:").unwrap().rows, (7, 10));
        assert_eq!(of("layers=1:3&dtype=int32").unwrap().length, 10 * 2 * 2 * 4);
        for (bad, kind) in [
            ("rows=5:2", Kind::R3Range),
            ("rows=0:11", Kind::R3Range),
            ("layers=0:5", Kind::R3Range),
            ("rows=a:b", Kind::InvalidField),
            ("rows=3", Kind::InvalidField),
            ("dtype=uint16", Kind::InvalidField),
            ("dtype=float", Kind::InvalidField),
            ("rows=0:2&rows=0:2", Kind::InvalidField),
        ] {
            assert_eq!(of(bad).unwrap_err().kind, kind, "{bad}");
        }
        let range = |text: &str| byte_range(&HeaderValue::from_str(text).unwrap(), 80);
        assert_eq!(range("bytes=0-9").unwrap(), Some((0, 10)));
        assert_eq!(range("bytes=70-500").unwrap(), Some((70, 80)));
        assert_eq!(range("bytes=70-").unwrap(), Some((70, 80)));
        assert_eq!(range("bytes=-8").unwrap(), Some((72, 80)));
        assert_eq!(range("bytes=0-1,4-5").unwrap(), None);
        assert_eq!(range("rows=0-1").unwrap(), None);
        assert_eq!(range("bytes=80-").unwrap_err().kind, Kind::R3Range);
    }
}
