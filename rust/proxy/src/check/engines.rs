//! Checks of each engine by itself: it is there, it is what it is registered as, and decode can reach its bootstrap server.
use std::net::IpAddr;

use r3router_core::topology::Role;

use super::{Code, Fleet, Seen, Topology};
use crate::probe::{Found, NotFound, Wrong};
use crate::workers::role_name;

pub(super) fn look(fleet: &mut Fleet<'_>) {
    roles(fleet);
    let engines = fleet.engines;
    for engine in engines {
        match &engine.found {
            Err(why) => missing(fleet, engine, why),
            Ok(found) => {
                answers(fleet, engine, found);
                if engine.role == Role::Prefill {
                    bootstrap(fleet, engine, found);
                }
            }
        }
        kept_alive(fleet, engine);
    }
    reachable_by_decode(fleet);
}

fn roles(fleet: &mut Fleet<'_>) {
    if fleet.settings.service_discovery && fleet.engines.is_empty() {
        fleet.add(
            Code::Pods,
            &[],
            "engines are found as pods, which only a running router does: none was asked",
            "ask that router with `r3router check --admin URL`, or name engines with --prefill and --decode to have them asked from here",
        );
    }
    let needed: &[Role] =
        if fleet.settings.pd_disaggregation { &[Role::Prefill, Role::Decode] } else { &[Role::Regular] };
    for role in needed {
        // Pods come by themselves.
        if fleet.settings.service_discovery || fleet.engines.iter().any(|e| e.role == *role) {
            continue;
        }
        let advice = match role {
            Role::Prefill => "name one with --prefill URL BOOTSTRAP_PORT, or register it with POST /workers",
            Role::Decode => "name one with --decode URL, or register it with POST /workers",
            Role::Regular => "name one with --worker-urls URL; for split engines add --pd-disaggregation",
        };
        fleet.add(Code::NoEngine, &[], format!("no {} engine is named", role_name(*role)), advice);
    }
}

fn missing(fleet: &mut Fleet<'_>, engine: &Seen, why: &NotFound) {
    let flag = match engine.role {
        Role::Prefill => "--prefill",
        Role::Decode => "--decode",
        Role::Regular => "--worker-urls",
    };
    match why {
        NotFound::Dead(what) => fleet.add(
            Code::Unreachable,
            &[engine],
            format!("the {} engine cannot be reached: {what}", role_name(engine.role)),
            format!("start it, or mend host and port of {flag}; it must be reachable from the router's machine"),
        ),
        NotFound::NotYet(what) => fleet.add(
            Code::Unhealthy,
            &[engine],
            format!("the {} engine does not serve: {what}", role_name(engine.role)),
            "wait until it has loaded its model, or read its log; --health-check-endpoint names the path that is asked",
        ),
        NotFound::Never(Wrong::Key, what) => {
            fleet.add(Code::Key, &[engine], what.clone(), "give the router the engines' --api-key as --worker-api-key");
        }
        NotFound::Never(Wrong::Role, what) => fleet.add(
            Code::Role,
            &[engine],
            format!("{what} ({})", role_name(engine.role)),
            "exchange --prefill and --decode, or start the engine with the other --disaggregation-mode",
        ),
        NotFound::Never(Wrong::Path, what) => {
            fleet.add(Code::Unhealthy, &[engine], what.clone(), "mend --health-check-endpoint");
        }
    }
}

fn answers(fleet: &mut Fleet<'_>, engine: &Seen, found: &Found) {
    let traits = &found.traits;
    if traits.slow_health {
        fleet.add(
            Code::SlowHealth,
            &[engine],
            format!("{} ran into its limit although the engine answers /model_info", fleet.settings.health_check_endpoint),
            "the engine is busy, or its Python front end is: raise --health-check-timeout-secs above its longest step, or check /ready \
             instead (--health-check-endpoint /ready, releases from 0.5.23)",
        );
    }
    let topology = match &traits.topology {
        Topology::Known(known) => known.ranks,
        _ => None,
    };
    let said: Vec<(&str, u16)> =
        [("/server_info", traits.ranks_info), ("/v1/loads", traits.ranks_loads), ("its bootstrap server", topology)]
            .into_iter()
            .filter_map(|(who, ranks)| ranks.map(|r| (who, r)))
            .collect();
    if said.iter().any(|(_, ranks)| Some(*ranks) != said.first().map(|s| s.1)) {
        let text: Vec<String> = said.iter().map(|(who, ranks)| format!("{ranks} by {who}")).collect();
        fleet.add(
            Code::Ranks,
            &[engine],
            format!("the engine's answers name different numbers of ranks: {}", text.join(", ")),
            "a rank has died, or another process answers at one of the ports: restart the engine, and see that no other uses its ports",
        );
    }
    if traits.told && !found.facts.reports_load {
        fleet.add(
            Code::NoLoad,
            &[engine],
            "/v1/loads is not answered, so load that is not this router's is not seen",
            "let nobody else send to this engine, or upgrade it (SGLang from 0.5.10 has the route)",
        );
    }
    if traits.has_state && traits.metrics == Some(false) {
        fleet.add(
            Code::NoMetrics,
            &[engine],
            "the model keeps state slots and the engine runs without --enable-metrics: how many slots are free is computed from flags",
            "start the engine with --enable-metrics, or set --mamba-slots-per-request when requests take more slots than computed",
        );
    }
    if traits.told && traits.number().is_none() {
        let text = traits.version.as_ref().map_or("no version".to_owned(), |v| format!("version {}", v.text));
        fleet.add(
            Code::VersionUnknown,
            &[engine],
            format!("the engine tells {text}: it is taken for a current release, and known faults cannot be looked up"),
            "see python/CHECKS.md for the faults of releases up to 0.5.12",
        );
    }
}

fn bootstrap(fleet: &mut Fleet<'_>, engine: &Seen, found: &Found) {
    let own = found.traits.bootstrap_port;
    let other = own.filter(|own| engine.bootstrap_port.is_some_and(|port| port != *own));
    let named = |port: u16| match other {
        Some(own) => {
            format!("name {own}, which the engine's --disaggregation-bootstrap-port is, instead of {port} in --prefill")
        }
        None => format!(
            "start the engine with --disaggregation-bootstrap-port {port}, or name its real port in --prefill URL PORT"
        ),
    };
    match &found.traits.topology {
        Topology::NotAsked => {}
        Topology::NoPort => fleet.add(
            Code::BootstrapUnknown,
            &[engine],
            "the bootstrap port is neither named nor told by the engine, and decode must be told one",
            "name it in --prefill URL PORT (SGLang's default is 8998)",
        ),
        Topology::Unreachable(port, what) => fleet.add(
            Code::BootstrapUnreachable,
            &[engine],
            format!("nothing answers at bootstrap port {port} from here ({what}), where decode asks for every prefill engine's ranks"),
            format!("{}; let firewalls and NetworkPolicies pass it from decode engines", named(*port)),
        ),
        Topology::Status(port, 503) => fleet.add(
            Code::BootstrapIncomplete,
            &[engine],
            format!("the bootstrap server at port {port} answers 503: not all prefill ranks have registered with it"),
            "wait until the engine has started; else a rank registers elsewhere: all ranks of the engine need the same \
             --disaggregation-bootstrap-port and --dist-init-addr",
        ),
        Topology::Status(port, status) => {
            let what = format!("port {port} answers {status} to GET /route: it is no bootstrap server");
            fleet.add(Code::BootstrapPort, &[engine], what, named(*port));
        }
        Topology::Strange(port) => {
            let what = format!("what listens at port {port} is no bootstrap server");
            fleet.add(Code::BootstrapPort, &[engine], what, named(*port));
        }
        Topology::Known(known) => {
            if let Some(own) = other {
                let what = format!(
                    "bootstrap port {} answers, but the engine names {own}: decode would meet the ranks of another engine",
                    known.port
                );
                fleet.add(Code::BootstrapPort, &[engine], what, named(known.port));
            }
        }
    }
}

fn kept_alive(fleet: &mut Fleet<'_>, engine: &Seen) {
    let Some(after) = engine.closed_after else { return };
    let ours = fleet.settings.upstream_idle_secs;
    fleet.add(
        Code::KeepAlive,
        &[engine],
        format!(
            "the engine closes idle connections after {:.1} s and the router keeps them for {:.1} s: a request that meets the close is \
             reset, and one half of a pair is lost",
            after.as_secs_f64(),
            ours.as_secs_f64()
        ),
        format!(
            "set --upstream-idle-secs below {:.1}, or SGLANG_TIMEOUT_KEEP_ALIVE of the engine above {:.0} (SGLang's default is 5 s)",
            after.as_secs_f64(),
            ours.as_secs_f64().ceil()
        ),
    );
}

/// Whether only this machine can reach an address.
fn local(host: &str) -> bool {
    match host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
        Ok(ip) => ip.is_loopback() || ip.is_unspecified(),
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

/// Decode is told prefill's host as the router knows it (engine-protocol 1.1).
fn reachable_by_decode(fleet: &mut Fleet<'_>) {
    let decode = |e: &&Seen| e.role == Role::Decode && !local(&e.address.host);
    let Some(far) = fleet.engines.iter().find(decode) else { return };
    let near: Vec<&Seen> = fleet.engines.iter().filter(|e| e.role == Role::Prefill && local(&e.address.host)).collect();
    if near.is_empty() {
        return;
    }
    fleet.add(
        Code::BootstrapHost,
        &near,
        format!(
            "decode is told this host as bootstrap_host, and {} is on another machine, where the name means that machine itself",
            far.url
        ),
        "name prefill by an address that decode engines can reach",
    );
}
