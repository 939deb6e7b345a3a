"""The agent's HTTP server: `GET`, `HEAD` and `DELETE` of `/r3/{id}` (or `/{id}`), `/health`, `/metrics`.

Rows go from the file to the socket (sendfile); a slow reader costs a socket and no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from r3router.r3 import host
from r3router.r3.errors import FormatError
from r3router.r3.store import ROUTER, SHM, add_owner, owned, reclaim

from .counts import plugin_lines
from .parts import BadRange, Part
from .shelf import Entry, Shelf

logger = logging.getLogger("r3router.agent")
SWEEP_SECONDS: Final = 1.0
WRITE_SECONDS: Final = 30.0
"""How long a fetch waits for rows that the engine still writes."""
SLOWEST_BYTES_PER_SECOND: Final = 16 << 10
GRACE_SECONDS: Final = 60.0
"""A fetch that is slower than `SLOWEST_BYTES_PER_SECOND` after this time is cut off: its socket is wanted by others."""


@dataclass
class Options:
    """How an agent runs."""

    host: str = "0.0.0.0"  # noqa: S104 - clients on other hosts fetch from it
    port: int = 9400
    directory: Path | None = None
    """One directory; without it, every one in `parent`."""
    parent: Path = SHM
    api_key: str | None = None
    engine_pid: int | None = None
    """Ends when this process is dead and nothing is left to serve."""
    engine_start: int = 0
    connections: int = 1024
    nixl: bool = False


@dataclass
class Agent:
    """One agent and its counters."""

    options: Options
    shelf: Shelf
    counts: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    busy: int = 0
    reclaimed: int = 0
    cut: int = 0
    quiet: bool = False
    nixl: Any = None

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=1 << 20)
        for path in ("/r3/{id}", "/{id:[0-9a-f]{16,64}}"):
            app.router.add_get(path, self.get)
            app.router.add_delete(path, self.delete)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        if self.nixl is not None:
            app.router.add_post("/nixl/{id}", self.offer)
        app.cleanup_ctx.append(self._sweeping)
        return app

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Rows, or a part of them."""
        self._allow(request)
        name = request.match_info["id"]
        entry = await self._find(name)
        try:
            part = Part.parse(entry.header, _query(request), request.headers.get("range"))
        except BadRange as error:
            raise self._error(416, str(error)) from error
        if self.busy >= self.options.connections:
            raise self._error(503, f"{self.busy} fetches are running, the most that are allowed", {"retry-after": "1"})
        self.busy += 1
        try:
            return await self._send(request, entry, part)
        finally:
            self.busy -= 1

    async def delete(self, request: web.Request) -> web.Response:
        """Releases an object."""
        self._allow(request)
        name = request.match_info["id"]
        if not self.shelf.delete(name):
            # Rows that are still written are released as soon as they are there.
            with contextlib.suppress(web.HTTPException):
                await self._find(name)
            if not self.shelf.delete(name):
                raise self._error(410 if name in self.shelf.expired else 404, "no such rows: released, expired, or never there")
        self.counts["delete 204"] += 1
        return web.Response(status=204)

    async def health(self, request: web.Request) -> web.Response:
        """That it runs, and for whom."""
        return web.json_response({"agent": "r3router", "pid": os.getpid(), "boot_id": host.boot_id()})

    async def offer(self, request: web.Request) -> web.Response:
        """The memory of an object, for a reader with a NIXL agent."""
        self._allow(request)
        entry = await self._find(request.match_info["id"])
        try:
            part = Part.parse(entry.header, _query(request), None)
        except BadRange as error:
            raise self._error(416, str(error)) from error
        if part.span is None:
            raise self._error(416, "rows are read by NIXL as they lie, without layers and dtype")
        return web.json_response(self.nixl.offer(entry, part))

    async def metrics(self, request: web.Request) -> web.Response:
        """Counters as Prometheus reads them."""
        lines = [
            "# HELP r3router_agent_requests_total Requests by method and status.",
            "# TYPE r3router_agent_requests_total counter",
            *(
                'r3router_agent_requests_total{{method="{}",status="{}"}} {}'.format(*key.split(), count)
                for key, count in sorted(self.counts.items())
            ),
        ]
        for name, kind, help_, value in (
            ("objects", "gauge", "Payloads that are held.", self.shelf.objects),
            ("bytes", "gauge", "Bytes of payloads that are held.", self.shelf.nbytes),
            ("fetches", "gauge", "Fetches that are running.", self.busy),
            ("sent_bytes_total", "counter", "Row bytes sent.", self.sent),
            ("expired_total", "counter", "Payloads that nobody released in time.", self.shelf.expired_count),
            ("cut_total", "counter", "Fetches that were too slow.", self.cut),
            ("reclaimed_total", "counter", "Directories of dead owners that were removed.", self.reclaimed),
        ):
            lines += [
                f"# HELP r3router_agent_{name} {help_}",
                f"# TYPE r3router_agent_{name} {kind}",
                f"r3router_agent_{name} {value}",
            ]
        lines += plugin_lines(self.shelf.places())
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _allow(self, request: web.Request) -> None:
        key = self.options.api_key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise self._error(403, "the key is missing or another than this agent's")

    def _error(self, status: int, text: str, headers: dict[str, str] | None = None) -> web.HTTPException:
        self.counts[f"get {status}"] += 1
        kinds: dict[int, type[web.HTTPException]] = {
            403: web.HTTPForbidden,
            404: web.HTTPNotFound,
            410: web.HTTPGone,
            416: web.HTTPRequestRangeNotSatisfiable,
            503: web.HTTPServiceUnavailable,
        }
        body = web.json_response({"error": {"message": text, "type": "r3router_agent"}}).text
        return kinds.get(status, web.HTTPInternalServerError)(text=body, content_type="application/json", headers=headers)

    async def _find(self, name: str) -> Entry:
        deadline = time.monotonic() + WRITE_SECONDS
        pause = 0.001
        while True:
            try:
                found = self.shelf.state(name)
            except FormatError as error:
                raise self._error(500, str(error)) from error
            if isinstance(found, Entry):
                return found
            if found is None:
                raise self._error(404, "no such rows: released, or never there")
            if found == "expired":
                raise self._error(410, "nobody fetched these rows in time")
            if found != "writing":
                raise self._error(500, f"the engine could not write these rows: {found}")
            if time.monotonic() > deadline:
                raise self._error(503, "the engine still writes these rows", {"retry-after": "1"})
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)

    async def _send(self, request: web.Request, entry: Entry, part: Part) -> web.StreamResponse:
        header = entry.header
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(part.nbytes),
            "accept-ranges": "bytes",
            "x-r3-dtype": part.dtype,
            "x-r3-shape": ",".join(str(n) for n in part.shape),
            "x-r3-pos": str(header.start + part.rows[0]),
        }
        if not part.partial and part.dtype == header.dtype and part.shape == (header.rows, header.layers, header.top_k):
            headers["x-r3-crc32"] = str(header.crc32)
        status = 206 if part.partial else 200
        if part.partial:
            headers["content-range"] = f"bytes {part.cut[0]}-{part.cut[1] - 1}/{part.selected}"
        response = web.StreamResponse(status=status, headers=headers)
        try:
            file = entry.path.open("rb")
        except FileNotFoundError as error:
            raise self._error(404, "no such rows: released a moment ago") from error
        with file:
            await response.prepare(request)
            self.counts[f"get {status}"] += 1
            if request.method == "HEAD" or part.nbytes == 0:
                return response
            try:
                limit = GRACE_SECONDS + part.nbytes / SLOWEST_BYTES_PER_SECOND
                await asyncio.wait_for(self._rows(request, response, entry, part, file), limit)
            except asyncio.TimeoutError:
                self.cut += 1
                if request.transport is not None:
                    request.transport.abort()
                return response
            self.sent += part.nbytes
        await response.write_eof()
        return response

    async def _rows(self, request: web.Request, response: web.StreamResponse, entry: Entry, part: Part, file: Any) -> None:
        if part.span is not None and request.transport is not None:
            await asyncio.get_running_loop().sendfile(request.transport, file, part.offset(), part.nbytes)
            return
        for tile in part.tiles(entry.path):
            await response.write(tile)

    async def _sweeping(self, app: web.Application) -> Any:
        task = asyncio.create_task(self._sweep())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _sweep(self) -> None:
        while True:
            try:
                self.shelf.sweep()
                if self.nixl is not None:
                    self.nixl.sweep()
            except Exception:
                logger.exception("the sweep failed; it is tried again")
            pid = self.options.engine_pid
            if pid is not None and host.start_time(pid) != self.options.engine_start:
                if self.shelf.abandoned():
                    logger.info("the engine %d is gone and all its rows were fetched or have expired: ending", pid)
                    self.shelf.remove()
                    signal.raise_signal(signal.SIGTERM)
                    return
                self._let_go()
            await asyncio.sleep(SWEEP_SECONDS)

    def _let_go(self) -> None:
        """Closes the output that came from the engine: who started the engine may wait for its end."""
        if not self.quiet:
            self.quiet = True
            logger.info("the engine is gone; its rows are served until they are fetched or expire")
            null = os.open(os.devnull, os.O_WRONLY)
            for fd in (1, 2):
                os.dup2(null, fd)
            os.close(null)


def _query(request: web.Request) -> dict[str, str]:
    """The parameters of a request.

    Raises:
        BadRange: one is said twice; neither is to be preferred in silence.
    """
    twice = [name for name in request.query if len(request.query.getall(name)) > 1]
    if twice:
        raise BadRange(f"{twice[0]} is said twice")
    return dict(request.query)


def build(options: Options) -> Agent:
    """An agent for its directories; stale ones of dead owners are removed first.

    Raises:
        RuntimeError: NIXL was asked for and cannot be had.
    """
    stale = reclaim(options.parent)
    for path in stale:
        logger.warning("removed %s, whose owners are dead", path)
    directories = [] if options.directory is None else [options.directory]
    for path in directories:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.name.startswith(ROUTER):
            add_owner(path)
    shelf = Shelf(directories, None if directories else options.parent)
    agent = Agent(options, shelf, reclaimed=len(stale))
    if options.nixl:
        from .nixl import Exporter

        agent.nixl = Exporter()
    return agent


def run(options: Options) -> None:
    """Serves until SIGTERM or SIGINT. The directory of an agent that alone owns it is removed.

    Raises:
        OSError: the port is taken.
    """
    if options.engine_pid is not None and not options.engine_start:
        options.engine_start = host.start_time(options.engine_pid)
    agent = build(options)
    where = options.directory or options.parent
    logger.info("serving %s on %s:%d (boot %s)", where, options.host, options.port, host.boot_id())
    web.run_app(
        agent.app(),
        host=options.host,
        port=options.port,
        print=None,
        access_log=None,
        handle_signals=True,
        reuse_address=True,
        shutdown_timeout=2.0,
    )


__all__ = ["Agent", "Options", "build", "owned", "run"]
