//! Whether the directories of the settings can be used, seen at start and not by the first request that needs them.
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use super::error::{Origin, SettingsError};
use super::names::R3Transport;
use super::quantity::show_bytes;
use super::table::Settings;

/// Appends directories that cannot be used to `errors`. What is wrong with the default directory is a warning: a fleet without references
/// never uses it.
pub(super) fn check(
    s: &Settings,
    origins: &BTreeMap<&'static str, Origin>,
    errors: &mut Vec<SettingsError>,
    warnings: &mut Vec<String>,
) {
    let wanted = origins.contains_key("r3_store_dir") || s.r3_transport == R3Transport::Ref;
    let mut wrong = |name: &'static str, message: String, advice: &str, serious: bool| {
        if serious {
            let origin = origins.get(name).cloned().unwrap_or(Origin::Default);
            errors.push(SettingsError { origin, name: name.to_owned(), message, advice: advice.to_owned() });
        } else {
            warnings.push(format!("--{}: {message}; {advice}", name.replace('_', "-")));
        }
    };
    let store = Path::new(&s.r3_store_dir);
    if let Err(e) = usable(store) {
        let message = format!("routing payloads cannot be kept in {}: {e}", store.display());
        wrong("r3_store_dir", message, "name a directory on tmpfs that exists and can be written", wanted);
    } else if let Ok((all, free)) = room(store) {
        let cap = s.r3_arena_bytes;
        let advice = "mount a larger tmpfs there (in a pod: emptyDir with medium Memory), or lower --r3-arena-bytes";
        if all < cap {
            let message = format!(
                "{} holds {} in all, less than the {} of --r3-arena-bytes",
                store.display(),
                show_bytes(all),
                show_bytes(cap)
            );
            wrong("r3_store_dir", message, advice, wanted);
        } else if free < cap {
            // Others may let theirs go, and what a dead router left is removed at start.
            let message = format!(
                "{} has {} free now, less than the {} of --r3-arena-bytes",
                store.display(),
                show_bytes(free),
                show_bytes(cap)
            );
            wrong("r3_store_dir", message, advice, false);
        }
    }
    if let Some(spill) = &s.r3_spill_dir
        && let Err(e) = usable(Path::new(spill))
    {
        let message = format!("routing payloads cannot be kept in {spill}: {e}");
        wrong("r3_spill_dir", message, "name a directory that exists and can be written, or leave it out", true);
    }
}

/// Whether something can be made in `dir`: makes and removes a directory, as the store will.
///
/// # Errors
/// The system's, when it cannot.
pub fn usable(dir: &Path) -> io::Result<()> {
    if !fs::metadata(dir)?.is_dir() {
        return Err(io::Error::new(io::ErrorKind::NotADirectory, "it is not a directory"));
    }
    let trial = dir.join(format!("r3router-trial-{}-{:016x}", std::process::id(), rand::random::<u64>()));
    fs::create_dir(&trial)?;
    fs::remove_dir(&trial)
}

/// Bytes in all, and bytes free.
fn room(dir: &Path) -> io::Result<(u64, u64)> {
    let found = rustix::fs::statvfs(dir)?;
    Ok((found.f_blocks.saturating_mul(found.f_frsize), found.f_bavail.saturating_mul(found.f_frsize)))
}

#[cfg(test)]
mod tests {
    use crate::settings::Sources;

    fn load(flags: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let sources = flags.iter().fold(Sources::default(), |s, (name, value)| s.flag(*name, *value));
        sources.load().map(|l| l.warnings).map_err(|e| e.to_string())
    }

    #[test]
    fn directories_that_cannot_be_used_stop_the_start() {
        let folder = std::env::temp_dir().join(format!("r3router-places-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("file");
        std::fs::write(&file, "").unwrap();
        let (good, file) = (folder.to_str().unwrap(), file.to_str().unwrap());
        for name in ["r3_store_dir", "r3_spill_dir"] {
            for bad in ["/nowhere/at/all", "/proc/1", file] {
                let error = load(&[(name, bad)]).unwrap_err();
                assert!(error.contains(&name.replace('_', "-")) && error.contains(bad), "{error}");
            }
            assert!(load(&[(name, good), ("r3_arena_bytes", "1MiB")]).is_ok());
        }
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(left, ["file"], "the trial directory is removed");
        let error = load(&[("r3_store_dir", good), ("r3_arena_bytes", "4000TiB")]).unwrap_err();
        assert!(error.contains("4000TiB") && error.contains("--r3-arena-bytes"), "{error}");
        // Nobody has asked for references and the directory is the default one: only told.
        let warnings = load(&[("r3_arena_bytes", "4000TiB")]).unwrap();
        assert!(warnings.iter().any(|w| w.starts_with("--r3-store-dir") && w.contains("4000TiB")), "{warnings:?}");
        assert!(load(&[("r3_arena_bytes", "4000TiB"), ("r3_transport", "ref")]).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
