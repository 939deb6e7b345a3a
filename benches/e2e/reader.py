"""One client of the R3 table, in a process of its own: a plan (JSON) on standard input, what it measured (JSON) on standard output.

It asks for `samples` replies at once and holds all of their rows at the end, as a trainer does.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r3router.client import Client
from r3router.r3.nixl import NixlReader

Rows = NDArray[Any]


@dataclass
class Plan:
    """What to ask, and how."""

    url: str
    how: str
    """`httpx`, `ours` (both in-line), `http`, `mapped`, `nixl` (by reference)."""
    body: dict[str, Any]
    samples: int
    layers: int
    top_k: int
    rows: int
    """Rows that every sample must have; 0: none are asked for."""
    hold_seconds: float = 0.0
    """Seconds that the sample itself takes: decode runs for so long."""
    agent: str | None = None
    """Address of the agent whose NIXL agent has the rows' memory, where it is not the reference's."""
    key: list[int] = field(default_factory=list)
    """Ids of the first layer's first expert in some rows, `[row, id, row, id, …]`: they are compared."""


@dataclass
class Seen:
    """What the replies were."""

    json_bytes: int = 0
    """Of the largest, without payloads that our client took out of it."""
    said_bytes: int = 0
    """Of the same reply: what was generated, `text` and `output_ids`, which grows with the tokens whatever way the rows take."""


def size(value: Any) -> int:
    """Bytes of compact JSON."""
    return len(json.dumps(value, separators=(",", ":")))


def look(seen: Seen, whole: int, reply: dict[str, Any]) -> None:
    """Takes down the largest reply."""
    if whole > seen.json_bytes:
        seen.json_bytes, seen.said_bytes = whole, size({k: reply[k] for k in ("text", "output_ids") if k in reply})


def trainer(plan: Plan, seen: Seen) -> tuple[Callable[[], Awaitable[Rows]], Callable[[], Awaitable[None]]]:
    """As trainers do it: httpx, the whole body through a JSON parser, one base64 decoder."""
    import httpx

    try:
        from pybase64 import b64decode
    except ImportError:
        from base64 import b64decode
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    http = httpx.AsyncClient(timeout=600, limits=limits, trust_env=False)

    async def ask() -> Rows:
        reply = await http.post(f"{plan.url}/generate", json=plan.body)
        reply.raise_for_status()
        got = reply.json()
        look(seen, len(reply.content), got)
        if not plan.rows:
            return np.empty((0, plan.layers, plan.top_k), np.int32)
        text = got["meta_info"]["routed_experts"]
        return np.frombuffer(b64decode(text), np.int32).reshape(-1, plan.layers, plan.top_k)

    return ask, http.aclose


def ours(plan: Plan, seen: Seen) -> tuple[Callable[[], Awaitable[Rows]], Callable[[], Awaitable[None]]]:
    """Our client."""
    transport = "inline" if plan.how == "ours" else "ref"
    client = Client(plan.url, transport=transport, layers=plan.layers, top_k=plan.top_k, map_files=plan.how != "http", retries=0)
    nixl = NixlReader(client.session, plan.url, agent=plan.agent) if plan.how == "nixl" else None

    async def ask() -> Rows:
        reply = await client.generate(plan.body, load=nixl is None and plan.rows > 0)
        look(seen, size(reply.raw), reply.raw)
        if not plan.rows:
            return np.empty((0, plan.layers, plan.top_k), np.uint8)
        if nixl is None:
            rows = reply.routed_experts
        else:
            if reply.reference is None:
                raise RuntimeError(f"the reply has no reference: {json.dumps(reply.raw)[:300]}")
            rows = await nixl.read(reply.reference)
            await reply.release()
        if rows is None:
            raise RuntimeError(f"the reply has no rows: {json.dumps(reply.raw)[:300]}")
        return rows

    return ask, client.close


async def measure(plan: Plan) -> dict[str, Any]:
    """All samples at once."""
    seen = Seen()
    ask, close = (trainer if plan.how == "httpx" else ours)(plan, seen)
    freeze, ticks, done = 0.0, 0, False

    async def tick() -> None:
        nonlocal freeze, ticks
        while not done:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            freeze = max(freeze, time.perf_counter() - began - 0.001)
            ticks += 1

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    # What the ticker itself costs is taken off, tick by tick: it runs on while a sample takes its seconds.
    used, ticks = resource.getrusage(resource.RUSAGE_SELF), 0
    await asyncio.sleep(0.3)
    idle = resource.getrusage(resource.RUSAGE_SELF)
    a_tick = (idle.ru_utime + idle.ru_stime - used.ru_utime - used.ru_stime) / max(1, ticks)
    freeze, ticks = 0.0, 0
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    found = await asyncio.gather(*(ask() for _ in range(plan.samples)))
    wall = time.perf_counter() - began
    now, ticked = resource.getrusage(resource.RUSAGE_SELF), ticks
    done = True
    await ticker
    await close()
    for rows in found:
        if rows.shape != (plan.rows, plan.layers, plan.top_k):
            raise RuntimeError(f"{plan.how}: rows of shape {rows.shape}, {plan.rows} rows were wanted")
        for row, wanted in zip(plan.key[::2], plan.key[1::2], strict=True):
            if int(rows[row, 0, 0]) != wanted:
                raise RuntimeError(f"{plan.how}: row {row} begins with {int(rows[row, 0, 0])}, not {wanted}")
    return {
        "wall": wall - plan.hold_seconds,
        "cpu": max(0.0, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime - ticked * a_tick),
        "freeze": freeze,
        "json_bytes": seen.json_bytes,
        "said_bytes": seen.said_bytes,
        "rss_mb": now.ru_maxrss / 1000,
    }


def main() -> None:
    """Reads the plan, prints what was measured."""
    plan = Plan(**json.load(sys.stdin))
    try:
        import uvloop
    except ImportError:
        result = asyncio.run(measure(plan))
    else:
        result = uvloop.run(measure(plan))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
