"""Rows of files on this host, mapped: no byte is copied, and an open mapping outlives the file."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import overlay
from .errors import FormatError
from .format import HEADER_BYTES, Header, numpy_dtype
from .host import boot_id
from .reference import Segment


class NotHere(Exception):
    """The file is not to be had on this host; another way must be taken."""


class StillWritten(Exception):
    """The file is being written; it will be there in a moment."""


def may_be_here(segment: Segment) -> bool:
    """Whether the segment has a path that means something on this host."""
    return segment.path is not None and segment.host in (None, "", boot_id())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, Header]]:
    """A complete file, open for reading, and its header.

    Raises:
        NotHere: it is not there, or not for this user.
        StillWritten: it is not complete yet.
        FormatError: it is something else, or shorter than its header says.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.with_suffix(".tmp").exists():
            raise StillWritten(str(path)) from None
        # It may have been completed between the two looks.
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotHere(str(error)) from error
    except OSError as error:
        raise NotHere(str(error)) from error
    try:
        size = os.fstat(fd).st_size
        header = Header.unpack(os.pread(fd, HEADER_BYTES, 0))
        if not header.complete:
            raise StillWritten(str(path))
        if size < HEADER_BYTES + header.nbytes:
            raise FormatError(f"{path} has {size} bytes, its header promises {HEADER_BYTES + header.nbytes}")
        yield fd, header
    finally:
        os.close(fd)


def open_rows(path: str | Path) -> tuple[Header, NDArray[Any]]:
    """Maps a complete file; read-only rows `[rows, layers, top_k]`.

    Raises:
        NotHere, StillWritten, FormatError: as `opened`.
    """
    with opened(Path(path)) as (fd, header):
        shape = (header.rows, header.layers, header.top_k)
        if header.nbytes == 0:
            return header, np.empty(shape, numpy_dtype(header.dtype))
        # The array keeps the mapping, the mapping keeps the bytes.
        mapped = mmap.mmap(fd, HEADER_BYTES + header.nbytes, access=mmap.ACCESS_READ)
    return header, np.frombuffer(mapped, numpy_dtype(header.dtype), offset=HEADER_BYTES).reshape(shape)


def check(header: Header, rows: NDArray[Any], what: str) -> None:
    """Compares all rows of a file with its checksum.

    Raises:
        FormatError: they differ.
    """
    found = zlib.crc32(rows.reshape(-1).view(np.uint8).data) if rows.size else 0
    if found != header.crc32:
        raise FormatError(f"{what}: the rows' checksum is {found:#010x}, the header says {header.crc32:#010x}")


def read_segment(segment: Segment, shape: tuple[int, int, int], first: int, end: int, *, verify: bool = False) -> NDArray[Any]:
    """Rows `first..end` of a segment from its file, a read-only view.

    Raises:
        NotHere: the segment has no file on this host.
        StillWritten: the file is not complete yet.
        FormatError: the file is not the segment's.
    """
    if segment.path is None or not may_be_here(segment):
        raise NotHere(segment.uri)
    header, rows = open_rows(segment.path)
    skip = _first(segment, shape, header)
    if verify:
        check(header, rows, segment.path)
    return rows[skip + first : skip + end]


def _first(segment: Segment, shape: tuple[int, int, int], header: Header) -> int:
    """The row of the file that is the segment's first.

    Raises:
        FormatError: the file is not the segment's.
    """
    if (header.layers, header.top_k, header.dtype) != (shape[1], shape[2], segment.dtype):
        raise FormatError(
            f"{segment.path} holds {header.dtype} [{header.layers}, {header.top_k}], "
            f"the reference says {segment.dtype} [{shape[1]}, {shape[2]}]"
        )
    skip, odd = divmod(segment.skip_bytes(), header.row_bytes)
    if odd or skip + segment.rows > header.rows:
        raise FormatError(f"{segment.path}: {segment.rows} rows from byte {segment.offset} do not lie in its {header.rows} rows")
    return skip


def place_segment(
    segment: Segment, shape: tuple[int, int, int], first: int, end: int, at: int, total: int, *, verify: bool = False
) -> NDArray[Any] | None:
    """A new array of `total` rows, of which rows `at..at + end - first` are rows `first..end` of the segment, mapped and not copied.

    The other rows are zero, to be filled; writing changes no file. `None` where memory cannot be laid out like that.

    Raises:
        NotHere, StillWritten, FormatError: as `read_segment`.
    """
    if segment.path is None or not may_be_here(segment):
        raise NotHere(segment.uri)
    with opened(Path(segment.path)) as (fd, header):
        skip = _first(segment, shape, header)
        if verify:
            check(header, open_rows(segment.path)[1], segment.path)
        row = header.row_bytes
        raw = overlay.lay(fd, HEADER_BYTES + (skip + first) * row, (end - first) * row, at * row, total * row)
    return None if raw is None else raw.view(numpy_dtype(header.dtype)).reshape(total, header.layers, header.top_k)
