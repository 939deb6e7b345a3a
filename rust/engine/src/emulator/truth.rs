//! What really happened in an engine, for tests and for the incident table: queues, peaks, means, how requests ended. Read by
//! `GET /emulator/truth`; no router can see it.
use std::collections::{BTreeMap, HashMap, HashSet};

use r3router_core::time::Moment;
use serde::Serialize;

use super::scale::Scale;
use crate::model::{Finish, RankLoad, Reply};

/// Waits that are kept for quantiles.
const MAX_WAITS: usize = 1 << 20;

/// One rank: now, at its peak, and on average. Times are the model's, tokens are the wire's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RankTruth {
    /// The rank.
    pub rank: u16,
    /// In the running batch.
    pub running: u32,
    /// Waits for a batch or a slot.
    pub waiting: u32,
    /// Decode: waits for memory.
    pub prealloc: u32,
    /// Decode: memory reserved, KV not here.
    pub transfer: u32,
    /// Decode: pushed out.
    pub retracted: u32,
    /// Prefill: waits for decode.
    pub bootstrap: u32,
    /// Prefill: computed, transfer not confirmed.
    pub inflight: u32,
    /// KV tokens in use.
    pub used_tokens: u64,
    /// Most that `transfer` ever was.
    pub peak_transfer: u32,
    /// Most that `running` ever was.
    pub peak_running: u32,
    /// Most that `prealloc` ever was.
    pub peak_prealloc: u32,
    /// Most that `bootstrap` ever was.
    pub peak_bootstrap: u32,
    /// Most KV tokens in use.
    pub peak_used_tokens: u64,
    /// Mean of `running` over time.
    pub mean_running: f64,
    /// Mean of `transfer` over time.
    pub mean_transfer: f64,
    /// Requests that this rank answered.
    pub served: u64,
}

/// One engine.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EngineTruth {
    /// Base URL.
    pub url: String,
    /// `prefill`, `decode` or `regular`.
    pub role: &'static str,
    /// The ranks.
    pub ranks: Vec<RankTruth>,
    /// Generate requests that came in.
    pub requests: u64,
    /// Generate requests that ended with their length.
    pub completed: u64,
    /// Of those that failed: by the engine's own 300 s clocks.
    pub timeouts: u64,
    /// Graceful aborts (200).
    pub aborted: u64,
    /// Everything else that failed, by status.
    pub failed: BTreeMap<u16, u64>,
    /// The last few failures, in the engine's words.
    pub last_failures: Vec<String>,
    /// Clients that left before their reply.
    pub disconnects: u64,
    /// `/abort_request` calls.
    pub aborts: u64,
    /// Rooms that came in while the same room was still live here: a real engine mixes their KV up.
    pub duplicate_rooms: u64,
    /// Rooms live now.
    pub live_rooms: usize,
    /// R3 rows sent, in-line.
    pub r3_rows: u64,
    /// R3 rows left behind for reference.
    pub r3_referenced_rows: u64,
    /// Narrow bytes fetched by reference.
    pub r3_fetched_bytes: u64,
    /// Time from the socket to the first token known here, seconds of the model: median.
    pub wait_p50: f64,
    /// The same, 99th percentile.
    pub wait_p99: f64,
    /// Seconds of the model since the fleet started.
    pub model_seconds: f64,
}

#[derive(Clone, Debug, Default)]
struct RankTally {
    peak: RankTruth,
    running_seconds: f64,
    transfer_seconds: f64,
    last: Option<(Moment, u32, u32)>,
}

/// What is counted while an engine runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    ranks: Vec<RankTally>,
    started: Option<Moment>,
    pub(crate) requests: u64,
    completed: u64,
    timeouts: u64,
    aborted: u64,
    failed: BTreeMap<u16, u64>,
    last_failures: Vec<String>,
    pub(crate) disconnects: u64,
    pub(crate) aborts: u64,
    duplicate_rooms: u64,
    live_rooms: HashSet<u64>,
    /// When a request was first seen here, by nonce.
    pub(crate) arrivals: HashMap<u64, std::time::Instant>,
    pub(crate) r3_rows: u64,
    pub(crate) r3_referenced_rows: u64,
    pub(crate) r3_fetched_bytes: u64,
    waits: Vec<f32>,
}

/// Whether an engine's message is one of its own clocks: W on decode, B on prefill (`engine-protocol.md` 3.5). Up to 0.5.12
/// decode has one text for every cause.
pub fn is_engine_timeout(message: &str) -> bool {
    (message.contains("timed out after") && message.contains("KVPoll"))
        || message.contains("NIXL KVReceiver Exception")
        || message.contains("waiting_timeout")
}

impl Tally {
    /// Integrates the counts since the last sample.
    pub(crate) fn sample(&mut self, live: &[RankLoad], now: Moment) {
        self.started.get_or_insert(now);
        self.ranks.resize(live.len(), RankTally::default());
        for (tally, load) in self.ranks.iter_mut().zip(live) {
            if let Some((at, running, transfer)) = tally.last {
                let seconds = now.since(at).as_secs_f64();
                tally.running_seconds += f64::from(running) * seconds;
                tally.transfer_seconds += f64::from(transfer) * seconds;
            }
            tally.last = Some((now, load.running, load.transfer));
            let peak = &mut tally.peak;
            peak.peak_transfer = peak.peak_transfer.max(load.transfer);
            peak.peak_running = peak.peak_running.max(load.running);
            peak.peak_prealloc = peak.peak_prealloc.max(load.prealloc);
            peak.peak_bootstrap = peak.peak_bootstrap.max(load.bootstrap);
            peak.peak_used_tokens = peak.peak_used_tokens.max(load.used_tokens);
        }
    }

    pub(crate) fn done(&mut self, reply: &Reply, _at: Moment) {
        match &reply.finish {
            Finish::Length => {
                self.completed += 1;
                if let Some(rank) = self.ranks.get_mut(usize::from(reply.rank)) {
                    rank.peak.served += 1;
                }
            }
            Finish::Abort { status: 200, .. } => self.aborted += 1,
            Finish::Abort { status, message } => {
                if is_engine_timeout(message) {
                    self.timeouts += 1;
                } else {
                    *self.failed.entry(*status).or_default() += 1;
                }
                if self.last_failures.len() >= 16 {
                    self.last_failures.remove(0);
                }
                self.last_failures.push(message.clone());
            }
        }
        if reply.times.first_token > reply.times.arrived && self.waits.len() < MAX_WAITS {
            self.waits.push(reply.times.first_token.since(reply.times.arrived).as_secs_f32());
        }
    }

    /// A room begins to live here; `false` when it already does.
    pub(crate) fn room_opens(&mut self, room: u64) -> bool {
        let new = self.live_rooms.insert(room);
        self.duplicate_rooms += u64::from(!new);
        new
    }

    pub(crate) fn room_ends(&mut self, room: u64) {
        self.live_rooms.remove(&room);
    }

    /// Forgets peaks, means, waits and counts; what lives stays.
    pub(crate) fn reset(&mut self, now: Moment) {
        let live_rooms = std::mem::take(&mut self.live_rooms);
        *self = Self { live_rooms, started: Some(now), ..Self::default() };
    }

    pub(crate) fn report(
        &self,
        url: &str,
        role: &'static str,
        live: &[RankLoad],
        now: Moment,
        scale: Scale,
    ) -> EngineTruth {
        let seconds = self.started.map_or(0.0, |at| now.since(at).as_secs_f64());
        let ranks = live
            .iter()
            .zip(&self.ranks)
            .map(|(load, tally)| RankTruth {
                rank: load.rank,
                running: load.running,
                waiting: load.waiting,
                prealloc: load.prealloc,
                transfer: load.transfer,
                retracted: load.retracted,
                bootstrap: load.bootstrap,
                inflight: load.inflight,
                used_tokens: scale.wire(load.used_tokens),
                peak_used_tokens: scale.wire(tally.peak.peak_used_tokens),
                mean_running: tally.running_seconds / seconds.max(1e-9),
                mean_transfer: tally.transfer_seconds / seconds.max(1e-9),
                ..tally.peak.clone()
            })
            .collect();
        let mut waits = self.waits.clone();
        EngineTruth {
            url: url.to_owned(),
            role,
            ranks,
            requests: self.requests,
            completed: self.completed,
            timeouts: self.timeouts,
            aborted: self.aborted,
            failed: self.failed.clone(),
            last_failures: self.last_failures.clone(),
            disconnects: self.disconnects,
            aborts: self.aborts,
            duplicate_rooms: self.duplicate_rooms,
            live_rooms: self.live_rooms.len(),
            r3_rows: self.r3_rows,
            r3_referenced_rows: self.r3_referenced_rows,
            r3_fetched_bytes: self.r3_fetched_bytes,
            wait_p50: quantile(&mut waits, 0.50),
            wait_p99: quantile(&mut waits, 0.99),
            model_seconds: seconds,
        }
    }
}

/// The value below which a part `q` of `values` lies (nearest rank); 0 when there are none.
pub fn quantile(values: &mut [f32], q: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let rank = ((values.len() as f64 * q).ceil() as usize).clamp(1, values.len()) - 1;
    let (_, value, _) = values.select_nth_unstable_by(rank, f32::total_cmp);
    f64::from(*value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_rank() {
        let mut values: Vec<f32> = (1..=100).map(|v| v as f32).collect();
        let whole = |value: f64| value as i64;
        assert_eq!((whole(quantile(&mut values, 0.5)), whole(quantile(&mut values, 0.99))), (50, 99));
        assert_eq!((whole(quantile(&mut [], 0.5)), whole(quantile(&mut [7.0], 0.99))), (0, 7));
    }

    #[test]
    fn engine_clocks_are_told_from_other_failures() {
        assert!(is_engine_timeout("Request 1 timed out after 300.0s in KVPoll.WaitingForInput"));
        assert!(is_engine_timeout("Decode transfer failed ... NIXL KVReceiver Exception"));
        assert!(!is_engine_timeout("Decode transfer failed ... Aborted by AbortReq."));
    }

    #[test]
    fn a_room_that_is_still_live_is_counted_as_a_duplicate() {
        let mut tally = Tally::default();
        assert!(tally.room_opens(5));
        assert!(!tally.room_opens(5));
        tally.room_ends(5);
        assert!(tally.room_opens(5));
        assert_eq!(tally.duplicate_rooms, 1);
    }
}
