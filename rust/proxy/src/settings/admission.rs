//! What the settings mean for `r3router_core`.
use std::time::Duration;

use r3router_core::admission::AdmissionConfig;
use r3router_core::capacity::DEFAULT_WAITING_TIMEOUT;
use r3router_core::policy::{self, PolicyConfig};

use super::names::Policy;
use super::table::Settings;

/// How much later than the engines the router gives up, so that theirs is the message.
const AFTER_THE_ENGINE: Duration = Duration::from_secs(30);

impl Settings {
    /// The admission's configuration. `seed` should differ between processes.
    pub fn admission_config(&self, seed: u64) -> AdmissionConfig {
        let defaults = AdmissionConfig::default();
        AdmissionConfig {
            enabled: self.admission,
            window: self.window,
            queue_max_requests: self.queue_size,
            queue_max_bytes: self.queue_max_bytes,
            kv_margin: self.kv_margin,
            default_max_new_tokens: self.default_max_new_tokens,
            // A report must outlive a few polls, else one lost poll closes a rank.
            stale_after: Duration::from_secs(2).max(self.poll_interval_ms * 4),
            arena_bytes: self.r3_arena_bytes,
            breaker_threshold: if self.disable_circuit_breaker { 0 } else { self.cb_failure_threshold },
            breaker_open_for: self.cb_timeout_duration_secs,
            affinity_bytes: usize::try_from(self.max_tree_size).unwrap_or(usize::MAX),
            policies: self.policies(),
            seed,
            ..defaults
        }
    }

    /// Which policy chooses ranks of which role.
    fn policies(&self) -> PolicyConfig {
        let prefill = self.prefill_policy.unwrap_or(self.policy);
        let decode = self.decode_policy.unwrap_or(match self.policy {
            Policy::CacheAware => Policy::Headroom,
            other => other,
        });
        PolicyConfig {
            of: [self.policy, prefill, decode].map(Policy::core),
            assignment: self.assignment_mode.core(),
            key_idle: self.max_idle_secs,
            bucket_interval: self.bucket_adjust_interval_secs,
        }
    }

    /// Whether any policy in use looks at the beginnings of prompts.
    pub fn by_prefix(&self) -> bool {
        let PolicyConfig { of: [regular, prefill, decode], .. } = self.policies();
        let looks = |policy| matches!(policy, policy::Policy::CacheAware | policy::Policy::PrefixHash);
        // A session that comes back to its prefill rank has most of its prompt cached there, which admission counts.
        let returns = matches!(prefill, policy::Policy::Manual | policy::Policy::ConsistentHashing);
        if self.pd_disaggregation { looks(prefill) || looks(decode) || returns } else { looks(regular) }
    }

    /// Whether routing keys must mean the same rank in every router.
    pub fn hashes_keys(&self) -> bool {
        self.policies().of.contains(&policy::Policy::ConsistentHashing)
    }

    /// These settings with the limits and pauses that follow the fleet's clock in the machine's time. They are the same unless the
    /// fleet is an emulated one with a scale.
    #[must_use]
    pub fn in_machine_time(mut self) -> Self {
        let scale = self.time_scale;
        for span in [
            &mut self.request_timeout_secs,
            &mut self.queue_timeout_secs,
            &mut self.poll_interval_ms,
            &mut self.retry_initial_backoff_ms,
            &mut self.retry_max_backoff_ms,
        ] {
            *span = span.div_f64(scale);
        }
        // The engines' own clock is the fleet's; only what the router measures by it is the machine's.
        self.delivery_timeout_secs = Some(self.delivery_timeout().div_f64(scale));
        self
    }

    /// How long prefill may take to deliver: as set, or a little longer than the engines themselves wait.
    pub fn delivery_timeout(&self) -> Duration {
        self.delivery_timeout_secs
            .unwrap_or_else(|| self.engine_waiting_timeout_secs.unwrap_or(DEFAULT_WAITING_TIMEOUT) + AFTER_THE_ENGINE)
    }

    /// Whether decode is asked for rows from the prompt's end only. The baseline sends both engines what the client sent.
    pub fn rewrites_start_len(&self) -> bool {
        self.admission && self.start_len_rewrite
    }

    /// Attempts of one request in all, the first included (sglang-router's `--retry-max-retries 5` means five in all).
    pub fn attempts(&self) -> u32 {
        if self.disable_retries { 1 } else { self.retry_max_retries.max(1) }
    }
}
