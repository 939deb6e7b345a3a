//! Keeps a plan up to date: LIST at the start, after every break and at an interval, WATCH between.
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::api::{Access, ApiError, Event, Scope};
use crate::object::Object;
use crate::plan::{Change, Plan};
use crate::select::Wanted;

/// Shortest pause between two lists, so that a watch that breaks at once does not load the API server.
const LEAST: Duration = Duration::from_millis(200);
/// Longest pause after failures.
const MOST: Duration = Duration::from_secs(10);
/// Pause before the same failure is said again.
const AGAIN: Duration = Duration::from_secs(300);

/// Follows the objects of one kind for ever; drop the future to end. `apply` gets what changes, in order. While the API server does not
/// answer, nothing changes: that it is down does not mean that engines are.
pub async fn follow<T: Object>(
    access: Access,
    namespace: Option<String>,
    wanted: Wanted,
    interval: Duration,
    mut apply: impl FnMut(Vec<Change>) + Send,
) {
    let scope = Scope { namespace, labels: wanted.query() };
    let mut following = Following::<T> { wanted, plan: Plan::default(), view: T::View::default() };
    let mut tell = |changes: Vec<Change>| {
        if !changes.is_empty() {
            apply(changes);
        }
    };
    let mut failures = 0u32;
    let mut said: Option<Instant> = None;
    loop {
        let began = Instant::now();
        match access.list::<T>(&scope).await {
            Ok(listed) => {
                if failures > 0 {
                    tracing::info!(failures, of = T::PLURAL, "can be listed again");
                }
                (failures, said) = (0, None);
                let Following { wanted, plan, view } = &mut following;
                tell(T::list(listed.items, view, plan, wanted));
                let until = began + interval;
                // A watch may be silent and broken at once, and nobody tells; at `until` it is dropped.
                let watching = following.watch(&access, &scope, &listed.version, interval, &mut tell);
                if let Ok(Err(error)) = timeout_at(until, watching).await {
                    tracing::debug!(%error, of = T::PLURAL, "a watch ended");
                }
                sleep_until(began + LEAST.min(interval)).await;
            }
            Err(error) => {
                let pause = (LEAST * 2u32.pow(failures.min(10))).min(MOST).min(interval.max(LEAST));
                failures += 1;
                let advice = match &error {
                    ApiError::Refused(403, _) => "the service account needs a role with list and watch of them",
                    ApiError::Refused(401, _) => "the token of the service account is not taken",
                    _ => "engines that are known stay",
                };
                // An API server may be away for long.
                if said.is_none_or(|at| at.elapsed() >= AGAIN) {
                    said = Some(Instant::now());
                    tracing::warn!(%error, advice, failures, of = T::PLURAL, "cannot be listed; it is tried until it can");
                }
                sleep(pause).await;
            }
        }
    }
}

struct Following<T: Object> {
    wanted: Wanted,
    plan: Plan,
    view: T::View,
}

impl<T: Object> Following<T> {
    async fn watch(
        &mut self,
        access: &Access,
        scope: &Scope,
        version: &str,
        interval: Duration,
        tell: &mut (impl FnMut(Vec<Change>) + Send),
    ) -> Result<(), ApiError> {
        let Self { wanted, plan, view } = self;
        let mut watch = access.watch::<T>(scope, version, interval.as_secs() + 5).await?;
        while let Some(event) = watch.next().await? {
            match event {
                Event::Changed(object) => tell(object.changed(view, plan, wanted)),
                Event::Deleted(object) => tell(object.deleted(view, plan, wanted)),
                Event::Bookmark => {}
            }
        }
        Ok(())
    }
}
