//! `serve`: the router, on threads of its own. The interpreter lock is let go of for its whole life.
use pyo3::prelude::*;
use r3router_proxy::settings::{Loaded, Sources};
use r3router_proxy::{StartError, check_blocking, logging, serve_blocking};

use crate::errors::{RunError, SettingsError};
use crate::say::say;
use crate::settings::{load, report};

/// Reads the sources (see `check_settings`) and serves until SIGTERM or SIGINT; prints the address once it listens.
#[pyfunction]
pub(crate) fn serve(py: Python<'_>, sources: &str) -> PyResult<()> {
    let loaded = load(sources)?;
    logging::init(&loaded).map_err(|e| refused(&loaded, &StartError::Setting(e)))?;
    let scheme = if loaded.settings.tls_cert_path.is_some() { "https" } else { "http" };
    let kept = sources.to_owned();
    let read = move || {
        let loaded = Sources::from_json(&kept).and_then(|s| s.load()).map_err(|e| e.to_string())?;
        Ok(loaded.settings)
    };
    let settings = loaded.settings.clone();
    py.detach(|| {
        serve_blocking(settings, Some(Box::new(read)), |address| {
            say(format_args!("r3router listens on {scheme}://{address}"));
        })
    })
    .map_err(|error| refused(&loaded, &error))
}

/// Reads the sources, does all that `serve` does before it takes its ports, and returns what `check_settings` does.
#[pyfunction]
pub(crate) fn check_start(py: Python<'_>, sources: &str) -> PyResult<String> {
    let loaded = load(sources)?;
    let settings = loaded.settings.clone();
    py.detach(|| check_blocking(settings)).map_err(|error| refused(&loaded, &error))?;
    Ok(report(&loaded))
}

fn refused(loaded: &Loaded, error: &StartError) -> PyErr {
    match error {
        StartError::Setting(_) => SettingsError::new_err(loaded.placed(&error.to_string())),
        StartError::Listen(..) => RunError::new_err(error.to_string()),
    }
}
