//! `r3router._core`: registers the binding; each verb lives in a file of its own and holds no logic.
mod check;
mod demo;
mod emulate;
mod errors;
mod load;
mod reference;
mod say;
mod serve;
mod settings;
mod simulate;

use pyo3::prelude::*;

/// The extension module.
#[pymodule(gil_used = false)]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("BUILD", if cfg!(debug_assertions) { "debug" } else { "optimised" })?;
    errors::register(m)?;
    m.add_function(wrap_pyfunction!(settings::settings_schema, m)?)?;
    m.add_function(wrap_pyfunction!(settings::peer_flags, m)?)?;
    m.add_function(wrap_pyfunction!(settings::check_settings, m)?)?;
    m.add_function(wrap_pyfunction!(serve::check_start, m)?)?;
    m.add_function(wrap_pyfunction!(check::check_fleet, m)?)?;
    m.add_function(wrap_pyfunction!(reference::admin_page, m)?)?;
    m.add_function(wrap_pyfunction!(reference::checks_page, m)?)?;
    m.add_function(wrap_pyfunction!(reference::settings_page, m)?)?;
    m.add_function(wrap_pyfunction!(reference::flags_page, m)?)?;
    m.add_function(wrap_pyfunction!(reference::errors_page, m)?)?;
    m.add_function(wrap_pyfunction!(reference::metrics_page, m)?)?;
    m.add_function(wrap_pyfunction!(serve::serve, m)?)?;
    m.add_function(wrap_pyfunction!(simulate::simulate, m)?)?;
    m.add_function(wrap_pyfunction!(simulate::sweep, m)?)?;
    m.add_function(wrap_pyfunction!(emulate::emulate_options, m)?)?;
    m.add_function(wrap_pyfunction!(emulate::emulate_bounds, m)?)?;
    m.add_function(wrap_pyfunction!(emulate::emulate, m)?)?;
    m.add_function(wrap_pyfunction!(demo::demo_options, m)?)?;
    m.add_function(wrap_pyfunction!(demo::demo_bounds, m)?)?;
    m.add_function(wrap_pyfunction!(demo::demo, m)?)?;
    m.add_function(wrap_pyfunction!(load::bench_load, m)?)?;
    m.add_function(wrap_pyfunction!(load::bench_decode, m)?)?;
    m.add_function(wrap_pyfunction!(load::bench_backend, m)?)?;
    m.add_function(wrap_pyfunction!(load::bench_relay, m)?)?;
    warn_of_debug_build(m.py())
}

/// A debug build is many times slower, and a person who measures one should know.
fn warn_of_debug_build(py: Python<'_>) -> PyResult<()> {
    if cfg!(debug_assertions) {
        let category = py.get_type::<pyo3::exceptions::PyRuntimeWarning>();
        let text =
            c"r3router._core is a debug build and slow; build it with `make build` or `maturin develop --profile fast`";
        PyErr::warn(py, &category, text, 1)?;
    }
    Ok(())
}
