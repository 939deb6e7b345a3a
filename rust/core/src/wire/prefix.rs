//! Chained hashes of a prompt's blocks, for prefix affinity. Ids are hashed as numbers, straight from their digits.
use super::{BLOCK_TEXT, BLOCK_TOKENS, Facts, PromptKind};

/// Odd constants of a multiply-and-fold hash: the fractional parts of the golden ratio and of pi.
const K1: u64 = 0x9e37_79b9_7f4a_7c15;
const K2: u64 = 0x243f_6a88_85a3_08d3;

fn mix(hash: u64, word: u64) -> u64 {
    let wide = u128::from(hash ^ K2) * u128::from(word ^ K1);
    (wide as u64) ^ ((wide >> 64) as u64) ^ hash.rotate_left(23)
}

/// See [`super::prefix_hashes`].
pub(super) fn hashes(body: &[u8], facts: &Facts, sub: usize) -> Vec<u64> {
    let prompt = facts.prompt(sub);
    let text = &body[prompt.span.start..prompt.span.end];
    match prompt.kind {
        PromptKind::Ids => ids(text, prompt.ids.unwrap_or(0) as usize),
        PromptKind::Text | PromptKind::Messages => {
            // Quotes and brackets stay out, so that a longer text of the same beginning shares its blocks.
            let inside = text.get(1..text.len() - 1).unwrap_or_default();
            inside
                .chunks_exact(BLOCK_TEXT)
                .scan(u64::from(prompt.kind == PromptKind::Text), |hash, block| {
                    for word in block.chunks_exact(8) {
                        let mut w = [0; 8];
                        w.copy_from_slice(word);
                        *hash = mix(*hash, u64::from_le_bytes(w));
                    }
                    Some(*hash)
                })
                .collect()
        }
        PromptKind::Embeds | PromptKind::Absent => Vec::new(),
    }
}

fn ids(text: &[u8], count: usize) -> Vec<u64> {
    let mut out = Vec::with_capacity(count / BLOCK_TOKENS);
    let (mut hash, mut n) = (2, 0);
    let mut id: Option<u64> = None;
    for &b in text {
        if b.is_ascii_digit() {
            id = Some(id.unwrap_or(0).wrapping_mul(10).wrapping_add(u64::from(b - b'0')));
        } else if let Some(id) = id.take() {
            hash = mix(hash, id);
            n += 1;
            if n % BLOCK_TOKENS == 0 {
                out.push(hash);
            }
        }
    }
    out
}
