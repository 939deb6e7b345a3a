//! Engines in Kubernetes: those that are found are registered, those that are gone are removed.
use std::sync::Arc;

use r3router_core::error::Error;

use crate::app::App;

pub use pods::Ready;

/// Reads what is needed to follow them, when the settings say that they are to be followed.
///
/// # Errors
/// When this is no pod, its service account cannot be read, or this build has no discovery.
pub fn ready(app: &Arc<App>) -> Result<Option<Ready>, Error> {
    if !app.settings.service_discovery {
        return Ok(None);
    }
    Ready::of(app).map(Some)
}

#[cfg(not(feature = "kubernetes"))]
mod pods {
    use std::sync::Arc;

    use r3router_core::error::{Error, Kind, Source};
    use tokio::task::JoinHandle;

    use crate::app::App;

    /// Discovery that can begin: never in this build.
    #[derive(Debug)]
    pub enum Ready {}

    impl Ready {
        pub(super) fn of(_: &Arc<App>) -> Result<Self, Error> {
            let error = Error::new(
                Kind::InvalidField,
                Source::Router,
                "--service-discovery: this build has no discovery in Kubernetes",
            );
            Err(error.advise("build it with the feature `kubernetes`, as the wheel is"))
        }

        /// Follows engines until it is aborted.
        pub fn start(self, _: &Arc<App>) -> JoinHandle<()> {
            match self {}
        }
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
    use r3router_discovery::object::Object;
    use r3router_discovery::plan::{Change, Identity};
    use r3router_discovery::pod::Pod;
    use r3router_discovery::select::{Engine, Role as PodRole, Selector, Wanted};
    use r3router_discovery::slice::EndpointSlice;
    use tokio::task::JoinHandle;

    use crate::app::App;
    use crate::settings::DiscoverySource;
    use crate::workers::{Entry, Phase};
    use crate::{keeper, registration};

    fn wrong(why: impl std::fmt::Display) -> Error {
        Error::new(Kind::InvalidField, Source::Router, format!("--service-discovery: {why}"))
            .advise("run the router in a pod whose service account has a token, or leave --service-discovery out")
    }

    /// Discovery that can begin.
    #[derive(Debug)]
    pub struct Ready {
        access: Access,
        namespace: Option<String>,
        wanted: Wanted,
    }

    impl Ready {
        pub(super) fn of(app: &Arc<App>) -> Result<Self, Error> {
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
            let access = Access::in_cluster(account).map_err(wrong)?;
            let namespace = match settings.service_discovery_namespace.as_deref() {
                Some("*") => None,
                Some(name) => Some(name.to_owned()),
                None => Some(Access::own_namespace(account).map_err(wrong)?),
            };
            Ok(Self { access, namespace, wanted })
        }

        /// Follows engines until it is aborted.
        pub fn start(self, app: &Arc<App>) -> JoinHandle<()> {
            match app.settings.service_discovery_source {
                DiscoverySource::Pods => self.run::<Pod>(app),
                DiscoverySource::EndpointSlices => self.run::<EndpointSlice>(app),
            }
        }

        fn run<T: Object + 'static>(self, app: &Arc<App>) -> JoinHandle<()>
        where
            T::View: 'static,
        {
            let Self { access, namespace, wanted } = self;
            let mut fleet = Fleet { app: Arc::clone(app), found: HashMap::new() };
            let interval = app.settings.service_discovery_interval_secs;
            app.runtime.spawn(follow::<T>(access, namespace, wanted, interval, move |changes| fleet.apply(changes)))
        }
    }

    /// What was registered here and is not dead yet. Engines that a person registered are theirs to remove.
    struct Fleet {
        app: Arc<App>,
        found: HashMap<Identity, Arc<Entry>>,
    }

    impl Fleet {
        fn apply(&mut self, changes: Vec<Change>) {
            for change in changes {
                match change {
                    Change::Remove(identity, _) => {
                        if let Some(entry) = self.found.get(&identity) {
                            registration::remove(&self.app, entry);
                        }
                    }
                    Change::Dead(identity) => {
                        if let Some(entry) = self.found.remove(&identity) {
                            keeper::dead(&self.app, &entry);
                        }
                    }
                    Change::Add(identity, engine) => self.add(identity, &engine),
                }
            }
        }

        fn add(&mut self, identity: Identity, engine: &Engine) {
            if self.app.registry.find(&engine.url).is_some_and(|e| e.phase() != Phase::Failed) {
                tracing::info!(worker = %engine.url, "an engine was found that is registered already");
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
                    self.found.insert(identity, entry);
                }
                Err(error) => {
                    tracing::warn!(worker = %engine.url, %error, "an engine was found and cannot be registered");
                }
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use std::collections::HashMap;
        use std::sync::Arc;

        use r3router_core::topology::Role;
        use r3router_discovery::plan::{Change, Identity};
        use r3router_discovery::select::{Engine, Role as PodRole};

        use super::Fleet;
        use crate::app::App;
        use crate::registration;
        use crate::settings::Settings;

        fn engine(host: &str, role: PodRole) -> Engine {
            Engine { url: format!("http://{host}:9"), role, bootstrap_port: (role == PodRole::Prefill).then_some(8998) }
        }

        fn id(name: &str) -> Identity {
            Identity { namespace: "rl".to_owned(), name: name.to_owned(), uid: String::new() }
        }

        fn add(engine: &Engine) -> Change {
            Change::Add(id(&engine.url), engine.clone())
        }

        fn remove(engine: &Engine) -> Change {
            Change::Remove(id(&engine.url), engine.clone())
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
            fleet.apply(vec![add(&theirs), add(&ours)]);
            let both = [
                ("http://127.0.0.1:9".to_owned(), Role::Decode, None),
                ("http://127.0.0.2:9".to_owned(), Role::Prefill, Some(8998)),
            ];
            assert_eq!(listed(&app), both);
            fleet.apply(vec![
                remove(&theirs),
                Change::Dead(id(&theirs.url)),
                remove(&ours),
                Change::Dead(id(&ours.url)),
            ]);
            assert_eq!(listed(&app), both[..1]);
            assert!(fleet.found.is_empty());
        }

        #[tokio::test]
        async fn a_new_process_behind_the_same_address_is_another_entry() {
            let app = App::new(Settings::default()).unwrap();
            let mut fleet = Fleet { app: Arc::clone(&app), found: HashMap::new() };
            let decode = engine("127.0.0.3", PodRole::Decode);
            fleet.apply(vec![add(&decode)]);
            let before = app.registry.find(&decode.url).unwrap();
            fleet.apply(vec![remove(&decode), add(&decode)]);
            let after = app.registry.find(&decode.url).unwrap();
            assert_ne!(before.id, after.id);
            assert_eq!(before.phase(), crate::workers::Phase::Removed);
            assert_eq!(listed(&app).len(), 1);
        }
    }
}
