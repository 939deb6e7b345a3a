"""Policies through the router process: which rank each gives a request, and the headers that name one."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from scripted.calls import GENERATE, ROUTES, crowd, statuses, until
from scripted.client import Client
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab

NAMES = [
    "random",
    "round_robin",
    "cache_aware",
    "power_of_two",
    "manual",
    "consistent_hashing",
    "prefix_hash",
    "bucket",
    "headroom",
]


def key(name: object) -> list[tuple[str, str]]:
    return [("X-SMG-Routing-Key", str(name))]


def to(target: str) -> list[tuple[str, str]]:
    return [("X-SMG-Target-Worker", target)]


async def regular(lab: Lab, *flags: str, engines: int = 2, **shape: Any) -> tuple[Fleet, Client]:
    fleet = await lab.fleet(Fleet([Engine("regular", f"R{i}", **{"dp_size": 2, **shape}) for i in range(engines)]))
    router = await lab.router(fleet, "--log-level", "warn", *flags)
    return fleet, router.client


def where(fleet: Fleet, role: str) -> list[tuple[str, int]]:
    return [(leg.engine.name, leg.rank) for leg in fleet.legs(role)]


@pytest.mark.parametrize("mode", ["pd", "regular"])
@pytest.mark.parametrize("name", NAMES)
async def test_every_policy_serves_within_what_each_rank_holds(lab: Lab, name: str, mode: str) -> None:
    shape = {"dp_size": 2, "max_running": 4, "run_s": 0.01, "kv_pool": 100_000}
    roles = [("prefill", 2), ("decode", 2)] if mode == "pd" else [("regular", 2)]
    fleet = await lab.fleet(Fleet([Engine(role, f"{role}{i}", **shape) for role, count in roles for i in range(count)]))
    router = await lab.router(fleet, "--policy", name, "--log-level", "warn")
    bodies = [{**GENERATE, "input_ids": [n % 7] * 600} for n in range(160)]
    answers = await crowd([lambda n=n: router.client.post("/generate", bodies[n], key(n % 5)) for n in range(160)], 160)
    assert statuses(answers) == {200: 160}
    # The fakes count a request beyond a rank's rows as a broken rule.
    fleet.check()
    assert all(rank.peak_open <= 4 for e in fleet.engines if e.role != "prefill" for rank in e.ranks)


async def test_prefill_and_decode_follow_policies_of_their_own(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet.pd(prefills=2, decodes=2, prefill={"dp_size": 2}, decode={"dp_size": 2}))
    router = await lab.router(fleet, "--prefill-policy", "manual", "--decode-policy", "round_robin", "--policy", "random")
    for _ in range(3):
        for session in range(4):
            assert (await router.client.post("/generate", GENERATE, key(session))).status == 200
    front: dict[str, set[tuple[str, int]]] = {}
    for leg in fleet.legs("prefill"):
        front.setdefault(leg.request.header("x-smg-routing-key") or "", set()).add((leg.engine.name, leg.rank))
    assert all(len(ranks) == 1 for ranks in front.values())
    assert len(set.union(*front.values())) == 4, "four sessions, four ranks"
    back = where(fleet, "decode")
    assert back[:4] == back[4:8] == back[8:] and len(set(back)) == 4, back


@pytest.mark.parametrize("body", [{"text": "you are a helpful assistant " * 400}, {"input_ids": list(range(3000))}], ids=["text", "tokens"])
async def test_cache_aware_brings_a_conversation_back_to_its_rank(lab: Lab, body: dict[str, Any]) -> None:
    fleet, client = await regular(lab, engines=4)
    (name, beginning), *_ = body.items()
    for turn in range(10):
        for session in range(8):
            rest = f" session {session} " * 200 if isinstance(beginning, str) else [session] * 1500
            more = f" turn {turn}" if isinstance(beginning, str) else [turn] * 10
            assert (await client.generate(**{name: beginning + rest + more * (turn + 1)})).status == 200
    turns = where(fleet, "regular")
    stayed = sum(turns[8 * turn + session] == turns[8 * (turn - 1) + session] for turn in range(1, 10) for session in range(8))
    assert stayed == 72, f"{72 - stayed} turns were on another rank than the one before"


async def test_a_hashed_key_is_on_the_same_rank_after_a_restart_and_in_a_second_router(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", f"R{i}", dp_size=2) for i in range(3)]))
    routers = [await lab.router(fleet, "--policy", "consistent_hashing") for _ in range(2)]
    for router in routers:
        for session in range(40):
            assert (await router.client.post("/generate", GENERATE, key(session))).status == 200
    served = where(fleet, "regular")
    assert served[:40] == served[40:]
    assert len(set(served)) == 6


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("policy", ["cache_aware", "consistent_hashing"])
async def test_a_named_worker_serves_whatever_the_policy(lab: Lab, policy: str, path: str) -> None:
    fleet, client = await regular(lab, "--policy", policy, engines=3)
    for number in (2, 0, 1, 2):
        assert (await client.post(path, ROUTES[path], [*to(str(number)), *key("other")])).status == 200
    assert [name for name, _ in where(fleet, "regular")] == ["R2", "R0", "R1", "R2"]
    for engine in fleet.engines:
        engine.legs.clear()
    for target in (f"{fleet.engines[1].url}@1", f"{fleet.engines[1].url}@0", "1@1", f" {fleet.engines[1].url.upper()}/@1"):
        assert (await client.post(path, ROUTES[path], to(target))).status == 200
    assert where(fleet, "regular") == [("R1", 1), ("R1", 0), ("R1", 1), ("R1", 1)]


async def test_a_named_worker_of_a_split_fleet_is_one_of_each_side_or_what_its_url_says(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet.pd(prefills=2, decodes=2, prefill={"dp_size": 2}, decode={"dp_size": 2}))
    client = (await lab.router(fleet)).client
    for target in ("1", "0@1", f"{fleet.prefills[1].url}@0, {fleet.decodes[0].url}@1"):
        for _ in range(4):
            assert (await client.post("/generate", GENERATE, to(target))).status == 200
    pairs = [(p.engine.name, p.rank, d.engine.name, d.rank) for p, d in fleet.pairs()]
    assert {(p, d) for p, _, d, _ in pairs[:4]} == {("P1", "D1")}
    assert set(pairs[4:8]) == {("P0", 1, "D0", 1)}
    assert set(pairs[8:]) == {("P1", 0, "D0", 1)}
    # One side named: the other is the policy's.
    assert (await client.post("/generate", GENERATE, to(fleet.decodes[1].url))).status == 200
    assert fleet.pairs()[-1][1].engine.name == "D1"


@pytest.mark.parametrize("path", [*ROUTES, "/v1/embeddings", "/v1/score", "/tokenize"])
async def test_a_worker_that_is_not_there_is_told_at_once_and_nothing_is_sent(lab: Lab, path: str) -> None:
    fleet, client = await regular(lab)
    body = ROUTES.get(path, {"input": "a", "text": "a"})
    for target in ("2", "-1", "http://127.0.0.1:1", f"{fleet.engines[0].url}@7", "x y"):
        answer = await client.post(path, body, to(target))
        if target.endswith("@7") and path not in ROUTES:
            assert answer.status == 200, "such a call goes to an engine, which has ranks of its own mind"
            continue
        assert answer.status == 503, (target, answer.body)
        assert answer.error()["code"] == "no_available_workers"
    for target in (f"{fleet.engines[0].url}@one", "0@-1"):
        assert (await client.post(path, body, to(target))).status == 400
    assert fleet.posts() == 0


async def test_a_named_worker_serves_pass_through_calls_too(lab: Lab) -> None:
    fleet, client = await regular(lab)
    for _ in range(3):
        assert (await client.post("/v1/embeddings", {"input": "a"}, to("1"))).status == 200
    asked = [[r.path for r in engine.control if r.path == "/v1/embeddings"] for engine in fleet.engines]
    assert [len(paths) for paths in asked] == [0, 3]


async def test_a_full_named_rank_is_waited_for_while_others_go_elsewhere(lab: Lab) -> None:
    fleet, client = await regular(lab, max_running=1, run_s=0.5)
    first = asyncio.create_task(client.post("/generate", GENERATE, to("0@0")))
    await until(lambda: fleet.posts() == 1, "the first is there")
    second = asyncio.create_task(client.post("/generate", GENERATE, to("0@0")))
    others = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(3)]
    assert statuses(await asyncio.gather(first, second, *others)) == {200: 5}
    legs = fleet.legs("regular")
    assert Counter((leg.engine.name, leg.rank) for leg in legs)["R0", 0] == 2
    assert legs[-1].engine.name == "R0" and legs[-1].rank == 0


async def test_regular_ranks_have_the_same_ledger_and_window_on_one_side(lab: Lab) -> None:
    fleet, client = await regular(lab, "--dp-aware", dp_size=4, max_running=3, run_s=0.02, kv_pool=60_000)
    long = {"input_ids": list(range(9000)), "sampling_params": {"max_new_tokens": 500}}
    answers = await crowd([lambda n=n: client.generate(**(long if n % 2 else GENERATE)) for n in range(200)], 200)
    assert statuses(answers) == {200: 200}
    fleet.check()
    ranks = [rank for engine in fleet.engines for rank in engine.ranks]
    assert max(rank.peak_open for rank in ranks) == 3, "no rank above its rows, and each of them used"
    assert all(rank.peak_kv <= 60_000 * 0.95 for rank in ranks)
    asked = Counter((leg.engine.name, leg.body["routed_dp_rank"]) for leg in fleet.legs("regular"))
    assert len(asked) == 8 and max(asked.values()) / (200 / 8) <= 1.3, asked


async def test_regular_ranks_close_for_load_of_others_and_for_pushed_out_requests(lab: Lab) -> None:
    fleet, client = await regular(lab, "--poll-interval-ms", "20", engines=1, dp_size=2, kv_pool=20_000)
    full, free = fleet.engines[0].ranks
    full.foreign_kv = 19_900
    await asyncio.sleep(0.2)
    answers = await crowd([lambda: client.generate(**{**GENERATE, "input_ids": [1] * 500})] * 30, 4)
    assert statuses(answers) == {200: 30}
    assert {leg.rank for leg in fleet.legs("regular")} == {1}
    assert free.peak_open >= 1
