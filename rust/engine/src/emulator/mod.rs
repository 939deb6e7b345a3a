//! Plays SGLang engines over HTTP: prefill, decode and regular ones, on top of the model in [`crate::model`] in scaled real time.
//!
//! One process plays a whole fleet. Each engine has a port with the routes of SGLang 0.5.23 (or 0.5.12), each prefill engine a bootstrap
//! port beside it. Two routes are ours: `POST /emulator/fault` takes a [`FaultRequest`], `GET /emulator/truth` says what really
//! happened ([`EngineTruth`]); with the plug-in switch `GET /r3/{id}` serves the rows that a descriptor names.
//!
//! Two deviations from `engine-protocol.md`, both as SGLang's source has them: an engine's 5xx in whole form is the flat object
//! `{"object":"error","message":…,"type":"500","param":null,"code":500}`, not `{"detail":…}`, because the server
//! replaces the framework's handler; and `/v1/loads` of a rank out of range is that object with 400.
mod agent;
mod body;
mod bootstrap;
mod clock;
mod config;
mod drive;
mod engine;
mod fast;
mod fault;
mod generate;
mod introspect;
mod openai;
pub mod pattern;
mod reply;
pub mod request;
mod routes;
mod run;
mod scale;
mod server;
#[cfg(test)]
mod tests;
mod truth;

pub use agent::crc32_of;
pub use clock::now_utc;
pub use config::{EmulateOptions, EngineSetup, FleetConfig, KEEP_ALIVE};
pub use fault::FaultRequest;
pub use reply::output_id;
pub use run::{emulate_blocking, run};
pub use scale::Scale;
pub use server::{EngineAddress, RunningFleet};
pub use truth::{EngineTruth, RankTruth, is_engine_timeout, quantile};
