"""A raw HTTP/1.1 client: what it sends and what it reads are bytes, and it checks framing as strictly as a bad client would suffer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from .wire import LAST_CHUNK, Body, Head, ProtocolError, chunk, framing_of, parse_head

READ_SIZE = 1 << 20


@dataclass
class Response:
    """An answer, complete."""

    status: int
    head: Head
    body: bytes
    chunks: list[bytes] | None
    framing: str

    def header(self, name: str) -> str | None:
        """First value of a header, by lower-case name."""
        return self.head.get(name)

    def json(self) -> Any:
        """The body as JSON; the whole answer is shown when it is none."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise AssertionError(f"status {self.status}, body is not JSON: {self.body[:500]!r}") from error

    def error(self) -> dict[str, Any]:
        """The router's error object. Fails when the body is not one, or not labelled as JSON."""
        assert (self.header("content-type") or "").startswith("application/json"), self.head.raw
        error = self.json().get("error")
        assert isinstance(error, dict) and error.get("message"), self.body[:500]
        return error


class Closed(ConnectionError):
    """The router closed the connection before the answer was complete."""


class Connection:
    """One connection, used for one exchange after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.used = 0
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        """Raw bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: bytes, headers: list[tuple[str, str]] | None = None) -> None:
        """Sends a whole request; the answer is not read."""
        await self.send(request_bytes("POST", path, body, headers))

    async def head(self) -> tuple[int, Head]:
        """Reads an answer's head."""
        while b"\r\n\r\n" not in self._buffer:
            data = await self.reader.read(READ_SIZE)
            if not data:
                raise Closed(f"closed after {self._buffer!r}")
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        head = parse_head(raw + b"\r\n\r\n")
        version, status, *_ = head.start.split(" ", 2)
        if version != "HTTP/1.1":
            raise ProtocolError(head.start)
        return int(status), head

    async def pieces(self, body: Body) -> AsyncIterator[bytes]:
        """Body bytes as they come in."""
        seen = 0
        data = self._buffer
        self._buffer = b""
        while True:
            if data:
                rest = body.feed(data)
                if len(body.data) > seen:
                    yield bytes(memoryview(body.data)[seen:])
                    seen = len(body.data)
                if body.done:
                    self._buffer = rest
            if body.done:
                self.used += 1
                return
            data = await self.reader.read(READ_SIZE)
            if not data:
                if body.framing == "close":
                    body.done = True
                    return
                raise Closed(f"closed after {len(body.data)} body bytes ({body.framing} {body.length}): {bytes(body.data[-200:])!r}")

    async def answer(self, *, bodiless: bool = False) -> Response:
        """Reads a whole answer; one to HEAD, and some statuses, have no body whatever their length says."""
        status, head = await self.head()
        if bodiless or status in (204, 304):
            self.used += 1
            return Response(status, head, b"", None, "none")
        body = Body(*framing_of(head, response=True))
        async for _ in self.pieces(body):
            pass
        return Response(status, head, bytes(body.data), body.chunks if body.framing == "chunked" else None, body.framing)

    async def call(self, path: str, body: bytes, headers: list[tuple[str, str]] | None = None) -> Response:
        """One request and its whole answer."""
        await self.post(path, body, headers)
        return await self.answer()

    def close(self) -> None:
        """Leaves with a FIN, or a RST when unread bytes are there (as any client that goes away)."""
        self.writer.close()

    def rst(self) -> None:
        """Leaves with a RST."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def request_bytes(
    method: str, path: str, body: bytes = b"", headers: list[tuple[str, str]] | None = None, *, chunk_size: int | None = None
) -> bytes:
    """A request on the wire; chunked when `chunk_size` is given."""
    given = {k.lower() for k, _ in headers or []}
    lines = [f"{method} {path} HTTP/1.1", *(["host: router.test"] if "host" not in given else [])]
    if "content-type" not in given and body:
        lines.append("content-type: application/json")
    lines += [f"{k}: {v}" for k, v in headers or []]
    if chunk_size is not None:
        lines.append("transfer-encoding: chunked")
        payload = b"".join(chunk(body[i : i + chunk_size]) for i in range(0, len(body), chunk_size)) + LAST_CHUNK
    else:
        if body or method in ("POST", "PUT"):
            lines.append(f"content-length: {len(body)}")
        payload = body
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + payload


def encode(body: Any) -> bytes:
    """JSON as a client library writes it; bytes go out as they are."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


class Client:
    """Keep-alive connections to one port."""

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        self.port = port
        self.timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def connect(self) -> Connection:
        """A fresh connection that the caller owns."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=READ_SIZE)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(reader, writer)

    async def request(
        self, method: str, path: str, body: Any = b"", headers: list[tuple[str, str]] | None = None, *, chunk_size: int | None = None
    ) -> Response:
        """One exchange on a pooled connection."""
        return await asyncio.wait_for(
            self._request(request_bytes(method, path, encode(body), headers, chunk_size=chunk_size)), self.timeout_s
        )

    async def _request(self, raw: bytes) -> Response:
        connection = self._idle.pop() if self._idle else await self.connect()
        try:
            await connection.send(raw)
            response = await connection.answer(bodiless=raw.startswith(b"HEAD "))
        except BaseException:
            connection.rst()
            raise
        if response.framing == "close" or (response.header("connection") or "").lower() == "close":
            connection.close()
        else:
            self._idle.append(connection)
        return response

    async def post(self, path: str, body: Any, headers: list[tuple[str, str]] | None = None) -> Response:
        """POSTs JSON (or bytes as they are)."""
        return await self.request("POST", path, body, headers)

    async def get(self, path: str) -> Response:
        """GETs."""
        return await self.request("GET", path)

    async def delete(self, path: str) -> Response:
        """DELETEs."""
        return await self.request("DELETE", path)

    async def generate(self, **body: Any) -> Response:
        """POST /generate."""
        return await self.post("/generate", body)

    async def chat(self, **body: Any) -> Response:
        """POST /v1/chat/completions with one short message unless `messages` says otherwise."""
        return await self.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}], **body})

    async def completions(self, **body: Any) -> Response:
        """POST /v1/completions."""
        return await self.post("/v1/completions", {"model": "m", "prompt": "x", **body})

    def close(self) -> None:
        """Leaves all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def events(body: bytes) -> list[str]:
    """The `data:` payloads of an SSE body. Fails on anything that is not a whole event."""
    text = body.decode()
    assert text.endswith("\n\n"), f"the stream does not end with a whole event: {text[-200:]!r}"
    payloads = []
    for event in text[:-2].split("\n\n"):
        lines = event.split("\n")
        assert all(line.startswith("data: ") for line in lines), f"not an event: {event!r}"
        payloads.append("\n".join(line[len("data: ") :] for line in lines))
    return payloads
