//! Checks of engines against each other. Sources: engine-protocol sections 2 and 3 (what must match is enforced by decode, which fails the
//! request, or by nobody).
use r3router_core::topology::Role;

use super::{Code, Fleet, Seen, Topology, differ, names};
use crate::probe::Found;

pub(super) fn look(fleet: &mut Fleet<'_>) {
    model(fleet);
    if !fleet.settings.pd_disaggregation {
        return;
    }
    kv(fleet);
    policies(fleet);
    releases(fleet);
    state(fleet);
    payloads(fleet);
    pool(fleet);
}

/// The last part of a path: the same weights lie in different folders on different hosts.
fn base(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or(path)
}

fn model(fleet: &mut Fleet<'_>) {
    if let Some((said, who)) = differ(&fleet.told(), |f| f.traits.model.as_deref().map(base)) {
        let what = format!("the engines serve different models: {said}");
        fleet.add(Code::Model, &who, what, "route one model with one router; take the other engines out");
    }
}

/// The KV data type that can be compared: a resolved one, or the flag where it names one.
fn dtype(found: &Found) -> Option<&str> {
    let resolved = match &found.traits.topology {
        Topology::Known(known) => known.kv_dtype.as_deref(),
        _ => None,
    };
    found.traits.kv_dtype.as_deref().or(resolved)
}

fn kv(fleet: &mut Fleet<'_>) {
    let told = fleet.told();
    let page = |f: &Found| match &f.traits.topology {
        Topology::Known(known) => known.page_size.or(f.traits.page_size),
        _ => f.traits.page_size,
    };
    if let Some((said, who)) = differ(&told, page) {
        fleet.add(
            Code::PageSize,
            &who,
            format!("KV pages differ, and decode refuses every request of such a pair: {said} tokens"),
            "start all engines with the same --page-size",
        );
    }
    if let Some((said, who)) = differ(&told, dtype) {
        fleet.add(
            Code::KvDtype,
            &who,
            format!("the KV caches have different data types, and decode refuses such a pair: {said}"),
            "start all engines with the same --kv-cache-dtype",
        );
    }
    if let Some((said, who)) = differ(&told, |f| f.traits.backend.as_deref()) {
        fleet.add(
            Code::Backend,
            &who,
            format!("KV is sent over different transports, which cannot talk to each other: {said}"),
            "start all engines with the same --disaggregation-transfer-backend",
        );
    }
    for (engine, found) in fleet.of(Role::Decode) {
        if found.traits.cp.is_some_and(|cp| cp > 1) {
            let what = format!(
                "decode runs with context parallel size {}, and it takes KV with 1 only",
                found.traits.cp.unwrap_or(1)
            );
            fleet.add(Code::Parallel, &[engine], what, "start decode with --attn-cp-size 1");
        }
        let prefill: Vec<u64> = fleet.of(Role::Prefill).iter().filter_map(|(_, f)| f.traits.pp).collect();
        let own = found.traits.pp.unwrap_or(1);
        if own > 1 && prefill.iter().any(|pp| *pp != own) {
            let what = format!("decode runs with pipeline parallel size {own} and prefill with {prefill:?}");
            fleet.add(Code::Parallel, &[engine], what, "start decode with the pipeline size of prefill, or with 1");
        }
    }
}

fn policies(fleet: &mut Fleet<'_>) {
    let expected = |f: &Found| match &f.traits.topology {
        Topology::Known(known) => known.allocation.clone(),
        _ => None,
    };
    let prefill = fleet.of(Role::Prefill).into_iter().find_map(|(e, f)| expected(f).map(|policy| (e, policy)));
    for (engine, found) in fleet.of(Role::Decode) {
        let own = found.traits.allocation.as_deref();
        if let (Some((from, policy)), Some(own)) = (&prefill, own)
            && **policy != *own
        {
            fleet.add(
                Code::Allocation,
                &[engine],
                format!("decode allocates {own} and prefill ({}) expects {policy}", from.url),
                "start all engines with the same --disaggregation-decode-allocation-policy",
            );
        }
        // prefill_complete is Mooncake's, and for attention alone (engine-protocol 3.1).
        if own == Some("prefill_complete") && (found.traits.nixl() || found.traits.has_state) {
            fleet.add(
                Code::Allocation,
                &[engine],
                "decode is to reserve after prefill (prefill_complete), which works over Mooncake and for models without state only",
                "start all engines with --disaggregation-decode-allocation-policy early",
            );
        }
    }
    let other: Vec<(&Seen, String)> = fleet
        .of(Role::Prefill)
        .into_iter()
        .filter_map(|(engine, found)| {
            let follows = match &found.traits.topology {
                Topology::Known(known) => known.follows_room,
                _ => None,
            };
            let named = found.traits.load_balance.as_deref();
            let wrong = follows == Some(false) || named.is_some_and(|m| !matches!(m, "follow_bootstrap_room" | "auto"));
            wrong.then(|| (engine, named.unwrap_or("another method").to_owned()))
        })
        .collect();
    if let Some((_, method)) = other.first() {
        let engines: Vec<&Seen> = other.iter().map(|(e, _)| *e).collect();
        let what = format!(
            "prefill distributes by {method}: decode has to ask its bootstrap server for the rank of every request, whose entries are \
             dropped after 120 s; the router names the rank to both, other clients do not"
        );
        fleet.add(
            Code::LoadBalance,
            &engines,
            what,
            "start prefill with --load-balance-method follow_bootstrap_room (or auto)",
        );
    }
    if let Some((said, who)) =
        differ(&fleet.told(), |f| f.traits.waiting_timeout.map(|t| format!("{} s", t.as_secs_f64())))
    {
        fleet.add(
            Code::Timeouts,
            &who,
            format!("the engines' waiting timeouts differ: {said}"),
            "set SGLANG_DISAGGREGATION_WAITING_TIMEOUT and SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT to one value on all engines",
        );
    }
}

fn releases(fleet: &mut Fleet<'_>) {
    let text = |f: &Found| f.traits.version.as_ref().map(|v| v.text.clone());
    if let Some((said, who)) = differ(&fleet.told(), text) {
        fleet.add(
            Code::Versions,
            &who,
            format!("engines run different releases, whose transfers are tested with themselves only: {said}"),
            "run one release on all engines; upgrade prefill and decode together",
        );
    }
}

fn state(fleet: &mut Fleet<'_>) {
    let told: Vec<_> = fleet.told().into_iter().filter(|(_, f)| f.traits.has_state).collect();
    // Decode without a radix cache needs no strategy (3.3), so that only engines that use theirs are held to one.
    let with: Vec<_> = told.iter().copied().filter(|(e, f)| e.role == Role::Prefill || f.traits.decode_radix).collect();
    if let Some((said, who)) = differ(&with, |f| f.traits.mamba_strategy.as_deref()) {
        fleet.add(
            Code::Mamba,
            &who,
            format!("engines that cache prefixes keep the model's state in different ways: {said}"),
            "give all of them the same --mamba-radix-cache-strategy (--mamba-scheduler-strategy up to 0.5.12)",
        );
    }
    let slow: Vec<&Seen> = told
        .iter()
        .filter(|(e, f)| {
            e.role == Role::Prefill && (f.traits.mamba_strategy.as_deref() == Some("no_buffer") || f.traits.overlap_off)
        })
        .map(|(e, _)| *e)
        .collect();
    if !slow.is_empty() {
        fleet.add(
            Code::Mamba,
            &slow,
            "prefill runs without overlap scheduling, which the strategy no_buffer switches off: every batch waits for the one before",
            "start prefill with --mamba-radix-cache-strategy extra_buffer (--mamba-scheduler-strategy up to 0.5.12)",
        );
    }
}

fn payloads(fleet: &mut Fleet<'_>) {
    let told = fleet.told();
    let sends = |f: &Found| if f.traits.rust_frontend { Some(false) } else { f.traits.routed_experts };
    if !told.iter().any(|(_, f)| sends(f) == Some(true)) {
        return;
    }
    let silent: Vec<&Seen> = told.iter().filter(|(_, f)| sends(f) == Some(false)).map(|(e, _)| *e).collect();
    if silent.is_empty() {
        return;
    }
    let with: Vec<&str> = told.iter().filter(|(_, f)| sends(f) == Some(true)).map(|(e, _)| &*e.url).collect();
    fleet.add(
        Code::RoutedExperts,
        &silent,
        format!(
            "sends no routing payloads (R3), which {} does: a reply needs the rows of prefill and of decode",
            names(with)
        ),
        "start every engine with --enable-return-routed-experts, and with the Python front end",
    );
}

fn pool(fleet: &mut Fleet<'_>) {
    // What prefill can take at all: its limit on prompts, and its own pool.
    let most =
        |f: &Found| f.facts.max_input_tokens.map(|most| f.facts.max_total_tokens.map_or(most, |pool| most.min(pool)));
    let Some(longest) = fleet.of(Role::Prefill).iter().filter_map(|(_, f)| most(f)).max() else { return };
    for (engine, found) in fleet.of(Role::Decode) {
        let Some(pool) = found.facts.max_total_tokens.filter(|pool| *pool < longest) else { continue };
        fleet.add(
            Code::Pool,
            &[engine],
            format!("a decode rank holds {pool} tokens and prefill takes prompts of {longest}: longer ones are refused with 400"),
            "raise --mem-fraction-static of decode, or lower --context-length of all engines to what decode holds",
        );
    }
}
