//! Durations (`300`, `300s`, `1h30m`, `250ms`) and sizes (`512`, `8GiB`, `1.5GB`).
use std::time::Duration;

use super::declare::Unit;

const DURATION_UNITS: [(&str, f64); 8] =
    [("us", 1e-6), ("ms", 1e-3), ("sec", 1.0), ("min", 60.0), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86400.0)];

/// Reads a duration. A bare number counts in `unit` (seconds or milliseconds).
///
/// # Errors
/// A sentence without subject, e.g. "`5x` has an unknown unit `x`".
pub fn parse_duration(text: &str, unit: Unit) -> Result<Duration, String> {
    let text = text.trim();
    let scale = if unit == Unit::Millis { 1e-3 } else { 1.0 };
    if let Ok(number) = text.parse::<f64>() {
        return seconds(number * scale, text);
    }
    let mut total = 0.0;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let number: f64 = rest[..digits].parse().map_err(|_| format!("`{text}` is not a duration"))?;
        let word = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |n| n + digits);
        let name = &rest[digits..word];
        let (_, seconds) = DURATION_UNITS
            .iter()
            .find(|(u, _)| *u == name.trim())
            .ok_or_else(|| format!("`{text}` has an unknown unit `{}`", name.trim()))?;
        total += number * seconds;
        rest = &rest[word..];
    }
    if text.is_empty() {
        return Err("the duration is empty".to_owned());
    }
    seconds(total, text)
}

fn seconds(value: f64, text: &str) -> Result<Duration, String> {
    Duration::try_from_secs_f64(value).map_err(|_| format!("`{text}` is not a duration that can be waited for"))
}

/// The shortest exact form that [`parse_duration`] reads back, e.g. `5m`, `1.5s` as `1500ms`.
pub fn show_duration(d: Duration) -> String {
    let millis = d.as_millis();
    if !d.subsec_nanos().is_multiple_of(1_000_000) {
        return format!("{}us", d.as_micros());
    }
    if !millis.is_multiple_of(1000) {
        return format!("{millis}ms");
    }
    let secs = d.as_secs();
    match secs {
        0 => "0s".to_owned(),
        s if s.is_multiple_of(3600) => format!("{}h", s / 3600),
        s if s.is_multiple_of(60) => format!("{}m", s / 60),
        s => format!("{s}s"),
    }
}

const SIZE_UNITS: [(&str, f64); 9] = [
    ("kib", 1024.0),
    ("mib", 1_048_576.0),
    ("gib", 1_073_741_824.0),
    ("tib", 1_099_511_627_776.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("b", 1.0),
];

/// Reads a number of bytes.
///
/// # Errors
/// A sentence without subject, e.g. "`8Gb/s` is not a size".
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    if let Ok(number) = text.parse::<u64>() {
        return Ok(number);
    }
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| format!("`{text}` is not a size"))?;
    let name = text[digits..].trim().to_ascii_lowercase();
    let (_, scale) =
        SIZE_UNITS.iter().find(|(u, _)| *u == name).ok_or_else(|| format!("`{text}` has an unknown unit `{name}`"))?;
    let bytes = number * scale;
    if bytes >= 9.0e18 { Err(format!("`{text}` is more than a computer holds")) } else { Ok(bytes.round() as u64) }
}

/// The shortest exact form that [`parse_bytes`] reads back.
pub fn show_bytes(bytes: u64) -> String {
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes != 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}
