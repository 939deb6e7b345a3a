//! The reference form of a payload: an envelope in the place of the string, with the legs' rows as segments where they lie.
use std::fmt::Write;

use r3router_core::r3::descriptor::Descriptor;
use r3router_core::r3::rows::Cut;

/// How long engines keep rows for a reference, seconds; their agents' default.
const EXPIRES_S: u32 = 600;

struct Segment<'a> {
    of: &'a Descriptor,
    /// Rows of it that are not taken.
    skip: u64,
    rows: u64,
    /// Position of its first row in the sequence.
    pos: u64,
}

/// `"output_store_ref":{...}`: the whole member.
pub(super) fn envelope(start: u32, prefill: &Descriptor, decode: Option<&Descriptor>, cut: &Cut) -> String {
    let mut segments = Vec::new();
    let start = u64::from(start);
    if cut.prefill_rows > 0 {
        segments.push(Segment { of: prefill, skip: cut.prefill_skip, rows: cut.prefill_rows, pos: start });
    }
    if let Some(of) = decode.filter(|_| cut.decode_rows > 0) {
        segments.push(Segment { of, skip: cut.decode_skip, rows: cut.decode_rows, pos: start + cut.prefill_rows });
    }
    let mut out = String::from("\"output_store_ref\":{\"handle\":{\"type\":\"r3router\",\"v\":1,\"segments\":[");
    for (i, s) in segments.iter().enumerate() {
        let Descriptor { layers, top_k, dtype, .. } = s.of;
        let row = u64::from(*layers) * u64::from(*top_k) * dtype.size() as u64;
        // The checksum is of all rows of the engine's object; a part of it has none.
        let crc = s.of.crc32.filter(|_| s.rows == u64::from(s.of.rows));
        let crc = crc.map_or_else(|| "null".to_owned(), |crc| crc.to_string());
        let (uri, offset) = (Json(&s.of.uri), s.of.offset + s.skip * row);
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "{}{{\"uri\":{uri},\"offset\":{offset},\"pos\":{},\"rows\":{},\"dtype\":\"{}\",\"crc32\":{crc}}}",
            if i > 0 { "," } else { "" },
            s.pos,
            s.rows,
            dtype.name()
        );
    }
    let Descriptor { layers, top_k, dtype, .. } = prefill;
    let _ = write!(
        out,
        "],\"expires_s\":{EXPIRES_S}}},\"fields\":{{\"routed_experts\":{{\"dtype\":\"{}\",\"shape\":[{},{layers},{top_k}]}}}}}}",
        dtype.name(),
        cut.rows()
    );
    out
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
