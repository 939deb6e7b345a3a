"""The file of one payload: a header of 256 bytes, then its rows, narrow and row-major. Router and agents write the same format.

| at | bytes | what |
|---|---|---|
| 0 | 8 | `R3STORE1` |
| 8 | 4 | version, 1 |
| 12 | 4 | state: 0 being written, 1 complete |
| 16 | 4 | dtype: 1 uint8, 2 uint16, 4 int32 |
| 20 | 4 + 4 | layers, experts of a layer (top_k) |
| 28 | 4 | start: position of the first row in the sequence |
| 32 | 8 | rows |
| 40 | 4 | CRC-32 (IEEE) of the row bytes |
| 44 | 4 | attempt |
| 48 | 8 + 8 | created, expires (0 never), Unix milliseconds |
| 64 | 2 + 94 | weight version: length, UTF-8 |
| 160 | 2 + 94 | request id: length, UTF-8 |

Numbers are little-endian. A file is written as `<id>.tmp` and renamed to `<id>.r3` when it is complete: who can open it can read it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .errors import FormatError

MAGIC: Final = b"R3STORE1"
VERSION: Final = 1
HEADER_BYTES: Final = 256
"""Offset of the first row in the file."""
DTYPES: Final = {"uint8": 1, "uint16": 2, "int32": 4}
"""Name of a dtype, and its code, which is also its size in bytes."""
_NAMES: Final = {code: name for name, code in DTYPES.items()}
_NUMBERS: Final = struct.Struct("<8sIIIIIIQIIQQ")
_TEXT: Final = struct.Struct("<H94s")
_MAX_ROWS: Final = 1 << 40


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype of a name in `DTYPES`.

    Raises:
        FormatError: it is none of them.
    """
    if name not in DTYPES:
        raise FormatError(f"dtype {name!r} is none of {', '.join(DTYPES)}")
    made: np.dtype[Any] = np.dtype(name).newbyteorder("<")
    return made


def narrow_dtype(experts: int | None) -> str:
    """The dtype that holds every expert id of a model with this number of experts; `int32` when the number is unknown."""
    if experts is None or experts <= 0 or experts > 1 << 16:
        return "int32"
    return "uint8" if experts <= 1 << 8 else "uint16"


def _text(text: str) -> bytes:
    raw = text.encode()[:94]
    # A character that was cut in two would make the header unreadable.
    raw = raw.decode(errors="ignore").encode()
    return _TEXT.pack(len(raw), raw)


def _untext(raw: bytes) -> str:
    length, text = _TEXT.unpack(raw)
    if length > len(text):
        raise FormatError(f"a text of {length} bytes does not fit into the header")
    return bytes(text[:length]).decode(errors="replace")


@dataclass(frozen=True)
class Header:
    """What is known about a payload besides its rows."""

    dtype: str
    layers: int
    top_k: int
    start: int
    """Position of the first row in the sequence (`routed_experts_start_len`)."""
    rows: int
    crc32: int = 0
    complete: bool = False
    attempt: int = 0
    created_ms: int = 0
    expires_ms: int = 0
    """Unix milliseconds; 0 never."""
    weight_version: str = ""
    rid: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.layers * self.top_k * DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, without the header."""
        return self.rows * self.row_bytes

    def pack(self) -> bytes:
        """The 256 bytes of the header."""
        numbers = _NUMBERS.pack(
            MAGIC,
            VERSION,
            int(self.complete),
            DTYPES[self.dtype],
            self.layers,
            self.top_k,
            self.start,
            self.rows,
            self.crc32,
            self.attempt,
            self.created_ms,
            self.expires_ms,
        )
        return numbers + _text(self.weight_version) + _text(self.rid)

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """Reads a header.

        Raises:
            FormatError: it is none, or of another version.
        """
        if len(raw) < HEADER_BYTES:
            raise FormatError(f"{len(raw)} bytes are no header of {HEADER_BYTES}")
        magic, version, state, code, layers, top_k, start, rows, crc, attempt, created, expires = _NUMBERS.unpack_from(raw)
        if magic != MAGIC:
            raise FormatError(f"the file begins with {magic!r}, not with {MAGIC!r}")
        if version != VERSION:
            raise FormatError(f"the file is of version {version}; this package reads version {VERSION}")
        if state not in (0, 1) or code not in _NAMES or layers == 0 or top_k == 0 or rows > _MAX_ROWS:
            raise FormatError(f"the header makes no sense: state {state}, dtype {code}, layers {layers}, top_k {top_k}, rows {rows}")
        return cls(
            dtype=_NAMES[code],
            layers=layers,
            top_k=top_k,
            start=start,
            rows=rows,
            crc32=crc,
            complete=state == 1,
            attempt=attempt,
            created_ms=created,
            expires_ms=expires,
            weight_version=_untext(raw[64:160]),
            rid=_untext(raw[160:256]),
        )
