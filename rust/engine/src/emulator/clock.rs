//! Wall-clock time as engines write it.
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// Now, UTC, to the second.
pub fn now_utc() -> String {
    iso_utc(unix_seconds().floor()).chars().take(19).map(|c| if c == 'T' { ' ' } else { c }).collect::<String>()
        + " UTC"
}

/// UTC in the form of Python's `datetime.isoformat()`, with microseconds and offset.
pub(crate) fn iso_utc(unix: f64) -> String {
    let micros = (unix * 1e6) as u64;
    let (secs, micro) = (micros / 1_000_000, micros % 1_000_000);
    let (days, of_day) = (secs / 86_400, secs % 86_400);
    // Civil date from days, by eras of 400 years that begin on 1 March.
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    let (h, m, s) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}.{micro:06}+00:00")
}

#[cfg(test)]
mod tests {
    use super::iso_utc;

    #[test]
    fn dates_are_civil() {
        assert_eq!(iso_utc(0.0), "1970-01-01T00:00:00.000000+00:00");
        assert_eq!(iso_utc(951_782_400.5), "2000-02-29T00:00:00.500000+00:00");
        assert_eq!(iso_utc(1_790_000_000.0), "2026-09-21T14:13:20.000000+00:00");
    }
}
