use super::*;

/// The run of section 6.6: one regular engine, 16 samples of 57k tokens (54k of them a shared prefix) in a closed loop.
fn closed_loop(r3: bool, by_reference: bool, rounds: u64) -> (f64, f64, Lab) {
    let mut config = EngineConfig::regular(1);
    config.r3.by_reference = by_reference;
    let mut lab = Lab::new(vec![config]);
    let sample = |own: u64| Ask {
        prefix: chain(1, 211, 222, own),
        r3_start: r3.then_some(0),
        bootstrap: None,
        body_bytes: 400_000,
        ..ask(own, 57_000, 64)
    };
    lab.ask(P, 0, sample(0));
    lab.until(60.0);
    let begin = lab.now;
    let mut sent = 0u64;
    for _ in 0..16 {
        sent += 1;
        lab.ask(P, sent, sample(sent));
    }
    let seen = lab.seen.len();
    let (mut finished, mut took) = (0u64, Vec::new());
    while finished < 16 * rounds {
        let next = lab.fleet.next_timer().unwrap();
        lab.until(next.as_secs_f64() + 1e-9);
        for (at, _, effect) in lab.seen.split_off(seen) {
            if let Effect::Done { reply, .. } = effect {
                finished += 1;
                took.push(at.since(reply.times.arrived).as_secs_f64());
                sent += 1;
                lab.ask(P, sent, sample(sent));
            }
        }
    }
    let rate = finished as f64 / lab.now.since(begin).as_secs_f64();
    took.sort_by(f64::total_cmp);
    (rate, took[took.len() / 2], lab)
}

#[test]
fn the_real_engines_run_is_reproduced() {
    // 6.6, measured: 1.86 samples/s and 8.6 s without R3, 0.66 samples/s and 24.0 s with it.
    let (off, off_p50, _) = closed_loop(false, false, 6);
    let (on, on_p50, _) = closed_loop(true, false, 6);
    assert!((off - 1.86).abs() < 0.15 && (off_p50 - 8.6).abs() < 0.9, "off: {off} /s, {off_p50} s");
    assert!((on - 0.66).abs() < 0.08 && (on_p50 - 24.0).abs() < 3.0, "on: {on} /s, {on_p50} s");
    let (by_reference, p50, _) = closed_loop(true, true, 6);
    assert!(by_reference > 0.9 * off, "by reference: {by_reference} /s, {p50} s");
}

#[test]
fn a_97_mb_reply_takes_one_second_in_series() {
    let mut lab = Lab::new(vec![EngineConfig::regular(1)]);
    lab.ask(P, 1, Ask { bootstrap: None, r3_start: Some(0), ..ask(0, 57_000, 65) });
    lab.until(60.0);
    let (_, reply) = lab.done(1).unwrap();
    assert_eq!(reply.r3.unwrap().text_bytes, 97_389_228);
    let serial = reply.times.emitted.since(reply.times.finished).as_secs_f64();
    assert!((serial - 1.0).abs() < 0.03, "{serial}");
}

#[test]
fn a_one_token_request_waits_behind_the_drain() {
    // 6.6: 13.6 s at worst for one token; /model_info 2.1 s at worst, 2 ms as a rule.
    let (_, _, mut lab) = closed_loop(true, false, 2);
    let mut worst = (0.0f64, 0.0f64);
    let mut typical = Vec::new();
    for i in 0..200u64 {
        let at = lab.now.as_secs_f64();
        lab.step(P, Event::Http { key: Key(900_000 + i) });
        if i % 4 == 0 {
            lab.ask(P, 800_000 + i, Ask { bootstrap: None, ..ask(0, 16, 1) });
        }
        lab.until(at + 0.2);
    }
    lab.until(lab.now.as_secs_f64() + 60.0);
    for i in 0..200u64 {
        let (at, _) = lab.answer(900_000 + i).unwrap();
        let asked = lab.now.as_secs_f64() - 60.0 - 40.0 + i as f64 * 0.2;
        worst.1 = worst.1.max(at - asked);
        typical.push(at - asked);
        if let Some((at, reply)) = lab.done(800_000 + i) {
            worst.0 = worst.0.max(at - reply.times.arrived.as_secs_f64());
        }
    }
    typical.sort_by(f64::total_cmp);
    assert!((10.0..18.0).contains(&worst.0), "one token: {}", worst.0);
    assert!((1.0..4.0).contains(&worst.1), "HTTP loop: {}", worst.1);
    assert!(typical[100] < 0.005, "HTTP loop p50: {}", typical[100]);
}

#[test]
fn ingress_shares_the_http_loop() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.step(P, Event::Fault(Fault::StallHttp(Duration::from_secs(2))));
    lab.both(1, &ask(1, 100, 2));
    lab.until(10.0);
    assert!((lab.done(1).unwrap().1.times.scheduled.as_secs_f64() - 2.0).abs() < 0.01);
}

#[test]
fn old_loads_wait_for_the_scheduler_and_new_ones_do_not() {
    for (version, waits) in [(Version::V0_5_12, true), (Version::V0_5_23, false)] {
        let mut lab =
            Lab::pair(EngineConfig { version, ..small_prefill() }, EngineConfig { version, ..small_decode() });
        lab.step(D, Event::Fault(Fault::StallScheduler(Duration::from_secs(3))));
        lab.until(0.01);
        lab.step(D, Event::Loads { key: Key(5) });
        lab.until(10.0);
        assert_eq!(lab.answer(5).unwrap().0 > 2.9, waits, "{version:?}");
    }
}

#[test]
fn streams_open_at_once_and_count_up() {
    // 1.3: status 200 comes before anything is known.
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.ask(P, 1, ask(1, 3000, 5));
    lab.ask(D, 1001, Ask { stream: true, ..ask(1, 3000, 5) });
    lab.until(10.0);
    let of: Vec<&Effect> = lab.seen.iter().map(|(_, _, e)| e).filter(|e| matches!(e, Effect::Opened { key } | Effect::Chunk { key, .. } | Effect::Done { key, .. } if *key == Key(1001))).collect();
    assert!(matches!(of[0], Effect::Opened { .. }));
    let counts: Vec<u32> =
        of.iter().filter_map(|e| if let Effect::Chunk { tokens, .. } = e { Some(*tokens) } else { None }).collect();
    assert_eq!(counts, [1, 2, 3, 4]);
    assert!(matches!(of.last().unwrap(), Effect::Done { reply, .. } if reply.output_tokens == 5));
}

#[test]
fn health_is_answered_when_the_scheduler_says_anything_and_503_after_20_s() {
    let mut lab = Lab::pair(small_prefill(), small_decode());
    lab.step(P, Event::Health { key: Key(1) });
    lab.until(5.0);
    let (at, status) = lab.answer(1).unwrap();
    assert!(status == 200 && (at - 1.0).abs() < 0.05, "{at}");
    lab.step(P, Event::Fault(Fault::StallScheduler(Duration::from_secs(60))));
    lab.until(6.0);
    lab.step(P, Event::Health { key: Key(2) });
    lab.until(40.0);
    let (at, status) = lab.answer(2).unwrap();
    assert!(status == 503 && (at - 26.0).abs() < 0.1, "{at} {status}");
}
