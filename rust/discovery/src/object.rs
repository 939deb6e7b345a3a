//! What all objects of the API have, and what is asked of those that are listed and watched here.
use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::plan::{Change, Plan};
use crate::select::Wanted;

/// `metadata`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    /// Name, unique in its namespace while the object is there.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// Unique for ever.
    pub uid: String,
    /// Set once the object is to end.
    pub deletion_timestamp: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// One condition of `status`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Which.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}

/// A kind of object in which engines are found.
pub trait Object: DeserializeOwned + Send {
    /// Path of the API group.
    const GROUP: &'static str;
    /// Its plural in paths and roles.
    const PLURAL: &'static str;
    /// What is kept of all of them between two lists, beside the plan.
    type View: Default + Send;

    /// A full list.
    fn list(all: Vec<Self>, view: &mut Self::View, plan: &mut Plan, wanted: &Wanted) -> Vec<Change>;

    /// One was added or changed.
    fn changed(self, view: &mut Self::View, plan: &mut Plan, wanted: &Wanted) -> Vec<Change>;

    /// One was deleted; as it was last.
    fn deleted(self, view: &mut Self::View, plan: &mut Plan, wanted: &Wanted) -> Vec<Change>;
}
