//! Prompts of a rollout: a prefix that all share (cached after its first use) and new tokens that only one has.
use std::fmt::Write as _;

use crate::emulator::pattern::{mix, nonce_of_ids};

/// Ids of prompts are below this.
const VOCABULARY: u64 = 150_000;

/// Makes the bodies of a run.
#[derive(Debug)]
pub(crate) struct Prompts {
    prefix_json: String,
    prefix: u32,
    new: u32,
    output: u32,
    seed: u64,
    by_reference: bool,
    stream: bool,
    routed_experts: bool,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) body: Vec<u8>,
    pub(crate) nonce: u64,
}

impl Prompts {
    pub(crate) fn new(options: &super::RolloutOptions) -> Self {
        let mut prefix_json = String::new();
        for i in 0..u64::from(options.cached_tokens) {
            let _infallible = write!(prefix_json, "{},", mix(i ^ options.seed) % VOCABULARY);
        }
        Self {
            prefix_json,
            prefix: options.cached_tokens,
            new: options.new_tokens.max(1),
            output: options.output_tokens,
            seed: options.seed,
            by_reference: options.by_reference,
            stream: options.stream,
            routed_experts: options.routed_experts,
        }
    }

    /// Prompt length in tokens.
    pub(crate) fn tokens(&self) -> u32 {
        self.prefix + self.new
    }

    /// The body of request `number`.
    pub(crate) fn prepare(&self, number: u64) -> Prepared {
        let ids: Vec<u32> = (0..u64::from(self.new))
            .map(|i| (mix(self.seed ^ mix(number + 1) ^ (i << 40)) % VOCABULARY) as u32)
            .collect();
        let mut body = String::with_capacity(self.prefix_json.len() + ids.len() * 7 + 256);
        body.push_str("{\"input_ids\":[");
        body.push_str(&self.prefix_json);
        for (i, id) in ids.iter().enumerate() {
            let _infallible = write!(body, "{}{id}", if i > 0 { "," } else { "" });
        }
        let _infallible = write!(
            body,
            r#"],"sampling_params":{{"max_new_tokens":{},"temperature":1.0,"ignore_eos":true}},"return_routed_experts":{},"stream":{}"#,
            self.output, self.routed_experts, self.stream
        );
        if self.by_reference {
            body.push_str(r#","return_outputs_via_store":true"#);
        }
        body.push('}');
        // The nonce is of the whole prompt's end, which reaches into the prefix when there are few new tokens.
        let nonce = if self.new >= 8 {
            nonce_of_ids(&ids)
        } else {
            let from = u64::from(self.prefix.saturating_sub(8));
            let mut all: Vec<u32> =
                (from..u64::from(self.prefix)).map(|i| (mix(i ^ self.seed) % VOCABULARY) as u32).collect();
            all.extend(&ids);
            nonce_of_ids(&all)
        };
        Prepared { body: body.into_bytes(), nonce }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::request::{Api, Job};
    use crate::rollout::RolloutOptions;

    #[test]
    fn the_engine_reads_the_nonce_that_the_client_knows() {
        for new in [1, 3, 8, 30] {
            let prompts = Prompts::new(&RolloutOptions { cached_tokens: 40, new_tokens: new, ..Default::default() });
            let (a, b) = (prompts.prepare(0), prompts.prepare(1));
            let job = Job::parse(Api::Generate, &a.body).unwrap();
            assert_eq!((job.subs[0].nonce, job.subs[0].prompt_tokens), (a.nonce, 40 + new));
            assert_ne!(a.nonce, b.nonce);
        }
    }
}
