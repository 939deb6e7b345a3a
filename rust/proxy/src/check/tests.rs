//! Rules on fleets that are made up; `tests/proxy/test_check.py` asks engines.
use std::sync::Arc;
use std::time::Duration;

use r3router_core::topology::Role;
use serde_json::{Value, json};

use super::{Code, Finding, KnownTopology, Seen, Severity, Topology, Traits, examine};
use crate::address::Address;
use crate::probe::{Found, NotFound, Wrong};
use crate::settings::{Settings, Sources};

fn settings(flags: &[(&str, &str)]) -> Settings {
    let sources = flags.iter().fold(Sources::default().flag("pd_disaggregation", true), |s, (n, v)| s.flag(*n, *v));
    sources.load().unwrap().settings
}

/// A healthy engine of 0.5.23 with one rank.
fn engine(role: Role, url: &str, edit: impl FnOnce(&mut Found)) -> Seen {
    let info = json!({
        "version": "0.5.23", "model_path": "/models/m", "page_size": 64, "kv_cache_dtype": "auto",
        "load_balance_method": "follow_bootstrap_room", "disaggregation_transfer_backend": "nixl",
        "disaggregation_decode_allocation_policy": "early", "disaggregation_bootstrap_port": 8998, "enable_metrics": true,
    });
    let mut found = Found { ranks: 1, traits: Traits::read(&info, &Value::Null), ..Found::default() };
    found.facts.reports_load = true;
    found.traits.waiting_timeout = Some(Duration::from_secs(300));
    found.facts.max_running = Some(64);
    found.facts.max_total_tokens = Some(1_000_000);
    if role == Role::Prefill {
        let known =
            json!({"dp_size": 1, "page_size": 64, "follow_bootstrap_room": true, "decode_allocation_policy": "early"});
        found.traits.topology = Topology::Known(Box::new(KnownTopology::read(8998, &known).unwrap()));
    }
    edit(&mut found);
    Seen {
        url: url.into(),
        address: Address::parse(url).unwrap(),
        role,
        bootstrap_port: (role == Role::Prefill).then_some(8998),
        found: Ok(Arc::new(found)),
        closed_after: None,
    }
}

fn pair(prefill: impl FnOnce(&mut Found), decode: impl FnOnce(&mut Found)) -> Vec<Seen> {
    vec![engine(Role::Prefill, "http://p:1", prefill), engine(Role::Decode, "http://d:1", decode)]
}

/// Codes of errors and warnings.
fn wrong(found: &[Finding]) -> Vec<&'static str> {
    found.iter().filter(|f| f.code.severity() != Severity::Note).map(|f| f.code.name()).collect()
}

#[test]
fn a_healthy_fleet_has_nothing_but_notes() {
    let found = examine(&settings(&[]), &pair(|_| {}, |_| {}), None);
    assert_eq!(wrong(&found), Vec::<&str>::new());
    assert_eq!(found.iter().map(|f| f.code).collect::<Vec<_>>(), [Code::Reservations]);
}

#[test]
fn what_differs_is_said_with_both_values_and_who_has_them() {
    let found = examine(&settings(&[]), &pair(|_| {}, |d| d.traits.page_size = Some(1)), None);
    assert_eq!(wrong(&found), ["pair.page_size"]);
    assert_eq!(
        found[0].what,
        "KV pages differ, and decode refuses every request of such a pair: 64 at http://p:1; 1 at http://d:1 tokens"
    );
    assert_eq!(found[0].workers.len(), 2);
}

#[test]
fn errors_come_before_warnings_before_notes_and_codes_are_distinct() {
    let mut fleet =
        pair(|p| p.traits.load_balance = Some("round_robin".into()), |d| d.traits.backend = Some("mooncake".into()));
    fleet.push(Seen { found: Err(NotFound::Dead("refused".to_owned())), ..engine(Role::Decode, "http://x:1", |_| {}) });
    let found = examine(&settings(&[]), &fleet, None);
    assert_eq!(wrong(&found), ["engine.unreachable", "pair.backend", "pair.load_balance"]);
    let mut names: Vec<_> = Code::ALL.iter().map(|c| c.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Code::ALL.len());
    for code in Code::ALL {
        assert!(code.meaning().ends_with('.') && !code.meaning().contains("  "), "{}", code.meaning());
    }
}

#[test]
fn faults_of_releases_are_found_by_number_backend_and_model() {
    let of = |version: &str, edit: fn(&mut Found)| {
        let set = |f: &mut Found| {
            f.traits.version = Some(super::Version::parse(version));
            edit(f);
        };
        wrong(&examine(&settings(&[]), &pair(set, set), None))
    };
    assert_eq!(of("0.5.12", |_| {}), ["version.nixl_dense", "version.nixl_notice"]);
    assert_eq!(of("0.5.12.post1", |_| {}), ["version.nixl_notice"]);
    assert_eq!(of("0.5.12", |f| f.traits.has_state = true), ["version.nixl_notice"]);
    assert_eq!(of("0.5.12", |f| f.traits.backend = Some("mooncake".into())), Vec::<&str>::new());
    assert_eq!(of("0.5.10", |_| {}), ["version.nixl_notice", "version.rank_lookup"]);
    assert_eq!(of("0.5.23", |_| {}), Vec::<&str>::new());
    let r3 = |f: &mut Found| {
        f.traits.routed_experts = Some(true);
        f.traits.detokenizers = Some(4);
    };
    assert_eq!(of("0.5.11", r3), ["version.nixl_notice", "version.r3_prefill", "version.start_len"]);
    let slots = |f: &mut Found| {
        f.traits.has_state = true;
        f.traits.mamba_strategy = Some("extra_buffer".into());
    };
    assert_eq!(of("0.5.11", slots), ["version.nixl_notice", "version.state_slots"]);
}

#[test]
fn prefill_on_loopback_is_wrong_once_decode_is_elsewhere() {
    let mut fleet = pair(|_| {}, |_| {});
    fleet[0] = engine(Role::Prefill, "http://127.0.0.1:1", |_| {});
    assert_eq!(wrong(&examine(&settings(&[]), &fleet, None)), ["bootstrap.host"]);
    fleet[1] = engine(Role::Decode, "http://localhost:1", |_| {});
    assert_eq!(wrong(&examine(&settings(&[]), &fleet, None)), Vec::<&str>::new());
}

#[test]
fn without_a_bound_the_reservations_are_an_error_with_the_arithmetic() {
    for (flag, value) in [("window", "unbounded"), ("admission", "false")] {
        let found = examine(&settings(&[(flag, value)]), &pair(|_| {}, |d| d.ranks = 4), None);
        assert_eq!(wrong(&found), ["router.unbounded"]);
        assert!(found[0].what.contains("4 decode ranks reserve for up to 256 requests"), "{}", found[0].what);
        assert!(found[0].what.contains("Prefill must deliver 0.9 requests a second"), "{}", found[0].what);
    }
}

#[test]
fn clocks_that_do_not_fit_are_told_with_both() {
    let found = examine(&settings(&[("engine_waiting_timeout_secs", "60")]), &pair(|_| {}, |_| {}), None);
    assert_eq!(wrong(&found), ["router.timeout"]);
    assert!(found[0].what.contains("is 60 s and the engine waits for 300 s"), "{}", found[0].what);
    assert_eq!(found[0].advice, "set it to 300, or leave it out");
    let found = examine(&settings(&[("delivery_timeout_secs", "100")]), &pair(|_| {}, |_| {}), None);
    assert_eq!(wrong(&found), ["router.timeout"]);
    let silent = pair(|p| p.traits.waiting_timeout = None, |d| d.traits.waiting_timeout = None);
    let found = examine(&settings(&[]), &silent, None);
    assert!(found.iter().any(|f| f.code == Code::TimeoutUnknown), "{found:?}");
}

#[test]
fn payloads_are_weighed_by_the_models_width() {
    let sends = |f: &mut Found| f.traits.routed_experts = Some(true);
    let shape = [("r3_layers", "40"), ("r3_top_k", "8"), ("r3_experts", "256")];
    let found = examine(&settings(&shape), &pair(sends, sends), Some(57_344));
    assert_eq!(wrong(&found), ["r3.egress"]);
    // 57,344 x 1,280 bytes x 4/3 = 97.9 MB, 1.0 s at 97.4 MB/s, 64 rows.
    assert!(found[0].what.contains("a sample of 57344 tokens is 98 MB of text, about 1.0 s"), "{}", found[0].what);
    assert!(found[0].what.contains("takes 64 s to leave an engine"), "{}", found[0].what);
    let small = [shape[0], shape[1], shape[2], ("r3_arena_bytes", "1GiB")];
    let found = examine(&settings(&small), &pair(sends, sends), Some(57_344));
    // 64 x 57,344 x 320 bytes = 1.1 GiB.
    assert_eq!(wrong(&found), ["r3.arena", "r3.egress"]);
    assert!(found[0].what.contains("are 2GiB, and --r3-arena-bytes is 1GiB"), "{}", found[0].what);
}

#[test]
fn keys_and_roles_are_told_apart() {
    let never = |wrong, why: &str| {
        let found = Err(NotFound::Never(wrong, why.to_owned()));
        vec![engine(Role::Prefill, "http://p:1", |_| {}), Seen { found, ..engine(Role::Decode, "http://d:1", |_| {}) }]
    };
    assert_eq!(wrong(&examine(&settings(&[]), &never(Wrong::Key, "401"), None)), ["engine.key"]);
    assert_eq!(wrong(&examine(&settings(&[]), &never(Wrong::Role, "mode"), None)), ["engine.role"]);
    assert_eq!(wrong(&examine(&settings(&[]), &[], None)), ["fleet.no_engine", "fleet.no_engine"]);
}
