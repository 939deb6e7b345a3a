//! One factor between the model and the wire. The model runs the real fleet (57k-token prompts, 97 MB payloads, 300 s clocks);
//! with a factor `f` its clock runs `f` times as fast as the wall's, and what crosses the wire is `f` times smaller: tokens, rows,
//! bytes. Costs in time and clocks shrink together, so every ratio of the model holds; rates in bytes/s and tokens/s stay.
use std::time::Duration;

/// The factor, at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale(f64);

impl Default for Scale {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Scale {
    /// A scale; values below 1 or not finite count as 1.
    pub fn new(factor: f64) -> Self {
        Self(if factor.is_finite() { factor.max(1.0) } else { 1.0 })
    }

    /// Model units per wire unit.
    pub fn factor(self) -> f64 {
        self.0
    }

    /// Model tokens that so many wire tokens stand for.
    pub fn model(self, wire: u32) -> u32 {
        (f64::from(wire) * self.0).round() as u32
    }

    /// Wire tokens that stand for so many model tokens, at least 1 unless there are none.
    pub fn wire(self, model: u64) -> u64 {
        if model == 0 { 0 } else { ((model as f64 / self.0).round() as u64).max(1) }
    }

    /// Bytes in the model that so many wire bytes stand for.
    pub fn model_bytes(self, wire: u64) -> u64 {
        (wire as f64 * self.0) as u64
    }

    /// Real time that so much model time takes.
    pub fn real(self, model: Duration) -> Duration {
        model.div_f64(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollout_of_57k_tokens_is_1900_on_the_wire_at_30() {
        let scale = Scale::new(30.0);
        assert_eq!(scale.wire(57_000), 1_900);
        assert_eq!(scale.model(1_900), 57_000);
        assert_eq!(scale.real(Duration::from_secs(300)), Duration::from_secs(10));
        assert_eq!(scale.wire(3), 1);
        assert_eq!(scale.wire(0), 0);
        assert_eq!(Scale::new(f64::NAN), Scale::default());
    }
}
