//! Which pods are engines, of which role, and where they listen.
use std::net::IpAddr;

use crate::pod::Pod;

/// Pods of a group of nodes carry their number here; only the leader, 0, has an HTTP server.
const LWS_INDEX: &str = "leaderworkerset.sigs.k8s.io/worker-index";

/// What an engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Unsplit.
    Regular,
    /// Prefill.
    Prefill,
    /// Decode.
    Decode,
}

/// Labels that a pod must have, all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector(Vec<(String, String)>);

impl Selector {
    /// Reads `key=value` words; one word may hold several, separated by blanks or commas.
    ///
    /// # Errors
    /// A sentence without subject, e.g. "`app` is not KEY=VALUE".
    pub fn parse<S: AsRef<str>>(words: &[S]) -> Result<Self, String> {
        let mut pairs = Vec::new();
        for word in words.iter().flat_map(|w| w.as_ref().split([' ', ','])).filter(|w| !w.is_empty()) {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("`{word}` is not KEY=VALUE"))?;
            if key.is_empty() || value.contains('=') {
                return Err(format!("`{word}` is not KEY=VALUE"));
            }
            pairs.push((key.to_owned(), value.to_owned()));
        }
        Ok(Self(pairs))
    }

    /// Whether it names no label; such a selector takes no pod.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the pod has all the labels.
    pub fn takes(&self, pod: &Pod) -> bool {
        !self.0.is_empty() && self.0.iter().all(|(k, v)| pod.metadata.labels.get(k) == Some(v))
    }

    /// As the API takes it, where all wanted pods have these labels.
    pub fn query(&self) -> String {
        let pairs: Vec<String> = self.0.iter().map(|(k, v)| format!("{k}={v}")).collect();
        pairs.join(",")
    }
}

/// Which pods are wanted.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Selectors of the roles that are looked for.
    pub roles: Vec<(Role, Selector)>,
    /// Port of the engines' HTTP server.
    pub port: u16,
    /// Annotation with the port of a prefill engine's bootstrap server.
    pub bootstrap_annotation: String,
}

/// Where an engine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Base URL.
    pub url: String,
    /// What it does.
    pub role: Role,
    /// Port of its bootstrap server, when the pod names one.
    pub bootstrap_port: Option<u16>,
}

impl Wanted {
    /// The role of a pod; none when no selector takes it, or when it is a follower in a group of nodes.
    pub fn role(&self, pod: &Pod) -> Option<Role> {
        if pod.metadata.labels.get(LWS_INDEX).is_some_and(|index| index != "0") {
            return None;
        }
        self.roles.iter().find(|(_, selector)| selector.takes(pod)).map(|(role, _)| *role)
    }

    /// The engine in a pod that runs; whether it is ready is another question.
    pub fn engine(&self, pod: &Pod) -> Option<Engine> {
        let role = self.role(pod)?;
        let url = match pod.address()? {
            IpAddr::V4(ip) => format!("http://{ip}:{}", self.port),
            IpAddr::V6(ip) => format!("http://[{ip}]:{}", self.port),
        };
        let port = pod.metadata.annotations.get(&self.bootstrap_annotation).and_then(|p| p.trim().parse().ok());
        Some(Engine { url, role, bootstrap_port: port.filter(|p| *p > 0 && role == Role::Prefill) })
    }

    /// The labels that all wanted pods have, when there is one role; the API then sends no others.
    pub fn query(&self) -> Option<String> {
        match self.roles.as_slice() {
            [(_, selector)] => Some(selector.query()),
            _ => None,
        }
    }
}
