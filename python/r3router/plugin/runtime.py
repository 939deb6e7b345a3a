"""What the plug-in has in a scheduler's process: the directory, the writing thread, the agent, and the decision for each request."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from r3router.r3 import host
from r3router.r3.descriptor import Descriptor
from r3router.r3.format import HEADER_BYTES, narrow_dtype
from r3router.r3.store import COUNTS, PREFIX, ArenaFull, StoreDir, new_header, reclaim

from .keeper import Keeper
from .settings import Settings
from .writer import Job, Writer

logger = logging.getLogger("r3router.plugin")
QUIET_SECONDS: Final = 10.0
"""The same reason is told once in so long, with how often it came up."""
_EXPERT_NAMES: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")


@dataclass
class Gathered:
    """Rows of a finished request: in the engine's buffer, or already taken out of it."""

    buffer: NDArray[Any]
    slots: NDArray[np.int64] | None
    start: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, layers, experts of a layer."""
        rows = len(self.buffer) if self.slots is None else len(self.slots)
        return rows, int(self.buffer.shape[1]), int(self.buffer.shape[2])


class Runtime:
    """One per scheduler process that streams."""

    def __init__(self, settings: Settings, rank: int = 0) -> None:
        """Makes the directory and starts the thread and the agent.

        Raises:
            OSError: the directory cannot be made.
        """
        self.settings = settings
        for path in reclaim(settings.parent):
            logger.warning("removed %s, whose owners are dead", path)
        path = settings.parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self.store = StoreDir(path, settings.cap(), group=settings.group)
        self.writer = Writer(self.store, settings.pending)
        self.by_reference = 0
        self.inline: dict[str, int] = {}
        self._told: dict[str, float] = {}
        self._dumped: dict[str, Any] = {}
        self.keeper = Keeper(settings, path, rank, self.dump)
        self.keeper.start()
        logger.info("R3 rows go by reference: %s, %d bytes at most, agent at %s", path, self.store.cap, self.keeper.uri)

    def refusal(self, request: Any) -> str | None:
        """Why a request's rows must go in-line; `None` when they need not."""
        if getattr(request, "retraction_count", 0):
            # Rows that decode had before it was retracted may be another request's now; the router refuses such a reply.
            return "the request was retracted"
        if not self.keeper.alive:
            return "the agent does not answer"
        if self.writer.full():
            return f"{self.settings.pending} payloads wait to be written"
        return None

    def publish(self, gathered: Gathered, dtype: str, rid: str, weight_version: str = "") -> bytes:
        """Takes rows over; the descriptor that goes in their place. The rows may be written after this has come back.

        Raises:
            ArenaFull: no room.
            OSError: shared memory cannot be used.
        """
        rows, layers, top_k = gathered.shape
        header = new_header(
            rows,
            layers,
            top_k,
            dtype,
            start=gathered.start,
            expires_s=self.settings.expires_s,
            rid=rid,
            weight_version=weight_version,
        )
        writing = self.store.reserve(header)
        expected = gathered.buffer[gathered.slots] if self.settings.verify and gathered.slots is not None else None
        self.writer.submit(Job(writing, gathered.buffer, gathered.slots, expected))
        self.by_reference += 1
        uri = f"r3://{self.keeper.uri}/{writing.id}"
        path = str(writing.path)
        return Descriptor(uri, HEADER_BYTES, gathered.start, rows, dtype, layers, top_k, None, path, host.boot_id()).encode()

    def tell(self, why: str, request: Any) -> None:
        """Counts and logs that a request's rows go in-line."""
        # Numbers in the reason would make each a reason of its own.
        kind = why.partition(" (")[0]
        self.inline[kind] = self.inline.get(kind, 0) + 1
        now = time.monotonic()
        if now - self._told.get(kind, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._told[kind] = now
            rid = getattr(request, "rid", "?")
            logger.warning("R3 rows of %s go in-line (%d so far): %s", rid, self.inline[kind], why)

    def counts(self) -> dict[str, Any]:
        """What the agent's `/metrics` tells of this process."""
        writer = self.writer
        return {
            "by_reference": self.by_reference,
            "inline": dict(self.inline),
            "written": writer.written,
            "written_bytes": writer.bytes,
            "failed": writer.failed,
            "pending": writer.in_flight,
            "waits": writer.waits,
            "waited_s": round(writer.waited_s, 6),
            "arena_bytes": self.store.used,
            "arena_cap_bytes": self.store.cap,
            "agent_starts": self.keeper.starts,
        }

    def dump(self) -> None:
        """Leaves `counts` in the directory, where an agent finds them."""
        counts = self.counts()
        if counts != self._dumped:
            self._dumped = counts
            draft = self.store.path / f"{COUNTS}.new"
            draft.write_text(json.dumps(counts))
            draft.rename(self.store.path / COUNTS)


def dtype_of(model_config: Any) -> str:
    """The dtype that holds the expert ids of a model; `int32` when its configuration does not tell their number."""
    for config in (getattr(model_config, "hf_text_config", None), getattr(model_config, "hf_config", None)):
        for name in _EXPERT_NAMES:
            count = getattr(config, name, None)
            if isinstance(count, int) and count > 0:
                return narrow_dtype(count)
    return "int32"


__all__ = ["ArenaFull", "Gathered", "Runtime", "dtype_of"]
