"""Gathers rows from the engine's host buffer on a thread of its own, and keeps the engine from overwriting them meanwhile.

The buffer is indexed by KV slot, and a finished request's slots are free as soon as its rows are collected. So each slot that is
still to be read is counted; before the engine writes to slots of the buffer it asks `guard`, which waits when, and only when, one of
them is still to be read. Slots that were freed last are given out last, so it hardly ever waits.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from r3router.r3.store import StoreDir, Writing

logger = logging.getLogger("r3router.plugin")
_TILE_BYTES: Final = 1 << 20
WAIT_SECONDS: Final = 30.0
"""A write to the buffer is held back no longer than this."""


@dataclass
class Job:
    """Rows to write."""

    writing: Writing
    buffer: NDArray[Any]
    """`[slots, layers, top_k]` of the engine, or the rows themselves."""
    slots: NDArray[np.int64] | None
    """Which rows of the buffer, in the order of the sequence; `None` for all."""
    expected: NDArray[Any] | None = None
    """The rows as they were when the job was made, to compare with."""


class Writer:
    """One thread that writes payloads in the order in which they were submitted."""

    def __init__(self, store: StoreDir, pending: int) -> None:
        self._store = store
        self._limit = pending
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._free = threading.Condition()
        # Per buffer (by address): how many jobs still read each slot.
        self._reads: dict[int, NDArray[np.int16]] = {}
        self._in_flight = 0
        self.written = 0
        self.failed = 0
        self.waits = 0
        """How often the engine had to wait for a slot."""
        self.waited_s = 0.0
        self._broken = False
        self.bytes = 0
        threading.Thread(target=self._run, name="r3router-writer", daemon=True).start()

    @property
    def in_flight(self) -> int:
        """Payloads that are not written yet."""
        return self._in_flight

    def full(self) -> bool:
        """Whether no more may be submitted now."""
        return self._in_flight >= self._limit

    def submit(self, job: Job) -> None:
        """Takes a payload; the buffer's rows are guarded from here on."""
        with self._free:
            self._in_flight += 1
            if job.slots is not None:
                reads = self._counts(job.buffer)
                # A request has no slot twice.
                reads[job.slots] += 1
        self._jobs.put(job)

    def guard(self, buffer: NDArray[Any], slots: NDArray[np.int64]) -> None:
        """Waits until none of these slots is still to be read."""
        if self._in_flight == 0:
            return
        with self._free:
            reads = self._reads.get(_address(buffer))
            if reads is None or not reads[slots].any():
                return
            began = time.monotonic()
            self.waits += 1
            if not self._free.wait_for(lambda: not reads[slots].any(), WAIT_SECONDS):
                logger.error("slots of unwritten R3 rows are overwritten after %.0f s; those payloads will not pass", WAIT_SECONDS)
                self.give_up()
            self.waited_s += time.monotonic() - began

    def give_up(self) -> None:
        """Lets no rows pass that are not written yet: the engine may be overwriting them."""
        self._broken = True

    def drain(self, timeout: float = WAIT_SECONDS) -> bool:
        """Waits until all is written."""
        with self._free:
            return self._free.wait_for(lambda: self._in_flight == 0, timeout)

    def _counts(self, buffer: NDArray[Any]) -> NDArray[np.int16]:
        key = _address(buffer)
        if key not in self._reads:
            self._reads[key] = np.zeros(len(buffer), np.int16)
        return self._reads[key]

    def _whole(self, job: Job) -> Iterator[NDArray[Any]]:
        at = 0
        for tile in _tiles(job):
            # Looked at after the rows were read: what was read before is right.
            if self._broken and job.slots is not None:
                raise RuntimeError("the engine overwrote rows that were not written yet")
            if job.expected is not None and not np.array_equal(tile, job.expected[at : at + len(tile)]):
                raise RuntimeError(f"rows {at} to {at + len(tile)} are not those of the finished request")
            at += len(tile)
            yield tile

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=1.0)
            except queue.Empty:
                self._store.rescan()
                continue
            try:
                job.writing.write(self._whole(job))
                self.written += 1
                self.bytes += job.writing.header.nbytes
            except Exception as error:
                self.failed += 1
                logger.exception("R3 rows of request %s cannot be written; who asks for them is told", job.writing.header.rid)
                job.writing.path.unlink(missing_ok=True)
                job.writing.fail(f"{type(error).__name__}: {error}")
            finally:
                with self._free:
                    self._in_flight -= 1
                    if job.slots is not None:
                        self._counts(job.buffer)[job.slots] -= 1
                    if self._in_flight == 0:
                        self._broken = False
                    self._free.notify_all()
                del job


def _address(buffer: NDArray[Any]) -> int:
    return int(buffer.__array_interface__["data"][0])


def _tiles(job: Job) -> Iterator[NDArray[Any]]:
    """The rows in pieces that stay in the processor's cache between gathering and narrowing."""
    buffer = job.buffer
    row = max(1, buffer.itemsize * int(np.prod(buffer.shape[1:])))
    step = max(1, _TILE_BYTES // row)
    if job.slots is None:
        for a in range(0, len(buffer), step):
            yield buffer[a : a + step]
        return
    tile = np.empty((step, *buffer.shape[1:]), buffer.dtype)
    for a in range(0, len(job.slots), step):
        part = job.slots[a : a + step]
        out = tile[: len(part)]
        # Out of range is a fault of ours; "clip" spares the copy that "raise" makes.
        np.take(buffer, part, axis=0, out=out, mode="clip")
        yield out
