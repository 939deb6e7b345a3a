"""Resident memory while many R3 samples are between prefill's reply and decode's."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from typing import Any

from .fleet import Backends, load, router
from .payload import ROW_IDS, TEXT_BYTES_PER_ROW, request

ARENA_GAUGE = re.compile(r'^r3router_r3_arena_bytes\{what="used"\} (\S+)$', re.MULTILINE)


def measure(samples: int, tokens: int, hold_seconds: float, arena_bytes: int) -> dict[str, Any]:
    """Sends `samples` requests of `tokens` prompt tokens at once; decode answers after `hold_seconds`."""
    backends = Backends()
    seen: list[tuple[float, float]] = []
    with (
        backends.run(prompt_tokens=tokens, output_tokens=8, row_ids=ROW_IDS, hold_seconds=hold_seconds, honours_start_len=True),
        router(
            "r3router",
            backends,
            pd=True,
            extra=("--r3-arena-bytes", str(arena_bytes), "--window", "unbounded", "--delivery-timeout-secs", "600"),
        ) as (address, process),
    ):
        body = request(tokens, 8)
        idle = process.memory_mb("VmRSS")
        result: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: result.append(load(address, body, connections=samples, seconds=hold_seconds + 300, requests=samples))
        )
        thread.start()
        while thread.is_alive():
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://{address}/metrics", timeout=120) as reply:
                gauge = ARENA_GAUGE.search(reply.read().decode())
            if gauge is None:
                raise RuntimeError("the router's /metrics has no r3router_r3_arena_bytes")
            seen.append((float(gauge[1]) / 1e6, process.memory_mb("VmRSS")))
            time.sleep(0.5)
        thread.join()
    if not result:
        raise RuntimeError("the load did not finish: " + process.log_tail())
    arena, rss = max(seen)
    text = samples * tokens * TEXT_BYTES_PER_ROW / 1e6
    return {
        "samples": samples,
        "tokens": tokens,
        "P text MB": round(text),
        "arena MB": round(arena),
        "arena / text": round(arena / text, 3),
        "RSS MB": round(rss),
        "idle RSS MB": round(idle),
        "heap beyond arena MB": round(rss - idle - arena),
        "request bodies MB": round(samples * len(json.dumps(body, separators=(",", ":"))) / 1e6),
    }
