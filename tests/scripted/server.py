"""A raw HTTP/1.1 server: keeps the bytes of every request and writes exactly the bytes that a script says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .wire import LAST_CHUNK, Body, Head, ProtocolError, chunk, framing_of, parse_head

REASONS = {
    200: "OK",
    202: "Accepted",
    204: "No Content",
    206: "Partial Content",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    413: "Content Too Large",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass
class Request:
    """One request as it came over the wire."""

    method: str
    path: str
    query: str
    head: Head
    body: bytes
    framing: str
    connection: int
    nth: int
    """How many requests came before it on its connection."""
    at: float

    def header(self, name: str) -> str | None:
        """First value of a header, by lower-case name."""
        return self.head.get(name)


class Exchange:
    """The answer to one request. Every write goes out as it is; nothing is added that a script did not ask for."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.started = False
        self.finished = False
        self.chunked = False
        self.on_closed: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Whether the peer is gone."""
        return self._connection.lost

    async def write(self, data: bytes) -> None:
        """Writes raw bytes and waits while the peer does not read."""
        if self._connection.lost:
            raise ConnectionResetError("the peer is gone")
        self._connection.transport.write(data)
        await self._connection.drained()

    async def reply(
        self,
        status: int,
        body: bytes,
        headers: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
        *,
        pieces: int = 0,
    ) -> None:
        """A whole answer with Content-Length, in one write, or its body in pieces of so many bytes."""
        self.started = True
        head = _head(status, [("content-type", content_type), ("content-length", str(len(body))), *(headers or [])])
        if pieces:
            await self.write(head)
            for at in range(0, len(body), pieces):
                await self.write(body[at : at + pieces])
                # Without a turn of the loop the kernel would hand on several at once.
                await asyncio.sleep(0)
            return self.finish()
        await self.write(head + body if len(body) < 65536 else head)
        if len(body) >= 65536:
            await self.write(body)
        return self.finish()

    async def start(self, status: int, content_type: str, headers: list[tuple[str, str]] | None = None) -> None:
        """The head of a chunked answer."""
        self.started = self.chunked = True
        await self.write(_head(status, [("content-type", content_type), ("transfer-encoding", "chunked"), *(headers or [])]))

    async def chunk(self, data: bytes) -> None:
        """One chunk of exactly these bytes."""
        await self.write(chunk(data))

    async def end(self) -> None:
        """The end of a chunked answer."""
        await self.write(LAST_CHUNK)
        self.finish()

    def finish(self) -> None:
        """The answer is complete; the connection may be used again."""
        self.finished = True
        self._connection.answered()

    def rst(self) -> None:
        """Breaks the connection with a TCP reset."""
        self._connection.rst()

    def close(self) -> None:
        """Closes the connection with a FIN, whatever was sent."""
        self._connection.transport.close()


def _head(status: int, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", *(f"{k}: {v}" for k, v in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


Handler = Callable[[Request, Exchange], Awaitable[None]]


class _Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.id = 0
        self.requests = 0
        self.lost = False
        self.transport: asyncio.Transport
        self._buffer = bytearray()
        self._head: Head | None = None
        self._body: Body | None = None
        self._exchange: Exchange | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._can_write: asyncio.Event | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.accepted += 1
        self.id = self.server.accepted
        self.server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._idle.cancel()
            self._idle = None
        if self._exchange is None and self._head is None and self.requests and self.server.on_reuse:
            action = self.server.on_reuse()
            if action == "rst":
                return self.rst()
            if action == "close":
                return self.transport.close()
        try:
            self._feed(data)
        except (ProtocolError, ValueError) as error:
            self.server.problem(f"not HTTP/1.1 from the router: {error}")
            self.rst()
        return None

    def _feed(self, data: bytes) -> None:
        while True:
            if self._body is None:
                self._buffer += data
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                self._head = parse_head(bytes(self._buffer[: end + 4]))
                self._body = Body(*framing_of(self._head, response=False))
                data = bytes(self._buffer[end + 4 :])
                self._buffer.clear()
            if not self._body.done:
                data = self._body.feed(data)
            if not self._body.done:
                return
            self._begin()
            if not data:
                return

    def _begin(self) -> None:
        head, body = self._head, self._body
        assert head is not None and body is not None
        self._head = self._body = None
        if self._exchange is not None:
            self.server.problem("a request was pipelined behind an unanswered one")
        method, target, _version = head.start.split(" ")
        path, _, query = target.partition("?")
        loop = asyncio.get_running_loop()
        request = Request(method, path, query, head, bytes(body.data), body.framing, self.id, self.requests, loop.time())
        self.requests += 1
        self._exchange = exchange = Exchange(self)
        task = loop.create_task(self._run(request, exchange))
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    async def _run(self, request: Request, exchange: Exchange) -> None:
        try:
            await self.server.handler(request, exchange)
        except (ConnectionError, asyncio.CancelledError):
            self.transport.abort()
        except Exception:
            self.server.problem(f"the fake itself failed on {request.path}:\n{traceback.format_exc()}")
            self.rst()

    def answered(self) -> None:
        self._exchange = None
        if self.server.idle_close_s is not None and not self.lost:
            self._idle = asyncio.get_running_loop().call_later(self.server.idle_close_s, self.transport.close)

    def rst(self) -> None:
        if not self.lost:
            sock = self.transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    async def drained(self) -> None:
        if self._can_write is not None:
            await self._can_write.wait()
            if self.lost:
                raise ConnectionResetError("the peer is gone")

    def pause_writing(self) -> None:
        self._can_write = asyncio.Event()

    def resume_writing(self) -> None:
        if self._can_write is not None:
            self._can_write.set()
            self._can_write = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.server.connections.discard(self)
        if self._idle:
            self._idle.cancel()
        self.resume_writing()
        if self._exchange is not None:
            for callback in self._exchange.on_closed:
                callback()


@dataclass
class Server:
    """Listens on a port of its own on a loopback address, can refuse connections on it, and comes back on the same port."""

    handler: Handler
    idle_close_s: float | None = None
    """Closes a connection that was idle this long, as uvicorn does after 5 s."""
    on_reuse: Callable[[], str | None] | None = None
    """Asked when bytes arrive on a used connection: "rst" or "close" breaks it before the request is read."""
    problems: list[str] = field(default_factory=list)
    accepted: int = 0
    connections: set[_Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    port: int = 0
    host: str = "127.0.0.1"
    """A loopback address; `::1` for engines of an IPv6 cluster."""
    tls: ssl.SSLContext | None = None
    _listener: asyncio.Server | None = None
    _placeholder: socket.socket | None = None

    def problem(self, text: str) -> None:
        """Notes something that must fail the test."""
        self.problems.append(text)

    async def listen(self) -> None:
        """Starts to accept; on the old port when there was one."""
        if self._placeholder is not None:
            self._placeholder.close()
            self._placeholder = None
        sock = self._bound()
        self.port = sock.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Connection(self), sock=sock, backlog=4096, ssl=self.tls)

    def _bound(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self.host, self.port))
        return sock

    def refuse(self) -> None:
        """Stops to accept: connects are refused from now on. The port stays ours."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._placeholder is None:
            self._placeholder = self._bound()

    def die(self) -> None:
        """As SIGKILL does it: the listener is gone and every connection is reset."""
        self.refuse()
        for connection in list(self.connections):
            connection.rst()

    async def stop(self) -> None:
        """Ends everything."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._placeholder is not None:
            self._placeholder.close()
            self._placeholder = None
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
