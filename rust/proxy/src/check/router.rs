//! Checks of the router's settings against what the engines can do: what bounds decode's reservations, clocks, and what routing payloads
//! (R3) weigh. Sources: engine-protocol sections 3.1 (reservation), 3.5 (clocks) and 6 (the incident).
use std::fmt::Write as _;
use std::time::Duration;

use r3router_core::admission::WindowMode;
use r3router_core::capacity::DEFAULT_WAITING_TIMEOUT;
use r3router_core::topology::{Allocation, Role};

use super::{Code, Fleet, Seen};
use crate::probe::Found;
use crate::settings::show_bytes;

/// Text of routing payloads that the Python processes of one engine emit in a second: 1.0 s for a reply of 97.4 MB, measured on an H200
/// with one detokenizer (engine-protocol 6.6). Fleets differ; the order of magnitude is what counts.
const EMITTED_PER_SECOND: f64 = 97.4e6;
/// Base64 text of a byte.
const TEXT: f64 = 4.0 / 3.0;

pub(super) fn look(fleet: &mut Fleet<'_>) {
    clocks(fleet);
    if fleet.settings.pd_disaggregation {
        reservations(fleet);
        payloads(fleet);
    }
}

/// The engines' waiting timeout, and whether they told it.
fn timeout(fleet: &Fleet<'_>) -> (Duration, bool) {
    let told = fleet.told().iter().filter_map(|(_, f)| f.traits.waiting_timeout).min();
    let set = fleet.settings.engine_waiting_timeout_secs;
    (set.or(told).unwrap_or(DEFAULT_WAITING_TIMEOUT), told.is_some() || set.is_some())
}

fn clocks(fleet: &mut Fleet<'_>) {
    let pd = fleet.settings.pd_disaggregation;
    let (waits, told) = timeout(fleet);
    if pd && !told && !fleet.told().is_empty() {
        fleet.add(
            Code::TimeoutUnknown,
            &[],
            format!(
                "the engines do not tell their waiting timeout, an environment variable; {} s is assumed",
                waits.as_secs()
            ),
            "set --engine-waiting-timeout-secs when SGLANG_DISAGGREGATION_WAITING_TIMEOUT is set on the engines",
        );
    }
    let set = fleet.settings.engine_waiting_timeout_secs;
    // The engines' own word, before the setting is taken in its place.
    let other: Vec<(&Seen, Duration)> = fleet
        .told()
        .into_iter()
        .filter_map(|(e, f)| f.traits.waiting_timeout.filter(|t| set.is_some_and(|s| s != *t)).map(|t| (e, t)))
        .collect();
    if let (Some(set), Some((_, told))) = (set, other.first()) {
        let engines: Vec<&Seen> = other.iter().map(|(e, _)| *e).collect();
        let what = format!(
            "--engine-waiting-timeout-secs is {} s and the engine waits for {} s: how long a request may queue is computed from it",
            set.as_secs_f64(),
            told.as_secs_f64()
        );
        fleet.add(Code::Timeout, &engines, what, format!("set it to {}, or leave it out", told.as_secs_f64()));
    }
    let delivery = fleet.settings.delivery_timeout();
    if pd && delivery <= waits {
        fleet.add(
            Code::Timeout,
            &[],
            format!(
                "--delivery-timeout-secs is {} s and the engines wait for {} s: the router ends transfers before the engine can say what is \
                 wrong with them",
                delivery.as_secs_f64(),
                waits.as_secs_f64()
            ),
            "leave --delivery-timeout-secs out, or set it above the engines' waiting timeout",
        );
    }
}

/// Requests that decode can reserve memory for at once, over all ranks.
fn rows(decode: &[(&Seen, &Found)]) -> Option<u64> {
    let each = |f: &Found| {
        let running = f.facts.max_running?;
        let extra = f.facts.extra_slots.unwrap_or(if running <= 32 { 2 * running } else { 0 });
        Some(u64::from(f.ranks) * u64::from(running + extra))
    };
    decode.iter().map(|(_, f)| each(f)).sum()
}

fn reservations(fleet: &mut Fleet<'_>) {
    let decode = fleet.of(Role::Decode);
    let early: Vec<_> = decode.iter().copied().filter(|(_, f)| f.facts.allocation == Allocation::Early).collect();
    let (waits, _) = timeout(fleet);
    let Some(rows) = rows(&early).filter(|rows| *rows > 0) else { return };
    let engines: Vec<&Seen> = early.iter().map(|(e, _)| *e).collect();
    let ranks: u64 = early.iter().map(|(_, f)| u64::from(f.ranks)).sum();
    let waits = waits.as_secs_f64();
    let happens = format!(
        "Decode reserves a request's row, its state slot and the KV of its whole prompt before prefill has begun (allocation policy early), \
         and its {waits:.0} s clock runs from then on. The engines never push back: {ranks} decode ranks reserve for up to {rows} requests, \
         whatever prefill can do"
    );
    let needed = format!(
        "Prefill must deliver {:.1} requests a second, replies included, for the last of them to be in time",
        rows as f64 / waits
    );
    let settings = fleet.settings;
    if !settings.admission || matches!(settings.window, WindowMode::Unbounded) {
        let (flag, mend) = if settings.admission {
            ("--window unbounded", "--window computed")
        } else {
            ("--no-admission", "--admission")
        };
        fleet.add(
            Code::Unbounded,
            &engines,
            format!(
                "nothing bounds what decode reserves: with {flag} every request is sent at once. {happens}. {needed}; what is not ends with \
                 \"NIXL KVReceiver Exception\" or \"timed out in KVPoll.WaitingForInput\" {waits:.0} s after it was sent, while most of decode's \
                 rows hold requests in transfer and few run"
            ),
            format!(
                "use {mend} (the default), which sends a request when prefill can serve it soon; before another router cap its requests in \
                 flight, or lower --max-running-requests of decode, to what prefill delivers in a quarter of {waits:.0} s"
            ),
        );
    } else {
        fleet.add(
            Code::Reservations,
            &engines,
            format!("{happens}. {needed}. This router sends a request only when prefill can serve it soon (--window computed); one that does \
                     not, sends all of them"),
            "nothing here; before another router cap its requests in flight",
        );
    }
}

/// Tokens of a prompt that fills a row's share of decode's pool, at most what the engine takes.
fn share(found: &Found) -> Option<u64> {
    let each = found.facts.max_total_tokens? / u64::from(found.facts.max_running?.max(1));
    Some(found.facts.max_input_tokens.map_or(each, |most| each.min(most)))
}

fn payloads(fleet: &mut Fleet<'_>) {
    let told = fleet.told();
    let inline: Vec<_> =
        told.into_iter().filter(|(_, f)| f.traits.routed_experts == Some(true) && !f.traits.by_reference).collect();
    let decode = fleet.of(Role::Decode);
    if inline.is_empty() {
        return;
    }
    let s = fleet.settings;
    let set = s.r3_layers.zip(s.r3_top_k).map(|(layers, k)| u64::from(layers) * u64::from(k) * 4);
    let width = set.or_else(|| inline.iter().find_map(|(_, f)| f.traits.row_bytes));
    let tokens = fleet.prompt_tokens.or_else(|| decode.iter().filter_map(|(_, f)| share(f)).min());
    let rows = rows(&decode);
    let one: Vec<&Seen> =
        inline.iter().filter(|(_, f)| f.traits.detokenizers.is_none_or(|n| n <= 1)).map(|(e, _)| *e).collect();
    if !one.is_empty() {
        let (waits, _) = timeout(fleet);
        let mut what = "all routing payloads (R3) of an engine pass through one detokenizer and one HTTP loop, in Python, which meanwhile \
                        take in no new requests"
            .to_owned();
        if let Some((width, tokens)) = width.zip(tokens) {
            let text = tokens as f64 * width as f64 * TEXT;
            let each = text / EMITTED_PER_SECOND;
            let _ = write!(
                what,
                ": a sample of {tokens} tokens is {:.0} MB of text, about {each:.1} s of those processes, on prefill and again on decode",
                text / 1e6
            );
            let engines = decode.len().max(1) as f64;
            if let Some(all) = rows.map(|rows| rows as f64 / engines * each) {
                let late = if all > waits.as_secs_f64() {
                    format!(", longer than the {:.0} s clock", waits.as_secs_f64())
                } else {
                    String::new()
                };
                let _ = write!(what, ". What decode can reserve for at once takes {all:.0} s to leave an engine{late}");
            }
        } else {
            what.push_str(" (set --r3-layers and --r3-top-k to have it computed)");
        }
        let old = inline.iter().any(|(_, f)| f.traits.before((0, 5, 12)));
        let workers = if old { "run a release from 0.5.12 and start the engines" } else { "start the engines" };
        fleet.add(
            Code::Egress,
            &one,
            what,
            format!(
                "{workers} with --detokenizer-worker-num 4 and --tokenizer-worker-num 4; let clients ask for the new rows only \
                 (routed_experts_start_len); or install the plug-in (python/R3-OPERATING.md), with which the bytes pass none of these processes"
            ),
        );
    }
    // Prompt rows wait narrow: a byte an expert up to 256 experts, else two (four when the number is not known).
    let narrow = match s.r3_experts {
        Some(n) if n <= 256 => 1,
        Some(n) if n <= 65_536 => 2,
        Some(_) => 4,
        None => 1,
    };
    if let Some(((width, tokens), rows)) = width.zip(tokens).zip(rows) {
        let needed = rows.saturating_mul(tokens).saturating_mul(width / 4 * narrow);
        let needed = needed.next_multiple_of(if needed > 1 << 30 { 1 << 30 } else { 1 << 20 });
        if needed > s.r3_arena_bytes {
            fleet.add(
                Code::Arena,
                &[],
                format!(
                    "prompt rows of {rows} requests of {tokens} tokens are {}, and --r3-arena-bytes is {}: decode's rows cannot all be filled \
                     with requests that ask for R3",
                    show_bytes(needed),
                    show_bytes(s.r3_arena_bytes)
                ),
                format!("raise --r3-arena-bytes to {}, if the machine has it", show_bytes(needed)),
            );
        }
    }
}
