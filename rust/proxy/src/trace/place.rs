//! `traceparent` of W3C Trace Context: where in which trace a caller stands.
use http::{HeaderMap, HeaderName, HeaderValue};

/// The header with the caller's place.
pub(super) const PARENT: HeaderName = HeaderName::from_static("traceparent");
/// The header with what tracing systems add to it.
pub(super) const STATE: HeaderName = HeaderName::from_static("tracestate");
/// Somebody records the trace.
const SAMPLED: u8 = 1;
/// The flags that are known: sampled, and that the trace's id is random.
const KNOWN: u8 = 3;
/// Bytes of `00-<32 digits>-<16 digits>-<2 digits>`.
const LENGTH: usize = 55;

/// A span of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The trace's id, never 0.
    pub trace: u128,
    /// The span's id, never 0.
    pub span: u64,
    /// Sampled, random.
    pub flags: u8,
}

impl Place {
    /// A new trace; a part `ratio` of them is sampled.
    pub fn root(ratio: f64) -> Self {
        // In [0, 1): a ratio of 1 is all of them, one of 0 is none.
        let sampled = if rand::random::<f64>() < ratio { SAMPLED } else { 0 };
        Self { trace: rand::random::<u128>().max(1), span: new_span(), flags: KNOWN & !SAMPLED | sampled }
    }

    /// Says in the headers of a call that it comes from here.
    pub fn mark(self, headers: &mut HeaderMap) {
        headers.insert(PARENT, self.header());
    }

    /// A new span of the same trace.
    #[must_use]
    pub fn child(self) -> Self {
        Self { span: new_span(), ..self }
    }

    /// What the headers say; `None` when they say nothing, something that is no place, or more than one.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut all = headers.get_all(PARENT).iter();
        let first = all.next()?;
        if all.next().is_some() {
            return None;
        }
        Self::parse(first.as_bytes())
    }

    /// Reads the header's value. A version that is not known is read as far as this one goes, as the specification asks.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (version, rest) = (value.get(..2)?, value.get(2..LENGTH)?);
        let (trace, span, flags) = (rest.get(1..33)?, rest.get(34..50)?, rest.get(51..53)?);
        let dashes = [0, 33, 50].iter().all(|at| rest.get(*at) == Some(&b'-'));
        let version = hex(version)?;
        let ends = value.len() == LENGTH || (version > 0 && value.get(LENGTH) == Some(&b'-'));
        if !dashes || version == 0xff || !ends {
            return None;
        }
        let place = Self { trace: hex(trace)?, span: hex(span)? as u64, flags: hex(flags)? as u8 & KNOWN };
        (place.trace != 0 && place.span != 0).then_some(place)
    }

    /// The trace's id as it is written.
    pub fn trace_id(self) -> TraceId {
        TraceId(self.trace)
    }

    /// Whether the trace is recorded.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The header's value.
    pub fn header(self) -> HeaderValue {
        let text = format!("00-{:032x}-{:016x}-{:02x}", self.trace, self.span, self.flags);
        HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static(""))
    }
}

/// Written as 32 hex digits.
#[derive(Clone, Copy, Debug)]
pub struct TraceId(u128);

impl std::fmt::Display for TraceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

fn new_span() -> u64 {
    rand::random::<u64>().max(1)
}

/// Lower-case hex digits, at most 32 of them.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |value, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::Place;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_place_is_read_and_written_as_it_was() {
        let place = Place::parse(GOOD.as_bytes()).unwrap();
        assert_eq!(
            (place.trace, place.span, place.is_sampled()),
            (0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c, 0xb7ad_6b71_6920_3331, true)
        );
        assert_eq!(place.header(), GOOD);
        let child = place.child();
        assert_eq!((child.trace, child.flags), (place.trace, place.flags));
        assert_ne!(child.span, place.span);
        for (ratio, sampled) in [(1.0, true), (0.0, false)] {
            let root = Place::root(ratio);
            assert_eq!(Place::parse(root.header().as_bytes()), Some(root));
            assert_eq!(root.is_sampled(), sampled);
        }
        let some = (0..4000).filter(|_| Place::root(0.25).is_sampled()).count();
        assert!((800..1200).contains(&some), "{some} of 4000");
    }

    #[test]
    fn versions_to_come_are_read_and_what_is_no_place_is_none() {
        let unsampled = Place::parse(GOOD.replace("-01", "-fe").as_bytes()).unwrap();
        assert_eq!((unsampled.is_sampled(), unsampled.flags), (false, 2), "flags that are not known are not passed on");
        for later in [GOOD.replacen("00", "cc", 1), GOOD.replacen("00", "01", 1) + "-what-ever"] {
            assert!(Place::parse(later.as_bytes()).is_some(), "{later}");
        }
        for bad in [
            "",
            "00",
            &GOOD[..54],
            &(GOOD.to_owned() + "0"),
            &(GOOD.to_owned() + "-00"),
            &(GOOD.replacen("00", "01", 1) + "00"),
            &GOOD.replacen("00", "ff", 1),
            &GOOD.to_uppercase(),
            &GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &GOOD.replace("b7ad6b7169203331", &"0".repeat(16)),
            &GOOD.replace("-b7", "_b7"),
            &GOOD.replace("0af", "0ag"),
            &GOOD.replace("-01", "-0x"),
        ] {
            assert_eq!(Place::parse(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn two_places_are_none() {
        let mut headers = HeaderMap::new();
        assert_eq!(Place::of(&headers), None);
        headers.append(super::PARENT, HeaderValue::from_static(GOOD));
        assert!(Place::of(&headers).is_some());
        headers.append(super::PARENT, HeaderValue::from_static(GOOD));
        assert_eq!(Place::of(&headers), None);
    }
}
