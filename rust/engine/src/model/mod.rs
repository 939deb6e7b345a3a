//! A deterministic model of SGLang engines, prefill, decode and regular. It has no clock, no sockets and no threads: the
//! emulator runs it on (scaled) real time, the simulator in virtual time.
//!
//! How to drive a [`Fleet`]: hand it what happens with [`Fleet::step`], sleep until [`Fleet::next_timer`], call
//! [`Fleet::advance`], and act on the effects. Moments must not go backwards. The rules and their sources are
//! `engine-protocol.md`; section numbers in comments mean that page.
//!
//! ```text
//! Generate ─> HTTP loop ─> scheduler ─> [bootstrap ─> waiting ─> batch ─> inflight]            (prefill)
//!               ^    ^                   [prealloc ─> transfer ─> waiting ─> running]           (decode)
//!   effects <───┘    └── detokenizer <── gather of R3 (stalls the scheduler of all ranks) <── finished
//! ```
mod config;
mod decode;
mod engine;
mod event;
mod fleet;
mod frontend;
mod ingress;
mod load;
mod pace;
mod prefill;
mod prefix;
mod rank;
mod request;
mod stop;
mod timers;

#[cfg(test)]
mod tests;

pub use config::{Compute, EngineConfig, Frontend, Mamba, R3Cost, Transfer, Version};
pub use event::{Ask, Bootstrap, Effect, EngineId, Event, Fault, Finish, Key, PauseMode, R3Rows, Reply, Times};
pub use fleet::Fleet;
pub use load::RankLoad;
pub use pace::Pace;
pub use rank::RankStats;
