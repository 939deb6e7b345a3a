"""A client that asks for routing payloads by reference, fetches them, and puts them back in their places: what the tests of in-line replies
say of rows then holds for references too."""

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
            path = "/r3/" + segment["uri"].rsplit("/", 1)[1]
            got = await self.get(path)
            assert got.status == 200, got.body[:300]
            assert got.header("x-r3-dtype") == segment["dtype"]
            assert got.header("x-r3-shape") == f"{segment['rows']},{layers},{top_k}"
            assert got.header("x-r3-pos") == str(segment["pos"])
            assert zlib.crc32(got.body) == segment["crc32"] == int(got.header("x-r3-crc32") or -1)
            if "path" in segment:
                whole = file_bytes(segment["path"])
                assert whole[:8] == b"R3STORE1" and segment["offset"] == HEADER
                assert whole[segment["offset"] :] == got.body, "the file and the fetch differ"
            parts.append(np.frombuffer(got.body, DTYPES[segment["dtype"]]).astype(np.int32).tobytes())
            assert (await self.delete(path)).status == 204
            assert (await self.get(path)).status == 410
        data = b"".join(parts)
        assert len(data) == rows * layers * top_k * 4
        return data
