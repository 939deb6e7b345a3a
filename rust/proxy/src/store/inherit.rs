//! What a store has to do with others: the router before it, whose objects it answers for, the one after it, which does the same, and
//! whoever removes directories.
//!
//! Objects stay where they are, since clients of this host were told their paths. While both routers live, each sees by the files what the
//! other has made and deleted.
use std::fs::{self, DirBuilder, File};
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use r3router_core::error::Error;

use super::home::{Estate, Own, is_absent};
use super::keep::{Absent, Home, Id, Object, Store, id_of, id_text, unusable};
use super::object::{HEADER, Meta};

/// A directory of objects that another router is told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bequest {
    /// Where it is.
    pub path: PathBuf,
    /// Whether it is a spill directory.
    pub spilled: bool,
}

impl Store {
    /// The directories whose objects this router answers for, for one that is to take over. This process's own is made for that, since it may
    /// make objects until it ends.
    pub fn bequests(&self) -> Vec<Bequest> {
        let inner = &self.inner;
        // Without a directory there is nothing that could be lost.
        let _ = self.dir();
        inner.told.store(true, Ordering::Relaxed);
        let home = inner.home.lock();
        let of = |path: &Path, spilled| Bequest { path: path.to_owned(), spilled };
        let mut all = Vec::new();
        if let Some((dir, spill)) = &home.now {
            all.push(of(&dir.path, false));
            all.extend(spill.iter().map(|spill| of(&spill.path, true)));
        }
        all.extend(inner.estates.lock().iter().map(|estate| of(&estate.path, estate.spilled)));
        all
    }

    /// Answers for the objects of another router from now on.
    pub fn take_over(&self, bequests: Vec<Bequest>) {
        for Bequest { path, spilled } in bequests {
            match Estate::open(path.clone(), spilled) {
                Ok(estate) => self.inner.estates.lock().push(estate),
                Err(error) => {
                    let path = &*path.to_string_lossy();
                    tracing::warn!(%error, path, "references of the router before this one cannot be answered");
                }
            }
        }
        self.look();
    }

    /// Looks whether another router has made an object.
    pub(super) fn inherit(&self, id: Id) -> bool {
        let estates = self.inner.estates.lock();
        let name = format!("{}.r3", id_text(id));
        estates.iter().any(|estate| self.adopt(id, &estate.path.join(&name), estate.spilled))
    }

    fn adopt(&self, id: Id, path: &Path, spilled: bool) -> bool {
        let Some((meta, crc32, expires_ms)) = read(path) else { return false };
        let bytes = HEADER as u64 + meta.bytes();
        let mut table = self.inner.table.lock();
        // Another one was faster, or it was deleted since the file was opened.
        if table.live.contains_key(&id) || table.gone.contains_key(&id) {
            return true;
        }
        let charge = (!spilled).then(|| self.inner.arena.charge_inherited(bytes));
        *(if spilled { &mut table.spilled } else { &mut table.bytes }) += bytes;
        let (fetched, path) = (AtomicBool::new(false), path.to_owned());
        table.live.insert(id, Arc::new(Object { id, meta, crc32, path, expires_ms, fetched, charge }));
        table.by_expiry.insert((expires_ms, id));
        let held = table.bytes;
        drop(table);
        self.inner.ends.inherited.fetch_add(1, Ordering::Relaxed);
        (self.inner.changed)(held);
        true
    }

    /// An object whose file could not be found is none.
    pub fn forget(&self, id: Id) {
        if self.remove(id, Absent::Deleted) {
            self.inner.ends.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sees what others have done to the files.
    pub(super) fn look(&self) {
        let inner = &self.inner;
        {
            let mut home = inner.home.lock();
            if home.is_lost() {
                self.leave(&mut home);
            }
        }
        let mut shared = inner.told.load(Ordering::Relaxed);
        let mut estates = inner.estates.lock();
        for estate in estates.iter_mut().filter(|estate| !estate.settled) {
            // Asked before the files are read: what it has made until its end is among them.
            let written = estate.is_written();
            shared |= written;
            for entry in fs::read_dir(&estate.path).into_iter().flatten().flatten() {
                let path = entry.path();
                let id = path.file_stem().and_then(|stem| id_of(&stem.to_string_lossy()));
                if let Some(id) = id.filter(|_| path.extension().is_some_and(|e| e == "r3"))
                    && matches!(self.known(id), Err(Absent::Unknown))
                {
                    self.adopt(id, &path, estate.spilled);
                }
            }
            if !written {
                estate.tidy();
                estate.settled = true;
            }
        }
        if shared {
            self.forget_absent();
        }
        // Another router may have a share in an empty one: it is let go of, and goes with the last.
        let mut live: Vec<PathBuf> = Vec::new();
        if estates.iter().any(|estate| estate.settled) {
            let table = inner.table.lock();
            live = table.live.values().filter_map(|o| o.path.parent().map(Path::to_owned)).collect();
        }
        estates.retain(|estate| !estate.settled || live.contains(&estate.path));
    }

    /// Forgets objects whose files are gone. Says how many, and their bytes.
    fn forget_absent(&self) -> (usize, u64) {
        let all: Vec<Arc<Object>> = self.inner.table.lock().live.values().cloned().collect();
        let absent: Vec<_> = all.into_iter().filter(|object| is_absent(&object.path)).collect();
        for object in &absent {
            self.forget(object.id);
        }
        (absent.len(), absent.iter().map(|object| HEADER as u64 + object.meta.bytes()).sum())
    }

    /// Does something with this process's own directories, which are made where there are none.
    pub(super) fn at_home<R>(&self, act: impl FnOnce(&Own, Option<&Own>) -> R) -> Result<R, Error> {
        let mut home = self.inner.home.lock();
        if home.is_lost() {
            self.leave(&mut home);
        }
        if home.now.is_none() {
            match self.settle(home.before.is_empty()) {
                Ok(made) => {
                    home.now = Some(made);
                    home.refused = false;
                }
                Err(error) => {
                    // Each request is told; the log says it once.
                    if !std::mem::replace(&mut home.refused, true) {
                        tracing::warn!(%error, "no reference can be given until that is mended");
                    }
                    return Err(error);
                }
            }
        }
        match &home.now {
            Some((dir, spill)) => Ok(act(dir, spill.as_ref())),
            None => Err(unusable(&self.inner.place.root, &std::io::ErrorKind::NotFound.into())),
        }
    }

    /// Makes directories. `silent` says that nobody was told yet that somebody has removed some.
    fn settle(&self, silent: bool) -> Result<(Own, Option<Own>), Error> {
        let (place, name) = (&self.inner.place, Own::name());
        let own = |root: &Path| {
            // The start has seen it.
            if is_absent(root) {
                DirBuilder::new().recursive(true).mode(0o700).create(root).map_err(|e| unusable(root, &e))?;
                if silent {
                    let path = &*root.to_string_lossy();
                    tracing::warn!(
                        path,
                        "the directory for references was removed by somebody else, and is made again"
                    );
                }
            }
            Own::make(root, &name).map_err(|e| unusable(root, &e))
        };
        Ok((own(&place.root)?, place.spill.as_deref().map(own).transpose()?))
    }

    /// Gives up directories that somebody else has removed.
    fn leave(&self, home: &mut Home) {
        let Some((dir, spill)) = home.now.take() else { return };
        let (references, bytes) = self.forget_absent();
        tracing::warn!(
            path = &*dir.path.to_string_lossy(),
            references,
            bytes,
            "the directory of this router's references was removed by somebody else, with what was in it; a new one is made. \
             Keep cleaners of temporary files away from --r3-store-dir and --r3-spill-dir"
        );
        home.before.push(dir);
        home.before.extend(spill);
    }
}

impl Home {
    fn is_lost(&self) -> bool {
        self.now.as_ref().is_some_and(|(dir, spill)| dir.is_lost() || spill.as_ref().is_some_and(Own::is_lost))
    }
}

/// What a complete object's file says of it.
fn read(path: &Path) -> Option<(Meta, u32, u64)> {
    let mut file = File::open(path).ok()?;
    let mut header = [0; HEADER];
    file.read_exact(&mut header).ok()?;
    let found = Meta::read(&header)?;
    let whole = file.metadata().ok()?.len() == (HEADER as u64).checked_add(found.0.bytes())?;
    whole.then_some(found)
}
