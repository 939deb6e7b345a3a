//! `/v1/loads` and the mamba gauges of `/metrics`, read with tolerance: every field may be missing, versions differ.
//! Times are converted to the router's clock so that a report never claims to be younger than it is.
use std::time::Duration;

use r3router_core::load::RankReport;
use r3router_core::time::Moment;
use serde_json::Value;

/// One poll's times: when it was sent and when its answer was here.
#[derive(Clone, Copy, Debug)]
pub struct Polled {
    /// Sent at.
    pub sent: Moment,
    /// Answered at.
    pub answered: Moment,
    /// Fleet seconds in one of the engine's wall clock.
    pub scale: f64,
}

/// Maps an engine's wall clock to the router's, for answers that do not say the engine's own time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Offset {
    /// Smallest `answer's moment - load's timestamp` seen, seconds: the clock offset plus the youngest age.
    smallest: Option<f64>,
}

impl Offset {
    /// When a load with `timestamp` was measured. With the engine's time of answering (`engine_now`) the age is the difference of
    /// two readings of one clock, counted back from the moment of asking: a bound from below. Without it the smallest difference
    /// seen so far stands for the offset.
    fn measured_at(&mut self, timestamp: Option<f64>, engine_now: Option<f64>, polled: Polled) -> Moment {
        let Some(timestamp) = timestamp else { return polled.sent };
        if let Some(now) = engine_now {
            // A load that is stamped after the answer's own time was taken meanwhile: age zero.
            let age = Duration::try_from_secs_f64((now - timestamp).max(0.0) * polled.scale).unwrap_or(Duration::MAX);
            return Moment(polled.sent.0.saturating_sub(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX)));
        }
        let timestamp = timestamp * polled.scale;
        let difference = polled.answered.as_secs_f64() - timestamp;
        let offset = self.smallest.map_or(difference, |s| s.min(difference));
        self.smallest = Some(offset);
        Moment::from_secs_f64(timestamp + offset).min(polled.sent)
    }
}

/// The ranks of an answer of `/v1/loads`; empty when it is none.
pub fn rank_reports(answer: &Value, polled: Polled, offset: &mut Offset) -> Vec<RankReport> {
    let engine_now = answer.get("timestamp").and_then(|t| t.as_f64().or_else(|| t.as_str().and_then(unix_seconds)));
    let loads = answer.get("loads").or(Some(answer)).and_then(Value::as_array);
    let Some(loads) = loads else { return Vec::new() };
    loads
        .iter()
        .enumerate()
        .filter(|(_, load)| load.is_object())
        .map(|(at, load)| {
            let disagg = load.get("disaggregation").unwrap_or(&Value::Null);
            let from = |object: &Value, name: &str| number(object, name).map(|v| v as u32);
            RankReport {
                rank: number(load, "dp_rank").map_or(at as u16, |r| r as u16),
                measured_at: offset.measured_at(number(load, "timestamp"), engine_now, polled),
                running: from(load, "num_running_reqs"),
                waiting_total: from(load, "num_waiting_reqs"),
                prealloc: from(disagg, "decode_prealloc_queue_reqs"),
                transfer: from(disagg, "decode_transfer_queue_reqs"),
                retracted: from(disagg, "decode_retracted_queue_reqs"),
                bootstrap: from(disagg, "prefill_bootstrap_queue_reqs"),
                inflight: from(disagg, "prefill_inflight_queue_reqs"),
                used_tokens: number(load, "num_used_tokens").map(|v| v as u64),
                max_total_tokens: number(load, "max_total_num_tokens").map(|v| v as u64),
                max_running: from(load, "max_running_requests"),
                waiting_uncached_tokens: number(load, "num_waiting_uncached_tokens").map(|v| v as u64),
                mamba_free: None,
            }
        })
        .collect()
}

fn number(object: &Value, name: &str) -> Option<f64> {
    object.get(name).and_then(Value::as_f64).filter(|v| v.is_finite() && *v >= 0.0)
}

/// Seconds since 1970 of `2026-09-30T12:00:00.25+00:00`.
fn unix_seconds(text: &str) -> Option<f64> {
    let (date, time) = text.split_once(['T', ' '])?;
    let mut parts = date.splitn(3, '-');
    let year: i64 = parts.next()?.parse().ok()?;
    let month: i64 = parts.next()?.parse().ok()?;
    let day: i64 = parts.next()?.parse().ok()?;
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let (clock, zone) = match time.find(['Z', '+', '-']) {
        Some(at) => time.split_at(at),
        None => (time, "Z"),
    };
    let mut parts = clock.splitn(3, ':');
    let hour: f64 = parts.next()?.parse().ok()?;
    let minute: f64 = parts.next()?.parse().ok()?;
    let second: f64 = parts.next().unwrap_or("0").parse().ok()?;
    let ahead = match zone.strip_prefix(['+', '-']) {
        None => 0.0,
        Some(ahead) => {
            let (h, m) = ahead.split_once(':').unwrap_or((ahead, "0"));
            let ahead = h.parse::<f64>().ok()? * 3600.0 + m.parse::<f64>().ok()? * 60.0;
            if zone.starts_with('+') { ahead } else { -ahead }
        }
    };
    // Days since 1970 in the Gregorian calendar, years counted from March so that the leap day comes last.
    let (y, m) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days =
        y * 365 + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) + (m * 306 + 5) / 10 + day - 1 - 719_468;
    Some(days as f64 * 86_400.0 + hour * 3600.0 + minute * 60.0 + second - ahead)
}

/// Mamba slots of one rank, from `/metrics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MambaGauge {
    /// Free slots.
    pub available: Option<u32>,
    /// Slots that can be freed.
    pub evictable: Option<u32>,
    /// Slots in use.
    pub used: Option<u32>,
}

impl MambaGauge {
    /// Slots that a new request could get.
    pub fn free(&self) -> Option<u32> {
        self.available.map(|a| a + self.evictable.unwrap_or(0))
    }

    /// The pool's size, when all three gauges were there.
    pub fn pool(&self) -> Option<u32> {
        Some(self.available? + self.evictable? + self.used?)
    }
}

/// `(dp_rank, gauge)` of every rank that `/metrics` tells a mamba pool of. Several lines of one rank (TP ranks) have one value. A pool of
/// no slot at all is none: a model without state, or a scheduler that has not told its gauges yet.
pub fn mamba_gauges(metrics: &str) -> Vec<(u16, MambaGauge)> {
    let mut gauges: Vec<(u16, MambaGauge)> = Vec::new();
    for line in metrics.lines() {
        let Some(rest) = line.strip_prefix("sglang:mamba_").or_else(|| line.strip_prefix("sglang_mamba_")) else {
            continue;
        };
        let Some((name, rest)) = rest.split_once("_tokens{") else { continue };
        let Some((labels, value)) = rest.rsplit_once('}') else { continue };
        let Ok(value) = value.split_whitespace().next().unwrap_or("").parse::<f64>() else { continue };
        let rank = labels.split(',').find_map(|l| l.trim().strip_prefix("dp_rank=\"")?.strip_suffix('"')?.parse().ok());
        let rank = rank.unwrap_or(0);
        let at = gauges.iter().position(|(r, _)| *r == rank).unwrap_or_else(|| {
            gauges.push((rank, MambaGauge::default()));
            gauges.len() - 1
        });
        let Some((_, gauge)) = gauges.get_mut(at) else { continue };
        match name {
            "available" => gauge.available = Some(value as u32),
            "evictable" => gauge.evictable = Some(value as u32),
            "used" => gauge.used = Some(value as u32),
            _ => {}
        }
    }
    gauges.retain(|(_, gauge)| gauge.pool() != Some(0));
    gauges
}

#[cfg(test)]
mod tests {
    use super::{MambaGauge, Offset, Polled, mamba_gauges, rank_reports, unix_seconds};
    use r3router_core::time::Moment;
    use serde_json::json;

    fn polled(sent: f64, answered: f64) -> Polled {
        Polled { sent: Moment::from_secs_f64(sent), answered: Moment::from_secs_f64(answered), scale: 1.0 }
    }

    #[test]
    fn iso_times_are_unix_seconds() {
        assert_eq!(unix_seconds("1970-01-01T00:00:00+00:00"), Some(0.0));
        assert_eq!(unix_seconds("2026-09-30T12:00:00.25+00:00"), Some(1_790_769_600.25));
        assert_eq!(unix_seconds("2026-09-30T14:00:00+02:00"), Some(1_790_769_600.0));
        assert_eq!(unix_seconds("2026-09-30T10:30:00-01:30"), Some(1_790_769_600.0));
        assert_eq!(unix_seconds("2024-02-29T00:00:00Z"), Some(1_709_164_800.0));
        assert_eq!(unix_seconds("yesterday"), None);
    }

    #[test]
    fn age_is_the_difference_on_the_engines_own_clock_counted_from_the_question() {
        let answer = json!({"timestamp": "2026-09-30T12:00:00.500+00:00", "loads": [
            {"timestamp": 1_790_769_600.2, "dp_rank": 1, "num_running_reqs": 8, "num_waiting_reqs": 50, "max_total_num_tokens": 5_130_000,
             "disaggregation": {"decode_transfer_queue_reqs": 40, "decode_retracted_queue_reqs": 0}}]});
        let reports = rank_reports(&answer, polled(100.0, 100.1), &mut Offset::default());
        assert_eq!(reports.len(), 1);
        assert_eq!((reports[0].rank, reports[0].running, reports[0].transfer), (1, Some(8), Some(40)));
        assert_eq!(reports[0].prealloc, None);
        assert!((reports[0].measured_at.as_secs_f64() - 99.7).abs() < 1e-6, "{:?}", reports[0].measured_at);
    }

    #[test]
    fn without_the_engines_time_the_youngest_report_sets_the_offset_and_none_is_younger_than_the_question() {
        let mut offset = Offset::default();
        let load = |t: f64| json!({"loads": [{"timestamp": t, "dp_rank": 0}]});
        let first = rank_reports(&load(1000.0), polled(10.0, 10.2), &mut offset);
        assert!((first[0].measured_at.as_secs_f64() - 10.0).abs() < 1e-6);
        // The engine stalls: the same stamp again, so the report is two seconds old.
        let stalled = rank_reports(&load(1000.0), polled(12.0, 12.1), &mut offset);
        assert!((stalled[0].measured_at.as_secs_f64() - 10.0).abs() < 0.21);
    }

    #[test]
    fn an_answer_without_stamps_is_as_old_as_the_question_and_nonsense_is_no_report() {
        let reports = rank_reports(
            &json!([{"num_running_reqs": 3}, {"num_running_reqs": -1}]),
            polled(5.0, 6.0),
            &mut Offset::default(),
        );
        assert_eq!(reports[0].measured_at, Moment::from_secs_f64(5.0));
        assert_eq!((reports[1].rank, reports[1].running), (1, None));
        assert!(rank_reports(&json!({"loads": 3}), polled(5.0, 6.0), &mut Offset::default()).is_empty());
        assert!(rank_reports(&json!("no"), polled(5.0, 6.0), &mut Offset::default()).is_empty());
    }

    #[test]
    fn mamba_gauges_are_read_per_rank() {
        let text = "# HELP x\nsglang:mamba_available_tokens{engine_type=\"decode\",dp_rank=\"0\",tp_rank=\"0\"} 70.0\n\
                    sglang:mamba_evictable_tokens{dp_rank=\"0\"} 2\nsglang:mamba_used_tokens{dp_rank=\"0\"} 56\n\
                    sglang:mamba_usage{dp_rank=\"0\"} 0.4\nsglang:mamba_available_tokens{dp_rank=\"1\"} 5\n";
        let gauges = mamba_gauges(text);
        assert_eq!(gauges[0], (0, MambaGauge { available: Some(70), evictable: Some(2), used: Some(56) }));
        assert_eq!((gauges[0].1.free(), gauges[0].1.pool()), (Some(72), Some(128)));
        assert_eq!((gauges[1].0, gauges[1].1.free(), gauges[1].1.pool()), (1, Some(5), None));
    }

    /// A plain `MoE` model has the gauges too, all of them zero; so may a scheduler that has not made a step.
    #[test]
    fn gauges_of_no_slot_at_all_bound_nothing() {
        let zero = "sglang:mamba_available_tokens{dp_rank=\"0\"} 0.0\nsglang:mamba_evictable_tokens{dp_rank=\"0\"} 0.0\n\
                    sglang:mamba_used_tokens{dp_rank=\"0\"} 0.0\n";
        assert_eq!(mamba_gauges(zero), []);
        let taken = zero.replace("used_tokens{dp_rank=\"0\"} 0.0", "used_tokens{dp_rank=\"0\"} 8.0");
        assert_eq!(mamba_gauges(&taken)[0].1.free(), Some(0));
    }
}
