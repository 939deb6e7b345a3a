"""R3-4: payloads by reference. What a reference names is right or the request fails; memory has a cap; no promise is broken."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripted.calls import until
from scripted.client import Client, Closed
from scripted.lab import Lab
from scripted.leg import merged_text
from scripted.r3 import R3Model, from_text

ASKED = {"return_routed_experts": True, "return_outputs_via_store": True, "sampling_params": {"max_new_tokens": 3}}
MODEL = R3Model(layers=4, topk=2, experts=256)
SAMPLES = 2500
SHAPE = ("--r3-layers", "4", "--r3-top-k", "2", "--r3-experts", "256")


def segments(got: Any) -> list[dict[str, Any]]:
    """Of a /generate reply."""
    found: list[dict[str, Any]] = got.json()["meta_info"]["output_store_ref"]["handle"]["segments"]
    return found


def first_bytes(path: str) -> bytes:
    """The header of an object's file."""
    return Path(path).read_bytes()[:256]


def paths(got: Any) -> list[str]:
    """Where to fetch them."""
    return ["/r3/" + segment["uri"].rsplit("/", 1)[1] for segment in segments(got)]


async def ready(lab: Lab, *flags: str, model: R3Model = MODEL, **shape: Any) -> tuple[Any, Any, Client]:
    return await lab.serve(*SHAPE, *flags, prefill={"r3": model}, decode={"r3": model, "tokens": 50}, **shape)


async def test_r3_4_the_request_field_is_enough_and_reaches_no_engine(lab: Lab) -> None:
    fleet, router, client = await ready(lab)
    got = await client.generate(input_ids=[1, 2, 3, 4, 5], **ASKED)
    assert got.status == 200, got.body
    assert len(got.body) < 4096
    info = got.json()["meta_info"]
    assert "routed_experts" not in info
    assert info["output_store_ref"]["fields"] == {"routed_experts": {"dtype": "uint8", "shape": [7, 4, 2]}}
    assert [(s["pos"], s["rows"], s["dtype"]) for s in segments(got)] == [(0, 7, "uint8")], "both legs in one piece"
    assert segments(got)[0]["uri"].startswith("http://router.test/r3/"), "the address that the client used"
    for engine in fleet.engines:
        assert b"return_outputs_via_store" not in engine.legs[0].raw
    metrics = await router.metrics()
    assert metrics.sum("r3router_r3_objects") == 1
    rows = b"".join([(await client.get(path)).body for path in paths(got)])
    prefill, decode = fleet.pairs()[0]
    want = from_text(merged_text(prefill, decode), 4, 2)
    assert np.array_equal(np.frombuffer(rows, np.uint8).reshape(-1, 4, 2), want)
    header = first_bytes(segments(got)[0]["path"])
    assert struct.unpack_from("<8sIIIIIIQI", header) == (b"R3STORE1", 1, 1, 1, 4, 2, 0, 7, segments(got)[0]["crc32"])
    assert header[162 : 162 + struct.unpack_from("<H", header, 160)[0]].decode() == decode.rid


async def test_r3_4_the_routers_default_can_be_a_reference_and_a_header_overrides_it(lab: Lab) -> None:
    _, _, client = await ready(lab, "--r3-transport", "ref", "--r3-public-url", "http://elsewhere:9/")
    wish = {"input_ids": [1, 2], "return_routed_experts": True}
    got = await client.post("/generate", wish)
    assert segments(got)[0]["uri"].startswith("http://elsewhere:9/r3/")
    inline = await client.post("/generate", wish, [("x-r3-transport", "inline")])
    assert isinstance(inline.json()["meta_info"]["routed_experts"], str)


async def test_r3_4_unknown_experts_are_int32_and_unknown_shapes_one_layer(lab: Lab) -> None:
    _, _, client = await lab.serve(prefill={"r3": MODEL}, decode={"r3": MODEL, "tokens": 50})
    got = await client.generate(input_ids=[1, 2, 3], **ASKED)
    field = got.json()["meta_info"]["output_store_ref"]["fields"]["routed_experts"]
    assert field == {"dtype": "int32", "shape": [5, 1, 8]}


async def test_r3_4_an_id_that_does_not_fit_the_models_dtype_is_an_error(lab: Lab) -> None:
    _, router, client = await ready(lab, "--disable-retries", model=R3Model(layers=4, topk=2, experts=70_000))
    got = await client.generate(input_ids=list(range(50)), **ASKED)
    assert got.status == 502
    assert got.error()["code"] == "r3_mismatch"
    assert got.error()["limit"] == 255
    assert (await router.metrics()).sum("r3router_r3_objects") == 0


async def test_r3_4_any_part_can_be_fetched(lab: Lab) -> None:
    _, _, client = await ready(lab)
    got = await client.generate(input_ids=list(range(100)), **ASKED)
    path = paths(got)[0]
    whole = np.frombuffer((await client.get(path)).body, np.uint8).reshape(102, 4, 2)

    async def part(query: str = "", *headers: tuple[str, str]) -> Any:
        return await client.request("GET", path + query, b"", list(headers))

    assert (await part("?rows=10:20")).body == whole[10:20].tobytes()
    assert (await part("?rows=90:")).body == whole[90:].tobytes()
    assert (await part("?layers=1:3")).body == whole[:, 1:3].tobytes()
    assert (await part("?rows=5:9&layers=3:4&dtype=int32")).body == whole[5:9, 3:4].astype(np.int32).tobytes()
    ranged = await part("", ("range", "bytes=8-15"))
    assert (ranged.status, ranged.body, ranged.header("content-range")) == (206, whole[1].tobytes(), "bytes 8-15/816")
    ranged = await part("?dtype=int32", ("range", "bytes=-5"))
    assert ranged.body == whole.astype(np.int32).tobytes()[-5:]
    head = await client.request("HEAD", path)
    assert (head.status, head.header("content-length"), head.body) == (200, "816", b"")


async def test_r3_4_bad_fetches_are_told_apart(lab: Lab) -> None:
    _, _, client = await ready(lab, "--r3-ref-expiry-secs", "1")
    got = await client.generate(input_ids=[1, 2, 3], **ASKED)
    path = paths(got)[0]
    for url, status, code in [
        ("/r3/" + "0" * 32, 404, "r3_unknown"),
        ("/r3/x", 404, "r3_unknown"),
        ("/r3/../../etc/passwd", 404, None),
        (path + "?rows=0:9", 416, "r3_range"),
        (path + "?rows=2:1", 416, "r3_range"),
        (path + "?rows=x", 400, "invalid_field"),
        (path + "?dtype=float32", 400, "invalid_field"),
    ]:
        answer = await client.get(url)
        assert answer.status == status, (url, answer.body)
        assert code is None or answer.error()["code"] == code
    assert (await client.post(path, b"{}")).status == 405
    await asyncio.sleep(1.1)
    answer = await client.get(path)
    assert (answer.status, answer.error()["code"]) == (410, "r3_expired")


async def test_r3_4_fetching_needs_the_clients_key(lab: Lab) -> None:
    _, _, client = await ready(lab, "--api-key", "k1")
    key = ("authorization", "Bearer k1")
    got = await client.post("/generate", {"input_ids": [1, 2, 3], **ASKED}, [key])
    path = paths(got)[0]
    assert (await client.get(path)).status == 401
    assert (await client.request("GET", path, b"", [("authorization", "Bearer k2")])).status == 403
    assert (await client.request("GET", path, b"", [key])).status == 200


async def test_r3_4_a_full_arena_holds_requests_back_and_evicts_nothing(lab: Lab) -> None:
    # A payload of 2000 rows of 8 numbers; the smallest arena holds about sixty.
    prompt = list(range(2000))
    _, router, client = await ready(lab, "--r3-arena-bytes", "1048576", "--queue-timeout-secs", "60")
    first = await client.generate(input_ids=prompt, **ASKED)
    assert first.status == 200, first.body
    calls = [asyncio.create_task(client.generate(input_ids=prompt, **ASKED)) for _ in range(80)]
    metrics = await router.metrics()
    for _ in range(200):
        await asyncio.sleep(0.02)
        metrics = await router.metrics()
        if metrics.sum("r3router_queued_requests") > 0 and metrics.sum("r3router_requests_live") == metrics.sum("r3router_queued_requests"):
            break
    waiting = int(metrics.sum("r3router_queued_requests"))
    assert 0 < waiting < 80, "some were served, the rest waits for room"
    assert metrics.sum("r3router_r3_arena_bytes", what="used") <= 1048576
    assert (await client.get(paths(first)[0])).status == 200, "what was promised is still there"
    served = [call for call in calls if call.done()]
    for call in served:
        for path in paths(call.result()):
            assert (await client.delete(path)).status == 204
    for path in paths(first):
        await client.delete(path)

    async def let_go(call: asyncio.Task[Any]) -> None:
        got = await call
        assert got.status == 200, got.body
        for path in paths(got):
            assert (await client.delete(path)).status == 204

    await asyncio.gather(*(let_go(call) for call in calls if call not in served))
    metrics = await router.metrics()
    assert metrics.sum("r3router_r3_objects") == 0
    assert metrics.sum("r3router_r3_arena_bytes", what="used") == 0


async def test_r3_4_a_client_that_leaves_before_the_reply_leaves_no_object(lab: Lab) -> None:
    fleet, router, client = await ready(lab)
    fleet.d.run_s = 0.2
    for _ in range(10):
        connection = await client.connect()
        await connection.post("/generate", json.dumps({"input_ids": [1, 2, 3], **ASKED}).encode())
        await asyncio.sleep(0.05)
        connection.rst()
    await fleet.quiet()
    metrics = await router.metrics()
    assert metrics.sum("r3router_r3_objects") == 0
    assert not list(lab.store.glob("*/*.r3"))


async def test_r3_4_a_slow_fetcher_stops_nobody_and_gets_all(lab: Lab) -> None:
    _, _, client = await ready(lab)
    got = await client.generate(input_ids=list(range(8000)), **ASKED)
    path = paths(got)[0]
    slow = await client.connect()
    await slow.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    others = await asyncio.gather(*(client.generate(input_ids=[1, 2, 3], **ASKED) for _ in range(20)))
    assert all(other.status == 200 for other in others)
    assert (await client.delete(path)).status == 204, "deleting does not cut off who reads"
    answer = await slow.answer()
    assert len(answer.body) == 8002 * 8
    slow.close()


async def test_r3_4_a_killed_routers_rows_are_gone_and_its_files_too(lab: Lab) -> None:
    fleet, router, client = await ready(lab)
    got = await client.generate(input_ids=[1, 2, 3], **ASKED)
    assert len(list(lab.store.glob("*/*.r3"))) == 1
    os.kill(router.pid, signal.SIGKILL)
    router.process.wait()
    await fleet.quiet()
    second = await lab.router(fleet, *SHAPE)
    assert not list(lab.store.glob("*/*.r3")), "the next router clears what the dead one left"
    answer = await second.client.get(paths(got)[0])
    assert (answer.status, answer.error()["code"]) == (404, "r3_unknown")


async def test_r3_4_thousands_of_samples_leave_the_store_empty(lab: Lab) -> None:
    _, router, client = await ready(lab, "--log-level", "warn")
    left = SAMPLES

    async def sampler(number: int) -> None:
        nonlocal left
        mine = client if number % 2 else Client(router.port)
        while left > 0:
            left -= 1
            got = await mine.generate(input_ids=[number, 2, 3], **ASKED)
            assert got.status == 200, got.body
            for path in paths(got):
                assert (await mine.delete(path)).status == 204
        mine.close()

    await asyncio.gather(*(sampler(number) for number in range(16)))
    metrics = await router.metrics()
    assert metrics.sum("r3router_r3_objects_total", event="made") == SAMPLES
    assert metrics.sum("r3router_r3_objects_total", event="deleted") == SAMPLES
    assert metrics.sum("r3router_r3_arena_bytes", what="used") == 0
    await until(lambda: not list(lab.store.glob("*/*.r3")), "the directory is empty")


@pytest.mark.parametrize("flag", ["--r3-store-dir", "--r3-spill-dir"])
@pytest.mark.parametrize("folder", ["/proc/1", "/nowhere"])
async def test_r3_4_a_directory_that_cannot_be_used_stops_the_start(flag: str, folder: str) -> None:
    for more in ((), ("--check",)):
        command = (sys.executable, "-m", "r3router", "serve", "--port", "0", "--prometheus-port", "0", flag, folder, *more)
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        _, told = await asyncio.wait_for(process.communicate(), 30.0)
        assert process.returncode == 2
        assert flag in told.decode() and folder in told.decode(), told


def warnings(router: Any) -> list[str]:
    """What the router warned of its store."""
    return [line for line in router.tail(1 << 24).splitlines() if "WARN" in line and ("references" in line or "reference can" in line)]


async def test_r3_4_a_store_that_is_removed_under_the_router_is_made_again_and_what_was_lost_is_said(lab: Lab) -> None:
    _, router, client = await ready(lab)
    lab.store.rmdir()
    lost = await client.generate(input_ids=[1, 2, 3], **ASKED)
    assert lost.status == 200, "before the first reference"
    assert len(warnings(router)) == 1 and str(lab.store) in warnings(router)[0]
    (home,) = lab.store.iterdir()
    shutil.rmtree(home)
    got = await client.generate(input_ids=[1, 2, 3, 4], **ASKED)
    assert got.status == 200, got.body
    assert len((await client.get(paths(got)[0])).body) == 6 * 8
    assert first_bytes(segments(got)[0]["path"])[:8] == b"R3STORE1"
    answer = await client.get(paths(lost)[0])
    assert (answer.status, answer.error()["code"]) == (410, "r3_deleted")
    told = warnings(router)
    assert len(told) == 2 and str(home) in told[1] and "references=1" in told[1], told
    metrics = await router.metrics()
    assert metrics.sum("r3router_r3_objects") == 1
    assert metrics.sum("r3router_r3_arena_bytes", what="used") == 256 + 6 * 8
    # Nobody asks for anything: the room of what is lost comes back all the same.
    for entry in lab.store.iterdir():
        shutil.rmtree(entry)
    for _ in range(500):
        if not (await router.metrics()).sum("r3router_r3_arena_bytes", what="used"):
            break
        await asyncio.sleep(0.02)
    assert (await router.metrics()).sum("r3router_r3_arena_bytes", what="used") == 0


async def test_r3_4_a_store_that_cannot_be_made_again_is_the_routers_fault_until_it_is_mended(lab: Lab) -> None:
    _, router, client = await ready(lab)
    assert (await client.generate(input_ids=[1, 2, 3], **ASKED)).status == 200
    shutil.rmtree(lab.store)
    lab.store.write_text("in the way")
    before = (await router.metrics()).sum("r3router_requests_total", outcome="internal")
    for _ in range(3):
        got = await client.generate(input_ids=[1, 2, 3], **ASKED)
        error = got.error()
        assert (got.status, error["code"], error["source"]) == (500, "r3_store_failed", "router"), got.body
        assert str(lab.store) in error["message"] and "--r3-store-dir" in error["advice"]
    assert (await router.metrics()).sum("r3router_requests_total", outcome="internal") == before + 3
    assert len(warnings(router)) == 2, "it was removed, and nothing can be made in its place"
    inline = await client.generate(input_ids=[1, 2, 3], return_routed_experts=True)
    assert inline.status == 200
    lab.store.unlink()
    assert (await client.generate(input_ids=[1, 2, 3], **ASKED)).status == 200


async def test_r3_4_rows_that_were_deleted_are_told_from_expired_ones_and_a_range_says_the_length(lab: Lab) -> None:
    _, _, client = await ready(lab)
    got = await client.generate(input_ids=[1, 2, 3, 4], **ASKED)
    path = paths(got)[0]
    length = len((await client.get(path)).body)
    for url, headers, expected in (
        (path, [("range", f"bytes={length}-")], length),
        (path + "?rows=0:1", [("range", "bytes=8-")], 8),
        (path + "?rows=0:999", [], length),
        (path + "?layers=3:9", [], length),
    ):
        answer = await client.request("GET", url, b"", headers=headers)
        assert (answer.status, answer.header("content-range")) == (416, f"bytes */{expected}"), (url, answer.body)
    for at in paths(got):
        assert (await client.delete(at)).status == 204
        for again in (await client.get(at), await client.delete(at)):
            error = again.error()
            assert (again.status, error["code"]) == (410, "r3_deleted")
            assert "deleted" in error["message"] and "sooner" not in error["advice"]


async def test_r3_4_a_broken_connection_during_a_fetch_keeps_the_object(lab: Lab) -> None:
    _, _, client = await ready(lab)
    got = await client.generate(input_ids=list(range(8000)), **ASKED)
    path = paths(got)[0]
    broken = await client.connect()
    await broken.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    broken.rst()
    with pytest.raises((Closed, ConnectionError)):
        await broken.answer()
    assert len((await client.get(path)).body) == 8002 * 8


async def test_r3_4_a_transport_that_does_not_exist_is_refused(lab: Lab) -> None:
    fleet, _, client = await ready(lab)
    got = await client.post("/generate", {"input_ids": [1], **ASKED}, [("x-r3-transport", "reff")])
    assert (got.status, got.error()["code"]) == (400, "invalid_field")
    assert fleet.posts() == 0
