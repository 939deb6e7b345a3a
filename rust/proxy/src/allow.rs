//! Which hosts the router connects to as workers. Whoever may register a worker chooses where the router sends its requests and keys, so
//! addresses that hand out credentials of a cloud machine are refused always, link-local ones unless they are listed, and with
//! `--worker-allow` everything that is not listed. Names are checked when they are registered and their addresses at every connect: a name
//! may change what it points to.
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use r3router_core::error::{Error, Kind, Source};

use crate::address::Address;

/// Addresses at which clouds hand out credentials: the large ones share the first; ECS and EKS tasks; Alibaba; Oracle.
const METADATA: [IpAddr; 7] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 23)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23)),
];
/// Names of the same.
const METADATA_NAMES: [&str; 3] = ["metadata", "metadata.google.internal", "instance-data"];

/// One entry of `--worker-allow`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AllowedHost {
    /// Addresses whose first bits are those; a single address has all of its bits.
    Net(IpAddr, u8),
    /// A host by name, or with a leading dot every host below a domain. Lower case.
    Name(String),
}

impl AllowedHost {
    /// Reads `10.0.0.0/8`, `fd00::/8`, `[::1]`, `engine-1`, `*.decode.example` or `.decode.example`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let bare = text.trim().trim_start_matches('[').trim_end_matches(']');
        let (head, bits) = match bare.split_once('/') {
            Some((head, bits)) => (head.trim_end_matches(']'), Some(bits)),
            None => (bare, None),
        };
        if let Ok(ip) = head.parse::<IpAddr>() {
            let most = if ip.is_ipv4() { 32 } else { 128 };
            let bits = match bits {
                None => most,
                Some(bits) => match bits.parse::<u8>() {
                    Ok(bits) if bits <= most => bits,
                    _ => return Err(format!("`{text}` has no prefix length from 0 to {most}")),
                },
            };
            let net = masked(ip, bits);
            if net != ip {
                return Err(format!("`{text}` has bits beyond its prefix; did you mean {net}/{bits}?"));
            }
            return Ok(Self::Net(ip, bits));
        }
        let name = bare.strip_prefix('*').unwrap_or(bare).to_ascii_lowercase();
        let plain = name.strip_prefix('.').unwrap_or(&name);
        let letters = |label: &str| {
            !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        let star = bare.starts_with('*') && !name.starts_with('.');
        // Digits and dots alone are an address that is written wrongly, and would never match as a name.
        let digits = plain.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        if bits.is_some() || star || digits || !plain.split('.').all(letters) {
            return Err(format!(
                "`{text}` is neither a host, nor a *.domain, nor an address, nor a network such as 10.0.0.0/8"
            ));
        }
        Ok(Self::Name(name))
    }

    fn holds(&self, ip: IpAddr) -> bool {
        matches!(self, Self::Net(net, bits) if net.is_ipv4() == ip.is_ipv4() && masked(ip, *bits) == *net)
    }

    fn names(&self, host: &str) -> bool {
        match self {
            Self::Name(name) if name.starts_with('.') => host.ends_with(name.as_str()),
            Self::Name(name) => host == name,
            Self::Net(..) => false,
        }
    }
}

impl fmt::Display for AllowedHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Net(ip, bits) if *bits == if ip.is_ipv4() { 32 } else { 128 } => ip.fmt(f),
            Self::Net(ip, bits) => write!(f, "{ip}/{bits}"),
            Self::Name(name) if name.starts_with('.') => write!(f, "*{name}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// `ip` with all bits after the first `bits` cleared.
fn masked(ip: IpAddr, bits: u8) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits.min(32))).unwrap_or(0);
            Ipv4Addr::from_bits(ip.to_bits() & mask).into()
        }
        IpAddr::V6(ip) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits.min(128))).unwrap_or(0);
            Ipv6Addr::from_bits(ip.to_bits() & mask).into()
        }
    }
}

/// The IPv4 address that an IPv6 one stands for, mapped or behind NAT64; else itself.
fn plain(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) if v6.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0] => {
            Ipv4Addr::from_bits((v6.to_bits() & u128::from(u32::MAX)) as u32).into()
        }
        other => other,
    }
}

/// See the module's text. The default allows what is neither metadata nor link-local.
#[derive(Clone, Debug, Default)]
pub struct Allow(Vec<AllowedHost>);

impl Allow {
    /// With the entries of `--worker-allow`.
    pub fn new(listed: &[AllowedHost]) -> Self {
        Self(listed.to_vec())
    }

    /// Checks what can be known without asking for a name's addresses.
    ///
    /// # Errors
    /// `Forbidden` with the reason.
    pub fn check(&self, address: &Address) -> Result<(), Error> {
        let refused = |why: String| Err(Self::refusal(address, &why));
        if let Some(literal) = address.literal {
            return self.address(literal.ip()).or_else(refused);
        }
        if METADATA_NAMES.contains(&&*address.host) {
            return refused(METADATA_REASON.to_owned());
        }
        let nets = self.0.iter().any(|a| matches!(a, AllowedHost::Net(..)));
        if self.0.is_empty() || nets || self.named(&address.host) {
            // With networks in the list, the name's addresses decide, at every connect.
            return Ok(());
        }
        refused(format!("the host {} is not in --worker-allow", address.host))
    }

    fn named(&self, host: &str) -> bool {
        self.0.iter().any(|a| a.names(host))
    }

    fn address(&self, ip: IpAddr) -> Result<(), String> {
        let ip = plain(ip);
        if METADATA.contains(&ip) {
            return Err(METADATA_REASON.to_owned());
        }
        let listed = self.0.iter().any(|a| a.holds(ip));
        let (link_local, group) = match ip {
            IpAddr::V4(v4) => (v4.is_link_local(), v4.is_multicast() || v4.is_broadcast()),
            IpAddr::V6(v6) => (v6.is_unicast_link_local(), v6.is_multicast()),
        };
        if group {
            return Err(format!("{ip} is no address of one host"));
        }
        if link_local && !listed {
            return Err(format!("{ip} is link-local, where machines keep services of their own"));
        }
        if self.0.is_empty() || listed {
            return Ok(());
        }
        Err(format!("{ip} is not in --worker-allow"))
    }

    /// Checks what a name points to now. Every connect does so again: a name may change what it points to.
    ///
    /// # Errors
    /// As [`Allow::check`], when it points to nothing that may be connected to.
    pub fn resolved(&self, address: &Address, found: impl Iterator<Item = SocketAddr>) -> Result<(), Error> {
        match self.pick(&address.host, found) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(Self::refusal(address, &error.to_string()))
            }
            _ => Ok(()),
        }
    }

    fn refusal(address: &Address, why: &str) -> Error {
        Error::new(Kind::WorkerRefused, Source::Client, format!("worker {}: {why}", address.url))
            .advise("name an engine, or allow the host with --worker-allow HOST, *.DOMAIN, ADDRESS or NETWORK/BITS")
    }

    /// The addresses of `host` that may be connected to.
    ///
    /// # Errors
    /// When there are none, with the reason of the last.
    pub fn pick(&self, host: &str, found: impl Iterator<Item = SocketAddr>) -> io::Result<Vec<SocketAddr>> {
        // A listed name may point anywhere but to what no worker is.
        let by_name = self.named(host);
        let every = Self::default();
        let rules = if by_name { &every } else { self };
        let mut why = None;
        let picked: Vec<SocketAddr> = found
            .filter(|at| match rules.address(at.ip()) {
                Ok(()) => true,
                Err(reason) => {
                    why = Some(reason);
                    false
                }
            })
            .collect();
        match (picked.is_empty(), why) {
            (true, Some(why)) => Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("refused: {why}"))),
            (true, None) => Err(io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"))),
            (false, _) => Ok(picked),
        }
    }
}

const METADATA_REASON: &str = "it is where clouds hand out a machine's credentials, which is never a worker";

#[cfg(test)]
mod tests {
    use super::{Allow, AllowedHost};
    use crate::address::Address;

    fn allow(listed: &[&str]) -> Allow {
        Allow::new(&listed.iter().map(|t| AllowedHost::parse(t).unwrap()).collect::<Vec<_>>())
    }

    fn check(allow: &Allow, url: &str) -> Result<(), String> {
        allow.check(&Address::parse(url).unwrap()).map_err(|e| e.message.into_owned())
    }

    #[test]
    fn metadata_and_link_local_are_refused_in_every_spelling() {
        let any = allow(&[]);
        for url in [
            "http://169.254.169.254",
            "http://169.254.170.2:80",
            "http://[fd00:ec2::254]:80",
            "http://100.100.100.200",
            "http://[::ffff:169.254.169.254]:80",
            "http://[64:ff9b::a9fe:a9fe]:80",
            "http://2852039166",
            "http://0xa9fea9fe",
            "http://169.254.43518:80",
            "http://169.254.169.254.:80",
            "http://Metadata.Google.Internal",
            "http://metadata.google.internal.:80",
            "http://metadata",
        ] {
            assert!(check(&any, url).unwrap_err().contains("credentials"), "{url}");
            assert!(
                check(&allow(&["0.0.0.0/0", "::/0", "metadata.google.internal", "metadata"]), url).is_err(),
                "{url}"
            );
        }
        for url in ["http://169.254.1.1:30000", "http://[fe80::1]:30000", "http://[::ffff:169.254.1.1]:1"] {
            assert!(check(&any, url).unwrap_err().contains("link-local"), "{url}");
        }
        assert!(check(&allow(&["169.254.1.0/24"]), "http://169.254.1.1:30000").is_ok());
        for url in ["http://224.0.0.1:1", "http://255.255.255.255:1", "http://[ff02::1]:1"] {
            assert!(check(&any, url).unwrap_err().contains("no address of one host"), "{url}");
        }
        for url in ["http://10.0.0.1:30000", "http://127.0.0.1:1", "http://[2001:db8::a]:1", "http://engine-1"] {
            assert!(check(&any, url).is_ok(), "{url}");
        }
    }

    #[test]
    fn with_a_list_only_what_is_on_it_is_a_worker() {
        let list = allow(&["10.1.0.0/16", "fd00::/8", "192.0.2.7", "engine-1", "*.decode.example"]);
        for url in [
            "http://10.1.255.1:1",
            "http://[fd12::1]:1",
            "http://192.0.2.7:1",
            "http://engine-1:1",
            "http://ENGINE-1.",
            "http://a.decode.example:1",
            "http://[::ffff:10.1.2.3]:1",
        ] {
            assert!(check(&list, url).is_ok(), "{url}");
        }
        for url in ["http://10.2.0.1:1", "http://[fe00::1]:1", "http://192.0.2.8:1"] {
            assert!(check(&list, url).unwrap_err().contains("--worker-allow"), "{url}");
        }
        // Names without an entry wait for their addresses, since the list has networks; without networks they are refused at once.
        assert!(check(&list, "http://other:1").is_ok());
        let names = allow(&["engine-1", ".decode.example"]);
        for url in ["http://other:1", "http://decode.example:1", "http://xdecode.example:1", "http://10.1.0.1:1"] {
            assert!(check(&names, url).unwrap_err().contains("--worker-allow"), "{url}");
        }
    }

    #[test]
    fn addresses_of_names_are_picked_by_the_same_rules() {
        let at = |text: &str| vec![text.parse().unwrap()].into_iter();
        let list = allow(&["10.0.0.0/8", "engine-1"]);
        assert_eq!(list.pick("other", at("10.1.1.1:5")).unwrap().len(), 1);
        assert!(
            list.pick("other", at("192.0.2.1:5"))
                .unwrap_err()
                .to_string()
                .contains("192.0.2.1 is not in --worker-allow")
        );
        assert!(list.pick("engine-1", at("192.0.2.1:5")).is_ok(), "a listed name may point anywhere");
        let error = list.pick("engine-1", at("169.254.169.254:80")).unwrap_err();
        assert!(error.to_string().contains("credentials"), "{error}");
        let name = Address::parse("http://engine-1.example:80").unwrap();
        for metadata in ["169.254.169.254:80", "[::ffff:169.254.169.254]:80", "[fd00:ec2::254]:80"] {
            let error = allow(&[]).resolved(&name, at(metadata)).unwrap_err();
            assert_eq!(error.kind, r3router_core::error::Kind::WorkerRefused);
            assert!(error.message.starts_with("worker http://engine-1.example:80: refused: it is where"), "{error}");
        }
        assert!(allow(&[]).resolved(&name, at("192.0.2.1:80")).is_ok());
        assert!(allow(&[]).resolved(&name, std::iter::empty()).is_ok(), "it may get an address yet");
        let both = [at("169.254.169.254:80").next().unwrap(), at("10.0.0.1:80").next().unwrap()];
        assert_eq!(list.pick("other", both.into_iter()).unwrap(), [both[1]]);
        assert!(list.pick("other", std::iter::empty()).unwrap_err().to_string().contains("no address"));
    }

    #[test]
    fn entries_read_back_and_wrong_ones_are_refused() {
        for text in ["10.0.0.0/8", "192.0.2.1", "fd00::/8", "::1", "engine-1", "*.a.example", "a_b.c"] {
            assert_eq!(AllowedHost::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(AllowedHost::parse("[::1]").unwrap().to_string(), "::1");
        assert_eq!(AllowedHost::parse(".A.Example").unwrap().to_string(), "*.a.example");
        for (text, why) in [
            ("10.0.0.1/8", "did you mean 10.0.0.0/8?"),
            ("10.0.0.0/33", "prefix length from 0 to 32"),
            ("10.0.0", "neither"),
            ("a/8", "neither"),
            ("*a", "neither"),
            ("http://a", "neither"),
            ("", "neither"),
            ("a b", "neither"),
            ("a..b", "neither"),
        ] {
            assert!(AllowedHost::parse(text).unwrap_err().contains(why), "{text}");
        }
    }
}
