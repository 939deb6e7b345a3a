"""The sink's HTTP server, a process of its own beside a router: `POST /put`, `/health`, `/metrics`.

`POST /put` takes an `output_store_ref` of r3router's and answers 200 with the other store's. The rows are read where they are (mapped
when they are on this host), widened to int32, put, and let go. What no reader has removed after its time is removed here: objects are
pinned, and would stay for as long as the store lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import aiohttp
import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from r3router.r3.errors import AccessDenied, FetchFailed, FormatError, R3Error, RowsGone
from r3router.r3.reader import Reader
from r3router.r3.reference import FIELDS, Reference

logger = logging.getLogger("r3router.sink")
SWEEP_SECONDS: Final = 1.0
_STATUSES: Final[dict[type[R3Error], int]] = {RowsGone: 410, AccessDenied: 403, FormatError: 422, FetchFailed: 502}


class Target(Protocol):
    """The store that rows are put into."""

    def put(self, field: str, rows: NDArray[np.int32]) -> dict[str, Any]:
        """Puts int32 rows `[rows, layers, top_k]`; a handle that JSON can carry."""

    def remove(self, handle: dict[str, Any]) -> None:
        """Removes what `put` made."""


@dataclass
class Options:
    """How a sink runs."""

    host: str = "127.0.0.1"
    port: int = 9500
    router: str = "http://127.0.0.1:30000"
    """Where this process reaches the router, whatever address the router gives its clients."""
    key: str | None = None
    """The router's key."""
    agent_key: str | None = None
    workers: int = 4
    """Puts at once; each holds one sample's rows as int32."""
    expires_s: float = 600.0
    """Objects that nobody removed go after so long; 0: never."""


@dataclass
class Sink:
    """One sink and its counters."""

    options: Options
    target: Target
    made: int = 0
    failed: int = 0
    expired: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    busy: int = 0
    kept: deque[tuple[float, dict[str, Any]]] = field(default_factory=deque)
    """What was put and when its time is over, oldest first."""
    _works: set[asyncio.Task[web.Response]] = field(default_factory=set)

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=1 << 20)
        app.router.add_post("/put", self.put)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        self._pool = ThreadPoolExecutor(self.options.workers, "sink")
        self._gate = asyncio.Semaphore(self.options.workers)
        async with aiohttp.ClientSession(trust_env=False, read_bufsize=1 << 20) as http:
            self._reader = Reader(http, self.options.router, key=self.options.key, agent_key=self.options.agent_key)
            task = asyncio.create_task(self._sweep())
            yield
            await asyncio.gather(*self._works, return_exceptions=True)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._pool.shutdown()

    async def put(self, request: web.Request) -> web.Response:
        """Rows of a reference into the store; the store's own `output_store_ref`."""
        try:
            envelope = orjson.loads(await request.read())
            fields = [name for name in FIELDS if name in envelope["fields"]]
            if len(fields) != 1:
                raise FormatError(f"a reference has one field of {', '.join(FIELDS)}")
            reference = self._local(Reference.parse(envelope, fields[0]))
        except (R3Error, ValueError, KeyError, TypeError) as error:
            return self._error(400, f"it is no reference: {error!r}")
        # Carried through whatever becomes of the client: what a thread has begun to put would be nobody's.
        work = asyncio.create_task(self._put(request, fields[0], reference))
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        return await asyncio.shield(work)

    async def _put(self, request: web.Request, name: str, reference: Reference) -> web.Response:
        async with self._gate:
            self.busy += 1
            began = time.monotonic()
            try:
                handle = await self._move(name, reference)
            except R3Error as error:
                return self._error(_STATUSES.get(type(error), 502), str(error))
            except Exception as error:
                logger.exception("a put failed")
                return self._error(502, f"the store did not take the rows: {error!r}")
            finally:
                self.busy -= 1
                self.seconds += time.monotonic() - began
        if not _gone(request):
            await self._reader.release(reference)
        if _gone(request):
            # Nobody will hear of the handle.
            await self._remove(handle)
            return self._error(499, "whoever asked is gone")
        self.made += 1
        self.nbytes += 4 * int(np.prod(reference.shape))
        if self.options.expires_s > 0:
            self.kept.append((time.monotonic() + self.options.expires_s, handle))
        shape = {"dtype": "int32", "shape": list(reference.shape)}
        return web.Response(body=orjson.dumps({"handle": handle, "fields": {name: shape}}), content_type="application/json")

    async def _move(self, name: str, reference: Reference) -> dict[str, Any]:
        rows = await self._reader.read(reference)

        def put() -> dict[str, Any]:
            return self.target.put(name, np.ascontiguousarray(rows, dtype=np.int32))

        return await asyncio.get_running_loop().run_in_executor(self._pool, put)

    def _local(self, reference: Reference) -> Reference:
        """The reference with the router's objects under the address that this process knows."""
        segments = []
        for segment in reference.segments:
            if not segment.uri.startswith("r3://"):
                # `scheme://authority/path`: the path is the same whatever the router is called.
                path = segment.uri.partition("://")[2].partition("/")[2] if "://" in segment.uri else segment.uri.lstrip("/")
                segment = replace(segment, uri=f"{self.options.router.rstrip('/')}/{path}")
            segments.append(segment)
        return replace(reference, segments=tuple(segments))

    async def _remove(self, handle: dict[str, Any]) -> bool:
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self.target.remove, handle)
        except Exception as error:
            # Whoever read it has removed it.
            logger.debug("not removed: %r", error)
            return False
        return True

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            while self.kept and self.kept[0][0] <= time.monotonic():
                self.expired += await self._remove(self.kept.popleft()[1])

    async def health(self, request: web.Request) -> web.Response:
        """That it runs."""
        return web.json_response({"sink": "r3router", "store": type(self.target).__name__.lower()})

    async def metrics(self, request: web.Request) -> web.Response:
        """Counters as Prometheus reads them."""
        values: OrderedDict[str, tuple[str, str, float]] = OrderedDict(
            puts_total=("counter", "Samples that were put.", self.made),
            failed_total=("counter", "Puts that failed.", self.failed),
            expired_total=("counter", "Objects that nobody had removed in time.", self.expired),
            bytes_total=("counter", "Bytes of int32 that were put.", self.nbytes),
            seconds_total=("counter", "Seconds that puts took, reading included.", self.seconds),
            busy=("gauge", "Puts that run.", self.busy),
        )
        lines = []
        for name, (kind, help_, value) in values.items():
            lines += [f"# HELP r3router_sink_{name} {help_}", f"# TYPE r3router_sink_{name} {kind}", f"r3router_sink_{name} {value}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _error(self, status: int, text: str) -> web.Response:
        self.failed += 1
        return web.json_response({"error": {"message": text, "type": "r3router_sink"}}, status=status)


def run(options: Options, target: Target) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        OSError: the port is taken.
    """
    logger.info("putting rows for the router at %s, on %s:%d", options.router, options.host, options.port)
    web.run_app(Sink(options, target).app(), host=options.host, port=options.port, print=None, access_log=None, reuse_address=True)


def _gone(request: web.Request) -> bool:
    """Whether whoever asked has left."""
    return request.transport is None or request.transport.is_closing()
