//! Objects that clients hold references to: made, read, deleted, expired. One file each, on tmpfs, under the arena's byte cap.
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::Dtype;

use super::arena::{Arena, Charge};
use super::home::{Estate, Own, is_absent, recover};
use super::object::{HEADER, Meta};
use super::rows::{Reader, Rows};

/// Ids that are remembered after their end, so that a late reader is told 410 and not 404.
const REMEMBERED: usize = 1 << 17;
/// Bytes that are written at once.
const TILE: usize = 64 << 10;

/// An id of an object: 128 random bits, so that who has not been told cannot guess.
pub type Id = u128;

/// The id in text, 32 hex digits.
pub fn id_text(id: Id) -> String {
    format!("{id:032x}")
}

/// The id of a text.
pub fn id_of(text: &str) -> Option<Id> {
    let hex = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    hex.then(|| Id::from_str_radix(text, 16).ok()).flatten()
}

/// Where objects lie and for how long.
#[derive(Clone, Debug)]
pub struct Place {
    /// A directory on tmpfs; the store makes its own inside.
    pub root: PathBuf,
    /// Where objects go that the arena has no room for.
    pub spill: Option<PathBuf>,
    /// How long an object is kept.
    pub keep: Duration,
}

/// An object that can be read.
#[derive(Debug)]
pub struct Object {
    /// Its id.
    pub id: Id,
    /// What it holds.
    pub meta: Meta,
    /// CRC-32 of its row bytes.
    pub crc32: u32,
    /// Its file.
    pub path: PathBuf,
    pub(super) expires_ms: u64,
    pub(super) fetched: AtomicBool,
    pub(super) charge: Option<Charge>,
}

impl Object {
    /// Opens its file. It stays readable when the object is deleted meanwhile.
    ///
    /// # Errors
    /// The system's, when the file is gone.
    pub fn open(&self) -> io::Result<File> {
        self.fetched.store(true, Ordering::Relaxed);
        File::open(&self.path)
    }
}

/// Why there is no object of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absent {
    /// There never was one, as far as is known.
    Unknown,
    /// A client deleted it, or its reply was never sent.
    Deleted,
    /// Its time is over.
    Expired,
}

/// Objects by how they ended.
#[derive(Debug, Default)]
pub struct Ends {
    /// Made.
    pub made: AtomicU64,
    /// Deleted by a client.
    pub deleted: AtomicU64,
    /// Expired after they were read over HTTP.
    pub expired_read: AtomicU64,
    /// Expired, never read over HTTP (same-host clients read the file and cannot be seen).
    pub expired_unread: AtomicU64,
    /// Their reply never reached the client.
    pub unsent: AtomicU64,
    /// Written to the spill directory.
    pub spilled: AtomicU64,
    /// Directories of dead routers that were removed at start.
    pub recovered: AtomicU64,
    /// Made by a router before this one, and answered for by this one.
    pub inherited: AtomicU64,
    /// Their file was removed by somebody else: by the other router in a restart by overlap, or by a person.
    pub lost: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) live: HashMap<Id, Arc<Object>>,
    pub(super) by_expiry: BTreeSet<(u64, Id)>,
    /// What ended, and why.
    pub(super) gone: HashMap<Id, Absent>,
    gone_order: VecDeque<Id>,
    pub(super) bytes: u64,
    pub(super) spilled: u64,
}

/// Locks are taken in the order home, estates, table.
pub(super) struct Inner {
    pub(super) arena: Arena,
    pub(super) place: Place,
    pub(super) table: Mutex<Table>,
    pub(super) home: Mutex<Home>,
    pub(super) estates: Mutex<Vec<Estate>>,
    /// Whether another router knows of the directories, so that files may go without this one.
    pub(super) told: AtomicBool,
    pub(super) ends: Ends,
    pub(super) changed: Box<dyn Fn(u64) + Send + Sync>,
}

/// This process's own directories, once there are some.
#[derive(Debug, Default)]
pub(super) struct Home {
    pub(super) now: Option<(Own, Option<Own>)>,
    /// What somebody else has removed, or parts of it: what is left of them goes at the end.
    pub(super) before: Vec<Own>,
    /// Whether it was said that there can be none.
    pub(super) refused: bool,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("place", &self.place).finish_non_exhaustive()
    }
}

/// See the module's text. Clones share it.
#[derive(Clone, Debug)]
pub struct Store {
    pub(super) inner: Arc<Inner>,
}

/// An object that no client knows yet: dropped before [`Pin::keep`], it is deleted.
#[derive(Debug)]
pub struct Pin {
    store: Store,
    object: Arc<Object>,
    kept: AtomicBool,
}

impl Pin {
    /// The object.
    pub fn object(&self) -> &Arc<Object> {
        &self.object
    }

    /// The reply that names it has gone out.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Relaxed) && self.store.remove(self.object.id, Absent::Deleted) {
            self.store.inner.ends.unsent.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Numbers `[from, from + items)` of some rows.
#[derive(Clone, Debug)]
pub struct Part {
    /// The rows.
    pub rows: Arc<Rows>,
    /// First number.
    pub from: u64,
    /// Count of numbers.
    pub items: u64,
}

impl Store {
    /// A store without objects. `changed` is told the bytes of the arena that objects hold whenever they change.
    /// Directories in `place` that no router needs any more are removed.
    pub fn new(arena: &Arena, place: Place, changed: impl Fn(u64) + Send + Sync + 'static) -> Self {
        let store = Self {
            inner: Arc::new(Inner {
                arena: arena.clone(),
                place,
                table: Mutex::default(),
                home: Mutex::default(),
                estates: Mutex::default(),
                told: AtomicBool::new(false),
                ends: Ends::default(),
                changed: Box::new(changed),
            }),
        };
        let roots = [Some(&store.inner.place.root), store.inner.place.spill.as_ref()];
        for root in roots.into_iter().flatten() {
            let found = recover(root);
            store.inner.ends.recovered.fetch_add(found, Ordering::Relaxed);
        }
        store
    }

    /// How objects ended.
    pub fn ends(&self) -> &Ends {
        &self.inner.ends
    }

    /// Objects that can be read, the bytes of the arena that they hold, and the bytes that lie in the spill directory.
    pub fn usage(&self) -> (usize, u64, u64) {
        let table = self.inner.table.lock();
        (table.live.len(), table.bytes, table.spilled)
    }

    /// The arena whose cap objects are under.
    pub fn arena(&self) -> &Arena {
        &self.inner.arena
    }

    /// How long an object is kept.
    pub fn keeps(&self) -> Duration {
        self.inner.place.keep
    }

    /// Makes an object of `part`, whose numbers must fit `meta`.
    ///
    /// # Errors
    /// `R3Mismatch` when a number does not fit the dtype, `R3ArenaTooSmall` when there is no room, `R3StoreFailed` when the directory
    /// cannot be used.
    pub fn put(&self, meta: Meta, part: &Part) -> Result<Pin, Error> {
        let id: Id = rand::random();
        let created_ms = now_ms();
        let expires_ms = self.expiry(created_ms);
        let mut again = true;
        loop {
            let (charge, dir) = self.room(HEADER as u64 + meta.bytes(), part)?;
            let path = dir.join(format!("{}.r3", id_text(id)));
            let temporary = dir.join(format!("{}.tmp", id_text(id)));
            let written = write(&temporary, &meta, part, created_ms, expires_ms).and_then(|crc| {
                fs::rename(&temporary, &path).map_err(Fault::System)?;
                Ok(crc)
            });
            match written {
                Ok(crc32) => return Ok(self.admit((id, path), meta, crc32, expires_ms, charge)),
                // Somebody has removed the directory meanwhile.
                Err(Fault::System(e)) if e.kind() == io::ErrorKind::NotFound && again => again = false,
                Err(fault) => {
                    let _ = fs::remove_file(&temporary);
                    return Err(self.fault(fault, meta.dtype, meta.bytes(), &dir));
                }
            }
        }
    }

    /// The charge for `bytes` of `part`, and the directory for them; without a charge they are spilled. What `part` holds of the arena is
    /// given back within the same step, so a move never waits for room that it frees itself.
    fn room(&self, bytes: u64, part: &Part) -> Result<(Option<Charge>, PathBuf), Error> {
        self.at_home(|dir, spill| {
            let over = self.inner.arena.used() + bytes > self.inner.arena.cap() + part.rows.held();
            match spill {
                Some(spill) if over => Ok((None, spill.path.clone())),
                _ => Ok((Some(self.inner.arena.charge_moved(bytes, part.rows.held())?), dir.path.clone())),
            }
        })?
    }

    /// Whether there is a directory for what the arena has no room for.
    pub fn spills(&self) -> bool {
        self.inner.place.spill.is_some()
    }

    /// This process's own directory.
    pub(super) fn dir(&self) -> Result<PathBuf, Error> {
        self.at_home(|dir, _| dir.path.clone())
    }

    /// When what is made at `created_ms` expires.
    pub(super) fn expiry(&self, created_ms: u64) -> u64 {
        created_ms + u64::try_from(self.keeps().as_millis()).unwrap_or(u64::MAX / 2)
    }

    /// A complete file becomes an object. Without a charge it is a spilled one.
    pub(super) fn admit(
        &self,
        (id, path): (Id, PathBuf),
        meta: Meta,
        crc32: u32,
        expires_ms: u64,
        charge: Option<Charge>,
    ) -> Pin {
        let (spilled, bytes) = (charge.is_none(), HEADER as u64 + meta.bytes());
        let object = Arc::new(Object { id, meta, crc32, path, expires_ms, fetched: AtomicBool::new(false), charge });
        let held = {
            let mut table = self.inner.table.lock();
            table.live.insert(id, Arc::clone(&object));
            table.by_expiry.insert((expires_ms, id));
            *(if spilled { &mut table.spilled } else { &mut table.bytes }) += bytes;
            table.bytes
        };
        self.inner.ends.made.fetch_add(1, Ordering::Relaxed);
        if spilled {
            self.inner.ends.spilled.fetch_add(1, Ordering::Relaxed);
        }
        (self.inner.changed)(held);
        Pin { store: self.clone(), object, kept: AtomicBool::new(false) }
    }

    /// The object of an id, of this router or of one before it.
    ///
    /// # Errors
    /// Why there is none.
    pub fn get(&self, id: Id) -> Result<Arc<Object>, Absent> {
        match self.known(id) {
            Err(Absent::Unknown) if self.inherit(id) => self.known(id),
            known => known,
        }
    }

    /// As [`Store::get`], by what this process has seen.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn known(&self, id: Id) -> Result<Arc<Object>, Absent> {
        let table = self.inner.table.lock();
        match table.live.get(&id) {
            Some(object) if object.expires_ms > now_ms() => Ok(Arc::clone(object)),
            Some(_) => Err(Absent::Expired),
            None => Err(table.gone.get(&id).copied().unwrap_or(Absent::Unknown)),
        }
    }

    /// A client lets an object go.
    ///
    /// # Errors
    /// Why there is none.
    pub fn delete(&self, id: Id) -> Result<(), Absent> {
        // Another router may have been asked before.
        let lost = is_absent(&self.get(id)?.path);
        if !self.remove(id, Absent::Deleted) || lost {
            return Err(Absent::Deleted);
        }
        self.inner.ends.deleted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Removes what has expired, and sees what other routers did. Says how many have expired.
    pub fn sweep(&self) -> usize {
        let now = now_ms();
        let due: Vec<Id> = {
            let table = self.inner.table.lock();
            table.by_expiry.iter().take_while(|(at, _)| *at <= now).map(|(_, id)| *id).collect()
        };
        for id in &due {
            let read = self.inner.table.lock().live.get(id).is_some_and(|o| o.fetched.load(Ordering::Relaxed));
            if self.remove(*id, Absent::Expired) {
                let ends = &self.inner.ends;
                let end = if read { &ends.expired_read } else { &ends.expired_unread };
                end.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.look();
        due.len()
    }

    pub(super) fn remove(&self, id: Id, why: Absent) -> bool {
        let held = {
            let mut table = self.inner.table.lock();
            let Some(object) = table.live.remove(&id) else { return false };
            table.by_expiry.remove(&(object.expires_ms, id));
            // The name goes; whoever has it open or mapped reads on.
            let _ = fs::remove_file(&object.path);
            let bytes = HEADER as u64 + object.meta.bytes();
            let count = if object.charge.is_some() { &mut table.bytes } else { &mut table.spilled };
            *count = count.saturating_sub(bytes);
            table.gone.insert(id, why);
            table.gone_order.push_back(id);
            if table.gone_order.len() > REMEMBERED
                && let Some(oldest) = table.gone_order.pop_front()
            {
                table.gone.remove(&oldest);
            }
            table.bytes
        };
        (self.inner.changed)(held);
        true
    }

    /// `fault` while an object of so many bytes was written.
    pub(super) fn fault(&self, fault: Fault, dtype: Dtype, bytes: u64, dir: &Path) -> Error {
        match fault {
            Fault::System(e) if e.kind() == io::ErrorKind::StorageFull => {
                Error::new(Kind::R3ArenaTooSmall, Source::Router, format!("{} is full: {e}", dir.display()))
                    .with_status(503)
                    .retryable()
                    .with_limit(self.inner.arena.cap() as f64, bytes as f64)
                    .advise("mount a larger tmpfs there (in a pod: emptyDir with medium Memory), or lower --r3-arena-bytes below it")
            }
            Fault::System(e) => unusable(dir, &e),
            Fault::Range(n) => {
                let message = format!("an expert id does not fit {}, the model's dtype", dtype.name());
                let most = if dtype == Dtype::U8 { 255.0 } else { 65_535.0 };
                Error::new(Kind::R3Mismatch, Source::Decode, message)
                    .with_limit(most, f64::from(n))
                    .advise("set --r3-experts to the model's number of experts")
            }
        }
    }
}

/// Why a file was not written.
pub(super) enum Fault {
    System(io::Error),
    Range(u32),
}

pub(super) fn unusable(dir: &Path, e: &io::Error) -> Error {
    let message = format!("routing payloads cannot be kept in {}: {e}", dir.display());
    Error::new(Kind::R3StoreFailed, Source::Router, message)
        .advise("have a writable directory on tmpfs there, or name another one with --r3-store-dir; payloads in the reply need none")
}

pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Writes rows and header; the checksum of the rows.
fn write(path: &Path, meta: &Meta, part: &Part, created_ms: u64, expires_ms: u64) -> Result<u32, Fault> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(Fault::System)?;
    let mut crc = crc32fast::Hasher::new();
    let mut at = HEADER as u64;
    let mut reader = Reader::new(Arc::clone(&part.rows), part.from, part.items);
    let mut tile = vec![0; TILE];
    loop {
        let n = reader.fill_as(meta.dtype, &mut tile).map_err(Fault::Range)?;
        if n == 0 {
            break;
        }
        let bytes = tile.get(..n).unwrap_or_default();
        crc.update(bytes);
        file.write_all_at(bytes, at).map_err(Fault::System)?;
        at += n as u64;
    }
    let crc = crc.finalize();
    file.write_all_at(&meta.header(crc, created_ms, expires_ms), 0).map_err(Fault::System)?;
    Ok(crc)
}

#[cfg(test)]
mod tests;
