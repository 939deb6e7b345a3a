//! What one rank can hold: request rows, metadata slots, state slots and KV tokens. Each formula stands here once.
use std::time::Duration;

use crate::load::RankReport;
use crate::topology::{EngineFacts, Role};

/// Running limit that is assumed when neither facts nor reports name one.
pub const DEFAULT_MAX_RUNNING: u32 = 256;
/// `--num-reserved-decode-tokens` when unknown (engine default).
pub const DEFAULT_RESERVED_DECODE_TOKENS: u32 = 512;
/// `SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`: engines count at most this much growth for a request.
pub const CLIP_MAX_NEW_TOKENS: u32 = 4096;
/// `--chunked-prefill-size` when unknown (engine default on most devices).
pub const DEFAULT_CHUNK_TOKENS: u32 = 8192;
/// `SGLANG_DISAGGREGATION_WAITING_TIMEOUT` when unknown.
pub const DEFAULT_WAITING_TIMEOUT: Duration = Duration::from_secs(300);

/// No bound.
pub const UNBOUNDED: i64 = i64::MAX;

/// The limits of one idle rank. Counts are requests, pools are tokens; [`UNBOUNDED`] where nothing bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Requests that decode together.
    pub running: i64,
    /// Request rows, shared by running, waiting and in transfer.
    pub rows: i64,
    /// Metadata slots, taken from reservation to the arrival of the KV.
    pub metadata: i64,
    /// Requests that the state slots admit.
    pub mamba: i64,
    /// State slots of one request.
    pub mamba_per_request: i64,
    /// KV pool.
    pub kv_pool: i64,
    /// KV that may be reserved on a rank that is not idle: the pool without its margin.
    pub kv_limit: i64,
    /// KV page.
    pub page: i64,
    /// Growth room that the engine demands of every request.
    pub reserved_decode: i64,
    /// Uncached tokens of one prefill batch.
    pub chunk: i64,
    /// Longest prompt.
    pub max_prompt: i64,
    /// The engine's waiting timeout, seconds.
    pub waiting_timeout: f64,
}

impl Capacity {
    /// The limits of a rank from what is known of its engine. A report's pool wins over the facts' one, because pools can shrink.
    pub fn of(role: Role, facts: &EngineFacts, report: Option<&RankReport>, kv_margin: f64) -> Self {
        let running = facts
            .max_running
            .or_else(|| report.and_then(|r| r.max_running))
            .map_or(i64::from(DEFAULT_MAX_RUNNING), |n| i64::from(n.max(1)));
        let pool = report
            .and_then(|r| r.max_total_tokens)
            .or(facts.max_total_tokens)
            .filter(|&n| n > 0)
            .map_or(UNBOUNDED, |n| i64::try_from(n).unwrap_or(UNBOUNDED));
        let per_request = i64::from(facts.mamba_slots_per_request.unwrap_or(1).max(1));
        let (rows, metadata) = match role {
            Role::Regular => (running, UNBOUNDED),
            // engine-protocol 3.1: rows = running + extra, metadata slots = 2 x running.
            Role::Decode => (running + extra_rows(running, facts.extra_slots), 2 * running),
            // Prefill takes a metadata slot from bootstrap until its transfer is confirmed.
            Role::Prefill => (UNBOUNDED, 2 * running),
        };
        let mamba = match role {
            Role::Prefill => UNBOUNDED,
            _ => facts.mamba_slots.map_or(UNBOUNDED, |slots| i64::from(slots) / per_request),
        };
        Self {
            running,
            rows,
            metadata,
            mamba,
            mamba_per_request: per_request,
            kv_pool: pool,
            kv_limit: if pool == UNBOUNDED {
                UNBOUNDED
            } else {
                (pool as f64 * (1.0 - kv_margin.clamp(0.0, 0.9))) as i64
            },
            page: i64::from(facts.page_size.unwrap_or(1).max(1)),
            reserved_decode: i64::from(facts.reserved_decode_tokens.unwrap_or(DEFAULT_RESERVED_DECODE_TOKENS)),
            chunk: i64::from(facts.chunked_prefill_size.filter(|&n| n > 0).unwrap_or(DEFAULT_CHUNK_TOKENS)),
            max_prompt: facts.max_input_tokens.map_or(UNBOUNDED, |n| i64::try_from(n).unwrap_or(UNBOUNDED)),
            waiting_timeout: facts.waiting_timeout.unwrap_or(DEFAULT_WAITING_TIMEOUT).as_secs_f64().max(1e-3),
        }
    }

    /// KV tokens of a prompt, in whole pages.
    pub fn prompt_kv(&self, prompt: u32) -> i64 {
        let prompt = i64::from(prompt);
        (prompt + self.page - 1) / self.page * self.page
    }

    /// KV tokens that a request reserves on decode: `max(page_ceil(prompt) + R, prompt + min(max_new, 4096))`
    /// (engine-protocol 3.1; the engine subtracts what it may retract, the router does not, so that retraction stays rare).
    pub fn kv_need(&self, prompt: u32, max_new: u32) -> i64 {
        let growth = i64::from(max_new.min(CLIP_MAX_NEW_TOKENS));
        (self.prompt_kv(prompt) + self.reserved_decode).max(i64::from(prompt) + growth)
    }

    /// Whether an idle rank could ever hold the request on its decode side.
    pub fn fits_idle(&self, prompt: u32, max_new: u32) -> bool {
        self.mamba > 0 && i64::from(prompt) <= self.max_prompt && self.kv_need(prompt, max_new) <= self.kv_pool
    }

    /// Whether some request that `before` could hold does not fit any more, even on an idle rank.
    pub fn holds_less_than(&self, before: &Self) -> bool {
        self.kv_pool < before.kv_pool
            || self.max_prompt < before.max_prompt
            || self.mamba < before.mamba.min(1)
            || self.page > before.page
            || self.reserved_decode > before.reserved_decode
    }

    /// Whether an idle prefill rank could ever hold the prompt.
    pub fn fits_prompt(&self, prompt: u32) -> bool {
        i64::from(prompt) <= self.max_prompt && self.prompt_kv(prompt) <= self.kv_pool
    }
}

/// Extra request rows of a decode rank: what was set, else twice the running limit where that limit is at most 32
/// (engine-protocol 3.1, `--disaggregation-decode-extra-slots`).
fn extra_rows(running: i64, set: Option<u32>) -> i64 {
    match set {
        Some(extra) => i64::from(extra),
        None if running <= 32 => 2 * running,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_reported_decode_rank_has_128_rows_256_metadata_slots_and_128_state_slots() {
        let facts = EngineFacts {
            max_running: Some(128),
            mamba_slots: Some(128),
            max_total_tokens: Some(5_130_000),
            page_size: Some(64),
            ..Default::default()
        };
        let c = Capacity::of(Role::Decode, &facts, None, 0.05);
        assert_eq!((c.rows, c.metadata, c.mamba), (128, 256, 128));
        assert_eq!((c.kv_pool, c.kv_limit), (5_130_000, 4_873_500));
        assert_eq!(c.kv_need(57_000, 100), 57_024 + 512);
        assert_eq!(c.kv_need(57_000, 20_000), 57_000 + 4096);
    }

    #[test]
    fn three_slots_per_request_hold_four_requests_in_twelve_slots() {
        let facts = EngineFacts {
            mamba_slots: Some(12),
            mamba_slots_per_request: Some(3),
            max_running: Some(12),
            ..Default::default()
        };
        assert_eq!(Capacity::of(Role::Decode, &facts, None, 0.05).mamba, 4);
    }

    #[test]
    fn small_running_limits_get_twice_as_many_extra_rows() {
        let rows = |running, extra_slots| {
            let facts = EngineFacts { max_running: Some(running), extra_slots, ..Default::default() };
            Capacity::of(Role::Decode, &facts, None, 0.0).rows
        };
        assert_eq!([rows(8, None), rows(32, None), rows(33, None), rows(8, Some(0))], [24, 96, 33, 8]);
    }

    #[test]
    fn nothing_known_means_256_rows_and_no_other_bound() {
        let c = Capacity::of(Role::Decode, &EngineFacts::default(), None, 0.05);
        assert_eq!((c.rows, c.mamba, c.kv_pool, c.kv_limit), (256, UNBOUNDED, UNBOUNDED, UNBOUNDED));
        assert!(c.fits_idle(u32::MAX, u32::MAX));
    }

    #[test]
    fn a_reported_pool_replaces_the_pool_of_the_facts() {
        let facts = EngineFacts { max_total_tokens: Some(1000), ..Default::default() };
        let report = RankReport { max_total_tokens: Some(600), ..Default::default() };
        assert_eq!(Capacity::of(Role::Decode, &facts, Some(&report), 0.0).kv_pool, 600);
    }

    proptest! {
        #[test]
        fn a_need_is_never_below_the_prompt_in_pages_and_its_reserve(prompt in 0u32..1_000_000, max_new in 0u32..1_000_000, page in 1u32..256) {
            let facts = EngineFacts { page_size: Some(page), ..Default::default() };
            let c = Capacity::of(Role::Decode, &facts, None, 0.05);
            let need = c.kv_need(prompt, max_new);
            prop_assert!(need >= c.prompt_kv(prompt) + 512);
            prop_assert!(need >= i64::from(prompt) + i64::from(max_new.min(4096)));
            prop_assert!(need <= i64::from(prompt) + i64::from(page) + 4096);
            prop_assert_eq!(c.prompt_kv(prompt) % i64::from(page), 0);
        }
    }
}
