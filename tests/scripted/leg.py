"""One generation request as a scripted engine saw it, and what two of them make together."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .r3 import Rows, to_text
from .rooms import Meeting
from .server import Request

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(eq=False)
class Leg:
    """One generation request as an engine saw it."""

    engine: Engine
    request: Request
    body: dict[str, Any] = field(default_factory=dict)
    rid: str = ""
    room: int = 0
    room_text: str = ""
    rank: int = 0
    asked_rank: int | None = None
    prompt_tokens: int = 0
    arrived: float = 0.0
    ended: float | None = None
    end: str = "open"
    """How it ended: `answered`, `aborted`, `left` (connection closed, no abort), `late` (closed when the answer was ready),
    `broken` (by script) or `timeout`."""
    closed_at: float | None = None
    aborted_at: float | None = None
    leaks: bool = False
    delivered: bool = False
    sent: bytes = b""
    """The whole reply of a healthy engine (streams: all events)."""
    r3_sent: Rows | None = None
    r3_output: Rows | None = None
    meeting: Meeting | None = None
    task: asyncio.Task[Any] | None = None
    _held: tuple[int, int] = (0, 0)

    @property
    def raw(self) -> bytes:
        """The body's bytes."""
        return self.request.body

    @property
    def seed(self) -> int:
        """Names the prompt's rows: the same for both legs of an attempt. Long prompts share a few rows, so that texts can be cached."""
        ids = self.body.get("input_ids")
        if isinstance(ids, list):
            return zlib.crc32(str(ids if len(ids) < 1000 else (ids[:32], ids[-1] & 3)).encode())
        return zlib.crc32(
            str(self.body.get("text") or self.body.get("messages") or self.body.get("prompt"))[:4096].encode("utf-8", "replace")
        )

    def token_at(self, index: int) -> int:
        """Id of a prompt token."""
        ids = self.body.get("input_ids")
        return ids[index] if isinstance(ids, list) and index < len(ids) else 7

    async def deliver(self) -> None:
        """The leg's part of the KV transfer: prefill computes and sends, decode waits for it."""
        if self.meeting is None:
            return
        engine, meeting = self.engine, self.meeting
        if engine.role == "prefill":
            await engine.wait_for(meeting.both, self)
            if engine.prefill_s or engine.transfer_s:
                await asyncio.sleep(engine.prefill_s + engine.transfer_s)
            self.delivered = True
            if not meeting.delivered.done():
                meeting.delivered.set_result(None)
        elif engine.role == "decode":
            await engine.wait_for(meeting.delivered, self)
            self.delivered = True
        await engine.moving.wait()


@dataclass
class Abort:
    """One `/abort_request` and the legs that it hit (by prefix; none when it came too early or too late)."""

    rid: str
    at: float
    hit: list[Leg]
    body: dict[str, Any]


def prompt_tokens(body: dict[str, Any]) -> int:
    """Prompt length as this fake counts it: ids, or a token for every four characters."""
    ids = body.get("input_ids")
    if isinstance(ids, list):
        return len(ids) if not ids or not isinstance(ids[0], list) else sum(len(x) for x in ids)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    text = body.get("text") if body.get("text") is not None else prompt
    if not isinstance(text, str):
        text = "".join(str(m.get("content")) for m in body.get("messages") or [] if isinstance(m, dict))
    return max(1, len(text) // 4)


def merged_rows(prefill: Leg, decode: Leg) -> Rows:
    """What one unsplit engine would have returned for these two legs."""
    assert prefill.r3_sent is not None and decode.r3_output is not None
    return np.concatenate([prefill.r3_sent, decode.r3_output])


def merged_text(prefill: Leg, decode: Leg) -> str:
    """`merged_rows` as the field's value."""
    return to_text(merged_rows(prefill, decode))
