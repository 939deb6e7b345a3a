"""R3-4 on bad days: engines' hosts that die, garbage descriptors, clients that never fetch or hardly read, ten thousand samples."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3router.client import Client as OurClient
from r3router.r3.store import SHM
from scripted.acts import Act
from scripted.calls import CHAT, until
from scripted.client import Client
from scripted.host import Host
from scripted.lab import Lab
from scripted.leg import Leg, merged_rows, merged_text
from scripted.r3 import R3Model
from scripted.reference import RefClient

LAYERS, TOP_K = 4, 2
SHAPE = ("--r3-layers", str(LAYERS), "--r3-top-k", str(TOP_K), "--r3-experts", "256")
IDS = [1, 2, 3, 4, 5]
ASKED = {"return_routed_experts": True, "sampling_params": {"max_new_tokens": 3}}
REF = [("x-r3-transport", "ref")]
MODEL = R3Model(LAYERS, TOP_K)


def plugged(host: Host) -> R3Model:
    """An engine with the plug-in, whose host this is."""
    return R3Model(LAYERS, TOP_K, keep=host.keep)


def envelope(got: Any) -> dict[str, Any]:
    assert got.status == 200, got.body[:300]
    found: dict[str, Any] = got.json()["meta_info"]["output_store_ref"]
    return found


@pytest.mark.parametrize("with_plugin", ["prefill", "decode", "both"])
async def test_r3_4_engines_with_and_without_the_plug_in_serve_one_sample(lab: Lab, host: Host, with_plugin: str) -> None:
    shape = {side: {"r3": plugged(host) if with_plugin in (side, "both") else MODEL, "tokens": 50} for side in ("prefill", "decode")}
    fleet, router, client = await lab.serve(*SHAPE, **shape)
    got = await client.post("/generate", {"input_ids": IDS, **ASKED}, REF)
    ref = envelope(got)
    reader = RefClient(router.port)
    parts = []
    for segment in ref["handle"]["segments"]:
        if segment["uri"].startswith("r3://"):
            parts.append(host.rows(segment, LAYERS, TOP_K))
        else:
            path = "/r3/" + segment["uri"].rsplit("/", 1)[1]
            parts.append(np.frombuffer((await reader.get(path)).body, segment["dtype"]).reshape(-1, LAYERS, TOP_K))
            await reader.delete(path)
    reader.close()
    assert np.array_equal(np.concatenate(parts), merged_rows(*fleet.pairs()[0]))
    if with_plugin == "both":
        metrics = await router.metrics()
        assert metrics.sum("r3router_r3_text_bytes_total") < 1024, "no row passed the router"
    got = await client.generate(input_ids=IDS, **ASKED)
    assert got.json()["meta_info"]["routed_experts"] == merged_text(*fleet.pairs()[1])


@pytest.mark.parametrize("reference", [False, True])
async def test_r3_4_rows_that_a_chat_reply_names_twice_are_read_once(lab: Lab, host: Host, reference: bool) -> None:
    """0.5.17 says them in the choice and in `sglext`: an object is let go by its first reader."""
    shape = {side: {"r3": plugged(host), "tokens": 50, "rows_twice": True} for side in ("prefill", "decode")}
    fleet, _, client = await lab.serve(*SHAPE, **shape)
    body = {**CHAT, "return_meta_info": True, "return_routed_experts": True, "max_tokens": 3}
    got = await client.post("/v1/chat/completions", body, REF if reference else None)
    assert got.status == 200, got.body[:400]
    reply = got.json()
    meta, ext = reply["choices"][0]["meta_info"], reply.get("sglext") or {}
    if reference:
        assert not {"routed_experts", "output_store_ref"} & set(ext)
        parts = [host.rows(segment, LAYERS, TOP_K) for segment in meta["output_store_ref"]["handle"]["segments"]]
        assert np.array_equal(np.concatenate(parts), merged_rows(*fleet.pairs()[0]))
    else:
        assert meta["routed_experts"] == ext["routed_experts"] == merged_text(*fleet.pairs()[0])


GARBAGE: dict[str, bytes | dict[str, Any]] = {
    "no JSON": b"R3H1garbage-of-forty-and-more-bytes-that-is-no-json",
    "only the magic": b"R3H1{",
    "a list": b"R3H1{}[1]",
    "no address": {"uri": None},
    "an address that is a number": {"uri": 17},
    "rows and shape disagree": {"rows": 4_000_000_000},
    "rows below zero": {"rows": -1},
    "a dtype that does not exist": {"dtype": "float8"},
    "no checksum member": {"crc32": "x"},
    "a shape of two": {"shape": [5, 4]},
    "a shape that overflows": {"shape": [5, 4_294_967_295, 4_294_967_295]},
    "rows in the file's header": {"offset": 10},
    "rows that begin inside a row": {"offset": 261},
    "another number of rows": {"rows": 3, "shape": [3, 4, 2]},
    "too long": {"path": "/" + "x" * 5000},
}


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_r3_4_garbage_in_the_place_of_a_descriptor_is_an_error_of_that_request(lab: Lab, host: Host, side: str) -> None:
    fleet, router, client = await lab.serve(
        *SHAPE, "--disable-retries", "--disable-circuit-breaker", prefill={"r3": plugged(host)}, decode={"r3": plugged(host), "tokens": 50}
    )
    engine = fleet.p if side == "prefill" else fleet.d
    failed = 0
    for what, change in GARBAGE.items():
        for transport in ("ref", "inline"):
            engine.r3 = R3Model(
                LAYERS,
                TOP_K,
                keep=lambda rows, pos, change=change: change if isinstance(change, bytes) else host.keep(rows, pos, **change),
            )
            got = await client.post("/generate", {"input_ids": IDS, **ASKED}, [("x-r3-transport", transport)])
            assert got.status == 502, (what, transport, got.body[:300])
            assert got.error()["code"] == "r3_mismatch", (what, got.body[:300])
            failed += 1
    engine.r3 = plugged(host)
    assert (await client.post("/generate", {"input_ids": IDS, **ASKED}, REF)).status == 200, "the router lives and serves"
    metrics = await router.metrics()
    assert metrics.sum("r3router_requests_total", outcome="r3_mismatch") == failed
    await fleet.quiet()


async def test_r3_4_an_engines_host_that_dies_while_rows_are_pulled_is_an_error_and_a_new_attempt(lab: Lab, host: Host) -> None:
    spare = await Host().start()
    fleet, router, client = await lab.serve(
        *SHAPE, prefill={"r3": MODEL}, decode={"r3": plugged(host), "tokens": 50}, decodes=2, prefills=1
    )
    second = fleet.decodes[1]
    second.r3 = plugged(spare)
    fleet.d.r3 = plugged(host)
    host.breaks_after = 3
    for _ in range(2):
        got = await client.generate(input_ids=IDS, **ASKED)
        assert got.status == 200, got.body[:300]
        assert got.json()["meta_info"]["routed_experts"] in [merged_text(p, d) for p, d in fleet.pairs()]
    assert host.fetched, "the first host was asked"
    metrics = await router.metrics()
    assert metrics.sum("r3router_retries_total") >= 1
    assert metrics.sum("r3router_r3_arena_bytes", what="used") == 0
    await spare.stop()
    got = await client.generate(input_ids=IDS, **ASKED)
    assert got.status in (500, 502, 503), got.body[:300]
    assert got.error()["message"]
    await fleet.quiet()


async def test_r3_4_bytes_that_are_not_those_of_the_descriptor_are_not_passed_on(lab: Lab, host: Host) -> None:
    _, _, client = await lab.serve(*SHAPE, "--disable-retries", decode={"r3": plugged(host), "tokens": 50}, prefill={"r3": MODEL})
    host.damage = True
    got = await client.generate(input_ids=IDS, **ASKED)
    assert (got.status, got.error()["code"]) == (502, "r3_mismatch")


async def test_r3_4_rows_that_nobody_fetches_are_gone_after_their_time(lab: Lab) -> None:
    _, router, client = await lab.serve(*SHAPE, "--r3-ref-expiry-secs", "1", prefill={"r3": MODEL}, decode={"r3": MODEL, "tokens": 50})
    for _ in range(20):
        envelope(await client.post("/generate", {"input_ids": IDS, **ASKED}, REF))
    metrics = await router.metrics()
    assert metrics.sum("r3router_r3_objects_total", event="made") == 20

    async def empty() -> bool:
        return (await router.metrics()).sum("r3router_r3_objects") == 0

    for _ in range(400):
        if await empty():
            break
        await asyncio.sleep(0.02)
    metrics = await router.metrics()
    assert metrics.sum("r3router_r3_objects_total", event="expired_unread") == 20
    assert metrics.sum("r3router_r3_arena_bytes", what="used") == 0
    assert not list(lab.store.glob("*/*.r3"))


async def test_r3_4_a_client_at_a_kilobyte_a_second_stops_nobody(lab: Lab) -> None:
    _, _, client = await lab.serve(*SHAPE, prefill={"r3": MODEL}, decode={"r3": MODEL, "tokens": 50})
    # Larger than all buffers between the two, so that the router has to wait for the client.
    ref = envelope(await client.post("/generate", {"input_ids": [7] * 1_500_000, **ASKED}, REF))
    segment = ref["handle"]["segments"][0]
    path = "/r3/" + segment["uri"].rsplit("/", 1)[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=2048)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    came = b""
    for _ in range(3):
        came += await reader.readexactly(1024)
        others = await asyncio.gather(*(client.post("/generate", {"input_ids": IDS, **ASKED}, REF) for _ in range(5)))
        assert all(other.status == 200 for other in others)
        assert len((await client.get(path + "?rows=0:10")).body) == 10 * LAYERS * TOP_K, "others fetch the same rows"
        await asyncio.sleep(1)
    assert (await client.delete(path)).status == 204
    came += await reader.read(-1)
    writer.close()
    assert len(came) == 1_500_002 * LAYERS * TOP_K, "what was begun is finished although the rows were let go"


async def test_r3_4_two_attempts_of_one_sample_have_rows_of_their_own(lab: Lab) -> None:
    fleet, router, client = await lab.serve(*SHAPE, prefill={"r3": MODEL}, decode={"r3": MODEL, "tokens": 50})
    first, second = [envelope(await client.post("/generate", {"input_ids": IDS, "rid": "s-1", **ASKED}, REF)) for _ in range(2)]
    uris = [{s["uri"] for s in ref["handle"]["segments"]} for ref in (first, second)]
    assert len(uris[0] | uris[1]) == 2, "a client that asks again gets its own rows"
    for uri in uris[0]:
        assert (await client.delete("/r3/" + uri.rsplit("/", 1)[1])).status == 204
    for uri in uris[1]:
        assert (await client.get("/r3/" + uri.rsplit("/", 1)[1])).status == 200, "letting one attempt go leaves the other"

    # An attempt of the router's own that fails after prefill's rows are here leaves none of them.
    made = (await router.metrics()).sum("r3router_r3_objects_total", event="made")
    broken = 0

    async def breaks(leg: Leg, exchange: Any) -> None:
        await leg.deliver()
        await until(lambda: all(p.ended for p in fleet.p.legs), "prefill has answered")
        await exchange.reply(500, b'{"error":{"message":"decode broke"}}')

    def script(leg: Leg) -> Act | None:
        nonlocal broken
        broken += 1
        return Act(breaks, joins=True) if broken == 1 else None

    fleet.d.script = script
    third = envelope(await client.post("/generate", {"input_ids": IDS, "rid": "s-1", **ASKED}, REF))
    assert broken == 2, "it took two attempts"
    assert len(third["handle"]["segments"]) == 1
    metrics = await router.metrics()
    objects = metrics.sum("r3router_r3_objects_total", event="made") - metrics.sum("r3router_r3_objects_total", event="unsent")
    assert objects - made == 1
    assert metrics.sum("r3router_r3_objects") == 2, "one of the second attempt, one of the third"


def ports(count: int) -> list[int]:
    import socket

    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    numbers = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return numbers


@contextmanager
def prepared_engines(folder: Path, *, prompt: int, output: int, row_ids: int) -> Iterator[list[str]]:
    """A fast prefill and a fast decode engine with prepared replies; the router's flags for them."""
    prefill, bootstrap, decode = ports(3)
    common = {"prompt_tokens": prompt, "output_tokens": output, "row_ids": row_ids, "honours_start_len": True}
    plans = [
        {**common, "role": "prefill", "port": prefill, "bootstrap_port": bootstrap},
        {**common, "role": "decode", "port": decode},
    ]
    code = "import sys, r3router._core as core; core.bench_backend(sys.argv[1])"
    log = folder / "engines.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-u", "-c", code, json.dumps(plans)], stdout=out, stderr=out)
    try:
        flags = ["--pd-disaggregation", "--prefill", f"http://127.0.0.1:{prefill}", str(bootstrap)]
        for _ in range(500):
            if b"ready" in log.read_bytes():
                break
            assert process.poll() is None, log.read_text()
            import time

            time.sleep(0.02)
        yield [*flags, "--decode", f"http://127.0.0.1:{decode}"]
    finally:
        process.kill()
        process.wait()


def resident_peak(pid: int) -> int:
    """Most bytes of memory that a process had."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def left_by(pid: int) -> list[str]:
    """Files of a router in shared memory."""
    return sorted(path.name for place in SHM.glob(f"r3router-store-{pid}-*") for path in place.iterdir())


async def test_r3_4_ten_thousand_samples_leave_nothing_behind(lab: Lab, tmp_path: Path) -> None:
    with prepared_engines(tmp_path, prompt=20, output=4, row_ids=8) as flags:
        router = await lab.router(None, *SHAPE, *flags, "--r3-store-dir", str(SHM), "--r3-ref-expiry-secs", "1", "--log-level", "warn")
        plan = {
            "address": f"127.0.0.1:{router.port}",
            "path": "/generate",
            "body": json.dumps({"input_ids": [1] * 20, "return_outputs_via_store": True, **ASKED}),
            "connections": 16,
            "requests": 10_000,
            "seconds": 60,
            "rate": 0.0,
        }
        code = "import sys, r3router._core as core; print(core.bench_load(sys.stdin.read()))"
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await load.communicate(json.dumps(plan).encode())
        assert load.returncode == 0, err
        report = json.loads(out)
        assert (report["ok"], report["broken"], report["statuses"]) == (10_000, 0, {})
        metrics = await router.metrics()
        assert metrics.sum("r3router_r3_objects_total", event="made") == 10_000
        for _ in range(1000):
            metrics = await router.metrics()
            if metrics.sum("r3router_r3_objects") == 0 == metrics.sum("r3router_r3_arena_bytes", what="used"):
                break
            await asyncio.sleep(0.02)
        assert metrics.sum("r3router_r3_objects") == 0
        assert metrics.sum("r3router_r3_arena_bytes", what="used") == 0
        assert left_by(router.pid) == ["heirs", "owner"]
        assert await router.stop() == 0
        assert left_by(router.pid) == [], "shared memory is not as it was"


async def test_mem_1_payloads_stay_under_the_arenas_cap_whatever_is_asked_at_once(lab: Lab, tmp_path: Path) -> None:
    layers, top_k, prompt, output = 48, 8, 8_000, 193
    arena = 48 << 20
    ids = layers * top_k
    flags = ["--r3-layers", str(layers), "--r3-top-k", str(top_k), "--r3-experts", "256", "--r3-arena-bytes", str(arena)]
    with prepared_engines(tmp_path, prompt=prompt, output=output, row_ids=ids) as engines:
        router = await lab.router(None, *flags, *engines, "--window", "unbounded", "--log-level", "warn")
        idle = resident_peak(router.pid)
        tokens = np.arange(prompt + output - 1)[:, None] * 31 + np.arange(ids)[None, :] * 7
        expected = (tokens % 251).astype(np.uint8).reshape(-1, layers, top_k)
        body = {"input_ids": [1] * prompt, "return_routed_experts": True, "sampling_params": {"max_new_tokens": output}}
        async with OurClient(f"http://127.0.0.1:{router.port}", map_files=False) as client:
            # 16 MB of text each; the arena holds fifteen samples.
            async def one() -> int:
                reply = await client.generate(body)
                assert reply.reference is not None
                assert np.array_equal(reply.routed_experts, expected)
                return len(json.dumps(reply.raw))

            sizes = await asyncio.gather(*(one() for _ in range(64)))
            assert max(sizes) < 4096
            assert client.held == 0
        for _ in range(500):
            metrics = await router.metrics()
            if metrics.sum("r3router_r3_arena_bytes", what="used") == 0:
                break
            await asyncio.sleep(0.02)
        assert metrics.sum("r3router_r3_arena_bytes", what="used") == 0
        assert metrics.sum("r3router_r3_arena_bytes", what="peak") <= arena
        assert resident_peak(router.pid) - idle <= arena + (64 << 20)
        plain = Client(router.port)
        inline = await plain.post("/generate", body)
        text = inline.json()["meta_info"]["routed_experts"]
        import base64

        assert np.array_equal(np.frombuffer(base64.b64decode(text), np.int32).reshape(expected.shape), expected), "in-line as ever"
        plain.close()
