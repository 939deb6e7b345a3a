"""What part of a payload a request asks for, and in which form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from r3router.r3.format import DTYPES, HEADER_BYTES, Header, numpy_dtype
from r3router.r3.local import open_rows

_TILE_BYTES: Final = 1 << 20


class BadRange(Exception):
    """The part lies outside of the payload, or is written wrongly."""


def _span(text: str, limit: int, what: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d*):(\d*)", text)
    if found is None:
        raise BadRange(f"{what}={text} is not a:b")
    a, b = int(found[1] or 0), int(found[2] or limit)
    if not a <= b <= limit:
        raise BadRange(f"{what}={text} lies outside of 0:{limit}")
    return a, b


@dataclass(frozen=True)
class Part:
    """A range of rows and layers in one dtype, or a range of the file's row bytes."""

    rows: tuple[int, int]
    layers: tuple[int, int]
    dtype: str
    span: tuple[int, int] | None
    """Bytes of the object's rows, when they can be sent as they lie in the file."""
    cut: tuple[int, int]
    """Bytes of what the rest selects: all of them, or those of `Range`."""
    partial: bool
    """Asked for with `Range`."""
    shape: tuple[int, int, int]
    selected: int
    """Bytes of what the rest selects, whatever `Range` takes of them."""

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.cut[1] - self.cut[0]

    @classmethod
    def parse(cls, header: Header, query: Mapping[str, str], range_header: str | None) -> Part:
        """Reads `?rows=a:b`, `?layers=a:b`, `?dtype=` and `Range: bytes=…`, which counts bytes of what the others select.

        Raises:
            BadRange: see there.
        """
        unknown = set(query) - {"rows", "layers", "dtype"}
        if unknown:
            raise BadRange(f"unknown parameter {min(unknown)}; there are rows, layers and dtype")
        rows = _span(query["rows"], header.rows, "rows") if "rows" in query else (0, header.rows)
        layers = _span(query["layers"], header.layers, "layers") if "layers" in query else (0, header.layers)
        dtype = query.get("dtype", header.dtype)
        if dtype not in DTYPES or DTYPES[dtype] < DTYPES[header.dtype]:
            raise BadRange(f"dtype={dtype}: these rows are {header.dtype} and can be had as that or wider")
        shape = (rows[1] - rows[0], layers[1] - layers[0], header.top_k)
        selected = shape[0] * shape[1] * shape[2] * DTYPES[dtype]
        cut = (0, selected) if range_header is None else _bytes(range_header, selected)
        plain = dtype == header.dtype and layers == (0, header.layers)
        before = rows[0] * header.row_bytes
        span = (before + cut[0], before + cut[1]) if plain else None
        return cls(rows, layers, dtype, span, cut, range_header is not None, shape, selected)

    def tiles(self, path: Path) -> Iterator[bytes]:
        """The bytes of a part that is not sent as it lies; about 1 MiB at a time."""
        _, rows = open_rows(path)
        row = max(1, self.shape[1] * self.shape[2] * DTYPES[self.dtype])
        step = max(1, _TILE_BYTES // row)
        wanted: np.dtype[Any] = numpy_dtype(self.dtype)
        first, end = self.cut[0] // row, -(-self.cut[1] // row)
        for a in range(first, end, step):
            b = min(a + step, end)
            tile = rows[self.rows[0] + a : self.rows[0] + b, self.layers[0] : self.layers[1]]
            yield tile.astype(wanted).tobytes()[max(0, self.cut[0] - a * row) : self.cut[1] - a * row]

    def offset(self) -> int:
        """Where `span` begins in the file."""
        return HEADER_BYTES + (self.span[0] if self.span else 0)


def _bytes(text: str, total: int) -> tuple[int, int]:
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", text.strip())
    if found is None or (not found[1] and not found[2]):
        raise BadRange(f"Range {text} is not bytes=a-b")
    if not found[1]:
        return max(0, total - int(found[2])), total
    a = int(found[1])
    b = min(int(found[2]) + 1, total) if found[2] else total
    if a >= b:
        raise BadRange(f"Range {text} lies outside of {total} bytes")
    return a, b
