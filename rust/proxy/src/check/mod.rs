//! What is wrong with a fleet, before requests show it: one list of checks for `r3router check`, which asks every engine, and for
//! `serve`, which logs the same of what it has learned. Each finding says what was seen, on which engines, and what to change.
//!
//! A rule is a function of the settings and of what is known of the engines. Facts of releases and their sources stand with the rules.
mod code;
mod engines;
mod live;
mod pairs;
mod report;
mod router;
#[cfg(test)]
mod tests;
mod traits;
mod versions;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use r3router_core::topology::Role;

pub use code::{Code, Severity};
pub use live::{CheckOptions, check};
pub use report::{Findings, page, watch};
pub use traits::{KnownTopology, Topology, Traits, Version};

use crate::address::Address;
use crate::probe::{Found, NotFound};
use crate::settings::Settings;

/// Engines that a finding names one by one.
const NAMED: usize = 4;

/// What is known of one engine.
#[derive(Clone, Debug)]
pub struct Seen {
    /// As it was registered.
    pub url: Arc<str>,
    /// Where it is.
    pub address: Address,
    /// What it is registered as.
    pub role: Role,
    /// Its bootstrap port as registered.
    pub bootstrap_port: Option<u16>,
    /// What it said, or why it said nothing.
    pub found: Result<Arc<Found>, NotFound>,
    /// After how long it closed an idle connection; `None` when it kept it for as long as the router would, or was not tried.
    pub closed_after: Option<Duration>,
}

impl Seen {
    /// What it said.
    fn told(&self) -> Option<&Found> {
        self.found.as_deref().ok()
    }
}

/// One thing to change.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Which.
    pub code: Code,
    /// The engines that it is about.
    pub workers: Vec<Arc<str>>,
    /// What was seen.
    pub what: String,
    /// What to change.
    pub advice: String,
}

/// What the rules look at.
pub(crate) struct Fleet<'a> {
    settings: &'a Settings,
    engines: &'a [Seen],
    /// Tokens of a prompt, for what routing payloads weigh; `None`: what a row's share of decode's pool holds.
    prompt_tokens: Option<u64>,
    found: Vec<Finding>,
}

impl<'a> Fleet<'a> {
    fn add(&mut self, code: Code, engines: &[&Seen], what: impl Into<String>, advice: impl Into<String>) {
        let workers = engines.iter().map(|e| Arc::clone(&e.url)).collect();
        self.found.push(Finding { code, workers, what: what.into(), advice: advice.into() });
    }

    /// Engines that answered, with what they said.
    fn told(&self) -> Vec<(&'a Seen, &'a Found)> {
        self.engines.iter().filter_map(|e| e.told().map(|f| (e, f))).collect()
    }

    /// Of one role.
    fn of(&self, role: Role) -> Vec<(&'a Seen, &'a Found)> {
        self.told().into_iter().filter(|(e, _)| e.role == role).collect()
    }
}

/// Everything that is wrong, worst first.
pub fn examine(settings: &Settings, engines: &[Seen], prompt_tokens: Option<u64>) -> Vec<Finding> {
    let mut fleet = Fleet { settings, engines, prompt_tokens, found: Vec::new() };
    engines::look(&mut fleet);
    pairs::look(&mut fleet);
    versions::look(&mut fleet);
    router::look(&mut fleet);
    let mut found = fleet.found;
    found.sort_by_key(|f| (f.code.severity(), f.code));
    found
}

/// `a, b, c, d and 3 more`.
fn names<'a>(engines: impl IntoIterator<Item = &'a str>) -> String {
    let all: Vec<&str> = engines.into_iter().collect();
    let mut text = all.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
    if all.len() > NAMED {
        let _ = write!(text, " and {} more", all.len() - NAMED);
    }
    text
}

/// Who says what, where not all say the same: `64 at http://p:1; 16 at http://d:1`. Engines that say nothing of it are left out.
fn differ<'a, V: PartialEq + std::fmt::Display>(
    engines: &[(&'a Seen, &'a Found)],
    of: impl Fn(&'a Found) -> Option<V>,
) -> Option<(String, Vec<&'a Seen>)> {
    let mut groups: Vec<(V, Vec<&Seen>)> = Vec::new();
    for (engine, found) in engines {
        let Some(value) = of(found) else { continue };
        match groups.iter_mut().find(|(v, _)| *v == value) {
            Some((_, group)) => group.push(engine),
            None => groups.push((value, vec![engine])),
        }
    }
    if groups.len() < 2 {
        return None;
    }
    let said: Vec<String> =
        groups.iter().map(|(value, group)| format!("{value} at {}", names(group.iter().map(|e| &*e.url)))).collect();
    Some((said.join("; "), groups.into_iter().flat_map(|(_, group)| group).collect()))
}
