//! A small generator of its own (`SplitMix64`), so that a seed means the same run whatever the core draws from.

/// Numbers from a seed.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// `low..=high`.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        if high <= low {
            return low;
        }
        low + self.bits() % (high - low + 1)
    }

    /// True `percent` times in a hundred.
    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.bits() % 100 < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.bits() % of.len() as u64) as usize]
    }

    /// Many small values and few large ones: uniform in the logarithm.
    pub(crate) fn skewed(&mut self, low: u64, high: u64) -> u64 {
        let unit = (self.bits() >> 11) as f64 / (1u64 << 53) as f64;
        let (low, high) = (low.max(1) as f64, high.max(1) as f64);
        ((low.ln() + unit * (high.ln() - low.ln())).exp().round() as u64).clamp(low as u64, high as u64)
    }
}
