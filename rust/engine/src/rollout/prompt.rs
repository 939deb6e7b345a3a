//! Prompts of a rollout: a prefix that all samples of a family share (cached after its first use) and new tokens that only one has.
use std::fmt::Write as _;

use crate::emulator::pattern::{mix, nonce_of_ids};

/// Ids of prompts are below this.
const VOCABULARY: u64 = 150_000;
/// Last ids of a prompt that the nonce is made of.
const NONCE_IDS: u32 = 8;

/// Makes the bodies of a run.
#[derive(Debug)]
pub(crate) struct Prompts {
    /// JSON of each family's prefix.
    families: Vec<String>,
    options: super::RolloutOptions,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) body: Vec<u8>,
    pub(crate) nonce: u64,
    /// Prompt length in tokens.
    pub(crate) prompt: u32,
    /// Tokens that will be generated.
    pub(crate) output: u32,
}

fn prefix_id(seed: u64, family: u64, position: u64) -> u64 {
    mix(position ^ mix(seed ^ (family << 48))) % VOCABULARY
}

/// A number in [0, 1).
fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1_u64 << 53) as f64
}

impl Prompts {
    pub(crate) fn new(options: &super::RolloutOptions) -> Self {
        let families = (0..u64::from(options.families.max(1)))
            .map(|family| {
                let mut json = String::new();
                for position in 0..u64::from(options.cached_tokens) {
                    let _infallible = write!(json, "{},", prefix_id(options.seed, family, position));
                }
                json
            })
            .collect();
        Self { families, options: options.clone() }
    }

    /// New tokens of request `number`: uniform over the range.
    fn new_tokens(&self, number: u64) -> u32 {
        let least = self.options.new_tokens.max(1);
        let span = u64::from(self.options.new_tokens_max.max(least) - least) + 1;
        least + (mix(self.options.seed ^ mix(number ^ 0x4E57)) % span) as u32
    }

    /// Output tokens of request `number`: log-normal around the median (Box and Muller), or the median itself.
    fn output(&self, number: u64) -> u32 {
        let o = &self.options;
        if o.output_sigma <= 0.0 {
            return o.output_tokens.max(1);
        }
        let hash = mix(o.seed ^ mix(number ^ 0x0075_7470));
        let (u, v) = (1.0 - unit(hash), unit(mix(hash)));
        let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
        let drawn = f64::from(o.output_tokens) * (o.output_sigma * normal).exp();
        (drawn.round() as u32).clamp(1, o.output_max.max(1))
    }

    /// The body of request `number`.
    pub(crate) fn prepare(&self, number: u64) -> Prepared {
        let o = &self.options;
        let family = number % self.families.len() as u64;
        let prefix = &self.families[family as usize];
        let (new, output) = (self.new_tokens(number), self.output(number));
        let ids: Vec<u32> =
            (0..u64::from(new)).map(|i| (mix(o.seed ^ mix(number + 1) ^ (i << 40)) % VOCABULARY) as u32).collect();
        let mut body = String::with_capacity(prefix.len() + ids.len() * 7 + 256);
        body.push_str("{\"input_ids\":[");
        body.push_str(prefix);
        for (i, id) in ids.iter().enumerate() {
            let _infallible = write!(body, "{}{id}", if i > 0 { "," } else { "" });
        }
        let _infallible = write!(
            body,
            r#"],"sampling_params":{{"max_new_tokens":{output},"temperature":1.0,"ignore_eos":true}},"return_routed_experts":{},"stream":{}"#,
            o.routed_experts, o.stream
        );
        if o.by_reference {
            body.push_str(r#","return_outputs_via_store":true"#);
        }
        body.push('}');
        // The nonce is made of the prompt's end, which reaches into the prefix when there are few new tokens.
        let from_prefix = NONCE_IDS.saturating_sub(new).min(o.cached_tokens);
        let first = u64::from(o.cached_tokens - from_prefix);
        let mut end: Vec<u32> =
            (first..u64::from(o.cached_tokens)).map(|i| prefix_id(o.seed, family, i) as u32).collect();
        end.extend(&ids);
        Prepared { body: body.into_bytes(), nonce: nonce_of_ids(&end), prompt: o.cached_tokens + new, output }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::request::{Api, Job};
    use crate::rollout::RolloutOptions;

    #[test]
    fn the_engine_reads_the_nonce_that_the_client_knows() {
        for (new, cached) in [(1, 40), (3, 40), (8, 40), (30, 40), (2, 0), (2, 3)] {
            let options = RolloutOptions { cached_tokens: cached, new_tokens: new, families: 3, ..Default::default() };
            let prompts = Prompts::new(&options);
            let (a, b) = (prompts.prepare(4), prompts.prepare(7));
            let job = Job::parse(Api::Generate, &a.body).unwrap();
            assert_eq!((job.subs[0].nonce, job.subs[0].prompt_tokens), (a.nonce, cached + new));
            assert_eq!((a.prompt, a.output), (cached + new, job.subs[0].max_new_tokens));
            assert_ne!(a.nonce, b.nonce);
        }
    }

    #[test]
    fn families_share_their_prefix_and_lengths_are_spread_as_asked() {
        let options = RolloutOptions {
            cached_tokens: 20,
            new_tokens: 5,
            new_tokens_max: 15,
            families: 2,
            output_tokens: 100,
            output_sigma: 0.6,
            output_max: 400,
            ..Default::default()
        };
        let prompts = Prompts::new(&options);
        let ids = |n: u64| Job::parse(Api::Generate, &prompts.prepare(n).body).unwrap().subs[0].ids.clone();
        assert_eq!(ids(0)[..20], ids(2)[..20]);
        assert_ne!(ids(0)[..20], ids(1)[..20]);
        assert_ne!(ids(0)[20..25], ids(2)[20..25]);
        let all: Vec<Prepared> = (0..2000).map(|n| prompts.prepare(n)).collect();
        assert_eq!(all.iter().map(|p| p.prompt).min().zip(all.iter().map(|p| p.prompt).max()), Some((25, 35)));
        let mut outputs: Vec<u32> = all.iter().map(|p| p.output).collect();
        outputs.sort_unstable();
        assert!((90..110).contains(&outputs[1000]), "{}", outputs[1000]);
        assert_eq!(outputs[1999], 400);
        let below = outputs.partition_point(|o| *o < 55);
        assert!((260..380).contains(&below), "one in six is a sigma below the median: {below}");
    }
}
