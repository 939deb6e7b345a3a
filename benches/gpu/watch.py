"""Watches engines and router during a column, from a process of its own: queues, latency of `/model_info`, CPU and memory.

python watch.py SPEC.json      # writes watch.jsonl; ends at SIGTERM
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

PROBE_S = 0.1
LOADS_S = 0.5
PROCESS_S = 1.0
GAUGES = ("sglang:mamba_usage", "sglang:token_usage", "sglang:pending_prealloc_token_usage", "sglang:prealloc_full_token_usage")
ROUTER = ("r3router_rank_in_transfer", "r3router_rank_open", "r3router_queued_requests", "r3router_rank_window")


def gauges(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """Series whose names begin so, by name and labels."""
    found = {}
    for line in text.splitlines():
        if line.startswith(names):
            name, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError):
                found[name] = float(value)
    return found


def part(process: psutil.Process, root: int) -> str:
    """Which part of an engine a process is."""
    if process.pid == root:
        return "http"
    with contextlib.suppress(psutil.Error):
        words = process.name() + " " + " ".join(process.cmdline()[:4])
        for name in ("detoken", "scheduler", "agent"):
            if name in words:
                return name
    return "other"


def processes(root: int) -> dict[str, tuple[float, int]]:
    """CPU seconds and resident bytes of a program's parts."""
    found: dict[str, tuple[float, int]] = {}
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(root)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                name, times = part(process, root), process.cpu_times()
                seconds, resident = found.get(name, (0.0, 0))
                found[name] = (seconds + times.user + times.system, resident + process.memory_info().rss)
    return found


async def main(spec: dict[str, Any]) -> None:
    """Until SIGTERM."""
    began, out = time.monotonic(), Path(spec["out"]).open("w")  # noqa: ASYNC230, SIM115 - lines of a hundred bytes
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    def note(kind: str, **fields: Any) -> None:
        out.write(json.dumps({"kind": kind, "at": round(time.monotonic() - began, 3)} | fields) + "\n")

    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, trust_env=False) as http:

        async def probe(role: str, url: str) -> None:
            while True:
                sent = time.monotonic()
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with http.get(f"{url}/model_info") as reply:
                        await reply.read()
                note("probe", role=role, took=round(time.monotonic() - sent, 4))
                await asyncio.sleep(PROBE_S)

        async def loads(role: str, url: str) -> None:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, KeyError, ValueError):
                    async with http.get(f"{url}/v1/loads?include=all") as reply:
                        note("loads", role=role, ranks=(await reply.json())["loads"])
                    async with http.get(f"{url}/metrics") as reply:
                        note("gauges", role=role, values=gauges(await reply.text(), GAUGES))
                await asyncio.sleep(LOADS_S)

        async def router(url: str) -> None:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with http.get(f"{url}/metrics") as reply:
                        note("router", values=gauges(await reply.text(), ROUTER))
                await asyncio.sleep(LOADS_S)

        async def usage() -> None:
            while True:
                for name, pid in spec["pids"].items():
                    note("process", name=name, parts=await asyncio.to_thread(processes, pid))
                await asyncio.sleep(PROCESS_S)

        tasks = [asyncio.create_task(usage()), asyncio.create_task(router(spec["metrics"]))]
        for role, url in spec["engines"].items():
            tasks += [asyncio.create_task(probe(role, url)), asyncio.create_task(loads(role, url))]
        await ended.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    out.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
