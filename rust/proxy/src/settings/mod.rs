//! Every setting of the router, declared once in `table` and read from flags, environment, TOML file and defaults.
//!
//! Precedence is flag > `R3ROUTER_*` variable > TOML file > default. Unknown names are refused with the nearest valid one. Command-line
//! options, the reference page and (later) chart schemas are made from [`rows`], so they cannot drift from what the router reads.
//! Flags of sglang-router that are no settings here are in `peer`, each with what becomes of it.
mod admission;
mod checks;
mod declare;
mod error;
mod export;
mod names;
mod nearest;
mod peer;
mod places;
mod quantity;
mod sense;
mod sources;
mod table;
mod value;

pub use declare::{Arity, Row, Unit};
pub use error::{Origin, SettingsError, SettingsErrors};
pub use export::{reference_page, schema};
pub use names::{
    AllowedHost, Assignment, Cap, DiscoverySource, LogLevel, Policy, PrefillWorker, R3Transport, Secret, WorkerUrl,
};
pub use nearest::nearest;
pub use peer::{Fate, PEER_FLAGS, PeerFlag, flags_page, peer_schema};
pub use places::usable;
pub use quantity::{parse_bytes, parse_duration, show_bytes, show_duration};
pub use sources::{Loaded, Sources};
pub use table::{Settings, rows};

#[cfg(test)]
mod tests;
