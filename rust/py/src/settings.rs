//! `settings_schema` and `check_settings`: what can be set, and what a set of sources means.
use pyo3::prelude::*;
use r3router_proxy::settings::{Loaded, Sources, peer_schema, schema};
use serde_json::{Map, Value, json};

use crate::errors::SettingsError;

/// The description of every setting as a JSON list.
#[pyfunction]
pub(crate) fn settings_schema() -> String {
    schema().to_string()
}

/// The flags of sglang-router that are no settings here, each with what becomes of it, as a JSON list.
#[pyfunction]
pub(crate) fn peer_flags() -> String {
    peer_schema().to_string()
}

/// Merges and checks sources (`{"flags": …, "env": …, "config": …}` as JSON) and returns `{"values", "origins", "warnings"}` as JSON.
#[pyfunction]
pub(crate) fn check_settings(sources: &str) -> PyResult<String> {
    load(sources).map(|loaded| report(&loaded))
}

/// Values, origins and warnings as JSON.
pub(crate) fn report(loaded: &Loaded) -> String {
    let values: Map<String, Value> = loaded.settings.values().into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
    let origins: Map<String, Value> =
        loaded.origins.iter().map(|(k, v)| ((*k).to_owned(), json!(v.to_string()))).collect();
    json!({ "values": values, "origins": origins, "warnings": loaded.warnings }).to_string()
}

/// Reads sources, with the errors of the settings as `SettingsError`.
pub(crate) fn load(sources: &str) -> PyResult<Loaded> {
    Sources::from_json(sources).and_then(|s| s.load()).map_err(|e| SettingsError::new_err(e.to_string()))
}
