//! Every finding that there is: a stable code, how bad it is, and what it says in a line. The page python/CHECKS.md is made from it.

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Requests fail, or will.
    Error,
    /// Slower, or failing on a bad day.
    Warning,
    /// Good to know; leaves the exit status at 0.
    Note,
}

impl Severity {
    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        }
    }
}

macro_rules! codes {
    ($($(#[doc = $help:literal])+ $name:ident = $severity:ident $text:literal,)+) => {
        /// See the module's text.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code { $($(#[doc = $help])+ $name),+ }

        impl Code {
            /// Every code, in the order of the report.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// The stable name.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),+ }
            }

            /// How bad it is.
            pub fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity),+ }
            }

            /// What it says.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => concat!($($help),+).trim_ascii()),+ }
            }
        }
    };
}

codes! {
    /// A role that requests need has no engine.
    NoEngine = Error "fleet.no_engine",
    /// Engines come as pods: a running router knows them, this command does not.
    Pods = Note "fleet.pods",
    /// Nothing listens at the address, or it does not answer.
    Unreachable = Error "engine.unreachable",
    /// The health check fails.
    Unhealthy = Error "engine.unhealthy",
    /// The engine refuses the key, or wants one.
    Key = Error "engine.key",
    /// The engine runs in the other mode than it is registered for.
    Role = Error "engine.role",
    /// The health check runs into its limit although the engine answers otherwise.
    SlowHealth = Warning "engine.slow_health",
    /// The engine's own answers name different numbers of ranks.
    Ranks = Error "engine.ranks",
    /// The engine tells no load: its ranks are bounded by the router's own ledger alone.
    NoLoad = Warning "engine.no_load",
    /// A model with state slots and no metrics: how many slots are free is computed, not read.
    NoMetrics = Warning "engine.no_metrics",
    /// The engine closes idle connections before the router does.
    KeepAlive = Error "engine.keep_alive",
    /// The engine's release is not known, so faults of releases cannot be looked up.
    VersionUnknown = Note "version.unknown",
    /// No bootstrap port is known of a prefill engine.
    BootstrapUnknown = Error "bootstrap.unknown",
    /// Nothing listens at the bootstrap port, seen from here.
    BootstrapUnreachable = Error "bootstrap.unreachable",
    /// What listens at the bootstrap port is no bootstrap server, or the engine names another port.
    BootstrapPort = Error "bootstrap.port",
    /// Not all prefill ranks have registered at the bootstrap server.
    BootstrapIncomplete = Error "bootstrap.incomplete",
    /// Prefill is named by an address that decode engines on other machines cannot reach.
    BootstrapHost = Error "bootstrap.host",
    /// Engines serve different models.
    Model = Error "pair.model",
    /// KV pages of prefill and decode have different sizes.
    PageSize = Error "pair.page_size",
    /// KV caches of prefill and decode have different data types.
    KvDtype = Error "pair.kv_dtype",
    /// Engines send KV over different transports.
    Backend = Error "pair.backend",
    /// Pipeline or context parallel sizes that decode cannot take KV with.
    Parallel = Error "pair.parallel",
    /// Prefill and decode disagree on when decode reserves memory.
    Allocation = Error "pair.allocation",
    /// Prefill distributes requests in another way than by the room.
    LoadBalance = Warning "pair.load_balance",
    /// Prefill and decode run different releases.
    Versions = Warning "pair.versions",
    /// Engines have different waiting timeouts.
    Timeouts = Warning "pair.timeouts",
    /// Engines keep the model's state in different ways, or in one that switches overlap off.
    Mamba = Warning "pair.mamba",
    /// Only some engines send routing payloads (R3).
    RoutedExperts = Error "pair.routed_experts",
    /// Decode's pool is smaller than the longest prompt that prefill takes.
    Pool = Warning "pair.pool",
    /// 0.5.12 with NIXL and a model without state: no transfer ever ends.
    NixlDense = Error "version.nixl_dense",
    /// NIXL up to 0.5.12 tells neither side of the other's failure.
    NixlNotice = Warning "version.nixl_notice",
    /// Stock prefill engines up to 0.5.12 return no routing payloads.
    R3Prefill = Warning "version.r3_prefill",
    /// Up to 0.5.11 decode sends the prompt's rows as well, which are junk.
    StartLen = Warning "version.start_len",
    /// 0.5.10 does not notice when prefill and decode mean different ranks.
    RankLookup = Warning "version.rank_lookup",
    /// Up to 0.5.12 extra buffers take three state slots a request on decode.
    StateSlots = Warning "version.state_slots",
    /// Nothing bounds what decode reserves.
    Unbounded = Error "router.unbounded",
    /// The router's idea of the engines' waiting timeout, or of how long delivery may take, does not fit theirs.
    Timeout = Warning "router.timeout",
    /// The engines do not tell their waiting timeout.
    TimeoutUnknown = Note "router.timeout_unknown",
    /// The arena for routing payloads is smaller than what decode can have in work.
    Arena = Warning "r3.arena",
    /// One process of an engine carries all routing payloads.
    Egress = Warning "r3.egress",
    /// What decode can reserve at once, and what that asks of prefill.
    Reservations = Note "decode.reservations",
}
