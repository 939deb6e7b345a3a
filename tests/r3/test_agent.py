"""The agent: parts, errors, expiry, reclaim and metrics; and what a client sees when it is killed, slow or refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from r3router.agent.server import Agent, Options, build
from r3router.client import Client
from r3router.r3 import AccessDenied, FetchFailed, Reference, RowsGone
from r3router.r3.host import owner_line
from r3router.r3.reader import Reader
from r3router.r3.store import StoreDir, new_header

from .router import ScriptedRouter, envelope, reply
from .rows import LAYERS, TOP_K, expert_rows, put

ROW = LAYERS * TOP_K
KEY = {"authorization": "Bearer secret"}
Served = tuple[Agent, TestServer]


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers=KEY) as session:
        yield session


async def test_rows_are_served_whole_and_in_every_part(agent: Served, store: StoreDir, http: aiohttp.ClientSession) -> None:
    rows = expert_rows(1, 100)
    name = put(store, rows, start=7).stem
    narrow = rows.astype(np.uint8)
    for prefix in ("/r3/", "/"):
        async with http.get(agent[1].make_url(prefix + name)) as got:
            assert got.status == 200 and await got.read() == narrow.tobytes()
            assert got.headers["content-type"] == "application/octet-stream"
            assert (got.headers["x-r3-dtype"], got.headers["x-r3-shape"], got.headers["x-r3-pos"]) == (
                "uint8",
                f"100,{LAYERS},{TOP_K}",
                "7",
            )
            assert int(got.headers["x-r3-crc32"]) == zlib.crc32(narrow.tobytes())
    url = agent[1].make_url(f"/r3/{name}")
    for query, expected in (
        ("rows=10:30", narrow[10:30]),
        ("rows=:30", narrow[:30]),
        ("rows=90:", narrow[90:]),
        ("rows=50:50", narrow[50:50]),
        ("layers=1:2", narrow[:, 1:2]),
        ("rows=5:95&layers=1:3&dtype=int32", rows[5:95, 1:3]),
        ("dtype=uint16", rows.astype(np.uint16)),
        ("dtype=int32", rows),
    ):
        async with http.get(f"{url}?{query}") as got:
            assert got.status == 200 and await got.read() == expected.tobytes(), query
            assert got.headers["x-r3-shape"] == ",".join(map(str, expected.shape))
            assert "x-r3-crc32" not in got.headers
    raw = narrow.tobytes()
    for text, (a, b) in (
        ("bytes=0-0", (0, 1)),
        ("bytes=5-10", (5, 11)),
        ("bytes=1190-", (1190, 1200)),
        ("bytes=-3", (1197, 1200)),
        ("bytes=0-9999", (0, 1200)),
    ):
        async with http.get(url, headers={"range": text}) as got:
            assert got.status == 206 and await got.read() == raw[a:b], text
            assert got.headers["content-range"] == f"bytes {a}-{b - 1}/1200"
    # Of what the query selects, as the router counts it: the address in a reference may name rows, and a download of them may be resumed.
    wide = rows[5:95, 1:3].tobytes()
    for query, whole, text, (a, b) in (
        ("rows=10:30", narrow[10:30].tobytes(), "bytes=7-20", (7, 21)),
        ("rows=10:30", narrow[10:30].tobytes(), "bytes=-1", (239, 240)),
        ("rows=5:95&layers=1:3&dtype=int32", wide, "bytes=17-1000", (17, 1001)),
        ("rows=5:95&layers=1:3&dtype=int32", wide, "bytes=-5", (len(wide) - 5, len(wide))),
    ):
        async with http.get(f"{url}?{query}", headers={"range": text}) as got:
            assert got.status == 206 and await got.read() == whole[a:b], (query, text)
            assert got.headers["content-range"] == f"bytes {a}-{b - 1}/{len(whole)}"
            assert "x-r3-crc32" not in got.headers
    async with http.head(url) as got:
        assert got.status == 200 and got.headers["content-length"] == "1200" and await got.read() == b""


@pytest.mark.parametrize(
    ("query", "range_header"),
    [
        ("rows=10:101", None),
        ("rows=30:10", None),
        ("rows=a:b", None),
        ("rows=5", None),
        ("rows=-1:5", None),
        ("layers=0:4", None),
        ("dtype=float16", None),
        ("dtype=bool", None),
        ("cols=1:2", None),
        ("", "bytes=1200-"),
        ("", "bytes=9-3"),
        ("", "bytes=-"),
        ("", "rows=1-2"),
        ("", "bytes=0-1,5-6"),
        ("rows=1:2", "bytes=12-13"),
        ("rows=1:2&rows=1:2", None),
    ],
)
async def test_bad_ranges_are_416(
    agent: Served, store: StoreDir, http: aiohttp.ClientSession, query: str, range_header: str | None
) -> None:
    url = agent[1].make_url(f"/r3/{put(store, expert_rows(1, 100)).stem}")
    async with http.get(f"{url}?{query}", headers={"range": range_header} if range_header else {}) as got:
        assert got.status == 416, await got.text()
        assert (await got.json())["error"]["message"]


async def test_wider_rows_cannot_be_had_narrower(agent: Served, store: StoreDir, http: aiohttp.ClientSession) -> None:
    name = put(store, expert_rows(1, 10, 512), dtype="uint16").stem
    async with http.get(agent[1].make_url(f"/r3/{name}?dtype=uint8")) as got:
        assert got.status == 416


async def test_unknown_deleted_expired_and_denied_are_told_apart(agent: Served, store: StoreDir, http: aiohttp.ClientSession) -> None:
    made, server = agent
    for name in ("0" * 32, "..%2Fowner", "owner", "x" * 32, "0" * 15):
        async with http.get(server.make_url(f"/r3/{name}")) as got:
            assert got.status == 404, name
    name = put(store, expert_rows(1, 10)).stem
    for method in ("GET", "DELETE"):
        for key in ("Bearer other", "secret2", ""):
            async with aiohttp.request(method, server.make_url(f"/r3/{name}"), headers={"authorization": key}) as got:
                assert got.status == 403
    async with http.delete(server.make_url(f"/r3/{name}")) as got:
        assert got.status == 204
    async with http.delete(server.make_url(f"/r3/{name}")) as got:
        assert got.status == 404
    name = put(store, expert_rows(1, 10), expires_s=0.001).stem
    await asyncio.sleep(0.01)
    for method in ("get", "delete"):
        async with getattr(http, method)(server.make_url(f"/r3/{name}")) as got:
            assert got.status == 410
    assert not list(store.path.glob("*.r3"))
    async with http.get(server.make_url("/metrics")) as got:
        lines = (await got.text()).splitlines()
    assert "r3router_agent_expired_total 1" in lines and 'r3router_agent_requests_total{method="delete",status="204"} 1' in lines
    assert made.shelf.expired_count == 1


async def test_the_sweep_drops_what_nobody_fetched(agent: Served, store: StoreDir) -> None:
    shelf = agent[0].shelf
    kept, gone = put(store, expert_rows(1, 10)), put(store, expert_rows(2, 10), expires_s=0.001)
    stuck = store.reserve(new_header(5, 1, 1, "uint8", start=0, expires_s=60, rid="", weight_version=""))
    os.utime(stuck.tmp, (1, 1))
    await asyncio.sleep(0.01)
    shelf.sweep()
    assert kept.exists() and not gone.exists() and not stuck.tmp.exists()
    assert (shelf.objects, shelf.nbytes) == (1, kept.stat().st_size)
    store.rescan()
    assert store.used == 4096


async def test_rows_that_are_still_written_are_waited_for_and_failures_are_told(
    agent: Served, store: StoreDir, http: aiohttp.ClientSession
) -> None:
    rows = expert_rows(3, 20)
    header = new_header(20, LAYERS, TOP_K, "uint8", start=0, expires_s=60, rid="", weight_version="")
    writing = store.reserve(header)

    async def fetch(name: str) -> tuple[int, bytes]:
        async with http.get(agent[1].make_url(f"/r3/{name}")) as got:
            return got.status, await got.read()

    task = asyncio.create_task(fetch(writing.id))
    await asyncio.sleep(0.05)
    assert not task.done()
    writing.write([rows])
    assert await task == (200, rows.astype(np.uint8).tobytes())
    failed = store.reserve(header)
    task = asyncio.create_task(fetch(failed.id))
    await asyncio.sleep(0.02)
    failed.fail("id 300 does not fit")
    status, text = await task
    assert status == 500 and b"id 300 does not fit" in text
    spoiled = put(store, rows)
    spoiled.write_bytes(b"garbage" * 100)
    status, text = await fetch(spoiled.stem)
    assert status == 500 and b"begins with" in text


async def test_a_delete_that_comes_before_the_rows_waits_for_them(agent: Served, store: StoreDir, http: aiohttp.ClientSession) -> None:
    writing = store.reserve(new_header(20, LAYERS, TOP_K, "uint8", start=0, expires_s=60, rid="", weight_version=""))

    async def delete() -> int:
        async with http.delete(agent[1].make_url(f"/r3/{writing.id}")) as got:
            return got.status

    task = asyncio.create_task(delete())
    await asyncio.sleep(0.02)
    writing.write([expert_rows(1, 20)])
    assert await task == 204 and not writing.path.exists()


async def test_a_client_reads_from_agents_with_their_key(agent: Served, store: StoreDir, router: ScriptedRouter) -> None:
    rows = expert_rows(4, 60)
    address = f"{agent[1].host}:{agent[1].port}"
    segments = [
        {
            "uri": f"r3://{address}/{put(store, rows[:40]).stem}",
            "offset": 256,
            "pos": 0,
            "rows": 40,
            "dtype": "uint8",
            "path": "/no/such",
            "host": "other",
        },
        # Decode's object begins in the prompt: five rows of it are not taken.
        {
            "uri": f"r3://{address}/{put(store, rows[35:], start=35).stem}",
            "offset": 256 + 5 * ROW,
            "pos": 40,
            "rows": 20,
            "dtype": "uint8",
            "path": "/no/such",
            "host": "other",
        },
    ]
    router.script = [reply(50, 11, output_store_ref=envelope(segments, rows.shape))]
    async with Client(router.url, agent_key="wrong", retries=0) as client:
        with pytest.raises(AccessDenied):
            await client.generate()
    assert len(list(store.path.glob("*.r3"))) == 2
    async with Client(router.url, api_key="routers", agent_key="secret") as client:
        got = await client.generate()
    assert np.array_equal(got.routed_experts, rows)
    assert not list(store.path.glob("*.r3"))


@pytest.fixture
def process(store: StoreDir, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent of its own process, on `process.port`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "r3router", "agent", "--host", "127.0.0.1", "--port", str(port)]
    popen = subprocess.Popen([*command, "--directory", str(store.path), "--parent", str(tmp_path)])
    popen.port = port  # type: ignore[attr-defined]
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.05)
    yield popen
    popen.kill()
    popen.wait()


def big(store: StoreDir, port: int, count: int = 250_000) -> tuple[np.ndarray, Reference]:
    rows = expert_rows(5, count)
    segment = {"uri": f"r3://127.0.0.1:{port}/{put(store, rows).stem}", "offset": 256, "pos": 0, "rows": len(rows), "dtype": "uint8"}
    return rows, Reference.parse(envelope([segment | {"path": "/no/such"}], rows.shape))


async def test_an_agent_that_is_killed_in_the_middle_of_a_fetch_gives_no_rows(process: subprocess.Popen[bytes], store: StoreDir) -> None:
    # More than the sockets' buffers hold.
    store.cap = 64 << 20
    rows, reference = big(store, process.port, 4_000_000)  # type: ignore[attr-defined]
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{process.port}/{reference.segments[0].uri.rpartition('/')[2]}"  # type: ignore[attr-defined]
        async with http.get(url) as got:
            assert got.status == 200
            first = await got.content.readexactly(1000)
            process.send_signal(signal.SIGKILL)
            process.wait()
            with pytest.raises(aiohttp.ClientPayloadError):
                await got.content.readexactly(len(rows) * ROW)
        assert first == rows.astype(np.uint8).tobytes()[:1000]
        with pytest.raises(FetchFailed):
            await Reader(http).read(reference)
        assert await Reader(http).release(reference) is False


async def test_a_slow_reader_holds_up_nobody_and_reads_on_after_the_release(process: subprocess.Popen[bytes], store: StoreDir) -> None:
    rows, reference = big(store, process.port)  # type: ignore[attr-defined]
    name = reference.segments[0].uri.rpartition("/")[2]
    reader, writer = await asyncio.open_connection("127.0.0.1", process.port, limit=1024)  # type: ignore[attr-defined]
    writer.write(f"GET /r3/{name} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"content-length: 3000000" in head.lower()
    async with aiohttp.ClientSession() as http:
        for _ in range(3):
            assert np.array_equal(await Reader(http).read(reference), rows)
        assert await Reader(http).release(reference) is True
        with pytest.raises(RowsGone):
            await Reader(http).read(reference)
    assert await reader.readexactly(rows.size) == rows.astype(np.uint8).tobytes()
    writer.close()


async def test_an_agent_outlives_its_engine_until_the_rows_are_fetched(tmp_path: Path) -> None:
    engine = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    store = StoreDir(tmp_path / "r3router-engine", 8 << 20)
    (store.path / "owner").write_text(owner_line(engine.pid) + "\n")
    rows = expert_rows(6, 50)
    path = put(store, rows)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "r3router", "agent", "--host", "127.0.0.1", "--port", str(port), "--directory", str(store.path)]
    agent = subprocess.Popen([*command, "--parent", str(tmp_path), "--engine-pid", str(engine.pid)], stderr=subprocess.PIPE)
    try:
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}/r3/{path.stem}"
            for _ in range(600):
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with http.head(url) as got:
                        assert got.status == 200
                        break
                await asyncio.sleep(0.05)
            engine.kill()
            engine.wait()
            assert agent.stderr is not None
            # Who waits for the engine's output is not kept waiting by the agent.
            assert b"the engine is gone" in await asyncio.to_thread(agent.stderr.read)
            assert agent.poll() is None
            async with http.get(url) as got:
                assert await got.read() == rows.astype(np.uint8).tobytes()
            async with http.delete(url) as got:
                assert got.status == 204
        for _ in range(200):
            if agent.poll() is not None:
                break
            await asyncio.sleep(0.05)
        assert agent.poll() is not None and not store.path.exists()
    finally:
        engine.kill()
        agent.kill()
        agent.wait()


async def test_fetches_over_the_limit_are_refused_and_may_come_again(agent: Served, store: StoreDir, http: aiohttp.ClientSession) -> None:
    agent[0].options.connections = 0
    async with http.get(agent[1].make_url(f"/r3/{put(store, expert_rows(1, 10)).stem}")) as got:
        assert got.status == 503 and got.headers["retry-after"] == "1"


async def test_a_reader_that_takes_nothing_is_cut_off(
    agent: Served, store: StoreDir, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r3router.agent.server.GRACE_SECONDS", 0.2)
    monkeypatch.setattr("r3router.agent.server.SLOWEST_BYTES_PER_SECOND", 1 << 40)
    store.cap = 64 << 20
    path = put(store, expert_rows(1, 4_000_000))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (agent[1].host, agent[1].port))
        await loop.sock_sendall(sock, f"GET /{path.stem} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n\r\n".encode())
        while not agent[0].cut:  # noqa: ASYNC110 - nothing tells that it has come
            await asyncio.sleep(0.01)
    async with http.get(agent[1].make_url("/metrics")) as got:
        assert "r3router_agent_cut_total 1" in await got.text()
    async with http.get(agent[1].make_url(f"/{path.stem}?rows=0:5")) as got:
        assert got.status == 200 and len(await got.read()) == 5 * ROW


async def test_a_routers_files_beside_are_served_and_left_alone(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    # A router locks its owner file, which holds its pid and nothing more; to an engine's eyes that is nobody alive.
    store = StoreDir(tmp_path / "r3router-store-1-ab", 1 << 20)
    (store.path / "owner").write_text("1\n")
    rows = expert_rows(1, 10)
    kept, late = put(store, rows), put(store, rows, expires_s=0.05)
    made = build(Options(parent=tmp_path))
    assert kept.exists(), "it was taken for a dead engine's directory"
    server = TestServer(made.app())
    await server.start_server()
    async with http.get(server.make_url(f"/r3/{kept.stem}")) as got:
        assert got.status == 200 and await got.read() == rows.astype(np.uint8).tobytes()
    await asyncio.sleep(0.1)
    made.shelf.sweep()
    for path, status in ((kept, 404), (late, 404)):
        async with http.delete(server.make_url(f"/r3/{path.stem}")) as got:
            assert got.status == status
    async with http.get(server.make_url(f"/r3/{late.stem}")) as got:
        assert got.status == 410
    assert kept.exists() and late.exists(), "only the router knows what it has counted"
    await server.close()
    assert kept.exists()
