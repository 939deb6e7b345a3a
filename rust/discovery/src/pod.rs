//! What is read of a pod. Everything else in it is skipped while it is read: 5,000 pods are 100 MB of JSON and 2 MB of this.
use std::net::IpAddr;

use serde::Deserialize;

use crate::object::{Condition, Metadata, Object};
use crate::plan::{Change, Identity, Plan, Sighting};
use crate::select::{Engine, Role, Wanted, url};

/// Pods of a group of nodes carry their number here; only the leader, 0, has an HTTP server.
const LWS_INDEX: &str = "leaderworkerset.sigs.k8s.io/worker-index";

/// A pod, as far as it says which engine it is.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pod {
    /// Names and labels.
    pub metadata: Metadata,
    /// What runs of it.
    pub status: Status,
}

/// `status`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// `Pending`, `Running`, `Succeeded`, `Failed`.
    pub phase: String,
    /// Its address, when it has one.
    #[serde(rename = "podIP")]
    pub pod_ip: String,
    /// Among them `Ready`.
    pub conditions: Vec<Condition>,
    /// Containers. Side-cars are init containers and not among them.
    pub container_statuses: Vec<Container>,
}

/// One container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// How often it was started again.
    pub restart_count: u64,
}

impl Pod {
    fn identity(&self) -> Identity {
        let m = &self.metadata;
        Identity { namespace: m.namespace.clone(), name: m.name.clone(), uid: m.uid.clone() }
    }

    fn engine(&self, wanted: &Wanted) -> Option<Engine> {
        let m = &self.metadata;
        if m.labels.get(LWS_INDEX).is_some_and(|index| index != "0") {
            return None;
        }
        let role = wanted.role(m)?;
        let runs = self.status.phase == "Running" && m.deletion_timestamp.is_none();
        let ip: IpAddr = self.status.pod_ip.parse().ok().filter(|_| runs)?;
        let port = m.annotations.get(&wanted.bootstrap_annotation).and_then(|p| p.trim().parse().ok());
        let bootstrap_port = port.filter(|p| *p > 0 && role == Role::Prefill);
        Some(Engine { url: url(&ip.to_string(), wanted.port), role, bootstrap_port })
    }

    /// What is seen of it.
    pub fn sighting(&self, wanted: &Wanted) -> Sighting {
        let status = &self.status;
        Sighting {
            identity: self.identity(),
            engine: self.engine(wanted),
            ready: status.conditions.iter().any(|c| c.r#type == "Ready" && c.status == "True"),
            restarts: status.container_statuses.iter().map(|c| c.restart_count).sum(),
            ended: matches!(status.phase.as_str(), "Succeeded" | "Failed"),
        }
    }
}

impl Object for Pod {
    const GROUP: &'static str = "/api/v1";
    const PLURAL: &'static str = "pods";
    type View = ();

    fn list(all: Vec<Self>, (): &mut (), plan: &mut Plan, wanted: &Wanted) -> Vec<Change> {
        plan.list(all.iter().map(|pod| pod.sighting(wanted)))
    }

    fn changed(self, (): &mut (), plan: &mut Plan, wanted: &Wanted) -> Vec<Change> {
        plan.changed(self.sighting(wanted))
    }

    fn deleted(self, (): &mut (), plan: &mut Plan, _: &Wanted) -> Vec<Change> {
        plan.deleted(&self.identity())
    }
}
