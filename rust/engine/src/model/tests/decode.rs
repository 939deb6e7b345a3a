use super::*;

/// Decode alone: reservations happen, prefill never comes.
fn decode_only(config: EngineConfig) -> Lab {
    Lab::pair(small_prefill(), config)
}

#[test]
fn reservation_stops_at_the_first_misfit_and_nobody_passes_it() {
    // 3.1: FIFO with a break on the first that does not fit.
    let mut lab = decode_only(EngineConfig { max_total_tokens: 100_000, ..small_decode() });
    for (room, prompt) in [(1, 60_000), (2, 60_000), (3, 1_000)] {
        lab.ask(D, 1000 + room, ask(room, prompt, 10));
    }
    lab.until(1.0);
    let load = lab.load(D, 0);
    assert_eq!((load.transfer, load.prealloc, load.used_tokens), (1, 2, 60_032), "60,000 in pages of 64");
    assert_eq!((lab.fleet.stats(D)[0].blocked, lab.fleet.stats(D)[0].peak_prealloc), (1, 2));
    lab.step(D, Event::Abort { key: Key(9), rid: "r1.".into(), all: false });
    lab.until(2.0);
    assert_eq!((lab.load(D, 0).transfer, lab.load(D, 0).prealloc), (2, 0));
}

#[test]
fn kv_gate_counts_the_reserve_of_every_request_and_the_output_estimate() {
    // need = max(page_ceil(prompt) + 512, prompt + min(max_new, 4096)); budget = free - 512 x requests.
    let fits = |pool: u64, max_new: u32| {
        let mut lab = decode_only(EngineConfig { max_total_tokens: pool, ..small_decode() });
        for room in [1, 2] {
            lab.ask(D, 1000 + room, Ask { max_new_tokens: Some(max_new), ..ask(room, 6400, 1) });
        }
        lab.until(1.0);
        lab.load(D, 0).transfer
    };
    // One is in: 6400 held, 512 reserved for it; the second needs 6400 + 512.
    assert_eq!(fits(6400 + 512 + 6912, 100), 2);
    assert_eq!(fits(6400 + 512 + 6911, 100), 1);
    // With a long output the estimate is min(max_new, 4096).
    assert_eq!(fits(6400 + 512 + 6400 + 4096, 1_000_000), 2);
    assert_eq!(fits(6400 + 512 + 6400 + 4095, 1_000_000), 1);
}

#[test]
fn rows_are_running_plus_extra_and_extra_is_twice_running_up_to_32() {
    for (max_running, extra, rows) in [(4, None, 12), (32, None, 96), (33, None, 33), (4, Some(1), 5)] {
        let config = EngineConfig { max_running, extra_slots: extra, mamba: None, ..small_decode() };
        assert_eq!(config.rows(), rows);
        let mut lab =
            decode_only(EngineConfig { max_running, extra_slots: Some(extra.unwrap_or(rows - max_running)), ..config });
        for room in 1..=100 {
            lab.ask(D, 1000 + room, ask(room, 100, 5));
        }
        lab.until(1.0);
        // Metadata slots (2 x running) bind before rows where rows are more.
        assert_eq!(lab.load(D, 0).transfer, rows.min(2 * max_running), "max_running {max_running}");
    }
}

#[test]
fn mamba_slots_bound_reservations_in_0_5_23_and_fail_allocation_in_0_5_12() {
    // Section 0, 3.3; ADM-2: 12 slots, 3 per request.
    let config = EngineConfig { mamba: Some(Mamba { slots: 12, per_request: 3 }), ..small_decode() };
    let mut lab = decode_only(config.clone());
    for room in 1..=5 {
        lab.ask(D, 1000 + room, ask(room, 100, 5));
    }
    lab.until(1.0);
    let load = lab.load(D, 0);
    assert_eq!((load.transfer, load.prealloc, load.mamba_available, load.mamba_used), (4, 1, Some(0), 12));

    let mut lab = decode_only(EngineConfig { version: Version::V0_5_12, ..config });
    for room in 1..=5 {
        lab.ask(D, 1000 + room, ask(room, 100, 5));
    }
    lab.until(1.0);
    assert_eq!(lab.load(D, 0).transfer, 4);
    let (status, message) = lab.abort(1005);
    assert!(status == 500 && message.contains("mamba"), "{message}");
}

#[test]
fn waiting_clock_runs_from_the_reservation_not_from_arrival() {
    // 3.5: W from send_metadata. The second waits for the first's memory and has a full W of its own.
    let mut lab = decode_only(EngineConfig { max_total_tokens: 100_000, ..small_decode() });
    lab.ask(D, 1001, ask(1, 60_000, 10));
    lab.ask(D, 1002, ask(2, 60_000, 10));
    lab.until(700.0);
    let (first, second) = (lab.done(1001).unwrap().0, lab.done(1002).unwrap().0);
    assert!((first - 300.0).abs() < 0.1 && (second - 600.0).abs() < 0.1, "{first} {second}");
    let (status, message) = lab.abort(1001);
    assert_eq!(status, 500);
    assert_eq!(
        message,
        "Decode transfer failed for request rank=0 decode_req.req.rid='r1.' decode_req.req.bootstrap_room=1 with exception \
         KVTransferError(1): timed out after 300s in KVPoll.WaitingForInput"
    );
    assert_eq!(lab.fleet.stats(D)[0].waiting_timeouts, 2);
}

#[test]
fn old_decode_gives_one_text_for_every_failure() {
    let mut lab = decode_only(EngineConfig { version: Version::V0_5_12, ..small_decode() });
    lab.ask(D, 1001, ask(1, 100, 10));
    lab.until(301.0);
    assert!(lab.abort(1001).1.ends_with("with exception NIXL KVReceiver Exception"));
}

#[test]
fn transfer_queue_holds_everything_in_prefills_pipeline_under_early_allocation() {
    // 3.1: reserved before prefill has started.
    let mut lab = Lab::pair(small_prefill(), small_decode());
    for room in 1..=40 {
        lab.both(room, &ask(room, 20_000, 10));
    }
    lab.until(2.0);
    assert!(lab.load(D, 0).transfer >= 38, "{}", lab.load(D, 0).transfer);
    assert_eq!(lab.load(D, 0).waiting_total(), lab.load(D, 0).transfer, "4.1: transfer counts as waiting");
}

#[test]
fn prefill_complete_reserves_only_what_is_computed() {
    let policy = r3router_core::topology::Allocation::PrefillComplete;
    let mut lab = Lab::pair(
        EngineConfig { allocation: policy, ..small_prefill() },
        EngineConfig { allocation: policy, mamba: None, ..small_decode() },
    );
    for room in 1..=40 {
        lab.both(room, &ask(room, 20_000, 10));
    }
    lab.until(2.0);
    assert!(lab.load(D, 0).transfer <= 1, "{}", lab.load(D, 0).transfer);
    lab.until(200.0);
    assert!((1..=40).all(|room| lab.done(1000 + room).unwrap().1.finish == Finish::Length));
    assert_eq!(lab.fleet.stats(D)[0].blocked, 0);
    assert!(lab.fleet.stats(D)[0].peak_transfer <= 2);
}

#[test]
fn prefill_complete_entries_that_do_not_fit_wait_ready() {
    let policy = r3router_core::topology::Allocation::PrefillComplete;
    let mut lab = Lab::pair(
        EngineConfig { allocation: policy, ..small_prefill() },
        EngineConfig { allocation: policy, mamba: None, max_total_tokens: 50_000, ..small_decode() },
    );
    for room in 1..=4 {
        lab.both(room, &ask(room, 20_000, 2000));
    }
    lab.until(15.0);
    let load = lab.load(D, 0);
    assert_eq!((load.running, load.prealloc, load.prealloc_ready_tokens), (2, 2, 40_000));
    lab.until(300.0);
    assert!((1..=4).all(|room| lab.done(1000 + room).unwrap().1.finish == Finish::Length));
}

#[test]
fn decode_under_memory_pressure_pushes_out_and_then_neither_reserves_nor_polls() {
    // 3.1: retraction. Two requests grow past the pool together.
    let config = EngineConfig {
        max_total_tokens: 20_000,
        compute: Compute { prefill_tokens_per_s: 1e6, ..Compute::default() },
        ..small_decode()
    };
    let mut lab = Lab::pair(EngineConfig { compute: config.compute, ..small_prefill() }, config);
    for room in [1, 2] {
        // The estimate of 100 tokens is wrong: the client allowed no more than 100, the sequence is longer.
        lab.both(room, &Ask { max_new_tokens: Some(100), ..ask(room, 8_000, 3_000) });
    }
    lab.until(1.0);
    lab.both(3, &Ask { max_new_tokens: Some(100), ..ask(3, 2_000, 10) });
    lab.until(1.5);
    assert_eq!((lab.load(D, 0).running, lab.load(D, 0).transfer), (2, 0));
    // 16,000 and 2 x 2,000 tokens fill the pool after 2,000 steps of 14.2 ms and more.
    lab.until(31.0);
    let load = lab.load(D, 0);
    assert_eq!((load.running, load.retracted, load.retracted_total), (1, 1, 1), "{load:?}");
    lab.both(4, &Ask { max_new_tokens: Some(1), ..ask(4, 64, 1) });
    lab.until(35.0);
    let load = lab.load(D, 0);
    assert_eq!(
        (load.prealloc, load.transfer),
        (1, 0),
        "a tiny request is not reserved while somebody is out: {load:?}"
    );
    lab.until(200.0);
    for room in 1..=4 {
        assert_eq!(lab.done(1000 + room).unwrap().1.finish, Finish::Length, "{room}");
    }
    assert_eq!(lab.load(D, 0).used_tokens, 0);
}

#[test]
fn kv_that_arrives_while_somebody_is_out_is_not_seen_and_its_clock_runs() {
    for (version, survives) in [(Version::V0_5_12, false), (Version::V0_5_23, true)] {
        let waiting_timeout = Duration::from_secs(5);
        let compute =
            Compute { prefill_tokens_per_s: 1e4, decode_step: Duration::from_millis(50), ..Compute::default() };
        let config = EngineConfig { max_total_tokens: 30_000, version, waiting_timeout, compute, ..small_decode() };
        let mut lab = Lab::pair(EngineConfig { version, compute, ..small_prefill() }, config);
        for room in [1, 2] {
            lab.both(room, &Ask { max_new_tokens: Some(10), ..ask(room, 10_000, 400) });
        }
        lab.until(3.5);
        // In transfer when the pool shrinks and one is pushed out; its KV arrives a moment later.
        lab.both(3, &Ask { max_new_tokens: Some(10), ..ask(3, 5_000, 5) });
        lab.until(3.6);
        assert_eq!(lab.load(D, 0).transfer, 1);
        lab.step(D, Event::Fault(Fault::Pool(lab.load(D, 0).used_tokens)));
        lab.until(8.0);
        let load = lab.load(D, 0);
        assert_eq!((load.retracted, load.transfer, load.running), (1, 1, 1), "{load:?}");
        assert!(lab.done(3).is_some(), "prefill has delivered");
        lab.until(120.0);
        // 0.5.12 looks at the clock before it looks for notices (3.5).
        assert_eq!(lab.done(1003).unwrap().1.finish == Finish::Length, survives, "{version:?}");
    }
}

#[test]
fn without_a_backup_a_pushed_out_request_ends_with_503() {
    let mut lab =
        Lab::pair(small_prefill(), EngineConfig { max_total_tokens: 20_000, retract_backup: false, ..small_decode() });
    for room in [1, 2] {
        lab.both(room, &Ask { max_new_tokens: Some(100), ..ask(room, 8_000, 3_000) });
    }
    lab.until(100.0);
    let failed: Vec<u64> =
        [1001, 1002].into_iter().filter(|k| lab.done(*k).unwrap().1.finish != Finish::Length).collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(
        lab.abort(failed[0]),
        (503, "Retracted under decode memory pressure without a KV backup. Retry later.".to_owned())
    );
}

#[test]
fn a_stalled_rank_stalls_all_ranks() {
    // 3.4: lock-step. The R3 of one finished request on rank 0 delays the tokens of rank 1.
    let run = |r3: Option<u32>| {
        let mut lab = Lab::pair(EngineConfig::prefill(2), EngineConfig::decode(2));
        lab.both(1, &Ask { r3_start: r3, routed_dp_rank: Some(0), prefill_dp_rank: Some(0), ..ask(2, 57_000, 50) });
        lab.until(10.0);
        lab.ask(P, 2, ask(3, 100, 1));
        lab.ask(D, 1002, Ask { routed_dp_rank: Some(1), ..ask(3, 100, 400) });
        lab.until(100.0);
        let (_, reply) = lab.done(1002).unwrap();
        reply.times.finished.since(reply.times.first_token).as_secs_f64()
    };
    // 57,049 rows of 1,280 bytes at the scheduler's rate.
    let expected = 57_049.0 * 1280.0 / R3Cost::default().scheduler;
    let longer = run(Some(0)) - run(None);
    assert!(longer.abs() < 0.03, "it had finished before rank 1 began: {longer}");
    let both = |r3: Option<u32>| {
        let mut lab = Lab::pair(EngineConfig::prefill(2), EngineConfig::decode(2));
        lab.ask(P, 1, Ask { routed_dp_rank: Some(0), ..ask(2, 57_000, 1) });
        lab.ask(D, 1001, Ask { r3_start: r3, routed_dp_rank: Some(0), ..ask(2, 57_000, 50) });
        lab.ask(P, 2, ask(3, 100, 1));
        lab.ask(D, 1002, Ask { routed_dp_rank: Some(1), ..ask(3, 100, 900) });
        lab.until(100.0);
        let (_, reply) = lab.done(1002).unwrap();
        reply.times.finished.since(reply.times.first_token).as_secs_f64()
    };
    let longer = both(Some(0)) - both(None);
    assert!((longer - expected).abs() < 0.01, "{longer} against {expected}");
}

#[test]
fn decode_publishes_every_15_steps_and_at_once_when_idle() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.until(5.0);
    assert_eq!(lab.fleet.loads(D)[0].measured_at, secs(5.0), "idle");
    lab.both(1, &ask(1, 100, 2000));
    let mut stamps = std::collections::BTreeSet::new();
    for i in 0..400 {
        lab.until(6.0 + f64::from(i) * 0.01);
        stamps.insert(lab.fleet.loads(D)[0].measured_at.0);
    }
    // 4 s of steps of 14.1 ms, 15 steps a time: about 19 publications.
    assert!((18..=20).contains(&stamps.len()), "{}", stamps.len());
}

#[test]
fn a_paused_decode_publishes_nothing_and_its_clock_runs() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.both(1, &ask(1, 60_000, 10));
    lab.until(1.0);
    lab.step(D, Event::Pause { key: Key(7), mode: PauseMode::InPlace });
    lab.until(100.0);
    assert_eq!(lab.answer(7).unwrap().1, 200);
    assert!(lab.fleet.loads(D)[0].measured_at < secs(2.0));
    lab.ask(D, 1002, ask(2, 100, 5));
    lab.until(200.0);
    assert_eq!(lab.load(D, 0).waiting_total(), 1, "5.3: a paused front end holds new requests");
    lab.step(D, Event::Continue { key: Key(8) });
    lab.until(210.0);
    assert_eq!(lab.done(1001).unwrap().1.finish, Finish::Length);
    assert_eq!(lab.load(D, 0).transfer, 1, "the held one is in");
}

#[test]
fn prefill_rank_is_the_explicit_one_or_room_modulo_ranks() {
    // Section 2. A mismatch parks the request in prefill's bootstrap queue; an impossible rank fails at once.
    let mut lab = Lab::pair(EngineConfig::prefill(4), small_decode());
    lab.both(1, &Ask { prefill_dp_rank: Some(2), ..ask(6, 100, 5) });
    lab.ask(P, 2, Ask { routed_dp_rank: Some(2), prefill_dp_rank: Some(2), ..ask(7, 100, 5) });
    lab.ask(D, 1002, ask(7, 100, 5));
    lab.ask(D, 1003, Ask { prefill_dp_rank: Some(4), ..ask(8, 100, 5) });
    lab.until(5.0);
    assert_eq!(lab.done(1001).unwrap().1.finish, Finish::Length);
    assert_eq!((lab.load(P, 2).bootstrap, lab.load(D, 0).transfer), (1, 1), "decode asks rank 3 for room 7");
    assert!(lab.abort(1003).1.contains("Could not fetch bootstrap info for: prefill_dp_rank 4"));
}
