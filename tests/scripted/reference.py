"""A client that asks for routing payloads by reference, fetches them, and puts them back in their places: what the tests of in-line replies
say of rows then holds for references too.

It is a naive reader: it GETs the address of each segment and takes what comes for the segment's rows. `offset` says something of the
file only.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .client import Client, Response, events

DTYPES = {"uint8": np.uint8, "uint16": np.uint16, "int32": np.int32}
HEADER = 256
MOST_JSON = 4096
"""A reply by reference is small however many rows it names."""


def file_bytes(path: str) -> bytes:
    """An object's whole file."""
    return Path(path).read_bytes()


class RefClient(Client):
    """Every POST carries `x-r3-transport: ref`; references in its reply are resolved."""

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        super().__init__(port, timeout_s)
        self.resolved = 0

    async def post(self, path: str, body: Any, headers: list[tuple[str, str]] | None = None) -> Response:
        got = await super().post(path, body, [*(headers or []), ("x-r3-transport", "ref")])
        if got.status != 200 or b'"output_store_ref"' not in got.body:
            return got
        if "text/event-stream" in (got.header("content-type") or ""):
            parts = [part if part == "[DONE]" else json.dumps(await self._walk(json.loads(part))) for part in events(got.body)]
            got.body = "".join(f"data: {part}\n\n" for part in parts).encode()
        else:
            got.body = json.dumps(await self._walk(got.json())).encode()
        return got

    async def _walk(self, node: Any) -> Any:
        if isinstance(node, list):
            return [await self._walk(value) for value in node]
        if not isinstance(node, dict):
            return node
        out = {}
        for name, value in node.items():
            if name == "output_store_ref":
                assert "routed_experts" not in node, "a reference and rows in one place"
                assert len(json.dumps(value)) < MOST_JSON
                out["routed_experts"] = base64.b64encode(await self.resolve(value)).decode()
            else:
                out[name] = await self._walk(value)
        return out

    def _owner(self, uri: str) -> tuple[Client, str]:
        """Who serves an address, and under which path."""
        scheme, _, rest = uri.partition("://")
        authority, _, path = rest.partition("/")
        if scheme == "r3":
            return Client(int(authority.rpartition(":")[2]), self.timeout_s), f"/{path}"
        # The name under which a client sees the router may be another than the tests'.
        return self, f"/{path}"

    async def resolve(self, ref: dict[str, Any]) -> bytes:
        """The int32 bytes that a reference names; each segment is read over HTTP and from its file, and let go."""
        self.resolved += 1
        handle = ref["handle"]
        assert (handle["type"], handle["v"]) == ("r3router", 1)
        assert handle["expires_s"] > 0
        rows, layers, top_k = ref["fields"]["routed_experts"]["shape"]
        parts, at = [], None
        for segment in handle["segments"]:
            assert at is None or segment["pos"] == at, "segments leave a gap"
            at = segment["pos"] + segment["rows"]
            owner, path = self._owner(segment["uri"])
            got = await owner.get(path)
            assert got.status == 200, got.body[:300]
            assert got.header("x-r3-dtype") == segment["dtype"]
            assert got.header("x-r3-shape") == f"{segment['rows']},{layers},{top_k}"
            assert got.header("x-r3-pos") == str(segment["pos"])
            if segment["crc32"] is not None:
                assert zlib.crc32(got.body) == segment["crc32"] == int(got.header("x-r3-crc32") or -1)
            else:
                assert owner is not self, "the router knows the checksums of its own objects"
            if "path" in segment:
                whole = file_bytes(segment["path"])
                assert whole[:8] == b"R3STORE1" and segment["offset"] == HEADER
                assert whole[segment["offset"] :] == got.body, "the file and the fetch differ"
            parts.append(np.frombuffer(got.body, DTYPES[segment["dtype"]]).astype(np.int32).tobytes())
            path = path.partition("?")[0]
            assert (await owner.delete(path)).status == 204
            if owner is self:
                assert (await self.get(path)).status == 410
            else:
                owner.close()
        data = b"".join(parts)
        assert len(data) == rows * layers * top_k * 4
        return data
