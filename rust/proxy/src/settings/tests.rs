use std::time::Duration;

use r3router_core::admission::WindowMode;
use serde_json::json;

use super::*;

fn fails(sources: &Sources) -> Vec<String> {
    sources.load().expect_err("must be refused").0.iter().map(ToString::to_string).collect()
}

#[test]
fn a_flag_wins_over_a_variable_over_the_file_over_the_default() {
    let file = Sources::default().toml("r3.toml", "port = 1\nhost = \"1.1.1.1\"\nthreads = 7");
    let both = file.clone().env([("R3ROUTER_PORT", "2"), ("R3ROUTER_HOST", "2.2.2.2")]);
    let all = both.clone().flag("port", "3");
    assert_eq!(Sources::default().load().unwrap().settings.port, 30000);
    assert_eq!(file.load().unwrap().settings.port, 1);
    assert_eq!(both.load().unwrap().settings.port, 2);
    let loaded = all.load().unwrap();
    let s = &loaded.settings;
    assert_eq!((s.port, s.host.as_str(), s.threads), (3, "2.2.2.2", 7));
    assert_eq!(loaded.origins["port"].to_string(), "--port");
    assert_eq!(loaded.origins["host"].to_string(), "R3ROUTER_HOST");
    assert_eq!(loaded.origins["threads"].to_string(), "r3.toml:3");
    assert!(!loaded.origins.contains_key("decode"));
}

#[test]
fn an_unknown_name_is_refused_with_the_nearest_one_in_the_same_spelling() {
    let sources = Sources::default()
        .toml("x.toml", "host = \"::1\"\nque_size = 3")
        .env([("R3ROUTER_PROT", "1"), ("PATH", "/bin")])
        .flag("max-paylod-size", "1")
        .flag("zzzzzzzzzz", "1");
    assert_eq!(
        fails(&sources),
        [
            "x.toml:2: que_size: there is no such setting; did you mean queue_size?",
            "R3ROUTER_PROT: there is no such setting; did you mean R3ROUTER_PORT?",
            "--max-paylod-size: there is no such setting; did you mean --max-payload-size?",
            "--zzzzzzzzzz: there is no such setting; see `r3router serve --help` for all of them",
        ]
    );
}

#[test]
fn an_error_names_the_source_the_value_and_the_mend_and_all_errors_come_at_once() {
    let sources = Sources::default()
        .env([("R3ROUTER_KV_MARGIN", "2")])
        .flag("port", "99999")
        .flag("policy", "round_robbin")
        .flag("poll_interval_ms", "0");
    assert_eq!(
        fails(&sources),
        [
            "--port: `99999` is not a port from 0 to 65535; expected a port",
            "--policy: `round_robbin` is not one of random, round_robin, cache_aware, power_of_two, manual, consistent_hashing, \
             prefix_hash, bucket, headroom, did you mean `round_robin`?; expected one of the names",
            "R3ROUTER_KV_MARGIN: `2.0` is out of range; it must be between 0 and 0.9",
            "--poll-interval-ms: `0s` is out of range; it must be between 5ms and 60000ms",
        ]
    );
}

#[test]
fn prefill_takes_a_port_none_or_nothing_in_every_source() {
    let port = |n: Option<u16>| n;
    let expect = |loaded: Loaded| {
        loaded.settings.prefill.iter().map(|w| (w.url.0.clone(), w.bootstrap_port)).collect::<Vec<_>>()
    };
    let want = vec![
        ("http://a:1".to_owned(), port(Some(8998))),
        ("http://b:2".to_owned(), None),
        ("http://c:3".to_owned(), None),
    ];
    let pd = Sources::default().flag("pd_disaggregation", true);
    let flags = json!([["http://a:1/", "8998"], ["http://b:2", "none"], ["HTTP://C:3"]]);
    assert_eq!(expect(pd.clone().flag("prefill", flags).load().unwrap()), want);
    let env = [("R3ROUTER_PREFILL", "http://a:1 8998, http://b:2 none,c:3")];
    assert_eq!(expect(pd.clone().env(env).load().unwrap()), want);
    let toml =
        "prefill = [\"http://a:1 8998\", {url = \"http://b:2\"}, {url = \"http://c:3\", bootstrap_port = \"none\"}]";
    assert_eq!(expect(pd.clone().toml("f", toml).load().unwrap()), want);
    let bad = pd.flag("prefill", json!([["http://a:1", "70000"]]));
    assert!(fails(&bad)[0].starts_with("--prefill: the bootstrap port `70000` is not a port from 1 to 65535"));
}

#[test]
fn workers_of_the_wrong_mode_and_twins_are_refused() {
    let regular = Sources::default().flag("decode", json!(["http://d:1"]));
    assert_eq!(
        fails(&regular),
        ["--decode: decode workers need PD mode; add --pd-disaggregation, or use --worker-urls"]
    );
    let twin = Sources::default().flag("worker_urls", json!(["http://d:1", "D:1/"]));
    assert_eq!(
        fails(&twin),
        ["--worker-urls: `http://d:1` is named twice; name each engine once; its ranks are found by the router"]
    );
}

#[test]
fn durations_and_sizes_are_read_in_every_form_and_shown_so_that_they_read_back() {
    for (text, unit, ms) in [
        ("300", Unit::Secs, 300_000),
        ("300s", Unit::Secs, 300_000),
        ("1h30m", Unit::Secs, 5_400_000),
        ("0.5", Unit::Secs, 500),
        ("250", Unit::Millis, 250),
        ("2s", Unit::Millis, 2000),
        ("1m30s500ms", Unit::Millis, 90_500),
    ] {
        let d = parse_duration(text, unit).unwrap();
        assert_eq!(d, Duration::from_millis(ms), "{text}");
        assert_eq!(parse_duration(&show_duration(d), unit).unwrap(), d);
    }
    for bad in ["", "x", "5x", "-1", "s", "1h-2m", "nan", "inf"] {
        assert!(parse_duration(bad, Unit::Secs).is_err(), "{bad}");
    }
    for (text, bytes) in
        [("0", 0), ("8GiB", 8 << 30), ("8 gib", 8 << 30), ("1.5GB", 1_500_000_000), ("512MiB", 512 << 20), ("7", 7)]
    {
        assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        assert_eq!(parse_bytes(&show_bytes(bytes)).unwrap(), bytes);
    }
    for bad in ["", "GiB", "1XB", "-1", "99999999999TiB"] {
        assert!(parse_bytes(bad).is_err(), "{bad}");
    }
}

#[test]
fn every_value_that_is_shown_reads_back_to_the_same_settings() {
    let given = Sources::default()
        .flag("pd_disaggregation", true)
        .flag("prefill", json!([["http://a:1", "2"]]))
        .flag("decode", json!(["http://b:1"]))
        .flag("window", "12")
        .flag("max_concurrent_requests", "64")
        .flag("request_timeout_secs", "1h30m")
        .flag("r3_transport", "ref");
    for settings in [Settings::default(), given.load().unwrap().settings] {
        let again = settings.values().into_iter().fold(Sources::default(), |s, (name, value)| s.flag(name, value));
        assert_eq!(again.load().unwrap().settings, settings);
    }
}

#[test]
fn a_default_that_differs_from_the_peer_is_explained_in_the_help() {
    for row in rows() {
        let Some(peer) = row.peer else { continue };
        let ours = match row.bare_default() {
            serde_json::Value::Null => "None".to_owned(),
            serde_json::Value::Bool(on) => if on { "True" } else { "False" }.to_owned(),
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        // An empty list is the peer's None, [] or {} alike.
        let same = ours == peer || (ours == "[]" && matches!(peer, "None" | "{}"));
        assert!(same || row.help.contains("sglang-router's default"), "{}: {ours} against {peer}", row.name);
    }
}

#[test]
fn kubernetes_service_links_are_no_settings() {
    let loaded = Sources::default()
        .env([
            ("R3ROUTER_PORT", "tcp://10.0.0.1:30000"),
            ("R3ROUTER_SERVICE_HOST", "10.0.0.1"),
            ("R3ROUTER_SERVICE_PORT", "30000"),
            ("R3ROUTER_SERVICE_PORT_HTTP", "30000"),
            ("R3ROUTER_PORT_30000_TCP", "tcp://10.0.0.1:30000"),
            ("R3ROUTER_DECODE_PORT_30000_TCP_ADDR", "10.0.0.1"),
            ("R3ROUTER_CACHE", "/tmp/x"),
        ])
        .load()
        .unwrap();
    assert_eq!(loaded.settings, Settings::default());
    assert_eq!(loaded.warnings.len(), 6);
}

#[test]
fn no_setting_is_taken_for_a_variable_of_a_tool() {
    for row in rows() {
        let sources = Sources::default().env([(row.variable(), "\u{1}")]);
        // What is read at all is either refused or kept, so an ignored variable shows as no error and no origin.
        let seen = sources.load().map_or(true, |loaded| loaded.origins.contains_key(row.name));
        assert!(seen, "{}", row.variable());
    }
}

#[test]
fn a_setting_without_effect_says_so_when_it_is_written() {
    let loaded = Sources::default().flag("cb_success_threshold", "2").flag("policy", "random").load().unwrap();
    assert_eq!(loaded.warnings, ["--cb-success-threshold: Without effect: one good attempt takes a worker back in."]);
    for row in rows() {
        assert_eq!(row.inert, row.help.starts_with("Without effect"), "{}", row.name);
    }
}

#[test]
fn keys_are_never_shown() {
    let loaded = Sources::default().flag("api_key", "s3cret").load().unwrap();
    assert_eq!(loaded.settings.api_key.as_ref().unwrap().reveal(), "s3cret");
    assert!(!format!("{:?} {:?}", loaded.settings, loaded.settings.values()).contains("s3cret"));
    assert!(!fails(&Sources::default().flag("api_key", "s3cret x")).concat().contains("s3cret"));
}

#[test]
fn a_broken_file_is_refused_with_its_line() {
    assert!(fails(&Sources::default().toml("f.toml", "port = 1\nhost = ")).concat().starts_with("f.toml:2: not TOML"));
    let missing = Sources::from_json(r#"{"config": "/nonexistent/r3.toml"}"#).expect_err("missing");
    assert!(missing.to_string().contains("--config: /nonexistent/r3.toml cannot be read"), "{missing}");
    assert!(Sources::from_json(r#"{"flag": {}}"#).is_err());
}

#[test]
fn the_admission_gets_what_was_set() {
    let loaded = Sources::default()
        .flag("admission", false)
        .flag("window", "unbounded")
        .flag("queue_size", "5")
        .flag("poll_interval_ms", "1s")
        .flag("disable_circuit_breaker", true)
        .flag("disable_retries", true)
        .load()
        .unwrap();
    let config = loaded.settings.admission_config(9);
    assert!(!config.enabled);
    assert_eq!(config.window, WindowMode::Unbounded);
    assert_eq!((config.queue_max_requests, config.breaker_threshold, config.seed), (5, 0, 9));
    assert_eq!(config.stale_after, Duration::from_secs(4));
    assert_eq!(loaded.settings.attempts(), 1);
    assert_eq!(Settings::default().attempts(), 5);
}

#[test]
fn the_reference_page_and_the_schema_hold_every_setting() {
    let page = reference_page();
    let schema = schema();
    assert_eq!(schema.as_array().unwrap().len(), rows().len());
    for row in rows() {
        assert!(page.contains(&row.variable()), "{}", row.name);
        assert!(row.help.ends_with('.') && row.help.len() > 8, "{}: {}", row.name, row.help);
    }
}

#[test]
fn a_flag_of_the_peer_says_nothing_by_default_and_is_ignored_or_refused_with_its_reason() {
    for flag in PEER_FLAGS {
        assert!(!rows().iter().any(|r| r.name == flag.name), "{} is a setting too", flag.name);
        let by_default = match flag.default {
            "False" => json!(false),
            "[]" | "{}" => json!([]),
            "None" => json!(null),
            text => json!(text),
        };
        let quiet = Sources::default().flag(flag.name, by_default).load().unwrap();
        assert_eq!(quiet.warnings, Vec::<String>::new(), "{}", flag.name);
        let value = match flag.arity {
            Arity::Switch => json!(true),
            Arity::Many => json!(["a=b"]),
            _ => json!("77"),
        };
        let asked = Sources::default().flag(flag.name, value);
        match flag.fate {
            Fate::Ignored => {
                let loaded = asked.load().unwrap();
                assert_eq!(loaded.settings, Settings::default());
                assert_eq!(loaded.warnings, [format!("{}: ignored: {}", flag.flag(), flag.reason)]);
            }
            Fate::Refused => {
                assert_eq!(fails(&asked), [format!("{}: not supported; {}", flag.flag(), flag.reason)]);
            }
        }
    }
    let same_number = Sources::default().flag("cache_threshold", "0.30").flag("history_backend", "none");
    assert!(same_number.load().unwrap().warnings.is_empty());
    let by_variable = Sources::default().env([("R3ROUTER_MCP_CONFIG_PATH", "x.yaml")]);
    assert!(fails(&by_variable)[0].starts_with("R3ROUTER_MCP_CONFIG_PATH: not supported; "));
}

#[test]
fn the_flags_page_has_every_flag_of_the_peer_once() {
    let page = flags_page();
    let lines: Vec<&str> = page.lines().filter(|l| l.starts_with("| `--")).collect();
    assert_eq!(lines.len(), rows().iter().filter(|r| r.peer.is_some()).count() + PEER_FLAGS.len());
    assert_eq!(lines.len(), 98);
}

#[test]
fn discovery_wants_selectors_of_the_mode_and_selectors_want_discovery() {
    let on = || Sources::default().flag("service_discovery", true);
    let pd = || on().flag("pd_disaggregation", true);
    let found = fails(&on().flag("prefill_selector", json!(["app=p"])));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("discovery needs to know which pods are engines"), "{found:?}");
    assert!(fails(&pd().flag("selector", json!(["app=p"])))[0].contains("which pods are engines"));
    let loaded = pd().flag("decode_selector", json!(["app=d", "tier=x"])).load().unwrap();
    assert_eq!(loaded.settings.decode_selector, ["app=d", "tier=x"]);
    assert_eq!(loaded.warnings, Vec::<String>::new());
    let wrong = fails(&on().flag("selector", json!(["app"])));
    assert_eq!(wrong, ["--selector: `app` is not KEY=VALUE; write each label that pods have as KEY=VALUE"]);
    let idle = Sources::default().flag("selector", json!(["a=b"])).load().unwrap();
    assert_eq!(idle.warnings, ["--selector: without effect: it is read with --service-discovery only"]);
}

#[test]
fn policies_of_roles_follow_policy_and_decode_wants_room_where_prompts_are_cached_by_prefill() {
    use r3router_core::policy::Policy as P;
    let of = |given: &[(&str, &str)]| {
        let sources = given.iter().fold(Sources::default(), |s, (name, value)| s.flag(*name, *value));
        sources.load().unwrap().settings.admission_config(1).policies.of
    };
    assert_eq!(of(&[]), [P::CacheAware, P::CacheAware, P::Headroom]);
    assert_eq!(of(&[("policy", "manual")]), [P::Manual; 3]);
    assert_eq!(of(&[("decode_policy", "cache_aware")]), [P::CacheAware; 3]);
    assert_eq!(
        of(&[("policy", "random"), ("prefill_policy", "bucket"), ("decode_policy", "power_of_two")]),
        [P::Random, P::Bucket, P::PowerOfTwo]
    );
    for name in super::Policy::NAMES {
        assert_eq!(super::Policy::from_name(name).unwrap().name(), *name);
        of(&[("policy", name)]);
    }
    let limit = Sources::default().flag("max_tree_size", "1MiB").load().unwrap().settings;
    assert_eq!(limit.admission_config(1).affinity_bytes, 1 << 20);
}

#[test]
fn what_the_start_says_of_a_flag_is_said_where_its_value_was_written() {
    let loaded = Sources::default()
        .toml("r3.toml", "threads = 1\nlog_dir = \"/x\"")
        .env([("R3ROUTER_HOST", "::1")])
        .flag("port", "1")
        .load()
        .unwrap();
    for (said, placed) in [
        ("--log-dir: /x cannot be written; name a folder", "r3.toml:2: log_dir: /x cannot be written; name a folder"),
        ("--host: `::1` has no address", "R3ROUTER_HOST: `::1` has no address"),
        ("--port: 1 is taken", "--port: 1 is taken"),
        ("--tls-cert-path: x", "--tls-cert-path: x"),
        ("cannot listen on --host: 5", "cannot listen on --host: 5"),
    ] {
        assert_eq!(loaded.placed(said), placed);
    }
}

#[test]
fn what_can_have_no_effect_is_told() {
    let warnings = |flags: &[(&str, &str)]| {
        let sources = flags.iter().fold(Sources::default(), |s, (name, value)| s.flag(*name, *value));
        sources.flag("r3_arena_bytes", "1MiB").load().unwrap().warnings
    };
    assert_eq!(warnings(&[("retry_max_retries", "3")]), Vec::<String>::new());
    for (flags, said) in [
        (
            &[("decode_policy", "random")][..],
            "--decode-policy: without effect: it is read with --pd-disaggregation only",
        ),
        (
            &[("disable_retries", "true"), ("retry_max_retries", "3")],
            "--retry-max-retries: without effect: --disable-retries",
        ),
        (&[("disable_circuit_breaker", "1"), ("cb_failure_threshold", "3")], "--cb-failure-threshold: without effect"),
        (
            &[("disable_health_check", "1"), ("health_failure_threshold", "3")],
            "--health-failure-threshold: without effect",
        ),
        (
            &[("otlp_traces_endpoint", "c:4317")],
            "--otlp-traces-endpoint: without effect: it is read with --enable-trace",
        ),
        (
            &[("request_timeout_secs", "60"), ("body_read_timeout_secs", "90")],
            "--body-read-timeout-secs: without effect",
        ),
        (
            &[("queue_max_bytes", "1MiB")],
            "--queue-max-bytes: a body between it and --max-payload-size never finds room",
        ),
    ] {
        let all = warnings(flags);
        assert!(all.iter().any(|w| w.starts_with(said)), "{said}: {all:?}");
    }
}
