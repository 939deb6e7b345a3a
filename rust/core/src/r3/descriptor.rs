//! What an engine with r3router's plug-in sends in the place of a payload: the address of rows that stay on its host.
//!
//! On the wire it is the field's normal base64 string. Its bytes are the magic `R3H1`, then compact JSON with exactly the
//! members of [`Descriptor`], in this order:
//!
//! ```json
//! {"uri":"r3://10.0.0.7:9400/17","offset":256,"pos":0,"rows":57000,"dtype":"uint8","shape":[57000,40,8],"crc32":305419896}
//! ```
//!
//! `crc32` is `null` when the engine writes the rows in the background and sends the reply first; the checksum then comes with
//! the rows, in the file's header and in the agent's `x-r3-crc32`.
//!
//! Two members more may stand at the end: `path`, the object's file, and `host`, the boot id of the machine that has it. The rows of an
//! object are served at `http://10.0.0.7:9400/r3/17`; `offset` is that of the first row in the file, whose first [`ROWS_AT`] bytes are its
//! header and are not served.
//!
//! A raw payload cannot begin with the magic: as an int32 it would be expert 826,815,314.
use std::fmt::Write;

use crate::error::{Error, Kind, Source};
use crate::wire::cursor::{Bad, Cursor};
use crate::wire::text::{decode, push_string};

use super::Dtype;

/// The first bytes of a descriptor.
pub const MAGIC: [u8; 4] = *b"R3H1";
/// How the base64 text of every descriptor begins: the magic and the opening brace.
pub const TEXT_PREFIX: [u8; 6] = *b"UjNIMX";
/// The most bytes that a descriptor may have, magic included.
pub const MAX_LEN: usize = 4096;

/// Bytes of an object's file before its first row.
pub const ROWS_AT: u64 = 256;

/// Rows of one payload that lie somewhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Where they are served.
    pub uri: String,
    /// First byte of them in the object's file.
    pub offset: u64,
    /// Position of the first row in the sequence (`routed_experts_start_len` as the engine obeyed it).
    pub pos: u32,
    /// Number of rows.
    pub rows: u32,
    /// How the ids are stored.
    pub dtype: Dtype,
    /// Layers of a row.
    pub layers: u32,
    /// Experts of a layer.
    pub top_k: u32,
    /// CRC-32 (IEEE) of the `rows * layers * top_k * dtype` bytes; `None` when only the place that serves them knows it.
    pub crc32: Option<u32>,
    /// The object's file, for clients on the same host.
    pub path: Option<String>,
    /// Boot id of that host.
    pub host: Option<String>,
}

impl Descriptor {
    /// Magic and JSON, not yet in base64.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = String::with_capacity(160 + self.uri.len());
        out.push_str("R3H1{\"uri\":");
        push_string(&mut out, &self.uri);
        let Self { offset, pos, rows, layers, top_k, crc32, .. } = self;
        let dtype = self.dtype.name();
        let crc32 = crc32.map_or_else(|| "null".to_owned(), |crc| crc.to_string());
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            ",\"offset\":{offset},\"pos\":{pos},\"rows\":{rows},\"dtype\":\"{dtype}\",\"shape\":[{rows},{layers},{top_k}],\"crc32\":{crc32}"
        );
        for (name, value) in [("path", &self.path), ("host", &self.host)] {
            if let Some(value) = value {
                let _ = write!(out, ",\"{name}\":");
                push_string(&mut out, value);
            }
        }
        out.push('}');
        out.into_bytes()
    }

    /// The base64 text that takes the payload's place in the reply.
    pub fn encode_base64(&self) -> String {
        base64_simd::STANDARD.encode_to_string(self.encode())
    }

    /// Reads what [`Self::encode`] wrote. Unknown members are ignored.
    ///
    /// # Errors
    /// `R3Mismatch` when the bytes are not a descriptor or its numbers do not fit together.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let json = bytes.strip_prefix(&MAGIC).ok_or_else(|| mismatch("it does not start with R3H1"))?;
        if bytes.len() > MAX_LEN {
            return Err(mismatch("it is too long").with_limit(MAX_LEN as f64, bytes.len() as f64));
        }
        let fields =
            Fields::read(json).map_err(|bad| mismatch(bad.why).with_limit(bytes.len() as f64, bad.at as f64))?;
        let missing = || mismatch("a member is missing or has the wrong type");
        let (Some(rows), [shape_rows, layers, top_k]) = (fields.rows, fields.shape) else { return Err(missing()) };
        if shape_rows != u64::from(rows) {
            return Err(mismatch("rows and shape disagree").with_limit(f64::from(rows), shape_rows as f64));
        }
        let offset = fields.offset.ok_or_else(missing)?;
        if offset < ROWS_AT {
            return Err(mismatch("the offset lies in the file's header").with_limit(ROWS_AT as f64, offset as f64));
        }
        Ok(Self {
            uri: fields.uri.ok_or_else(missing)?,
            offset,
            pos: fields.pos.ok_or_else(missing)?,
            rows,
            dtype: fields.dtype.ok_or_else(missing)?,
            layers: u32::try_from(layers).map_err(|_| missing())?,
            top_k: u32::try_from(top_k).map_err(|_| missing())?,
            crc32: if fields.crc32_given { fields.crc32 } else { return Err(missing()) },
            path: fields.path,
            host: fields.host,
        })
    }
}

fn mismatch(why: &str) -> Error {
    Error::new(Kind::R3Mismatch, Source::Router, format!("the R3 descriptor cannot be read: {why}"))
        .advise("the engine's plug-in and the router must be of one version")
}

#[derive(Default)]
struct Fields {
    uri: Option<String>,
    offset: Option<u64>,
    pos: Option<u32>,
    rows: Option<u32>,
    dtype: Option<Dtype>,
    shape: [u64; 3],
    crc32: Option<u32>,
    crc32_given: bool,
    path: Option<String>,
    host: Option<String>,
}

impl Fields {
    fn read(json: &[u8]) -> Result<Self, Bad> {
        let mut fields = Self::default();
        let mut c = Cursor::new(json);
        c.object(|c, key, _| {
            let small = |n: Option<u64>| n.and_then(|n| u32::try_from(n).ok());
            match &json[key.span.start..key.span.end] {
                b"uri" => fields.uri = text(c)?,
                b"path" => fields.path = text(c)?,
                b"host" => fields.host = text(c)?,
                b"offset" => fields.offset = number(c)?,
                b"pos" => fields.pos = small(number(c)?),
                b"rows" => fields.rows = small(number(c)?),
                b"dtype" => fields.dtype = text(c)?.and_then(|t| Dtype::of(&t)),
                b"crc32" if c.peek() == Some(b'n') => {
                    c.value()?;
                    fields.crc32_given = true;
                }
                b"crc32" => {
                    fields.crc32 = small(number(c)?);
                    fields.crc32_given = fields.crc32.is_some();
                }
                b"shape" => {
                    let mut i = 0;
                    c.list(|c| {
                        let n = number(c)?;
                        match (fields.shape.get_mut(i), n) {
                            (Some(slot), Some(n)) => *slot = n,
                            _ => return c.bad("shape must be three whole numbers"),
                        }
                        i += 1;
                        Ok(())
                    })?;
                    if i != 3 {
                        return c.bad("shape must be three whole numbers");
                    }
                }
                _ => {
                    c.value()?;
                }
            }
            Ok(())
        })?;
        if c.pos == json.len() { Ok(fields) } else { c.bad("something follows the object") }
    }
}

fn number(c: &mut Cursor<'_>) -> Result<Option<u64>, Bad> {
    let span = c.value()?;
    let text = &c.bytes[span.start..span.end];
    Ok(std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()))
}

fn text(c: &mut Cursor<'_>) -> Result<Option<String>, Bad> {
    if c.peek() != Some(b'"') {
        c.value()?;
        return Ok(None);
    }
    let inside = c.string()?;
    let text = decode(&c.bytes[inside.span.start..inside.span.end], inside.escaped);
    Ok(String::from_utf8(text.into_owned()).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Descriptor {
        Descriptor {
            uri: "r3://10.0.0.7:9400/a/17".into(),
            offset: 4096,
            pos: 3,
            rows: 57_000,
            dtype: Dtype::U8,
            layers: 40,
            top_k: 8,
            crc32: Some(0x1234_5678),
            path: None,
            host: None,
        }
    }

    #[test]
    fn is_written_as_documented_and_read_back() {
        let d = sample();
        assert_eq!(
            std::str::from_utf8(&d.encode()).unwrap(),
            r#"R3H1{"uri":"r3://10.0.0.7:9400/a/17","offset":4096,"pos":3,"rows":57000,"dtype":"uint8","shape":[57000,40,8],"crc32":305419896}"#
        );
        assert_eq!(Descriptor::decode(&d.encode()).unwrap(), d);
        let here = Descriptor { path: Some("/dev/shm/a/17.r3".into()), host: Some("b\"1".into()), ..d.clone() };
        assert!(here.encode().ends_with(br#","crc32":305419896,"path":"/dev/shm/a/17.r3","host":"b\"1"}"#));
        assert_eq!(Descriptor::decode(&here.encode()).unwrap(), here);
        let text = d.encode_base64();
        assert!(text.as_bytes().starts_with(&TEXT_PREFIX), "{text}");
        assert_eq!(base64_simd::STANDARD.decode_to_vec(text).unwrap(), d.encode());
    }

    #[test]
    fn a_checksum_that_comes_with_the_rows_is_null() {
        let d = Descriptor { crc32: None, ..sample() };
        let bytes = d.encode();
        assert!(bytes.ends_with(b",\"crc32\":null}"));
        assert_eq!(Descriptor::decode(&bytes).unwrap(), d);
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let good = String::from_utf8(sample().encode()).unwrap();
        let unknown = good.replace("\"pos\"", "\"node\":{\"a\":[1]},\"pos\"");
        assert_eq!(Descriptor::decode(unknown.as_bytes()).unwrap(), sample());
        for bad in [
            good.replace("R3H1", "R3H2"),
            good.replace("\"rows\":57000", "\"rows\":57001"),
            good.replace("uint8", "float16"),
            good.replace(",40,8]", ",40]"),
            good.replace(",40,8]", ",40,8,1]"),
            good.replace("\"pos\":3", "\"pos\":-3"),
            good.replace("\"offset\":4096", "\"offset\":255"),
            good.replace("\"crc32\":305419896", "\"crc32\":4294967296"),
            good.replace("\"uri\":", "\"url\":"),
            good.trim_end_matches('}').to_owned(),
            format!("{good} "),
            good.replace("/a/17", &"a".repeat(MAX_LEN)),
        ] {
            assert_eq!(Descriptor::decode(bad.as_bytes()).unwrap_err().kind, Kind::R3Mismatch, "{bad}");
        }
    }
}
