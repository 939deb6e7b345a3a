"""LEG: the first leg that fails ends the attempt; nothing waits for the engine's timeout and nothing stays held."""

from __future__ import annotations

import asyncio
import time

import pytest

from scripted.acts import Act, answer, cut_short, head_then_rst, refusal, rst
from scripted.calls import GENERATE, ROUTES, crowd, statuses, until
from scripted.client import Response
from scripted.engine import Engine
from scripted.lab import Lab

WAIT = {"waiting_s": 60.0}
MESSAGE = "The input (200001 tokens) is longer than the model's context length (200000 tokens)."
FAULTS: dict[str, tuple[Act | None, int]] = {
    "400": (refusal(400, MESSAGE, after=0.05), 400),
    "422": (refusal(422, MESSAGE, after=0.05), 422),
    "500": (answer(500, {"detail": MESSAGE}, after=0.05), 500),
    "503": (refusal(503, MESSAGE, after=0.05), 503),
    "rst": (rst(after=0.4), 502),
    "refused": (None, 502),
    "200 headers then rst": (head_then_rst(), 502),
    "body cut short": (cut_short(b'{"text":"x","meta_in', 500, joins=False), 502),
}


async def fail(engine: Engine, fault: str) -> None:
    """Makes an engine fail every call so."""
    act = FAULTS[fault][0]
    if act is None:
        engine.server.die()
        await asyncio.sleep(0)
    else:
        engine.script = lambda leg: act


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_leg_1_the_first_failing_leg_ends_the_attempt_on_both_sides(lab: Lab, side: str, fault: str) -> None:
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", prefill=WAIT, decode={**WAIT, "dp_size": 2})
    bad, other = (fleet.p, fleet.d) if side == "prefill" else (fleet.d, fleet.p)
    await fail(bad, fault)
    start = time.monotonic()
    got = await client.generate(input_ids=list(range(5)))
    took = time.monotonic() - start
    status = FAULTS[fault][1]
    # An engine that is known to be gone may also mean 503, no worker of the role.
    assert got.status == status or (fault == "refused" and got.status == 503), got.body
    assert took < 10.0, "the client waited for the leg that had nothing to wait for"
    if fault in ("400", "422", "500", "503"):
        assert MESSAGE.encode() in got.body, "the engine's own message is lost"
    assert (got.header("content-type") or "").startswith("application/json")
    await fleet.quiet()
    for leg in other.legs:
        assert leg.aborted_at is not None, f"the other leg was not aborted: {leg.end}"
        assert any(leg in abort.hit for abort in other.aborted(leg.rid))
    assert all(rank.empty for engine in fleet.engines for rank in engine.ranks)
    fleet.check()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_leg_1_on_every_route_and_in_streams_before_the_first_token(lab: Lab, path: str, stream: bool) -> None:
    fleet, _, client = await lab.serve(prefill=WAIT, decode=WAIT)
    await fail(fleet.p, "400")
    got = await client.post(path, {**ROUTES[path], "stream": stream})
    # Decode's own 200 and headers are long here; the client has seen nothing of it yet.
    assert got.status == 400
    assert MESSAGE.encode() in got.body
    await fleet.quiet()
    assert [leg.end for leg in fleet.d.legs] == ["aborted"] * len(fleet.d.legs)


async def test_leg_1_an_abort_that_came_too_early_is_repeated(lab: Lab) -> None:
    # Decode knows a rid only some time after the request arrived: a long body is tokenised first.
    fleet, _, client = await lab.serve("--disable-retries", prefill=WAIT, decode={**WAIT, "tokenise_s": 0.15, "disconnect_s": 60.0})
    await fail(fleet.p, "400")
    got = await client.generate(**GENERATE)
    assert got.status == 400
    await until(lambda: all(leg.ended for leg in fleet.d.legs), "decode's leg ends by the repeated abort", 20.0)
    assert [leg.end for leg in fleet.d.legs] == ["aborted"]
    assert len(fleet.d.aborted(fleet.d.legs[0].rid)) >= 2


async def test_leg_1_a_burst_of_refused_calls_leaves_good_calls_alone(lab: Lab) -> None:
    fleet, _, client = await lab.serve(
        "--cb-failure-threshold", "3", prefill=WAIT, decode={**WAIT, "dp_size": 2, "max_running": 4, "on_over": "wait"}
    )
    refused = refusal(400, MESSAGE, after=0.05)
    fleet.p.script = lambda leg: refused if leg.body["input_ids"][0] == 9 else None

    async def bad() -> Response:
        return await client.generate(input_ids=[9, 9])

    async def good() -> Response:
        return await client.generate(input_ids=[1, 2])

    answers = await crowd([bad] * 50, 8)
    assert statuses(answers) == {400: 50}
    mixed = await crowd([bad, good] * 50, 16)
    assert statuses(mixed) == {200: 50, 400: 50}
    assert statuses(await crowd([good] * 50, 16)) == {200: 50}
    await fleet.quiet()
    fleet.check()
    assert all(rank.empty for rank in fleet.d.ranks)
    legs = [leg for leg in fleet.d.legs if leg.body["input_ids"][0] == 9]
    assert all(leg.end == "aborted" for leg in legs)


async def test_leg_1_failing_prefill_does_not_charge_decode(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--disable-retries", "--cb-failure-threshold", "3", prefills=2, prefill=WAIT, decode=WAIT)
    fleet.prefills[0].script = lambda leg: FAULTS["500"][0]
    answers = [await client.generate(**GENERATE) for _ in range(30)]
    # P0's breaker opens after three; D0 took part in every failure and must still be chosen with P1.
    counts = statuses(answers)
    assert counts[500] >= 3
    assert statuses(answers[-10:]) == {200: 10}
    await fleet.quiet()


async def test_leg_1_rids_are_the_routers_and_no_rid_is_a_prefix_of_another(lab: Lab) -> None:
    fleet, _, client = await lab.serve(prefill={"transfer_s": 0.05}, decode={"dp_size": 4})
    answers = await asyncio.gather(
        *(client.generate(input_ids=[1, 2], rid=rid) for rid in ["r", "r1", "r10", "r1", "", "r1" * 50] * 10),
        *(client.generate(input_ids=[1, 2]) for _ in range(20)),
    )
    assert statuses(answers) == {200: 80}
    # The fakes fail when a rid repeats, or is a prefix of another that is live.
    fleet.check()
    rids = [leg.rid for leg in fleet.d.legs]
    assert len(set(rids)) == 80
    assert sorted(rids) == sorted(leg.rid for leg in fleet.p.legs)
    assert not [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]
