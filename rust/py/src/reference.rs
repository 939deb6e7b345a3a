//! The reference pages that are made from the code, in Markdown.
use pyo3::prelude::*;

/// The settings page.
#[pyfunction]
pub(crate) fn settings_page() -> String {
    r3router_proxy::settings::reference_page()
}

/// The errors page.
#[pyfunction]
pub(crate) fn errors_page() -> String {
    r3router_proxy::reference::errors_page()
}

/// The metrics page.
#[pyfunction]
pub(crate) fn metrics_page() -> String {
    r3router_proxy::reference::metrics_page()
}
