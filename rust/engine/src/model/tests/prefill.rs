use super::*;

#[test]
fn bootstrap_leaves_only_with_decodes_metadata() {
    // 3.4, 3.5: B runs from arrival, in 0.5.23 only.
    for (version, ends) in [(Version::V0_5_23, true), (Version::V0_5_12, false)] {
        let mut lab =
            Lab::pair(EngineConfig { version, ..small_prefill() }, EngineConfig { version, ..small_decode() });
        lab.ask(P, 1, ask(1, 1000, 5));
        lab.until(299.0);
        assert_eq!((lab.load(P, 0).bootstrap, lab.load(P, 0).waiting_uncached_tokens), (1, 0));
        lab.until(310.0);
        assert_eq!(lab.done(1).is_some(), ends);
        if ends {
            assert!(
                lab.abort(1).1.ends_with("KVTransferError(1): timed out after 300s in KVPoll.Bootstrapping"),
                "{}",
                lab.abort(1).1
            );
            assert_eq!(lab.fleet.stats(P)[0].bootstrap_timeouts, 1);
        }
    }
}

#[test]
fn metadata_slots_of_prefill_bound_what_is_queued() {
    let mut lab =
        Lab::pair(EngineConfig { max_running: 4, ..small_prefill() }, EngineConfig { mamba: None, ..small_decode() });
    for room in 1..=20 {
        lab.both(room, &ask(room, 30_000, 5));
    }
    // What arrives during a batch is seen after it.
    lab.until(2.0);
    let load = lab.load(P, 0);
    assert_eq!(load.bootstrap, 12, "2 x 4 slots: {load:?}");
}

#[test]
fn batches_hold_one_chunk_of_uncached_tokens() {
    // 20,000 tokens are three batches of at most 8,192; the step times add up.
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.both(1, &ask(1, 20_000, 2));
    lab.until(60.0);
    let first = lab.done(1).unwrap().1.times.first_token.as_secs_f64();
    assert!((first - (20_000.0 / 7000.0 + 3.0 * 0.03)).abs() < 0.02, "{first}");
}

#[test]
fn a_batch_takes_several_short_requests() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    for room in 1..=8 {
        lab.both(room, &ask(room, 1000, 2));
    }
    lab.until(60.0);
    let times: Vec<f64> = (1..=8).map(|k| lab.done(k).unwrap().1.times.first_token.as_secs_f64()).collect();
    // The first went alone; the others share a batch.
    assert!(times[1..].windows(2).all(|w| (w[0] - w[1]).abs() < 1e-9), "{times:?}");
}

#[test]
fn a_cached_prefix_is_not_computed_again() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    let with = |own: u64| Ask { prefix: chain(1, 210, 222, own), ..ask(own, 57_000, 2) };
    lab.both(1, &with(1));
    lab.until(30.0);
    lab.both(2, &with(2));
    lab.until(60.0);
    let (_, first) = lab.done(1).unwrap();
    let (_, second) = lab.done(2).unwrap();
    assert_eq!((first.cached_tokens, second.cached_tokens), (0, 210 * 256));
    let took = second.times.first_token.since(second.times.scheduled).as_secs_f64();
    assert!((took - (57_000.0 - 53_760.0) / 7000.0 - 0.03).abs() < 0.01, "{took}");
    assert_eq!(lab.done(1002).unwrap().1.cached_tokens, 53_760, "1.3: decode repeats prefill's count");
    let load = lab.load(P, 0);
    assert_eq!((load.used_tokens, load.evictable_tokens), (0, (222 + 12) * 256));
    assert!((load.cache_hit_rate - 53_760.0 / 114_000.0).abs() < 1e-9);
}

#[test]
fn the_cache_gives_way_when_the_pool_is_needed() {
    let mut lab = Lab::pair(EngineConfig { max_total_tokens: 60_000, ..small_prefill() }, small_decode());
    for room in 1..=4 {
        lab.both(room, &Ask { prefix: chain(room, 0, 78, room), ..ask(room, 20_000, 2) });
        lab.until(room as f64 * 20.0);
    }
    let load = lab.load(P, 0);
    assert!(load.evictable_tokens + load.used_tokens <= 60_000);
    lab.both(9, &Ask { prefix: chain(1, 0, 78, 1), ..ask(9, 20_000, 2) });
    lab.both(10, &Ask { prefix: chain(4, 0, 78, 4), ..ask(10, 20_000, 2) });
    lab.until(200.0);
    assert_eq!(lab.done(9).unwrap().1.cached_tokens, 0, "the oldest was evicted");
    assert!(lab.done(10).unwrap().1.cached_tokens > 15_000);
}

#[test]
fn a_room_of_another_rank_is_refused_unless_the_rank_is_explicit_in_0_5_23() {
    for (version, explicit, refused) in [
        (Version::V0_5_23, false, true),
        (Version::V0_5_23, true, false),
        (Version::V0_5_12, false, true),
        (Version::V0_5_12, true, true),
    ] {
        let mut lab =
            Lab::pair(EngineConfig { version, ..EngineConfig::prefill(4) }, EngineConfig { version, ..small_decode() });
        let prefill_dp_rank = explicit.then_some(2);
        lab.ask(P, 1, Ask { routed_dp_rank: Some(2), prefill_dp_rank, ..ask(3, 100, 5) });
        lab.ask(D, 1001, Ask { prefill_dp_rank, ..ask(3, 100, 5) });
        lab.until(5.0);
        let (_, reply) = lab.done(1).unwrap();
        match reply.finish {
            Finish::Abort { status, .. } => assert!(refused && status == 500),
            Finish::Length => assert!(!refused),
        }
        // Decode is not told in any version.
        assert_eq!(lab.load(D, 0).transfer, u32::from(refused));
    }
}

#[test]
fn transfers_of_one_decode_rank_share_a_worker() {
    // 3.4: worker = f(decode rank); 1.14 GB at 12 GB/s each in 0.5.12, which sends the prefix late.
    let version = Version::V0_5_12;
    let config = EngineConfig {
        version,
        chunked_prefill_size: 200_000,
        compute: Compute { prefill_tokens_per_s: 1e9, ..Compute::default() },
        ..small_prefill()
    };
    let run = |ranks: [u16; 2]| {
        let mut lab = Lab::pair(config.clone(), EngineConfig { version, ..EngineConfig::decode(2) });
        for (i, rank) in ranks.into_iter().enumerate() {
            lab.ask(D, 1001 + i as u64, Ask { routed_dp_rank: Some(rank), ..ask(i as u64 + 1, 60_000, 2) });
        }
        lab.until(0.5);
        for i in 0..3u64 {
            lab.ask(P, i + 1, ask(i + 1, 60_000, 1));
        }
        lab.until(10.0);
        [1, 2].map(|k| lab.done(k).unwrap().1.times.delivered.as_secs_f64())
    };
    let apart = run([0, 1]);
    let together = run([0, 0]);
    let one = (60_000.0 * 20_000.0 + f64::from(32 << 20)) / 12e9;
    assert!((together[1].max(together[0]) - apart[1].max(apart[0]) - one).abs() < 0.06, "{apart:?} {together:?}");
}

#[test]
fn prefill_memory_is_held_until_the_transfer_is_confirmed() {
    let config = EngineConfig {
        transfer: Transfer { latency: Duration::from_secs(3), ..Transfer::default() },
        ..small_prefill()
    };
    let mut lab = Lab::pair(config, small_decode());
    lab.both(1, &ask(1, 7_000, 2));
    lab.until(2.0);
    let load = lab.load(P, 0);
    assert_eq!((load.inflight, load.used_tokens, load.waiting_total()), (1, 7_000, 0), "4.1: inflight is not waiting");
    lab.until(10.0);
    assert_eq!((lab.load(P, 0).inflight, lab.load(P, 0).used_tokens), (0, 0));
    assert!(lab.done(1).unwrap().0 > 4.0, "1.3: prefill answers when KV is delivered");
}

#[test]
fn uncached_tokens_in_the_queue_are_reported() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    for room in 1..=3 {
        lab.both(room, &ask(room, 8_192, 2));
    }
    // What arrives during a batch is seen after it: the second runs now, the third is queued.
    lab.until(1.5);
    assert_eq!(lab.load(P, 0).waiting_uncached_tokens, 8_192);
    lab.until(20.0);
    let load = &lab.fleet.loads(P)[0];
    assert_eq!((load.waiting_uncached_tokens, load.total_prefill_uncached_tokens), (0, 3 * 8_192));
    assert!((load.total_prefill_busy_us as f64 / 1e6 - 3.0 * (8192.0 / 7000.0 + 0.03)).abs() < 0.01);
}

#[test]
fn a_regular_engine_prefills_first_and_decodes_then() {
    let mut lab = Lab::new(vec![EngineConfig::regular(2)]);
    for i in 0..6 {
        lab.ask(P, i, Ask { bootstrap: None, ..ask(0, 4_000, 100) });
    }
    lab.until(60.0);
    for i in 0..6 {
        let (_, reply) = lab.done(i).unwrap();
        assert_eq!((reply.finish, reply.output_tokens), (Finish::Length, 100));
    }
    let loads = lab.fleet.live(P);
    assert!(loads.iter().all(|l| l.used_tokens == 0 && l.running == 0 && l.mamba_used == 0));
}
