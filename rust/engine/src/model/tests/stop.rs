use super::*;

fn abort(lab: &mut Lab, engine: EngineId, rid: &str) {
    lab.step(engine, Event::Abort { key: Key(77), rid: rid.into(), all: false });
}

#[test]
fn where_an_abort_hits_decides_the_reply() {
    // 5.1
    let slow = EngineConfig {
        transfer: Transfer { latency: Duration::from_secs(5), ..Transfer::default() },
        ..small_prefill()
    };
    let mut lab = Lab::pair(slow.clone(), small_decode());
    // Bootstrap: decode never came.
    lab.ask(P, 1, ask(1, 100, 5));
    // Waiting queue of prefill, behind a long batch.
    lab.both(2, &ask(2, 8_192, 5));
    lab.both(3, &ask(3, 8_192, 5));
    lab.both(4, &ask(4, 8_192, 5));
    // The second batch runs; the third request is queued behind it.
    lab.until(1.5);
    abort(&mut lab, P, "r1.");
    abort(&mut lab, P, "r4.");
    lab.until(2.5);
    let (status, message) = lab.abort(1);
    assert_eq!(status, 500);
    assert!(message.starts_with("Prefill bootstrap failed") && message.ends_with("Aborted by AbortReq."), "{message}");
    assert_eq!(lab.abort(4), (200, "Abort in waiting queue".to_owned()));
    assert_eq!(lab.load(D, 0).transfer, 3, "5.1: decode is not told of prefill's abort in any version");
    // In flight on prefill.
    abort(&mut lab, P, "r3.");
    lab.until(4.0);
    assert!(lab.abort(3).1.starts_with("Prefill transfer failed"), "{}", lab.abort(3).1);
    // Transfer on decode.
    abort(&mut lab, D, "r4.");
    lab.until(4.5);
    assert!(lab.abort(1004).1.starts_with("Decode transfer failed"));

    // Running: one more step, then a partial reply.
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.both(4, &ask(4, 100, 5_000));
    lab.until(2.0);
    abort(&mut lab, D, "r4.");
    lab.until(3.0);
    let (_, reply) = lab.done(1004).unwrap();
    assert_eq!(reply.finish, Finish::Abort { status: 200, message: "Aborted".to_owned() });
    assert!((100..200).contains(&reply.output_tokens), "{}", reply.output_tokens);
    assert_eq!(lab.load(D, 0).used_tokens, 0);

    // Prealloc on decode.
    let mut lab = Lab::pair(small_prefill(), EngineConfig { max_total_tokens: 10_000, ..small_decode() });
    lab.ask(D, 1005, ask(5, 9_000, 5));
    lab.ask(D, 1006, ask(6, 9_000, 5));
    lab.until(1.0);
    abort(&mut lab, D, "r6.");
    lab.until(2.0);
    assert!(lab.abort(1006).1.starts_with("Decode handshake failed"));
}

#[test]
fn aborts_match_by_prefix_and_are_lost_before_the_request_is_read() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    for (key, rid) in [(1001, "a_1"), (1002, "a_10"), (1003, "b")] {
        lab.ask(D, key, Ask { rid: rid.into(), ..ask(key, 100, 5) });
    }
    lab.until(0.5);
    abort(&mut lab, D, "a_1");
    abort(&mut lab, D, "nobody");
    lab.until(1.0);
    assert!(lab.done(1001).is_some() && lab.done(1002).is_some() && lab.done(1003).is_none(), "a_10 starts with a_1");
    assert_eq!(lab.answer(77).unwrap().1, 200);

    // The abort overtakes nothing but arrives while the body is still being read.
    lab.step(D, Event::Fault(Fault::StallHttp(Duration::from_secs(1))));
    lab.until(1.2);
    abort(&mut lab, D, "late");
    lab.ask(D, 1009, Ask { rid: "late".into(), ..ask(9, 100, 5) });
    lab.until(10.0);
    assert!(lab.done(1009).is_none(), "lost: it is still there");
    assert_eq!(lab.load(D, 0).transfer, 2);
}

#[test]
fn decode_tells_prefill_in_0_5_23_only() {
    for (version, told) in [(Version::V0_5_23, true), (Version::V0_5_12, false)] {
        let mut lab =
            Lab::pair(EngineConfig { version, ..small_prefill() }, EngineConfig { version, ..small_decode() });
        lab.both(1, &ask(1, 80_000, 5));
        lab.until(1.0);
        abort(&mut lab, D, "r1.");
        lab.until(60.0);
        let (_, reply) = lab.done(1).unwrap();
        assert_eq!(reply.finish == Finish::Length, !told, "{version:?}: {:?}", reply.finish);
        assert_eq!(lab.abort(1001).1.contains("Aborted by AbortReq."), told, "0.5.12 has one text for everything");
    }
}

#[test]
fn prefill_tells_decode_of_failed_transfers_in_0_5_23_only() {
    for (version, at) in [(Version::V0_5_23, 1.0), (Version::V0_5_12, 300.0)] {
        let mut lab =
            Lab::pair(EngineConfig { version, ..small_prefill() }, EngineConfig { version, ..small_decode() });
        lab.step(P, Event::Fault(Fault::FailTransfers(1)));
        lab.both(1, &ask(1, 1_000, 5));
        lab.until(400.0);
        assert_eq!(lab.abort(1).0, 500);
        let (ended, _) = lab.done(1001).unwrap();
        assert!((ended - at).abs() < 1.0, "{version:?}: {ended}");
    }
}

#[test]
fn an_orphan_lives_exactly_w() {
    // 6.1 H3: prefill's half fails, decode is not told.
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.step(P, Event::Fault(Fault::FailNext(1)));
    lab.both(1, &ask(1, 1_000, 5));
    lab.until(400.0);
    assert!(lab.done(1).unwrap().0 < 1.0);
    assert!((lab.done(1001).unwrap().0 - 300.0).abs() < 0.1);
}

#[test]
fn a_stuck_transfer_is_covered_by_no_clock() {
    // KVX-2
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.step(P, Event::Fault(Fault::StickTransfers(1)));
    lab.both(1, &ask(1, 1_000, 5));
    lab.both(2, &ask(2, 1_000, 5));
    lab.until(1_000.0);
    assert!(lab.done(1).is_some() && lab.done(1001).is_none() && lab.done(1002).is_some());
    assert_eq!((lab.load(D, 0).transfer, lab.load(D, 0).mamba_used), (1, 1));
    lab.step(D, Event::Fault(Fault::Unstick));
    lab.until(1_001.0);
    assert_eq!((lab.load(D, 0).transfer, lab.load(D, 0).mamba_used), (0, 0));
}

#[test]
fn a_client_that_leaves_is_noticed_by_the_4_s_poll() {
    // 5.2
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.ask(D, 1001, ask(1, 1_000, 5));
    lab.until(1.0);
    lab.step(D, Event::Disconnect { key: Key(1001) });
    lab.until(3.9);
    assert_eq!(lab.load(D, 0).transfer, 1);
    lab.until(4.1);
    assert_eq!(lab.load(D, 0).transfer, 0);
    assert!(lab.done(1001).is_none(), "nobody is there to be told");

    lab.ask(D, 1002, Ask { stream: true, ..ask(2, 1_000, 5) });
    lab.until(5.0);
    lab.step(D, Event::Disconnect { key: Key(1002) });
    lab.until(6.9);
    assert_eq!(lab.load(D, 0).transfer, 1);
    lab.until(7.1);
    assert_eq!(lab.load(D, 0).transfer, 0);
}

#[test]
fn an_abandoned_prefill_stops_between_chunks() {
    // ABT-1: 200,000 tokens are 25 chunks; the client leaves after 1 s.
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.both(1, &ask(1, 200_000, 1));
    lab.until(1.0);
    abort(&mut lab, P, "r1.");
    lab.until(40.0);
    let done = lab.load(P, 0).total_prefill_uncached_tokens;
    assert!(done <= 2 * 8192, "{done}");
    assert_eq!(lab.load(P, 0).used_tokens, 0);
}

#[test]
fn flush_fails_until_every_queue_is_empty() {
    // 5.3
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.both(1, &Ask { prefix: chain(1, 3, 3, 0), ..ask(1, 1_000, 500) });
    lab.until(1.0);
    lab.step(D, Event::Flush { key: Key(50) });
    lab.until(30.0);
    lab.step(D, Event::Flush { key: Key(51) });
    lab.step(P, Event::Flush { key: Key(52) });
    lab.until(31.0);
    assert_eq!([50, 51, 52].map(|k| lab.answer(k).unwrap().1), [400, 200, 200]);
    assert_eq!(lab.load(P, 0).evictable_tokens, 0);
}

#[test]
fn pause_with_abort_gives_a_mix_of_200_and_500() {
    // 5.3
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.both(1, &ask(1, 100, 5_000));
    lab.until(1.0);
    lab.both(2, &ask(2, 60_000, 5));
    lab.until(2.0);
    lab.step(D, Event::Pause { key: Key(60), mode: PauseMode::Abort });
    lab.until(3.0);
    assert_eq!((lab.abort(1001).0, lab.abort(1002).0), (200, 500));
    assert!(lab.fleet.is_paused(D));
}

#[test]
fn pause_with_retract_brings_running_requests_back() {
    // 5.4: 0.5.23 drops the KV and has prefill compute prompt and output again, past the router; before, it is kept.
    for (version, again) in [(Version::V0_5_23, 2_100), (Version::V0_5_12, 0)] {
        let mut lab =
            Lab::pair(EngineConfig { version, ..small_prefill() }, EngineConfig { version, ..small_decode() });
        lab.both(1, &ask(1, 2_000, 500));
        lab.until(2.0);
        lab.step(D, Event::Pause { key: Key(60), mode: PauseMode::Retract });
        lab.until(20.0);
        assert_eq!((lab.load(D, 0).retracted, lab.load(D, 0).used_tokens), (1, 0));
        let before = lab.load(P, 0).total_prefill_uncached_tokens;
        lab.step(D, Event::Continue { key: Key(61) });
        lab.until(60.0);
        assert_eq!(lab.done(1001).unwrap().1.output_tokens, 500);
        let extra = lab.load(P, 0).total_prefill_uncached_tokens - before;
        assert!(extra.abs_diff(again) < 50, "{version:?}: {extra}");
        assert_eq!((lab.load(D, 0).used_tokens, lab.load(P, 0).used_tokens), (0, 0));
    }
}

#[test]
fn a_dead_prefill_fails_every_room_after_two_heartbeats() {
    // 3.5
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.both(1, &ask(1, 80_000, 5));
    lab.until(1.0);
    lab.step(P, Event::Fault(Fault::Kill));
    lab.until(2.0);
    assert!(lab.seen.iter().any(|(_, _, e)| *e == Effect::Reset { key: Key(1) }));
    lab.until(12.0);
    assert!(lab.abort(1001).1.contains("Lost connection with prefill instance"));
    assert_eq!(lab.load(D, 0).used_tokens, 0);
    lab.step(P, Event::Fault(Fault::Revive));
    lab.both(2, &ask(2, 100, 5));
    lab.until(20.0);
    assert_eq!(lab.done(1002).unwrap().1.finish, Finish::Length);
}

#[test]
fn bad_requests_are_refused_with_400() {
    let mut lab =
        Lab::pair(EngineConfig::prefill(2), EngineConfig { max_total_tokens: 10_000, ..EngineConfig::decode(2) });
    lab.ask(D, 1, Ask { routed_dp_rank: Some(5), ..ask(1, 100, 5) });
    lab.ask(D, 2, Ask { bootstrap: None, ..ask(2, 100, 5) });
    lab.ask(D, 3, ask(3, 9_995, 5));
    lab.ask(D, 4, Ask { bootstrap: Some(Bootstrap { prefill: None, room: 4 }), ..ask(4, 100, 5) });
    lab.until(20.0);
    assert_eq!(lab.abort(1), (400, "routed_dp_rank=5 out of range [0, 2)".to_owned()));
    assert_eq!(lab.abort(2), (400, "Disaggregated request received without bootstrap room id".to_owned()));
    assert_eq!(
        lab.abort(3),
        (
            400,
            "Input length (9995 tokens) exceeds the maximum allowed length (9994 tokens). Use a shorter input or enable \
             --allow-auto-truncate."
                .to_owned()
        )
    );
    assert!((lab.done(4).unwrap().0 - 14.0).abs() < 0.1 && lab.abort(4).1.starts_with("Decode handshake failed"));
    // 1.1: under DP the prefill controller dies of a missing room.
    lab.ask(P, 5, Ask { bootstrap: None, ..ask(5, 100, 5) });
    lab.until(21.0);
    assert!(lab.fleet.is_dead(P));
}
