"""A reply's reference to its rows: the envelope `output_store_ref`, whose segments lie one after another in the sequence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from .descriptor import Descriptor
from .errors import FormatError
from .format import HEADER_BYTES, numpy_dtype

FIELDS = ("routed_experts", "indexer_topk")


@dataclass(frozen=True)
class Segment:
    """Rows that lie together in one object of a router or an agent."""

    uri: str
    """Serves the rows of this segment and no others: for a part of an object it ends with `?rows=a:b`, rows of the object."""
    offset: int
    """Byte of the first row of this segment in the object's file."""
    pos: int
    """Position of the first row in the sequence."""
    rows: int
    dtype: str
    crc32: int | None = None
    """Of this segment's bytes; `None` when the segment is a part of its object, or when only the object's owner knows it."""
    path: str | None = None
    host: str | None = None

    def url(self, base: str) -> str:
        """Where HTTP finds these rows. `base` is the router's address, for addresses without a host."""
        if self.uri.startswith("r3://"):
            return "http://" + self.uri.removeprefix("r3://")
        return urljoin(base, self.uri)

    def object_url(self, base: str) -> str:
        """Where HTTP finds the whole object: to release it, or to ask for other rows than `url` names."""
        return self.url(base).partition("?")[0]

    def part(self) -> tuple[int, int] | None:
        """The rows of the object that `uri` names; `None` when it names none, and so the whole object.

        Raises:
            FormatError: the address has a query that is not `rows=a:b`: what it serves is not known.
        """
        query = self.uri.partition("?")[2]
        if not query:
            return None
        found = re.fullmatch(r"rows=(\d+):(\d+)", query)
        if found is None:
            raise FormatError(f"{self.uri}: a segment's address has ?rows=a:b or no query")
        return int(found[1]), int(found[2])

    def skip_bytes(self) -> int:
        """Bytes of the object's rows before this segment."""
        # Offsets are those of files, which begin with a header; what is served begins with the first row.
        if self.offset < HEADER_BYTES:
            raise FormatError(f"{self.uri}: offset {self.offset} lies inside the header")
        return self.offset - HEADER_BYTES


@dataclass(frozen=True)
class Reference:
    """Where the rows of one field of one reply are."""

    segments: tuple[Segment, ...]
    dtype: str
    shape: tuple[int, int, int]
    """Rows, layers, experts of a layer."""
    expires_s: float | None = None
    """Seconds from the reply on; `None` when it is not told."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def start(self) -> int:
        """Position of the first row in the sequence."""
        return self.segments[0].pos if self.segments else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in their narrow form."""
        return self.shape[0] * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in its narrow form."""
        return self.shape[1] * self.shape[2] * numpy_dtype(self.dtype).itemsize

    def cut(self, first: int, end: int) -> list[tuple[Segment, int, int, int]]:
        """The parts that hold rows `first..end`, counted from the reference's first row.

        Each is a segment, its rows `a..b`, and at which row of the result they belong.

        Raises:
            IndexError: the range is empty backwards or lies outside.
        """
        if not 0 <= first <= end <= self.rows:
            raise IndexError(f"rows {first}:{end} lie outside of the {self.rows} rows of this payload")
        parts = []
        at = 0
        for segment in self.segments:
            a, b = max(first, at), min(end, at + segment.rows)
            if a < b:
                parts.append((segment, a - at, b - at, a - first))
            at += segment.rows
        return parts

    @classmethod
    def parse(cls, envelope: Any, field: str = "routed_experts") -> Reference:
        """Reads `output_store_ref`.

        Raises:
            FormatError: it is no reference of r3router's (another store's, say), or its segments do not fit together.
        """
        try:
            handle = envelope["handle"]
            if not isinstance(handle, Mapping) or handle.get("type") != "r3router":
                raise FormatError(f"the reference is not r3router's: its handle is {handle!r:.200}")
            if handle.get("v") != 1:
                raise FormatError(f"the reference is of version {handle.get('v')!r}; this package reads version 1")
            about = envelope["fields"][field]
            rows, layers, top_k = (int(n) for n in about["shape"])
            segments = tuple(
                Segment(
                    uri=str(s["uri"]),
                    offset=int(s["offset"]),
                    pos=int(s["pos"]),
                    rows=int(s["rows"]),
                    dtype=str(s["dtype"]),
                    crc32=None if s.get("crc32") is None else int(s["crc32"]),
                    path=s.get("path"),
                    host=s.get("host"),
                )
                for s in handle["segments"]
                if s.get("field", field) == field
            )
            made = cls(segments, str(about["dtype"]), (rows, layers, top_k), handle.get("expires_s"))
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"the reference cannot be read: {error!r} in {envelope!r:.400}") from error
        made._check()
        return made

    @classmethod
    def of(cls, descriptor: Descriptor) -> Reference:
        """The reference to the rows of one engine, for clients that talk to it without a router."""
        d = descriptor
        segment = Segment(d.uri, d.offset, d.pos, d.rows, d.dtype, d.crc32, d.path, d.host)
        made = cls((segment,), d.dtype, (d.rows, d.layers, d.top_k))
        made._check()
        return made

    def _check(self) -> None:
        rows, layers, top_k = self.shape
        if rows < 0 or (rows > 0 and min(layers, top_k) < 1):
            raise FormatError(f"shape {self.shape} makes no sense")
        widest = numpy_dtype(self.dtype).itemsize
        at = self.start
        for segment in self.segments:
            if segment.pos != at or segment.rows < 0 or segment.offset < 0:
                raise FormatError(f"segment {segment.uri} begins at {segment.pos} where {at} was expected ({segment.rows} rows)")
            if numpy_dtype(segment.dtype).itemsize > widest:
                raise FormatError(f"segment {segment.uri} is {segment.dtype}, wider than the payload's {self.dtype}")
            part = segment.part()
            if part is not None:
                # The two ways to these rows must not lead to different ones.
                first = HEADER_BYTES + part[0] * layers * top_k * numpy_dtype(segment.dtype).itemsize
                if part[1] - part[0] != segment.rows or segment.offset != first:
                    raise FormatError(f"segment {segment.uri} has {segment.rows} rows from byte {segment.offset}, its address names others")
            at += segment.rows
        if at - self.start != rows:
            raise FormatError(f"the segments have {at - self.start} rows, the payload {rows}")
