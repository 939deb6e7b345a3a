//! New settings for a running router, on SIGHUP: what can change is changed, what cannot is refused by name and stays as it was. The rest is
//! for a restart by overlap.
use std::sync::Arc;

use r3router_core::error::Error;
use r3router_core::topology::Role;

use crate::app::App;
use crate::settings::{Settings, rows};
use crate::{logging, registration};

/// Reads the settings from where they were read at the start. The error is for a person.
pub type Read = Box<dyn Fn() -> Result<Settings, String> + Send>;

/// The settings that are in force, and how to read them anew.
pub struct Reload {
    now: Settings,
    read: Option<Read>,
}

impl std::fmt::Debug for Reload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reload").finish_non_exhaustive()
    }
}

/// An engine that the settings name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Base URL.
    pub url: String,
    /// What it does.
    pub role: Role,
    /// Port of its bootstrap server, when named.
    pub bootstrap_port: Option<u16>,
}

impl Named {
    /// All of them.
    pub fn of(settings: &Settings) -> Vec<Self> {
        let one = |url: &str, role, bootstrap_port| Self { url: url.to_owned(), role, bootstrap_port };
        let regular = settings.worker_urls.iter().map(|w| one(&w.0, Role::Regular, None));
        let prefill = settings.prefill.iter().map(|w| one(&w.url.0, Role::Prefill, w.bootstrap_port));
        let decode = settings.decode.iter().map(|w| one(&w.0, Role::Decode, None));
        regular.chain(prefill).chain(decode).collect()
    }

    /// Registers it.
    ///
    /// # Errors
    /// As [`registration::register`].
    pub fn register(&self, app: &Arc<App>) -> Result<(), Error> {
        registration::register(app, registration::plain(&self.url, self.role, self.bootstrap_port)?)?;
        Ok(())
    }
}

/// Names of settings that differ, by what becomes of them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Differ {
    changed: Vec<&'static str>,
    refused: Vec<&'static str>,
}

impl Differ {
    fn between(now: &Settings, next: &Settings) -> Self {
        let mut differ = Self::default();
        // Keys are shown hidden.
        let key = |name| match name {
            "api_key" => now.api_key != next.api_key,
            "worker_api_key" => now.worker_api_key != next.worker_api_key,
            _ => false,
        };
        for ((row, (name, before)), (_, after)) in rows().iter().zip(now.values()).zip(next.values()) {
            if before == after && !key(name) {
                continue;
            }
            if row.reloadable { differ.changed.push(name) } else { differ.refused.push(name) }
        }
        differ
    }
}

impl Reload {
    /// `now` is in force.
    pub fn new(now: Settings, read: Option<Read>) -> Self {
        Self { now, read }
    }

    /// Reads the settings and the certificates anew.
    pub fn run(&mut self, app: &Arc<App>) {
        for found in crate::tls::look(app.tls.as_deref(), &app.engine_tls) {
            match found {
                Ok(true) => tracing::info!("certificates read anew; new connections use them"),
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "certificates cannot be read anew; those before are used"),
            }
        }
        let Some(read) = &self.read else { return };
        match read() {
            Ok(next) => self.apply(app, &next),
            Err(error) => tracing::warn!(error, "the settings cannot be read anew; those before are in force"),
        }
    }

    fn apply(&mut self, app: &Arc<App>, next: &Settings) {
        let Differ { changed, refused } = Differ::between(&self.now, next);
        for name in &refused {
            let flag = format!("--{}", name.replace('_', "-"));
            tracing::warn!("{flag} cannot change while the router runs and stays as it was; restart by overlap");
        }
        let (before, after) = (Named::of(&self.now), Named::of(next));
        for gone in before.iter().filter(|named| !after.contains(named)) {
            if let Some(entry) = app.registry.find(&gone.url) {
                registration::remove(app, &entry);
            }
        }
        for new in after.iter().filter(|named| !before.contains(named)) {
            if let Err(error) = new.register(app) {
                tracing::warn!(worker = new.url, %error, "cannot be registered");
            }
        }
        logging::set_level(next.log_level);
        self.now.worker_urls.clone_from(&next.worker_urls);
        self.now.prefill.clone_from(&next.prefill);
        self.now.decode.clone_from(&next.decode);
        self.now.log_level = next.log_level;
        tracing::info!(?changed, ?refused, "settings read anew");
    }
}

#[cfg(test)]
mod tests {
    use super::{Differ, Named};
    use crate::settings::{LogLevel, Secret, Settings, WorkerUrl, rows};

    #[test]
    fn what_can_change_is_told_from_what_cannot_and_a_key_is_compared_although_it_is_hidden() {
        let now = Settings { api_key: Some(Secret::new("one")), ..Settings::default() };
        let next = Settings {
            api_key: Some(Secret::new("two")),
            log_level: LogLevel::Debug,
            decode: vec![WorkerUrl("http://d:1".to_owned())],
            queue_size: 5,
            ..Settings::default()
        };
        let expected = Differ { changed: vec!["decode", "log_level"], refused: vec!["api_key", "queue_size"] };
        assert_eq!(Differ::between(&now, &next), expected);
        assert_eq!(Differ::between(&now, &now), Differ::default());
    }

    #[test]
    fn every_setting_that_says_that_it_can_change_is_one_that_is_applied() {
        let names: Vec<&str> = rows().iter().filter(|r| r.reloadable).map(|r| r.name).collect();
        assert_eq!(names, ["worker_urls", "prefill", "decode", "log_level"]);
        assert_eq!(Named::of(&Settings::default()), []);
    }
}
