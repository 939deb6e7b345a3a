//! `r3router._core`: registers the binding; each verb lives in a file of its own.
mod load;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_function(wrap_pyfunction!(load::bench_load, m)?)?;
    m.add_function(wrap_pyfunction!(load::bench_backend, m)?)?;
    m.add_function(wrap_pyfunction!(load::bench_relay, m)?)?;
    Ok(())
}
