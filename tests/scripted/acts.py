"""What a script may make an engine do with one leg, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from .leg import Leg
    from .server import Exchange


@dataclass
class Act:
    """Replaces an engine's normal work on a leg. With `joins` the leg takes part in its room first, as a healthy one does."""

    run: Callable[[Leg, Exchange], Awaitable[None]]
    joins: bool = False


Script = Callable[["Leg"], Act | None]


def answer(
    status: int,
    body: Any,
    *,
    after: float = 0.0,
    headers: Sequence[tuple[str, str]] = (),
    joins: bool = False,
    content_type: str = "application/json",
) -> Act:
    """A whole answer."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)

    async def run(leg: Leg, exchange: Exchange) -> None:
        await asyncio.sleep(after)
        if joins:
            await leg.deliver()
        await exchange.reply(status, data, list(headers), content_type)

    return Act(run, joins)


def refusal(status: int, message: str, *, after: float = 0.0) -> Act:
    """An engine's error in its own words, in the shape that SGLang uses."""
    return answer(
        status,
        {"object": "error", "message": message, "type": "BadRequestError", "code": status, "error": {"message": message}},
        after=after,
    )


def never(*, leaks: bool = False, joins: bool = False) -> Act:
    """Accepts and never answers. `leaks`: what it holds stays held after an abort, until `Engine.free_leaked`."""

    async def run(leg: Leg, exchange: Exchange) -> None:
        leg.leaks = leaks
        if joins:
            await leg.deliver()
        await asyncio.get_running_loop().create_future()

    return Act(run, joins)


def rst(*, after: float = 0.0) -> Act:
    """Breaks the connection without a byte of an answer."""

    async def run(leg: Leg, exchange: Exchange) -> None:
        await asyncio.sleep(after)
        exchange.rst()

    return Act(run)


def head_then_rst(*, after: float = 0.02, length: int = 100, content_type: str = "application/json") -> Act:
    """200 and headers, then a reset."""

    async def run(leg: Leg, exchange: Exchange) -> None:
        await exchange.write(f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n".encode())
        await asyncio.sleep(after)
        exchange.rst()

    return Act(run)


def cut_short(body: bytes, missing: int, *, joins: bool = True) -> Act:
    """Content-Length promises `missing` more bytes than come before the FIN."""

    async def run(leg: Leg, exchange: Exchange) -> None:
        if joins:
            await leg.deliver()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body) + missing}\r\n\r\n"
        await exchange.write(head.encode() + body)
        exchange.close()

    return Act(run, joins)


def chunks(
    parts: Iterable[bytes],
    *,
    gap: float = 0.0,
    then: str = "end",
    headers: Sequence[tuple[str, str]] = (),
    content_type: str = "text/event-stream",
) -> Act:
    """A chunked answer with exactly these chunks once the KV is here; `then` is "end", "rst" or "hang"."""
    parts = list(parts)

    async def run(leg: Leg, exchange: Exchange) -> None:
        await leg.deliver()
        await exchange.start(200, content_type, list(headers))
        for part in parts:
            await exchange.chunk(part)
            await asyncio.sleep(gap)
        if then == "end":
            await exchange.end()
        elif then == "rst":
            await asyncio.sleep(0.05)
            exchange.rst()
        else:
            await asyncio.get_running_loop().create_future()

    return Act(run, joins=True)


def first(count: int, act: Act) -> Script:
    """The first `count` legs get the act, later ones are served."""
    seen = 0

    def script(leg: Leg) -> Act | None:
        nonlocal seen
        seen += 1
        return act if seen <= count else None

    return script


def every(nth: int, act: Act) -> Script:
    """Every nth leg gets the act."""
    seen = 0

    def script(leg: Leg) -> Act | None:
        nonlocal seen
        seen += 1
        return act if seen % nth == 0 else None

    return script


def always(act: Act) -> Script:
    """Every leg gets the act."""
    return lambda leg: act
