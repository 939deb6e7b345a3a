"""What a person who runs the router is told: dead engines, unknown fields, routes that a split fleet cannot answer, log lines, gauges."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scripted.calls import CHAT, GENERATE
from scripted.lab import Lab


async def until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(1500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)


def log_of(lab: Lab) -> Path:
    return lab.routers[0].log


async def test_a_fleet_that_is_registered_and_down_says_so_engine_by_engine(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--log-level", "warn", "--health-check-interval-secs", "100ms")
    await fleet.d.server.stop()
    got = await client.generate(**GENERATE)
    for _ in range(500):
        if got.status == 503:
            break
        await asyncio.sleep(0.02)
        got = await client.generate(**GENERATE)
    for path, body in (("/generate", GENERATE), ("/v1/chat/completions", CHAT)):
        got = await client.post(path, body)
        error = got.error()
        assert (got.status, error["code"], error["measured"]) == (503, "no_available_workers", 0)
        assert "1 decode registered, 0 healthy" in error["message"], error
        assert fleet.d.url in error["message"] and "not registered" not in error["message"]
        assert "GET /workers" in error["advice"]
    # Whoever reads warnings only sees it go and come back.
    await until(lambda: "worker down" in log_of(lab).read_text(), "the end of the engine is in the log")
    assert fleet.d.url in log_of(lab).read_text()


async def test_an_engine_that_never_answers_is_in_the_log(lab: Lab) -> None:
    _, _, client = await lab.serve("--log-level", "warn")
    taken = await client.post("/workers", {"url": "http://127.0.0.1:9", "worker_type": "decode"})
    assert taken.status == 202
    await until(lambda: "does not answer yet" in log_of(lab).read_text(), "the engine is in the log")
    assert "http://127.0.0.1:9" in log_of(lab).read_text()


async def test_worker_registrations_are_checked_by_name_and_a_conflict_has_its_own_code(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    for body, code, said in (
        ({"url": "ftp://d:1"}, "invalid_field", "ftp"),
        ({"url": "http://d:1", "worker_type": "decode", "bootstrap_prt": 1}, "invalid_field", "bootstrap_port"),
        ({"url": "http://d:1"}, "invalid_field", "worker_type"),
    ):
        got = await client.post("/workers", body)
        assert (got.status, got.error()["code"]) == (400, code)
        assert said in got.error()["message"], got.error()
    got = await client.post("/workers", {"url": fleet.d.url, "worker_type": "prefill"})
    assert (got.status, got.error()["code"]) == (409, "worker_conflict")
    got = await client.post("/workers", {"url": fleet.d.url, "worker_type": "decode", "dp_aware": True})
    assert got.status == 202
    assert got.json()["warnings"] == ["dp_aware has no effect in this router"]


@pytest.mark.parametrize("path", ["/abort_request", "/workers"])
async def test_positions_of_broken_json_are_bytes(lab: Lab, path: str) -> None:
    _, _, client = await lab.serve()
    for raw, at in ((b"", 0), (b"{", 1), (b'{"rid" 1}', 7), (b'{\n "rid": 1,\n x}', 14)):
        got = await client.request("POST", path, raw)
        error = got.error()
        assert (got.status, error["code"], error["measured"]) == (400, "invalid_json", at), (raw, error)


async def test_a_route_for_one_engine_is_refused_by_a_split_fleet_in_its_own_words(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    listed = (await client.get("/routes")).json()["regular_engines_only"]
    assert listed
    for path in listed:
        got = await client.post(path, {"input": "a"})
        assert (got.status, got.error()["code"]) == (501, "pd_unsupported"), path
    assert fleet.posts() == 0


async def test_the_line_of_a_request_whose_client_left_has_its_ids_and_ranks(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--log-json", decode={"run_s": 30.0})
    connection = await client.connect()
    await connection.post("/generate", json.dumps(GENERATE).encode())
    await until(lambda: len(fleet.legs("decode")) == 1, "decode has the request")
    connection.close()

    def lines() -> list[dict[str, str]]:
        raw = [line for line in log_of(lab).read_text().splitlines() if line.startswith("{")]
        return [line for line in map(json.loads, raw) if line.get("outcome") == "cancelled_running"]

    await until(lambda: len(lines()) == 1, "the line is written")
    (line,) = lines()
    leg = fleet.legs("decode")[0]
    assert line["rid"] == leg.rid
    assert line["d"] == f"{fleet.d.url}@0" and line["p"] == f"{fleet.p.url}@0"
    assert line["room"]


async def test_requests_that_wait_for_a_place_are_counted(lab: Lab) -> None:
    _, router, client = await lab.serve("--max-concurrent-requests", "1", decode={"run_s": 1.0})
    calls = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(4)]
    seen = 0.0
    for _ in range(500):
        seen = max(seen, (await router.metrics()).sum("r3router_place_waiting_requests"))
        if seen == 3:
            break
        await asyncio.sleep(0.01)
    assert seen == 3
    assert [got.status for got in await asyncio.gather(*calls)] == [200] * 4
    await router.zero_check()
