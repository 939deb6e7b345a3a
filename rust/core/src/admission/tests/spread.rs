//! Equal ranks get equal shares.
use super::*;

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

/// Serves `requests` one after the other, so that every rank is idle at each choice; returns how many each prefill and each
/// decode (or regular) rank got.
fn one_at_a_time(lab: &mut Lab, requests: u32, request: &Request) -> (Vec<u32>, Vec<u32>) {
    let (mut front, mut back) = (vec![0; 4], vec![0; 4]);
    for i in 0..requests {
        // Several between two ticks: what is not chosen is not looked at in between.
        let secs = 0.003 * f64::from(i);
        lab.submit(request.clone(), secs);
        let b = lab.poll(secs).pop().unwrap();
        if let Some(p) = b.prefill {
            front[usize::from(p.rank)] += 1;
        }
        back[usize::from(b.decode.rank)] += 1;
        lab.done(b, secs + 0.002);
    }
    (front, back)
}

#[test]
fn idle_ranks_get_the_same_share_on_either_side_whatever_the_seed() {
    for seed in 0..20 {
        let config = || AdmissionConfig { seed, ..AdmissionConfig::default() };
        let (mut lab, ..) = Lab::pd(config(), 4, 4, EngineFacts::default());
        assert_eq!(one_at_a_time(&mut lab, 100, &ask(5)), (vec![25; 4], vec![25; 4]), "seed {seed}");
        let mut lab = Lab::new(config());
        lab.worker(Role::Regular, 4, EngineFacts::default());
        assert_eq!(one_at_a_time(&mut lab, 100, &ask(5)).1, [25; 4], "seed {seed}");
    }
}

#[test]
fn idle_ranks_that_have_the_prefix_get_the_same_share() {
    let prefix: Arc<[u64]> = chain(1, 200).into();
    let hot = Request { prefix, ..ask(200 * 256 + 10) };
    for role in [Role::Prefill, Role::Regular] {
        let mut lab = Lab::new(AdmissionConfig::default());
        lab.worker(role, 4, EngineFacts::default());
        if role == Role::Prefill {
            lab.worker(Role::Decode, 1, EngineFacts { max_running: Some(1000), ..EngineFacts::default() });
        }
        // As after a burst that fed all four of them.
        for slot in 0..4 {
            lab.a.affinity.insert(&hot.prefix, 0, slot);
        }
        let (front, back) = one_at_a_time(&mut lab, 100, &hot);
        assert_eq!(if role == Role::Prefill { front } else { back }, [25; 4], "{role:?}");
    }
}

#[test]
fn a_rank_that_comes_late_gets_its_share_and_no_more() {
    let mut lab = Lab::new(AdmissionConfig::default());
    for _ in 0..3 {
        lab.worker(Role::Regular, 1, EngineFacts::default());
    }
    let mut per = std::collections::HashMap::new();
    for i in 0..160 {
        if i == 60 {
            lab.worker(Role::Regular, 1, EngineFacts::default());
            per.clear();
        }
        let secs = 0.003 * f64::from(i);
        lab.submit(ask(5), secs);
        let b = lab.poll(secs).pop().unwrap();
        *per.entry(b.decode.worker).or_insert(0) += 1;
        lab.done(b, secs + 0.002);
    }
    assert!(per.len() == 4 && per.values().all(|&n| n == 25), "{per:?}");
}

#[test]
fn routers_with_different_seeds_do_not_begin_with_the_same_rank() {
    let first = |seed| {
        let (mut lab, ..) = Lab::pd(AdmissionConfig { seed, ..Default::default() }, 8, 8, EngineFacts::default());
        lab.submit(ask(5), 0.0);
        let b = lab.poll(0.0).pop().unwrap();
        (b.prefill.unwrap().rank, b.decode.rank)
    };
    let mut firsts: Vec<_> = (0..32).map(first).collect();
    firsts.sort_unstable();
    firsts.dedup();
    assert!(firsts.len() >= 16, "{firsts:?}");
}
