"""Rows that can be told apart, and files that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from r3router.r3.store import StoreDir, new_header

LAYERS, TOP_K = 3, 4


def expert_rows(seed: int, count: int, experts: int = 256) -> NDArray[np.int32]:
    """Random ids, int32 `[count, LAYERS, TOP_K]`."""
    return np.random.default_rng(seed).integers(0, experts, (count, LAYERS, TOP_K), dtype=np.int32)


def put(store: StoreDir, rows: NDArray[np.int32], *, dtype: str = "uint8", start: int = 0, expires_s: float = 60) -> Path:
    """Writes a payload in two tiles; its file."""
    writing = store.reserve(
        new_header(len(rows), rows.shape[1], rows.shape[2], dtype, start=start, expires_s=expires_s, rid="r", weight_version="v")
    )
    half = len(rows) // 2
    writing.write([rows[:half], rows[half:]])
    return writing.path
