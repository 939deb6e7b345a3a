//! What an engine says about itself when it is registered. Everything may be missing: an engine that answers nothing but `/generate`
//! is one rank, bounded by the router's own ledger.
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Uri};
use r3router_core::time::Moment;
use r3router_core::topology::{Allocation, EngineFacts, Role};
use serde_json::{Map, Value};

use crate::address::Address;
use crate::ask::{Answer, NoAnswer, ask, get};
use crate::check::{KnownTopology, Topology, Traits, Version};
use crate::loads::{Offset, Polled, mamba_gauges, rank_reports};
use crate::upstream::{Call, Fault, Pool};
use crate::worker::Abilities;

/// How long one question may take. `/server_info` passes through a scheduler that may be busy.
const QUESTION: Duration = Duration::from_secs(5);
/// How long prefill's bootstrap server may take, which answers from memory.
const BOOTSTRAP: Duration = Duration::from_secs(2);

/// What to ask, and of whom.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// The engine's connections.
    pub pool: &'a Arc<Pool>,
    /// What it is registered as.
    pub role: Role,
    /// `Bearer key`.
    pub key: Option<&'a HeaderValue>,
    /// Its bootstrap port, when the registration named it.
    pub bootstrap_port: Option<u16>,
    /// Path of its health check.
    pub health: &'a str,
    /// How long the health check may take.
    pub health_limit: Duration,
    /// Mamba slots per request, when the settings name them.
    pub mamba_slots_per_request: Option<u32>,
    /// The engines' waiting timeout, when the settings name it, in the fleet's time.
    pub waiting_timeout: Option<Duration>,
    /// How much faster than the machine's clock the fleet's runs: 1 unless it is emulated.
    pub scale: f64,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Number of DP ranks.
    pub ranks: u16,
    /// For the admission.
    pub facts: EngineFacts,
    /// For the data plane.
    pub abilities: Abilities,
    /// Port of the bootstrap server.
    pub bootstrap_port: Option<u16>,
    /// `version`, `model_path` and such, for the worker list.
    pub labels: Map<String, Value>,
    /// What must fit the other engines.
    pub traits: Traits,
}

/// What an engine can never work with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// It wants a key that it did not get.
    Key,
    /// It runs in the other mode.
    Role,
    /// The path of the health check is none.
    Path,
}

/// Why a probe did not end in a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// Not up yet; ask again.
    NotYet(String),
    /// The connection was refused or impossible: there is no process.
    Dead(String),
    /// It can never work so.
    Never(Wrong, String),
}

impl NotFound {
    /// The reason.
    pub fn why(&self) -> &str {
        match self {
            Self::NotYet(why) | Self::Dead(why) | Self::Never(_, why) => why,
        }
    }
}

/// Asks an engine who it is.
///
/// # Errors
/// [`NotFound`].
pub async fn probe(q: &Question<'_>) -> Result<Found, NotFound> {
    let slow_health = healthy(q).await?;
    let (server, model, loads) = tokio::join!(
        either(q, "/server_info", "/get_server_info"),
        either(q, "/model_info", "/get_model_info"),
        loads(q)
    );
    // A health check that ran into its limit is no death: a busy engine answers what needs no scheduler.
    if slow_health && model.is_none() && server.is_none() {
        return Err(NotFound::NotYet(format!("{} and /model_info gave no answer in time", q.health)));
    }
    for (path, answer) in [("/server_info", &server), ("/model_info", &model)] {
        if let Some(answer) = answer
            && matches!(answer.status, 401 | 403)
        {
            return Err(NotFound::Never(
                Wrong::Key,
                format!(
                    "{path} answered {}: the engine wants a key; set it with --worker-api-key or as api_key in POST /workers",
                    answer.status
                ),
            ));
        }
    }
    let info = server.filter(Answer::ok).and_then(|a| a.json()).unwrap_or(Value::Null);
    let model = model.filter(Answer::ok).and_then(|a| a.json()).unwrap_or(Value::Null);
    check_role(q.role, &info, &model)?;
    let mut found = read_info(q, &info);
    found.facts.reports_load = loads.is_some();
    found.traits = Traits {
        ranks_info: found.abilities.ranks_known.then_some(found.ranks),
        ranks_loads: loads.filter(|r| *r > 0),
        waiting_timeout: said_waiting_timeout(&info, q.scale),
        slow_health,
        ..Traits::read(&info, &model)
    };
    if let Some(ranks) = loads.filter(|r| *r > 0) {
        found.ranks = found.ranks.max(ranks);
        found.abilities.ranks_known = true;
    }
    if q.role == Role::Prefill {
        ask_bootstrap(q, &mut found).await;
    }
    if found.facts.mamba_slots.is_some()
        && let Ok(answer) = get(q.pool, "/metrics", q.key, QUESTION).await
        && answer.ok()
        && let Some(pool) = std::str::from_utf8(&answer.body).ok().and_then(|m| mamba_gauges(m).first()?.1.pool())
    {
        // The gauges know the pool that was really made; flags only say what was asked for.
        found.facts.mamba_slots = Some(pool);
    }
    for (from, name) in [
        (&info, "version"),
        (&model, "model_path"),
        (&info, "model_path"),
        (&model, "served_model_name"),
        (&info, "disaggregation_mode"),
        (&info, "load_balance_method"),
        (&model, "weight_version"),
        (&model, "model_type"),
        (&info, "tp_size"),
        (&info, "dp_size"),
    ] {
        if let Some(value) = from.get(name)
            && !value.is_null()
        {
            // Texts, as labels are.
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            found.labels.insert(name.to_owned(), text.into());
        }
    }
    Ok(found)
}

/// `Ok(true)` when the health check ran into its limit.
async fn healthy(q: &Question<'_>) -> Result<bool, NotFound> {
    let Ok(uri) = q.health.parse::<Uri>() else {
        return Err(NotFound::Never(Wrong::Path, format!("health check endpoint {:?} is not a path", q.health)));
    };
    match ask(q.pool, &Call::get(uri).with_key(q.key), q.health_limit).await {
        Ok(answer) if answer.status >= 500 => Err(NotFound::NotYet(format!("{} answered {}", q.health, answer.status))),
        Ok(_) => Ok(false),
        Err(NoAnswer::Slow(_)) => Ok(true),
        Err(NoAnswer::Fault(Fault::Connect(why))) => Err(NotFound::Dead(why)),
        Err(NoAnswer::Fault(fault)) => Err(NotFound::NotYet(format!("{}: {fault}", q.health))),
    }
}

async fn either(q: &Question<'_>, new: &'static str, old: &'static str) -> Option<Answer> {
    let first = get(q.pool, new, q.key, QUESTION).await.ok();
    match first {
        Some(answer) if matches!(answer.status, 404 | 405 | 501) => get(q.pool, old, q.key, QUESTION).await.ok(),
        other => other,
    }
}

/// Number of ranks that report their load; `None` when the engine has no such report.
async fn loads(q: &Question<'_>) -> Option<u16> {
    let answer = get(q.pool, "/v1/loads", q.key, QUESTION).await.ok()?;
    if !answer.ok() {
        return None;
    }
    let polled = Polled { sent: Moment::ZERO, answered: Moment::ZERO, scale: 1.0 };
    let reports = rank_reports(&answer.json()?, polled, &mut Offset::default());
    reports.iter().map(|r| r.rank + 1).max()
}

fn check_role(role: Role, info: &Value, model: &Value) -> Result<(), NotFound> {
    let mode = [info, model].into_iter().find_map(|v| v.get("disaggregation_mode").and_then(Value::as_str));
    let (Some(mode), wrong) = (
        mode,
        match role {
            Role::Prefill => "decode",
            Role::Decode => "prefill",
            Role::Regular => return Ok(()),
        },
    ) else {
        return Ok(());
    };
    if mode == wrong {
        return Err(NotFound::Never(
            Wrong::Role,
            format!("the engine runs with --disaggregation-mode {mode}, but it is registered for the other role"),
        ));
    }
    Ok(())
}

fn read_info(q: &Question<'_>, info: &Value) -> Found {
    let count = |v: &Value, name: &str| v.get(name).and_then(Value::as_u64).filter(|n| *n > 0);
    let state = info.get("internal_states").and_then(|s| s.get(0)).unwrap_or(&Value::Null);
    let said = info
        .get("kv_events")
        .and_then(|k| count(k, "dp_size"))
        .or_else(|| count(info, "dp_size").map(|d| d * count(info, "attn_dp_size").unwrap_or(1)));
    let ranks = said.and_then(|r| u16::try_from(r).ok()).unwrap_or(1).max(1);
    let per_rank = |total: u64| (total / u64::from(ranks)).max(1);
    let max_running = count(state, "effective_max_running_requests_per_dp")
        .or_else(|| count(info, "max_running_requests").map(per_rank))
        .and_then(|m| u32::try_from(m).ok());
    let mamba_slots = count(state, "max_mamba_cache_size")
        .or_else(|| count(info, "max_mamba_cache_size").map(per_rank))
        .and_then(|m| u32::try_from(m).ok());
    let version = info.get("version").and_then(Value::as_str).and_then(|text| Version::parse(text).number);
    let slots_per_request =
        q.mamba_slots_per_request.or_else(|| mamba_slots.and(Some(slots_per_request(q.role, version, info))));
    let rust_frontend = info.get("frontend").and_then(Value::as_str) == Some("rust");
    let gives = info.get("enable_return_routed_experts").and_then(Value::as_bool);
    Found {
        ranks,
        facts: EngineFacts {
            max_running,
            extra_slots: info.get("disaggregation_decode_extra_slots").and_then(Value::as_u64).map(|e| e as u32),
            mamba_slots,
            mamba_slots_per_request: slots_per_request,
            max_total_tokens: count(info, "max_total_num_tokens")
                .or_else(|| state.get("memory_usage").and_then(|m| count(m, "token_capacity"))),
            page_size: count(info, "page_size").map(|p| p as u32),
            reserved_decode_tokens: count(info, "num_reserved_decode_tokens").map(|p| p as u32),
            chunked_prefill_size: count(info, "chunked_prefill_size").map(|p| p as u32),
            max_input_tokens: count(info, "max_req_input_len"),
            waiting_timeout: q.waiting_timeout.or_else(|| said_waiting_timeout(info, q.scale)),
            allocation: match info.get("disaggregation_decode_allocation_policy").and_then(Value::as_str) {
                Some("prefill_complete") => Allocation::PrefillComplete,
                _ => Allocation::Early,
            },
            reports_load: false,
        },
        abilities: Abilities {
            prefill_rank_for_decode: version.is_none_or(|v| v >= (0, 5, 11)),
            prefill_rank_for_prefill: version.is_some_and(|v| v >= (0, 5, 13)),
            start_len: version.is_none_or(|v| v >= (0, 5, 12)),
            routed_experts: if rust_frontend { Some(false) } else { gives },
            ranks_known: said.is_some(),
        },
        bootstrap_port: q
            .bootstrap_port
            .or_else(|| count(info, "disaggregation_bootstrap_port").and_then(|p| u16::try_from(p).ok())),
        labels: Map::new(),
        traits: Traits::default(),
    }
}

/// The waiting timeout that an engine tells, in the fleet's time. SGLang does not (it is an environment variable); engines that are
/// emulated do, in seconds of the machine, and others may in the name that the variable has.
fn said_waiting_timeout(info: &Value, scale: f64) -> Option<Duration> {
    let seconds =
        |from: &Value, name: &str| from.get(name).and_then(Value::as_f64).filter(|s| s.is_finite() && *s > 0.0);
    let emulated = info.get("emulator").and_then(|e| seconds(e, "waiting_timeout_s")).map(|s| s * scale);
    let told = || seconds(info, "disaggregation_waiting_timeout").map(|s| s * scale);
    emulated.or_else(told).and_then(|s| Duration::try_from_secs_f64(s).ok())
}

/// State slots that one request takes: one, and with extra buffers two more under overlap scheduling, else one more. Decode without a
/// radix cache needs no extra buffers from 0.5.13 on; before, the flag alone decided.
fn slots_per_request(role: Role, version: Option<(u32, u32, u32)>, info: &Value) -> u32 {
    let text = |name: &str| info.get(name).and_then(Value::as_str).unwrap_or("");
    let flag = |name: &str| info.get(name).and_then(Value::as_bool).unwrap_or(false);
    let extra = [text("mamba_radix_cache_strategy"), text("mamba_scheduler_strategy")]
        .iter()
        .any(|strategy| strategy.starts_with("extra_buffer"));
    let radix = match role {
        Role::Decode => flag("disaggregation_decode_enable_radix_cache"),
        _ => !flag("disable_radix_cache"),
    };
    let follows_flag = version.is_some_and(|v| v < (0, 5, 13));
    match extra && (radix || follows_flag) {
        false => 1,
        true if flag("disable_overlap_schedule") => 2,
        true => 3,
    }
}

/// Asks prefill's bootstrap server for its topology: the best source for the number of prefill ranks, and it needs no key.
async fn ask_bootstrap(q: &Question<'_>, found: &mut Found) {
    found.traits.topology = topology(q, found.bootstrap_port).await;
    let Topology::Known(known) = &found.traits.topology else { return };
    if let Some(ranks) = known.ranks {
        found.ranks = ranks;
        found.abilities.ranks_known = true;
    }
    if known.allocation.as_deref() == Some("prefill_complete") {
        found.facts.allocation = Allocation::PrefillComplete;
    }
}

async fn topology(q: &Question<'_>, port: Option<u16>) -> Topology {
    let Some(port) = port else { return Topology::NoPort };
    let address = q.pool.address();
    let Ok(address) = Address::parse(&format!("http://{}:{port}", address.host)) else { return Topology::NoPort };
    let pool = Pool::new(address, Duration::ZERO, BOOTSTRAP, q.pool.allow());
    let path = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    match get(&pool, path, None, BOOTSTRAP).await {
        Err(error) => Topology::Unreachable(port, error.to_string()),
        Ok(answer) if !answer.ok() => Topology::Status(port, answer.status),
        Ok(answer) => answer
            .json()
            .and_then(|value| KnownTopology::read(port, &value))
            .map_or(Topology::Strange(port), |known| Topology::Known(Box::new(known))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::{Question, read_info, said_waiting_timeout, slots_per_request};
    use r3router_core::topology::Role;
    use serde_json::json;

    use crate::address::Address;
    use crate::upstream::Pool;

    #[test]
    fn a_waiting_timeout_that_the_engine_tells_is_taken_in_the_fleets_time() {
        let of = |info| said_waiting_timeout(&info, 20.0);
        assert_eq!(of(json!({"emulator": {"waiting_timeout_s": 3.0}})), Some(Duration::from_secs(60)));
        assert_eq!(
            said_waiting_timeout(&json!({"disaggregation_waiting_timeout": 900}), 1.0),
            Some(Duration::from_secs(900))
        );
        for none in
            [json!({}), json!({"disaggregation_waiting_timeout": -1}), json!({"emulator": {"waiting_timeout_s": "x"}})]
        {
            assert_eq!(of(none), None);
        }
    }

    #[test]
    fn slots_follow_version_and_flags() {
        let info = json!({"mamba_scheduler_strategy": "extra_buffer"});
        assert_eq!(slots_per_request(Role::Decode, Some((0, 5, 12)), &info), 3);
        assert_eq!(slots_per_request(Role::Decode, Some((0, 5, 23)), &info), 1);
        let off = json!({"mamba_scheduler_strategy": "extra_buffer", "disable_overlap_schedule": true});
        assert_eq!(slots_per_request(Role::Decode, Some((0, 5, 11)), &off), 2);
        let radix = json!({"mamba_radix_cache_strategy": "extra_buffer_lazy", "disaggregation_decode_enable_radix_cache": true});
        assert_eq!(slots_per_request(Role::Decode, Some((0, 5, 23)), &radix), 3);
        assert_eq!(slots_per_request(Role::Decode, None, &json!({})), 1);
    }

    #[test]
    fn admission_is_told_the_engines_waiting_timeout() {
        let address = Address::parse("http://127.0.0.1:1").expect("an address");
        let pool = Pool::new(address, Duration::ZERO, Duration::from_secs(2), &Arc::default());
        let question = Question {
            pool: &pool,
            role: Role::Decode,
            key: None,
            bootstrap_port: None,
            health: "/health",
            health_limit: Duration::from_secs(5),
            mamba_slots_per_request: None,
            waiting_timeout: Some(Duration::from_secs(30)),
            scale: 1.0,
        };
        let info = json!({"version": "0.5.17", "disaggregation_waiting_timeout": 900});
        assert_eq!(read_info(&question, &info).facts.waiting_timeout, Some(Duration::from_secs(30)));
        let not_told = Question { waiting_timeout: None, ..question };
        assert_eq!(read_info(&not_told, &info).facts.waiting_timeout, Some(Duration::from_secs(900)));
        assert_eq!(read_info(&not_told, &json!({})).facts.waiting_timeout, None, "the core's default holds");
    }
}
