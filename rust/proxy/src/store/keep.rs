//! Objects that clients hold references to: made, read, deleted, expired. One file each, on tmpfs, under the arena's byte cap.
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use r3router_core::error::{Error, Kind, Source};
use r3router_core::r3::Dtype;

use super::arena::{Arena, Charge};
use super::object::{HEADER, Meta};
use super::rows::{Reader, Rows};

/// How directories of this kind begin, so that those of dead routers are found.
const PREFIX: &str = "r3router-store-";
/// The file in a directory whose lock says that its owner lives. A lock works across pid namespaces that share a tmpfs; a pid does not.
const OWNER: &str = "owner";
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
    expires_ms: u64,
    fetched: AtomicBool,
    charge: Option<Charge>,
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
}

#[derive(Debug, Default)]
struct Table {
    live: HashMap<Id, Arc<Object>>,
    by_expiry: BTreeSet<(u64, Id)>,
    /// What ended, and why.
    gone: HashMap<Id, Absent>,
    gone_order: VecDeque<Id>,
    bytes: u64,
    spilled: u64,
}

struct Inner {
    arena: Arena,
    place: Place,
    table: Mutex<Table>,
    /// The directory and the lock on its owner file, once there is one.
    home: Mutex<Option<Home>>,
    ends: Ends,
    changed: Box<dyn Fn(u64) + Send + Sync>,
}

struct Home {
    dir: PathBuf,
    spill: Option<PathBuf>,
    _owner: File,
    _spill_owner: Option<File>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("place", &self.place).finish_non_exhaustive()
    }
}

/// See the module's text. Clones share it.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
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
    /// Directories that dead routers left in `place` are removed.
    pub fn new(arena: &Arena, place: Place, changed: impl Fn(u64) + Send + Sync + 'static) -> Self {
        let store = Self {
            inner: Arc::new(Inner {
                arena: arena.clone(),
                place,
                table: Mutex::default(),
                home: Mutex::default(),
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
    /// `R3Mismatch` when a number does not fit the dtype, `R3ArenaTooSmall` when there is no room, `R3Unsupported` when the directory
    /// cannot be used.
    pub fn put(&self, meta: Meta, part: &Part) -> Result<Pin, Error> {
        let bytes = HEADER as u64 + meta.bytes();
        // What `part` holds of the arena is given back within the same step, so a move never waits for room that it frees itself.
        let (charge, dir) = {
            let mut home = self.inner.home.lock();
            let home = match &mut *home {
                Some(home) => home,
                none => none.insert(self.settle()?),
            };
            let over = self.inner.arena.used() + bytes > self.inner.arena.cap() + part.rows.held();
            match &home.spill {
                Some(spill) if over => (None, spill.clone()),
                _ => (Some(self.inner.arena.charge_moved(bytes, part.rows.held())?), home.dir.clone()),
            }
        };
        let id: Id = rand::random();
        let path = dir.join(format!("{}.r3", id_text(id)));
        let temporary = dir.join(format!("{}.tmp", id_text(id)));
        let created_ms = now_ms();
        let expires_ms = self.expiry(created_ms);
        let written = write(&temporary, &meta, part, created_ms, expires_ms).and_then(|crc| {
            fs::rename(&temporary, &path).map_err(Fault::System)?;
            Ok(crc)
        });
        let crc32 = match written {
            Ok(crc) => crc,
            Err(fault) => {
                let _ = fs::remove_file(&temporary);
                return Err(self.fault(fault, meta.dtype, meta.bytes(), &dir));
            }
        };
        Ok(self.admit((id, path), meta, crc32, expires_ms, charge))
    }

    /// Whether there is a directory for what the arena has no room for.
    pub fn spills(&self) -> bool {
        self.inner.place.spill.is_some()
    }

    /// This process's own directory.
    pub(super) fn dir(&self) -> Result<PathBuf, Error> {
        let mut home = self.inner.home.lock();
        let home = match &mut *home {
            Some(home) => home,
            none => none.insert(self.settle()?),
        };
        Ok(home.dir.clone())
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

    /// The object of an id.
    ///
    /// # Errors
    /// Why there is none.
    pub fn get(&self, id: Id) -> Result<Arc<Object>, Absent> {
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
        self.get(id)?;
        if !self.remove(id, Absent::Deleted) {
            return Err(Absent::Deleted);
        }
        self.inner.ends.deleted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Removes what has expired. Says how many.
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
        due.len()
    }

    fn remove(&self, id: Id, why: Absent) -> bool {
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

    /// Makes this process's own directory.
    fn settle(&self) -> Result<Home, Error> {
        let name = format!("{PREFIX}{}-{:016x}", std::process::id(), rand::random::<u64>());
        let place = &self.inner.place;
        let (dir, owner) = own(&place.root, &name).map_err(|e| unusable(&place.root, &e))?;
        let spill = match &place.spill {
            Some(root) => Some(own(root, &name).map_err(|e| unusable(root, &e))?),
            None => None,
        };
        let (spill, spill_owner) = spill.unzip();
        Ok(Home { dir, spill, _owner: owner, _spill_owner: spill_owner })
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

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(home) = self.home.get_mut().take() {
            for dir in [Some(home.dir), home.spill].into_iter().flatten() {
                let _ = fs::remove_dir_all(dir);
            }
        }
    }
}

/// Why a file was not written.
pub(super) enum Fault {
    System(io::Error),
    Range(u32),
}

fn unusable(dir: &Path, e: &io::Error) -> Error {
    let message = format!("routing payloads cannot be kept in {}: {e}", dir.display());
    Error::new(Kind::R3Unsupported, Source::Router, message)
        .advise("name a writable directory on tmpfs with --r3-store-dir, or ask for payloads in the reply")
}

/// Makes a directory that only this user can enter, with its locked owner file.
fn own(root: &Path, name: &str) -> io::Result<(PathBuf, File)> {
    let dir = root.join(name);
    fs::DirBuilder::new().mode(0o700).create(&dir)?;
    let mut owner = OpenOptions::new().write(true).create_new(true).mode(0o600).open(dir.join(OWNER))?;
    owner.lock()?;
    writeln!(owner, "{}", std::process::id())?;
    Ok((dir, owner))
}

/// Removes directories whose owner does not hold its lock any more. Says how many.
fn recover(root: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(root) else { return 0 };
    let mut removed = 0;
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // A lock that can be had is one that nobody holds. One that is just being made has no owner file yet and is left alone.
        let Ok(owner) = File::open(entry.path().join(OWNER)) else { continue };
        if owner.try_lock().is_ok() && fs::remove_dir_all(entry.path()).is_ok() {
            removed += 1;
        }
    }
    removed
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
mod tests {
    use super::*;
    use crate::store::Rows;

    fn rows(arena: &Arena, numbers: &[i32]) -> Part {
        let mut rows = Rows::new(arena, Dtype::I32, numbers.len());
        rows.push(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>()).unwrap();
        Part { items: numbers.len() as u64, rows: Arc::new(rows), from: 0 }
    }

    fn meta(dtype: Dtype, rows: u64) -> Meta {
        let texts = || ("w1".to_owned(), "r3~0".to_owned());
        let (weight_version, rid) = texts();
        Meta { dtype, layers: 2, top_k: 2, start: 1, rows, attempt: 3, weight_version, rid }
    }

    struct Lab {
        root: PathBuf,
        arena: Arena,
        held: Arc<AtomicU64>,
    }

    impl Lab {
        fn new(cap: u64) -> Self {
            let root = std::env::temp_dir().join(format!("r3-keep-{:016x}", rand::random::<u64>()));
            fs::create_dir_all(&root).unwrap();
            Self { root, arena: Arena::new(cap), held: Arc::default() }
        }

        fn store(&self, keep: Duration, spill: bool) -> Store {
            let held = Arc::clone(&self.held);
            let spill = spill.then(|| {
                let dir = self.root.join("spill");
                fs::create_dir_all(&dir).unwrap();
                dir
            });
            let place = Place { root: self.root.clone(), spill, keep };
            Store::new(&self.arena, place, move |bytes| held.store(bytes, Ordering::Relaxed))
        }
    }

    impl Drop for Lab {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.root);
        }
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn an_object_has_its_header_its_rows_and_its_checksum() {
        let lab = Lab::new(1 << 20);
        let store = lab.store(HOUR, false);
        let pin = store.put(meta(Dtype::U8, 2), &rows(&lab.arena, &[1, 2, 3, 250, 5, 6, 7, 8])).unwrap();
        let object = Arc::clone(pin.object());
        let bytes = fs::read(&object.path).unwrap();
        assert_eq!(&bytes[HEADER..], [1, 2, 3, 250, 5, 6, 7, 8]);
        assert_eq!(object.crc32, crc32fast::hash(&bytes[HEADER..]));
        assert_eq!(&bytes[40..44], object.crc32.to_le_bytes());
        pin.keep();
        drop(pin);
        assert_eq!(store.get(object.id).unwrap().id, object.id);
        assert_eq!(id_of(&id_text(object.id)), Some(object.id));
        store.delete(object.id).unwrap();
        assert_eq!(store.get(object.id).unwrap_err(), Absent::Deleted);
        assert_eq!(store.delete(object.id).unwrap_err(), Absent::Deleted);
        assert_eq!(store.get(7).unwrap_err(), Absent::Unknown);
        assert!(!object.path.exists());
    }

    #[test]
    fn numbers_that_do_not_fit_the_models_dtype_are_an_error_and_leave_nothing() {
        let lab = Lab::new(1 << 20);
        let store = lab.store(HOUR, false);
        for (dtype, n) in [(Dtype::U8, 256), (Dtype::U16, 65_536), (Dtype::U8, -1)] {
            let e = store.put(meta(dtype, 1), &rows(&lab.arena, &[1, 2, n, 4])).unwrap_err();
            assert_eq!((e.kind, e.measured), (Kind::R3Mismatch, Some(f64::from(n as u32))));
        }
        let pin = store.put(meta(Dtype::I32, 1), &rows(&lab.arena, &[1, 70_000, -1, 4])).unwrap();
        assert_eq!(
            fs::read(&pin.object().path).unwrap()[HEADER + 4..HEADER + 12],
            [0x70, 0x11, 1, 0, 255, 255, 255, 255]
        );
        drop(pin);
        assert_eq!((store.usage(), lab.arena.used()), ((0, 0, 0), 0));
        assert_eq!(store.ends().unsent.load(Ordering::Relaxed), 1, "a pin that was not kept deletes its object");
    }

    #[test]
    fn objects_expire_and_are_counted_by_whether_they_were_read() {
        let lab = Lab::new(1 << 20);
        let store = lab.store(Duration::from_millis(1), false);
        let mut ids = Vec::new();
        for _ in 0..2 {
            let pin = store.put(meta(Dtype::U8, 1), &rows(&lab.arena, &[1, 2, 3, 4])).unwrap();
            pin.keep();
            ids.push(pin.object().id);
            if ids.len() == 1 {
                pin.object().open().unwrap();
            }
        }
        assert_eq!(lab.held.load(Ordering::Relaxed), 2 * (HEADER as u64 + 4));
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(store.get(ids[0]).unwrap_err(), Absent::Expired, "not served after its time even when not swept");
        assert_eq!(store.sweep(), 2);
        let ends = store.ends();
        let counts = [&ends.expired_read, &ends.expired_unread, &ends.deleted].map(|n| n.load(Ordering::Relaxed));
        assert_eq!((counts, lab.held.load(Ordering::Relaxed), lab.arena.used()), ([1, 1, 0], 0, 0));
    }

    #[test]
    fn a_full_arena_refuses_or_spills_and_never_evicts() {
        let lab = Lab::new(20_000);
        let full = |spill: bool| {
            let store = lab.store(HOUR, spill);
            let first = store.put(meta(Dtype::I32, 900), &rows(&lab.arena, &vec![9; 3600])).unwrap();
            let second = store.put(meta(Dtype::I32, 900), &rows(&lab.arena, &vec![9; 3600]));
            assert!(first.object().path.exists());
            (store, first, second)
        };
        let (_store, first, second) = full(false);
        assert_eq!(second.unwrap_err().kind, Kind::R3ArenaTooSmall);
        drop(first);
        let (store, _first, second) = full(true);
        let second = second.unwrap();
        assert!(second.object().path.starts_with(lab.root.join("spill")));
        assert_eq!((store.usage().0, store.usage().2), (2, HEADER as u64 + 14_400));
        assert_eq!(second.object().open().unwrap().metadata().unwrap().len(), HEADER as u64 + 14_400);
    }

    #[test]
    fn the_directory_goes_with_its_store_and_a_dead_ones_with_the_next_start() {
        let lab = Lab::new(1 << 20);
        let count = || fs::read_dir(&lab.root).unwrap().count();
        let living = lab.store(HOUR, false);
        let pin = living.put(meta(Dtype::U8, 1), &rows(&lab.arena, &[1, 2, 3, 4])).unwrap();
        // A router that was killed: its directory is there, its lock is not.
        let dead = lab.root.join(format!("{PREFIX}1-dead"));
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join(OWNER), "1\n").unwrap();
        fs::write(dead.join("a.r3"), "rows").unwrap();
        let other = lab.root.join("r3router-engine-1");
        fs::create_dir(&other).unwrap();
        let next = lab.store(HOUR, false);
        assert!(!dead.exists() && other.exists() && pin.object().path.exists(), "only what is dead and ours goes");
        assert_eq!(next.ends().recovered.load(Ordering::Relaxed), 1);
        drop(pin);
        drop((living, next));
        assert_eq!(count(), 1);
    }
}
