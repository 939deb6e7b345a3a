//! How wide an R3 row is, learned from replies per model, so that admission knows what a request will move before it is sent.
use std::collections::HashMap;

use parking_lot::RwLock;
use r3router_core::admission::R3Need;
use r3router_core::r3::Dtype;
use r3router_core::wire::{Facts, Prompt};

/// Numbers in a row (layers x experts) before any reply has shown it: 60 layers, top-8, as wide as models commonly are.
const DEFAULT_ITEMS: u32 = 480;
/// Most models that are told apart; names come from clients.
const MAX_MODELS: usize = 256;
/// Bytes of one number in the arena where the model's number of experts is not set: two hold every expert id in use.
const NARROW: u64 = 2;

/// See the module's text.
#[derive(Debug)]
pub struct RowWidths {
    /// Numbers in a row as set, for models that no reply has shown yet.
    set: Option<u32>,
    /// Bytes of one number in the arena, by the experts that the settings say.
    narrow: u64,
    by_model: RwLock<HashMap<String, u32>>,
}

impl RowWidths {
    /// Nothing learned yet; `set` (numbers in a row) and `experts` are what the settings say of every model.
    pub fn new(set: Option<u32>, experts: Option<u32>) -> Self {
        let narrow = experts.map_or(NARROW, |experts| Dtype::for_experts(experts).size() as u64);
        Self { set, narrow, by_model: RwLock::default() }
    }

    /// Numbers in a row of `model`, when a reply has shown it.
    pub fn get(&self, model: &str) -> Option<u32> {
        self.by_model.read().get(model).copied()
    }

    /// Learns from a reply.
    pub fn learn(&self, model: &str, items: u32) {
        if items == 0 || self.get(model) == Some(items) {
            return;
        }
        let mut by_model = self.by_model.write();
        if by_model.len() < MAX_MODELS || by_model.contains_key(model) {
            by_model.insert(model.to_owned(), items);
        }
    }

    /// What one sub-request will move: prefill sends the rows from the client's start to the prompt's end, decode those from
    /// `decode_start` to the last token. Base64 of int32 is 16 bytes of text for 3 numbers.
    /// `kept`: bytes of a number in the object that a reference names; then decode's rows stay in the arena too.
    pub fn need(
        &self,
        model: &str,
        facts: &Facts,
        prompt: &Prompt,
        prompt_tokens: u32,
        decode_start: u32,
        kept: Option<u64>,
    ) -> R3Need {
        let items = u64::from(self.get(model).or(self.set).unwrap_or(DEFAULT_ITEMS));
        let rows = |from: u32, to: u32| u64::from(to.saturating_sub(from));
        let text = |rows: u64| (rows * items * 4).div_ceil(3) * 4;
        let output = prompt.max_new_tokens.unwrap_or(0);
        let prefill = rows(facts.routed_experts_start, prompt_tokens);
        let decode = rows(decode_start, prompt_tokens.saturating_add(output));
        let arena = match kept {
            None => prefill * items * self.narrow,
            Some(width) => prefill * items * self.narrow.max(width) + u64::from(output) * items * width,
        };
        R3Need { prefill_text: text(prefill), decode_text: text(decode), arena }
    }
}
