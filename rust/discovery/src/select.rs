//! Which objects are engines, of which role, and where they listen.
use crate::object::Metadata;

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

    /// Whether an object has all the labels.
    pub fn takes(&self, metadata: &Metadata) -> bool {
        !self.0.is_empty() && self.0.iter().all(|(k, v)| metadata.labels.get(k) == Some(v))
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

/// The base URL of a host: a name, or an address of either kind.
pub(crate) fn url(host: &str, port: u16) -> String {
    if host.contains(':') { format!("http://[{host}]:{port}") } else { format!("http://{host}:{port}") }
}

impl Wanted {
    /// The role of what has these labels; none when no selector takes it.
    pub fn role(&self, metadata: &Metadata) -> Option<Role> {
        self.roles.iter().find(|(_, selector)| selector.takes(metadata)).map(|(role, _)| *role)
    }

    /// The labels that all wanted objects have, when there is one role; the API then sends no others.
    pub fn query(&self) -> Option<String> {
        match self.roles.as_slice() {
            [(_, selector)] => Some(selector.query()),
            _ => None,
        }
    }
}
