//! The findings of a running router: logged once each, shown on the admin listener; and the page of all that there are.
use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;

use super::{Code, Finding, Seen, Severity, examine, live};
use crate::app::App;
use crate::workers::{Entry, Phase};

/// Engines come in crowds; they are looked at once when so much time has passed since the first.
const PAUSE: Duration = Duration::from_secs(1);

/// What is wrong now, as far as the engines that are in choice have told.
#[derive(Debug, Default)]
pub struct Findings {
    now: Mutex<Vec<Finding>>,
    due: Notify,
}

impl Findings {
    /// An engine has come, changed or gone.
    pub fn due(&self) {
        self.due.notify_one();
    }

    /// The findings, numbered, as JSON.
    pub fn json(&self) -> Vec<Value> {
        live::numbered(&self.now.lock())
    }

    /// How many are errors, and how many warnings.
    pub fn counts(&self) -> (usize, usize) {
        let now = self.now.lock();
        let of = |severity| now.iter().filter(|f| f.code.severity() == severity).count();
        (of(Severity::Error), of(Severity::Warning))
    }
}

/// What an entry is to the rules. Entries that were never asked are left out: what is not up yet is told by its own log lines.
fn seen(entry: &Entry) -> Option<Seen> {
    let state = entry.state();
    let registration = &entry.registration;
    let found = state.found.filter(|_| state.phase == Phase::Active)?;
    Some(Seen {
        url: Arc::clone(&registration.shown),
        address: registration.address.clone(),
        role: registration.role,
        bootstrap_port: registration.bootstrap_port,
        found: Ok(found),
        closed_after: None,
    })
}

/// Looks whenever an engine has come, and logs what was not logged before. Never returns.
pub async fn watch(app: Arc<App>) {
    let mut logged: HashSet<(Code, String)> = HashSet::new();
    loop {
        app.findings.due.notified().await;
        tokio::time::sleep(PAUSE).await;
        let engines: Vec<Seen> = app.registry.all().iter().filter_map(|e| seen(e)).collect();
        let mut found = examine(&app.given, &engines, None);
        // Engines come one by one; a role that is not there yet is told by /readiness.
        found.retain(|f| !matches!(f.code, Code::NoEngine | Code::Pods));
        for finding in &found {
            if logged.insert((finding.code, finding.what.clone())) {
                log(finding);
            }
        }
        *app.findings.now.lock() = found;
    }
}

fn log(finding: &Finding) {
    let (code, workers) = (finding.code.name(), super::names(finding.workers.iter().map(|w| &**w)));
    let (what, change) = (&*finding.what, &*finding.advice);
    match finding.code.severity() {
        Severity::Error => tracing::error!(code, workers, change, "{what}"),
        Severity::Warning => tracing::warn!(code, workers, change, "{what}"),
        Severity::Note => tracing::info!(code, workers, change, "{what}"),
    }
}

/// Every finding that there is, in Markdown.
pub fn page() -> String {
    let mut page = String::from(
        "# Checks\n\n\
         Made from `rust/proxy/src/check/code.rs` by `make docs`; a test fails when this page and the code differ.\n\n\
         `r3router check` takes the flags, variables and file of `r3router serve`, asks every engine that they name, and prints numbered\n\
         findings: what was seen, where, and what to change. It generates nothing and changes nothing. It leaves with 0 when there is\n\
         nothing but notes, 1 when there are errors or warnings, 2 when the settings themselves are wrong. `--json` prints the same for\n\
         programs. `r3router serve` logs the same findings (but those that take a connection of their own: keep-alive) once its engines\n\
         are in choice, and shows them at `GET /admin/findings`.\n\n\
         An *error* makes requests fail, a *warning* makes them slow or fail on a bad day, a *note* is good to know.\n\n\
         | code | severity | meaning |\n|---|---|---|\n",
    );
    for code in Code::ALL {
        let _ = writeln!(page, "| `{}` | {} | {} |", code.name(), code.severity().name(), code.meaning());
    }
    page
}
