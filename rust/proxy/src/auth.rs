//! The key that clients must send. Probes of an orchestrator need none.
use http::{HeaderMap, HeaderValue, header};
use r3router_core::error::{Error, Kind, Source};

use crate::app::App;
use crate::settings::Secret;

/// Paths that are open.
pub const OPEN: [&str; 5] = ["/health", "/liveness", "/readiness", "/ready", "/metrics"];

/// # Errors
/// `Unauthorized` when the router has a key and the request does not carry it.
pub fn check(app: &App, path: &str, headers: &HeaderMap) -> Result<(), Error> {
    let Some(key) = &app.client_key else { return Ok(()) };
    if OPEN.contains(&path) {
        return Ok(());
    }
    bears(headers, key).map_err(|e| e.advise("send Authorization: Bearer KEY with the router's --api-key"))
}

/// # Errors
/// `Unauthorized` when the request does not carry `key`.
pub fn bears(headers: &HeaderMap, key: &HeaderValue) -> Result<(), Error> {
    let sent = headers.get(header::AUTHORIZATION);
    if sent.is_some_and(|sent| same(sent.as_bytes(), key.as_bytes())) {
        return Ok(());
    }
    let what = if sent.is_some() { "the key is wrong" } else { "no key was sent" };
    Err(Error::new(Kind::Unauthorized, Source::Client, what))
}

/// `Bearer key` of a setting, marked so that it is never printed.
///
/// # Errors
/// `InvalidField` when the key cannot stand in a header.
pub fn bearer(key: Option<&Secret>, flag: &str) -> Result<Option<HeaderValue>, Error> {
    let Some(key) = key else { return Ok(None) };
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.reveal())).map_err(|_| {
        Error::new(Kind::InvalidField, Source::Client, format!("{flag} has characters that no header takes"))
    })?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// A key that was sent and is wrong, where a client is told that it may not have something.
pub fn refused(mut error: Error, headers: &HeaderMap) -> Error {
    if headers.contains_key(header::AUTHORIZATION) {
        error.kind = Kind::Forbidden;
    }
    error
}

/// Equality in a time that depends on what was sent alone: it tells neither where the first difference is nor how long the key is.
fn same(sent: &[u8], key: &[u8]) -> bool {
    let mut differs = u8::from(sent.len() != key.len());
    for (at, byte) in sent.iter().enumerate() {
        let other = key.get(at % key.len().max(1)).copied().unwrap_or(0);
        // The optimiser must not see that one difference settles it.
        differs = std::hint::black_box(differs | (byte ^ other));
    }
    differs == 0 && !key.is_empty()
}

#[cfg(test)]
mod tests {
    use super::same;

    #[test]
    fn keys_are_the_same_only_when_they_are() {
        assert!(same(b"Bearer k", b"Bearer k"));
        for other in [&b"Bearer"[..], b"Bearer kk", b"Bearer kBearer k", b"", b"bearer k"] {
            assert!(!same(other, b"Bearer k"));
        }
        assert!(!same(b"", b""));
    }
}
