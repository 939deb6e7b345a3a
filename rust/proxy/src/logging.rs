//! Log lines: to standard error, or appended to `r3router.log` in a folder; text or JSON; the level of the settings, which the
//! variable `RUST_LOG` refines.
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use r3router_core::error::{Error, Kind, Source};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

use crate::settings::{Loaded, LogLevel, usable};

/// Name of the file in `--log-dir`. It is opened for append, so that several starts share it and rotation may truncate it.
const FILE: &str = "r3router.log";

/// Sets the level of the process's log.
static LEVEL: OnceLock<Box<dyn Fn(LogLevel) + Send + Sync>> = OnceLock::new();

/// Logs so much from now on.
pub fn set_level(level: LogLevel) {
    if let Some(set) = LEVEL.get() {
        set(level);
    }
}

fn filter(of: LogLevel) -> EnvFilter {
    EnvFilter::builder().with_default_directive(level(of).into()).from_env_lossy()
}

/// Starts logging for the process, with the warnings of the settings as its first lines. A process that logs already is left as it is.
///
/// # Errors
/// When the folder of `--log-dir` or the file in it cannot be written.
pub fn init(loaded: &Loaded) -> Result<(), Error> {
    let settings = &loaded.settings;
    let writer = match &settings.log_dir {
        Some(folder) => {
            look(Path::new(folder))?;
            BoxMakeWriter::new(Mutex::new(open(Path::new(folder)).map_err(|e| unwritable(Path::new(folder), &e))?))
        }
        None => BoxMakeWriter::new(io::stderr),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(settings.log_level))
        .with_writer(writer)
        .with_ansi(settings.log_dir.is_none() && std::io::IsTerminal::is_terminal(&io::stderr()));
    // A second router in one process (tests) finds a subscriber that is already set; its lines go there.
    if settings.log_json {
        let builder = builder.json().flatten_event(true).with_filter_reloading();
        let handle = builder.reload_handle();
        if builder.try_init().is_ok() {
            let _ = LEVEL.set(Box::new(move |level| drop(handle.reload(filter(level)))));
        }
    } else {
        let builder = builder.with_filter_reloading();
        let handle = builder.reload_handle();
        if builder.try_init().is_ok() {
            let _ = LEVEL.set(Box::new(move |level| drop(handle.reload(filter(level)))));
        }
    }
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    Ok(())
}

/// Whether log lines can be written in `folder`. Nothing is made there: who looks may be another user than who serves.
///
/// # Errors
/// When they cannot.
pub fn look(folder: &Path) -> Result<(), Error> {
    let file = folder.join(FILE);
    let looked = if file.exists() {
        OpenOptions::new().append(true).open(&file).map(drop)
    } else {
        // What is missing is made at start, in what is there.
        folder.ancestors().find(|part| part.exists()).map_or(Ok(()), usable)
    };
    looked.map_err(|error| unwritable(folder, &error))
}

fn unwritable(folder: &Path, error: &io::Error) -> Error {
    let message = format!("--log-dir: {} cannot be written: {error}", folder.display());
    Error::new(Kind::InvalidField, Source::Client, message)
        .advise("name a folder that can be written, or leave it out for standard error")
}

fn open(folder: &Path) -> io::Result<File> {
    std::fs::create_dir_all(folder)?;
    OpenOptions::new().create(true).append(true).open(folder.join(FILE))
}

fn level(level: LogLevel) -> tracing::level_filters::LevelFilter {
    use tracing::level_filters::LevelFilter;
    match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::{look, open};
    use std::io::Write;

    #[test]
    fn the_folder_is_made_and_starts_share_the_file() {
        let folder = std::env::temp_dir().join(format!("r3router-log-{}", std::process::id()));
        for line in ["a\n", "b\n"] {
            open(&folder).unwrap().write_all(line.as_bytes()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(folder.join("r3router.log")).unwrap(), "a\nb\n");
        assert!(look(&folder).is_ok());
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(look(&folder.join("deep/er")).is_ok());
        assert!(!folder.exists(), "a look made a folder");
        let error = look(std::path::Path::new("/dev/null/logs")).expect_err("a file is no folder");
        assert!(error.message.starts_with("--log-dir: /dev/null/logs cannot be written"), "{error}");
    }
}
