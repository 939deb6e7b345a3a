"""A router whose every reply is told by the test, with a store of its own behind `/r3/{id}`."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from numpy.typing import NDArray

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedRouter:
    """Replies from a list; objects by id; what was asked and deleted."""

    objects: dict[str, tuple[NDArray[Any], int]] = field(default_factory=dict)
    """Narrow rows, and the position of the first."""
    script: list[Any] = field(default_factory=list)
    """For each request: a JSON value, a `(status, headers)` or a handler. The last one stays."""
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    break_fetch: dict[str, str] = field(default_factory=dict)
    """By id: `gone`, `expired`, `denied`, `cut` (breaks off), `flip` (one wrong byte), `500`."""
    get_hook: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    server: TestServer | None = None

    @property
    def url(self) -> str:
        """Its address."""
        assert self.server is not None
        return str(self.server.make_url("")).rstrip("/")

    async def start(self) -> None:
        """Listens."""
        app = web.Application()
        app.router.add_get("/r3/{id}", self._get)
        app.router.add_delete("/r3/{id}", self._delete)
        app.router.add_post("/{path:.*}", self._post)
        self.server = TestServer(app)
        await self.server.start_server()

    async def close(self) -> None:
        """Stops."""
        assert self.server is not None
        await self.server.close()

    def put(self, name: str, rows: NDArray[Any], *, pos: int = 0, dtype: str = "uint8", **more: Any) -> dict[str, Any]:
        """Keeps rows; the segment that names them."""
        narrow = np.ascontiguousarray(rows, dtype=dtype)
        self.objects[name] = (narrow, pos)
        segment = {"uri": f"{self.url}/r3/{name}", "offset": 256, "pos": pos, "rows": len(rows), "dtype": dtype}
        return segment | {"crc32": zlib.crc32(narrow.tobytes())} | more

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append((request.path, dict(request.headers), body))
        act = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        if callable(act):
            made: web.StreamResponse = await act(request, body)
            return made
        if isinstance(act, tuple):
            return web.Response(status=act[0], headers=act[1], text="not now")
        return web.Response(body=orjson.dumps(act), content_type="application/json")

    async def _get(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        self.fetched.append(name)
        if self.get_hook is not None:
            return await self.get_hook(request)
        how = self.break_fetch.get(name)
        if how in ("gone", "expired", "denied", "500"):
            return web.Response(status={"gone": 404, "expired": 410, "denied": 403, "500": 500}[how], text=how)
        rows, pos = self.objects[name]
        a, b = (int(n) for n in request.query.get("rows", f"0:{len(rows)}").split(":"))
        raw = bytearray(rows[a:b].tobytes())
        if how == "flip":
            raw[-1] ^= 1
        headers = {
            "content-length": str(len(raw)),
            "x-r3-dtype": rows.dtype.name,
            "x-r3-shape": f"{b - a},{rows.shape[1]},{rows.shape[2]}",
            "x-r3-pos": str(pos + a),
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        if how == "cut":
            await response.write(bytes(raw[: len(raw) // 2]))
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(bytes(raw))
        return response

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        self.deleted.append(name)
        there = self.objects.pop(name, None) is not None
        return web.Response(status=204 if there else 404)


def envelope(segments: list[dict[str, Any]], shape: tuple[int, ...], dtype: str = "uint8") -> dict[str, Any]:
    """`output_store_ref` of these segments."""
    return {
        "handle": {"type": "r3router", "v": 1, "segments": segments, "expires_s": 600},
        "fields": {"routed_experts": {"dtype": dtype, "shape": list(shape)}},
    }


def reply(prompt: int, new: int, **meta: Any) -> dict[str, Any]:
    """A `/generate` reply."""
    return {
        "text": "abc",
        "output_ids": list(range(new)),
        "meta_info": {
            "id": "x",
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "finish_reason": {"type": "length", "length": new},
            "weight_version": "v1",
            "output_token_logprobs": [[-0.5, 100 + i, None] for i in range(new)],
            **meta,
        },
    }


def text(rows: NDArray[np.int32]) -> str:
    """The rows as an engine sends them in-line."""
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def drip(raw: bytes, size: int, content_type: str = "application/json") -> Handler:
    """A reply in pieces of `size` bytes."""

    async def send(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": content_type})
        await response.prepare(request)
        for at in range(0, len(raw), size):
            await response.write(raw[at : at + size])
            if size < 16 and at % 64 == 0:
                await asyncio.sleep(0)
        await response.write_eof()
        return response

    return send
