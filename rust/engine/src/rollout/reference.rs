//! References in replies (`output_store_ref`): read, fetched segment by segment, and checked.
use std::sync::Arc;

use http::{Method, Uri};
use http_body_util::BodyExt;
use serde::Deserialize;

use super::client::Http;
use super::verify::{Findings, NarrowCheck};
use crate::emulator::pattern::{Pattern, Rows};

/// `meta_info.output_store_ref`.
#[derive(Debug, Deserialize)]
pub(crate) struct Reference {
    handle: Handle,
    fields: Fields,
}

#[derive(Debug, Deserialize)]
struct Handle {
    #[serde(rename = "type")]
    kind: String,
    segments: Vec<Segment>,
}

#[derive(Debug, Deserialize)]
struct Fields {
    routed_experts: Field,
}

#[derive(Debug, Deserialize)]
struct Field {
    dtype: String,
    shape: [u64; 3],
}

#[derive(Debug, Deserialize)]
struct Segment {
    /// Serves the segment's rows and no others; `offset` is of the file only.
    uri: String,
    pos: u32,
    rows: u32,
    dtype: String,
    /// `None`: the place that serves the rows knows it.
    crc32: Option<u32>,
}

/// Where a segment is fetched: its host, or the router's for a path.
fn address(uri: &str, base: &Uri) -> Result<Uri, String> {
    let text = match uri.strip_prefix("r3://") {
        Some(rest) => format!("http://{rest}"),
        None if uri.starts_with('/') => {
            format!("http://{}{uri}", base.authority().map_or("", |a| a.as_str()))
        }
        None => uri.to_owned(),
    };
    text.parse().map_err(|e| format!("uri {uri}: {e}"))
}

/// Fetches all segments and compares them with `rows`, which must be covered from the first to the last.
pub(crate) async fn check(
    http: &mut Http,
    base: &Uri,
    reference: &Reference,
    pattern: &Arc<Pattern>,
    rows: Rows,
) -> Result<Findings, String> {
    let shape = pattern.shape();
    let dtype = if shape.narrow_width() == 1 { "uint8" } else { "uint16" };
    let field = &reference.fields.routed_experts;
    if reference.handle.kind != "r3router" || field.dtype != dtype {
        return Err(format!(
            "handle type {} with dtype {}, expected r3router with {dtype}",
            reference.handle.kind, field.dtype
        ));
    }
    if field.shape != [u64::from(rows.len()), u64::from(shape.layers), u64::from(shape.top_k)] {
        return Err(format!("shape {:?}, expected [{}, {}, {}]", field.shape, rows.len(), shape.layers, shape.top_k));
    }
    let mut findings = Findings::default();
    let mut next = rows.first();
    for segment in &reference.handle.segments {
        if segment.pos != next || segment.dtype != dtype {
            return Err(format!(
                "segment at {} with dtype {}, expected {next} with {dtype}",
                segment.pos, segment.dtype
            ));
        }
        next += segment.rows;
        let from = segment.pos - rows.first();
        let found = fetch(
            http,
            base,
            segment,
            NarrowCheck::new(pattern.clone(), rows, from, from + segment.rows),
            shape.narrow_row_bytes() as u64,
        )
        .await?;
        findings.wrong_bytes += found.wrong_bytes;
        findings.read += found.read;
    }
    if next != rows.first() + rows.len() {
        return Err(format!("segments end at {next}, expected {}", rows.first() + rows.len()));
    }
    Ok(findings)
}

async fn fetch(
    http: &mut Http,
    base: &Uri,
    segment: &Segment,
    mut check: NarrowCheck,
    row_bytes: u64,
) -> Result<Findings, String> {
    let uri = address(&segment.uri, base)?;
    let len = u64::from(segment.rows) * row_bytes;
    if len == 0 {
        return Ok(Findings::default());
    }
    let mut response = http.call(Method::GET, &uri, Vec::new()).await?;
    let status = response.status().as_u16();
    let mut came = 0;
    while let Some(frame) = response.frame().await {
        let frame = frame.map_err(|e| format!("fetch broke: {e}"))?;
        if let Some(bytes) = frame.data_ref() {
            came += bytes.len() as u64;
            check.feed(bytes);
        }
    }
    http.give_back(&uri);
    if status != 200 {
        return Err(format!("fetch of {uri} answered {status}"));
    }
    if came != len {
        return Err(format!("fetch of {uri} gave {came} bytes, expected {len}"));
    }
    let (mut found, crc) = check.finish();
    if segment.crc32.is_some_and(|told| told != crc) && found.wrong_bytes == 0 {
        // The rows are right and the checksum is not: that is one wrong promise.
        found.wrong_bytes = 1;
    }
    // Lets the rows go; a store that does not know DELETE keeps them until they expire.
    if let Ok(mut deleted) = http.call(Method::DELETE, &uri, Vec::new()).await {
        while let Some(Ok(_)) = deleted.frame().await {}
        http.give_back(&uri);
    }
    Ok(found)
}
