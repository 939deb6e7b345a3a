"""The sink: rows of a reference as int32 into another store, the store's handle out; who is told what when it fails; what nobody read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from numpy.typing import NDArray

from r3router.r3.store import StoreDir
from r3router.sink.server import Options, Sink

from .router import ScriptedRouter, envelope
from .rows import LAYERS, TOP_K, expert_rows, put

ROW = (LAYERS, TOP_K)


class Store:
    """A store that keeps what it is given."""

    def __init__(self) -> None:
        self.objects: dict[int, tuple[str, NDArray[np.int32]]] = {}
        self.error: Exception | None = None
        self.gate: threading.Event | None = None
        self.at_once = self.most = 0

    def put(self, field: str, rows: NDArray[np.int32]) -> dict[str, Any]:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        if self.gate is not None:
            assert self.gate.wait(10)
        self.at_once -= 1
        if self.error is not None:
            raise self.error
        name = len(self.objects)
        self.objects[name] = (field, rows.copy())
        return {"type": "other", "id": name}

    def remove(self, handle: dict[str, Any]) -> None:
        del self.objects[handle["id"]]


class Served:
    """A sink that runs."""

    def __init__(self, sink: Sink, store: Store, server: TestServer, http: aiohttp.ClientSession) -> None:
        self.sink, self.store, self.server, self.http = sink, store, server, http

    async def put(self, reference: Any) -> tuple[int, Any]:
        """`POST /put`."""
        async with self.http.post(self.server.make_url("/put"), json=reference) as got:
            return got.status, await got.json()

    async def busy(self, count: int) -> None:
        """Waits until so many puts run."""
        for _ in range(1000):
            if await self.metric("busy") >= count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"there are never {count} puts at once")

    async def metric(self, name: str) -> float:
        """A counter."""
        async with self.http.get(self.server.make_url("/metrics")) as got:
            return next(float(line.split()[1]) for line in (await got.text()).splitlines() if line.startswith(f"r3router_sink_{name} "))


@pytest_asyncio.fixture
async def served(router: ScriptedRouter) -> AsyncIterator[Served]:
    store = Store()
    sink = Sink(Options(router=router.url, workers=2, expires_s=60), store)
    server = TestServer(sink.app())
    await server.start_server()
    async with aiohttp.ClientSession() as http:
        yield Served(sink, store, server, http)
    await server.close()


async def test_rows_are_put_as_int32_and_let_go(router: ScriptedRouter, served: Served, store: StoreDir) -> None:
    rows = expert_rows(1, 500)
    # Prefill's rows lie in a file here, decode's with the router, under a name that only clients know.
    first = router.put("aa" * 16, rows[:400], path=str(put(store, rows[:400])))
    second = router.put("bb" * 16, np.concatenate([rows[:7], rows[400:]]), pos=393) | {"offset": 256 + 7 * LAYERS * TOP_K, "rows": 100}
    second |= {"uri": f"http://router.example:30000/r3/{'bb' * 16}?rows=7:107", "pos": 400, "crc32": None}
    status, got = await served.put(envelope([first, second], rows.shape))
    assert status == 200, got
    # Exactly the members that newer miles takes, of the dtype that it takes.
    assert got == {"handle": {"type": "other", "id": 0}, "fields": {"routed_experts": {"dtype": "int32", "shape": list(rows.shape)}}}
    field, kept = served.store.objects[0]
    assert field == "routed_experts" and kept.dtype == np.int32 and np.array_equal(kept, rows)
    assert router.fetched == ["bb" * 16] and sorted(router.deleted) == ["aa" * 16, "bb" * 16]
    assert (await served.metric("puts_total"), await served.metric("bytes_total")) == (1, rows.size * 4)


async def test_what_cannot_be_put_is_told_and_leaves_the_rows_where_they_are(router: ScriptedRouter, served: Served) -> None:
    rows = expert_rows(2, 50)
    good = envelope([router.put("cc" * 16, rows)], rows.shape)
    for bad in ({}, [], {"handle": {"type": "mooncake_dataproto_ref"}, "fields": good["fields"]}, envelope([], (5, *ROW))):
        status, got = await served.put(bad)
        assert status == 400 and got["error"]["message"], bad
    for how, expected in (("gone", 410), ("expired", 410), ("denied", 403), ("500", 502), ("cut", 502), ("flip", 422)):
        router.break_fetch["cc" * 16] = how
        assert (await served.put(good))[0] == expected, how
    router.break_fetch.clear()
    served.store.error = RuntimeError("no room")
    status, got = await served.put(good)
    assert status == 502 and "no room" in got["error"]["message"]
    assert not router.deleted and not served.store.objects
    served.store.error = None
    assert (await served.put(good))[0] == 200 and router.deleted == ["cc" * 16]
    assert await served.metric("failed_total") == 11


async def test_no_more_puts_run_at_once_than_there_are_workers(router: ScriptedRouter, served: Served) -> None:
    rows = expert_rows(3, 20)
    served.store.gate = threading.Event()
    calls = [asyncio.create_task(served.put(envelope([router.put(f"{n:032x}", rows)], rows.shape))) for n in range(6)]
    await served.busy(2)
    served.store.gate.set()
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 6
    assert served.store.most == 2 and len(served.store.objects) == 6


async def test_objects_that_nobody_removes_go_after_their_time(
    router: ScriptedRouter, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r3router.sink.server.SWEEP_SECONDS", 0.01)
    rows = expert_rows(4, 20)
    served.sink.options.expires_s = 0.05
    for n in range(2):
        assert (await served.put(envelope([router.put(f"{n:032x}", rows)], rows.shape)))[0] == 200
    # The reader of one has removed it, as miles does; that is no error.
    del served.store.objects[0]
    for _ in range(300):
        if not served.store.objects and not served.sink.kept:
            break
        await asyncio.sleep(0.01)
    assert not served.store.objects and not served.sink.kept
    assert await served.metric("expired_total") == 1


async def test_a_handle_that_nobody_will_hear_of_is_removed(router: ScriptedRouter, served: Served) -> None:
    rows = expert_rows(5, 20)
    served.store.gate = threading.Event()
    call = asyncio.create_task(served.put(envelope([router.put("dd" * 16, rows)], rows.shape)))
    await served.busy(1)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    # The sink has to see the connection close first.
    await asyncio.sleep(0.5)
    served.store.gate.set()
    for _ in range(300):
        if await served.metric("busy") == 0 and not served.store.objects:
            break
        await asyncio.sleep(0.01)
    assert not served.store.objects and not served.sink.kept


async def test_a_client_that_leaves_while_the_routers_rows_are_let_go_leaves_no_handle(router: ScriptedRouter, served: Served) -> None:
    rows = expert_rows(5, 20)
    letting_go, go_on = asyncio.Event(), asyncio.Event()

    async def release(reference: Any) -> None:
        letting_go.set()
        await go_on.wait()

    served.sink._reader.release = release  # type: ignore[method-assign]
    call = asyncio.create_task(served.put(envelope([router.put("ee" * 16, rows)], rows.shape)))
    await asyncio.wait_for(letting_go.wait(), 10)
    assert len(served.store.objects) == 1
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.5)
    go_on.set()
    for _ in range(300):
        if not served.store.objects:
            break
        await asyncio.sleep(0.01)
    assert not served.store.objects and not served.sink.kept
