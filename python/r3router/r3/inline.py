"""Payloads that come in the reply: cut out of the bytes and decoded while they arrive, so that no JSON parser sees 100 MB of text.

A key and its opening quote cannot stand inside a JSON string, where every quote is escaped; finding those bytes finds the field.
"""

from __future__ import annotations

import binascii
import re
import secrets
from collections.abc import Callable
from typing import Final

from .errors import FormatError

_KEY: Final = re.compile(rb'"(?:routed_experts|indexer_topk)"\s*:\s*"')
# The most bytes of a key's match that may lie in an earlier piece; more blanks than these are not JSON that a server writes.
_OVERLAP: Final = 64
_CHUNK: Final = 1 << 20


def _decoder() -> Callable[[memoryview], bytes]:
    try:
        import pybase64
    except ImportError:
        return binascii.a2b_base64
    decode: Callable[[memoryview], bytes] = pybase64.b64decode
    return decode


_a2b: Final = _decoder()
"""Twice as fast where pybase64 is installed."""


class Scanner:
    """Takes a body in pieces; gives it back without its payloads, and the payloads decoded.

    In the text that `feed` returns, each payload is replaced by a short name; `payloads` maps names to bytes. Memory: the decoded
    bytes, and the largest piece.
    """

    def __init__(self) -> None:
        self.payloads: dict[str, bytearray] = {}
        self._nonce = secrets.token_hex(8)
        self._tail = b""
        self._into: bytearray | None = None
        self._odd = b""
        self._padded = False

    def feed(self, piece: bytes) -> bytes:
        """The next bytes of the body without payloads.

        Raises:
            FormatError: a payload is not base64.
        """
        out = bytearray()
        data = self._tail + piece
        self._tail = b""
        at = 0
        while True:
            if self._into is not None:
                quote = data.find(b'"', at)
                self._decode(memoryview(data)[at : len(data) if quote < 0 else quote])
                if quote < 0:
                    return bytes(out)
                self._close()
                at = quote
            found = _KEY.search(data, at)
            if found is None:
                keep = self._undecided(data, at)
                out += data[at : len(data) - keep]
                self._tail = data[len(data) - keep :]
                return bytes(out)
            name = f"r3-{self._nonce}-{len(self.payloads)}"
            out += data[at : found.end()] + name.encode()
            self._into = self.payloads[name] = bytearray()
            at = found.end()

    def finish(self) -> bytes:
        """The rest of the body, when nothing more comes.

        Raises:
            FormatError: it ended inside a payload.
        """
        if self._into is not None:
            raise FormatError(f"the reply ended inside a payload, after {len(self._into)} bytes of it")
        rest, self._tail = self._tail, b""
        return rest

    @staticmethod
    def _undecided(data: bytes, at: int) -> int:
        """Bytes at the end that a key may begin with."""
        quote = data.rfind(b'"', max(at, len(data) - _OVERLAP))
        while quote >= 0:
            if re.fullmatch(rb'"(?:[a-z_]*|(?:routed_experts|indexer_topk)"\s*(?::\s*)?)', data[quote:]):
                earlier = data.rfind(b'"', max(at, len(data) - _OVERLAP), quote)
                # The quote may close the key's name: then the key begins one quote earlier.
                if earlier >= 0 and data[earlier:].startswith((b'"routed_experts"', b'"indexer_topk"')):
                    return len(data) - earlier
                return len(data) - quote
            quote = data.rfind(b'"', max(at, len(data) - _OVERLAP), quote)
        return 0

    def _decode(self, text: memoryview) -> None:
        into = self._into
        if into is None:
            return
        if self._odd:
            need = 4 - len(self._odd)
            self._odd += bytes(text[:need])
            text = text[need:]
            if len(self._odd) < 4:
                return
            self._quanta(memoryview(self._odd), into)
            self._odd = b""
        whole = len(text) // 4 * 4
        for a in range(0, whole, _CHUNK):
            self._quanta(text[a : min(a + _CHUNK, whole)], into)
        self._odd = bytes(text[whole:])

    def _quanta(self, text: memoryview, into: bytearray) -> None:
        if self._padded and len(text):
            raise FormatError("a payload goes on after its padding")
        padding = bytes(text[-2:]).count(b"=")
        try:
            raw = _a2b(text)
        except ValueError as error:
            raise FormatError(f"a payload is not base64 at byte {len(into)} of it: {error}") from error
        # Decoders skip what is no base64; then bytes are missing.
        if len(raw) != len(text) // 4 * 3 - padding:
            raise FormatError(f"a payload is not base64 at byte {len(into)} of it")
        self._padded = padding > 0
        into += raw

    def _close(self) -> None:
        if self._odd:
            raise FormatError("the base64 text of a payload ends inside a group of four characters")
        self._into = None
        self._padded = False


class Lines:
    """Events of an SSE stream from its pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that is complete now; comments and other fields are left out."""
        self._buffer += piece.replace(b"\r\n", b"\n")
        events: list[bytes] = []
        while True:
            end = self._buffer.find(b"\n\n", max(0, self._searched - 1))
            if end < 0:
                self._searched = len(self._buffer)
                return events
            block = bytes(self._buffer[:end])
            del self._buffer[: end + 2]
            self._searched = 0
            data = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if data:
                events.append(b"\n".join(data))
