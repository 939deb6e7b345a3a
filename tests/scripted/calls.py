"""Request bodies and ways to send many of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from .client import Response

T = TypeVar("T")

CHAT = {"model": "m", "messages": [{"role": "user", "content": "tell me something"}]}
COMPLETION = {"model": "m", "prompt": "tell me something"}
GENERATE = {"input_ids": [11, 12, 13, 14, 15], "sampling_params": {"max_new_tokens": 3}}
ROUTES: dict[str, dict[str, Any]] = {"/generate": GENERATE, "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
OWNED = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "rid")
"""Fields that belong to the router on a PD leg."""


def long_bodies(count: int, *, prompt: int, shared: int, **fields: Any) -> Iterable[bytes]:
    """`/generate` bodies of `prompt` ids, the first `shared` the same in all. Made as text: encoding ids one by one is slow."""
    head = ",".join(str(1000 + i % 150_000) for i in range(shared))
    rest = json.dumps(fields)[1:]
    for call in range(count):
        tail = ",".join(str((call * 7919 + i) % 150_000) for i in range(prompt - shared))
        yield f'{{"input_ids":[{head}{"," if head and tail else ""}{tail}],{rest}'.encode()


async def crowd(jobs: Iterable[Callable[[], Awaitable[T]]], width: int) -> list[T]:
    """Runs jobs, at most `width` at once; results in order."""
    queue = list(jobs)
    results: list[Any] = [None] * len(queue)
    numbers = iter(range(len(queue)))

    async def worker() -> None:
        for number in numbers:
            results[number] = await queue[number]()

    await asyncio.gather(*(worker() for _ in range(min(width, len(queue)))))
    return results


def statuses(answers: Iterable[Response]) -> dict[int, int]:
    """How many answers had each status."""
    counts: dict[int, int] = {}
    for answer in answers:
        counts[answer.status] = counts.get(answer.status, 0) + 1
    return counts


async def until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Waits for a condition; fails with `what`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not condition():
        assert loop.time() < end, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


def without_owned(body: dict[str, Any]) -> dict[str, Any]:
    """A leg's body less the fields that the router owns."""
    return {k: v for k, v in body.items() if k not in OWNED}
