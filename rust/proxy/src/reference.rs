//! Reference pages that are made from the code, in Markdown. `make docs` writes them, and a test fails when they drift.
use std::collections::BTreeMap;
use std::fmt::Write;

use r3router_core::error::Kind;

use crate::app::App;
use crate::info::metrics_text;
use crate::settings::Settings;

/// Every error of the router: code, status, meaning.
pub fn errors_page() -> String {
    let mut page = String::from(
        "# Errors\n\n\
         Made from `rust/core/src/error.rs` by `make docs`; a test fails when this page and the code differ.\n\n\
         The router's own errors are JSON:\n\n\
         ```json\n\
         {\"error\": {\"type\": \"rate_limit_error\", \"code\": \"queue_full\", \"message\": \"…\", \"status\": 429, \"source\": \"router\",\n\
         \x20          \"limit\": 100000, \"measured\": 100000, \"worker\": null, \"advice\": \"…\"}}\n\
         ```\n\n\
         `limit`, `measured`, `worker` and `advice` stand there where they mean something. The code is also in the header\n\
         `x-smg-error-code`. An engine's own refusal (4xx) is passed on as the engine wrote it, with its status.\n\
         `source` says whose fault it is: `client`, `router`, `prefill` or `decode`; only the last two charge a worker's breaker.\n\n\
         | code | status | meaning |\n|---|---|---|\n",
    );
    for kind in Kind::ALL {
        let _ = writeln!(page, "| `{}` | {} | {} |", kind.code(), kind.status(), kind.meaning());
    }
    page
}

/// Every metric family that a router without engines writes: name, type, labels with their values, meaning.
///
/// # Errors
/// When no runtime can be started.
pub fn metrics_page() -> std::io::Result<String> {
    let mut page = String::from(
        "# Metrics\n\n\
         Made from what the router writes, by `make docs`; a test fails when this page and the code differ.\n\n\
         `GET /metrics` on the router's port, and on `--prometheus-port`. Times are seconds, sizes are bytes. Histograms have the\n\
         usual `_bucket`, `_sum` and `_count`. Families `r3router_rank_…` have the labels `worker`, `rank` and `role`, families\n\
         `r3router_worker_…` have `worker` and `role`; their series go when the worker is removed.\n\n\
         | metric | type | labels | meaning |\n|---|---|---|---|\n",
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let text = runtime.block_on(async { App::new(Settings::default()).map(|app| metrics_text(&app)) });
    for family in families(&text.map_err(std::io::Error::other)?) {
        let labels: Vec<String> = family
            .labels
            .iter()
            .filter(|(label, _)| label.as_str() != "le")
            .map(|(label, values)| format!("`{label}`: {}", values.join(", ")))
            .collect();
        let _ = writeln!(page, "| `{}` | {} | {} | {} |", family.name, family.kind, labels.join("; "), family.help);
    }
    Ok(page)
}

struct Family {
    name: String,
    help: String,
    kind: String,
    labels: BTreeMap<String, Vec<String>>,
}

/// Reads the families of an exposition text.
fn families(text: &str) -> Vec<Family> {
    let mut all: Vec<Family> = Vec::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            all.push(Family {
                name: name.to_owned(),
                help: help.to_owned(),
                kind: String::new(),
                labels: BTreeMap::new(),
            });
        } else if let Some(family) = all.last_mut() {
            if let Some((_, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
                kind.clone_into(&mut family.kind);
            } else if let Some((_, rest)) = line.split_once('{') {
                let inner = rest.split_once('}').map_or("", |(inner, _)| inner);
                for (label, value) in inner.split("\",").filter_map(|pair| pair.split_once("=\"")) {
                    let values = family.labels.entry(label.to_owned()).or_default();
                    let value = value.trim_end_matches('"').to_owned();
                    if !values.contains(&value) {
                        values.push(value);
                    }
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{errors_page, families, metrics_page};
    use r3router_core::error::Kind;

    #[test]
    fn every_kind_and_family_has_a_line() {
        let page = errors_page();
        for kind in Kind::ALL {
            assert_eq!(page.matches(&format!("| `{}` | {} | ", kind.code(), kind.status())).count(), 1);
            assert!(kind.meaning().ends_with('.'), "{}", kind.code());
        }
        let page = metrics_page().unwrap();
        assert!(page.contains("| `r3router_requests_live` | gauge |  | Requests in work"));
        assert!(page.contains("`route`: generate, chat, completions, other"));
    }

    #[test]
    fn families_are_read_with_their_labels() {
        let text = "# HELP a Help of a.\n# TYPE a counter\na{x=\"1\",y=\"p\"} 1\na{x=\"2\",y=\"p\"} 1\n# HELP b B.\n# TYPE b gauge\nb 1\n";
        let read = families(text);
        assert_eq!(read.len(), 2);
        assert_eq!((read[0].kind.as_str(), read[0].help.as_str()), ("counter", "Help of a."));
        assert_eq!(read[0].labels["x"], ["1", "2"]);
        assert_eq!(read[0].labels["y"], ["p"]);
        assert!(read[1].labels.is_empty());
    }
}
