//! The pure core of r3router: admission, pairing, JSON splicing and R3 merging as state machines without a clock, sockets or threads.
pub mod admission;
pub mod error;
pub mod load;
pub mod r3;
pub mod sse;
pub mod time;
pub mod topology;
pub mod wire;
