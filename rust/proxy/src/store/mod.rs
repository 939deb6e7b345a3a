//! Rows under one hard byte cap, accounted to the byte: in the arena while they wait for their other half (anonymous memory, given back
//! on drop), and as objects that clients hold references to (files on tmpfs, given back by DELETE or in time).
mod arena;
mod draft;
mod home;
mod inherit;
mod keep;
mod object;
mod rows;

pub use arena::{Arena, Charge};
pub use draft::Draft;
pub use inherit::Bequest;
pub use keep::{Absent, Ends, Id, Object, Part, Pin, Place, Store, id_of, id_text};
pub use object::{HEADER, Meta};
pub use rows::{Reader, Rows};

#[cfg(test)]
mod tests;
