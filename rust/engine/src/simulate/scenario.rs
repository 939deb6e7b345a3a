//! What is simulated, read from TOML. Unknown keys are refused; every figure that is left out is the incident's
//! (`engine-protocol.md` 6.1).
use std::fmt;
use std::path::Path;
use std::time::Duration;

use r3router_core::topology::Allocation;
use serde::{Deserialize, Serialize};

use super::lengths::Lengths;
use crate::model::{EngineConfig, Fault, Mamba, PauseMode, Version};

/// Why a scenario cannot be used: where, and what to change.
#[derive(Debug)]
pub struct ScenarioError {
    /// The file, or "scenario".
    pub source: String,
    /// What is wrong with it.
    pub message: String,
}

impl fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.message.trim_end())
    }
}

impl std::error::Error for ScenarioError {}

/// A fleet, its work, its router and its bad luck.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it is called in tables; the file's name when it is left out.
    #[serde(default)]
    pub name: String,
    /// What it shows, for a person.
    #[serde(default)]
    pub about: String,
    /// Seed of lengths, families and arrivals.
    #[serde(default)]
    pub seed: u64,
    /// The engines.
    #[serde(default)]
    pub fleet: FleetSpec,
    /// The requests.
    pub workload: Workload,
    /// The router.
    #[serde(default)]
    pub router: RouterSpec,
    /// What the unbounded baseline of a sweep does.
    #[serde(default)]
    pub baseline: Baseline,
    /// Things that happen to engines.
    #[serde(default)]
    pub faults: Vec<FaultSpec>,
    /// Fleet time after which the run is cut off, seconds.
    #[serde(default = "default_limit")]
    pub limit_s: f64,
}

fn default_limit() -> f64 {
    7200.0
}

/// The engines of a fleet.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FleetSpec {
    /// The release: "0.5.23" or "0.5.12".
    pub version: VersionSpec,
    /// When decode reserves.
    pub allocation: AllocationSpec,
    /// Clock W, seconds.
    pub waiting_timeout_s: Option<f64>,
    /// KV bytes of a token.
    pub kv_bytes_per_token: Option<u64>,
    /// Raw R3 bytes of a token.
    pub r3_row_bytes: Option<u32>,
    /// The plug-in is in the engines: R3 leaves by reference.
    pub r3_by_reference: bool,
    /// The prefill engines.
    pub prefill: SideSpec,
    /// The decode engines.
    pub decode: SideSpec,
}

/// One side of a fleet.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SideSpec {
    /// Number of engines.
    pub engines: u16,
    /// DP ranks of each.
    pub ranks: u16,
    /// KV pool of a rank, tokens.
    pub pool_tokens: Option<u64>,
    /// Running requests of a rank.
    pub max_running: Option<u32>,
    /// Extra request rows of a decode rank.
    pub extra_slots: Option<u32>,
    /// State slots of a rank; 0 for a model without state.
    pub mamba_slots: Option<u32>,
    /// State slots of a request.
    pub mamba_per_request: Option<u32>,
    /// Uncached tokens of a prefill batch.
    pub chunked_prefill_size: Option<u32>,
    /// Uncached tokens per second of a prefill rank.
    pub tokens_per_s: Option<f64>,
    /// Milliseconds of an empty decode step.
    pub step_ms: Option<f64>,
    /// Milliseconds of a transfer beside its bytes.
    pub transfer_ms: Option<f64>,
}

impl Default for SideSpec {
    fn default() -> Self {
        Self {
            engines: 1,
            ranks: 4,
            pool_tokens: None,
            max_running: None,
            extra_slots: None,
            mamba_slots: None,
            mamba_per_request: None,
            chunked_prefill_size: None,
            tokens_per_s: None,
            step_ms: None,
            transfer_ms: None,
        }
    }
}

/// A release by its number.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub enum VersionSpec {
    /// 0.5.12.
    #[serde(rename = "0.5.12")]
    Old,
    /// 0.5.23.
    #[default]
    #[serde(rename = "0.5.23")]
    New,
}

/// When decode reserves.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllocationSpec {
    /// Before prefill starts.
    #[default]
    Early,
    /// After prefill ends.
    PrefillComplete,
}

/// The requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// How many in all.
    pub count: u32,
    /// Closed loop: so many are open at a time.
    pub concurrency: Option<u32>,
    /// Open loop: so many arrive per second (Poisson).
    pub rate_per_s: Option<f64>,
    /// Open loop: arrivals come in bursts of so many at one moment; the mean rate stays.
    #[serde(default = "one")]
    pub burst: u32,
    /// Kinds of requests.
    pub classes: Vec<Class>,
}

fn one() -> u32 {
    1
}

/// A kind of request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// How often it is drawn, beside the others' weights.
    #[serde(default = "weight_one")]
    pub weight: f64,
    /// Prompt tokens that only this request has.
    pub new_tokens: Lengths,
    /// Prompt tokens that it shares with its family.
    #[serde(default)]
    pub prefix_tokens: u32,
    /// Number of families.
    #[serde(default = "one")]
    pub families: u32,
    /// Part of the requests that belong to the first family; the others share the rest evenly.
    pub hot_share: Option<f64>,
    /// Output tokens.
    pub output: Lengths,
    /// `max_new_tokens` of the request; absent: the true output length, rounded up to 256; 0: not named.
    pub max_new_tokens: Option<u32>,
    /// R3 wanted.
    #[serde(default)]
    pub r3: bool,
    /// Streamed.
    #[serde(default)]
    pub stream: bool,
}

fn weight_one() -> f64 {
    1.0
}

/// The bound on transfers in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Window {
    /// The computed window.
    #[default]
    Computed,
    /// No window: rows, slots and KV still bound.
    Unbounded,
    /// A fixed one per decode rank.
    Static(u32),
}

impl<'de> Deserialize<'de> for Window {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Number(u32),
            Name(String),
        }
        match Raw::deserialize(d) {
            Ok(Raw::Number(n)) if n > 0 => Ok(Self::Static(n)),
            Ok(Raw::Name(name)) if name == "computed" => Ok(Self::Computed),
            Ok(Raw::Name(name)) if name == "unbounded" => Ok(Self::Unbounded),
            _ => {
                Err(serde::de::Error::custom("window is \"computed\", \"unbounded\" or a number of transfers above 0"))
            }
        }
    }
}

/// The router under test.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterSpec {
    /// The bound on transfers.
    pub window: Window,
    /// `false`: the plain router of `[baseline]` takes the place of the real admission.
    pub admission: bool,
    /// Whole-attempt retries of a failed request.
    pub retries: u32,
    /// A request must be bound within so many seconds of its arrival; absent: it waits as long as it takes.
    pub deadline_s: Option<f64>,
    /// Loads are polled so often, milliseconds.
    pub poll_ms: u64,
    /// Decode is asked for R3 from the prompt's end on.
    pub start_len_rewrite: bool,
    /// Waiting room of the queue, requests.
    pub queue_max: usize,
    /// Seed of rooms and ties.
    pub seed: u64,
}

impl Default for RouterSpec {
    fn default() -> Self {
        Self {
            window: Window::Computed,
            admission: true,
            retries: 0,
            deadline_s: None,
            poll_ms: 200,
            start_len_rewrite: true,
            queue_max: 100_000,
            seed: 0,
        }
    }
}

/// Where a router without admission puts requests. Decode ranks go round in every case.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The next prefill rank in turn.
    #[default]
    RoundRobin,
    /// The prefill rank that a prefix family was first sent to, always (cache-aware routers that never give way).
    PrefixSticky,
    /// A random room decides (routers that do not know ranks).
    Random,
}

/// A router as the field has them: it sends at once, joins both halves, and cancels nothing.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Baseline {
    /// Where it puts requests.
    pub placement: Placement,
}

/// Something that happens to an engine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultSpec {
    /// When, seconds.
    pub at_s: f64,
    /// "p0" is the first prefill engine, "d1" the second decode engine.
    pub engine: String,
    /// What.
    pub fault: FaultKind,
    /// How long it lasts, for the stalls.
    pub seconds: Option<f64>,
    /// How many requests it hits, for `fail_next`, `fail_transfers` and `stick_transfers`.
    pub count: Option<u32>,
    /// Tokens of a rank, for `pool`.
    pub tokens: Option<u64>,
}

/// Kinds of faults.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The scheduler stands still for some seconds.
    StallScheduler,
    /// The HTTP loop stands still for some seconds.
    StallHttp,
    /// The next requests fail at once.
    FailNext,
    /// The next transfers fail.
    FailTransfers,
    /// The next transfers never end.
    StickTransfers,
    /// Stuck transfers are let go.
    Unstick,
    /// The KV pool changes.
    Pool,
    /// The process dies.
    Kill,
    /// The process is back.
    Revive,
    /// Paused in place.
    Pause,
    /// Continued.
    Continue,
}

/// What a fault is to the model: a fault, or a control request.
pub(super) enum Happening {
    Fault(Fault),
    Pause(PauseMode),
    Continue,
}

impl FaultSpec {
    /// What it is to the model; an error names the figure that is missing.
    pub(super) fn happening(&self) -> Result<Happening, String> {
        let missing = |what: &str| format!("faults: {:?} needs {what}", self.fault);
        let seconds =
            || self.seconds.map(|s| Duration::from_secs_f64(s.clamp(0.0, 1e6))).ok_or_else(|| missing("seconds"));
        let count = || self.count.ok_or_else(|| missing("count"));
        Ok(Happening::Fault(match self.fault {
            FaultKind::StallScheduler => Fault::StallScheduler(seconds()?),
            FaultKind::StallHttp => Fault::StallHttp(seconds()?),
            FaultKind::FailNext => Fault::FailNext(count()?),
            FaultKind::FailTransfers => Fault::FailTransfers(count()?),
            FaultKind::StickTransfers => Fault::StickTransfers(count()?),
            FaultKind::Unstick => Fault::Unstick,
            FaultKind::Pool => Fault::Pool(self.tokens.ok_or_else(|| missing("tokens"))?),
            FaultKind::Kill => Fault::Kill,
            FaultKind::Revive => Fault::Revive,
            FaultKind::Pause => return Ok(Happening::Pause(PauseMode::InPlace)),
            FaultKind::Continue => return Ok(Happening::Continue),
        }))
    }
}

impl FleetSpec {
    /// The engines, prefill first.
    pub fn engines(&self) -> Vec<EngineConfig> {
        let build = |base: EngineConfig, side: &SideSpec| {
            let mut c = base;
            c.version = match self.version {
                VersionSpec::Old => Version::V0_5_12,
                VersionSpec::New => Version::V0_5_23,
            };
            c.allocation = match self.allocation {
                AllocationSpec::Early => Allocation::Early,
                AllocationSpec::PrefillComplete => Allocation::PrefillComplete,
            };
            if let Some(s) = self.waiting_timeout_s {
                c.waiting_timeout = Duration::from_secs_f64(s);
                c.bootstrap_timeout = c.waiting_timeout;
            }
            c.kv_bytes_per_token = self.kv_bytes_per_token.unwrap_or(c.kv_bytes_per_token);
            c.r3.row_bytes = self.r3_row_bytes.unwrap_or(c.r3.row_bytes);
            c.r3.by_reference = self.r3_by_reference;
            c.max_total_tokens = side.pool_tokens.unwrap_or(c.max_total_tokens);
            c.max_running = side.max_running.unwrap_or(c.max_running);
            c.extra_slots = side.extra_slots.or(c.extra_slots);
            let per_request = side.mamba_per_request.unwrap_or(1);
            match side.mamba_slots {
                Some(0) => c.mamba = None,
                Some(slots) => c.mamba = Some(Mamba { slots, per_request }),
                None => c.mamba = c.mamba.map(|m| Mamba { per_request, ..m }),
            }
            c.chunked_prefill_size = side.chunked_prefill_size.unwrap_or(c.chunked_prefill_size);
            c.compute.prefill_tokens_per_s = side.tokens_per_s.unwrap_or(c.compute.prefill_tokens_per_s);
            c.compute.decode_step = side.step_ms.map_or(c.compute.decode_step, |ms| Duration::from_secs_f64(ms / 1e3));
            c.transfer.latency = side.transfer_ms.map_or(c.transfer.latency, |ms| Duration::from_secs_f64(ms / 1e3));
            c
        };
        let prefill =
            (0..self.prefill.engines).map(|_| build(EngineConfig::prefill(self.prefill.ranks), &self.prefill));
        let decode = (0..self.decode.engines).map(|_| build(EngineConfig::decode(self.decode.ranks), &self.decode));
        prefill.chain(decode).collect()
    }
}

impl Scenario {
    /// Reads a scenario from TOML text; `source` names it in errors.
    pub fn parse(text: &str, source: &str) -> Result<Self, ScenarioError> {
        let error = |message: String| ScenarioError { source: source.to_owned(), message };
        let mut scenario: Self = toml::from_str(text).map_err(|e| error(e.to_string()))?;
        if scenario.name.is_empty() {
            scenario.name =
                Path::new(source).file_stem().map_or_else(|| source.to_owned(), |s| s.to_string_lossy().into_owned());
        }
        scenario.check().map_err(error)?;
        Ok(scenario)
    }

    /// Reads a scenario from a file.
    pub fn read(path: &Path) -> Result<Self, ScenarioError> {
        let source = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|e| ScenarioError { source: source.clone(), message: format!("cannot be read: {e}") })?;
        Self::parse(&text, &source)
    }

    fn check(&self) -> Result<(), String> {
        let need = |ok: bool, text: &str| if ok { Ok(()) } else { Err(text.to_owned()) };
        let w = &self.workload;
        // Numbers of a TOML file may be nan or inf; what is compared below with > refuses the first and not the second.
        let positive = |name: &str, value: Option<f64>| match value {
            Some(v) if !v.is_finite() || v <= 0.0 => Err(format!("{name} is {v}; it must be a number above 0")),
            _ => Ok(()),
        };
        positive("limit_s", Some(self.limit_s))?;
        positive("workload.rate_per_s", w.rate_per_s)?;
        positive("fleet.waiting_timeout_s", self.fleet.waiting_timeout_s)?;
        for (side, spec) in [("prefill", &self.fleet.prefill), ("decode", &self.fleet.decode)] {
            for (name, value) in [("tokens_per_s", spec.tokens_per_s), ("step_ms", spec.step_ms)] {
                positive(&format!("fleet.{side}.{name}"), value)?;
            }
            need(
                spec.transfer_ms.is_none_or(|t| t.is_finite() && t >= 0.0),
                &format!("fleet.{side}.transfer_ms must be a number from 0"),
            )?;
            for (name, value) in [
                ("pool_tokens", spec.pool_tokens),
                ("max_running", spec.max_running.map(u64::from)),
                ("mamba_per_request", spec.mamba_per_request.map(u64::from)),
                ("chunked_prefill_size", spec.chunked_prefill_size.map(u64::from)),
            ] {
                need(value != Some(0), &format!("fleet.{side}.{name} must be above 0"))?;
            }
        }
        for class in &w.classes {
            let name = "the weight of one of workload.classes";
            need(
                class.weight.is_finite() && class.weight >= 0.0,
                &format!("{name} is {}; it must be a number from 0", class.weight),
            )?;
        }
        need(w.count > 0, "workload.count must be above 0")?;
        need(w.burst > 0, "workload.burst must be above 0")?;
        need(
            w.concurrency.is_some() != w.rate_per_s.is_some(),
            "workload needs either concurrency (closed loop) or rate_per_s (open loop), not both",
        )?;
        need(w.concurrency != Some(0), "workload.concurrency must be above 0")?;
        need(w.rate_per_s.is_none_or(|r| r > 0.0), "workload.rate_per_s must be above 0")?;
        need(!w.classes.is_empty(), "workload.classes is empty: add a [[workload.classes]] table")?;
        need(
            w.classes.iter().map(|c| c.weight).sum::<f64>() > 0.0,
            "the weights of workload.classes add up to nothing",
        )?;
        for class in &w.classes {
            class.new_tokens.check("new_tokens")?;
            class.output.check("output")?;
            need(class.families > 0, "families must be above 0")?;
            need(class.hot_share.is_none_or(|h| (0.0..=1.0).contains(&h)), "hot_share must be between 0 and 1")?;
        }
        for (side, spec) in [("prefill", &self.fleet.prefill), ("decode", &self.fleet.decode)] {
            need(spec.engines > 0 && spec.ranks > 0, &format!("fleet.{side} needs at least one engine with one rank"))?;
        }
        need(self.router.poll_ms > 0, "router.poll_ms must be above 0")?;
        for fault in &self.faults {
            fault.happening()?;
            self.fault_engine(&fault.engine).ok_or_else(|| {
                format!("faults: no engine '{}'; use p0.. for prefill and d0.. for decode", fault.engine)
            })?;
        }
        Ok(())
    }

    /// Place of an engine named "p0" or "d1".
    pub(super) fn fault_engine(&self, name: &str) -> Option<u16> {
        let (side, number) = name.split_at_checked(1)?;
        let number: u16 = number.parse().ok()?;
        let (p, d) = (self.fleet.prefill.engines, self.fleet.decode.engines);
        match side {
            "p" if number < p => Some(number),
            "d" if number < d => Some(p + number),
            _ => None,
        }
    }
}
