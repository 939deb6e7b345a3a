//! The exception tree: `R3RouterError` over `SettingsError` (what was written is wrong) and `RunError` (what was started failed).
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(r3router._core, R3RouterError, PyException, "Anything that r3router refuses or fails at.");
create_exception!(
    r3router._core,
    SettingsError,
    R3RouterError,
    "Settings are wrong; one line for each, naming flag, variable or file."
);
create_exception!(r3router._core, RunError, R3RouterError, "Something that was started failed, e.g. a port is taken.");

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("R3RouterError", m.py().get_type::<R3RouterError>())?;
    m.add("SettingsError", m.py().get_type::<SettingsError>())?;
    m.add("RunError", m.py().get_type::<RunError>())
}
