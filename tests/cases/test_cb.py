"""CB: only what an engine did wrong charges its breaker, and a pair is chosen as a whole or not at all."""

from __future__ import annotations

import asyncio
import time

import pytest

from scripted.acts import answer, refusal
from scripted.calls import GENERATE, statuses, until
from scripted.client import encode
from scripted.lab import Lab


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
async def test_cb_1_client_errors_open_no_breaker(lab: Lab, status: int, side: str) -> None:
    fleet, router, client = await lab.serve(
        "--cb-failure-threshold", "3", "--disable-retries", prefill={"dp_size": 2}, decode={"dp_size": 2}
    )
    for engine in fleet.engines:
        if side in (engine.role, "both"):
            engine.script = lambda leg: refusal(status, "no")
    answers = [await client.generate(**GENERATE) for _ in range(10)]
    assert statuses(answers) == {status: 10}
    for engine in fleet.engines:
        engine.script = None
    assert (await client.generate(**GENERATE)).status == 200
    metrics = await router.metrics()
    breakers = metrics.get("r3router_rank_closed", role="prefill") + metrics.get("r3router_rank_closed", role="decode")
    assert breakers, "no gauge of the breakers"
    assert [s.value for s in breakers] == [0.0] * len(breakers)
    await fleet.quiet()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_cb_2_with_one_side_open_nothing_is_dispatched_and_a_good_probe_closes_it(lab: Lab, side: str) -> None:
    fleet, router, client = await lab.serve(
        "--cb-failure-threshold", "3", "--cb-timeout-duration-secs", "1.5", "--cb-success-threshold", "1", "--disable-retries"
    )
    bad = fleet.p if side == "prefill" else fleet.d
    bad.script = lambda leg: answer(500, {"detail": "broken"})
    answers = [await client.generate(**GENERATE) for _ in range(3)]
    assert statuses(answers) == {500: 3}
    await fleet.quiet()
    posts = fleet.posts()
    start = time.monotonic()
    got = await client.generate(**GENERATE)
    took = time.monotonic() - start
    assert got.status == 503
    assert side in got.error()["message"]
    assert took < 0.5
    assert fleet.posts() == posts, "half a pair was dispatched"
    metrics = await router.metrics()
    assert metrics.sum("r3router_rank_closed", role=side, reason="ejected") == 1
    assert metrics.sum("r3router_rank_closed", reason="ejected") == 1, "the other side's breaker was charged"

    bad.script = None
    await asyncio.sleep(1.7)
    assert (await client.generate(**GENERATE)).status == 200, "the probe goes to both legs"
    assert (fleet.posts() - posts) == 2
    assert (await router.metrics()).sum("r3router_rank_closed", reason="ejected") == 0
    assert statuses([await client.generate(**GENERATE) for _ in range(10)]) == {200: 10}
    fleet.check()


async def test_cb_2_a_failed_probe_opens_it_again_and_one_probe_at_a_time_is_sent(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "0.6", "--disable-retries")
    fleet.d.script = lambda leg: answer(500, {"detail": "broken"}, after=0.1)
    for _ in range(2):
        await client.generate(**GENERATE)
    await fleet.quiet()
    for _ in range(2):
        await asyncio.sleep(0.8)
        fleet.d.peak_legs = 0
        answers = await asyncio.gather(*(client.generate(**GENERATE) for _ in range(3)))
        assert set(statuses(answers)) <= {500, 503}
        assert fleet.d.peak_legs == 1, "more than one probe at a time"
        await fleet.quiet()
    fleet.d.script = None
    await asyncio.sleep(0.8)
    assert (await client.generate(**GENERATE)).status == 200


async def test_cb_2_clients_that_give_up_and_router_deadlines_open_no_breaker(lab: Lab) -> None:
    fleet, router, client = await lab.serve(
        "--cb-failure-threshold",
        "3",
        "--delivery-timeout-secs",
        "0.7",
        prefill={"prefill_s": 60.0, "waiting_s": 60.0},
        decode={"waiting_s": 60.0},
    )
    for _ in range(15):
        connection = await client.connect()
        await connection.post("/generate", encode(GENERATE))
        await asyncio.sleep(0.05)
        connection.close()
    await fleet.quiet()
    assert statuses(await asyncio.gather(*(client.generate(**GENERATE) for _ in range(8)))) == {504: 8}
    await fleet.quiet()
    metrics = await router.metrics()
    assert metrics.sum("r3router_rank_closed", reason="ejected") == 0
    fleet.p.prefill_s = 0.0
    assert statuses([await client.generate(**GENERATE) for _ in range(5)]) == {200: 5}
    await until(lambda: not fleet.p.open_legs, "no leg is left")
