//! Flags of sglang-router 0.3.2 that are no settings here. They are taken so that a launch command need not change: with the peer's
//! default they say nothing, with another value they are refused or ignored, each with its reason.
use std::fmt::Write;

use serde_json::{Value as Json, json};

use super::declare::Arity;
use super::table::rows;

/// What becomes of a value that differs from the peer's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The router does not start: going on without it would do something else than was asked.
    Refused,
    /// A warning, and the router starts: nothing that was asked is missing.
    Ignored,
}

impl Fate {
    /// As written in the schema and the page.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Ignored => "ignored",
        }
    }
}

/// One flag of the peer.
#[derive(Clone, Copy, Debug)]
pub struct PeerFlag {
    /// Its name, as a TOML key would be written.
    pub name: &'static str,
    /// How it is written.
    pub arity: Arity,
    /// The peer's default, as its help prints it.
    pub default: &'static str,
    /// What becomes of another value.
    pub fate: Fate,
    /// Why.
    pub reason: &'static str,
    /// Another value that asks for nothing.
    also: Option<&'static str>,
}

const fn refused(name: &'static str, arity: Arity, default: &'static str, reason: &'static str) -> PeerFlag {
    PeerFlag { name, arity, default, fate: Fate::Refused, reason, also: None }
}

const fn ignored(name: &'static str, arity: Arity, default: &'static str, reason: &'static str) -> PeerFlag {
    PeerFlag { name, arity, default, fate: Fate::Ignored, reason, also: None }
}

const PREFIXES: &str = "prefixes are kept as hashes of blocks in a table of fixed size; no tree grows or is swept, and the load of ranks is always weighed";
const CONTROL_LATER: &str = "there are no roles and no tokens of an identity provider: one key for the admin listener is --admin-api-key, and --no-control-on-main-port leaves control to it";
const ENGINES_TOKENISE: &str = "requests pass as they are and the engines tokenise";
const ENGINES_PARSE: &str = "replies pass as they are and the engines parse; give the engines this flag";
const NO_HISTORY: &str = "it is read with a database behind --history-backend only, which is refused";

/// See the module's text. In the order of the peer's help.
pub const PEER_FLAGS: [PeerFlag; 37] = [
    ignored("cache_threshold", Arity::One, "0.3", PREFIXES),
    ignored("balance_abs_threshold", Arity::One, "64", PREFIXES),
    ignored("balance_rel_threshold", Arity::One, "1.5", PREFIXES),
    ignored("eviction_interval_secs", Arity::One, "60", PREFIXES),
    refused("enable_igw", Arity::Switch, "False", "one router serves one model; start one for each"),
    ignored("mini_lb", Arity::Switch, "False", "r3router itself serves in place of the balancer for debugging"),
    ignored("model_path", Arity::One, "None", ENGINES_TOKENISE),
    ignored("tokenizer_path", Arity::One, "None", ENGINES_TOKENISE),
    ignored(
        "chat_template",
        Arity::One,
        "None",
        "requests pass as they are and the engines render; give the engines this flag",
    ),
    ignored("tokenizer_cache_enable_l0", Arity::Switch, "False", ENGINES_TOKENISE),
    ignored("tokenizer_cache_l0_max_entries", Arity::One, "10000", ENGINES_TOKENISE),
    ignored("tokenizer_cache_enable_l1", Arity::Switch, "False", ENGINES_TOKENISE),
    ignored("tokenizer_cache_l1_max_memory", Arity::One, "52428800", ENGINES_TOKENISE),
    ignored("reasoning_parser", Arity::One, "None", ENGINES_PARSE),
    ignored("tool_call_parser", Arity::One, "None", ENGINES_PARSE),
    refused("mcp_config_path", Arity::One, "None", "the router runs no tools; call MCP servers from the client"),
    refused("backend", Arity::One, "sglang", "only SGLang engines over HTTP are served"),
    refused(
        "history_backend",
        Arity::One,
        "memory",
        "the router keeps no conversations: /v1/responses goes to an engine, which keeps its own",
    )
    .also("none"),
    ignored("oracle_wallet_path", Arity::One, "None", NO_HISTORY),
    ignored("oracle_tns_alias", Arity::One, "None", NO_HISTORY),
    ignored("oracle_connect_descriptor", Arity::One, "None", NO_HISTORY),
    ignored("oracle_username", Arity::One, "None", NO_HISTORY),
    ignored("oracle_password", Arity::One, "None", NO_HISTORY),
    ignored("oracle_pool_min", Arity::One, "1", NO_HISTORY),
    ignored("oracle_pool_max", Arity::One, "16", NO_HISTORY),
    ignored("oracle_pool_timeout_secs", Arity::One, "30", NO_HISTORY),
    ignored("postgres_db_url", Arity::One, "None", NO_HISTORY),
    ignored("postgres_pool_max", Arity::One, "16", NO_HISTORY),
    ignored("redis_url", Arity::One, "None", NO_HISTORY),
    ignored("redis_pool_max", Arity::One, "16", NO_HISTORY),
    ignored("redis_retention_days", Arity::One, "30", NO_HISTORY),
    refused("control_plane_api_keys", Arity::Many, "[]", CONTROL_LATER),
    refused("control_plane_audit_enabled", Arity::Switch, "False", CONTROL_LATER),
    refused("jwt_issuer", Arity::One, "None", CONTROL_LATER),
    refused("jwt_audience", Arity::One, "None", CONTROL_LATER),
    refused("jwt_jwks_uri", Arity::One, "None", CONTROL_LATER),
    refused("jwt_role_mapping", Arity::Many, "[]", CONTROL_LATER),
];

impl PeerFlag {
    /// `--history-backend`.
    pub fn flag(&self) -> String {
        format!("--{}", self.name.replace('_', "-"))
    }

    const fn also(mut self, value: &'static str) -> Self {
        self.also = Some(value);
        self
    }

    /// Whether `value` asks for something else than the peer does without the flag.
    pub(super) fn asks(&self, value: &Json) -> bool {
        match value {
            Json::Null => false,
            Json::Bool(on) => *on,
            Json::Array(items) => !items.is_empty(),
            Json::Object(fields) => !fields.is_empty(),
            Json::Number(n) => !self.is_default(&n.to_string()),
            Json::String(text) => !self.is_default(text.trim()),
        }
    }

    fn is_default(&self, text: &str) -> bool {
        let empty = text.is_empty() || matches!(self.default, "False") && matches!(text, "false" | "0");
        let same_number = match (text.parse::<f64>(), self.default.parse::<f64>()) {
            (Ok(one), Ok(other)) => one.total_cmp(&other).is_eq(),
            _ => false,
        };
        empty || same_number || text.eq_ignore_ascii_case(self.default) || self.also == Some(text)
    }
}

/// The flag of this name.
pub(super) fn find(name: &str) -> Option<&'static PeerFlag> {
    PEER_FLAGS.iter().find(|f| f.name == name)
}

/// A JSON list with one object per flag: name, flag, arity, default, fate, reason.
pub fn peer_schema() -> Json {
    PEER_FLAGS
        .iter()
        .map(|f| {
            json!({
                "name": f.name,
                "flag": f.flag(),
                "arity": f.arity.name(),
                "default": f.default,
                "fate": f.fate.name(),
                "reason": f.reason,
            })
        })
        .collect()
}

/// The page of every flag of the peer with its state, in Markdown.
pub fn flags_page() -> String {
    let mut page = String::from(
        "# Flags of sglang-router 0.3.2\n\n\
         Made from `rust/proxy/src/settings/` by `make docs`; a test compares it with the peer's own `--help` where `make peers` has installed it.\n\n\
         `python -m r3router serve` and `python -m r3router.launch_router` take every flag of `python -m sglang_router.launch_router`.\n\n\
         - **honoured**: the same meaning. Where meaning or default differ, the text says how.\n\
         - **ignored**: a value other than the peer's default is taken with a warning; nothing that was asked is missing.\n\
         - **refused**: a value other than the peer's default stops the start, with the reason.\n\n\
         | flag | state | peer's default | ours | meaning or reason |\n|---|---|---|---|---|\n",
    );
    for row in rows() {
        let Some(peer) = row.peer else { continue };
        let state = if row.inert { "ignored" } else { "honoured" };
        let ours = match row.bare_default() {
            Json::Null => "none".to_owned(),
            Json::String(text) => text,
            Json::Array(items) if items.is_empty() => "none".to_owned(),
            Json::Bool(on) => if on { "on" } else { "off" }.to_owned(),
            other => other.to_string(),
        };
        let _ = writeln!(page, "| `{}` | {state} | `{peer}` | `{ours}` | {} |", row.flag(), row.help);
    }
    for flag in PEER_FLAGS {
        let mut reason = flag.reason.chars();
        let reason: String = reason.next().into_iter().flat_map(char::to_uppercase).chain(reason).collect();
        let _ = writeln!(page, "| `{}` | {} | `{}` | | {reason}. |", flag.flag(), flag.fate.name(), flag.default);
    }
    page
}
