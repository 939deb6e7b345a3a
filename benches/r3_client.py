"""What reading R3 costs a client: wall time, CPU, longest freeze of its event loop. `python benches/r3_client.py [samples] [tokens]`.

The server is a process of its own that sends prepared bytes, so that the figures are the client's. Rows of a 48 x 8 model, 128 experts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from r3router.agent.server import Options, build
from r3router.client import Client
from r3router.r3.store import SHM, StoreDir, Writing, new_header

LAYERS, TOP_K, EXPERTS = 48, 8, 128
Ask = Callable[[str], Awaitable[np.ndarray]]


def serve(port: Any, tokens: int, samples: int) -> None:
    """Answers `/inline`, `/mapped` and `/http` with one sample each; the agent's routes are there too."""
    from aiohttp import web

    rows = np.random.default_rng(1).integers(0, EXPERTS, (tokens - 1, LAYERS, TOP_K), dtype=np.int32)
    size = (rows.size + 8192) * 1.1
    store = StoreDir(SHM / "r3router-bench", int(size * (samples + 1)))
    meta = {"prompt_tokens": tokens - 100, "completion_tokens": 100, "finish_reason": {"type": "length"}}
    inline = json.dumps({"text": "x", "meta_info": meta | {"routed_experts": base64.b64encode(rows.tobytes()).decode()}}).encode()
    agent = build(Options(directory=store.path))

    prepared: list[Writing] = []

    async def prepare(request: web.Request) -> web.Response:
        """Rows are there when a reply comes: the engine or the router has written them while the sample was made."""
        for _ in range(int(request.query["n"])):
            header = new_header(len(rows), LAYERS, TOP_K, "uint8", start=0, expires_s=600, rid="", weight_version="")
            prepared.append(store.reserve(header))
            await asyncio.to_thread(prepared[-1].write, [rows])
        return web.Response()

    async def answer(request: web.Request) -> web.Response:
        kind = request.match_info["kind"]
        if kind == "inline":
            return web.Response(body=inline, content_type="application/json")
        writing = prepared.pop()
        segment = {"uri": f"http://{request.host}/r3/{writing.id}", "offset": 256, "pos": 0, "rows": len(rows), "dtype": "uint8"}
        segment |= {"path": str(writing.path)} if kind == "mapped" else {}
        fields = {"routed_experts": {"dtype": "uint8", "shape": list(rows.shape)}}
        handle = {"type": "r3router", "v": 1, "segments": [segment]}
        return web.json_response({"text": "x", "meta_info": meta | {"output_store_ref": {"handle": handle, "fields": fields}}})

    async def run() -> None:
        app = agent.app()
        # The agent's GET of an id is more special; these are POSTs.
        app.router.add_post("/{kind}/generate", answer)
        app.router.add_post("/prepare", prepare)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.send(runner.addresses[0][1])
        await asyncio.to_thread(port.recv)
        await runner.cleanup()

    asyncio.run(run())
    store.remove()


async def naive(url: str) -> np.ndarray:
    """As trainers do it: the whole body, a JSON parser, one base64 decoder."""
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json={}) as got:
        body = json.loads(await got.read())
    return np.frombuffer(base64.b64decode(body["meta_info"]["routed_experts"]), np.int32)


async def ours(url: str) -> np.ndarray:
    """Our client."""
    async with Client(url, layers=LAYERS, top_k=TOP_K) as client:
        reply = await client.generate(input_ids=[])
        assert reply.routed_experts is not None
        return reply.routed_experts


async def measure(ask: Ask, url: str, samples: int) -> tuple[float, float, float]:
    """Seconds of wall time and of CPU, and the longest time that the loop stood still."""
    freeze = 0.0
    done = False

    async def tick() -> None:
        nonlocal freeze
        while not done:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            freeze = max(freeze, time.perf_counter() - began - 0.001)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    freeze = 0.0
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for rows in await asyncio.gather(*(ask(url) for _ in range(samples))):
        assert rows.size % (LAYERS * TOP_K) == 0
    wall = time.perf_counter() - began
    now = resource.getrusage(resource.RUSAGE_SELF)
    done = True
    await ticker
    return wall, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, freeze


async def main(samples: int, tokens: int) -> None:
    """Prints the table."""
    ours_end, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, tokens, samples), daemon=True)
    server.start()
    port = await asyncio.to_thread(ours_end.recv)
    megabytes = (tokens - 1) * LAYERS * TOP_K / 1e6
    print(f"{samples} at once, {tokens} tokens, {LAYERS} x {TOP_K}: {megabytes * 4 * 4 / 3:.1f} MB of base64, {megabytes:.1f} MB narrow\n")
    print("| how | wall s | client CPU s | longest freeze ms |\n|---|---|---|---|")
    try:
        for name, ask, kind in (
            ("in-line, aiohttp + json + base64", naive, "inline"),
            ("in-line, our client", ours, "inline"),
            ("reference, HTTP", ours, "http"),
            ("reference, mapped", ours, "mapped"),
        ):
            if kind != "inline":
                async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{port}/prepare?n={samples}") as got:
                    assert got.status == 200
            wall, cpu, freeze = await measure(ask, f"http://127.0.0.1:{port}/{kind}", samples)
            print(f"| {name} | {wall:.3f} | {cpu:.3f} | {freeze * 1e3:.0f} |", flush=True)
    finally:
        ours_end.send(None)
        server.join(10)
        server.kill()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
    asyncio.run(main(*(int(a) for a in [*sys.argv[1:], "8", "60000"][:2])))
