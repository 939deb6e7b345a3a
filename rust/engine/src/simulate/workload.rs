//! The requests of a run, drawn before it begins, so that every router of a sweep gets the same ones.
use std::sync::Arc;

use r3router_core::time::Moment;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::scenario::{Class, Scenario};

/// One request of the client.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) prompt: u32,
    pub(super) output: u32,
    pub(super) max_new: Option<u32>,
    pub(super) prefix: Arc<[u64]>,
    pub(super) family: u64,
    pub(super) r3: bool,
    pub(super) stream: bool,
    /// Open loop: when it arrives; closed loop: unused.
    pub(super) at: Moment,
}

/// Draws the requests of a scenario. `block` is the number of tokens of a prefix block.
pub(super) fn draw(scenario: &Scenario, block: u32) -> Vec<Job> {
    let mut rng = StdRng::seed_from_u64(scenario.seed ^ 0x7233_726f_7574_6572);
    let w = &scenario.workload;
    let total: f64 = w.classes.iter().map(|c| c.weight).sum();
    let mut at = 0.0;
    (0..w.count)
        .map(|i| {
            if let Some(rate) = w.rate_per_s.filter(|_| i % w.burst == 0) {
                let u: f64 = rng.random_range(f64::MIN_POSITIVE..1.0);
                at += -u.ln() * f64::from(w.burst) / rate;
            }
            let mut pick = rng.random_range(0.0..total);
            let chosen = w.classes.iter().position(|c| {
                pick -= c.weight;
                pick < 0.0
            });
            let number = chosen.unwrap_or(w.classes.len() - 1);
            job(&w.classes[number], number as u64, u64::from(i), block, Moment::from_secs_f64(at), &mut rng)
        })
        .collect()
}

fn job(class: &Class, number: u64, own: u64, block: u32, at: Moment, rng: &mut StdRng) -> Job {
    let member = match class.hot_share {
        Some(hot) if class.families > 1 && !rng.random_bool(hot) => rng.random_range(1..class.families),
        Some(_) => 0,
        None => rng.random_range(0..class.families),
    };
    let family = number << 32 | u64::from(member);
    let prompt = class.prefix_tokens + class.new_tokens.draw(rng);
    let output = class.output.draw(rng);
    let max_new = match class.max_new_tokens {
        Some(0) => None,
        Some(n) => Some(n.max(output)),
        None => Some(output.div_ceil(256) * 256),
    };
    let shared = class.prefix_tokens / block;
    let prefix = (0..prompt / block)
        .map(|i| {
            let seed = if i < shared { family << 20 } else { (own + 1) << 20 | 1 << 63 };
            mix(seed | u64::from(i))
        })
        .collect();
    Job { prompt, output, max_new, prefix, family, r3: class.r3, stream: class.stream, at }
}

/// Spreads a counter over 64 bits (the finaliser of `splitmix64`).
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(text: &str) -> Scenario {
        Scenario::parse(text, "test").unwrap()
    }

    #[test]
    fn a_hot_family_has_its_share_and_its_prefix_in_common() {
        let s = scenario(
            "[workload]\ncount = 4000\nconcurrency = 8\n[[workload.classes]]\nnew_tokens = { kind = \"fixed\", tokens = 3000 }\n\
             output = { kind = \"fixed\", tokens = 10 }\nprefix_tokens = 51200\nfamilies = 5\nhot_share = 0.55\n",
        );
        let jobs = draw(&s, 256);
        let hot: Vec<&Job> = jobs.iter().filter(|j| j.family == 0).collect();
        let share = hot.len() as f64 / 4000.0;
        assert!((share - 0.55).abs() < 0.02, "{share}");
        let common = hot[0].prefix.iter().zip(hot[1].prefix.iter()).take_while(|(a, b)| a == b).count();
        assert_eq!((common, hot[0].prefix.len()), (200, 211));
        let other = jobs.iter().find(|j| j.family == 1).unwrap();
        assert_ne!(other.prefix[0], hot[0].prefix[0]);
    }

    #[test]
    fn bursts_keep_the_mean_rate() {
        let s = scenario(
            "[workload]\ncount = 20000\nrate_per_s = 10.0\nburst = 40\n[[workload.classes]]\n\
             new_tokens = { kind = \"fixed\", tokens = 10 }\noutput = { kind = \"fixed\", tokens = 10 }\n",
        );
        let jobs = draw(&s, 256);
        let last = jobs.last().unwrap().at.as_secs_f64();
        assert!((last - 2000.0).abs() < 250.0, "{last}");
        assert_eq!(jobs[0].at, jobs[39].at);
        assert!(jobs[40].at > jobs[39].at);
    }
}
