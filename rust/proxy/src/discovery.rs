//! Engines that are pods: those that are found are registered, those that are gone are removed.
use std::sync::Arc;

use r3router_core::error::Error;
use tokio::task::JoinHandle;

use crate::app::App;

/// Starts to follow the pods, when the settings say so.
///
/// # Errors
/// When this is no pod, its service account cannot be read, or this build has no discovery.
pub fn start(app: &Arc<App>) -> Result<Option<JoinHandle<()>>, Error> {
    if !app.settings.service_discovery {
        return Ok(None);
    }
    pods::start(app).map(Some)
}

#[cfg(not(feature = "kubernetes"))]
mod pods {
    use std::sync::Arc;

    use r3router_core::error::{Error, Kind, Source};
    use tokio::task::JoinHandle;

    use crate::app::App;

    pub(super) fn start(_: &Arc<App>) -> Result<JoinHandle<()>, Error> {
        let error = Error::new(Kind::InvalidField, Source::Router, "this build has no discovery in Kubernetes");
        Err(error.advise("build it with the feature `kubernetes`, as the wheel is"))
    }
}

#[cfg(feature = "kubernetes")]
mod pods {
    use std::collections::HashMap;
    use std::path::Path;
    use std::sync::Arc;

    use r3router_core::error::{Error, Kind, Source};
    use r3router_core::topology::Role;
    use r3router_discovery::api::Access;
    use r3router_discovery::follow::follow;
    use r3router_discovery::plan::Change;
    use r3router_discovery::select::{Engine, Role as PodRole, Selector, Wanted};
    use tokio::task::JoinHandle;

    use crate::app::App;
    use crate::registration;
    use crate::workers::{Entry, Phase};

    fn wrong(message: String) -> Error {
        Error::new(Kind::InvalidField, Source::Router, message)
            .advise("run the router in a pod whose service account has a token, or leave --service-discovery out")
    }

    pub(super) fn start(app: &Arc<App>) -> Result<JoinHandle<()>, Error> {
        let settings = &app.settings;
        let named = [
            (PodRole::Regular, &settings.selector, !settings.pd_disaggregation),
            (PodRole::Prefill, &settings.prefill_selector, settings.pd_disaggregation),
            (PodRole::Decode, &settings.decode_selector, settings.pd_disaggregation),
        ];
        let mut roles = Vec::new();
        for (role, words, wanted) in named {
            let selector = Selector::parse(words).map_err(wrong)?;
            if wanted && !selector.is_empty() {
                roles.push((role, selector));
            }
        }
        let wanted = Wanted {
            roles,
            port: settings.service_discovery_port,
            bootstrap_annotation: settings.bootstrap_port_annotation.clone(),
        };
        let account = Path::new(&settings.service_discovery_account_dir);
        let access = Access::in_cluster(account).map_err(|e| wrong(e.to_string()))?;
        let namespace = match settings.service_discovery_namespace.as_deref() {
            Some("*") => None,
            Some(name) => Some(name.to_owned()),
            None => Some(Access::own_namespace(account).map_err(|e| wrong(e.to_string()))?),
        };
        let mut fleet = Fleet { app: Arc::clone(app), found: HashMap::new() };
        let interval = settings.service_discovery_interval_secs;
        Ok(app.runtime.spawn(follow(access, namespace, wanted, interval, move |changes| fleet.apply(changes))))
    }

    /// What was registered here. Engines that a person registered are theirs to remove.
    struct Fleet {
        app: Arc<App>,
        found: HashMap<String, Arc<Entry>>,
    }

    impl Fleet {
        fn apply(&mut self, changes: Vec<Change>) {
            for change in changes {
                match change {
                    Change::Remove(engine) => {
                        if let Some(entry) = self.found.remove(&engine.url) {
                            registration::remove(&self.app, &entry);
                        }
                    }
                    Change::Add(engine) => self.add(&engine),
                }
            }
        }

        fn add(&mut self, engine: &Engine) {
            if self.app.registry.find(&engine.url).is_some_and(|e| e.phase() != Phase::Failed) {
                tracing::info!(worker = %engine.url, "a pod was found that is registered already");
                return;
            }
            let role = match engine.role {
                PodRole::Regular => Role::Regular,
                PodRole::Prefill => Role::Prefill,
                PodRole::Decode => Role::Decode,
            };
            let registered = registration::plain(&engine.url, role, engine.bootstrap_port)
                .and_then(|plain| registration::register(&self.app, plain));
            match registered {
                Ok(entry) => {
                    self.found.insert(engine.url.clone(), entry);
                }
                Err(error) => tracing::warn!(worker = %engine.url, %error, "a pod was found and cannot be registered"),
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use std::collections::HashMap;
        use std::sync::Arc;

        use r3router_core::topology::Role;
        use r3router_discovery::plan::Change;
        use r3router_discovery::select::{Engine, Role as PodRole};

        use super::Fleet;
        use crate::app::App;
        use crate::registration;
        use crate::settings::Settings;

        fn engine(host: &str, role: PodRole) -> Engine {
            Engine { url: format!("http://{host}:9"), role, bootstrap_port: (role == PodRole::Prefill).then_some(8998) }
        }

        fn listed(app: &App) -> Vec<(String, Role, Option<u16>)> {
            app.registry
                .all()
                .iter()
                .map(|e| (e.registration.shown.to_string(), e.registration.role, e.registration.bootstrap_port))
                .collect()
        }

        #[tokio::test]
        async fn what_is_found_is_registered_and_what_a_person_registered_is_theirs() {
            let app = App::new(Settings::default()).unwrap();
            registration::register(&app, registration::plain("http://127.0.0.1:9", Role::Decode, None).unwrap())
                .unwrap();
            let mut fleet = Fleet { app: Arc::clone(&app), found: HashMap::new() };
            let (theirs, ours) = (engine("127.0.0.1", PodRole::Decode), engine("127.0.0.2", PodRole::Prefill));
            fleet.apply(vec![Change::Add(theirs.clone()), Change::Add(ours.clone())]);
            let both = [
                ("http://127.0.0.1:9".to_owned(), Role::Decode, None),
                ("http://127.0.0.2:9".to_owned(), Role::Prefill, Some(8998)),
            ];
            assert_eq!(listed(&app), both);
            fleet.apply(vec![Change::Remove(theirs), Change::Remove(ours)]);
            assert_eq!(listed(&app), both[..1]);
        }

        #[tokio::test]
        async fn a_new_process_behind_the_same_address_is_another_entry() {
            let app = App::new(Settings::default()).unwrap();
            let mut fleet = Fleet { app: Arc::clone(&app), found: HashMap::new() };
            let decode = engine("127.0.0.3", PodRole::Decode);
            fleet.apply(vec![Change::Add(decode.clone())]);
            let before = app.registry.find(&decode.url).unwrap();
            fleet.apply(vec![Change::Remove(decode.clone()), Change::Add(decode.clone())]);
            let after = app.registry.find(&decode.url).unwrap();
            assert_ne!(before.id, after.id);
            assert_eq!(before.phase(), crate::workers::Phase::Removed);
            assert_eq!(listed(&app).len(), 1);
        }
    }
}
