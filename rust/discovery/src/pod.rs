//! What is read of a pod. Everything else in it is skipped while it is read: 5,000 pods are 100 MB of JSON and 2 MB of this.
use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;

/// A pod, as far as it says which engine it is.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pod {
    /// Names and labels.
    pub metadata: Metadata,
    /// What runs of it.
    pub status: Status,
}

/// `metadata`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    /// Name, unique in its namespace while the pod lives.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// Unique for ever.
    pub uid: String,
    /// Version of the object, for watches.
    pub resource_version: String,
    /// Set once the pod is to end.
    pub deletion_timestamp: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
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

/// One condition.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Which.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}

/// One container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// How often it was started again.
    pub restart_count: u64,
}

/// Names a pod for ever.
#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Uid: another pod of the same name is another pod.
    pub uid: String,
}

impl Pod {
    /// Its name for ever.
    pub fn identity(&self) -> Identity {
        let m = &self.metadata;
        Identity { namespace: m.namespace.clone(), name: m.name.clone(), uid: m.uid.clone() }
    }

    /// Its address, while it runs and is not about to end.
    pub fn address(&self) -> Option<IpAddr> {
        let runs = self.status.phase == "Running" && self.metadata.deletion_timestamp.is_none();
        runs.then(|| self.status.pod_ip.parse().ok()).flatten()
    }

    /// Whether its probes pass.
    pub fn ready(&self) -> bool {
        self.status.conditions.iter().any(|c| c.r#type == "Ready" && c.status == "True")
    }

    /// Starts of its containers after the first.
    pub fn restarts(&self) -> u64 {
        self.status.container_statuses.iter().map(|c| c.restart_count).sum()
    }
}
