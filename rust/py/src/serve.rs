//! `serve`: the router, on threads of its own. The interpreter lock is let go of for its whole life.
use pyo3::prelude::*;
use r3router_proxy::settings::Sources;
use r3router_proxy::{StartError, logging, serve_blocking};

use crate::errors::{RunError, SettingsError};
use crate::settings::load;

/// Reads the sources (see `check_settings`) and serves until SIGTERM or SIGINT; prints the address once it listens.
#[pyfunction]
pub(crate) fn serve(py: Python<'_>, sources: &str) -> PyResult<()> {
    let loaded = load(sources)?;
    logging::init(&loaded).map_err(|e| SettingsError::new_err(e.to_string()))?;
    let scheme = if loaded.settings.tls_cert_path.is_some() { "https" } else { "http" };
    let kept = sources.to_owned();
    let read = move || {
        let loaded = Sources::from_json(&kept).and_then(|s| s.load()).map_err(|e| e.to_string())?;
        Ok(loaded.settings)
    };
    py.detach(|| {
        serve_blocking(loaded.settings, Some(Box::new(read)), |address| {
            println!("r3router listens on {scheme}://{address}");
        })
    })
    .map_err(|error| match error {
        StartError::Setting(_) => SettingsError::new_err(error.to_string()),
        StartError::Listen(..) => RunError::new_err(error.to_string()),
    })
}
