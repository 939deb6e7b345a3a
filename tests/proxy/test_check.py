"""`r3router check`: each seeded fault is found, by its code and with what to change, and nothing else is."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab

Edit = Callable[[dict[str, Any]], dict[str, Any]]
STATE = {"mamba_slots": 256}


async def check(*flags: str, as_json: bool = True) -> tuple[int, Any]:
    """Exit status and report; the engines answer from this loop meanwhile."""
    command = [sys.executable, "-m", "r3router", "check", *(["--json"] if as_json else []), *flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith("R3ROUTER_")}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    assert b"Traceback" not in err, err.decode()
    return process.returncode, json.loads(out) if as_json else out.decode() + err.decode()


def tell(*engines: Engine, **facts: Any) -> None:
    """These engines tell these facts in `/server_info`, over what they told before."""
    for engine in engines:
        before = engine.edit_info

        def edit(info: dict[str, Any], before: Edit | None = before) -> dict[str, Any]:
            return {**(before(info) if before else info), **facts}

        engine.edit_info = edit


def topology(engine: Engine, **facts: Any) -> None:
    """The bootstrap server tells these facts."""
    engine.edit_topology = lambda known: {**known, **facts}


async def healthy(lab: Lab, **shape: Any) -> Fleet:
    """A fleet in which nothing is wrong; keep-alive as uvicorn's, by the clock of the tests."""
    fleet = await lab.pd(**shape)
    for engine in fleet.engines:
        tell(
            engine,
            detokenizer_worker_num=4,
            kv_cache_dtype="auto",
            enable_metrics=True,
            disaggregation_decode_allocation_policy="early",
            disaggregation_waiting_timeout=300,
        )
    return fleet


def old(version: str, **facts: Any) -> Callable[[Fleet], None]:
    """Every engine is of this release and sends no routing payloads."""

    def seed(fleet: Fleet) -> None:
        tell(*fleet.engines, version=version, enable_return_routed_experts=False, **facts)

    return seed


def refused(fleet: Fleet) -> None:
    fleet.d.server.refuse()


def no_bootstrap(fleet: Fleet) -> None:
    fleet.p.bootstrap.refuse()


def not_registered(fleet: Fleet) -> None:
    fleet.p.edit_topology = lambda known: 503


def wrong_key(fleet: Fleet) -> None:
    fleet.d.key = "k"


def other_mode(fleet: Fleet) -> None:
    tell(fleet.d, disaggregation_mode="prefill")


def unhealthy(fleet: Fleet) -> None:
    fleet.p.healthy = lambda: False


def fewer_loads(fleet: Fleet) -> None:
    fleet.d.edit_loads = lambda entries: entries[:1]


def no_detokenizers(fleet: Fleet) -> None:
    tell(*fleet.engines, detokenizer_worker_num=1)


def one_of_two(fleet: Fleet) -> None:
    tell(fleet.p, enable_return_routed_experts=False)


def other_policy(fleet: Fleet) -> None:
    topology(fleet.p, decode_allocation_policy="prefill_complete")


def after_prefill(fleet: Fleet) -> None:
    topology(fleet.p, decode_allocation_policy="prefill_complete")
    tell(fleet.d, disaggregation_decode_allocation_policy="prefill_complete")


def by_turns(fleet: Fleet) -> None:
    tell(fleet.p, load_balance_method="round_robin")
    topology(fleet.p, follow_bootstrap_room=False)


def other_model(fleet: Fleet) -> None:
    tell(fleet.d, model_path="/models/another")


def no_buffer(fleet: Fleet) -> None:
    tell(fleet.p, mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)


def other_strategy(fleet: Fleet) -> None:
    tell(fleet.p, mamba_radix_cache_strategy="extra_buffer")
    tell(fleet.d, mamba_radix_cache_strategy="no_buffer", disaggregation_decode_enable_radix_cache=True)


def closes_early(fleet: Fleet) -> None:
    fleet.d.server.idle_close_s = 0.3


# What is seeded: (name, shape of the fleet, what is changed, flags beside the engines, codes of errors and warnings, words of the report)
FAULTS: list[tuple[str, dict[str, Any], Callable[[Fleet], None] | None, list[str], set[str], str]] = [
    ("unreachable", {}, refused, [], {"engine.unreachable"}, "mend host and port of --decode"),
    ("unhealthy", {}, unhealthy, [], {"engine.unhealthy"}, "/health answered 503"),
    ("key", {}, wrong_key, [], {"engine.key"}, "--worker-api-key"),
    ("role", {}, other_mode, [], {"engine.role"}, "exchange --prefill and --decode"),
    ("ranks", {"decode": {"dp_size": 4}}, fewer_loads, [], {"engine.ranks"}, "4 by /server_info, 1 by /v1/loads"),
    ("keep_alive", {}, closes_early, ["--upstream-idle-secs", "1"], {"engine.keep_alive"}, "SGLANG_TIMEOUT_KEEP_ALIVE"),
    ("bootstrap_down", {}, no_bootstrap, [], {"bootstrap.unreachable"}, "--disaggregation-bootstrap-port"),
    ("bootstrap_starting", {}, not_registered, [], {"bootstrap.incomplete"}, "not all prefill ranks have registered"),
    ("page_size", {}, lambda f: tell(f.d, page_size=64), [], {"pair.page_size"}, "the same --page-size"),
    ("kv_dtype", {}, lambda f: tell(f.d, kv_cache_dtype="fp8_e4m3"), [], {"pair.kv_dtype"}, "the same --kv-cache-dtype"),
    ("backend", {}, lambda f: tell(f.d, disaggregation_transfer_backend="mooncake"), [], {"pair.backend"}, "mooncake at"),
    ("load_balance", {}, by_turns, [], {"pair.load_balance"}, "--load-balance-method follow_bootstrap_room"),
    ("allocation", {}, other_policy, [], {"pair.allocation"}, "decode allocates early and prefill"),
    ("after_prefill", {}, after_prefill, [], {"pair.allocation"}, "over Mooncake and for models without state only"),
    ("timeouts", {}, lambda f: tell(f.d, disaggregation_waiting_timeout=60), [], {"pair.timeouts"}, "300 s at"),
    ("router_timeout", {}, None, ["--engine-waiting-timeout-secs", "900"], {"router.timeout"}, "set it to 300, or leave it out"),
    ("mamba", {"decode": STATE, "prefill": STATE}, other_strategy, [], {"pair.mamba"}, "--mamba-radix-cache-strategy"),
    ("overlap", {"decode": STATE, "prefill": STATE}, no_buffer, [], {"pair.mamba"}, "without overlap scheduling"),
    ("routed_experts", {}, one_of_two, [], {"pair.routed_experts"}, "--enable-return-routed-experts"),
    ("detokenizer", {}, no_detokenizers, [], {"r3.egress"}, "--detokenizer-worker-num 4"),
    ("model", {}, other_model, [], {"pair.model"}, "another at"),
    ("versions", {}, lambda f: tell(f.d, version="0.5.24"), [], {"pair.versions"}, "run one release on all engines"),
    ("nixl_dense", {}, old("0.5.12"), [], {"version.nixl_dense", "version.nixl_notice"}, "0.5.12.post1"),
    ("nixl_old", {}, old("0.5.12.post1"), [], {"version.nixl_notice"}, "NIXL KVReceiver Exception"),
    ("rank_lookup", {}, old("0.5.10"), [], {"version.nixl_notice", "version.rank_lookup"}, "waits for another"),
    ("no_metrics", {"decode": STATE}, lambda f: tell(f.d, enable_metrics=False), [], {"engine.no_metrics"}, "--enable-metrics"),
    ("pool", {"decode": {"kv_pool": 1_000_000}}, None, [], {"pair.pool"}, "--mem-fraction-static"),
    ("context_parallel", {}, lambda f: tell(f.d, attn_cp_size=2), [], {"pair.parallel"}, "--attn-cp-size 1"),
    ("unbounded", {}, None, ["--window", "unbounded"], {"router.unbounded"}, "use --window computed"),
    ("no_admission", {}, None, ["--no-admission"], {"router.unbounded"}, "nothing bounds what decode reserves"),
]


@pytest.mark.parametrize(("shape", "seed", "flags", "codes", "words"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
async def test_each_seeded_fault_is_found_and_nothing_else(
    lab: Lab, shape: dict[str, Any], seed: Callable[[Fleet], None] | None, flags: list[str], codes: set[str], words: str
) -> None:
    fleet = await healthy(lab, **shape)
    if seed is not None:
        seed(fleet)
    quick = [] if "--upstream-idle-secs" in flags else ["--quick"]
    status, report = await check(*fleet.flags(), *quick, *flags)
    found = {f["code"] for f in report["findings"] if f["severity"] != "note"}
    assert found == codes, json.dumps(report["findings"], indent=1)
    assert status == 1
    assert words in " ".join(f"{f['what']} {f['advice']}" for f in report["findings"])
    assert [f["number"] for f in report["findings"]] == list(range(1, len(report["findings"]) + 1))
    assert fleet.posts() == 0, "a check generates nothing"
    fleet.d.key = None


async def test_a_wrong_bootstrap_port_is_named_with_the_right_one(lab: Lab) -> None:
    fleet = await healthy(lab)
    other = str(fleet.d.server.port)
    flags = ["--pd-disaggregation", "--prefill", fleet.p.url, other, "--decode", fleet.d.url]
    status, report = await check(*flags, "--quick")
    (found,) = (f for f in report["findings"] if f["severity"] == "error")
    assert (status, found["code"], found["workers"]) == (1, "bootstrap.port", [fleet.p.url])
    assert found["advice"].startswith(f"name {fleet.p.bootstrap.port}, ")


async def test_with_pods_it_says_whom_to_ask() -> None:
    status, report = await check("--pd-disaggregation", "--service-discovery", "--prefill-selector", "a=b", "--decode-selector", "a=c")
    assert (status, [f["code"] for f in report["findings"]]) == (0, ["fleet.pods"])
    assert "check --admin URL" in report["findings"][0]["advice"]


async def test_a_healthy_fleet_leaves_with_0_and_wrong_settings_with_2(lab: Lab) -> None:
    fleet = await healthy(lab, prefill={"dp_size": 2}, decode={"dp_size": 4})
    for engine in fleet.engines:
        engine.server.idle_close_s = 5.0
    status, report = await check(*fleet.flags(), "--upstream-idle-secs", "0.5")
    assert (status, report["worst"]) == (0, None), report["findings"]
    assert [(e["role"], e["ranks"], e["answers"]) for e in report["engines"]] == [("prefill", 2, True), ("decode", 4, True)]
    status, text = await check(*fleet.flags(), "--quick", as_json=False)
    assert status == 0
    assert "1 note." in text
    status, text = await check("--prot", "1", as_json=False)
    assert (status, "did you mean --port?" in text) == (2, True)
    status, text = await check(as_json=False)
    assert (status, "No regular engine is named" in text) == (1, True)


# The fleet of the report: Qwen3.5 (40 layers, 8 of 256 experts), four prefill and four decode ranks, 128 rows a rank, 5.13 M tokens a rank,
# NIXL, R3 on, one detokenizer, a release without failure notices, and a router that sends everything at once.
INCIDENT = {
    "version": "0.5.11",
    "model_path": "/models/Qwen3.5-35B-A3B",
    "mamba_scheduler_strategy": "extra_buffer",
    "detokenizer_worker_num": 1,
    "max_req_input_len": 262_138,
}
INCIDENT_SHAPE = ["--r3-layers", "40", "--r3-top-k", "8", "--r3-experts", "256", "--prompt-tokens", "57000"]


async def test_the_incidents_configuration_is_told_what_is_wrong_with_it(lab: Lab) -> None:
    rank = {"dp_size": 4, "kv_pool": 5_130_000, "max_running": 128, "mamba_slots": 128}
    fleet = await healthy(lab, prefill=rank, decode=rank)
    tell(*fleet.engines, **INCIDENT)
    tell(fleet.p, disable_overlap_schedule=True)
    status, text = await check(*fleet.flags(), "--window", "unbounded", "--quick", *INCIDENT_SHAPE, as_json=False)
    assert status == 1
    said = " ".join(text.split())
    for words in (
        # What happens and why: the reservation, its clock, and that nothing bounds it.
        "Nothing bounds what decode reserves",
        "reserves a request's row, its state slot and the KV of its whole prompt before prefill has begun",
        "its 300 s clock runs from then on",
        "4 decode ranks reserve for up to 512 requests",
        "Prefill must deliver 1.7 requests a second",
        '"NIXL KVReceiver Exception"',
        "most of decode's rows hold requests in transfer and few run",
        # Why prefill cannot: 57,000 x 1,280 bytes x 4/3 = 97 MB a sample through one Python process, 1.0 s each.
        "a sample of 57000 tokens is 97 MB of text, about 1.0 s of those processes, on prefill and again on decode",
        "takes 511 s to leave an engine, longer than the 300 s clock",
        # What hides it: no notice, every cause under one name; and that the payload is not even whole.
        "decode holds the reservation of a request that prefill has lost for the whole waiting timeout",
        "return no routing payloads (R3)",
        "do not know routed_experts_start_len",
        "without overlap scheduling",
        "takes three state slots a request with extra_buffer",
        # What to change.
        "use --window computed",
        "before another router cap its requests in flight",
        "--detokenizer-worker-num 4",
        "run a release from 0.5.23",
    ):
        assert words in said, f"{words!r} is not in:\n{text}"
    numbered = [line for line in text.splitlines() if line[:2].strip().isdigit()]
    assert numbered[0] == " 1. error router.unbounded"
    assert len(numbered) >= 6
    assert max(len(line) for line in text.splitlines()[3:]) <= 100


async def test_serve_logs_the_same_findings_once_its_engines_are_there(lab: Lab) -> None:
    fleet = await healthy(lab)
    tell(fleet.d, page_size=64)
    router = await lab.router(fleet)
    for _ in range(400):
        if "pair.page_size" in router.log.read_text():
            break
        await asyncio.sleep(0.02)
    text = router.log.read_text()
    assert text.count("pair.page_size") == 1
    assert "start all engines with the same --page-size" in text
    # And a person may ask it, with no engine named.
    for _ in range(100):
        status, report = await check("--admin", f"127.0.0.1:{router.admin_port}")
        if report["worst"]:
            break
    assert (status, report["worst"]) == (1, "error")
    assert [f["code"] for f in report["findings"] if f["severity"] == "error"] == ["pair.page_size"]
    shown = [(e["role"], e["ranks"], e["version"], e["model"]) for e in report["engines"]]
    assert shown == [("prefill", 1, "0.5.23", "m"), ("decode", 1, "0.5.23", "m")]
