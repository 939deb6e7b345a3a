//! The data plane of r3router: hyper and tokio around `r3router_core`. The policy is the core's; what stands here moves bytes.
pub mod address;
pub mod admit;
pub mod body;
pub mod clock;
pub mod errors;
pub mod logging;
pub mod merge;
pub mod metrics;
pub mod reference;
pub mod settings;
pub mod store;
pub mod upstream;
pub mod worker;
