//! The types of settings that are more than a number or a text.
use std::fmt;

pub use crate::allow::AllowedHost;
use r3router_core::policy;

/// Declares an enum whose values are written by name.
macro_rules! names {
    ($(#[doc = $doc:literal])+ $type:ident { $( $(#[doc = $help:literal])+ $variant:ident = $name:literal, )+ }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $type { $( $(#[doc = $help])+ $variant, )+ }

        impl $type {
            /// Every name, in the order of the help.
            pub const NAMES: &'static [&'static str] = &[$($name),+];

            /// The name as written in flags and files.
            pub fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }

            /// The value of a name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $( $name => Some(Self::$variant), )+ _ => None }
            }
        }
    };
}

names! {
    /// A routing policy by the names that sglang-router uses, and our own. Each chooses among the ranks that admission permits.
    Policy {
        /// Any rank.
        Random = "random",
        /// Ranks in turn.
        RoundRobin = "round_robin",
        /// Longest cached prefix, within balance.
        CacheAware = "cache_aware",
        /// The lighter of two.
        PowerOfTwo = "power_of_two",
        /// The rank that a routing key was given.
        Manual = "manual",
        /// By a hash of the routing key.
        ConsistentHashing = "consistent_hashing",
        /// By a hash of the prompt's beginning.
        PrefixHash = "prefix_hash",
        /// By prompt length.
        Bucket = "bucket",
        /// The rank with the most room.
        Headroom = "headroom",
    }
}

impl Policy {
    /// What the core calls it.
    pub fn core(self) -> policy::Policy {
        match self {
            Self::Random => policy::Policy::Random,
            Self::RoundRobin => policy::Policy::RoundRobin,
            Self::CacheAware => policy::Policy::CacheAware,
            Self::PowerOfTwo => policy::Policy::PowerOfTwo,
            Self::Manual => policy::Policy::Manual,
            Self::ConsistentHashing => policy::Policy::ConsistentHashing,
            Self::PrefixHash => policy::Policy::PrefixHash,
            Self::Bucket => policy::Policy::Bucket,
            Self::Headroom => policy::Policy::Headroom,
        }
    }
}

names! {
    /// Which rank a new routing key is given under `manual`.
    Assignment {
        /// Any.
        Random = "random",
        /// The one with the most room.
        MinLoad = "min_load",
        /// The one with the fewest keys.
        MinGroup = "min_group",
    }
}

impl Assignment {
    /// What the core calls it.
    pub fn core(self) -> policy::Assignment {
        match self {
            Self::Random => policy::Assignment::Random,
            Self::MinLoad => policy::Assignment::MinLoad,
            Self::MinGroup => policy::Assignment::MinGroup,
        }
    }
}

names! {
    /// How much is logged.
    LogLevel {
        /// Everything, one line per step of a request.
        Debug = "debug",
        /// One line per request.
        Info = "info",
        /// What a person should look at.
        Warn = "warn",
        /// What went wrong.
        Error = "error",
    }
}

names! {
    /// How routing payloads reach the client by default.
    R3Transport {
        /// In the reply, byte for byte as one unsplit engine would send them.
        Inline = "inline",
        /// As a reference that the client fetches.
        Ref = "ref",
    }
}

names! {
    /// In which objects of Kubernetes engines are found.
    DiscoverySource {
        /// Pods, by their labels.
        Pods = "pods",
        /// Endpoints of Services, by the labels of their slices.
        EndpointSlices = "endpoint_slices",
    }
}

/// A count that `-1` or `none` switches off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap(pub Option<u32>);

/// A key. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Hides a key.
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// The key itself, for comparing and for headers.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The base URL of an engine, normalised (see [`crate::address::Address`]).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkerUrl(pub String);

/// A prefill engine as named on the command line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PrefillWorker {
    /// Base URL, normalised.
    pub url: WorkerUrl,
    /// Port of its bootstrap server; `None` means that the engine is asked.
    pub bootstrap_port: Option<u16>,
}
