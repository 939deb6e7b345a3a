//! Values of the right type that can mean nothing, or that could never have an effect: the first are refused, the second are told.
use std::collections::BTreeMap;

use http::{HeaderName, Uri, header};

use crate::address::Address;

use super::error::{Origin, SettingsError};
use super::table::Settings;

/// Headers whose values are nobody's business, or which say something about the message itself; an id from them would stand in every log line.
const NO_IDS: [HeaderName; 8] = [
    header::AUTHORIZATION,
    header::PROXY_AUTHORIZATION,
    header::COOKIE,
    header::HOST,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::CONNECTION,
    header::TRANSFER_ENCODING,
];
/// Longest name of a namespace (a DNS label).
const LABEL: usize = 63;

/// Appends what means nothing to `errors`, and what has no effect to `warnings`.
pub(super) fn check(
    s: &Settings,
    origins: &BTreeMap<&'static str, Origin>,
    errors: &mut Vec<SettingsError>,
    warnings: &mut Vec<String>,
) {
    let mut wrong = |name: &'static str, message: String, advice: &str| {
        let origin = origins.get(name).cloned().unwrap_or(Origin::Default);
        errors.push(SettingsError { origin, name: name.to_owned(), message, advice: advice.to_owned() });
    };
    for name in &s.request_id_headers {
        match HeaderName::try_from(name.as_str()) {
            Err(_) => wrong(
                "request_id_headers",
                format!("{name:?} is no name of a header"),
                "write names such as x-request-id, each as one word",
            ),
            Ok(known) if NO_IDS.contains(&known) => wrong(
                "request_id_headers",
                format!("`{name}` holds no id, and ids are logged"),
                "name a header that clients make for it, such as x-request-id",
            ),
            Ok(_) => {}
        }
    }
    for origin in &s.cors_allowed_origins {
        if !is_origin(origin) {
            wrong(
                "cors_allowed_origins",
                format!("{origin:?} is no origin, so that no page could call"),
                "write scheme://host[:port], as the browser sends it, or * for all",
            );
        }
    }
    if let (Some(experts), Some(top_k)) = (s.r3_experts, s.r3_top_k)
        && top_k > experts
    {
        // At the one that was written, when only one was.
        let name = if origins.contains_key("r3_top_k") { "r3_top_k" } else { "r3_experts" };
        wrong(
            name,
            format!("a token cannot be routed to {top_k} of {experts} experts"),
            "make --r3-top-k at most --r3-experts; both stand in the model's configuration",
        );
    }
    if let Some(url) = &s.r3_public_url
        && let Err(why) = is_public(url)
    {
        wrong(
            "r3_public_url",
            format!("{url:?} {why}"),
            "give http://HOST:PORT, or https://, as clients reach the router; a path goes before /r3/",
        );
    }
    if s.r3_spill_dir.as_deref().is_some_and(|spill| same_folder(spill, &s.r3_store_dir)) {
        wrong(
            "r3_spill_dir",
            format!("`{}` is --r3-store-dir itself, which is full by then", s.r3_store_dir),
            "name a folder on a disk, or leave it out",
        );
    }
    let path = &s.health_check_endpoint;
    if path.starts_with('/') && (path.starts_with("//") || path.parse::<Uri>().is_err()) {
        wrong(
            "health_check_endpoint",
            format!("{path:?} is not a path"),
            "write a path such as /health, without spaces and host",
        );
    }
    if !is_annotation(&s.bootstrap_port_annotation) {
        wrong(
            "bootstrap_port_annotation",
            format!("{:?} is no name of an annotation", s.bootstrap_port_annotation),
            "write [prefix.example/]name, of letters, digits, -, _ and .",
        );
    }
    if let Some(namespace) = s.service_discovery_namespace.as_deref().filter(|name| *name != "*")
        && !is_label(namespace)
    {
        wrong(
            "service_discovery_namespace",
            format!("{namespace:?} is no namespace"),
            "write one name of lower-case letters, digits and -, or * for all of them",
        );
    }
    let given = |name: &str| origins.get(name);
    let mut idle = |name: &str, why: &str| {
        if let Some(origin) = given(name) {
            warnings.push(format!("{origin}: without effect: {why}"));
        }
    };
    if !s.pd_disaggregation {
        for name in ["prefill_policy", "decode_policy"] {
            idle(name, "it is read with --pd-disaggregation only; --policy is the one of regular engines");
        }
    }
    if s.disable_retries {
        let why = "--disable-retries leaves one attempt";
        for name in
            ["retry_max_retries", "retry_initial_backoff_ms", "retry_max_backoff_ms", "retry_backoff_multiplier"]
        {
            idle(name, why);
        }
    }
    if s.disable_circuit_breaker {
        for name in ["cb_failure_threshold", "cb_timeout_duration_secs"] {
            idle(name, "there is no breaker with --disable-circuit-breaker");
        }
    }
    if s.disable_health_check {
        for name in ["health_failure_threshold", "health_success_threshold", "health_check_interval_secs"] {
            idle(name, "there are no checks with --disable-health-check");
        }
    }
    if !s.enable_trace {
        for name in ["otlp_traces_endpoint", "trace_ratio"] {
            idle(name, "it is read with --enable-trace only");
        }
    }
    for (name, limit) in
        [("delivery_timeout_secs", s.delivery_timeout()), ("body_read_timeout_secs", s.body_read_timeout_secs)]
    {
        if limit > s.request_timeout_secs {
            idle(name, "a request does not live longer than --request-timeout-secs");
        }
    }
    if s.queue_max_bytes < s.max_payload_size
        && let Some(origin) = given("queue_max_bytes")
    {
        warnings.push(format!(
            "{origin}: a body between it and --max-payload-size never finds room in the queue; make it at least that"
        ));
    }
}

/// Whether a browser may send this as `Origin`: a scheme, a host, perhaps a port; or `null`, for pages without one.
fn is_origin(text: &str) -> bool {
    if matches!(text, "*" | "null") {
        return true;
    }
    let Ok(uri) = text.trim_end_matches('/').parse::<Uri>() else { return false };
    let host = uri.authority().is_some_and(|a| !a.host().is_empty() && !a.as_str().contains('@'));
    uri.scheme().is_some() && host && matches!(uri.path(), "" | "/") && uri.query().is_none()
}

fn is_public(url: &str) -> Result<(), &'static str> {
    let (scheme, rest) = url.split_once("://").ok_or("has no scheme")?;
    if !["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) {
        return Err("has a scheme that clients cannot fetch from");
    }
    let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    Address::parse(&format!("{scheme}://{authority}")).map_err(|_| "is no address")?;
    match path.parse::<Uri>() {
        Ok(uri) if uri.query().is_none() && !path.contains('#') => Ok(()),
        _ => Err("has a path that cannot go on"),
    }
}

fn same_folder(one: &str, other: &str) -> bool {
    let real = |path: &str| std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    real(one) == real(other)
}

/// A DNS label, as names of namespaces are.
fn is_label(text: &str) -> bool {
    let letters = text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    !text.is_empty() && text.len() <= LABEL && letters && !text.starts_with('-') && !text.ends_with('-')
}

/// `[DNS name/]name`.
fn is_annotation(text: &str) -> bool {
    let (prefix, name) = text.rsplit_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let letters = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    !name.is_empty()
        && name.len() <= LABEL
        && name.bytes().all(letters)
        && prefix.is_none_or(|prefix| prefix.split('.').all(is_label))
}

#[cfg(test)]
mod tests {
    use super::{is_annotation, is_label, is_origin, is_public};

    #[test]
    fn origins_are_what_browsers_send() {
        for good in
            ["*", "null", "https://a.example", "http://localhost:3000", "https://a.example/", "chrome-extension://abc"]
        {
            assert!(is_origin(good), "{good}");
        }
        for bad in [
            "foo",
            "a.example",
            "https://",
            "https://a.example/app",
            "https://u@a.example",
            "http://a\u{1}",
            "",
            "https://a b",
        ] {
            assert!(!is_origin(bad), "{bad}");
        }
    }

    #[test]
    fn names_of_kubernetes_and_addresses_for_clients_are_told_from_what_is_none() {
        assert!(is_label("engines-1") && !is_label("Engines") && !is_label("a.b") && !is_label("-a") && !is_label(""));
        assert!(is_annotation("sglang.ai/bootstrap-port") && is_annotation("port"));
        for bad in ["", "a b", "a/", "A.b/c", "a/b/c", "x/\u{e4}"] {
            assert!(!is_annotation(bad), "{bad}");
        }
        for good in ["http://router:30000", "https://router", "HTTPS://router/prefix", "http://[::1]:1/"] {
            assert_eq!(is_public(good), Ok(()), "{good}");
        }
        for bad in ["router:30000", "ftp://router", "http://", "http://a b", "http://r/?x", "http://r:99999"] {
            assert!(is_public(bad).is_err(), "{bad}");
        }
    }
}
