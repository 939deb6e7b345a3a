//! r3router-proxy
pub mod merge;
pub mod store;
