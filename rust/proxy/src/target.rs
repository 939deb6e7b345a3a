//! `X-SMG-Target-Worker`: the client names the worker that is to serve it, and gets it or 503.
//!
//! As in sglang-router it is a number, counted from 0 in the order of registration; with split engines it counts the prefill and the
//! decode engines both. Beyond it, an engine's URL is taken, `@RANK` after either names one rank, and several are parted by commas
//! (`http://p0:30000@1, http://d0:30000`). It holds under every policy; admission still says when.
use std::sync::Arc;

use http::{HeaderMap, HeaderName};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::policy::{Target, Targets};
use r3router_core::topology::Role;

use crate::app::App;
use crate::worker::Worker;
use crate::workers::Entry;

/// The header.
pub const TARGET_WORKER: HeaderName = HeaderName::from_static("x-smg-target-worker");

/// What a request's headers name.
///
/// # Errors
/// `InvalidField` for what is no name, `NoWorkers` for a worker that is not there or not active.
pub fn of(app: &App, headers: &HeaderMap) -> Result<Targets, Error> {
    let mut targets = Targets::default();
    for (role, target) in named(app, headers)? {
        let side = if role == Role::Prefill { &mut targets.prefill } else { &mut targets.back };
        *side = Some(target);
    }
    Ok(targets)
}

/// The workers that a request's headers name; none when it names none.
///
/// # Errors
/// As [`of`].
pub fn workers(app: &App, headers: &HeaderMap) -> Result<Vec<Arc<Worker>>, Error> {
    let named = named(app, headers)?;
    Ok(app.registry.active().into_iter().filter(|w| named.iter().any(|(_, t)| t.worker == w.id)).collect())
}

fn named(app: &App, headers: &HeaderMap) -> Result<Vec<(Role, Target)>, Error> {
    let mut found = Vec::new();
    for value in headers.get_all(TARGET_WORKER) {
        let text = value.to_str().map_err(|_| bad("is no text"))?;
        for word in text.split(',').map(str::trim).filter(|w| !w.is_empty()) {
            let (name, rank) = match word.rsplit_once('@') {
                Some((name, rank)) => {
                    (name, Some(rank.parse().map_err(|_| bad(&format!("{word:?}: {rank:?} is no rank")))?))
                }
                None => (word, None),
            };
            for entry in entries(app, name)? {
                let Some(worker) = entry.active() else {
                    let phase = entry.phase().name();
                    return Err(missing(&format!("{} is {phase}", entry.registration.shown)));
                };
                found.push((entry.registration.role, Target { worker: worker.id, rank }));
            }
        }
    }
    Ok(found)
}

/// The entries of a number or a URL.
fn entries(app: &App, name: &str) -> Result<Vec<Arc<Entry>>, Error> {
    let Ok(number) = name.parse::<usize>() else {
        let entry = app.registry.find(name).ok_or_else(|| missing(&format!("{name:?} is not registered")))?;
        return Ok(vec![entry]);
    };
    let all = app.registry.all();
    let mut found = Vec::new();
    for &role in app.roles() {
        let mut of_role = all.iter().filter(|e| e.registration.role == role);
        let count = of_role.clone().count();
        let entry = of_role.nth(number).ok_or_else(|| {
            missing(&format!("number {number}, and {count} {} are registered", crate::workers::role_name(role)))
        })?;
        found.push(Arc::clone(entry));
    }
    Ok(found)
}

fn bad(what: &str) -> Error {
    Error::new(Kind::InvalidField, Source::Client, format!("{TARGET_WORKER} {what}"))
        .advise("give a number from 0 or an engine's URL, with @RANK for one rank")
}

fn missing(what: &str) -> Error {
    Error::new(Kind::NoWorkers, Source::Router, format!("{TARGET_WORKER} names a worker that cannot serve: {what}"))
        .with_limit(1.0, 0.0)
        .advise("GET /workers shows what there is; leave the header out to let the router choose")
}
