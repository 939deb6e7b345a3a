//! The data plane of r3router: hyper and tokio around `r3router_core`.
pub mod merge;
pub mod settings;
pub mod store;
