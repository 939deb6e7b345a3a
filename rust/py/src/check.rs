//! `check`: asks every engine that the settings name, and says what does not fit.
use pyo3::prelude::*;
use r3router_proxy::check::{CheckOptions, check};

use crate::errors::{RunError, SettingsError};
use crate::settings::load;

/// Reads the sources (see `check_settings`), asks the engines and returns `{"engines", "findings", "worst", "warnings"}` as JSON.
#[pyfunction]
#[pyo3(signature = (sources, prompt_tokens=None, quick=false))]
pub(crate) fn check_fleet(py: Python<'_>, sources: &str, prompt_tokens: Option<u64>, quick: bool) -> PyResult<String> {
    let loaded = load(sources)?;
    let options = CheckOptions { prompt_tokens, quick };
    py.detach(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| RunError::new_err(e.to_string()))?;
        let mut report =
            runtime.block_on(check(&loaded.settings, options)).map_err(|e| SettingsError::new_err(e.to_string()))?;
        if let Some(report) = report.as_object_mut() {
            report.insert("warnings".to_owned(), loaded.warnings.into());
        }
        Ok(report.to_string())
    })
}
