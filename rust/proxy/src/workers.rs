//! The registered engines: one entry per engine process address, whatever spelling it was named by, and its state from
//! pending to active, failed or removed.
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Mutex, RwLock};
use r3router_core::error::{Error, Kind, Source};
use r3router_core::topology::Role;
use serde_json::{Map, Value};
use tokio::sync::{Notify, watch};

use crate::address::Address;
use crate::probe::Found;
use crate::seldom::Seldom;
use crate::worker::{Key, Worker};

/// What is known of an engine that was just registered.
const NOT_ASKED: &str = "not asked yet";
/// Engines that an error tells of one by one.
const EXPLAINED: usize = 4;
/// Characters of what each of them last met.
const EXPLAINED_CHARS: usize = 160;

/// Where an entry stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not answering yet.
    Pending,
    /// In choice.
    Active,
    /// Was active, does not answer now; it is looked at until it comes back.
    Down,
    /// It is in the wrong mode, wants a key, is another one under a second name, or did not come up in time. It is looked at from time to
    /// time; registering it again starts anew.
    Failed,
    /// Deleted.
    Removed,
}

impl Phase {
    /// The name that the API shows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Active => "active",
            Self::Down => "down",
            Self::Failed => "failed",
            Self::Removed => "removed",
        }
    }
}

/// What a registration says.
#[derive(Clone, Debug)]
pub struct Registration {
    /// Where it listens.
    pub address: Address,
    /// The URL as it was written, without a trailing slash; lists show it.
    pub shown: Arc<str>,
    /// What it does.
    pub role: Role,
    /// Port of its bootstrap server, when named.
    pub bootstrap_port: Option<u16>,
    /// `Bearer key` of its own.
    pub key: Key,
    /// Whether it is health-checked.
    pub health_checks: bool,
    /// `model_id`, `labels`, `priority`, `cost`: kept and shown, no decision uses them.
    pub extra: Map<String, Value>,
    /// Whether settings or discovery name it. Otherwise somebody registered it, and only a router's memory has it.
    pub named: bool,
}

/// Which ranks a person took out of choice. It outlives the engine's restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// All of them, however many there will be.
    pub all: bool,
    /// Those.
    pub ranks: BTreeSet<u16>,
}

impl Drained {
    /// Whether `rank` is out.
    pub fn holds(&self, rank: u16) -> bool {
        self.all || self.ranks.contains(&rank)
    }

    /// Those of an engine with so many ranks.
    pub fn of(&self, ranks: u16) -> Vec<u16> {
        (0..ranks).filter(|rank| self.holds(*rank)).collect()
    }

    /// Takes one rank of `ranks` out or back in, or all of them.
    pub fn set(&mut self, rank: Option<u16>, drained: bool, ranks: u16) {
        match rank {
            None => *self = Self { all: drained, ranks: BTreeSet::new() },
            Some(rank) => {
                if self.all {
                    *self = Self { all: false, ranks: (0..ranks).collect() };
                }
                if drained {
                    self.ranks.insert(rank)
                } else {
                    self.ranks.remove(&rank)
                };
            }
        }
    }
}

/// What is known of an entry now.
#[derive(Clone, Debug)]
pub struct State {
    /// Where it stands.
    pub phase: Phase,
    /// Why, for a person.
    pub message: String,
    /// The running generation.
    pub worker: Option<Arc<Worker>>,
    /// What the last probe found.
    pub found: Option<Arc<Found>>,
    /// Whether health checks have taken it out of choice.
    pub ejected: bool,
    /// What a person took out of choice.
    pub drained: Drained,
    /// When the phase was entered.
    pub since: Instant,
    /// `model_id`, `labels`, `priority`, `cost` as registered or changed since.
    pub extra: Map<String, Value>,
}

/// A registered engine.
#[derive(Debug)]
pub struct Entry {
    /// Id in the API, for as long as it is registered.
    pub id: String,
    /// What was registered.
    pub registration: Registration,
    /// Told when the keeper should look at once.
    pub look: Arc<Notify>,
    /// The last generation, while anything of it is left.
    pub last: Mutex<Weak<Worker>>,
    /// That it does not answer.
    silence: Seldom,
    /// The address that it was reached at.
    reached: Mutex<Option<SocketAddr>>,
    state: Mutex<State>,
    phase: watch::Sender<Phase>,
}

impl Entry {
    /// What is known now.
    pub fn state(&self) -> State {
        self.state.lock().clone()
    }

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.state.lock().phase
    }

    /// The running generation, when it is active.
    pub fn active(&self) -> Option<Arc<Worker>> {
        let state = self.state.lock();
        state.worker.clone().filter(|_| state.phase == Phase::Active)
    }

    /// Whether it is active and not taken out by health checks.
    pub fn healthy(&self) -> bool {
        let state = self.state.lock();
        state.phase == Phase::Active && !state.ejected
    }

    /// Whether new requests may go to any of its ranks.
    pub fn in_choice(&self) -> bool {
        let state = self.state.lock();
        let ranks = state.found.as_ref().map_or(1, |f| f.ranks);
        state.phase == Phase::Active && !state.ejected && state.drained.of(ranks).len() < usize::from(ranks)
    }

    /// Changes of the phase.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Changes the state, unless the entry was removed: removal is final. Returns whether it was changed.
    pub fn change(&self, change: impl FnOnce(&mut State)) -> bool {
        let mut state = self.state.lock();
        if state.phase == Phase::Removed {
            return false;
        }
        let before = state.clone();
        change(&mut state);
        let after = state.phase;
        if after != before.phase {
            state.since = Instant::now();
        }
        self.log(&before, &state);
        drop(state);
        self.phase.send_replace(after);
        true
    }
}

impl Entry {
    /// One line for each change that a person may look for, and now and then one for what goes on. What takes a worker out of choice is a
    /// warning, and so is its return: who reads warnings only must see both.
    fn log(&self, before: &State, after: &State) {
        let url = &*self.registration.shown;
        let role = role_name(self.registration.role);
        let why = &*after.message;
        let (from, to) = (before.phase.name(), after.phase.name());
        if before.phase != after.phase {
            self.silence.off();
        }
        match (before.phase, after.phase) {
            (Phase::Down, Phase::Down) => {
                if let (true, away) = self.silence.on() {
                    tracing::warn!(worker = url, role, away_s = away.as_secs(), why, "worker is still down");
                }
            }
            (_, Phase::Down) => {
                self.silence.on();
                tracing::warn!(worker = url, role, from, to, why, "worker down; it is looked at until it answers");
            }
            (_, Phase::Failed) if before.phase != Phase::Failed => {
                tracing::warn!(
                    worker = url,
                    role,
                    from,
                    to,
                    why,
                    "worker failed; it is looked at again every --worker-startup-check-interval"
                );
            }
            (Phase::Down, Phase::Active) => {
                let away_s = before.since.elapsed().as_secs_f64();
                tracing::warn!(worker = url, role, from, to, away_s, why, "worker up again, as a new generation");
            }
            (Phase::Pending, Phase::Pending) if after.message != NOT_ASKED => {
                if let (true, waited) = self.silence.on() {
                    tracing::warn!(worker = url, role, waited_s = waited.as_secs(), why, "worker does not answer yet");
                }
            }
            (Phase::Active, Phase::Active) if before.ejected != after.ejected => {
                let what = if after.ejected { "unhealthy, taken out of choice" } else { "back in choice" };
                tracing::warn!(worker = url, role, why, "worker {what}");
            }
            (from_phase, to_phase) if from_phase != to_phase => {
                tracing::info!(worker = url, role, from, to, why, "worker {to}");
            }
            _ => {}
        }
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Registry {
    entries: RwLock<Vec<Arc<Entry>>>,
    /// What is drained of engines that are not registered yet, by their addresses.
    inherited: Mutex<HashMap<Arc<str>, Drained>>,
}

/// A role that both modes share.
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Regular => "regular",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}

impl Registry {
    /// Registers an engine. The same address and role again is the same entry (`false`); a failed one is started anew (`true`).
    ///
    /// # Errors
    /// `WorkerConflict` when the address is registered for another role.
    pub fn add(&self, registration: Registration) -> Result<(Arc<Entry>, bool), Error> {
        let mut entries = self.entries.write();
        if let Some(at) = entries.iter().position(|e| e.registration.address.url == registration.address.url) {
            let Some(entry) = entries.get(at) else { return Err(internal()) };
            if entry.registration.role != registration.role {
                return Err(Error::new(
                    Kind::WorkerConflict,
                    Source::Client,
                    format!("{} is registered as {}", entry.registration.shown, role_name(entry.registration.role)),
                )
                .advise("delete it first, with DELETE /workers/{id}"));
            }
            if entry.phase() != Phase::Failed {
                return Ok((Arc::clone(entry), false));
            }
            let failed = entries.remove(at);
            // Its keeper still looks at it.
            failed.change(|state| state.phase = Phase::Removed);
            failed.look.notify_one();
        }
        let (phase, _) = watch::channel(Phase::Pending);
        let extra = registration.extra.clone();
        let drained = self.inherited.lock().remove(&registration.address.url).unwrap_or_default();
        let entry = Arc::new(Entry {
            id: new_id(),
            registration,
            look: Arc::new(Notify::new()),
            last: Mutex::new(Weak::new()),
            silence: Seldom::default(),
            reached: Mutex::default(),
            state: Mutex::new(State {
                phase: Phase::Pending,
                message: NOT_ASKED.to_owned(),
                worker: None,
                found: None,
                ejected: false,
                drained,
                since: Instant::now(),
                extra,
            }),
            phase,
        });
        entries.push(Arc::clone(&entry));
        Ok((entry, true))
    }

    /// Keeps for the engine at `url`, which is not registered yet, what a person took out of choice at the router before this one.
    pub fn inherit(&self, url: Arc<str>, drained: Drained) {
        self.inherited.lock().insert(url, drained);
    }

    /// Takes an entry out. Its keeper and its generation end; requests that run on it go on.
    pub fn remove(&self, entry: &Arc<Entry>) {
        self.entries.write().retain(|e| !Arc::ptr_eq(e, entry));
        entry.change(|state| {
            state.phase = Phase::Removed;
            state.message = "deleted".to_owned();
        });
        entry.look.notify_one();
    }

    /// Notes that `entry` was reached at `at`, unless another entry was: one process under two names would be booked twice and get every
    /// control call twice. That entry is the error. Of two names for one address at least one must be a machine's own: behind others a proxy
    /// may choose between engines by the name.
    ///
    /// # Errors
    /// The entry that has the address.
    pub fn claim(&self, entry: &Entry, at: SocketAddr) -> Result<(), Arc<Entry>> {
        let at = SocketAddr::new(at.ip().to_canonical(), at.port());
        let machine = |e: &Entry| e.registration.address.is_machine();
        let entries = self.entries.write();
        let has = |e: &&Arc<Entry>| {
            e.id != entry.id
                && *e.reached.lock() == Some(at)
                && matches!(e.phase(), Phase::Active | Phase::Pending)
                && (machine(e) || machine(entry))
        };
        if let Some(other) = entries.iter().find(has) {
            return Err(Arc::clone(other));
        }
        *entry.reached.lock() = Some(at);
        Ok(())
    }

    /// Takes a worker out of choice for slowness, unless it is the last of its role that is in. Says whether it did.
    ///
    /// The other one that it is compared with may go at the same moment for a reason that does not ask here (a refused connect, a person's
    /// drain or removal), and later anyway: [`Registry::reinstate`] mends that.
    pub fn eject(&self, entry: &Entry, why: String) -> bool {
        // One at a time: two that look at each other at once would both go.
        let entries = self.entries.write();
        others_in_choice(&entries, entry)
            && !entry.state().ejected
            && entry.change(|state| {
                state.ejected = true;
                state.message = why;
            })
    }

    /// Brings a worker that is out for slowness back when no other of its role is in choice any more: a slow one is better than none. Says
    /// whether it did.
    pub fn reinstate(&self, entry: &Entry) -> bool {
        if !entry.state().ejected {
            return false;
        }
        let entries = self.entries.write();
        let mut done = false;
        if !others_in_choice(&entries, entry) {
            entry.change(|state| {
                done = state.phase == Phase::Active && state.ejected;
                if done {
                    state.ejected = false;
                    "still slow, and the last of its role that is left".clone_into(&mut state.message);
                }
            });
        }
        done
    }

    /// All entries, in the order of registration.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        self.entries.read().clone()
    }

    /// The entry with this id, or with this address in any spelling.
    pub fn find(&self, id_or_url: &str) -> Option<Arc<Entry>> {
        let entries = self.entries.read();
        if let Some(entry) = entries.iter().find(|e| e.id == id_or_url) {
            return Some(Arc::clone(entry));
        }
        let url = Address::parse(id_or_url).ok()?.url;
        entries.iter().find(|e| e.registration.address.url == url).cloned()
    }

    /// Running generations of every role.
    pub fn active(&self) -> Vec<Arc<Worker>> {
        self.entries.read().iter().filter_map(|e| e.active()).collect()
    }

    /// Says of a role that has engines and none that can serve how many there are, and what each of them last met; what was known before
    /// otherwise.
    pub fn explain(&self, roles: &[Role], error: Error) -> Error {
        let entries = self.all();
        for &role in roles {
            let of: Vec<_> = entries.iter().filter(|e| e.registration.role == role).collect();
            if of.is_empty() || of.iter().any(|e| e.in_choice()) {
                continue;
            }
            let mut message = format!("{} {} registered, 0 healthy", of.len(), role_name(role));
            for (at, entry) in of.iter().take(EXPLAINED).enumerate() {
                let state = entry.state();
                let why: String = state.message.chars().take(EXPLAINED_CHARS).collect();
                let drained = state.phase == Phase::Active && !state.ejected;
                let phase = if drained {
                    "drained"
                } else if state.ejected {
                    "unhealthy"
                } else {
                    state.phase.name()
                };
                let begin = if at == 0 { ": " } else { "; " };
                let _ = write!(message, "{begin}{} is {phase} ({why})", entry.registration.shown);
            }
            if of.len() > EXPLAINED {
                let _ = write!(message, "; and {} more", of.len() - EXPLAINED);
            }
            let mut error = error.advise(
                "see that these engines run and can be reached from the router, which looks at each by itself; GET /workers shows all",
            );
            error.message = message.into();
            (error.limit, error.measured) = (Some(1.0), Some(0.0));
            return error;
        }
        error
    }

    /// Entries of a role that can serve.
    pub fn healthy(&self, role: Role) -> usize {
        self.entries.read().iter().filter(|e| e.registration.role == role && e.in_choice()).count()
    }
}

fn others_in_choice(entries: &[Arc<Entry>], entry: &Entry) -> bool {
    let role = entry.registration.role;
    entries.iter().any(|e| e.id != entry.id && e.registration.role == role && e.in_choice())
}

fn internal() -> Error {
    Error::new(Kind::Internal, Source::Router, "the worker list changed under its lock")
}

/// A random id in the shape of a UUID, version 4.
fn new_id() -> String {
    let bits = rand::random::<u128>();
    let bits = (bits & !(0xf << 76) & !(0x3 << 62)) | (4 << 76) | (2 << 62);
    let hex = format!("{bits:032x}");
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or("");
    format!("{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32))
}

#[cfg(test)]
mod tests;
