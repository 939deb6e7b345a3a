//! Random requests, values, chunkings and ways of holding, against the plain formula.
use proptest::prelude::*;
use r3router_proxy::merge::{Hold, Plan, merge_json, merge_sse, read_prefill};
use r3router_proxy::store::Arena;

use crate::kit::{Case, Chunks, Place, all, base64, rows};

/// A number for a position that both legs and the expectation agree on.
fn number(p: usize, i: usize, seed: u64, wide: u32) -> i32 {
    let mut h = (p as u64 * 131 + i as u64 + 1).wrapping_mul(seed | 1);
    h ^= h >> 29;
    match wide {
        0 => (h % 256) as i32,
        1 => (h % 65_536) as i32,
        2 => (h % 257) as i32,
        _ => h as i32,
    }
}

/// Bytes in chunks of the given lengths, over and over.
fn cut(text: &str, lengths: &[usize]) -> Chunks {
    let (mut at, mut parts) = (0, Vec::new());
    for n in lengths.iter().cycle() {
        if at >= text.len() {
            break;
        }
        let end = (at + n).min(text.len());
        parts.push(text.as_bytes()[at..end].to_vec());
        at = end;
    }
    Chunks::list(parts)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_merge_is_prefills_rows_then_decodes(
        place in proptest::sample::select(vec![Place::Meta, Place::ChatExt, Place::ChatMeta, Place::Completions]),
        (prompt, start, decode_start) in (1usize..60).prop_flat_map(|p| (Just(p), 0..=p, 0..=p)),
        output in 1usize..40,
        row in 1usize..12,
        (prefill_obeys, obeys) in any::<(bool, bool)>(),
        (seed, wide) in (any::<u64>(), 0u32..4),
        (text, streamed) in any::<(bool, bool)>(),
        lengths in proptest::collection::vec(0usize..90, 1..9).prop_filter("some", |l| l.iter().any(|n| *n > 0)),
    ) {
        let case = Case { prompt, output, row, start, decode_start, ..Case::new(place) };
        let payload = |from: usize, until: usize, junk: bool| {
            base64(&rows(from, until.max(from), row, |p, i| if junk && p < prompt { 1_000_000_007 } else { number(p, i, seed, wide) }))
        };
        let until = prompt + output - 1;
        let prefill = case.reply(1, Some(&Case::quoted(&payload(if prefill_obeys { start } else { 0 }, prompt, false))), "p");
        let reply = |payload: &str| case.reply(output, Some(&Case::quoted(payload)), "d\\\"");
        let decode = reply(&payload(if obeys { decode_start } else { 0 }, until, true));
        let want = reply(&payload(start, until, false));
        let hold = if text { Hold::Text } else { Hold::Narrow };
        let plan = Plan { row_items: Some(row as u32), hold, ..case.plan() };
        let arena = Arena::new(64 << 20);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let got = runtime.block_on(async {
            let part = read_prefill(cut(&prefill, &lengths), Some(prefill.len() as u64), &plan, &arena);
            if streamed {
                let body = cut(&format!("data: {decode}\n\ndata: [DONE]\n\n"), &lengths);
                all(merge_sse(body, part, plan.clone(), arena.clone())).await
            } else {
                all(merge_json(cut(&decode, &lengths), None, part, &plan, &arena).await.unwrap()).await
            }
        });
        let want = if streamed { format!("data: {want}\n\ndata: [DONE]\n\n") } else { want };
        prop_assert_eq!(String::from_utf8(got).unwrap(), want);
        prop_assert_eq!(arena.used(), 0);
    }
}
