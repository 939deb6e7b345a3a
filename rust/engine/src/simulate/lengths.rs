//! Distributions of lengths.
use rand::RngExt as _;
use rand::rngs::StdRng;
use serde::Deserialize;

/// How long something is, tokens.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Lengths {
    /// Always the same.
    Fixed {
        /// Tokens.
        tokens: u32,
    },
    /// Evenly between two bounds, both included.
    Uniform {
        /// Least.
        min: u32,
        /// Most.
        max: u32,
    },
    /// Log-normal, cut off: most are short, some are very long, as outputs are.
    Lognormal {
        /// Half are shorter.
        median: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
        /// Most.
        max: u32,
    },
}

impl Lengths {
    /// Draws one, at least 1.
    pub fn draw(&self, rng: &mut StdRng) -> u32 {
        match *self {
            Self::Fixed { tokens } => tokens,
            Self::Uniform { min, max } => rng.random_range(min..=max),
            Self::Lognormal { median, sigma, max } => {
                // Box and Muller; one half of the pair is enough.
                let (u, v): (f64, f64) = (rng.random_range(f64::MIN_POSITIVE..1.0), rng.random());
                let z = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
                (median * (sigma * z).exp()).min(f64::from(max)) as u32
            }
        }
        .max(1)
    }

    pub(super) fn check(&self, what: &str) -> Result<(), String> {
        match *self {
            Self::Uniform { min, max } if min > max => Err(format!("{what}: min {min} is above max {max}")),
            Self::Lognormal { median, sigma, .. } if !(median >= 1.0 && (0.0..=5.0).contains(&sigma)) => {
                Err(format!("{what}: median must be at least 1 and sigma between 0 and 5"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn draws_have_the_shape_that_was_asked_for() {
        let mut rng = StdRng::seed_from_u64(1);
        let lengths = Lengths::Lognormal { median: 2000.0, sigma: 1.0, max: 16_000 };
        let mut drawn: Vec<u32> = (0..10_001).map(|_| lengths.draw(&mut rng)).collect();
        drawn.sort_unstable();
        assert!((1900..2100).contains(&drawn[5000]), "{}", drawn[5000]);
        // One sigma below and above.
        assert!(
            (680..790).contains(&drawn[1587]) && (5100..5800).contains(&drawn[8413]),
            "{} {}",
            drawn[1587],
            drawn[8413]
        );
        assert_eq!(*drawn.last().unwrap(), 16_000);
        let uniform = Lengths::Uniform { min: 3, max: 5 };
        assert!((0..100).all(|_| (3..=5).contains(&uniform.draw(&mut rng))));
    }
}
