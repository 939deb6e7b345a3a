//! What an engine says about itself beyond what admission needs: the facts that must fit those of the other engines of a fleet.
//! Every one may be missing. The answers themselves are not kept; those of a large fleet would fill memory.
use std::time::Duration;

use serde_json::Value;

/// A release, as far as faults depend on it: `0.5.12.post1` is `(0, 5, 12)` with `post`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// As the engine writes it.
    pub text: Box<str>,
    /// Major, minor, patch; `None` for builds without such a number.
    pub number: Option<(u32, u32, u32)>,
    /// Whether it is a corrected release of its number.
    pub post: bool,
}

impl Version {
    /// Reads `0.5.12.post1`, `v0.5.23`, `0.5.11rc1` and the like.
    pub fn parse(text: &str) -> Self {
        let mut parts = text.trim_start_matches('v').split(['.', '-', '+', 'r']).map(str::parse::<u32>);
        let number = match (parts.next(), parts.next(), parts.next()) {
            (Some(Ok(major)), Some(Ok(minor)), Some(Ok(patch))) => Some((major, minor, patch)),
            _ => None,
        };
        Self { text: text.into(), number, post: text.contains("post") }
    }
}

/// What prefill's bootstrap server answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// Not a prefill engine, or not asked.
    #[default]
    NotAsked,
    /// No port is known to ask at.
    NoPort,
    /// No connection from here, or no answer in time.
    Unreachable(u16, String),
    /// An HTTP status other than 2xx.
    Status(u16, u16),
    /// It answers, and not as a bootstrap server does.
    Strange(u16),
    /// Its fleet.
    Known(Box<KnownTopology>),
}

/// The topology that a prefill engine tells to decode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownTopology {
    /// Where it was asked.
    pub port: u16,
    /// Prefill ranks.
    pub ranks: Option<u16>,
    /// KV page, tokens.
    pub page_size: Option<u64>,
    /// Data type of the KV cache, resolved.
    pub kv_dtype: Option<Box<str>>,
    /// Whether decode may compute the prefill rank from the room.
    pub follows_room: Option<bool>,
    /// The allocation policy that prefill expects of decode.
    pub allocation: Option<Box<str>>,
}

impl KnownTopology {
    /// Reads the answer of `GET /route` with all ranks -1; `None` when it is none.
    pub fn read(port: u16, value: &Value) -> Option<Self> {
        value.get("dp_size").or_else(|| value.get("attn_tp_size"))?;
        Some(Self {
            port,
            ranks: whole(value, "dp_size").and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0),
            page_size: whole(value, "page_size"),
            kv_dtype: text(value, "kv_cache_dtype"),
            follows_room: value.get("follow_bootstrap_room").and_then(Value::as_bool),
            allocation: text(value, "decode_allocation_policy"),
        })
    }
}

/// See the module's text. The names are those of `/server_info`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traits {
    /// `version`.
    pub version: Option<Version>,
    /// Whether any of `/server_info` was answered.
    pub told: bool,
    /// `disaggregation_mode`.
    pub mode: Option<Box<str>>,
    /// `model_path`.
    pub model: Option<Box<str>>,
    /// `architectures[0]` or `model_type`.
    pub architecture: Option<Box<str>>,
    /// `page_size`, tokens.
    pub page_size: Option<u64>,
    /// `kv_cache_dtype`; `auto` follows the model.
    pub kv_dtype: Option<Box<str>>,
    /// `load_balance_method`.
    pub load_balance: Option<Box<str>>,
    /// `disaggregation_transfer_backend`.
    pub backend: Option<Box<str>>,
    /// `disaggregation_decode_allocation_policy`.
    pub allocation: Option<Box<str>>,
    /// `disaggregation_bootstrap_port`.
    pub bootstrap_port: Option<u16>,
    /// `mamba_radix_cache_strategy`, or `mamba_scheduler_strategy` up to 0.5.12.
    pub mamba_strategy: Option<Box<str>>,
    /// Whether the model has state slots.
    pub has_state: bool,
    /// `disable_overlap_schedule`.
    pub overlap_off: bool,
    /// `disaggregation_decode_enable_radix_cache`.
    pub decode_radix: bool,
    /// `tp_size`.
    pub tp: Option<u64>,
    /// `pp_size`.
    pub pp: Option<u64>,
    /// `attn_cp_size`.
    pub cp: Option<u64>,
    /// `enable_return_routed_experts`.
    pub routed_experts: Option<bool>,
    /// Whether R3 leaves as a descriptor (the plug-in).
    pub by_reference: bool,
    /// Bytes of one R3 row as the engine sends it, where the engine tells layers and experts per token.
    pub row_bytes: Option<u64>,
    /// `frontend` is `rust`, which sends no R3.
    pub rust_frontend: bool,
    /// `detokenizer_worker_num`.
    pub detokenizers: Option<u64>,
    /// `tokenizer_worker_num`.
    pub tokenizers: Option<u64>,
    /// `enable_metrics`.
    pub metrics: Option<bool>,
    /// Ranks by `/server_info`.
    pub ranks_info: Option<u16>,
    /// Ranks by `/v1/loads`.
    pub ranks_loads: Option<u16>,
    /// The waiting timeout that the engine tells, in the fleet's time.
    pub waiting_timeout: Option<Duration>,
    /// The health check ran into its limit.
    pub slow_health: bool,
    /// What prefill's bootstrap server says.
    pub topology: Topology,
}

fn text(from: &Value, name: &str) -> Option<Box<str>> {
    from.get(name).and_then(Value::as_str).filter(|t| !t.is_empty() && *t != "null").map(Into::into)
}

fn whole(from: &Value, name: &str) -> Option<u64> {
    from.get(name).and_then(Value::as_u64).filter(|n| *n > 0)
}

/// Beginnings and parts of architecture names of models with recurrent state beside attention. `/server_info` of releases up to 0.5.12 tells the
/// pool of such a model only when a flag set it.
const WITH_STATE: [&str; 12] = [
    "Qwen3Next",
    "Qwen3_5",
    "Mamba",
    "Jamba",
    "NemotronH",
    "FalconH1",
    "Zamba",
    "Bamba",
    "KimiLinear",
    "Lfm2",
    "GraniteMoeHybrid",
    "BailingMoeLinear",
];

impl Traits {
    /// Reads `/server_info` and `/model_info`; either may be `null`.
    pub fn read(info: &Value, model: &Value) -> Self {
        let flag = |name: &str| info.get(name).and_then(Value::as_bool);
        let either = |name: &str| text(info, name).or_else(|| text(model, name));
        let architecture = [model, info]
            .into_iter()
            .find_map(|v| v.get("architectures")?.get(0)?.as_str())
            .map(Into::into)
            .or_else(|| either("model_type"));
        let state = info.get("internal_states").and_then(|s| s.get(0)).unwrap_or(&Value::Null);
        let slots = whole(state, "max_mamba_cache_size").or_else(|| whole(info, "max_mamba_cache_size"));
        let emulator = info.get("emulator").unwrap_or(&Value::Null);
        let width = whole(emulator, "num_hidden_layers").zip(whole(emulator, "num_experts_per_tok"));
        Self {
            version: text(info, "version").map(|v| Version::parse(&v)),
            told: info.is_object(),
            mode: either("disaggregation_mode"),
            model: either("model_path"),
            has_state: slots.is_some() || architecture.as_deref().is_some_and(has_state),
            architecture,
            page_size: whole(info, "page_size"),
            kv_dtype: text(info, "kv_cache_dtype"),
            load_balance: text(info, "load_balance_method"),
            backend: text(info, "disaggregation_transfer_backend"),
            allocation: text(info, "disaggregation_decode_allocation_policy"),
            bootstrap_port: whole(info, "disaggregation_bootstrap_port").and_then(|p| u16::try_from(p).ok()),
            mamba_strategy: text(info, "mamba_radix_cache_strategy").or_else(|| text(info, "mamba_scheduler_strategy")),
            overlap_off: flag("disable_overlap_schedule") == Some(true),
            decode_radix: flag("disaggregation_decode_enable_radix_cache") == Some(true),
            tp: whole(info, "tp_size"),
            pp: whole(info, "pp_size"),
            cp: whole(info, "attn_cp_size"),
            routed_experts: flag("enable_return_routed_experts"),
            by_reference: emulator.get("plugin").and_then(Value::as_bool) == Some(true),
            row_bytes: width.map(|(layers, k)| layers * k * 4),
            rust_frontend: info.get("frontend").and_then(Value::as_str) == Some("rust"),
            detokenizers: whole(info, "detokenizer_worker_num"),
            tokenizers: whole(info, "tokenizer_worker_num"),
            metrics: flag("enable_metrics"),
            ranks_info: None,
            ranks_loads: None,
            waiting_timeout: None,
            slow_health: false,
            topology: Topology::NotAsked,
        }
    }

    /// The release's number.
    pub fn number(&self) -> Option<(u32, u32, u32)> {
        self.version.as_ref().and_then(|v| v.number)
    }

    /// Whether the release is known and older than `number`.
    pub fn before(&self, number: (u32, u32, u32)) -> bool {
        self.number().is_some_and(|n| n < number)
    }

    /// Whether KV travels over NIXL.
    pub fn nixl(&self) -> bool {
        self.backend.as_deref() == Some("nixl")
    }
}

/// Whether models of this architecture have state slots.
fn has_state(architecture: &str) -> bool {
    WITH_STATE.iter().any(|part| architecture.contains(part))
        || ["qwen3_next", "qwen3_5"].iter().any(|kind| architecture.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{KnownTopology, Traits, Version, has_state};

    #[test]
    fn versions_with_suffixes_are_read() {
        let of = |text: &str| (Version::parse(text).number, Version::parse(text).post);
        assert_eq!(of("0.5.12.post1"), (Some((0, 5, 12)), true));
        assert_eq!(of("v0.5.23"), (Some((0, 5, 23)), false));
        assert_eq!(of("0.5.11rc1"), (Some((0, 5, 11)), false));
        assert_eq!(of("main"), (None, false));
    }

    #[test]
    fn state_is_known_by_slots_or_by_the_model() {
        assert!(has_state("Qwen3_5MoeForCausalLM") && has_state("qwen3_next") && has_state("NemotronHForCausalLM"));
        assert!(!has_state("Qwen3MoeForCausalLM") && !has_state("DeepseekV3ForCausalLM"));
        let slots = json!({"internal_states": [{"max_mamba_cache_size": 128}], "version": "0.5.12"});
        assert!(Traits::read(&slots, &json!({"architectures": ["Unheard"]})).has_state);
        assert!(!Traits::read(&json!({"max_mamba_cache_size": null}), &json!(null)).has_state);
    }

    #[test]
    fn only_a_topology_is_one() {
        assert_eq!(KnownTopology::read(1, &json!({"status": "ok"})), None);
        let known =
            KnownTopology::read(1, &json!({"dp_size": 4, "page_size": 64, "kv_cache_dtype": "bfloat16"})).unwrap();
        assert_eq!((known.ranks, known.page_size, known.follows_room), (Some(4), Some(64), None));
    }
}
