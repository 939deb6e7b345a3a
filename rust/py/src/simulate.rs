//! `simulate` and `sweep`: scenarios in virtual time.
#![allow(clippy::needless_pass_by_value, reason = "paths are handed over by value")]
use std::path::PathBuf;

use pyo3::prelude::*;
use r3router_engine::simulate::{run_file, sweep as sweep_folder};

use crate::errors::SettingsError;

/// Plays the scenario of a TOML file; the report as JSON.
#[pyfunction]
pub(crate) fn simulate(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    py.detach(|| run_file(&path)).map_err(|e| SettingsError::new_err(e.to_string()))
}

/// Plays every scenario of a folder with the computed window, fixed ones and none; the table as Markdown, also written to `write`.
#[pyfunction]
#[pyo3(signature = (folder, write=None))]
pub(crate) fn sweep(py: Python<'_>, folder: PathBuf, write: Option<PathBuf>) -> PyResult<String> {
    py.detach(|| sweep_folder(&folder, write.as_deref())).map_err(|e| SettingsError::new_err(e.to_string()))
}
