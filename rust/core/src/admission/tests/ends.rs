//! How attempts end, and what that gives back.
use super::*;

/// KVX-2.
#[test]
fn a_slot_that_leaked_stays_off_the_budget_until_a_report_shows_it_free() {
    let facts = EngineFacts { max_running: Some(4), extra_slots: Some(0), reports_load: true, ..Default::default() };
    let config = AdmissionConfig { stale_after: std::time::Duration::from_secs(1000), ..Default::default() };
    let (mut lab, _, d) = Lab::pd(config, 1, 1, facts);
    let report = |lab: &mut Lab, transfer: u32, secs: f64| {
        let r = RankReport {
            measured_at: t(secs),
            running: Some(0),
            waiting_total: Some(transfer),
            transfer: Some(transfer),
            ..Default::default()
        };
        lab.a.report(d, &[r], t(secs));
    };
    report(&mut lab, 0, 0.1);
    for _ in 0..8 {
        lab.submit(ask(10), 0.2);
    }
    let mut bound = lab.poll(0.2);
    assert_eq!(bound.len(), 4);
    let stuck = bound.pop().unwrap();
    lab.a.finish(stuck.permit, Outcome::Failed { role: Role::Decode, how: Failure::Deadline }, t(2.0));
    assert_eq!(lab.poll(2.0).len(), 0);
    report(&mut lab, 4, 2.5);
    assert_eq!(lab.poll(2.5).len(), 0);
    for b in bound {
        lab.done(b, 3.0);
    }
    assert_eq!(lab.poll(3.0).len(), 3, "one of four rows is leaked");
    for i in 0..3 {
        report(&mut lab, 3, 4.0 + f64::from(i));
    }
    assert_eq!(lab.poll(7.0).len(), 1, "the engine freed it");
}

#[test]
fn a_dropped_permit_gives_everything_back_once_and_wakes() {
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 1, 1, EngineFacts::default());
    let r3 = R3Need { prefill_text: 100, decode_text: 50, arena: 20 };
    lab.submit(Request { r3: Some(r3), ..ask(10) }, 0.0);
    let b = lab.poll(0.0).pop().unwrap();
    assert_eq!(held(&lab), (2, 2, 20));
    lab.a.delivered(&b.permit, t(0.1));
    lab.a.delivered(&b.permit, t(0.1));
    assert_eq!(held(&lab), (2, 0, 20));
    lab.a.leg_ended(&b.permit, Role::Prefill, t(0.2));
    lab.a.leg_ended(&b.permit, Role::Prefill, t(0.2));
    assert_eq!(held(&lab), (1, 0, 20));
    drop(b);
    assert_eq!(lab.woken.load(Ordering::Relaxed), 1);
    lab.poll(0.3);
    assert_eq!(held(&lab), (0, 0, 0));
    lab.poll(0.4);
    assert_eq!(held(&lab), (0, 0, 0));
}

#[test]
fn a_permit_of_a_removed_worker_touches_nothing_of_the_next_generation() {
    let (mut lab, _, d) =
        Lab::pd(AdmissionConfig { affinity_bytes: 0, ..Default::default() }, 1, 1, EngineFacts::default());
    lab.submit(ask(10), 0.0);
    let old = lab.poll(0.0).pop().unwrap();
    lab.a.remove_worker(d, t(1.0));
    lab.poll(1.0);
    lab.worker(Role::Decode, 1, EngineFacts::default());
    lab.submit(ask(10), 1.1);
    let new = lab.poll(1.1).pop().unwrap();
    assert_ne!(new.decode.worker, d);
    lab.done(old, 2.0);
    let s = lab.a.snapshot(t(2.0));
    assert_eq!(s.ranks.iter().filter(|r| r.role == "decode").map(|r| r.open).collect::<Vec<_>>(), [1]);
    lab.done(new, 3.0);
    assert_eq!(held(&lab), (0, 0, 0));
}

/// CB-1 and CB-2.
#[test]
fn client_faults_never_open_a_breaker_and_an_open_side_refuses_at_once() {
    let config = AdmissionConfig { breaker_threshold: 3, ..Default::default() };
    let (mut lab, ..) = Lab::pd(config, 1, 1, EngineFacts::default());
    let round = |lab: &mut Lab, outcome, secs| {
        lab.submit(ask(1), secs);
        let b = lab.poll(secs).pop().unwrap();
        lab.a.finish(b.permit, outcome, t(secs));
    };
    for i in 0..30 {
        round(&mut lab, if i % 2 == 0 { Outcome::Rejected } else { Outcome::Cancelled }, 0.1);
    }
    for _ in 0..3 {
        round(&mut lab, Outcome::Failed { role: Role::Decode, how: Failure::Deadline }, 0.1);
    }
    for _ in 0..3 {
        round(&mut lab, Outcome::Failed { role: Role::Prefill, how: Failure::Server }, 0.2);
    }
    let e = lab.a.submit(ask(1), t(0.3)).unwrap_err();
    assert_eq!(e.kind, Kind::NoWorkers);
    assert!(e.message.contains("prefill"), "{e}");
    // Half-open: one probe goes to both legs, and closes it.
    lab.submit(ask(1), 10.3);
    lab.submit(ask(1), 10.3);
    let mut probe = lab.poll(10.3);
    assert_eq!(probe.len(), 1);
    lab.done(probe.pop().unwrap(), 10.4);
    assert_eq!(lab.poll(10.4).len(), 1);
}

/// WRK-2.
#[test]
fn a_refused_connect_takes_the_worker_out_at_once_and_a_retry_goes_elsewhere() {
    let mut lab = Lab::new(AdmissionConfig::default());
    lab.worker(Role::Prefill, 2, EngineFacts::default());
    let d0 = lab.worker(Role::Decode, 1, EngineFacts::default());
    let d1 = lab.worker(Role::Decode, 1, EngineFacts::default());
    for _ in 0..4 {
        lab.submit(ask(1), 0.0);
    }
    let bound = lab.poll(0.0);
    let dead = bound.into_iter().find(|b| b.decode.worker == d0).unwrap();
    let rank = dead.decode;
    lab.a.finish(dead.permit, Outcome::Failed { role: Role::Decode, how: Failure::Connect }, t(0.1));
    lab.submit(Request { avoid: vec![rank], retry: true, ..ask(1) }, 0.1);
    for _ in 0..3 {
        lab.submit(ask(1), 0.1);
    }
    let bound = lab.poll(0.1);
    assert!(!bound.is_empty());
    assert!(bound.iter().all(|b| b.decode.worker == d1), "{bound:?}");
}

#[test]
fn a_retry_waits_rather_than_return_to_the_rank_that_failed_it() {
    let facts = EngineFacts { max_running: Some(1), extra_slots: Some(0), ..Default::default() };
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 1, 2, facts);
    lab.submit(ask(1), 0.0);
    lab.submit(ask(1), 0.0);
    let mut bound = lab.poll(0.0);
    assert_eq!(bound.len(), 2);
    let (failed, busy) = (bound.remove(0), bound.remove(0));
    let (bad, good) = (failed.decode, busy.decode);
    lab.a.finish(failed.permit, Outcome::Failed { role: Role::Decode, how: Failure::Server }, t(1.0));
    lab.submit(Request { avoid: vec![bad], retry: true, ..ask(1) }, 1.0);
    assert_eq!(lab.poll(1.0).len(), 0);
    lab.done(busy, 2.0);
    assert_eq!(lab.poll(2.0).pop().unwrap().decode, good);
}
