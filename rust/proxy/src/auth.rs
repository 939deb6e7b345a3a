//! The key that clients must send. Probes of an orchestrator need none.
use http::{HeaderMap, HeaderValue, header};
use r3router_core::error::{Error, Kind, Source};

use crate::app::App;
use crate::settings::Secret;

/// The scheme under which keys are sent.
const SCHEME: &[u8] = b"Bearer";

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
    let Some(sent) = headers.get(header::AUTHORIZATION) else {
        return Err(Error::new(Kind::Unauthorized, Source::Client, "no key was sent"));
    };
    let Some(token) = token(sent.as_bytes()) else {
        return Err(Error::new(Kind::Unauthorized, Source::Client, "the authorization is not of the scheme Bearer"));
    };
    match self::token(key.as_bytes()) {
        Some(key) if same(token, key) => Ok(()),
        _ => Err(Error::new(Kind::Unauthorized, Source::Client, "the key is wrong")),
    }
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

/// What follows the scheme `Bearer`, which is written in any case, with one space or more after it (RFC 9110, 11.1 and 11.4).
fn token(authorization: &[u8]) -> Option<&[u8]> {
    let authorization = authorization.trim_ascii();
    let (scheme, rest) = authorization.split_at_checked(SCHEME.len())?;
    let token = rest.trim_ascii_start();
    (scheme.eq_ignore_ascii_case(SCHEME) && token.len() < rest.len()).then_some(token)
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
    use http::{HeaderMap, HeaderValue, header};

    use super::{bearer, bears, same};
    use crate::settings::Secret;

    #[test]
    fn keys_are_the_same_only_when_they_are() {
        assert!(same(b"k", b"k"));
        for other in [&b""[..], b"kk", b"K", b"kBearer k", b"k "] {
            assert!(!same(other, b"k"));
        }
        assert!(!same(b"", b""));
    }

    #[test]
    fn the_scheme_is_read_in_any_case_and_the_key_to_the_letter() {
        let key = bearer(Some(&Secret::new("K3y")), "--api-key").unwrap().unwrap();
        let sent = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_static(text));
            bears(&headers, &key).map_err(|e| e.message.into_owned())
        };
        for good in ["Bearer K3y", "bearer K3y", "BEARER K3y", "Bearer   K3y", " Bearer\tK3y "] {
            assert_eq!(sent(good), Ok(()), "{good:?}");
        }
        for wrong in ["Bearer k3y", "Bearer K3", "Bearer K3yK3y", "Bearer K3y K3y"] {
            assert_eq!(sent(wrong), Err("the key is wrong".to_owned()), "{wrong:?}");
        }
        for other in ["Basic K3y", "K3y", "BearerK3y", "Bearer", "Bearer ", "", "Bea"] {
            assert_eq!(sent(other), Err("the authorization is not of the scheme Bearer".to_owned()), "{other:?}");
        }
        assert_eq!(bears(&HeaderMap::new(), &key).unwrap_err().message, "no key was sent");
    }
}
