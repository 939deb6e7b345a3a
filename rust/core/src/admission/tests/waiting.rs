//! Requests that wait: deadlines, pauses, limits, overtaking.
use super::*;

#[test]
fn the_deadline_says_limit_wait_and_what_held_the_request() {
    let facts = EngineFacts { max_running: Some(1), extra_slots: Some(0), ..Default::default() };
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 1, 1, facts);
    lab.submit(ask(10), 0.0);
    let first = lab.poll(0.0);
    let late = lab.submit(Request { deadline: t(5.0), ..ask(10) }, 1.0);
    assert_eq!(lab.poll(1.0).len(), 0);
    assert!(lab.a.poll(t(4.99), &mut lab.out).unwrap() <= t(5.01));
    assert!(lab.out.is_empty());
    lab.a.poll(t(5.0), &mut lab.out);
    let refused = lab.refusals();
    assert_eq!(refused[0].0, late);
    let e = &refused[0].1;
    assert_eq!((e.kind, e.limit, e.measured), (Kind::QueueTimeout, Some(4.0), Some(4.0)));
    assert!(e.advice.as_deref().is_some_and(|a| a.contains("--queue-timeout-secs")), "{e}");
    assert!(e.message.contains("rows"), "{e}");
    drop(first);
}

#[test]
fn a_pause_stops_binding_and_the_deadline() {
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 1, 1, EngineFacts::default());
    lab.a.set_paused(true, t(0.0));
    lab.submit(Request { deadline: t(5.0), ..ask(10) }, 0.0);
    assert!(lab.poll(60.0).is_empty() && lab.out.is_empty());
    assert_eq!(lab.a.snapshot(t(60.0)).ranks[0].closed, "paused");
    lab.a.set_paused(false, t(60.0));
    lab.submit(Request { deadline: t(61.0), ..ask(10) }, 60.0);
    assert_eq!(lab.poll(60.0).len(), 2);
}

#[test]
fn a_full_queue_refuses_by_requests_and_by_bytes() {
    let config = AdmissionConfig { queue_max_requests: 2, queue_max_bytes: 100, ..Default::default() };
    let (mut lab, ..) = Lab::pd(config, 1, 1, EngineFacts::default());
    lab.a.set_paused(true, t(0.0));
    lab.submit(Request { body_bytes: 60, ..ask(1) }, 0.0);
    let e = lab.a.submit(Request { body_bytes: 60, ..ask(1) }, t(0.0)).unwrap_err();
    assert_eq!((e.kind, e.limit, e.measured), (Kind::QueueFull, Some(100.0), Some(120.0)));
    assert!(e.advice.as_deref().is_some_and(|a| a.ends_with("raise --queue-max-bytes")), "{e}");
    let second = lab.submit(Request { body_bytes: 1, ..ask(1) }, 0.0);
    let e = lab.a.submit(Request { body_bytes: 1, ..ask(1) }, t(0.0)).unwrap_err();
    assert_eq!((e.kind, e.limit, e.measured), (Kind::QueueFull, Some(2.0), Some(2.0)));
    assert!(e.advice.as_deref().is_some_and(|a| a.ends_with("raise --queue-size")), "{e}");
    lab.a.cancel(second);
    lab.a.cancel(second);
    assert_eq!(lab.a.snapshot(t(0.0)).queued, 1);
    lab.submit(ask(1), 0.0);
}

#[test]
fn a_big_request_is_overtaken_a_bounded_number_of_times() {
    let facts = EngineFacts { max_total_tokens: Some(100_000), ..Default::default() };
    let config = AdmissionConfig { max_overtakes: 5, window: WindowMode::Unbounded, ..Default::default() };
    let (mut lab, ..) = Lab::pd(config, 1, 2, facts);
    let mut open: Vec<Binding> = Vec::new();
    for _ in 0..8 {
        lab.submit(ask(20_000), 0.0);
    }
    open.extend(lab.poll(0.0));
    assert_eq!(open.len(), 8);
    let big = lab.submit(ask(90_000), 0.1);
    for i in 0..400 {
        lab.submit(ask(20_000), 0.2 + f64::from(i) * 0.1);
    }
    let mut bound_before = 0;
    for i in 0..400 {
        let now = 1.0 + f64::from(i);
        let b = open.remove(0);
        lab.done(b, now);
        let bound = lab.poll(now);
        if bound.iter().any(|b| b.ticket == big) {
            assert!((5..20).contains(&bound_before), "{bound_before}");
            return;
        }
        bound_before += bound.len();
        open.extend(bound);
    }
    panic!("starved");
}
