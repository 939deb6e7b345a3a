"""A scripted agent of an engine's host: what engines with the plug-in leave there, and the descriptors that they send in its place."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import numpy as np

from .r3 import Rows
from .server import Exchange, Request, Server

MAGIC = b"R3H1"


class Host:
    """Objects by id, served as agents do: `GET /r3/{id}` or `/{id}` (with `Range`, or with `?rows=a:b`) and `DELETE`."""

    def __init__(self, dtype: str = "uint8") -> None:
        self.dtype = dtype
        self.objects: dict[str, bytes] = {}
        self.about: dict[str, tuple[int, int, int, int]] = {}
        """Of each object: rows, layers, experts of a layer, position of the first row."""
        self.fetched: list[str] = []
        self.deleted: list[str] = []
        self.breaks_after: int | None = None
        """Bytes of an answer after which the agent dies, as a killed process does."""
        self.damage = False
        """Served bytes are not those that were left."""
        self.server = Server(self._serve)
        self.problems: list[str] = []
        self.server.problems = self.problems

    async def start(self) -> Host:
        """Listens."""
        await self.server.listen()
        return self

    async def stop(self) -> None:
        """Ends."""
        await self.server.stop()

    def keep(self, kept: Rows, at: int, /, **changes: Any) -> bytes:
        """Leaves rows here; the descriptor's bytes. `changes` replace its members, or take them out with `None`."""
        name = f"{len(self.objects) + 1:032x}"
        data = kept.astype(self.dtype).tobytes()
        self.objects[name] = data
        count, layers, top_k = kept.shape
        self.about[name] = (count, layers, top_k, at)
        fields: dict[str, Any] = {
            "uri": f"r3://127.0.0.1:{self.server.port}/{name}",
            "offset": 256,
            "pos": at,
            "rows": count,
            "dtype": self.dtype,
            "shape": [count, layers, top_k],
            "crc32": zlib.crc32(data),
        }
        fields.update(changes)
        return MAGIC + json.dumps(fields, separators=(",", ":")).encode()

    def rows(self, segment: dict[str, Any], layers: int, top_k: int) -> np.ndarray:
        """The rows that a segment of a reference names, as its file would be read: by `offset`."""
        data = self.objects[segment["uri"].rsplit("/", 1)[1].partition("?")[0]]
        width = layers * top_k * np.dtype(segment["dtype"]).itemsize
        at = segment["offset"] - 256
        return np.frombuffer(data[at : at + segment["rows"] * width], segment["dtype"]).reshape(-1, layers, top_k)

    async def _serve(self, request: Request, exchange: Exchange) -> None:
        name = request.path.rsplit("/", 1)[1]
        if request.method == "DELETE":
            self.deleted.append(name)
            return await exchange.reply(204, b"")
        data = self.objects.get(name)
        if data is None:
            return await exchange.reply(404, b"{}")
        self.fetched.append(name)
        whole = data
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.header("range") or "")
        part = re.fullmatch(r"rows=(\d+):(\d+)", request.query)
        assert not request.query or (part and not wanted), f"the agent does not know {request.query!r}"
        count, layers, top_k, at = self.about[name]
        first, end = (int(part[1]), int(part[2])) if part else (0, count)
        if wanted:
            data = data[int(wanted[1]) : int(wanted[2]) + 1]
        elif part:
            assert first <= end <= count, f"{request.query} of {count} rows"
            data = data[first * len(whole) // count : end * len(whole) // count]
        if self.damage:
            data = bytes(len(data))
        if self.breaks_after is not None:
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {len(data)}\r\n\r\n"
            await exchange.write(head.encode() + data[: self.breaks_after])
            self.server.die()
            return None
        about = [("x-r3-dtype", self.dtype), ("x-r3-shape", f"{end - first},{layers},{top_k}"), ("x-r3-pos", str(at + first))]
        if len(data) == len(whole):
            about.append(("x-r3-crc32", str(zlib.crc32(whole))))
        return await exchange.reply(206 if wanted else 200, data, about, content_type="application/octet-stream")
