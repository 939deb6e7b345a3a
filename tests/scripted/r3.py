"""Routed-expert rows that can be told apart: what prefill computed, what decode computed, and the junk that decode never computed."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]
JUNK = -1
"""What decode's prompt rows hold: it never ran the prompt."""


@dataclass
class R3Model:
    """Shape and value range of a model's routing, and how its engine misbehaves."""

    layers: int = 2
    topk: int = 2
    experts: int = 256
    missing: bool = False
    """The engine was started without the option: the field is not there, whatever the request says."""
    ignores_start_len: bool = False
    """As some engine builds do: rows always begin at 0."""
    junk: int = JUNK
    short_by: int = 0
    """Rows that are missing at the end."""
    extra_bytes: int = 0
    """Bytes that are too many, so that the length fits no whole row."""
    bad_text: bool = False
    """The field is not base64."""
    dtype: str | None = None
    """Narrow rows on the wire, named by `routed_experts_dtype`; `None` is int32 without a name."""
    keep: Callable[[Rows, int], bytes] | None = None
    """As with the plug-in: takes rows and the position of the first, gives the bytes that stand in their place."""
    marks: tuple[int, int] | None = None
    """The prompt's rows all hold the first number and the output's the second, so that a row in a wrong place is seen at once."""
    _cache: dict[tuple[int, int, int], Rows] = field(default_factory=dict, repr=False)

    def rows(self, seed: int, first: int, count: int) -> Rows:
        """Rows `first..first+count` of the stream of rows that `seed` names; int32 [count, layers, topk]."""
        if self.marks:
            return np.full((count, self.layers, self.topk), self.marks[1], dtype=np.int32)
        per_row = self.layers * self.topk
        index = np.arange(first * per_row, (first + count) * per_row, dtype=np.uint64)
        mixed = (index + np.uint64(seed & 0xFFFFFFFF)) * np.uint64(2654435761)
        ids = (mixed >> np.uint64(7)) % np.uint64(self.experts)
        return ids.astype(np.int32).reshape(count, self.layers, self.topk)

    def cached_rows(self, seed: int, first: int, count: int) -> Rows:
        """As `rows`, of the prompt; large blocks are made once."""
        if self.marks:
            return np.full((count, self.layers, self.topk), self.marks[0], dtype=np.int32)
        if count < 10_000:
            return self.rows(seed, first, count)
        key = (seed, first, count)
        if key not in self._cache:
            self._cache[key] = self.rows(seed, first, count)
        return self._cache[key]

    def junk_rows(self, count: int) -> Rows:
        """Rows as decode reports them for the prompt."""
        return np.full((max(count, 0), self.layers, self.topk), self.junk, dtype=np.int32)

    def text(self, rows: Rows, pos: int = 0) -> str:
        """The field's value for these rows, the first at `pos`, with this engine's misbehaviour."""
        if self.bad_text:
            return "!!not base64!!"
        if self.short_by:
            rows = rows[: max(len(rows) - self.short_by, 0)]
        if self.keep:
            return base64.b64encode(self.keep(rows, pos)).decode()
        narrow = rows if self.dtype is None else rows.astype(self.dtype)
        return base64.b64encode(narrow.tobytes() + b"\x07" * self.extra_bytes).decode()


def to_text(rows: Rows) -> str:
    """Base64 of int32 rows, as the engine writes it."""
    return base64.b64encode(rows.tobytes()).decode()


def from_text(text: str, layers: int = 2, topk: int = 2) -> Rows:
    """Rows out of a field. Fails when the bytes are no whole number of rows."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=np.int32).reshape(-1, layers, topk)
