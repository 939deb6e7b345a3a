//! Plays the plug-in's arena and its agent: rows that an engine left behind, served in their narrow form by row or byte range.
use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;

use super::pattern::{Pattern, Rows};

/// Payloads that are kept; the oldest go first. A real arena is bounded by its bytes.
const MAX_SEGMENTS: usize = 1 << 16;

/// The segments of one engine.
#[derive(Debug, Default)]
pub(crate) struct Agent {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    segments: HashMap<u64, Rows>,
    order: VecDeque<u64>,
    next: u64,
}

/// A part of a segment, in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    All,
    /// `?rows=a:b`, counted from the segment's first row.
    Rows(u32, u32),
    /// `Range: bytes=a-b`, half open here.
    Bytes(u64, Option<u64>),
    /// `Range: bytes=-n`.
    Suffix(u64),
}

impl Agent {
    /// Keeps rows and names them.
    pub(crate) fn put(&self, rows: Rows) -> u64 {
        let mut inner = self.inner.lock();
        inner.next += 1;
        let id = inner.next;
        inner.segments.insert(id, rows);
        inner.order.push_back(id);
        if inner.order.len() > MAX_SEGMENTS
            && let Some(oldest) = inner.order.pop_front()
        {
            inner.segments.remove(&oldest);
        }
        id
    }

    pub(crate) fn get(&self, id: u64) -> Option<Rows> {
        self.inner.lock().segments.get(&id).copied()
    }

    /// Lets a segment go; `false` when it is not there.
    pub(crate) fn delete(&self, id: u64) -> bool {
        self.inner.lock().segments.remove(&id).is_some()
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.inner.lock().segments.len()
    }
}

/// CRC-32 of the narrow bytes of `rows`.
pub fn crc32_of(pattern: &Pattern, rows: &Rows) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    let mut tile = Vec::new();
    for from in (0..rows.len()).step_by(512) {
        tile.clear();
        pattern.append_narrow(rows, from, rows.len().min(from + 512), &mut tile);
        crc.update(&tile);
    }
    crc.finalize()
}

impl Part {
    /// Reads `?rows=a:b` and the `Range` header; both at once are refused.
    pub(crate) fn parse(query: Option<&str>, range: Option<&str>) -> Result<Self, String> {
        let rows = query.and_then(|q| q.split('&').find_map(|p| p.strip_prefix("rows=")));
        match (rows, range) {
            (None, None) => Ok(Self::All),
            (Some(_), Some(_)) => Err("rows and Range exclude each other".to_owned()),
            (Some(rows), None) => rows
                .split_once(':')
                .and_then(|(a, b)| Some(Self::Rows(a.parse().ok()?, b.parse().ok()?)))
                .ok_or_else(|| format!("rows={rows} is not a:b")),
            (None, Some(range)) => {
                let spec = range.strip_prefix("bytes=").ok_or_else(|| format!("Range {range} is not bytes=a-b"))?;
                let (a, b) = spec.split_once('-').ok_or_else(|| format!("Range {range} is not bytes=a-b"))?;
                let number = |s: &str| s.parse::<u64>().map_err(|_| format!("Range {range} is not bytes=a-b"));
                match (a, b) {
                    ("", n) => Ok(Self::Suffix(number(n)?)),
                    (a, "") => Ok(Self::Bytes(number(a)?, None)),
                    (a, b) => Ok(Self::Bytes(number(a)?, Some(number(b)? + 1))),
                }
            }
        }
    }

    /// The bytes of this part in a segment of `total` bytes with `row` bytes a row; `None` when it lies outside.
    pub(crate) fn span(self, total: u64, row: u64) -> Option<(u64, u64)> {
        let (from, to) = match self {
            Self::All => (0, total),
            Self::Rows(a, b) => (u64::from(a) * row, u64::from(b) * row),
            Self::Bytes(a, b) => (a, b.unwrap_or(total).min(total)),
            Self::Suffix(n) => (total.saturating_sub(n), total),
        };
        (from <= to && to <= total).then_some((from, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::pattern::R3Shape;

    #[test]
    fn parts_are_read_and_bounded() {
        assert_eq!(Part::parse(None, None), Ok(Part::All));
        assert_eq!(Part::parse(Some("x=1&rows=2:5"), None), Ok(Part::Rows(2, 5)));
        assert_eq!(Part::parse(None, Some("bytes=10-19")), Ok(Part::Bytes(10, Some(20))));
        assert_eq!(Part::parse(None, Some("bytes=-4")), Ok(Part::Suffix(4)));
        assert!(Part::parse(Some("rows=2"), None).is_err());
        assert!(Part::parse(Some("rows=1:2"), Some("bytes=0-1")).is_err());
        assert_eq!(Part::Rows(2, 5).span(100, 10), Some((20, 50)));
        assert_eq!(Part::Rows(2, 11).span(100, 10), None);
        assert_eq!(Part::Rows(5, 2).span(100, 10), None);
        assert_eq!(Part::Bytes(90, Some(500)).span(100, 10), Some((90, 100)));
        assert_eq!(Part::Bytes(101, None).span(100, 10), None);
    }

    #[test]
    fn the_oldest_segments_go_first_and_deleted_ones_are_gone() {
        let agent = Agent::default();
        let first = agent.put(Rows::of(1, 0, 1));
        assert!(agent.delete(first));
        assert!(!agent.delete(first));
        let second = agent.put(Rows::of(2, 0, 1));
        for _ in 0..MAX_SEGMENTS {
            agent.put(Rows::of(3, 0, 1));
        }
        assert_eq!(agent.get(second), None);
        assert!(agent.len() <= MAX_SEGMENTS);
    }

    #[test]
    fn the_checksum_is_that_of_the_served_bytes() {
        let pattern = Pattern::new(R3Shape { layers: 2, top_k: 3, experts: 512 });
        let rows = Rows::decode(1, 2, 0, 700, 1300);
        let mut bytes = Vec::new();
        pattern.append_narrow(&rows, 0, rows.len(), &mut bytes);
        assert_eq!(crc32_of(&pattern, &rows), crc32fast::hash(&bytes));
    }
}
