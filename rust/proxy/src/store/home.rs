//! Directories of objects: this process's own, and those that routers before it have left to it.
//!
//! Two files with locks say who needs a directory. `owner` is locked by the process that writes there. `heirs` is locked, shared, by every
//! router that was told of the directory in a restart by overlap. Whoever is done last removes it: one that has neither a writer nor an
//! heir is garbage. Locks work across pid namespaces that share a tmpfs, and end with a killed process; a pid in a file does neither.
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// How directories of this kind begin, so that those of dead routers are found.
const PREFIX: &str = "r3router-store-";
/// Locked by the writer.
const OWNER: &str = "owner";
/// Locked by the heirs.
const HEIRS: &str = "heirs";

/// A directory of this process's own. Dropped, it goes, unless there is an heir.
#[derive(Debug)]
pub(super) struct Own {
    /// Where it is.
    pub(super) path: PathBuf,
    _owner: File,
    heirs: File,
}

impl Own {
    /// Makes a directory that only this user can enter.
    pub(super) fn make(root: &Path, name: &str) -> io::Result<Self> {
        let path = root.join(name);
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        let file = |name: &str| OpenOptions::new().write(true).create_new(true).mode(0o600).open(path.join(name));
        let heirs = file(HEIRS)?;
        // Locked before it has its name, or another router that starts now would take it for a dead one's.
        let unnamed = format!("{OWNER}.new");
        let mut owner = file(&unnamed)?;
        owner.lock()?;
        writeln!(owner, "{}", std::process::id())?;
        fs::rename(path.join(unnamed), path.join(OWNER))?;
        Ok(Self { path, _owner: owner, heirs })
    }

    /// A name that no other has.
    pub(super) fn name() -> String {
        format!("{PREFIX}{}-{:016x}", std::process::id(), rand::random::<u64>())
    }

    /// Whether somebody else has removed it, or what says whose it is.
    pub(super) fn is_lost(&self) -> bool {
        [OWNER, HEIRS].iter().any(|name| is_absent(&self.path.join(name)))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if self.heirs.try_lock().is_ok() {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// A directory that a router before this one writes, or wrote. Dropped, it goes, unless somebody else needs it.
#[derive(Debug)]
pub(super) struct Estate {
    /// Where it is.
    pub(super) path: PathBuf,
    /// Whether it is a spill directory: its bytes are not the arena's.
    pub(super) spilled: bool,
    /// Whether all was read that its writer has left.
    pub(super) settled: bool,
    owner: File,
    heirs: File,
}

impl Estate {
    /// Takes a share in a directory.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn open(path: PathBuf, spilled: bool) -> io::Result<Self> {
        let ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        if !ours || !path.is_absolute() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no router's directory"));
        }
        let (owner, heirs) = (File::open(path.join(OWNER))?, File::open(path.join(HEIRS))?);
        heirs.lock_shared()?;
        if is_absent(&path.join(HEIRS)) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Self { path, spilled, settled: false, owner, heirs })
    }

    /// Whether its writer lives.
    pub(super) fn is_written(&self) -> bool {
        let free = self.owner.try_lock_shared().is_ok();
        let _ = self.owner.unlock();
        !free
    }

    /// Removes what is half written, once nobody will go on with it.
    pub(super) fn tidy(&self) {
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|e| e == "tmp") {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

impl Drop for Estate {
    fn drop(&mut self) {
        if !self.is_written() && self.heirs.try_lock().is_ok() {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Removes directories that nobody needs any more. Says how many.
pub(super) fn recover(root: &Path) -> u64 {
    let mut removed = 0;
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // One that is just being made has no owner file yet and is left alone.
        let Ok(owner) = File::open(entry.path().join(OWNER)) else { continue };
        let unshared = match File::open(entry.path().join(HEIRS)) {
            Ok(heirs) => heirs.try_lock().is_ok(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if unshared && owner.try_lock().is_ok() && fs::remove_dir_all(entry.path()).is_ok() {
            removed += 1;
        }
    }
    removed
}

/// Whether there is nothing at `path`, for certain.
pub(super) fn is_absent(path: &Path) -> bool {
    fs::symlink_metadata(path)
        .is_err_and(|e| matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory))
}
