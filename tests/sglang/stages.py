"""Where a request is inside the engines, and waiting until it is somewhere else."""

from __future__ import annotations

import time
from collections.abc import Callable

from .fleet import Process

SETTLE_SECONDS = 60
"""Decode holds the pages of a failed transfer for up to 30 s (`SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT`)."""


def busy(engine: Process) -> int:
    """Requests that the engine counts anywhere, on all ranks."""
    loads = engine.loads()
    return sum(
        int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) + int(load["disaggregation"]["prefill_inflight_queue_reqs"])
        for load in loads
    )


def queue(engine: Process, name: str) -> int:
    """Length of one of the engine's disaggregation queues, on all ranks."""
    return sum(int(load["disaggregation"][f"{name}_queue_reqs"]) for load in engine.loads())


def eventually(done: Callable[[], bool], what: str, seconds: float = SETTLE_SECONDS) -> None:
    """Polls until `done()`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)


def idle(*engines: Process) -> None:
    """Waits until the engines are empty: no request in any queue, and no KV token in use but what a prefix cache keeps."""
    eventually(lambda: all(busy(engine) == 0 for engine in engines), "the engines to be empty")


def free(decode: Process) -> None:
    """Waits until a decode engine without prefix cache holds no request, no KV token and no state slot."""
    idle(decode)
    eventually(lambda: all(int(load["num_used_tokens"]) == 0 for load in decode.loads()), "decode's KV pool to be free")
