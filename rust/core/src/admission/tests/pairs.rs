//! Which pairs are bound, and what is refused for want of workers.
use super::*;

#[test]
fn a_pair_is_bound_with_a_room_that_implies_the_prefill_rank() {
    let (mut lab, p, d) = Lab::pd(AdmissionConfig::default(), 3, 7, EngineFacts::default());
    for i in 0..40 {
        lab.submit(ask(100), 0.0);
        for b in lab.poll(0.001 * f64::from(i)) {
            let prefill = b.prefill.unwrap();
            assert_eq!((prefill.worker, b.decode.worker), (p, d));
            assert_eq!(b.room % 3, u64::from(prefill.rank));
            assert!(b.decode.rank < 7 && prefill.rank < 3);
            lab.done(b, 0.001 * f64::from(i));
        }
    }
    assert_eq!(lab.count("bound"), 40);
    assert_eq!(held(&lab), (0, 0, 0));
}

#[test]
fn regular_workers_get_room_0_and_no_prefill() {
    let mut lab = Lab::new(AdmissionConfig::default());
    lab.worker(Role::Regular, 2, EngineFacts::default());
    lab.submit(ask(5), 0.0);
    let b = lab.poll(0.0).pop().unwrap();
    assert_eq!((b.prefill, b.room), (None, 0));
    lab.done(b, 1.0);
    assert_eq!(held(&lab), (0, 0, 0));
}

#[test]
fn no_worker_of_a_role_is_an_error_that_names_it() {
    let mut lab = Lab::new(AdmissionConfig::default());
    let e = lab.a.submit(ask(5), t(0.0)).unwrap_err();
    assert_eq!(e.kind, Kind::NoWorkers);
    let p = lab.worker(Role::Prefill, 1, EngineFacts::default());
    let e = lab.a.submit(ask(5), t(0.0)).unwrap_err();
    assert!(e.message.contains("no decode worker"), "{e}");
    lab.a.remove_worker(p, t(0.0));
    lab.worker(Role::Decode, 1, EngineFacts::default());
    let e = lab.a.submit(ask(5), t(0.0)).unwrap_err();
    assert!(e.message.contains("no prefill worker"), "{e}");
}

#[test]
fn the_last_worker_gone_refuses_what_waits() {
    let (mut lab, _, d) = Lab::pd(
        AdmissionConfig::default(),
        1,
        1,
        EngineFacts { max_running: Some(1), extra_slots: Some(0), ..Default::default() },
    );
    lab.submit(ask(5), 0.0);
    let ticket = lab.submit(ask(5), 0.0);
    let first = lab.poll(0.0).pop().unwrap();
    lab.a.remove_worker(d, t(1.0));
    assert!(lab.poll(1.0).is_empty());
    let refused = lab.refusals();
    assert_eq!((refused.len(), refused[0].0, refused[0].1.kind), (1, ticket, Kind::NoWorkers));
    lab.done(first, 2.0);
    assert_eq!(held(&lab), (0, 0, 0));
}

#[test]
fn switched_off_it_binds_everything_in_turn() {
    let facts = EngineFacts { max_running: Some(1), max_total_tokens: Some(10), ..Default::default() };
    let (mut lab, ..) = Lab::pd(AdmissionConfig { enabled: false, ..Default::default() }, 3, 4, facts);
    for _ in 0..120 {
        lab.submit(ask(1000), 0.0);
    }
    let bound = lab.poll(0.0);
    assert_eq!(bound.len(), 120);
    let per = |rank| bound.iter().filter(|b| b.decode.rank == rank).count();
    assert_eq!([per(0), per(1), per(2), per(3)], [30; 4]);
    assert!(bound.iter().all(|b| b.room % 3 == u64::from(b.prefill.unwrap().rank)));
    assert_eq!(held(&lab).0, 240);
}

#[test]
fn windows_start_small_and_follow_littles_law() {
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 64, 1, EngineFacts::default());
    for _ in 0..100 {
        lab.submit(ask(1), 0.0);
    }
    assert_eq!(lab.poll(0.0).len(), 16);
}
