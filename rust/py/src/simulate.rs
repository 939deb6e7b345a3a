//! `simulate` and `sweep`: scenarios in virtual time.
#![allow(clippy::needless_pass_by_value, reason = "paths are handed over by value")]
use std::path::PathBuf;

use pyo3::prelude::*;
use r3router_engine::simulate::{run_file, sweep as sweep_folder};

use crate::errors::{RunError, SettingsError};

/// Plays the scenario of a TOML file; the report as JSON.
#[pyfunction]
pub(crate) fn simulate(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    py.detach(|| run_file(&path)).map_err(|e| SettingsError::new_err(e.to_string()))
}

/// Plays every scenario of a folder with the computed window, fixed ones and none; the table and the missed targets as JSON.
/// `progress` is called with a line as each scenario is through.
#[pyfunction]
pub(crate) fn sweep(
    py: Python<'_>,
    folder: PathBuf,
    date: &str,
    command: &str,
    progress: Py<PyAny>,
) -> PyResult<String> {
    // A line that cannot be printed is no reason to lose the table.
    let told = |line: &str| Python::attach(|py| drop(progress.call1(py, (line,))));
    let swept = py.detach(|| sweep_folder(&folder, date, command, told));
    let swept = swept.map_err(|e| SettingsError::new_err(e.to_string()))?;
    serde_json::to_string(&swept).map_err(|e| RunError::new_err(e.to_string()))
}
