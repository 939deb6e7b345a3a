"""What an engine with the plug-in sends in the place of a payload: `R3H1`, then compact JSON that says where its rows are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from .errors import FormatError
from .format import DTYPES

MAGIC: Final = b"R3H1"
TEXT_PREFIX: Final = b"UjNIMX"
"""How the base64 text of every descriptor begins."""
MAX_BYTES: Final = 4096


@dataclass(frozen=True)
class Descriptor:
    """Rows of one engine's payload that lie in a file of its host."""

    uri: str
    """`r3://host:port/<id>`: the agent that serves them."""
    offset: int
    """First byte of the rows in the file."""
    pos: int
    """Position of the first row in the sequence."""
    rows: int
    dtype: str
    layers: int
    top_k: int
    crc32: int | None = None
    """`None`: the rows are written while the reply travels; the file's header and the agent have it."""
    path: str | None = None
    """The file, for readers on the same host."""
    host: str | None = None
    """`boot_id()` of that host."""

    def encode(self) -> bytes:
        """Magic and JSON, not yet in base64."""
        fields: dict[str, Any] = {
            "uri": self.uri,
            "offset": self.offset,
            "pos": self.pos,
            "rows": self.rows,
            "dtype": self.dtype,
            "shape": [self.rows, self.layers, self.top_k],
            "crc32": self.crc32,
        }
        if self.path is not None:
            fields["path"] = self.path
        if self.host:
            fields["host"] = self.host
        return MAGIC + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Descriptor:
        """Reads what `encode` wrote; unknown members are ignored.

        Raises:
            FormatError: it is no descriptor, or its numbers do not fit together.
        """
        if not raw.startswith(MAGIC) or len(raw) > MAX_BYTES:
            raise FormatError("it is no R3 descriptor")
        try:
            fields = json.loads(raw[len(MAGIC) :])
            rows, layers, top_k = (int(n) for n in fields["shape"])
            made = cls(
                uri=str(fields["uri"]),
                offset=int(fields["offset"]),
                pos=int(fields["pos"]),
                rows=int(fields["rows"]),
                dtype=str(fields["dtype"]),
                layers=layers,
                top_k=top_k,
                crc32=None if fields["crc32"] is None else int(fields["crc32"]),
                path=fields.get("path"),
                host=fields.get("host"),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"the R3 descriptor cannot be read: {error!r}") from error
        if made.rows != rows or made.dtype not in DTYPES or min(made.offset, made.pos, rows, layers, top_k) < 0:
            raise FormatError(f"the R3 descriptor's numbers do not fit together: {made}")
        return made
