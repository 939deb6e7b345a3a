//! The reference pages that are made from the code.
use pyo3::prelude::*;

/// The settings page, in Markdown.
#[pyfunction]
pub(crate) fn settings_page() -> String {
    r3router_proxy::settings::reference_page()
}
