//! The settings as data (for the command line) and as a page (for people).
use std::fmt::Write;

use serde_json::{Value as Json, json};

use super::declare::{Arity, Row};
use super::table::rows;

/// A JSON list with one object per setting: name, flag, variable, group, help, unit, arity, metavar, expects, choices, default, the
/// same as a bare number, peer, range, inert, reloadable.
pub fn schema() -> Json {
    rows()
        .iter()
        .map(|r| {
            json!({
                "name": r.name,
                "flag": r.flag(),
                "variable": r.variable(),
                "group": r.group,
                "help": r.help,
                "unit": r.unit.name(),
                "arity": r.arity.name(),
                "metavar": r.metavar,
                "expects": r.expects,
                "choices": r.choices,
                "default": r.default,
                "bare": r.bare_default(),
                "peer": r.peer,
                // JSON has no infinity; an open end is null.
                "range": r.range.map(|(low, high)| json!([low, high.is_finite().then_some(high)])),
                "inert": r.inert,
                "reloadable": r.reloadable,
            })
        })
        .collect()
}

/// The reference page, in Markdown.
pub fn reference_page() -> String {
    let mut page = String::from(
        "# Settings\n\n\
         Made from `rust/proxy/src/settings/table.rs` by `make docs`; a test fails when this page and the table differ.\n\n\
         Each setting is a flag of `r3router serve`, a variable and a key of the TOML file that `--config` names. A flag wins over a\n\
         variable, a variable over the file, the file over the default. Unknown names are refused. Durations are numbers in the unit\n\
         given or texts such as `300s`, `250ms`, `1h30m`; sizes are bytes or texts such as `512MiB`, `8GiB`. A switch takes `--no-…` too.\n\
         Lists in a variable are separated by commas or spaces. *Peer* is the default of sglang-router 0.3.2, where the flag exists there.\n\n\
         Two options of `r3router serve` are no settings:\n\n\
         | option | variable | meaning |\n|---|---|---|\n\
         | `--config FILE` | `R3ROUTER_CONFIG` | TOML file with settings; the flag wins. Its keys are the flags without dashes in front, `-` as `_`: `port = 30000`. |\n\
         | `--check` | | Read and check everything, the directories for routing payloads too, print each setting with where it was written, and leave: 0, or 2 with every error. |\n",
    );
    let mut group = "";
    for row in rows() {
        if row.group != group {
            group = row.group;
            let _ = writeln!(
                page,
                "\n## {group}\n\n| flag | variable | values | default | peer | meaning |\n|---|---|---|---|---|---|"
            );
        }
        let peer = row.peer.map_or_else(String::new, |p| format!("`{p}`"));
        let _ = writeln!(
            page,
            "| `{}` | `{}` | {} | {} | {peer} | {} |",
            written_flag(&row),
            row.variable(),
            values(&row),
            shown(&row.default),
            row.help
        );
    }
    page
}

fn written_flag(row: &Row) -> String {
    match (row.arity, &row.default) {
        (Arity::Switch, Json::Bool(true)) => format!("--no-{}", row.name.replace('_', "-")),
        (Arity::Switch, _) => row.flag(),
        (Arity::Many, _) => format!("{} {}…", row.flag(), row.metavar),
        _ => format!("{} {}", row.flag(), row.metavar),
    }
}

fn values(row: &Row) -> String {
    let mut text = if row.choices.is_empty() { row.expects.to_owned() } else { row.choices.join(", ") };
    if !row.unit.name().is_empty() && row.unit.name() != "bytes" {
        let _ = write!(text, "; bare numbers in {}", row.unit.name());
    }
    if let Some((low, high)) = row.range {
        if high.is_finite() {
            let _ = write!(text, "; {low} to {high}");
        } else {
            let _ = write!(text, "; from {low}");
        }
    }
    text
}

fn shown(default: &Json) -> String {
    match default {
        Json::Null => "none".to_owned(),
        Json::Array(items) if items.is_empty() => "none".to_owned(),
        Json::Bool(true) => "on".to_owned(),
        Json::Bool(false) => "off".to_owned(),
        Json::String(s) => format!("`{s}`"),
        other => format!("`{other}`"),
    }
}
