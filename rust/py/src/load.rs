//! `bench_load`, `bench_backend` and `bench_relay`: the benchmark tools of `r3router_engine::load`.
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use r3router_engine::load::{LoadPlan, backend, relay, run_blocking};

use crate::say::say;

/// Runs a load plan (JSON) and returns its report (JSON).
#[pyfunction]
pub(crate) fn bench_load(py: Python<'_>, plan: &str) -> PyResult<String> {
    let plan: LoadPlan = serde_json::from_str(plan).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let report = py.detach(|| run_blocking(&plan)).map_err(|error| PyOSError::new_err(error.to_string()))?;
    serde_json::to_string(&report).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Seconds of `repeats` single calls of base64-simd over a text of `text_bytes` bytes, each into memory of its own: the yardstick of
/// what a payload has to cost at least.
#[pyfunction]
pub(crate) fn bench_decode(py: Python<'_>, text_bytes: usize, repeats: usize) -> PyResult<Vec<f64>> {
    py.detach(|| r3router_engine::load::decode_seconds(text_bytes, repeats)).map_err(PyValueError::new_err)
}

/// Serves prepared replies for benchmarks (JSON list of engines) until the process ends; prints `ready`.
#[pyfunction]
pub(crate) fn bench_backend(py: Python<'_>, plans: &str) -> PyResult<()> {
    let plans = serde_json::from_str(plans).map_err(|error| PyValueError::new_err(error.to_string()))?;
    py.detach(|| backend::serve_blocking(plans, || say("ready"))).map_err(|error| PyOSError::new_err(error.to_string()))
}

/// Serves the yardstick relay until the process ends; prints `ready`.
#[pyfunction]
pub(crate) fn bench_relay(py: Python<'_>, port: u16, prefill: &str, decode: &str) -> PyResult<()> {
    py.detach(|| relay::relay_blocking(port, prefill, decode, || say("ready")))
        .map_err(|error| PyOSError::new_err(error.to_string()))
}
