//! Faults of releases that a fleet should know of. Source: engine-protocol section 0, 1.3, 3.3 and 3.5.
use r3router_core::topology::Role;

use super::{Code, Fleet, Seen, names};
use crate::probe::Found;

/// The first release after 0.5.12 that was read; 0.5.12.post1 mends one of its faults only.
const AFTER_0_5_12: (u32, u32, u32) = (0, 5, 13);

pub(super) fn look(fleet: &mut Fleet<'_>) {
    if !fleet.settings.pd_disaggregation {
        return;
    }
    nixl(fleet);
    payloads(fleet);
    lookup(fleet);
    slots(fleet);
}

fn those<'a>(told: &[(&'a Seen, &'a Found)], of: impl Fn(&'a Found) -> bool) -> Vec<&'a Seen> {
    told.iter().filter(|(_, f)| of(f)).map(|(e, _)| *e).collect()
}

fn releases(told: &[(&Seen, &Found)], of: &[&Seen]) -> String {
    let mut all: Vec<&str> = told
        .iter()
        .filter(|(e, _)| of.iter().any(|o| o.url == e.url))
        .filter_map(|(_, f)| f.traits.version.as_ref().map(|v| &*v.text))
        .collect();
    all.sort_unstable();
    all.dedup();
    names(all)
}

fn nixl(fleet: &mut Fleet<'_>) {
    let told = fleet.told();
    let dense = those(&told, |f| {
        let post = f.traits.version.as_ref().is_some_and(|v| v.post);
        f.traits.nixl() && f.traits.number() == Some((0, 5, 12)) && !post && !f.traits.has_state
    });
    if !dense.is_empty() {
        fleet.add(
            Code::NixlDense,
            &dense,
            "SGLang 0.5.12 with NIXL and a model without state slots never sends the last part of a transfer: every request ends after the \
             waiting timeout",
            "run 0.5.12.post1 or later, or another transfer backend",
        );
    }
    let silent = those(&told, |f| f.traits.nixl() && f.traits.before(AFTER_0_5_12));
    if !silent.is_empty() {
        fleet.add(
            Code::NixlNotice,
            &silent,
            format!(
                "NIXL of SGLang {} tells neither side when the other fails: decode holds the reservation of a request that prefill has lost \
                 for the whole waiting timeout and then says \"NIXL KVReceiver Exception\", whatever the cause was; and it frees memory that \
                 prefill may still write into",
                releases(&told, &silent)
            ),
            "run a release from 0.5.23, where failures are sent and pages are held until prefill has let go; until then do not let clients \
             abort in bulk, and route with something that ends both halves as soon as one fails, as r3router does",
        );
    }
}

fn payloads(fleet: &mut Fleet<'_>) {
    let told = fleet.told();
    let asked = told.iter().any(|(_, f)| f.traits.routed_experts == Some(true));
    if !asked {
        return;
    }
    let prefill = fleet.of(Role::Prefill);
    let without = those(&prefill, |f| f.traits.before(AFTER_0_5_12));
    if !without.is_empty() {
        fleet.add(
            Code::R3Prefill,
            &without,
            format!(
                "stock prefill engines of SGLang {} return no routing payloads (R3), and the prompt's rows that decode sends are stale memory: \
                 the router answers such requests with an error instead of junk",
                releases(&prefill, &without)
            ),
            "run a release from 0.5.23, or a build whose prefill returns routed_experts (the branch for miles does)",
        );
    }
    let decode = fleet.of(Role::Decode);
    let whole = those(&decode, |f| f.traits.before((0, 5, 12)));
    if !whole.is_empty() {
        fleet.add(
            Code::StartLen,
            &whole,
            format!(
                "decode engines of SGLang {} do not know routed_experts_start_len: each sends the prompt's rows again, so that a sample's \
                 payload leaves twice",
                releases(&decode, &whole)
            ),
            "run a release from 0.5.12 on decode",
        );
    }
}

fn lookup(fleet: &mut Fleet<'_>) {
    let told = fleet.told();
    let old = those(&told, |f| f.traits.before((0, 5, 11)));
    if old.is_empty() {
        return;
    }
    fleet.add(
        Code::RankLookup,
        &old,
        "SGLang 0.5.10 does not notice when prefill computes on one rank and decode waits for another; the request then ends with the waiting \
         timeout. The router draws rooms that name the rank, and leaves disagg_prefill_dp_rank out, which this release cannot take in the \
         first request; other clients get neither",
        "run a release from 0.5.11, and let nothing but the router send to these engines",
    );
}

fn slots(fleet: &mut Fleet<'_>) {
    let decode = fleet.of(Role::Decode);
    let wasteful = those(&decode, |f| {
        f.traits.has_state
            && f.traits.before(AFTER_0_5_12)
            && f.traits.mamba_strategy.as_deref().is_some_and(|s| s.starts_with("extra_buffer"))
    });
    if wasteful.is_empty() {
        return;
    }
    let dry = wasteful.iter().any(|e| e.told().is_some_and(|f| f.traits.before((0, 5, 11))));
    let more = if dry { ", and 0.5.10 makes a pool of one each, which runs dry" } else { "" };
    fleet.add(
        Code::StateSlots,
        &wasteful,
        format!(
            "decode of SGLang {} takes three state slots a request with extra_buffer (two without overlap), which it does not need{more}",
            releases(&decode, &wasteful)
        ),
        "start decode with --mamba-scheduler-strategy no_buffer, which costs it nothing, or run a release from 0.5.23; keep extra_buffer on \
         prefill",
    );
}
