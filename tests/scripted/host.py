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
    """Objects by id, served as agents do: `GET /r3/{id}` (with `Range`) and `DELETE /r3/{id}`."""

    def __init__(self, dtype: str = "uint8") -> None:
        self.dtype = dtype
        self.objects: dict[str, bytes] = {}
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
        """The rows that a segment of a reference names."""
        data = self.objects[segment["uri"].rsplit("/", 1)[1]]
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
        if wanted:
            data = data[int(wanted[1]) : int(wanted[2]) + 1]
        if self.damage:
            data = bytes(len(data))
        if self.breaks_after is not None:
            head = f"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {len(data)}\r\n\r\n"
            await exchange.write(head.encode() + data[: self.breaks_after])
            self.server.die()
            return None
        return await exchange.reply(
            206 if wanted else 200, data, [("x-r3-crc32", str(zlib.crc32(whole)))], content_type="application/octet-stream"
        )
