//! Engines without GPUs: a model of an `SGLang` engine, its emulator, a rollout client, a load generator and the simulator.
pub mod bounds;
pub mod demo;
pub mod emulator;
pub mod load;
pub mod model;
pub mod rollout;
pub mod simulate;
