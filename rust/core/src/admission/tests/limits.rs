//! What bounds a rank: growth, state slots, R3 on its way out, the arena, reports.
use super::*;

/// ADM-1: 8 ranks of 100,000 tokens, 16 requests of 45,000 + 20,000.
#[test]
fn a_rank_holds_one_of_two_requests_that_could_outgrow_it() {
    let facts = EngineFacts { max_total_tokens: Some(100_000), ..Default::default() };
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 16, 8, facts);
    for _ in 0..16 {
        lab.submit(Request { max_new_tokens: Some(20_000), ..ask(45_000) }, 0.0);
    }
    let bound = lab.poll(0.0);
    let mut per = [0; 8];
    for b in &bound {
        per[usize::from(b.decode.rank)] += 1;
    }
    assert_eq!(per, [1; 8]);
    let e = lab.a.submit(Request { max_new_tokens: None, ..ask(150_000) }, t(0.0)).unwrap_err();
    assert_eq!((e.kind, e.limit, e.measured), (Kind::TooLargeForFleet, Some(100_000.0), Some(154_096.0)));
    for b in bound {
        lab.done(b, 5.0);
    }
    assert_eq!(lab.poll(5.0).len(), 8);
}

/// ADM-2: 12 slots, 3 for each request.
#[test]
fn state_slots_bound_and_an_error_lowers_the_bound() {
    let facts = EngineFacts {
        mamba_slots: Some(12),
        mamba_slots_per_request: Some(3),
        max_running: Some(12),
        ..Default::default()
    };
    let (mut lab, ..) =
        Lab::pd(AdmissionConfig { window: WindowMode::Unbounded, ..Default::default() }, 1, 1, facts.clone());
    for _ in 0..20 {
        lab.submit(ask(10), 0.0);
    }
    assert_eq!(lab.poll(0.0).len(), 4);

    let wrong = EngineFacts { mamba_slots_per_request: Some(1), ..facts };
    let (mut lab, ..) = Lab::pd(AdmissionConfig { window: WindowMode::Unbounded, ..Default::default() }, 1, 1, wrong);
    for _ in 0..20 {
        lab.submit(ask(10), 0.0);
    }
    let mut bound = lab.poll(0.0);
    assert_eq!(bound.len(), 12);
    // The engine holds four and refuses eight.
    for b in bound.drain(4..) {
        lab.a.finish(b.permit, Outcome::Failed { role: Role::Decode, how: Failure::Mamba }, t(0.1));
    }
    assert_eq!(lab.poll(0.2).len(), 0);
    for b in bound {
        lab.done(b, 1.0);
    }
    assert_eq!(lab.poll(1.0).len(), 4);
}

/// The engine keeps 512 tokens free for each request that it has; a router that counts what it reserved would send on.
#[test]
fn answers_that_outgrow_their_reserve_close_the_rank_before_the_engine_does() {
    let facts = EngineFacts { max_total_tokens: Some(20_000), reports_load: true, ..Default::default() };
    let config = AdmissionConfig { kv_margin: 0.0, ..Default::default() };
    let (mut lab, _, d) = Lab::pd(config, 1, 1, facts);
    let report = |lab: &mut Lab, running: u32, used: u64, secs: f64| {
        let r = RankReport {
            measured_at: t(secs),
            running: Some(running),
            waiting_total: Some(0),
            transfer: Some(0),
            used_tokens: Some(used),
            ..Default::default()
        };
        lab.a.report(d, &[r], t(secs));
    };
    report(&mut lab, 0, 0, 0.0);
    // Each needs 1,512 and reserves as much.
    for _ in 0..6 {
        lab.submit(ask(1000), 0.0);
    }
    let bound = lab.poll(0.0);
    assert_eq!(bound.len(), 6);
    for b in &bound {
        lab.a.delivered(&b.permit, t(0.1));
    }
    lab.submit(ask(1000), 0.2);
    // 6 x 512 are kept free: 15,416 + 3,072 + 1,512 are the pool.
    report(&mut lab, 6, 15_417, 0.2);
    assert_eq!(lab.poll(0.2).len(), 0);
    assert_eq!(lab.a.snapshot(t(0.2)).ranks.iter().find(|r| r.role == "decode").unwrap().kv_free, 1511);
    report(&mut lab, 6, 15_416, 0.3);
    assert_eq!(lab.poll(0.3).len(), 1);
}

#[test]
fn the_arena_bounds_r3_and_refuses_what_it_can_never_hold() {
    let config = AdmissionConfig { arena_bytes: 100, ..Default::default() };
    let (mut lab, ..) = Lab::pd(config, 8, 8, EngineFacts::default());
    let r3 = |arena| Some(R3Need { prefill_text: 1, decode_text: 1, arena });
    let e = lab.a.submit(Request { r3: r3(101), ..ask(1) }, t(0.0)).unwrap_err();
    assert_eq!((e.kind, e.limit, e.measured), (Kind::R3ArenaTooSmall, Some(100.0), Some(101.0)));
    for _ in 0..3 {
        lab.submit(Request { r3: r3(40), ..ask(1) }, 0.0);
    }
    lab.submit(ask(1), 0.0);
    let bound = lab.poll(0.0);
    assert_eq!(bound.len(), 3, "two with R3 and the one without");
    assert_eq!(lab.a.snapshot(t(0.0)).arena_reserved, 80);
    lab.done(bound.into_iter().next().unwrap(), 1.0);
    assert_eq!(lab.poll(1.0).len(), 1);
}

#[test]
fn r3_text_about_to_leave_an_engine_is_bounded_in_time() {
    let p = EngineFacts { waiting_timeout: Some(std::time::Duration::from_secs(100)), ..Default::default() };
    let mut lab = Lab::new(AdmissionConfig::default());
    lab.worker(Role::Prefill, 8, p);
    for _ in 0..8 {
        lab.worker(Role::Decode, 1, EngineFacts::default());
    }
    for _ in 0..30 {
        lab.submit(Request { r3: Some(R3Need { prefill_text: 97_000_000, decode_text: 1, arena: 1 }), ..ask(1) }, 0.0);
    }
    // 10 % of 100 s at 97 MB/s.
    let bound = lab.poll(0.0);
    assert_eq!(bound.len(), 10);
    assert!(lab.count("r3_egress") > 0);
    lab.a.leg_ended(&bound[0].permit, Role::Prefill, t(1.0));
    assert_eq!(lab.poll(1.0).len(), 1);
}

#[test]
fn a_stale_decode_rank_takes_nothing_and_reports_open_it() {
    let facts = EngineFacts { reports_load: true, ..Default::default() };
    let (mut lab, _, d) = Lab::pd(AdmissionConfig::default(), 1, 1, facts);
    lab.submit(ask(1), 0.0);
    assert!(lab.poll(0.0).is_empty());
    assert_eq!(lab.a.snapshot(t(0.0)).ranks[1].closed, "stale");
    lab.a.report(d, &[RankReport { measured_at: t(0.5), ..Default::default() }], t(0.5));
    assert_eq!(lab.poll(0.5).len(), 1);
    lab.submit(ask(1), 2.51);
    assert!(lab.poll(2.51).is_empty());
}

#[test]
fn a_rank_that_retracts_is_closed() {
    let facts = EngineFacts { reports_load: true, ..Default::default() };
    let (mut lab, _, d) = Lab::pd(AdmissionConfig::default(), 1, 1, facts);
    let report =
        |retracted, secs| RankReport { measured_at: t(secs), retracted: Some(retracted), ..Default::default() };
    lab.a.report(d, &[report(1, 0.1)], t(0.1));
    lab.submit(ask(1), 0.1);
    assert!(lab.poll(0.1).is_empty());
    assert_eq!(lab.a.snapshot(t(0.1)).ranks[1].closed, "retracted");
    lab.a.report(d, &[report(0, 0.2)], t(0.2));
    assert_eq!(lab.poll(0.2).len(), 1);
}

#[test]
fn a_draining_worker_takes_nothing_new() {
    let (mut lab, _, d) = Lab::pd(AdmissionConfig::default(), 1, 1, EngineFacts::default());
    lab.a.set_draining(d, true);
    lab.submit(ask(1), 0.0);
    assert!(lab.poll(0.0).is_empty());
    lab.a.set_draining(d, false);
    assert_eq!(lab.poll(0.0).len(), 1);
}

#[test]
fn a_drained_rank_takes_nothing_new_and_its_sister_goes_on() {
    let (mut lab, _, d) = Lab::pd(AdmissionConfig::default(), 1, 2, EngineFacts::default());
    lab.a.set_drained(d, &[0, 7], true);
    for _ in 0..6 {
        lab.submit(ask(1), 0.0);
    }
    let bound = lab.poll(0.0);
    assert!(!bound.is_empty() && bound.iter().all(|b| b.decode.rank == 1), "{bound:?}");
    let view = lab.a.snapshot(t(0.0));
    let drained: Vec<_> = view.ranks.iter().filter(|r| r.role == "decode").map(|r| (r.drained, r.closed)).collect();
    assert_eq!(drained[0], (true, "draining"));
    assert!(!drained[1].0);
    // A health check that passes again is no reason to undo a person's wish.
    lab.a.set_draining(d, true);
    lab.a.set_draining(d, false);
    assert_eq!(lab.a.snapshot(t(0.0)).ranks[1].closed, "draining");
    lab.a.set_drained(d, &[0], false);
    assert_eq!(lab.a.snapshot(t(0.0)).ranks[1].closed, "");
}

#[test]
fn a_pool_that_is_said_to_be_larger_holds_no_more_than_the_last_report_had_free() {
    let facts = |slots| EngineFacts { mamba_slots: Some(slots), reports_load: true, ..EngineFacts::default() };
    let mut lab = Lab::new(AdmissionConfig::default());
    let id = lab.worker(Role::Regular, 1, facts(4));
    // Two of others run there, and take all but two.
    let report = |secs| RankReport {
        measured_at: t(secs),
        running: Some(2),
        waiting_total: Some(0),
        mamba_free: Some(2),
        ..RankReport::default()
    };
    lab.a.report(id, &[report(0.0)], t(0.0));
    lab.a.update_facts(id, facts(40), t(0.1));
    for _ in 0..9 {
        lab.submit(ask(10), 0.2);
    }
    assert_eq!(lab.poll(0.2).len(), 2);
}

#[test]
fn a_burst_after_calls_one_after_another_is_bound_as_in_a_fresh_router() {
    let bound = |calls: u32| {
        let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 1, 1, EngineFacts::default());
        let mut now = 0.0;
        for _ in 0..calls {
            lab.submit(ask(100), now);
            let one = lab.poll(now).pop().unwrap();
            lab.a.delivered(&one.permit, t(now + 0.05));
            // Polled in between, as a router is.
            for _ in 0..5 {
                now += 0.05;
                lab.poll(now);
            }
            lab.done(one, now);
        }
        for _ in 0..200 {
            lab.submit(ask(100), now);
        }
        lab.poll(now).len()
    };
    let fresh = bound(0);
    assert!(fresh >= 16, "{fresh}");
    assert_eq!([bound(25), bound(200)], [fresh, fresh]);
}
