//! Request bodies.
#![no_main]
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use r3router_core::wire::{Bootstrap, Owned, Route, prefix_hashes, scan, splice};

fuzz_target!(|data: &[u8]| {
    let Some((first, body)) = data.split_first() else { return };
    let route = [Route::Generate, Route::Chat, Route::Completions][usize::from(first % 3)];
    let Ok(facts) = scan(body, route) else { return };
    let bytes = Bytes::copy_from_slice(body);
    for sub in [0, facts.subs() - 1, facts.subs() / 2] {
        let _ = (facts.rid(sub), prefix_hashes(&bytes, &facts, sub));
        let owned = Owned {
            sub,
            rid: Some("our\"rid"),
            bootstrap: Some(Bootstrap { host: "h", port: None, room: 77 }),
            routed_dp_rank: Some(1),
            disagg_prefill_dp_rank: None,
            stream: (first & 4 != 0).then_some(first & 8 != 0),
            routed_experts_start_len: (first & 16 != 0).then_some(5),
            include_usage: first & 32 != 0,
        };
        let parts = splice(&bytes, &facts, &owned);
        let out = parts.pieces.concat();
        assert_eq!(out.len(), parts.len);
        let again = scan(&out, route).expect("a spliced body is taken again");
        assert_eq!(again.subs(), 1);
        assert_eq!(again.rids, ["our\"rid"]);
        // NaN, infinities, huge numbers and lone surrogates are more than serde_json takes.
        if let Ok(serde_json::Value::Object(map)) = serde_json::from_slice(&out) {
            assert_eq!(map["bootstrap_room"], 77);
            assert_eq!(map["routed_dp_rank"], 1);
            assert!(!map.contains_key("data_parallel_rank") && !map.contains_key("disagg_prefill_dp_rank"));
        }
    }
});
