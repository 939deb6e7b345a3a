//! What fleet to play: how many engines and ranks, which release, at which scale.
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::bounds::{self, Bound};
use r3router_core::topology::Role;
use serde::{Deserialize, Serialize};

use super::pattern::R3Shape;
use super::scale::Scale;
use crate::model::{EngineConfig, Version};

/// SGLang closes an idle connection after this (`SGLANG_TIMEOUT_KEEP_ALIVE`). Not scaled: routers' pools are not, either.
pub const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// One engine to play.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    /// The model's settings, in the model's own (unscaled) units.
    pub model: EngineConfig,
    /// Port of the API; 0 picks a free one.
    pub port: u16,
    /// Port of the bootstrap server of a prefill engine; 0 picks a free one.
    pub bootstrap_port: u16,
}

/// A fleet in one process.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// Address that every engine listens on.
    pub host: IpAddr,
    /// The engines.
    pub engines: Vec<EngineSetup>,
    /// Factor between model and wire.
    pub scale: Scale,
    /// Width of an R3 row on the wire.
    pub r3: R3Shape,
    /// Prepared small replies at once, no model (benchmarks).
    pub fast: bool,
    /// Idle time after which a connection is closed.
    pub keep_alive: Duration,
    /// Model name that the engines answer with.
    pub model_name: String,
}

/// What `python -m r3router emulate` takes; the names are its flags. Unknown names are refused.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct EmulateOptions {
    /// Prefill ranks in all; 0 with `decode` 0 plays regular engines only.
    pub prefill: u16,
    /// Engines over which the prefill ranks are spread evenly.
    pub prefill_engines: u16,
    /// Decode ranks in all.
    pub decode: u16,
    /// Engines over which the decode ranks are spread evenly.
    pub decode_engines: u16,
    /// Regular (not split) ranks in all.
    pub regular: u16,
    /// Engines over which the regular ranks are spread evenly.
    pub regular_engines: u16,
    /// Address to listen on.
    pub host: IpAddr,
    /// First port; engines take the following ones, then the bootstrap servers. 0 picks free ports.
    pub port: u16,
    /// Release to play: `0.5.23` or `0.5.12`.
    pub engine_version: String,
    /// Factor by which time runs faster and everything on the wire is smaller.
    pub scale: f64,
    /// `num_hidden_layers`.
    pub layers: u32,
    /// `num_experts_per_tok`.
    pub top_k: u32,
    /// Experts; above 256 the narrow form takes two bytes.
    pub experts: u32,
    /// Engines have r3router's plug-in: R3 leaves as a descriptor, rows are served by `/r3/{id}`.
    pub plugin: bool,
    /// Prepared small replies at once, no model.
    pub fast: bool,
    /// Running requests of one rank.
    pub max_running: Option<u32>,
    /// KV pool of one rank, tokens (unscaled).
    pub max_total_tokens: Option<u64>,
    /// Mamba slots of one decode rank; 0 for a model without state.
    pub mamba_slots: Option<u32>,
    /// `SGLANG_DISAGGREGATION_WAITING_TIMEOUT` and `_BOOTSTRAP_TIMEOUT`, seconds (unscaled).
    pub timeout: Option<f64>,
    /// Model name.
    pub model_name: String,
    /// Threads that serve the fleet.
    pub threads: usize,
}

impl Default for EmulateOptions {
    fn default() -> Self {
        let shape = R3Shape::default();
        Self {
            prefill: 4,
            prefill_engines: 1,
            decode: 4,
            decode_engines: 1,
            regular: 0,
            regular_engines: 1,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 31_000,
            engine_version: "0.5.23".to_owned(),
            scale: 1.0,
            layers: shape.layers,
            top_k: shape.top_k,
            experts: shape.experts,
            plugin: false,
            fast: false,
            max_running: None,
            max_total_tokens: None,
            mamba_slots: None,
            timeout: None,
            model_name: "emulated-moe".to_owned(),
            threads: 2,
        }
    }
}

impl EmulateOptions {
    /// Least and most of every number. `serve --time-scale` takes a scale up to 1000, so a fleet has no larger one.
    pub const BOUNDS: [Bound; 15] = [
        ("prefill", 0.0, 1024.0),
        ("prefill_engines", 0.0, 1024.0),
        ("decode", 0.0, 1024.0),
        ("decode_engines", 0.0, 1024.0),
        ("regular", 0.0, 1024.0),
        ("regular_engines", 0.0, 1024.0),
        ("port", 0.0, 65_535.0),
        ("scale", 1.0, 1000.0),
        ("layers", 1.0, 1024.0),
        ("top_k", 1.0, 1024.0),
        ("experts", 2.0, 65_536.0),
        ("max_running", 1.0, 1_000_000.0),
        ("max_total_tokens", 1.0, 1e12),
        ("mamba_slots", 0.0, 1_000_000.0),
        ("threads", 1.0, 1024.0),
    ];

    /// The fleet that these options ask for.
    ///
    /// # Errors
    /// The name of the option that does not fit, and why.
    pub fn fleet(&self) -> Result<FleetConfig, String> {
        let version = match self.engine_version.as_str() {
            "0.5.23" => Version::V0_5_23,
            "0.5.12" => Version::V0_5_12,
            other => return Err(format!("--engine-version is {other}; 0.5.23 and 0.5.12 are played")),
        };
        bounds::check(self, &Self::BOUNDS)?;
        if self.top_k > self.experts {
            return Err(format!("--top-k {} is more than --experts {}", self.top_k, self.experts));
        }
        if let Some(timeout) = self.timeout
            && !(0.001..=2_592_000.0).contains(&timeout)
        {
            return Err(format!("--timeout {timeout} is not between 0.001 and 2592000"));
        }
        let mut engines = Vec::new();
        for (name, role, ranks, count) in [
            ("prefill", Role::Prefill, self.prefill, self.prefill_engines),
            ("decode", Role::Decode, self.decode, self.decode_engines),
            ("regular", Role::Regular, self.regular, self.regular_engines),
        ] {
            for share in spread(name, ranks, count)? {
                engines.push(EngineSetup { model: self.model(role, share, version), port: 0, bootstrap_port: 0 });
            }
        }
        if engines.is_empty() {
            return Err("--prefill, --decode and --regular are all 0; at least one rank is needed".to_owned());
        }
        if self.port != 0 {
            let mut next = self.port;
            let mut take = || {
                let port = next;
                next = next.checked_add(1)?;
                Some(port)
            };
            let full = || {
                format!(
                    "--port {} leaves no room for {} engines and their bootstrap servers",
                    self.port,
                    u32::from(self.prefill_engines) + u32::from(self.decode_engines) + u32::from(self.regular_engines)
                )
            };
            for engine in &mut engines {
                engine.port = take().ok_or_else(full)?;
            }
            for engine in engines.iter_mut().filter(|e| e.model.role == Role::Prefill) {
                engine.bootstrap_port = take().ok_or_else(full)?;
            }
        }
        Ok(FleetConfig {
            host: self.host,
            engines,
            scale: Scale::new(self.scale),
            r3: R3Shape { layers: self.layers, top_k: self.top_k, experts: self.experts },
            fast: self.fast,
            keep_alive: KEEP_ALIVE,
            model_name: self.model_name.clone(),
        })
    }

    fn model(&self, role: Role, ranks: u16, version: Version) -> EngineConfig {
        let mut model = match role {
            Role::Prefill => EngineConfig::prefill(ranks),
            Role::Decode => EngineConfig::decode(ranks),
            Role::Regular => EngineConfig::regular(ranks),
        };
        model.version = version;
        model.r3.row_bytes = self.layers * self.top_k * 4;
        model.r3.by_reference = self.plugin;
        if let Some(running) = self.max_running {
            model.max_running = running;
        }
        if let Some(tokens) = self.max_total_tokens {
            model.max_total_tokens = tokens;
        }
        if let (Some(slots), Some(mamba)) = (self.mamba_slots, model.mamba) {
            model.mamba = (slots > 0).then_some(crate::model::Mamba { slots, ..mamba });
        }
        if let Some(timeout) = self.timeout {
            model.waiting_timeout = Duration::from_secs_f64(timeout);
            model.bootstrap_timeout = model.waiting_timeout;
        }
        model
    }
}

fn spread(name: &str, ranks: u16, engines: u16) -> Result<Vec<u16>, String> {
    if ranks == 0 {
        return Ok(Vec::new());
    }
    if engines == 0 || !ranks.is_multiple_of(engines) {
        return Err(format!(
            "--{name} {ranks} ranks cannot be spread evenly over --{name}-engines {engines}; change one of them"
        ));
    }
    Ok(vec![ranks / engines; engines as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_and_four_are_the_incident() {
        let fleet = EmulateOptions::default().fleet().unwrap();
        let seen: Vec<_> =
            fleet.engines.iter().map(|e| (e.model.role, e.model.ranks, e.port, e.bootstrap_port)).collect();
        assert_eq!(seen, [(Role::Prefill, 4, 31_000, 31_002), (Role::Decode, 4, 31_001, 0)]);
    }

    #[test]
    fn ranks_are_spread_evenly_or_refused_by_name() {
        let options = EmulateOptions {
            prefill: 8,
            prefill_engines: 2,
            regular: 2,
            regular_engines: 2,
            port: 0,
            ..Default::default()
        };
        let ranks: Vec<_> = options.fleet().unwrap().engines.iter().map(|e| e.model.ranks).collect();
        assert_eq!(ranks, [4, 4, 4, 1, 1]);
        let message = EmulateOptions { decode_engines: 3, ..Default::default() }.fleet().unwrap_err();
        assert!(message.contains("--decode 4 ranks") && message.contains("--decode-engines 3"), "{message}");
        assert!(serde_json::from_str::<EmulateOptions>(r#"{"prefil":2}"#).unwrap_err().to_string().contains("prefil"));
    }

    #[test]
    fn every_number_outside_of_its_bounds_is_refused_by_its_options_name() {
        let set = |name: &str, value: f64| {
            let mut options = serde_json::to_value(EmulateOptions::default()).unwrap();
            options[name] = if value.fract() == 0.0 { (value as i64).into() } else { value.into() };
            serde_json::from_value::<EmulateOptions>(options)
        };
        for (name, low, high) in EmulateOptions::BOUNDS {
            for wrong in [low - 1.0, high + 1.0] {
                // What the type itself does not hold never gets here.
                let Ok(options) = set(name, wrong) else { continue };
                let message = options.fleet().unwrap_err();
                let flag = format!("--{} ", name.replace('_', "-"));
                assert!(message.starts_with(&flag) && message.contains("between"), "{name} {wrong}: {message}");
            }
        }
        for scale in [f64::NAN, f64::INFINITY, 0.0, -1.0, 0.5, 1000.5] {
            let message = EmulateOptions { scale, ..Default::default() }.fleet().unwrap_err();
            assert!(message.starts_with("--scale ") && message.ends_with("between 1 and 1000"), "{message}");
        }
        for timeout in [f64::NAN, 0.0, -5.0] {
            let message = EmulateOptions { timeout: Some(timeout), ..Default::default() }.fleet().unwrap_err();
            assert!(message.starts_with("--timeout "), "{message}");
        }
        let numbers = serde_json::to_value(EmulateOptions::default()).unwrap();
        for (name, value) in numbers.as_object().unwrap() {
            let bounded = EmulateOptions::BOUNDS.iter().any(|(bound, ..)| bound == name);
            assert!(bounded || !value.is_number(), "{name} has no bounds");
        }
    }
}
