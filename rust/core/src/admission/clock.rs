//! What time alone changes: windows, rates, breakers, stale reports, and idle prefill ranks.
use super::Admission;
use super::decide::TICK;
use crate::reason::Reason;
use crate::time::Moment;
use crate::topology::Role;

/// Half-life of the idle tokens that let a prefix move, seconds.
const IDLE_HALF_LIFE: f64 = 10.0;
/// Tokens per second of a prefill rank that was not measured yet.
const RATE_UNKNOWN: f64 = 5_000.0;
/// Runs of the affinity that one tick sweeps.
const SWEEP_RUNS: usize = 8192;

impl Admission {
    pub(super) fn tick(&mut self, now: Moment) {
        let secs = now.since(self.last_tick).as_secs_f64().min(1.0);
        self.last_tick = now;
        self.next_tick = now + TICK;
        let limited = !self.queue.is_empty()
            && matches!(
                self.blocked,
                Reason::Window | Reason::Prefill | Reason::PrefillWait | Reason::Affinity | Reason::R3Egress
            );
        self.flow_limited &= limited;
        if self.flow.update(now, self.flow_limited) {
            self.flow_limited = true;
        }
        self.fleet.tick(now, self.flow.rate(), self.flow.tau(), !self.queue.is_empty());
        self.idle_tokens *= (-secs / IDLE_HALF_LIFE * std::f64::consts::LN_2).exp();
        if self.prefix_waits && !self.queue.is_empty() {
            let idle = self
                .fleet
                .ranks
                .iter()
                .filter(|r| r.live && r.role == Role::Prefill && r.closed == Reason::Bound)
                .filter(|r| r.queued_tokens() < r.capacity.chunk)
                .map(|r| r.service.rate().unwrap_or(RATE_UNKNOWN))
                .sum::<f64>();
            self.idle_tokens += idle * secs;
            self.dirty = true;
        }
        self.policies.tick(now);
        // Who waits for a rank may have waited long enough.
        self.dirty |= self.key_waits && !self.queue.is_empty();
        // A pair that has rested may be what somebody waits for.
        let resting = self.cooldowns.resting(now);
        self.dirty |= resting < self.resting;
        self.resting = resting;
        for affinity in [&mut self.affinity, &mut self.affinity_back] {
            if !affinity.swept() {
                affinity.sweep(SWEEP_RUNS);
            }
        }
        if self.affinity.swept() && self.affinity_back.swept() && !self.fleet.retired.is_empty() {
            self.fleet.reuse_retired();
        }
    }
}
