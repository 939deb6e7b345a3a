//! Lines on standard output.
use std::fmt::Display;
use std::io::Write;

/// Prints a line for whoever reads it. A reader that has gone, as `head` does, or a closed output is no reason to end.
pub(crate) fn say(line: impl Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}
