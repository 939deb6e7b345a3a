//! The key that clients must send. Probes of an orchestrator need none.
use http::{HeaderMap, header};
use r3router_core::error::{Error, Kind, Source};

use crate::app::App;

/// Paths that are open.
const OPEN: [&str; 5] = ["/health", "/liveness", "/readiness", "/ready", "/metrics"];

/// # Errors
/// `Unauthorized` when the router has a key and the request does not carry it.
pub fn check(app: &App, path: &str, headers: &HeaderMap) -> Result<(), Error> {
    let Some(key) = &app.client_key else { return Ok(()) };
    if OPEN.contains(&path) {
        return Ok(());
    }
    let sent = headers.get(header::AUTHORIZATION);
    if sent.is_some_and(|sent| same(sent.as_bytes(), key.as_bytes())) {
        return Ok(());
    }
    let what = if sent.is_some() { "the key is wrong" } else { "no key was sent" };
    Err(Error::new(Kind::Unauthorized, Source::Client, what)
        .advise("send Authorization: Bearer KEY with the router's --api-key"))
}

/// A key that was sent and is wrong, where a client is told that it may not have something.
pub fn refused(mut error: Error, headers: &HeaderMap) -> Error {
    if headers.contains_key(header::AUTHORIZATION) {
        error.kind = Kind::Forbidden;
    }
    error
}

/// Equality in a time that does not tell where the first difference is.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |diff, (x, y)| diff | (x ^ y)) == 0
}
