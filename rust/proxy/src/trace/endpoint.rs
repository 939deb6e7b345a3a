//! Where traces go, and in which of OTLP's two ways.
use std::fmt;

use r3router_core::error::{Error, Kind, Source};

use crate::address::Address;

/// The port of OTLP over gRPC.
const GRPC: u16 = 4317;
/// The port of OTLP over HTTP.
const HTTP: u16 = 4318;
/// The path of traces in OTLP over HTTP.
const TRACES: &str = "/v1/traces";

/// How spans are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC.
    Grpc,
    /// A POST of protocol buffers.
    Http,
}

/// A collector.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// How it is spoken to.
    pub protocol: Protocol,
    /// Where it listens.
    pub address: Address,
    /// Path of the POST; `/` with gRPC.
    pub path: String,
}

impl Endpoint {
    /// Reads `HOST[:PORT]`, `http://HOST[:PORT][/PATH]` or the same with `https`. The address says the protocol: one with a path is posted
    /// to, as is one with the port that OTLP has for HTTP, 4318; all others are gRPC, as with the SGLang router. The port without one is
    /// 4317, and that of the scheme when there is a path.
    ///
    /// # Errors
    /// `InvalidField` when it is no such address.
    pub fn parse(given: &str) -> Result<Self, Error> {
        let given = given.trim();
        let (scheme, rest) = given.split_once("://").unwrap_or(("http", given));
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let posted = path.trim_end_matches('/');
        let port = authority.rsplit_once(']').map_or(authority, |(_, after)| after).contains(':');
        let port = if port || !posted.is_empty() { String::new() } else { format!(":{GRPC}") };
        let address = Address::parse(&format!("{scheme}://{authority}{port}")).map_err(|error| {
            let why = error.message.rsplit_once(": ").map_or("", |(_, why)| why);
            Error::new(Kind::InvalidField, Source::Client, format!("{given:?} is no address of a collector: {why}"))
                .advise("give HOST:4317 for gRPC, or http://HOST:4318/v1/traces")
        })?;
        Ok(match posted {
            "" if address.port == HTTP => Self { protocol: Protocol::Http, address, path: TRACES.to_owned() },
            "" => Self { protocol: Protocol::Grpc, address, path: "/".to_owned() },
            _ => Self { protocol: Protocol::Http, address, path: posted.to_owned() },
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.protocol {
            Protocol::Grpc => write!(f, "{} (gRPC)", self.address.url),
            Protocol::Http => write!(f, "{}{}", self.address.url, self.path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Endpoint;

    #[test]
    fn the_address_says_the_protocol() {
        for (given, read) in [
            ("localhost:4317", "http://localhost:4317 (gRPC)"),
            ("collector", "http://collector:4317 (gRPC)"),
            ("http://collector:9999/", "http://collector:9999 (gRPC)"),
            ("https://collector", "https://collector:4317 (gRPC)"),
            ("[::1]", "http://[::1]:4317 (gRPC)"),
            ("[::1]:4318", "http://[::1]:4318/v1/traces"),
            ("collector:4318", "http://collector:4318/v1/traces"),
            ("http://collector:9999/v1/traces", "http://collector:9999/v1/traces"),
            ("https://collector/otlp/v1/traces", "https://collector:443/otlp/v1/traces"),
        ] {
            assert_eq!(Endpoint::parse(given).unwrap().to_string(), read, "{given}");
        }
        for bad in ["", "grpc://collector:4317", "collector:0", "collector:x", "a b:1", "http://u@collector:4317"] {
            let error = Endpoint::parse(bad).unwrap_err();
            assert!(error.message.contains("is no address of a collector"), "{bad}: {error}");
        }
    }
}
