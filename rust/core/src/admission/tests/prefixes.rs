//! Prefixes and the ranks that have them.
use super::*;

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
