"""One JSON line per request: every route and every kind of end writes exactly one, with all that is known of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from cases.route_table import ALL_ENGINES, INFO, ONE_ENGINE, At, body_of
from scripted.acts import chunks, never, refusal, rst
from scripted.calls import GENERATE, until
from scripted.client import Client
from scripted.lab import Lab
from scripted.router import Router

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")
MARK = "the-last-one"


def lines(router: Router) -> list[dict[str, Any]]:
    """All lines of requests, but for the lab's own looks at whether all engines are there."""
    parsed = [json.loads(line) for line in router.tail(1 << 24).splitlines() if line.startswith("{")]
    found = [line for line in parsed if line.get("target") == "r3router::request"]
    return [line for line in found if (line["method"], line["path"], "trace_id" in line) != ("GET", "/workers", False)]


async def written(router: Router, count: int = 1) -> list[dict[str, Any]]:
    """Waits for so many lines, and makes sure that there are no more: a last request's line comes after them."""
    await until(lambda: len(lines(router)) >= count, f"{count} lines are written")
    assert (await router.client.request("GET", "/routes", b"", [("x-request-id", MARK)])).status == 200
    await until(lambda: any(line["id"] == MARK for line in lines(router)), "the last line is written")
    found = [line for line in lines(router) if line["id"] != MARK]
    assert len(found) == count, found
    return found


@pytest.mark.parametrize("at", [*ONE_ENGINE, *ALL_ENGINES], ids=str)
async def test_every_route_writes_one_line(lab: Lab, at: At) -> None:
    fleet = await lab.fleet(at.fleet())
    router = await lab.router(fleet, "--log-json")
    for engine in fleet.engines:
        engine.control_answers[at.path] = (200, {"results": []})
    body = json.dumps(body_of(at.path)).encode()
    got = await router.client.request("POST", at.path + "?secret=1", body, [PARENT, ("x-request-id", "r-1")])
    (line,) = await written(router)
    assert (line["id"], line["method"], line["path"], line["status"]) == ("r-1", "POST", at.path, got.status)
    assert line["trace_id"] == TRACE
    assert line["outcome"] == ("ok" if got.status < 400 else line["outcome"])
    assert (line["outcome"] == "ok") == (got.status < 400)
    assert line["bytes"] == len(got.body)
    assert line["total_ms"] > 0
    assert "secret" not in json.dumps(line)
    if at.generates:
        decode = fleet.legs("decode" if at.mode == "pd" else "regular")[0]
        assert line["rid"] == decode.rid
        assert line["d"] == f"{decode.engine.url}@{decode.rank}"
        assert (line["wait_ms"] >= 0, line["attempts"], line["tokens"]) == (True, 1, decode.engine.tokens)
        if at.mode == "pd":
            prefill = fleet.legs("prefill")[0]
            assert (line["p"], line["room"]) == (f"{prefill.engine.url}@{prefill.rank}", prefill.room)
            assert line["delivery_ms"] > 0


@pytest.mark.parametrize(
    ("method", "path", "outcome"),
    [
        *(("GET", path, "ok") for path in INFO if "weight" not in path),
        ("GET", "/weight_version", "engine_rejected"),
        ("GET", "/workers", "ok"),
        ("GET", "/v1/loads", "ok"),
        ("GET", "/no/such/route", "invalid"),
        ("GET", "/generate", "invalid"),
        ("DELETE", "/flush_cache", "invalid"),
        ("POST", "/v1/embeddings", "invalid"),
        ("GET", "/r3/0123", "invalid"),
        ("POST", "/workers", "invalid"),
        ("POST", "/abort_request", "invalid"),
    ],
)
async def test_what_is_no_generation_writes_one_line(lab: Lab, method: str, path: str, outcome: str) -> None:
    _, router, client = await lab.serve("--log-json")
    got = await client.request(method, path, b"" if method == "GET" else b"[", [PARENT])
    (line,) = await written(router)
    assert (line["method"], line["path"], line["status"]) == (method, path, got.status)
    assert (line["trace_id"], line["id"]) == (TRACE, got.header("x-request-id"))
    if outcome not in ("ok", "engine_rejected"):
        assert line["error"] == got.error()["code"]
    assert line["outcome"] == outcome


async def test_the_id_of_rows_is_written_in_part(lab: Lab) -> None:
    _, router, client = await lab.serve("--log-json")
    asked = {**GENERATE, "return_routed_experts": True, "return_outputs_via_store": True}
    told = (await client.post("/generate", asked)).json()["meta_info"]["output_store_ref"]["handle"]["segments"][0]["uri"]
    number = told.rsplit("/", 1)[1]
    for path, status in ((f"/r3/{number}", 200), ("/r3/" + "é".encode().hex() * 9, 404), ("/r3/%C3%A9%C3%A9%C3%A9%C3%A9%C3%A9", 404)):
        assert (await client.get(path)).status == status
    _, *lines = await written(router, 4)
    assert [line["path"] for line in lines] == [f"/r3/{number[:8]}...", "/r3/c3a9c3a9...", "/r3/%C3%A9%C..."]
    assert number not in router.tail(1 << 24)


async def test_health_checks_and_scrapes_write_none(lab: Lab) -> None:
    _, router, client = await lab.serve("--log-json")
    for path in ("/health", "/liveness", "/readiness", "/ready", "/metrics"):
        assert (await client.get(path)).status == 200
    await router.metrics()
    assert await written(router, 0) == []


async def test_the_admin_listener_writes_lines_too(lab: Lab) -> None:
    fleet, router, _ = await lab.serve("--log-json")
    admin = Client(router.admin_port)
    headers = [("content-type", "application/json"), ("host", f"127.0.0.1:{router.admin_port}")]
    got = await admin.request("POST", "/admin/drain", json.dumps({"worker": fleet.d.url}).encode(), headers)
    assert got.status == 200
    (line,) = await written(router)
    assert (line["method"], line["path"], line["status"], line["outcome"]) == ("POST", "/admin/drain", 200, "ok")
    admin.close()


async def left(client: Client, body: dict[str, Any], ready: Callable[[], object]) -> None:
    """A client that goes away once `ready`."""
    connection = await client.connect()
    await connection.post("/generate", json.dumps(body).encode())
    await until(ready, "it is where it should be")
    connection.close()


ENDS = {
    "not json": (400, "invalid", "invalid_json"),
    "too large": (413, "invalid", "body_too_large"),
    "unauthorized": (401, "unauthorized", "unauthorized"),
    "no room ever": (400, "invalid", "too_large_for_fleet"),
    "queue full": (429, "shed", "queue_full"),
    "queue timeout": (429, "queue_timeout", "queue_timeout"),
    "engine refuses": (400, "engine_rejected", "engine_rejected"),
    "engine fails": (500, "engine_failed", "engine_failed"),
    "engine lost": (502, "engine_failed", "connection_reset"),
    "stream breaks": (200, "engine_failed", "connection_reset"),
    "delivery timeout": (504, "delivery_timeout", "delivery_timeout"),
    "aborted": (200, "aborted", None),
    "left running": (499, "cancelled_running", None),
    "left queued": (499, "cancelled_queued", None),
    "left streaming": (200, "cancelled_running", None),
}


@pytest.mark.parametrize("end", ENDS)
async def test_every_kind_of_end_writes_one_line(lab: Lab, end: str) -> None:
    flags = {
        "too large": ["--max-payload-size", "2048"],
        "unauthorized": ["--api-key", "k"],
        "queue full": ["--queue-size", "0"],
        "queue timeout": ["--queue-timeout-secs", "0.2"],
        "delivery timeout": ["--delivery-timeout-secs", "0.3"],
    }.get(end, [])
    busy = end in ("queue timeout", "left queued")
    shape: dict[str, Any] = {"max_running": 1, "run_s": 3.0} if busy else {"kv_pool": 4000} if end == "no room ever" else {}
    fleet, router, client = await lab.serve("--log-json", "--disable-retries", *flags, decode=shape)
    if busy:
        first = await client.connect()
        await first.post("/generate", json.dumps(GENERATE).encode(), [("x-request-id", "first")])
        await until(lambda: fleet.legs("decode"), "the only place is taken")
    event = b'data: {"text": "a", "meta_info": {"finish_reason": null}}\n\n'
    script = {
        "engine refuses": lambda leg: refusal(400, "no"),
        "engine fails": lambda leg: refusal(500, "no"),
        # Late: a reused connection that breaks at once is only opened anew.
        "engine lost": lambda leg: rst(after=0.3),
        "stream breaks": lambda leg: chunks([event], then="rst"),
        "left streaming": lambda leg: chunks([event], then="hang"),
        "delivery timeout": lambda leg: never(),
        "aborted": lambda leg: never(joins=True),
        "left running": lambda leg: never(joins=True),
    }.get(end)
    fleet.d.script = script
    if end == "delivery timeout":
        fleet.p.script = lambda leg: never()
    body: dict[str, Any] = {**GENERATE, "rid": "sample-1", "stream": end in ("stream breaks", "left streaming")}
    count = 1
    if end == "not json":
        await client.request("POST", "/generate", b"{", [])
    elif end == "too large":
        await client.request("POST", "/generate", b"{" + b" " * 4096, [])
    elif end == "no room ever":
        await client.post("/generate", {**body, "input_ids": list(range(5000))})
    elif end == "aborted":
        call = asyncio.create_task(client.post("/generate", body))
        await until(lambda: fleet.legs("decode"), "decode has it")
        assert (await client.post("/abort_request", {"rid": "sample-1"})).status == 200
        await call
        count = 2
    elif end == "left running":
        await left(client, body, lambda: fleet.legs("decode"))
    elif end == "left queued":
        queued: list[float] = []

        async def look() -> None:
            while not queued:
                seen = (await router.metrics()).sum("r3router_queued_requests")
                queued.extend([seen] if seen else [])

        task = asyncio.create_task(look())
        await left(client, body, lambda: queued)
        await task
    elif end == "left streaming":
        connection = await client.connect()
        await connection.post("/generate", json.dumps(body).encode())
        assert (await connection.head())[0] == 200
        connection.close()
    elif end == "unauthorized":
        await client.request("POST", "/generate", json.dumps(body).encode(), [])
        router.client.headers = [("authorization", "Bearer k")] if hasattr(router.client, "headers") else None
    else:
        await client.post("/generate", body)
    if busy:
        first.close()
        count += 1
    if end == "unauthorized":
        await until(lambda: len(lines(router)) >= 1, "the line is written")
        found = lines(router)
        assert len(found) == 1
    else:
        found = await written(router, count)
    (line,) = [line for line in found if line["path"] == "/generate" and line["id"] != "first"]
    assert (line["status"], line["outcome"], line.get("error")) == ENDS[end]
    assert line["method"] == "POST" and line["total_ms"] >= 0
    reached = end.startswith(("engine", "stream", "delivery", "aborted", "left running", "left streaming"))
    assert bool(line["rid"]) == reached
    if reached:
        leg = fleet.legs("prefill")[-1]
        assert (line["rid"], line["p"], line["d"]) == (leg.rid, f"{fleet.p.url}@0", f"{fleet.d.url}@0")
