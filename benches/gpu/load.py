"""The rollouts of one column: a closed loop of clients for a fixed time.

    python load.py SPEC.json

writes results.jsonl (one line a request) and sample-*.npz (rows to compare) into the folder that SPEC names. A reply in-line is read as
bytes, and its payload's length is checked without a JSON parser: this client must not be what limits. A reply by reference is read with
`r3router.client`, to the last row.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

FIELD = b'"routed_experts":"'
CLOCK = re.compile(r"timed out after [\d.]+s? in (KVPoll\.\w+)")


def reason(status: int, text: str) -> str:
    """Why a request failed, in the engine's words without ids."""
    clock = CLOCK.search(text)
    if clock:
        return f"engine timeout in {clock[1]}"
    return f"{status} " + re.sub(r"\d+", "N", text)[:160]


def take(raw: bytes) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """A `/generate` reply without its payload, and where the payload lies."""
    at = raw.find(FIELD)
    if at < 0:
        reply: dict[str, Any] = orjson.loads(raw)
        return reply, None
    first = at + len(FIELD)
    end = raw.index(b'"', first)
    reply = orjson.loads(raw[:first] + raw[end:])
    return reply, (first, end)


class Load:
    """What the clients share."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.folder = Path(spec["folder"])
        self.random = random.Random(7)
        self.prefixes = [[self.random.randrange(256) for _ in range(length)] for length in spec["prefixes"]]
        self.sent = 0
        self.kept = 0
        self.completed = 0
        self.began = time.monotonic()
        self.out = (self.folder / "results.jsonl").open("w")

    def body(self) -> dict[str, Any]:
        """The next request. A column's requests are the same in the same order, whatever becomes of them."""
        own = random.Random(1000 + self.sent)
        prefix = self.prefixes[self.sent % len(self.prefixes)]
        self.sent += 1
        fresh = [own.randrange(256) for _ in range(own.randint(*self.spec["fresh"]))]
        sampling = {"max_new_tokens": own.randint(*self.spec["outputs"]), "temperature": 1.0, "ignore_eos": True}
        return {"input_ids": prefix + fresh, "sampling_params": sampling, "return_routed_experts": True}

    def keep(self, ids: list[int], rows: Any) -> None:
        """Keeps a reply for the comparison."""
        np.savez(self.folder / f"sample-{self.kept}.npz", ids=np.asarray(ids, np.int32), rows=rows)
        self.kept += 1

    def wanted(self) -> bool:
        """Whether the rows of the reply at hand are kept: every seventh, until there are enough."""
        self.completed += 1
        return self.kept < self.spec["samples"] and self.completed % 7 == 1

    def note(self, **fields: Any) -> None:
        """Writes a line."""
        self.out.write(json.dumps({"at": round(time.monotonic() - self.began, 3)} | fields) + "\n")


def checked(load: Load, raw: bytes, ids: list[int], new: int) -> dict[str, Any]:
    """Looks at a reply in-line."""
    reply, where = take(raw)
    out = reply["output_ids"]
    values = load.spec["layers"] * load.spec["top_k"]
    found: dict[str, Any] = {"tokens": len(out), "bytes": len(raw)}
    if len(out) != new:
        return found | {"why": "fewer tokens than asked for"}
    if where is None:
        return found | {"r3": "missing"}
    want = (len(ids) + new - 1) * values * 4
    if where[1] - where[0] != -(-want // 3) * 4:
        return found | {"r3": f"{where[1] - where[0]} characters for {want} bytes"}
    if load.wanted():
        rows = np.frombuffer(base64.b64decode(raw[where[0] : where[1]]), "<i4")
        narrow = rows.astype(np.uint8)
        if not np.array_equal(narrow, rows):
            return found | {"r3": "ids that are no experts"}
        load.keep(ids + out[:-1], narrow.reshape(-1, load.spec["layers"], load.spec["top_k"]))
    return found | {"r3": "whole"}


async def inline(load: Load, http: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    """One request, rows in the reply."""
    ids, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
    data = orjson.dumps(body)
    async with http.post(f"{load.spec['url']}/generate", data=data, headers={"content-type": "application/json"}) as reply:
        raw = await reply.read()
        if reply.status != 200:
            return {"why": reason(reply.status, raw[:4000].decode(errors="replace"))}
    return await asyncio.to_thread(checked, load, raw, ids, new)


async def reference(load: Load, client: Any, body: dict[str, Any]) -> dict[str, Any]:
    """One request, rows by reference, read and released."""
    from r3router.client import RequestFailed
    from r3router.r3.errors import R3Error

    ids, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
    try:
        reply = await client.generate(body)
    except RequestFailed as error:
        return {"why": reason(error.status, error.text)}
    except R3Error as error:
        return {"why": f"rows: {type(error).__name__}: {error}"[:160]}
    out, rows = list(reply["output_ids"]), reply.routed_experts
    found: dict[str, Any] = {"tokens": len(out)}
    if len(out) != new:
        return found | {"why": "fewer tokens than asked for"}
    if rows is None:
        return found | {"r3": "missing"}
    want = (len(ids) + new - 1, load.spec["layers"], load.spec["top_k"])
    if rows.shape != want:
        return found | {"r3": f"{rows.shape} instead of {want}"}
    if load.wanted():
        load.keep(ids + out[:-1], np.asarray(rows))
    return found | {"r3": "whole", "dtype": str(rows.dtype)}


async def run(load: Load) -> None:
    """The closed loop."""
    spec = load.spec
    stop = load.began + spec["seconds"]
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 22, trust_env=False
            )
        )
        client: Any = None
        if spec["transport"] == "ref":
            from r3router.client import Client

            client = await stack.enter_async_context(
                Client(spec["url"], layers=spec["layers"], top_k=spec["top_k"], retries=0, session=http)
            )

        async def one() -> None:
            while time.monotonic() < stop:
                body, sent = load.body(), time.monotonic()
                try:
                    found = await (reference(load, client, body) if client else inline(load, http, body))
                except (aiohttp.ClientError, OSError) as error:
                    found = {"why": f"no answer: {type(error).__name__}"}
                load.note(took=round(time.monotonic() - sent, 3), prompt=len(body["input_ids"]), **found)
                if "why" in found:
                    await asyncio.sleep(0.5)

        clients = [asyncio.create_task(one()) for _ in range(spec["outstanding"])]
        await asyncio.wait(clients, timeout=spec["seconds"])
        running = sum(not client_.done() for client_ in clients)
        failed = [client_.exception() for client_ in clients if client_.done() and client_.exception()]
        for client_ in clients:
            client_.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        load.note(end=True, running=running, broken=[repr(error) for error in failed])
    load.out.close()


if __name__ == "__main__":
    asyncio.run(run(Load(json.loads(Path(sys.argv[1]).read_text()))))
