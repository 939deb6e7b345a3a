//! Values that are fine alone and contradict each other.
use std::collections::{BTreeMap, HashSet};

use crate::address::Address;
use crate::allow::Allow;
use crate::trace::Endpoint;

use super::error::{Origin, SettingsError};
use super::table::Settings;

/// Whether only this machine can connect to a listener there.
fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.parse::<std::net::IpAddr>().map_or(bare.eq_ignore_ascii_case("localhost"), |ip| ip.is_loopback())
}

/// Appends every contradiction to `errors`, and what is harmless to `warnings`.
pub(super) fn contradictions(
    s: &Settings,
    origins: &BTreeMap<&'static str, Origin>,
    errors: &mut Vec<SettingsError>,
    warnings: &mut Vec<String>,
) {
    let mut wrong = |name: &'static str, message: String, advice: &str| {
        let origin = origins.get(name).cloned().unwrap_or(Origin::Default);
        errors.push(SettingsError { origin, name: name.to_owned(), message, advice: advice.to_owned() });
    };
    if !s.pd_disaggregation {
        for (name, given) in [("prefill", !s.prefill.is_empty()), ("decode", !s.decode.is_empty())] {
            if given {
                wrong(name, format!("{name} workers need PD mode"), "add --pd-disaggregation, or use --worker-urls");
            }
        }
    }
    if s.pd_disaggregation && !s.worker_urls.is_empty() {
        wrong(
            "worker_urls",
            "regular workers cannot serve in PD mode".to_owned(),
            "name them with --prefill URL [PORT] and --decode URL, or leave --pd-disaggregation out",
        );
    }
    let mut seen = HashSet::new();
    let named = s.worker_urls.iter().map(|w| ("worker_urls", w));
    let named =
        named.chain(s.prefill.iter().map(|w| ("prefill", &w.url))).chain(s.decode.iter().map(|w| ("decode", w)));
    for (name, url) in named {
        if !seen.insert(url) {
            wrong(
                name,
                format!("`{}` is named twice", url.0),
                "name each engine once; its ranks are found by the router",
            );
        }
    }
    let selectors =
        [("selector", &s.selector), ("prefill_selector", &s.prefill_selector), ("decode_selector", &s.decode_selector)];
    for (name, words) in selectors {
        if let Some(word) =
            words.iter().find(|w| w.split_once('=').is_none_or(|(key, value)| key.is_empty() || value.contains('=')))
        {
            wrong(name, format!("`{word}` is not KEY=VALUE"), "write each label that pods have as KEY=VALUE");
        }
    }
    if s.service_discovery {
        let (name, given) = if s.pd_disaggregation {
            ("prefill_selector", !s.prefill_selector.is_empty() || !s.decode_selector.is_empty())
        } else {
            ("selector", !s.selector.is_empty())
        };
        if !given {
            wrong(name, "discovery needs to know which pods are engines".to_owned(), "name their labels, KEY=VALUE");
        }
        if s.service_discovery_port == 0 {
            wrong("service_discovery_port", "0 is no port".to_owned(), "name the port that engines listen on");
        }
    }
    let pairs = [
        ("tls_cert_path", &s.tls_cert_path, "tls_key_path", &s.tls_key_path),
        ("client_cert_path", &s.client_cert_path, "client_key_path", &s.client_key_path),
    ];
    for (certificate, path, key, of) in pairs {
        match (path, of) {
            (Some(_), None) => wrong(certificate, "its key is missing".to_owned(), "name both files or neither"),
            (None, Some(_)) => wrong(key, "its certificate is missing".to_owned(), "name both files or neither"),
            _ => {}
        }
    }
    if !s.tls_client_ca_paths.is_empty() && s.tls_cert_path.is_none() {
        wrong(
            "tls_client_ca_paths",
            "clients show a certificate over TLS only".to_owned(),
            "add --tls-cert-path and --tls-key-path",
        );
    }
    if s.retry_max_backoff_ms < s.retry_initial_backoff_ms {
        wrong(
            "retry_max_backoff_ms",
            "the longest pause between attempts is shorter than the first".to_owned(),
            "make it at least --retry-initial-backoff-ms",
        );
    }
    if s.port != 0 && s.port == s.prometheus_port {
        wrong("prometheus_port", format!("port {} is the router's own", s.port), "choose another port for metrics");
    }
    if s.admin_port != 0 {
        for (other, whose) in [(s.port, "the router's own"), (s.prometheus_port, "that of --prometheus-port")] {
            if s.admin_port == other {
                wrong("admin_port", format!("port {other} is {whose}"), "choose another port for the admin listener");
            }
        }
        if s.admin_api_key.is_none() && !is_loopback(&s.admin_host) {
            wrong(
                "admin_host",
                format!("`{}` can be reached from other machines, and there is no key", s.admin_host),
                "set --admin-api-key (or R3ROUTER_ADMIN_API_KEY), or listen on 127.0.0.1",
            );
        }
    } else if !s.control_on_main_port {
        wrong(
            "control_on_main_port",
            "there is no admin listener either, so nothing could register a worker".to_owned(),
            "set --admin-port, or leave --control-on-main-port on",
        );
    }
    let allow = Allow::new(&s.worker_allow);
    let named = s.worker_urls.iter().map(|w| ("worker_urls", w));
    let named =
        named.chain(s.prefill.iter().map(|w| ("prefill", &w.url))).chain(s.decode.iter().map(|w| ("decode", w)));
    for (name, url) in named {
        if let Some(Err(error)) = Address::parse(&url.0).ok().map(|a| allow.check(&a)) {
            wrong(name, error.message.into_owned(), "name an engine, or add the host to --worker-allow");
        }
    }
    if !s.health_check_endpoint.starts_with('/') {
        wrong("health_check_endpoint", format!("`{}` is not a path", s.health_check_endpoint), "begin it with /");
    }
    let buckets = &s.prometheus_duration_buckets;
    if buckets.iter().any(|b| *b <= 0.0) || buckets.iter().zip(buckets.iter().skip(1)).any(|(low, high)| low >= high) {
        wrong(
            "prometheus_duration_buckets",
            format!("the bounds {buckets:?} do not ascend from above 0"),
            "write each bound once, smallest first",
        );
    }
    if let Some(url) = &s.r3_sink
        && crate::address::Address::parse(url).is_err()
    {
        wrong("r3_sink", format!("{url:?} is no address"), "give http://HOST:PORT of `r3router sink`");
    }
    if let Err(error) = Endpoint::parse(&s.otlp_traces_endpoint) {
        wrong("otlp_traces_endpoint", error.message.into_owned(), "give HOST:4317, or http://HOST:4318/v1/traces");
    }
    if let Some(engine) = s.engine_waiting_timeout_secs
        && s.delivery_timeout() <= engine
    {
        warnings.push(
            "--delivery-timeout-secs is not above --engine-waiting-timeout-secs; the router ends transfers before the engine can say what is wrong"
                .to_owned(),
        );
    }
    if !s.service_discovery {
        for (name, words) in selectors {
            if let (false, Some(origin)) = (words.is_empty(), origins.get(name)) {
                warnings.push(format!("{origin}: without effect: it is read with --service-discovery only"));
            }
        }
    }
    if s.request_timeout_secs < s.queue_timeout_secs && origins.contains_key("queue_timeout_secs") {
        warnings.push(
            "--queue-timeout-secs is longer than --request-timeout-secs; a request never waits longer than the latter"
                .to_owned(),
        );
    }
}
