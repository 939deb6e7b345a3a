//! Each policy chooses among the ranks that have room, and nothing else.
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::*;
use crate::policy::{Assignment, KEY_PATIENCE, Policy, PolicyConfig, Target, Targets};

fn config(of: [Policy; 3]) -> AdmissionConfig {
    AdmissionConfig { policies: PolicyConfig { of, ..PolicyConfig::default() }, seed: 7, ..AdmissionConfig::default() }
}

fn all(policy: Policy) -> AdmissionConfig {
    config([policy; 3])
}

fn rows(max_running: u32) -> EngineFacts {
    EngineFacts { max_running: Some(max_running), extra_slots: Some(0), ..EngineFacts::default() }
}

fn keyed(key: u64) -> Request {
    Request { key, ..ask(100) }
}

/// A fleet of regular engines with one policy.
fn regular(policy: Policy, engines: u16, ranks: u16, facts: &EngineFacts) -> (Lab, Vec<WorkerId>) {
    let mut lab = Lab::new(all(policy));
    let ids = (0..engines).map(|n| lab.worker_at(&format!("http://e{n}"), Role::Regular, ranks, facts.clone()));
    let ids = ids.collect();
    (lab, ids)
}

/// Binds one request and says where.
fn one(lab: &mut Lab, request: Request, secs: f64) -> Binding {
    lab.submit(request, secs);
    lab.poll(secs).pop().expect("room")
}

#[test]
fn random_gives_each_rank_with_room_the_same_chance_and_a_full_one_none() {
    let (mut lab, ids) = regular(Policy::Random, 2, 4, &rows(1000));
    let mut counts: BTreeMap<RankId, u32> = BTreeMap::new();
    for i in 0..1600 {
        let b = one(&mut lab, ask(10), f64::from(i) * 0.01);
        *counts.entry(b.decode).or_default() += 1;
        lab.done(b, f64::from(i) * 0.01 + 0.005);
    }
    assert_eq!(counts.len(), 8);
    assert!(counts.values().all(|n| (140..=260).contains(n)), "{counts:?}");
    lab.a.set_draining(ids[0], true);
    let ranks: BTreeSet<RankId> = (0..100).map(|i| one(&mut lab, ask(10), 20.0 + f64::from(i) * 0.01).decode).collect();
    assert!(ranks.iter().all(|r| r.worker == ids[1]) && ranks.len() == 4, "{ranks:?}");
}

#[test]
fn round_robin_takes_each_rank_in_turn_and_passes_by_the_full_ones() {
    let (mut lab, ids) = regular(Policy::RoundRobin, 2, 2, &rows(2));
    let at = |b: &Binding| (usize::from(b.decode.worker == ids[1])) * 2 + usize::from(b.decode.rank);
    let mut bound: Vec<Binding> = (0..7).map(|i| one(&mut lab, ask(10), f64::from(i))).collect();
    assert_eq!(bound.iter().map(at).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1, 2]);
    // Rank 3 has one row left. Then all are full, and looks that find nothing use up no turn.
    bound.push(one(&mut lab, ask(10), 7.0));
    lab.submit(ask(10), 8.0);
    for i in 0..5 {
        assert!(lab.poll(8.0 + f64::from(i)).is_empty());
    }
    let third = bound.remove(2);
    assert_eq!(at(&third), 2);
    lab.done(third, 13.0);
    assert_eq!(lab.poll(13.0).iter().map(at).collect::<Vec<_>>(), [2]);
}

#[test]
fn power_of_two_takes_the_lighter_and_so_keeps_the_load_even() {
    let spread = |policy| {
        let (mut lab, _) = regular(policy, 4, 4, &rows(1000));
        for i in 0..1600 {
            lab.submit(ask(10), f64::from(i) * 0.001);
            std::mem::forget(lab.poll(f64::from(i) * 0.001));
        }
        let ranks = lab.a.snapshot(t(2.0)).ranks;
        f64::from(ranks.iter().map(|r| r.open).max().unwrap()) / 100.0
    };
    let (two, any) = (spread(Policy::PowerOfTwo), spread(Policy::Random));
    assert!(two < 1.05 && any > 1.1, "{two} {any}");
}

#[test]
fn bucket_keeps_short_prompts_from_long_ones_and_goes_to_the_next_range_when_one_is_full() {
    let (mut lab, _) = regular(Policy::Bucket, 1, 4, &rows(1000));
    // As many tokens in short prompts as in long ones.
    let mut at = 0.0;
    let mut turn = |lab: &mut Lab, prompt: u32| {
        at += 0.01;
        let b = one(lab, ask(prompt), at);
        let rank = b.decode.rank;
        lab.done(b, at + 0.005);
        rank
    };
    let (mut short, mut long) = ([0u32; 4], [0u32; 4]);
    for round in 0..100 {
        for prompt in [1000; 16].into_iter().chain([16_000]) {
            let counts = if prompt == 1000 { &mut short } else { &mut long };
            counts[usize::from(turn(&mut lab, prompt))] += u32::from(round >= 50);
        }
    }
    // What is left are the edges of an interval.
    assert!(short[2] + short[3] < 40 && long[0] + long[1] < 5, "{short:?} {long:?}");
    assert!(short[..2].iter().all(|n| *n > 300) && long[2..].iter().all(|n| *n > 15), "{short:?} {long:?}");

    let (mut lab, _) = regular(Policy::Bucket, 1, 4, &rows(2));
    let ranks: Vec<u16> = (0..8)
        .map(|i| one(&mut lab, ask(1000), f64::from(i) * 0.01))
        .map(|b| {
            let rank = b.decode.rank;
            std::mem::forget(b);
            rank
        })
        .collect();
    assert!((0..4).all(|r| ranks.iter().filter(|&&x| x == r).count() == 2), "{ranks:?}");
}

#[test]
fn a_key_stays_on_its_rank_and_new_keys_go_where_the_fewest_are() {
    let (mut lab, ids) = regular(Policy::Manual, 2, 4, &rows(100));
    let mut seat: BTreeMap<u64, RankId> = BTreeMap::new();
    for turn in 0..10 {
        for key in 1..=64 {
            let now = f64::from(turn) * 5.0 + key as f64 * 0.01;
            let b = one(&mut lab, keyed(key), now);
            let home = *seat.entry(key).or_insert(b.decode);
            assert_eq!(b.decode, home, "key {key} moved in turn {turn}");
            lab.done(b, now + 0.001);
        }
    }
    let held = |seat: &BTreeMap<u64, RankId>| {
        let mut counts: BTreeMap<RankId, u32> = BTreeMap::new();
        for r in seat.values() {
            *counts.entry(*r).or_default() += 1;
        }
        counts
    };
    assert!(held(&seat).values().all(|&n| n == 8), "{:?}", held(&seat));
    assert_eq!(lab.count("routing_key_moved"), 0);

    // One engine goes: its keys move once, evenly, and the others do not.
    lab.a.remove_worker(ids[0], t(60.0));
    let before = seat.clone();
    for turn in 0..5 {
        for key in 1..=64 {
            let now = 60.0 + f64::from(turn) * 5.0 + key as f64 * 0.01;
            let b = one(&mut lab, keyed(key), now);
            if turn == 0 {
                assert!(before[&key].worker == ids[0] || before[&key] == b.decode, "key {key} need not move");
                seat.insert(key, b.decode);
            }
            assert_eq!(b.decode, seat[&key]);
            lab.done(b, now + 0.001);
        }
    }
    assert_eq!(lab.count("routing_key_moved"), 32);
    assert!(held(&seat).values().all(|&n| n == 16), "{:?}", held(&seat));
}

#[test]
fn a_key_waits_a_little_for_its_rank_when_that_is_full_and_then_goes_on_and_stays() {
    let (mut lab, _) = regular(Policy::Manual, 1, 2, &rows(1));
    let first = one(&mut lab, keyed(1), 0.0);
    let home = first.decode;
    lab.submit(keyed(1), 1.0);
    assert!(lab.poll(1.0).is_empty(), "the other rank is free, and its key's is not");
    let patience = KEY_PATIENCE.as_secs_f64();
    assert!(lab.poll(1.0 + patience - 0.1).is_empty());
    let moved = lab.poll(1.0 + patience + 0.1).pop().unwrap();
    assert_ne!(moved.decode, home);
    assert_eq!(lab.count("routing_key_moved"), 1);
    let there = moved.decode;
    lab.done(first, 4.0);
    lab.done(moved, 4.0);
    assert_eq!(one(&mut lab, keyed(1), 5.0).decode, there, "it has the cache now");
}

#[test]
fn requests_of_other_keys_do_not_wait_behind_one_that_waits_for_its_rank() {
    let (mut lab, _) = regular(Policy::Manual, 1, 2, &rows(1));
    let first = one(&mut lab, keyed(1), 0.0);
    lab.submit(keyed(1), 1.0);
    lab.submit(keyed(2), 1.0);
    let bound = lab.poll(1.0);
    assert_eq!(bound.len(), 1);
    assert_ne!(bound[0].decode, first.decode);
}

#[test]
fn an_engine_that_restarted_has_none_of_the_keys_of_the_one_before() {
    let mut lab = Lab::new(all(Policy::Manual));
    let old = lab.worker_at("http://a", Role::Regular, 1, rows(100));
    lab.worker_at("http://b", Role::Regular, 1, rows(100));
    let bound: Vec<Binding> = (1..=8).map(|key| one(&mut lab, keyed(key), 0.0)).collect();
    assert_eq!(bound.iter().filter(|b| b.decode.worker == old).count(), 4);
    lab.a.remove_worker(old, t(1.0));
    for b in bound {
        lab.done(b, 1.0);
    }
    // A tick sweeps the old names, and the slot is used again.
    lab.poll(1.5);
    let new = lab.worker_at("http://a", Role::Regular, 1, rows(100));
    let fresh: Vec<RankId> = (11..=14).map(|key| one(&mut lab, keyed(key), 2.0).decode).collect();
    assert!(fresh.iter().all(|r| r.worker == new), "it has no keys and the other has four: {fresh:?}");
}

#[test]
fn how_new_keys_are_given_out_is_a_setting() {
    let mut config = all(Policy::Manual);
    config.policies.assignment = Assignment::MinLoad;
    let mut lab = Lab::new(config);
    lab.worker(Role::Regular, 2, rows(100));
    let busy = one(&mut lab, ask(10), 0.0);
    // Three more keys go where less is open, though that has more keys then.
    for key in 1..=3 {
        let b = one(&mut lab, keyed(key), f64::from(key as u32));
        assert_ne!(b.decode, busy.decode);
        lab.done(b, f64::from(key as u32) + 0.5);
    }
}

#[test]
fn a_hashed_key_is_on_the_same_rank_in_every_router_and_only_a_gone_ranks_keys_move() {
    let places = |gone: Option<usize>| {
        let (mut lab, ids) = regular(Policy::ConsistentHashing, 4, 2, &rows(1000));
        if let Some(at) = gone {
            lab.a.remove_worker(ids[at], t(0.0));
        }
        (1..=400u64)
            .map(|key| {
                let b = one(&mut lab, keyed(key.wrapping_mul(0x9e37_79b9_7f4a_7c15)), 0.0);
                let at = (ids.iter().position(|id| *id == b.decode.worker).unwrap(), b.decode.rank);
                lab.done(b, 0.0);
                at
            })
            .collect::<Vec<_>>()
    };
    let (whole, less) = (places(None), places(Some(2)));
    assert_eq!(whole, places(None));
    let mut counts: BTreeMap<_, u32> = BTreeMap::new();
    for at in &whole {
        *counts.entry(*at).or_default() += 1;
    }
    assert!(counts.len() == 8 && counts.values().all(|n| (30..=75).contains(n)), "{counts:?}");
    for (a, b) in whole.iter().zip(&less) {
        assert!(a == b || a.0 == 2, "{a:?} is there and was left for {b:?}");
    }
}

#[test]
fn a_prompts_beginning_names_its_rank_until_that_has_more_than_its_share() {
    let (mut lab, _) = regular(Policy::PrefixHash, 4, 2, &rows(1000));
    let request = |seed| Request { prefix: chain(seed, 4).into(), ..ask(1100) };
    let mut homes = BTreeSet::new();
    for seed in 1..=64 {
        let (one_, two) = (one(&mut lab, request(seed), 0.0), 0.5);
        lab.a.finish(one_.permit, Outcome::Cancelled, t(two));
        let again = one(&mut lab, request(seed), 1.0);
        assert_eq!(again.decode, one_.decode);
        homes.insert(again.decode);
        lab.done(again, 1.5);
    }
    assert_eq!(homes.len(), 8);
    // 80 of one beginning at once: eight ranks, a quarter more than a share at most.
    let mut open: BTreeMap<RankId, u32> = BTreeMap::new();
    for _ in 0..80 {
        let b = one(&mut lab, request(1), 2.0);
        *open.entry(b.decode).or_default() += 1;
        std::mem::forget(b);
    }
    assert!(open.values().all(|n| *n <= 14), "{open:?}");
}

#[test]
fn prefill_and_decode_have_policies_of_their_own() {
    let of = [Policy::Headroom, Policy::Manual, Policy::RoundRobin];
    let mut lab = Lab::new(config(of));
    lab.worker_at("http://p0", Role::Prefill, 2, EngineFacts::default());
    lab.worker_at("http://p1", Role::Prefill, 2, EngineFacts::default());
    lab.worker_at("http://d", Role::Decode, 3, rows(100));
    let mut homes = BTreeMap::new();
    let mut back = Vec::new();
    for i in 0..12u32 {
        let key = u64::from(i % 4) + 1;
        let b = one(&mut lab, keyed(key), f64::from(i));
        assert_eq!(*homes.entry(key).or_insert(b.prefill.unwrap()), b.prefill.unwrap());
        assert_eq!(b.room % 2, u64::from(b.prefill.unwrap().rank));
        back.push(b.decode.rank);
        lab.done(b, f64::from(i) + 0.5);
    }
    assert_eq!(homes.values().collect::<BTreeSet<_>>().len(), 4);
    assert_eq!(back, [0, 1, 2].repeat(4));
}

#[test]
fn decode_can_follow_prefixes_too_and_its_table_is_its_own() {
    let mut lab = Lab::new(config([Policy::Headroom, Policy::Random, Policy::CacheAware]));
    lab.worker(Role::Prefill, 4, EngineFacts::default());
    lab.worker(Role::Decode, 4, rows(100));
    let prefix: Arc<[u64]> = chain(1, 200).into();
    let mut decode = BTreeSet::new();
    let mut prefill = BTreeSet::new();
    for i in 0..20 {
        let b = one(&mut lab, Request { prefix: prefix.clone(), ..ask(200 * 256 + 10) }, f64::from(i));
        decode.insert(b.decode);
        prefill.insert(b.prefill.unwrap());
        lab.done(b, f64::from(i) + 0.5);
    }
    assert_eq!(decode.len(), 1);
    assert!(prefill.len() > 1);
}

#[test]
fn sessions_that_share_their_beginning_stay_and_no_rank_has_much_more_than_its_share() {
    let (mut lab, _) = regular(Policy::CacheAware, 8, 1, &rows(1000));
    let mut given: BTreeMap<RankId, u32> = BTreeMap::new();
    let mut homes = BTreeMap::new();
    let (mut moves, mut now) = (0, 0.0);
    let mut running = VecDeque::new();
    for turn in 0..10 {
        for session in 0..64 {
            // The beginning of all, and the session's own, longer with every turn.
            let prefix: Vec<u64> = chain(1, 4).into_iter().chain(chain(100 + session, 2 + 2 * turn)).collect();
            let tokens = prefix.len() as u32 * 256 + 10;
            let b = one(&mut lab, Request { prefix: prefix.into(), ..ask(tokens) }, now);
            *given.entry(b.decode).or_default() += 1;
            moves += u32::from(homes.insert(session, b.decode).is_some_and(|home| home != b.decode));
            running.push_back(b);
            now += 0.01;
            // Two a rank run at a time.
            if running.len() > 16
                && let Some(done) = running.pop_front()
            {
                lab.done(done, now);
            }
        }
    }
    for b in running {
        lab.done(b, now);
    }
    assert_eq!(given.values().sum::<u32>(), 640);
    assert_eq!(given.len(), 8);
    assert!(given.values().all(|n| *n <= 96), "more than 1.2 shares: {given:?}");
    assert!(moves <= 32, "{moves} of 576 turns were computed anew");
}

#[test]
fn no_policy_goes_above_what_a_rank_holds() {
    for policy in [
        Policy::CacheAware,
        Policy::Headroom,
        Policy::Random,
        Policy::RoundRobin,
        Policy::PowerOfTwo,
        Policy::Bucket,
        Policy::Manual,
        Policy::ConsistentHashing,
        Policy::PrefixHash,
    ] {
        let (mut lab, _) = regular(policy, 2, 2, &rows(3));
        for i in 0..100u64 {
            // All of one key and one beginning: what draws them to one rank.
            lab.submit(Request { key: 5, prefix: chain(1, 4).into(), ..ask(1100 + i as u32) }, 0.0);
        }
        let mut bound = Vec::new();
        for i in 0..400 {
            bound.extend(lab.poll(f64::from(i) * 0.02));
        }
        assert_eq!(bound.len(), 12, "{policy:?} leaves no row empty");
        assert!(lab.a.snapshot(t(9.0)).ranks.iter().all(|r| r.open == 3), "{policy:?}");
    }
}

#[test]
fn a_named_rank_is_the_only_one_and_a_full_one_is_waited_for() {
    let (mut lab, ids) = regular(Policy::CacheAware, 2, 2, &rows(1));
    let target = |rank| Targets { back: Some(Target { worker: ids[1], rank }), ..Targets::default() };
    let first = one(&mut lab, Request { targets: target(Some(1)), ..ask(10) }, 0.0);
    assert_eq!((first.decode.worker, first.decode.rank), (ids[1], 1));
    lab.submit(Request { targets: target(Some(1)), ..ask(10) }, 1.0);
    for i in 0..500 {
        assert!(lab.poll(1.0 + f64::from(i) * 0.02).is_empty());
    }
    // The engine's other rank is as good for one that names the engine, and others go elsewhere meanwhile.
    assert_eq!(
        one(&mut lab, Request { targets: target(None), ..ask(10) }, 20.0).decode,
        RankId { worker: ids[1], rank: 0 }
    );
    assert_eq!(one(&mut lab, ask(10), 20.0).decode.worker, ids[0]);
    lab.done(first, 21.0);
    assert_eq!(lab.poll(21.0)[0].decode, RankId { worker: ids[1], rank: 1 });
}

#[test]
fn a_named_rank_that_is_gone_or_too_small_is_refused_at_once_also_while_it_is_waited_for() {
    let small = EngineFacts { max_total_tokens: Some(4000), ..rows(1) };
    let mut lab = Lab::new(AdmissionConfig::default());
    let big = lab.worker_at("http://a", Role::Regular, 1, rows(8));
    let little = lab.worker_at("http://b", Role::Regular, 1, small);
    let to = |worker, rank| Targets { back: Some(Target { worker, rank }), ..Targets::default() };
    let refused =
        |lab: &mut Lab, targets, prompt| lab.a.submit(Request { targets, ..ask(prompt) }, t(0.0)).unwrap_err();
    assert_eq!(refused(&mut lab, to(WorkerId(99), None), 10).kind, Kind::NoWorkers);
    assert_eq!(refused(&mut lab, to(big, Some(1)), 10).kind, Kind::NoWorkers);
    assert_eq!(refused(&mut lab, to(little, None), 9000).kind, Kind::TooLargeForFleet);
    let _busy = one(&mut lab, Request { targets: to(little, None), ..ask(10) }, 0.0);
    let waits = lab.submit(Request { targets: to(little, None), ..ask(10) }, 1.0);
    assert!(lab.poll(1.0).is_empty());
    lab.a.remove_worker(little, t(2.0));
    assert!(lab.poll(2.0).is_empty());
    let refusals = lab.refusals();
    assert_eq!((refusals[0].0, refusals[0].1.kind), (waits, Kind::NoWorkers));
}

#[test]
fn the_table_of_keys_has_one_size_and_old_keys_are_forgotten() {
    let mut config = all(Policy::Manual);
    config.policies.key_idle = Duration::from_secs(100);
    let mut lab = Lab::new(config);
    lab.worker(Role::Regular, 2, rows(1_000_000));
    let first = one(&mut lab, keyed(1), 0.0);
    let home = first.decode;
    lab.done(first, 0.0);
    // Twice as many keys as there is room for.
    for key in 2..600_000u64 {
        let b = one(&mut lab, keyed(key), 1.0 + key as f64 * 1e-4);
        lab.a.finish(b.permit, Outcome::Cancelled, t(1.0 + key as f64 * 1e-4));
    }
    let late = one(&mut lab, keyed(1), 500.0);
    assert_eq!(lab.count("routing_key_moved"), 0, "it was forgotten, and {home:?} or {:?} is new to it", late.decode);
}

#[test]
fn a_request_that_names_a_rank_leaves_its_key_where_it_is() {
    let (mut lab, ids) = regular(Policy::Manual, 2, 1, &rows(4));
    let home = one(&mut lab, keyed(1), 0.0).decode;
    let other = ids.iter().find(|id| **id != home.worker).unwrap();
    let targets = Targets { back: Some(Target { worker: *other, rank: None }), ..Targets::default() };
    assert_eq!(one(&mut lab, Request { targets, ..keyed(1) }, 1.0).decode.worker, *other);
    assert_eq!(one(&mut lab, keyed(1), 2.0).decode, home);
    assert_eq!(lab.count("routing_key_moved"), 0);
}
