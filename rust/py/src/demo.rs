//! `demo`: the incident and its cure on an emulated fleet.
use pyo3::prelude::*;
use r3router_engine::bounds;
use r3router_engine::demo::{DemoOptions, run};

use crate::errors::{RunError, SettingsError};
use crate::say::say;

/// The options of `demo` with their defaults, as JSON.
#[pyfunction]
pub(crate) fn demo_options() -> PyResult<String> {
    serde_json::to_string(&DemoOptions::default()).map_err(|e| RunError::new_err(e.to_string()))
}

/// Least and most of its numbers, as JSON: `{"scale": [1, 1000], ...}`.
#[pyfunction]
pub(crate) fn demo_bounds() -> String {
    bounds::json(&DemoOptions::BOUNDS)
}

/// Runs the demo (options as JSON), prints its progress and its table, and says whether everything held that it shows.
#[pyfunction]
pub(crate) fn demo(py: Python<'_>, options: &str) -> PyResult<bool> {
    let options: DemoOptions = serde_json::from_str(options).map_err(|e| SettingsError::new_err(e.to_string()))?;
    options.check().map_err(SettingsError::new_err)?;
    let report = py.detach(|| run(&options, |line| say(line))).map_err(|e| RunError::new_err(e.to_string()))?;
    say(format_args!("\n{}", report.table()));
    Ok(report.holds())
}
