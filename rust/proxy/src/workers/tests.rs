use super::{Drained, Entry, Phase, Registration, Registry, new_id};
use crate::address::Address;
use r3router_core::topology::Role;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

fn registration(url: &str, role: Role) -> Registration {
    Registration {
        address: Address::parse(url).unwrap(),
        shown: url.into(),
        role,
        bootstrap_port: None,
        key: crate::worker::Key::default(),
        health_checks: true,
        extra: serde_json::Map::new(),
        named: false,
    }
}

#[test]
fn one_engine_in_two_spellings_is_one_entry_and_another_role_is_a_conflict() {
    let registry = Registry::default();
    let (first, new) = registry.add(registration("http://[::1]:9001", Role::Decode)).unwrap();
    assert!(new);
    let (second, new) = registry.add(registration("HTTP://[0:0:0:0:0:0:0:1]:9001/", Role::Decode)).unwrap();
    assert!(!new);
    assert_eq!(first.id, second.id);
    assert_eq!(registry.find("http://[::1]:9001/").unwrap().id, first.id);
    assert_eq!(registry.find(&first.id).unwrap().id, first.id);
    let error = registry.add(registration("http://[::1]:9001", Role::Prefill)).unwrap_err();
    assert_eq!((error.http_status(), error.kind.code()), (409, "worker_conflict"));
    assert_eq!(registry.all().len(), 1);
}

#[test]
fn removal_is_final_and_a_failed_entry_starts_anew() {
    let registry = Registry::default();
    let (entry, _) = registry.add(registration("http://d:1", Role::Decode)).unwrap();
    assert!(entry.change(|s| s.phase = Phase::Failed));
    let (again, new) = registry.add(registration("http://d:1", Role::Decode)).unwrap();
    assert!(new && again.id != entry.id && again.phase() == Phase::Pending);
    registry.remove(&again);
    assert!(!again.change(|s| s.phase = Phase::Active));
    assert_eq!(again.phase(), Phase::Removed);
    assert!(registry.all().is_empty());
}

fn active(registry: &Registry, urls: &[&str]) -> Vec<Arc<Entry>> {
    let of = |url: &&str| {
        let (entry, _) = registry.add(registration(url, Role::Decode)).unwrap();
        entry.change(|s| s.phase = Phase::Active);
        entry
    };
    urls.iter().map(of).collect()
}

/// Does `acts` at one moment, each in a thread of its own.
fn at_once(acts: Vec<Box<dyn FnOnce() + Send + '_>>) {
    let barrier = Barrier::new(acts.len());
    std::thread::scope(|scope| {
        for act in acts {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                act();
            });
        }
    });
}

const ROUNDS: usize = 2000;

#[test]
fn of_workers_that_are_slow_at_one_moment_one_stays_in_choice() {
    for _ in 0..ROUNDS {
        let registry = Registry::default();
        let entries = active(&registry, &["http://d:1", "http://d:2", "http://d:3"]);
        // Of another role, and no reason to let decode go.
        let (other, _) = registry.add(registration("http://p:1", Role::Prefill)).unwrap();
        other.change(|s| s.phase = Phase::Active);
        let out = AtomicUsize::new(0);
        let eject = |entry: &Arc<Entry>| -> Box<dyn FnOnce() + Send + '_> {
            let (entry, registry, out) = (Arc::clone(entry), &registry, &out);
            Box::new(move || {
                out.fetch_add(usize::from(registry.eject(&entry, "slow".to_owned())), Ordering::Relaxed);
            })
        };
        at_once(entries.iter().map(eject).collect());
        assert_eq!((out.load(Ordering::Relaxed), registry.healthy(Role::Decode)), (2, 1));
    }
}

#[test]
fn a_slow_worker_is_back_when_the_other_goes_at_the_same_moment_for_another_reason() {
    let gone: [fn(&Registry, &Arc<Entry>); 3] = [
        |_, entry| _ = entry.change(|s| s.phase = Phase::Down),
        |_, entry| _ = entry.change(|s| s.drained.set(None, true, 1)),
        Registry::remove,
    ];
    for round in 0..ROUNDS {
        let registry = Registry::default();
        let entries = active(&registry, &["http://d:1", "http://d:2"]);
        let (slow, other) = (&entries[0], &entries[1]);
        at_once(vec![
            Box::new(|| _ = registry.eject(slow, "slow".to_owned())),
            Box::new(|| gone[round % gone.len()](&registry, other)),
        ]);
        let out = slow.state().ejected;
        assert_eq!(registry.reinstate(slow), out, "whichever was first");
        assert_eq!(registry.healthy(Role::Decode), 1);
        assert!(!registry.reinstate(slow), "once");
    }
}

#[test]
fn of_slow_workers_that_are_all_out_one_comes_back() {
    for _ in 0..ROUNDS {
        let registry = Registry::default();
        let entries = active(&registry, &["http://d:1", "http://d:2", "http://d:3"]);
        assert!(registry.eject(&entries[0], "slow".to_owned()) && registry.eject(&entries[1], "slow".to_owned()));
        assert!(!registry.reinstate(&entries[0]), "another one is in choice");
        entries[2].change(|s| s.phase = Phase::Down);
        let back = |entry: &Arc<Entry>| -> Box<dyn FnOnce() + Send + '_> {
            let (entry, registry) = (Arc::clone(entry), &registry);
            Box::new(move || _ = registry.reinstate(&entry))
        };
        at_once(entries[..2].iter().map(back).collect());
        assert_eq!(registry.healthy(Role::Decode), 1);
    }
}

#[test]
fn a_fleet_without_a_healthy_engine_says_what_each_last_met() {
    use r3router_core::error::{Error, Kind, Source};
    let registry = Registry::default();
    let asked = || {
        let error = Error::new(Kind::NoWorkers, Source::Router, "no decode worker is registered");
        registry.explain(&[Role::Prefill, Role::Decode], error)
    };
    assert_eq!(asked().message, "no decode worker is registered");
    for at in 0..6 {
        let (entry, _) = registry.add(registration(&format!("http://d:{}", at + 1), Role::Decode)).unwrap();
        entry.change(|s| {
            s.phase = Phase::Down;
            s.message = format!("refused {}", "x".repeat(1000));
        });
    }
    let error = asked();
    assert!(error.message.starts_with("6 decode registered, 0 healthy: http://d:1 is down (refused xxx"), "{error}");
    assert!(error.message.ends_with("; and 2 more") && error.message.len() < 1000, "{error}");
    assert_eq!((error.limit, error.measured, error.http_status()), (Some(1.0), Some(0.0), 503));
    registry.all()[5].change(|s| s.phase = Phase::Active);
    assert_eq!(asked().message, "no decode worker is registered", "one is healthy, so that was not the reason");
}

#[test]
fn a_rank_comes_back_out_of_a_drained_worker_and_the_rest_stay_out() {
    let mut drained = Drained::default();
    drained.set(None, true, 4);
    assert_eq!(drained.of(4), [0, 1, 2, 3]);
    assert_eq!(drained.of(8).len(), 8, "all, however many there are after a restart");
    drained.set(Some(2), false, 4);
    assert_eq!(drained.of(4), [0, 1, 3]);
    drained.set(Some(2), true, 4);
    assert_eq!(drained.of(4), [0, 1, 2, 3]);
    drained.set(None, false, 4);
    assert_eq!(drained, Drained::default());
}

#[test]
fn ids_have_the_shape_of_a_uuid() {
    let id = new_id();
    assert_eq!(id.len(), 36);
    assert_eq!(id.chars().filter(|c| *c == '-').count(), 4);
    assert_eq!(id.as_bytes()[14], b'4');
    assert_ne!(new_id(), id);
}
