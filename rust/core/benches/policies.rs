//! What prefixes cost: memory while unique prompts pour in, and the lookup of a long prompt in a full table.
//!
//! Prints one JSON object; `benches/policies.py` puts it into words.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a bench")]
use std::hint::black_box;
use std::time::Instant;

use r3router_core::affinity::Affinity;
use r3router_core::wire::{BLOCK_TEXT, Route, prefix_hashes, scan};

/// Bytes of each unique prompt, and how many of them.
const PROMPT: usize = 20_000;
const PROMPTS: u64 = 200_000;
/// The default of `--max-tree-size`.
const LIMIT: usize = 64 << 20;
/// Tokens of the prompt that is looked up.
const LONG: usize = 60_000;
const RANKS: u32 = 64;

/// Bytes of this process in memory.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn text(prompt: u64) -> Vec<u8> {
    let mut body = b"{\"text\":\"".to_vec();
    let mut bits = prompt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while body.len() < PROMPT {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        body.extend(bits.to_le_bytes().map(|b| b'a' + b % 26));
    }
    body.extend(b"\"}");
    body
}

fn ids(seed: u64) -> Vec<u8> {
    let ids: Vec<String> = (0..LONG as u64).map(|i| ((i * 7919 + seed) % 150_000).to_string()).collect();
    format!("{{\"input_ids\":[{}]}}", ids.join(",")).into_bytes()
}

/// The median of a few thousand, in microseconds.
fn median(mut once: impl FnMut(usize)) -> f64 {
    let mut times: Vec<f64> = (0..4000)
        .map(|i| {
            let start = Instant::now();
            once(i);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let before = resident();
    let mut table = Affinity::new(LIMIT);
    let bytes = table.bytes();
    let (mut memory, mut entries) = (Vec::new(), Vec::new());
    let mut spent = 0.0;
    for prompt in 0..PROMPTS {
        let body = text(prompt);
        let facts = scan(&body, Route::Generate).unwrap();
        let chain = prefix_hashes(&body, &facts, 0);
        assert_eq!(chain.len(), PROMPT / BLOCK_TEXT - usize::from(PROMPT % BLOCK_TEXT < 10));
        let start = Instant::now();
        table.longest(&chain, |_| true);
        table.insert(&chain, 0, prompt as u32 % RANKS);
        spent += start.elapsed().as_secs_f64() * 1e6;
        if (prompt + 1) % 25_000 == 0 {
            memory.push((resident() - before) as f64 / f64::from(1 << 20));
            entries.push(table.entries());
        }
    }
    // Long prompts in the full table: known to their end, known by half, unknown.
    let chain = |seed: u64| {
        let body = ids(seed);
        let facts = scan(&body, Route::Generate).unwrap();
        prefix_hashes(&body, &facts, 0)
    };
    let known: Vec<Vec<u64>> = (0..64).map(chain).collect();
    for (slot, chain) in known.iter().enumerate() {
        table.insert(chain, 0, slot as u32);
    }
    let half: Vec<Vec<u64>> = known
        .iter()
        .map(|c| c[..c.len() / 2].iter().copied().chain((0..c.len() / 2).map(|i| i as u64 * 0x9e37_79b9 + 1)).collect())
        .collect();
    let unknown: Vec<Vec<u64>> = (1000..1064).map(chain).collect();
    let mut time = |chains: &[Vec<u64>], blocks: usize| {
        median(|i| {
            let found = table.longest(black_box(&chains[i % chains.len()]), |_| true);
            assert_eq!(found.blocks, blocks);
        })
    };
    let blocks = known[0].len();
    let lookups = (time(&known, blocks), time(&half, blocks / 2), time(&unknown, 0));
    let body = ids(3);
    let facts = scan(&body, Route::Generate).unwrap();
    let hashing = median(|_| drop(black_box(prefix_hashes(black_box(&body), &facts, 0))));
    let (whole, part, none) = lookups;
    println!(
        "{{\"limit_mib\": {}, \"table_mib\": {:.2}, \"rss_mib\": {memory:.1?}, \"entries\": {entries:?}, \
         \"place_us\": {:.2}, \"blocks\": {blocks}, \"lookup_known_us\": {whole:.2}, \"lookup_half_us\": {part:.2}, \
         \"lookup_unknown_us\": {none:.2}, \"hash_us\": {hashing:.1}, \"body_kib\": {}}}",
        LIMIT >> 20,
        bytes as f64 / f64::from(1 << 20),
        spent / PROMPTS as f64,
        body.len() >> 10,
    );
}
