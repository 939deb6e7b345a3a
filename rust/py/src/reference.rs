//! The reference pages that are made from the code, in Markdown.
use pyo3::prelude::*;

use crate::errors::RunError;

/// The page of everything that `check` finds.
#[pyfunction]
pub(crate) fn checks_page() -> String {
    r3router_proxy::check::page()
}

/// The page of the admin listener.
#[pyfunction]
pub(crate) fn admin_page() -> String {
    r3router_proxy::admin::page()
}

/// The settings page.
#[pyfunction]
pub(crate) fn settings_page() -> String {
    r3router_proxy::settings::reference_page()
}

/// The page of the flags of sglang-router.
#[pyfunction]
pub(crate) fn flags_page() -> String {
    r3router_proxy::settings::flags_page()
}

/// The errors page.
#[pyfunction]
pub(crate) fn errors_page() -> String {
    r3router_proxy::reference::errors_page()
}

/// The metrics page.
#[pyfunction]
pub(crate) fn metrics_page() -> PyResult<String> {
    r3router_proxy::reference::metrics_page().map_err(|e| RunError::new_err(e.to_string()))
}
