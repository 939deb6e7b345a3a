"""HTTP: keep-alive races and body limits."""

from __future__ import annotations

import asyncio
import random

import pytest

from scripted.calls import crowd, statuses
from scripted.client import encode, request_bytes
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.server import Exchange, Request

IDLE_CLOSE_S = 5.0
PAIRS = 1000


@pytest.mark.parametrize("flags", [[], ["--upstream-idle-secs", "60"]], ids=["default", "pool keeps longer than the engine"])
async def test_http_1_calls_around_the_engines_idle_close_all_succeed(lab: Lab, flags: list[str]) -> None:
    fleet = Fleet.pd()
    for engine in fleet.engines:
        engine.server.idle_close_s = IDLE_CLOSE_S
    await lab.fleet(fleet)
    router = await lab.router(fleet, "--log-level", "warn", "--disable-retries", *flags)
    body = b'{"input_ids":[1,2],"sampling_params":{"max_new_tokens":1}}'
    chance = random.Random(3)

    async def pair() -> list[int]:
        connection = await router.client.connect()
        one = await connection.call("/generate", body)
        await asyncio.sleep(4.9 + 0.2 * chance.random())
        two = await connection.call("/generate", body)
        connection.close()
        return [one.status, two.status]

    results = await asyncio.gather(*(pair() for _ in range(PAIRS)))
    assert [r for r in results if r != [200, 200]] == []
    # The fakes fail when a rid is generated twice.
    fleet.check()
    assert len(fleet.p.legs) == len(fleet.d.legs) == 2 * PAIRS


@pytest.mark.parametrize("how", ["rst", "close"])
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
async def test_http_1_a_reused_connection_that_dies_unanswered_is_replaced_without_a_trace(lab: Lab, how: str, side: str) -> None:
    fleet, router, client = await lab.serve("--disable-retries", "--cb-failure-threshold", "1", "--poll-interval-ms", "60000")
    broken = 0

    def on_reuse() -> str:
        nonlocal broken
        broken += 1
        return how

    assert (await client.generate(text="warm the pool")).status == 200
    for engine in fleet.engines:
        if side in (engine.role, "both"):
            engine.server.on_reuse = on_reuse
    answers = [await client.generate(text=f"call {i}") for i in range(10)]
    assert statuses(answers) == {200: 10}, "a stale connection reached the client"
    assert broken >= 10
    fleet.check()
    assert [len(engine.legs) for engine in fleet.engines] == [11, 11]
    metrics = await router.metrics()
    assert metrics.sum("r3router_retries_total") == 0


async def test_http_1_a_new_connection_that_dies_is_a_failure_and_not_sent_again(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", "--upstream-idle-secs", "0")
    hits = 0

    normal = fleet.d.server.handler

    async def handler(request: Request, exchange: Exchange) -> None:
        nonlocal hits
        if request.path != "/generate":
            return await normal(request, exchange)
        hits += 1
        exchange.rst()
        return None

    fleet.d.server.handler = handler
    got = await client.generate(text="x")
    assert got.status == 502
    assert hits == 1, "the request may have been processed: it must not be sent again under the same rid"
    await fleet.quiet()


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [151643] * 400_000, "sampling_params": {}},
        {"text": "<image>", "image_data": "iVBORw0KGgo" * 280_000},
        {"text": "x" * 2_100_000},
    ],
    ids=["2.8 MB of ids", "3 MB image", "2.1 MB text"],
)
async def test_http_2_bodies_over_two_megabytes_arrive_whole_at_both_engines(lab: Lab, body: dict[str, object]) -> None:
    fleet, _, client = await lab.serve()
    raw = encode(body)
    for chunk_size in (None, 65_536):
        got = await client.request("POST", "/generate", raw, chunk_size=chunk_size)
        assert got.status == 200, got.body[:300]
    for leg in fleet.p.legs + fleet.d.legs:
        for key, value in body.items():
            assert leg.body[key] == value
    assert len(fleet.p.legs) == len(fleet.d.legs) == 2


async def test_http_2_sixty_four_megabytes_cost_a_small_multiple_of_themselves(lab: Lab) -> None:
    fleet, router, client = await lab.serve(prefill={"kv_pool": 10**9}, decode={"kv_pool": 10**9})
    size = 64 << 20
    raw = b'{"text":"' + b"y" * (size - 11) + b'"}'
    assert len(raw) == size
    before = router.rss()
    router.reset_peak()
    got = await client.request("POST", "/generate", raw)
    assert got.status == 200
    for leg in (fleet.p.legs[0], fleet.d.legs[0]):
        assert raw[9:-2] in leg.raw
        assert len(leg.raw) >= size
    peak = router.rss("VmHWM") - before
    assert peak < 3 * size, f"a body of {size >> 20} MiB took {peak >> 20} MiB"


async def test_http_2_the_limit_holds_to_the_byte_for_both_framings(lab: Lab) -> None:
    limit = 300_000
    fleet, _, client = await lab.serve("--max-payload-size", str(limit))

    def body(size: int) -> bytes:
        return b'{"text":"' + b"z" * (size - 11) + b'"}'

    for size in (limit - 1, limit):
        for chunk_size in (None, 1000):
            got = await client.request("POST", "/generate", body(size), chunk_size=chunk_size)
            assert got.status == 200, (size, chunk_size, got.body[:300])
    seen = fleet.posts()
    for size in (limit + 1, 3 * limit):
        for chunk_size in (None, 1000):
            connection = await client.connect()
            await connection.send(request_bytes("POST", "/generate", body(size), chunk_size=chunk_size))
            got = await connection.answer()
            assert got.status == 413, (size, chunk_size)
            error = got.error()
            assert error["code"] == "body_too_large"
            assert error["limit"] == limit
            if (got.header("connection") or "").lower() != "close":
                assert (await connection.call("/generate", body(100))).status == 200
                seen += 2
            connection.close()
    assert fleet.posts() == seen, "a body over the limit reached an engine"


async def test_http_2_a_client_that_asks_first_is_told_before_it_sends(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--max-payload-size", "100000")
    connection = await client.connect()
    head = b"POST /generate HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 50000000\r\n\r\n"
    await connection.send(head)
    got = await asyncio.wait_for(connection.answer(), 20.0)
    assert got.status == 413
    assert got.error()["limit"] == 100_000
    connection.close()
    assert fleet.posts() == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/workers"])
async def test_http_2_one_limit_for_every_route(lab: Lab, path: str) -> None:
    fleet, _, client = await lab.serve("--max-payload-size", "50000")
    got = await client.request("POST", path, b'{"prompt":"' + b"z" * 60_000 + b'"}')
    assert got.status == 413
    assert got.error()["code"] == "body_too_large"
    assert fleet.posts() == 0


async def test_many_idle_connections_cost_no_call(lab: Lab) -> None:
    _, _, client = await lab.serve()
    idle = [await client.connect() for _ in range(300)]
    for connection in idle[::2]:
        await connection.send(b"POST /generate HTTP/1.1\r\n")
    answers = await crowd([lambda: client.generate(text="x")] * 20, 10)
    assert statuses(answers) == {200: 20}
    for connection in idle:
        connection.close()
