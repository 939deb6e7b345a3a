//! `emulate` and its defaults: a fleet of emulated engines on loopback.
use pyo3::prelude::*;
use r3router_engine::bounds;
use r3router_engine::emulator::{EmulateOptions, emulate_blocking};

use crate::errors::{RunError, SettingsError};
use crate::say::say;

/// The options of `emulate` with their defaults, as JSON.
#[pyfunction]
pub(crate) fn emulate_options() -> PyResult<String> {
    serde_json::to_string(&EmulateOptions::default()).map_err(|e| RunError::new_err(e.to_string()))
}

/// Least and most of its numbers, as JSON: `{"port": [0, 65535], ...}`.
#[pyfunction]
pub(crate) fn emulate_bounds() -> String {
    bounds::json(&EmulateOptions::BOUNDS)
}

/// Plays a fleet (options as JSON) until SIGTERM or SIGINT; prints the addresses and the router command once it listens.
#[pyfunction]
pub(crate) fn emulate(py: Python<'_>, options: &str) -> PyResult<()> {
    let options: EmulateOptions = serde_json::from_str(options).map_err(|e| SettingsError::new_err(e.to_string()))?;
    options.fleet().map_err(SettingsError::new_err)?;
    py.detach(|| emulate_blocking(&options, say)).map_err(|e| RunError::new_err(e.to_string()))
}
