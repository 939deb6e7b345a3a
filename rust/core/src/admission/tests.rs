//! The admission as its callers see it.
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::error::Kind;
use crate::load::RankReport;
use crate::topology::{EngineFacts, WorkerId, WorkerSpec};

fn t(secs: f64) -> Moment {
    // Far from zero, as the proxy's clock is.
    Moment::from_secs_f64(1000.0 + secs)
}

struct Lab {
    a: Admission,
    out: Vec<Decision>,
    woken: Arc<AtomicUsize>,
}

impl Lab {
    fn new(config: AdmissionConfig) -> Self {
        let woken = Arc::new(AtomicUsize::new(0));
        let told = Arc::clone(&woken);
        let wake = Box::new(move || {
            told.fetch_add(1, Ordering::Relaxed);
        });
        Self { a: Admission::new(config, wake), out: Vec::new(), woken }
    }

    fn worker(&mut self, role: Role, ranks: u16, facts: EngineFacts) -> WorkerId {
        let url = format!("http://{role:?}{ranks}").into();
        self.a.add_worker(WorkerSpec { url, role, ranks, facts }, t(0.0))
    }

    fn pd(config: AdmissionConfig, p: u16, d: u16, facts: EngineFacts) -> (Self, WorkerId, WorkerId) {
        let mut lab = Self::new(config);
        let pid = lab.worker(Role::Prefill, p, EngineFacts::default());
        let did = lab.worker(Role::Decode, d, facts);
        (lab, pid, did)
    }

    fn submit(&mut self, request: Request, secs: f64) -> Ticket {
        self.a.submit(request, t(secs)).unwrap()
    }

    fn poll(&mut self, secs: f64) -> Vec<Binding> {
        self.a.poll(t(secs), &mut self.out);
        let mut bound = Vec::new();
        let mut rest = Vec::new();
        for d in self.out.drain(..) {
            match d {
                Decision::Bind(b) => bound.push(b),
                refuse @ Decision::Refuse(..) => rest.push(refuse),
            }
        }
        self.out = rest;
        bound
    }

    fn refusals(&mut self) -> Vec<(Ticket, Error)> {
        self.out
            .drain(..)
            .map(|d| match d {
                Decision::Refuse(ticket, error) => (ticket, error),
                Decision::Bind(_) => panic!("a bind"),
            })
            .collect()
    }

    fn done(&mut self, b: Binding, secs: f64) {
        self.a.finish(b.permit, Outcome::Completed { output_tokens: 10 }, t(secs));
    }

    fn count(&self, name: &str) -> u64 {
        self.a.snapshot(t(0.0)).decisions.iter().find(|d| d.0 == name).unwrap().1
    }
}

fn ask(prompt: u32) -> Request {
    Request {
        prompt_tokens: prompt,
        max_new_tokens: Some(100),
        deadline: Moment::NEVER,
        body_bytes: 10,
        ..Default::default()
    }
}

fn held(lab: &Lab) -> (u32, u32, i64) {
    let s = lab.a.snapshot(t(0.0));
    (s.ranks.iter().map(|r| r.open).sum(), s.ranks.iter().map(|r| r.in_transfer).sum(), s.arena_reserved as i64)
}

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
fn every_hundred_requests_spread_evenly_over_four_ranks() {
    let mut lab = Lab::new(AdmissionConfig::default());
    lab.worker(Role::Regular, 4, EngineFacts::default());
    for _ in 0..100 {
        lab.submit(ask(5), 0.0);
    }
    let mut per = [0; 4];
    let bound = lab.poll(0.0);
    for b in &bound {
        per[usize::from(b.decode.rank)] += 1;
    }
    assert_eq!(per, [25; 4]);
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
    let second = lab.submit(Request { body_bytes: 1, ..ask(1) }, 0.0);
    let e = lab.a.submit(Request { body_bytes: 1, ..ask(1) }, t(0.0)).unwrap_err();
    assert_eq!((e.kind, e.limit, e.measured), (Kind::QueueFull, Some(2.0), Some(2.0)));
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

fn chain(seed: u64, blocks: usize) -> Vec<u64> {
    let mut r = crate::room::SplitMix::new(seed);
    (0..blocks).map(|_| r.next() | 1).collect()
}

#[test]
fn a_prefix_goes_back_to_its_rank_while_that_has_credit() {
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 4, 4, EngineFacts::default());
    let prefix: Arc<[u64]> = chain(1, 200).into();
    let mut ranks = Vec::new();
    for i in 0..10 {
        lab.submit(Request { prefix: prefix.clone(), ..ask(200 * 256 + 10) }, f64::from(i));
        let b = lab.poll(f64::from(i)).pop().unwrap();
        ranks.push(b.prefill.unwrap().rank);
        lab.done(b, f64::from(i) + 0.5);
    }
    assert!(ranks.iter().all(|&r| r == ranks[0]), "{ranks:?}");
}

#[test]
fn a_hot_prefix_spreads_to_idle_ranks_and_a_balanced_one_stays() {
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 4, 4, EngineFacts::default());
    let prefix: Arc<[u64]> = chain(1, 200).into();
    lab.submit(Request { prefix: prefix.clone(), ..ask(200 * 256 + 3000) }, 0.0);
    let warm = lab.poll(0.0).pop().unwrap();
    lab.done(warm, 1.0);
    // 40 at once: the rank takes what it may. What waits is more than computing 51,200 tokens again, so one more rank has it;
    // half of that is less.
    for _ in 0..40 {
        lab.submit(Request { prefix: prefix.clone(), ..ask(200 * 256 + 3000) }, 1.0);
    }
    let first = lab.poll(1.0);
    let used = |bound: &[Binding]| {
        let mut ranks: Vec<u16> = bound.iter().map(|b| b.prefill.unwrap().rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.len()
    };
    assert_eq!(used(&first), 2);
    let mut all = first;
    for i in 1..400 {
        all.extend(lab.poll(1.0 + f64::from(i) * 0.05));
    }
    assert!(used(&all) >= 3, "twenty idle seconds of three ranks pay for it");
    assert!(lab.count("affinity_moved") >= 2);
}

/// A prefill rank has a prefix and two long prompts to compute, another is idle. Returns how many of ten requests with the
/// prefix go to the idle one at once, where decode ranks run `running` requests each.
fn moved_to_an_idle_rank(running: u32) -> usize {
    let facts = EngineFacts { max_running: Some(running), extra_slots: Some(0), ..Default::default() };
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 2, 4, facts);
    let prefix: Arc<[u64]> = chain(1, 200).into();
    let hot = || Request { prefix: prefix.clone(), ..ask(200 * 256 + 3000) };
    lab.submit(hot(), 0.0);
    let warm = lab.poll(0.0).pop().unwrap();
    let home = warm.prefill.unwrap();
    lab.done(warm, 1.0);
    for _ in 0..4 {
        lab.submit(ask(40_000), 1.0);
    }
    let (stay, go): (Vec<_>, Vec<_>) = lab.poll(1.0).into_iter().partition(|b| b.prefill == Some(home));
    assert_eq!((stay.len(), go.len()), (2, 2));
    for b in go {
        lab.done(b, 2.0);
    }
    for _ in 0..10 {
        lab.submit(hot(), 2.0);
    }
    let moved = lab.poll(2.0);
    assert!(moved.iter().all(|b| b.prefill != Some(home)));
    moved.len()
}

#[test]
fn a_prefix_is_computed_again_to_save_a_wait_but_not_where_decode_is_what_limits() {
    // 80,000 tokens are before the rank that has it, 54,200 are the whole prompt. With six slots for ten requests, it would
    // have to save the fleet as much as it costs: 51,200 tokens more.
    assert!(moved_to_an_idle_rank(256) > 0);
    assert_eq!(moved_to_an_idle_rank(2), 0);
}

#[test]
fn windows_start_small_and_follow_littles_law() {
    let (mut lab, ..) = Lab::pd(AdmissionConfig::default(), 64, 1, EngineFacts::default());
    for _ in 0..100 {
        lab.submit(ask(1), 0.0);
    }
    assert_eq!(lab.poll(0.0).len(), 16);
}
