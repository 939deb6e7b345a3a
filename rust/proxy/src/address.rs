//! One spelling for every worker address: lower-case host, explicit port, no trailing slash, shortest IPv6 literal.
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::HeaderValue;
use r3router_core::error::{Error, Kind, Source};

/// Where an engine listens.
#[derive(Clone, Debug)]
pub struct Address {
    /// Normalised base URL, `http://host:port` or `https://host:port`.
    pub url: Arc<str>,
    /// Host as it stands in the URL: an IPv6 literal keeps its brackets. This is what `bootstrap_host` carries.
    pub host: Arc<str>,
    /// TCP port.
    pub port: u16,
    /// Whether it speaks TLS.
    pub tls: bool,
    /// The literal address, when the host is one; names are resolved at every connect.
    pub literal: Option<SocketAddr>,
    /// Value of the `Host` header.
    pub authority: HeaderValue,
}

impl Address {
    /// Whether the host says which machine it is, and not which of the services behind one address a proxy should choose.
    pub fn is_machine(&self) -> bool {
        self.literal.is_some() || &*self.host == "localhost"
    }

    /// Reads `http://host[:port][/]`, the same with `https`, `host:port` or a bare host. The default port is 80, with `https` 443.
    ///
    /// # Errors
    /// [`Kind::InvalidField`] that names the text and says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let bad = |why: &str| {
            Error::new(Kind::InvalidField, Source::Client, format!("worker url {text:?}: {why}"))
                .advise("give http://HOST:PORT, an IPv6 address in brackets")
        };
        let trimmed = text.trim();
        let (tls, rest) = match trimmed.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => (false, rest),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => (true, rest),
            Some((scheme, _)) => {
                return Err(bad(&format!("scheme {scheme:?} is not supported, engines speak http or https")));
            }
            None => (false, trimmed),
        };
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        if !path.trim_matches('/').is_empty() {
            return Err(bad("a path is not allowed"));
        }
        if authority.contains('@') {
            return Err(bad("ranks and credentials do not belong into the address"));
        }
        if authority.contains(['?', '#']) || authority.chars().any(char::is_whitespace) {
            return Err(bad("it is not an address"));
        }
        let (host, port) = if let Some(v6) = authority.strip_prefix('[') {
            let (inner, after) = v6.split_once(']').ok_or_else(|| bad("the bracket is not closed"))?;
            let ip: std::net::Ipv6Addr = inner.parse().map_err(|_| bad("not an IPv6 address in brackets"))?;
            let port = match after.strip_prefix(':') {
                Some(port) => Some(port),
                None if after.is_empty() => None,
                None => return Err(bad("text after the bracket")),
            };
            (format!("[{ip}]"), port)
        } else {
            let (host, port) = match authority.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            };
            if host.is_empty() {
                return Err(bad("the host is missing"));
            }
            if port.is_some_and(|p| p.contains(':')) {
                return Err(bad("an IPv6 address needs brackets"));
            }
            (host.trim_end_matches('.').to_ascii_lowercase(), port)
        };
        let port = match port {
            None if tls => 443,
            None => 80,
            Some(port) => match port.parse::<u16>() {
                Ok(port) if port > 0 => port,
                _ => return Err(bad("the port is not between 1 and 65535")),
            },
        };
        let literal = host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .parse::<IpAddr>()
            .ok()
            .map(|ip| SocketAddr::new(ip, port));
        let authority = format!("{host}:{port}");
        let value =
            HeaderValue::from_str(&authority).map_err(|_| bad("the host has characters that no header takes"))?;
        let scheme = if tls { "https" } else { "http" };
        let url = format!("{scheme}://{authority}").into();
        Ok(Self { url, host: host.into(), port, tls, literal, authority: value })
    }
}

#[cfg(test)]
mod tests {
    use super::Address;

    fn url(text: &str) -> String {
        Address::parse(text).unwrap().url.to_string()
    }

    #[test]
    fn spellings_of_one_address_are_one_url() {
        for text in ["http://[::1]:9001", "http://[::1]:9001/", "HTTP://[0:0:0:0:0:0:0:1]:9001"] {
            assert_eq!(url(text), "http://[::1]:9001");
        }
        for text in ["http://Engine-1", "http://engine-1:80/", "engine-1:80", "HTTP://ENGINE-1.:80"] {
            assert_eq!(url(text), "http://engine-1:80");
        }
    }

    #[test]
    fn an_engine_behind_tls_is_another_address() {
        assert_eq!(url("HTTPS://Engine-1"), "https://engine-1:443");
        assert_eq!(url("https://engine-1:80"), "https://engine-1:80");
        assert!(Address::parse("https://e").unwrap().tls && !Address::parse("http://e").unwrap().tls);
    }

    #[test]
    fn an_ipv6_host_keeps_its_brackets() {
        let address = Address::parse("http://[2001:DB8::A]:30000").unwrap();
        assert_eq!(&*address.host, "[2001:db8::a]");
        assert_eq!(address.literal.unwrap().port(), 30000);
        assert_eq!(address.authority, "[2001:db8::a]:30000");
    }

    #[test]
    fn what_is_no_address_is_refused_with_its_text() {
        for text in [
            "",
            "ftp://x:1",
            "http://x:0",
            "http://x:99999",
            "http://[::1",
            "http://::1:80",
            "http://x:1/v1",
            "http://x:1@2",
        ] {
            let error = Address::parse(text).unwrap_err();
            assert!(error.message.contains(&format!("{text:?}")), "{}", error.message);
        }
    }
}
