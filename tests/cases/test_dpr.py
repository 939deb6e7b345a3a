"""DPR: prefill and decode ranks are chosen as a pair, and every field says the same."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from scripted.calls import CHAT, COMPLETION, GENERATE, ROUTES, crowd, statuses, until
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.leg import Leg

MAX_ROOM = 2**63 - 1


@pytest.mark.parametrize(("dp", "calls"), [(4, 10_000), (1, 500), (3, 500), (6, 500), (7, 500)])
async def test_dpr_1_the_room_implies_the_rank_that_the_leg_goes_to(lab: Lab, dp: int, calls: int) -> None:
    fleet, _, client = await lab.serve("--log-level", "warn", prefill={"dp_size": dp}, decode={"dp_size": 2, "tokens": 1})
    body = b'{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":1}}'
    answers = await crowd([lambda: client.post("/generate", body)] * calls, 64)
    assert statuses(answers) == {200: calls}
    # The fakes compare every pair: room % dp == rank, decode asks that rank, bootstrap address, one room per attempt.
    fleet.check()
    assert len(fleet.rooms.meetings) == calls
    assert all(1 <= room <= MAX_ROOM for room in fleet.rooms.meetings)
    assert max(fleet.rooms.meetings) > 2**60, "rooms are drawn from the whole range"
    for prefill, decode in fleet.pairs():
        if dp > 1:
            assert prefill.body["routed_dp_rank"] == prefill.room % dp
            assert decode.body["disagg_prefill_dp_rank"] == prefill.rank
        assert decode.body["routed_dp_rank"] == decode.rank
    used = Counter(leg.rank for leg in fleet.p.legs)
    assert set(used) == set(range(dp)), f"ranks without work: {used}"


async def test_dpr_1_holds_for_every_sample_of_a_split_call(lab: Lab) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 3}, decode={"dp_size": 5})
    answer = await client.generate(input_ids=[[1], [2, 2], [3, 3, 3]], sampling_params={"n": 4, "max_new_tokens": 2})
    assert answer.status == 200
    assert len(fleet.pairs()) == len(fleet.rooms.meetings) == 12
    fleet.check()


@pytest.mark.parametrize(("prefill_dp", "decode_dp"), [(1, 8), (2, 8), (8, 2), (4, 4)])
@pytest.mark.parametrize("hostile", [False, True])
async def test_dpr_2_the_two_sides_have_ranks_of_their_own(lab: Lab, prefill_dp: int, decode_dp: int, hostile: bool) -> None:
    fleet, router, client = await lab.serve(prefill={"dp_size": prefill_dp}, decode={"dp_size": decode_dp})
    headers = [("X-Data-Parallel-Rank", "5")] if hostile else []
    extra: dict[str, Any] = {"routed_dp_rank": 5, "disagg_prefill_dp_rank": 6, "data_parallel_rank": 7} if hostile else {}
    for path, body in (("/generate", GENERATE), ("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        answers = await crowd([lambda path=path, body=body: client.post(path, {**body, **extra}, headers)] * 24, 24)
        # A client's rank is not passed on: it is ignored or refused, and no leg gets a rank outside its own range.
        assert set(statuses(answers)) <= ({200, 400} if hostile else {200})
    fleet.check()
    if not hostile:
        pairs = fleet.pairs()
        assert len(pairs) == 72
        assert {p.rank for p, _ in pairs} == set(range(prefill_dp))
        assert {d.rank for _, d in pairs} == set(range(decode_dp))
        log = router.tail(1 << 24)
        for prefill, decode in pairs:
            lines = [line for line in log.splitlines() if prefill.rid in line]
            assert lines, f"no log line for {prefill.rid}"
            assert any(f"@{prefill.rank}" in line and f"@{decode.rank}" in line and str(prefill.room) in line for line in lines), lines


SESSIONS = 64
TURNS = 10


def keyed(session: int) -> list[tuple[str, str]]:
    return [("X-SMG-Routing-Key", f"s-{session}")]


def places(legs: list[Leg]) -> dict[str, list[tuple[str, int]]]:
    """Where each routing key was served, in order."""
    seen: dict[str, list[tuple[str, int]]] = {}
    for leg in sorted(legs, key=lambda leg: leg.arrived):
        seen.setdefault(leg.request.header("x-smg-routing-key") or "", []).append((leg.engine.name, leg.rank))
    return seen


def changes(at: list[tuple[str, int]]) -> int:
    """How often a key moved."""
    return sum(a != b for a, b in pairwise(at))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("mode", ["pd", "regular"])
async def test_dpr_3_a_session_stays_on_its_rank_and_ranks_have_equal_shares(lab: Lab, mode: str, path: str) -> None:
    role = "prefill" if mode == "pd" else "regular"
    sticky = [Engine(role, f"E{i}", dp_size=4) for i in range(2)]
    others = [Engine("decode", f"D{i}", dp_size=4) for i in range(2)] if mode == "pd" else []
    fleet = await lab.fleet(Fleet([*sticky, *others]))
    router = await lab.router(fleet, "--policy", "manual", "--log-level", "warn")
    client = router.client
    lengths = random.Random(3)
    spans: dict[int, float] = {}

    async def session(number: int) -> None:
        pause = lengths.uniform(0.001, 0.1)
        begun = asyncio.get_running_loop().time()
        for _ in range(TURNS):
            assert (await client.post(path, ROUTES[path], keyed(number))).status == 200
            await asyncio.sleep(pause)
        spans[number] = asyncio.get_running_loop().time() - begun

    await asyncio.gather(*(session(number) for number in range(SESSIONS)))
    fleet.check()
    seen = places(fleet.legs(role))
    assert len(seen) == SESSIONS and all(len(at) == TURNS for at in seen.values())
    assert all(len(set(at)) == 1 for at in seen.values()), "a session was on two ranks"
    keys = Counter(at[0] for at in seen.values())
    assert set(keys.values()) == {8}, f"sessions per rank: {keys}"
    # Active sessions of a rank, over the time of the whole: the sum of their lengths.
    active: Counter[tuple[str, int]] = Counter()
    for number, span in spans.items():
        active[seen[f"s-{number}"][0]] += span  # type: ignore[assignment]
    assert max(active.values()) / (sum(active.values()) / 8) <= 1.5, active

    # One engine dies: its sessions move once, evenly, and the others stay.
    await sticky[0].stop()
    for engine in fleet.engines:
        engine.legs.clear()
    for _ in range(3):
        answers = await asyncio.gather(*(client.post(path, ROUTES[path], keyed(number)) for number in range(SESSIONS)))
        assert statuses(answers) == {200: SESSIONS}
    after = places([leg for leg in fleet.legs(role) if leg.end == "answered"])
    assert all(changes(at) == 0 for at in after.values()), "a session moved twice"
    assert all(after[key][0] == at[0] for key, at in seen.items() if at[0][0] == "E1"), "a session moved that need not"
    assert set(Counter(at[0] for at in after.values()).values()) == {16}
    moved = (await router.metrics()).sum("r3router_decisions_total", reason="routing_key_moved")
    assert moved == 32, "each move is counted"


async def test_dpr_3_a_rank_over_its_limit_is_left_after_a_little_and_the_move_is_counted(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "E0", dp_size=2, max_running=2, run_s=60.0)]))
    router = await lab.router(fleet, "--policy", "manual")
    calls = [asyncio.create_task(router.client.post("/generate", GENERATE, keyed(1))) for _ in range(3)]
    await until(lambda: len(fleet.engines[0].legs) == 3, "the third goes on when it has waited for its rank")
    first, second, third = (leg.rank for leg in fleet.engines[0].legs)
    assert first == second != third
    assert (await router.metrics()).sum("r3router_decisions_total", reason="routing_key_moved") == 1
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await fleet.quiet()
