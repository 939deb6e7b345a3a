"""HTTP/1.1 as bytes: heads and body framing, without a library that would tidy up what the tests want to see."""

from __future__ import annotations

from dataclasses import dataclass, field

HeaderList = list[tuple[str, str]]


class ProtocolError(Exception):
    """The peer sent something that is not HTTP/1.1, or contradicts itself."""


@dataclass
class Head:
    """A request or response head. `start` is the first line without its line end."""

    start: str
    headers: HeaderList
    raw: bytes

    def get(self, name: str) -> str | None:
        """First value of a header, by lower-case name."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    def all(self, name: str) -> list[str]:
        """Every value of a header, by lower-case name."""
        return [value for key, value in self.headers if key.lower() == name]


def parse_head(raw: bytes) -> Head:
    """Parses a head that ends with an empty line."""
    text = raw.decode("latin-1")
    lines = text[:-4].split("\r\n")
    headers: HeaderList = []
    for line in lines[1:]:
        name, sep, value = line.partition(":")
        if not sep or name != name.strip():
            raise ProtocolError(f"bad header line {line!r}")
        headers.append((name, value.strip()))
    return Head(lines[0], headers, raw)


def framing_of(head: Head, *, response: bool) -> tuple[str, int]:
    """`("length", n)`, `("chunked", 0)`, `("none", 0)` or `("close", 0)`; refuses both framings at once."""
    lengths = head.all("content-length")
    encodings = [e.lower() for e in head.all("transfer-encoding")]
    if encodings and lengths:
        raise ProtocolError("content-length together with transfer-encoding")
    if len(set(lengths)) > 1:
        raise ProtocolError(f"contradicting content-length {lengths}")
    if encodings:
        if encodings != ["chunked"]:
            raise ProtocolError(f"unknown transfer-encoding {encodings}")
        return "chunked", 0
    if lengths:
        return "length", int(lengths[0])
    return ("close", 0) if response else ("none", 0)


@dataclass
class Body:
    """Collects one body. `chunks` keeps the chunk boundaries when the framing is chunked."""

    framing: str
    length: int = 0
    data: bytearray = field(default_factory=bytearray)
    chunks: list[bytes] = field(default_factory=list)
    done: bool = False
    _pending: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        if self.framing == "none" or (self.framing == "length" and self.length == 0):
            self.done = True

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """Takes what belongs to the body and returns the rest."""
        if self.framing == "close":
            self.data += data
            return b""
        if self.framing == "length":
            missing = self.length - len(self.data)
            if len(data) <= missing:
                self.data += data
                self.done = len(self.data) == self.length
                return b""
            self.data += memoryview(data)[:missing]
            self.done = True
            return bytes(memoryview(data)[missing:])
        self._pending += data
        return self._feed_chunked()

    def _feed_chunked(self) -> bytes:
        pending = self._pending
        at = 0
        while True:
            eol = pending.find(b"\r\n", at)
            if eol < 0:
                break
            try:
                size = int(bytes(pending[at:eol]).split(b";")[0], 16)
            except ValueError as error:
                raise ProtocolError(f"bad chunk size {bytes(pending[at:eol])!r}") from error
            if size == 0:
                # No trailers are expected: an empty line follows.
                if len(pending) < eol + 4:
                    break
                if pending[eol + 2 : eol + 4] != b"\r\n":
                    raise ProtocolError("trailers after the last chunk")
                rest = bytes(pending[eol + 4 :])
                pending.clear()
                self.done = True
                return rest
            end = eol + 2 + size
            if len(pending) < end + 2:
                break
            if pending[end : end + 2] != b"\r\n":
                raise ProtocolError("chunk without line end")
            chunk = bytes(pending[eol + 2 : end])
            self.chunks.append(chunk)
            self.data += chunk
            at = end + 2
        del pending[:at]
        return b""


def chunk(data: bytes) -> bytes:
    """One chunk on the wire. An empty chunk would end the body, so it is refused."""
    if not data:
        raise ValueError("an empty chunk ends the body")
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
