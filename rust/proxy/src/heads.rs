//! What clients are told whose requests do not come to be: heads that cannot be read or do not come, TLS where none is spoken, and connections
//! that are closed on one side.
use std::time::Duration;

use r3router_core::error::{Error, Kind, Source};

/// Of a client that speaks HTTP where TLS is spoken.
pub(crate) fn in_the_clear() -> Error {
    Error::new(Kind::InvalidRequest, Source::Client, "this port speaks TLS").advise("use https:// in the address")
}

/// The mend of a head that hyper cannot read, by its words for what is wrong.
pub(crate) fn bad_head(error: &hyper::Error) -> Error {
    let why = error.to_string();
    let (status, message, advice) = match &*why {
        w if w.contains("content-length") => (
            400,
            "the request's Content-Length is no number, or there are several",
            "send one Content-Length, the number of the body's bytes, or Transfer-Encoding: chunked in its place",
        ),
        w if w.contains("transfer-encoding") => (
            400,
            "the request's Transfer-Encoding is none that HTTP/1.1 can end",
            "send Transfer-Encoding: chunked and nothing after it, or a Content-Length",
        ),
        w if w.contains("URI too long") => (414, "the request's path is too long", "send what is long in the body"),
        w if w.contains("too large") => {
            (431, "the request has more than 100 headers, or too many bytes of them", "send fewer")
        }
        w if w.contains("header") => {
            (400, "a header of the request cannot be read", "write each header as NAME: VALUE, a name without spaces")
        }
        w if w.contains("URI") => (400, "the request's path cannot be read", "percent-encode what no path may hold"),
        _ => (
            400,
            "the request's head is not HTTP/1.1",
            "send HTTP/1.1: the router speaks no HTTP/2, and TLS only with --tls-cert-path",
        ),
    };
    Error::new(Kind::InvalidRequest, Source::Client, message).with_status(status).advise(advice)
}

/// Of a client that closed its sending side before it was answered.
pub(crate) fn half_closed() -> Error {
    Error::new(
        Kind::ClientGone,
        Source::Client,
        "the sending side was closed before the reply, as by a client that leaves, so the request was ended",
    )
    .advise("keep the whole connection open until the reply is here")
}

/// Of a client that began a head and did not end it within `limit`.
pub(crate) fn half_a_head(bytes: usize, limit: Duration) -> Error {
    let limit = limit.as_secs_f64();
    Error::new(
        Kind::ReadTimeout,
        Source::Client,
        format!("{bytes} bytes of a request's head came in {limit} s, and no end of it"),
    )
    .with_limit(limit, limit)
    .advise("end the head with an empty line, or raise --header-read-timeout-secs")
}
