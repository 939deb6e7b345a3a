//! One spelling for every worker address: lower-case host, explicit port, no trailing slash, shortest IPv6 literal.
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
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
            let host = host.trim_end_matches('.').to_ascii_lowercase();
            if host.is_empty() {
                return Err(bad("the host is missing"));
            }
            let host = match by_numbers(&host) {
                None => host,
                Some(Ok(ip)) => ip.to_string(),
                Some(Err(why)) => return Err(bad(why)),
            };
            (host, port)
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

/// The address that the system's resolver makes of a host of numbers (`inet_aton`): one to four of them, decimal, octal or hexadecimal, the last
/// of which fills what is left of the 32 bits. `None` for a name; an error for what ends in a number and is no address, which no resolver should be asked
/// for.
fn by_numbers(host: &str) -> Option<Result<Ipv4Addr, &'static str>> {
    let parts: Vec<&str> = host.split('.').collect();
    let last = parts.last()?;
    let hexadecimal = last.strip_prefix("0x").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit()));
    if !hexadecimal && (last.is_empty() || !last.bytes().all(|b| b.is_ascii_digit())) {
        return None;
    }
    let number = |text: &&str| match (text.strip_prefix("0x"), text.strip_prefix('0')) {
        (Some(""), _) => Some(0),
        (Some(digits), _) => u64::from_str_radix(digits, 16).ok(),
        (None, Some(digits)) if !digits.is_empty() => u64::from_str_radix(digits, 8).ok(),
        _ => text.parse().ok(),
    };
    let numbers: Option<Vec<u64>> = parts.iter().map(number).collect();
    let address = numbers.filter(|numbers| numbers.len() <= 4).and_then(|numbers| {
        let (last, first) = numbers.split_last()?;
        let bits = 32 - 8 * u32::try_from(first.len()).ok()?;
        let whole = first.iter().try_fold(0, |all, part| (*part < 256).then_some(all << 8 | part))?;
        (*last < 1 << bits).then_some(())?;
        u32::try_from(whole << bits | last).ok().map(Ipv4Addr::from_bits)
    });
    Some(address.ok_or("the host is neither a name nor an IPv4 address"))
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
    fn an_address_in_other_numbers_is_the_address_that_it_is() {
        for text in [
            "http://2852039166",
            "http://0xa9fea9fe",
            "http://0xA9FEA9FE.",
            "http://025177524776",
            "http://169.254.43518",
            "http://169.16689662",
            "http://0xa9.0376.169.0xfe",
            "http://169.254.169.254.:80",
        ] {
            assert_eq!(url(text), "http://169.254.169.254:80", "{text}");
            assert!(Address::parse(text).unwrap().literal.is_some(), "{text}");
        }
        assert_eq!(url("http://127.1:5"), "http://127.0.0.1:5");
        assert_eq!(url("http://0:5"), "http://0.0.0.0:5");
        for name in ["engine-1", "1.engine", "0xengine", "10.0.0.1a", "e.0x1g"] {
            assert_eq!(url(&format!("http://{name}:5")), format!("http://{name}:5"));
            assert!(Address::parse(name).unwrap().literal.is_none(), "{name}");
        }
        for none in [
            "http://256.0.0.1",
            "http://4294967296",
            "http://1.2.3.4.5",
            "http://08",
            "http://a.1",
            "http://1..2",
            "http://.",
        ] {
            assert!(Address::parse(none).is_err(), "{none}");
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
