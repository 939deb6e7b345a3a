"""A directory of payload files that one process writes: a byte cap that is never passed, unguessable ids, and an owner.

Who reads need not know it: files are found by their path, and deleted by the owner's agent (`r3router.agent`) or by its router.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import host
from .format import HEADER_BYTES, Header, numpy_dtype

SHM: Final = Path("/dev/shm")  # noqa: S108 - shared memory is the point
PREFIX: Final = "r3router-"
ROUTER: Final = "r3router-store-"
"""How a router's directories begin. They are the router's own: it holds a lock on their `owner` file, which is no list of processes, and
removes them itself."""
OWNER: Final = "owner"
COUNTS: Final = "plugin.json"
"""What a plug-in counts, for its agent's metrics."""
ID: Final = re.compile(r"[0-9a-f]{16,64}")
_PAGE: Final = 4096
# What other users of shared memory (NCCL, torch loaders) must find free.
_SHM_FLOOR: Final = 64 << 20


class ArenaFull(Exception):
    """The payload does not fit under the cap, or shared memory itself is full."""


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class StoreDir:
    """Files of one writer in one directory."""

    def __init__(self, path: Path, cap_bytes: int, *, group: int | None = None) -> None:
        """Makes the directory, mode 0700, or 0750 with a group whose members may read.

        Raises:
            OSError: it cannot be made.
        """
        self.path = path
        self.cap = cap_bytes
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._used = 0
        self._mode = 0o600 if group is None else 0o640
        self._group = group
        path.mkdir(mode=0o700 if group is None else 0o750, parents=True, exist_ok=True)
        if group is not None:
            os.chown(path, -1, group)
        add_owner(path)

    @property
    def used(self) -> int:
        """Bytes of files that were alive at the last look, in whole pages."""
        return self._used

    def rescan(self) -> int:
        """Forgets files that the agent has deleted; the bytes still in use."""
        try:
            there = {entry.name.partition(".")[0] for entry in os.scandir(self.path)}
        except FileNotFoundError:
            there = set()
        with self._lock:
            for name in [n for n in self._sizes if n not in there]:
                self._used -= self._sizes.pop(name)
            return self._used

    def reserve(self, header: Header) -> Writing:
        """Takes a place for a payload and creates its unfinished file, so that readers know that it is coming.

        Raises:
            ArenaFull: no room.
            OSError: the file cannot be made.
        """
        size = _pages(HEADER_BYTES + header.nbytes)
        with self._lock:
            full = self._used + size > self.cap
        if full and self.rescan() + size > self.cap:
            raise ArenaFull(f"{size} bytes do not fit: {self._used} of {self.cap} are in use")
        room = os.statvfs(self.path)
        if room.f_bavail * room.f_frsize < size + _SHM_FLOOR:
            raise ArenaFull(f"{self.path.parent} has {room.f_bavail * room.f_frsize} bytes left, {size} are wanted")
        name = secrets.token_hex(16)
        writing = Writing(self, name, replace(header, complete=False))
        fd = os.open(writing.tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        try:
            if self._group is not None:
                os.fchown(fd, -1, self._group)
            os.pwrite(fd, writing.header.pack(), 0)
        finally:
            os.close(fd)
        with self._lock:
            self._sizes[name] = size
            self._used += size
        return writing

    def remove(self) -> None:
        """Removes the directory with all that is in it; open mappings stay valid."""
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass
class Writing:
    """A payload that is being written."""

    store: StoreDir
    id: str
    header: Header

    @property
    def tmp(self) -> Path:
        """The unfinished file."""
        return self.store.path / f"{self.id}.tmp"

    @property
    def path(self) -> Path:
        """The finished file."""
        return self.store.path / f"{self.id}.r3"

    def write(self, tiles: Iterable[NDArray[Any]]) -> Header:
        """Writes rows, tile after tile, narrowing them; then completes the file. The header with its checksum.

        Raises:
            ValueError: an id does not fit the dtype, or the tiles have other rows than the header says.
            OSError: shared memory is full.
        """
        header = self.header
        dtype = numpy_dtype(header.dtype)
        most = int(np.iinfo(dtype).max)
        crc = 0
        fd = os.open(self.tmp, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = HEADER_BYTES + header.nbytes
            # A write that finds no page would be a SIGBUS; this is an error instead.
            os.posix_fallocate(fd, 0, size)
            rows = np.frombuffer(mmap.mmap(fd, size), dtype, offset=HEADER_BYTES).reshape(header.rows, header.layers, header.top_k)
            at = 0
            for tile in tiles:
                if tile.dtype.itemsize > dtype.itemsize and tile.size:
                    low, high = int(tile.min()), int(tile.max())
                    if low < 0 or high > most:
                        raise ValueError(f"ids {low}..{high} do not fit into {header.dtype}")
                part = rows[at : at + len(tile)]
                if part.shape != tile.shape:
                    raise ValueError(f"a tile of shape {tile.shape} at row {at} does not fit into {rows.shape}")
                part[...] = tile
                crc = zlib.crc32(part.reshape(-1).view(np.uint8).data, crc)
                at += len(tile)
            if at != header.rows:
                raise ValueError(f"{at} rows were written, {header.rows} were promised")
            done = replace(header, crc32=crc, complete=True)
            os.pwrite(fd, done.pack(), 0)
        finally:
            os.close(fd)
        self.tmp.rename(self.path)
        return done

    def fail(self, why: str) -> None:
        """Leaves the reason in the place of the rows, for the agent to tell whoever asks for them."""
        with contextlib.suppress(OSError):
            (self.store.path / f"{self.id}.err").write_text(why[:1000])
        self.tmp.unlink(missing_ok=True)


def new_header(rows: int, layers: int, top_k: int, dtype: str, *, start: int, expires_s: float, rid: str, weight_version: str) -> Header:
    """A header of this moment."""
    now = int(time.time() * 1000)
    return Header(
        dtype=dtype,
        layers=layers,
        top_k=top_k,
        start=start,
        rows=rows,
        created_ms=now,
        expires_ms=now + int(expires_s * 1000) if expires_s > 0 else 0,
        rid=rid,
        weight_version=weight_version,
    )


def add_owner(path: Path, pid: int | None = None) -> None:
    """Writes a process into the directory's `owner` file; the directory lives as long as one of them does."""
    fd = os.open(path / OWNER, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, host.owner_line(pid).encode() + b"\n")
    finally:
        os.close(fd)


def owned(path: Path) -> bool:
    """Whether an owner of the directory lives. One without an `owner` file is somebody else's, or being made: it counts as owned."""
    try:
        lines = (path / OWNER).read_text().splitlines()
    except OSError:
        return True
    return any(host.alive(line) for line in lines)


def reclaim(parent: Path = SHM) -> list[Path]:
    """Removes directories of engines and agents whose owners are all dead; which ones."""
    removed = []
    for path in sorted(parent.glob(PREFIX + "*")):
        if path.name.startswith(ROUTER):
            continue
        with contextlib.suppress(OSError):
            if path.is_dir() and path.stat().st_uid == os.getuid() and not owned(path):
                shutil.rmtree(path)
                removed.append(path)
    return removed
