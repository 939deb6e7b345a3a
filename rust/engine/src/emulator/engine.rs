//! One played engine: what its routes share.
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use r3router_core::topology::Role;
use tokio::sync::watch;

use super::agent::Agent;
use super::config::FleetConfig;
use super::drive::Drive;
use super::fault::Faults;
use super::pattern::Pattern;
use super::reply::Voice;
use super::scale::Scale;
use crate::model::{EngineConfig, EngineId};

/// Name of a role as SGLang writes its disaggregation mode.
pub(crate) fn mode_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Regular => "null",
    }
}

/// Name of a role as metrics write the engine's type.
pub(crate) fn type_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Regular => "unified",
    }
}

/// An engine of a running fleet.
pub(crate) struct Engine {
    pub(crate) id: EngineId,
    pub(crate) model: EngineConfig,
    pub(crate) address: SocketAddr,
    pub(crate) bootstrap: Option<SocketAddr>,
    pub(crate) url: String,
    pub(crate) drive: Arc<Drive>,
    pub(crate) pattern: Arc<Pattern>,
    pub(crate) scale: Scale,
    pub(crate) faults: Mutex<Faults>,
    pub(crate) agent: Agent,
    pub(crate) weight_version: Mutex<Arc<str>>,
    pub(crate) started_unix: f64,
    pub(crate) shared: Arc<Shared>,
    /// `false` while the port is closed (the `refuse` and `kill` faults).
    pub(crate) listens: watch::Sender<bool>,
    /// Open sockets listen to this; bumped when the process dies, so that they are reset.
    pub(crate) generation: watch::Sender<u64>,
    pub(crate) fast: bool,
    pub(crate) keep_alive: Duration,
    pub(crate) ready: AtomicBool,
}

/// What all engines of a fleet know.
pub(crate) struct Shared {
    pub(crate) config: FleetConfig,
    /// Bootstrap address and engine of every prefill engine.
    pub(crate) bootstraps: Vec<(SocketAddr, EngineId)>,
}

impl Shared {
    /// The prefill engine behind a bootstrap address; `None` when nothing listens there.
    pub(crate) fn prefill_at(&self, host: &str, port: u16) -> Option<EngineId> {
        // A fleet lives on one address; names of this host are taken as that address, as a resolver would.
        let found = self.bootstraps.iter().find(|(address, _)| address.port() == port)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let literal = host.parse().ok().map(|ip: std::net::IpAddr| ip == found.0.ip());
        literal.unwrap_or(true).then_some(found.1)
    }
}

impl Engine {
    /// What replies say alike.
    pub(crate) fn voice(&self) -> Voice {
        Voice {
            version: self.model.version,
            pattern: self.pattern.clone(),
            weight_version: self.weight_version.lock().clone(),
            model: self.shared.config.model_name.clone(),
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    /// The port is closed or opened again.
    pub(crate) fn listen(&self, open: bool) {
        self.listens.send_replace(open);
    }

    /// The model's process has died: its port is closed and its sockets are reset until it is revived.
    pub(crate) fn died(&self) {
        self.listen(false);
        self.reset_sockets();
    }

    /// Every open socket is reset.
    pub(crate) fn reset_sockets(&self) {
        self.generation.send_modify(|g| *g += 1);
    }
}
