//! The simulator itself. What the computed window is held to stands in `targets.rs`.
use super::*;

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/sim/scenarios")
}

fn plain(name: &str) -> Report {
    let mut scenario = Scenario::read(&folder().join(name).with_extension("toml")).unwrap();
    scenario.router.admission = false;
    run(&scenario)
}

#[test]
fn at_least_24_scenarios_are_there_and_all_can_be_read() {
    assert!(scenarios(&folder()).unwrap().len() >= 24);
}

#[test]
fn the_incident_happens_behind_a_plain_router() {
    // engine-protocol.md 6: 768 open requests, R3 on; transfers pile up on decode, few run, and W ends them.
    let report = plain("incident");
    assert!(report.failed > 300, "{report:?}");
    assert!(report.reasons.iter().any(|(text, n)| text.contains("KVPoll.WaitingForInput") && *n > 300));
    assert!(
        report.peak_transfer > 50 && report.mean_running < 45.0,
        "{} {}",
        report.peak_transfer,
        report.mean_running
    );
    // Without R3, or with R3 by reference, the same fleet lives.
    for name in ["incident_r3_off", "incident_by_reference"] {
        let report = plain(name);
        assert_eq!((report.failed, report.engine_timeouts), (0, 0), "{name}");
        assert!(report.rollouts_per_s > 2.0, "{name}: {}", report.rollouts_per_s);
    }
}

#[test]
fn the_computed_window_meets_its_targets() {
    // All scenarios and all windows: `make bench-window`.
    let names = ["skew_55", "overload_10x", "incident", "mamba_6"];
    let read = |name: &str| Scenario::read(&folder().join(name).with_extension("toml")).unwrap();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let rows = compare(&names.map(read), &[4, 8, 16, 32, 96], threads, |_| {});
    assert_eq!(rows.iter().map(|r| r.computed.scenario.as_str()).collect::<Vec<_>>(), names);
    for row in rows {
        assert_eq!(missed(&row), Vec::<String>::new(), "{}: {:?}", row.computed.scenario, row.computed);
    }
}

#[test]
fn a_missed_target_is_named() {
    let scenario = Scenario::read(&folder().join("dp_1.toml")).unwrap();
    let report = Report { window: Some(Window::Static(3)), ..run(&Scenario { limit_s: 30.0, ..scenario }) };
    assert!(report.cut_off, "{report:?}");
    let faster = Report { rollouts_per_s: report.rollouts_per_s * 1.02, ..report.clone() };
    let row = Row { computed: report.clone(), fixed: vec![report.clone(), faster.clone()], unbounded: report };
    let misses = missed(&row).join("; ");
    assert!(misses.contains("cut off") && misses.contains("0.9804 of the best static window"), "{misses}");
    let over = Report { cut_off: false, engine_timeouts: 2, over_reservations: 1, failed: 3, ..faster };
    let row = Row { computed: over.clone(), fixed: Vec::new(), unbounded: over };
    let misses = missed(&row).join("; ");
    for text in ["3 requests failed", "2 engine timeouts", "1 reservations above capacity"] {
        assert!(misses.contains(text), "{text}: {misses}");
    }
    assert!(!misses.contains("static") && !misses.contains("unbounded"), "{misses}");
}

#[test]
fn a_seed_gives_the_same_run_and_another_seed_another() {
    let mut scenario = Scenario::read(&folder().join("dp_1.toml")).unwrap();
    scenario.router.admission = false;
    scenario.workload.count = 300;
    let json = |s: &Scenario| serde_json::to_string(&run(s)).unwrap();
    let first = json(&scenario);
    assert_eq!(first, json(&scenario));
    scenario.seed += 1;
    assert_ne!(first, json(&scenario));
}

#[test]
fn every_request_ends_and_every_resource_comes_back() {
    let report = plain("mixed");
    assert_eq!((report.completed + report.failed, report.cut_off), (6000, false));
    assert!(report.latency_s.p50 > 0.0 && report.latency_s.p99 >= report.latency_s.p50);
}

#[test]
fn faults_happen_when_they_are_due() {
    let text = std::fs::read_to_string(folder().join("dp_1.toml")).unwrap();
    let with = |fault: &str| {
        let mut s = Scenario::parse(&format!("{text}\n[[faults]]\nat_s = 20.0\n{fault}"), "test").unwrap();
        s.router.admission = false;
        s.workload.count = 400;
        run(&s)
    };
    let report = with("engine = \"p0\"\nfault = \"fail_next\"\ncount = 3\n");
    assert_eq!(
        (report.failed, report.engine_timeouts),
        (3, 3),
        "three orphans on decode live until W: {:?}",
        report.reasons
    );
    let report = with("engine = \"d0\"\nfault = \"kill\"\n");
    assert_eq!(report.completed + report.failed, 400);
    assert!(report.failed >= 100, "{}", report.failed);
}

#[test]
fn a_bad_scenario_says_what_to_change() {
    let class = "[[workload.classes]]\nnew_tokens = { kind = \"fixed\", tokens = 1 }\noutput = { kind = \"fixed\", tokens = 1 }\n";
    for (text, needle) in [
        ("[workload]\ncount = 1\nconcurrency = 1\nclasses = []\n".to_owned(), "add a [[workload.classes]] table"),
        (format!("[workload]\ncount = 1\n{class}"), "either concurrency (closed loop) or rate_per_s"),
        (format!("[workload]\ncount = 1\nconcurrency = 1\nspeed = 3\n{class}"), "unknown field `speed`"),
        (format!("[workload]\ncount = 1\nconcurrency = 1\n{class}[router]\nwindow = \"wide\"\n"), "\"computed\", \"unbounded\" or a number"),
        (
            format!("[workload]\ncount = 1\nconcurrency = 1\n{class}[[faults]]\nat_s = 1.0\nengine = \"d7\"\nfault = \"kill\"\n"),
            "no engine 'd7'",
        ),
        (
            format!("[workload]\ncount = 1\nconcurrency = 1\n{class}[[faults]]\nat_s = 1.0\nengine = \"d0\"\nfault = \"pool\"\n"),
            "needs tokens",
        ),
        (
            "[workload]\ncount = 1\nconcurrency = 1\n[[workload.classes]]\nnew_tokens = { kind = \"uniform\", min = 5, max = 2 }\n\
             output = { kind = \"fixed\", tokens = 1 }\n"
                .to_owned(),
            "min 5 is above max 2",
        ),
    ] {
        let error = Scenario::parse(&text, "some/where.toml").unwrap_err().to_string();
        assert!(error.starts_with("some/where.toml: ") && error.contains(needle), "{error}");
    }
    let missing = run_file(Path::new("no/such.toml")).unwrap_err().to_string();
    assert!(missing.contains("no/such.toml: cannot be read"), "{missing}");
}
