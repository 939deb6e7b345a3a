"""What an agent has: the payload files of its directories, found by id, dropped when released or when their time is over."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from r3router.r3.errors import FormatError
from r3router.r3.format import HEADER_BYTES, Header
from r3router.r3.store import ID, PREFIX, ROUTER, owned

_TOMBSTONES: Final = 100_000
UNFINISHED_SECONDS: Final = 600.0
"""A file that is not complete after so long never will be."""


@dataclass
class Entry:
    """One complete file."""

    path: Path
    header: Header


@dataclass
class Shelf:
    """The files of some directories. `parent` also serves directories that appear later.

    A router's files are read and nothing more: it counts what it keeps, so it alone drops them.
    """

    directories: list[Path]
    parent: Path | None = None
    default_expiry_s: float = 600.0
    expired: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Ids whose time is over, so that asking for them is told from asking for nonsense."""
    expired_count: int = 0
    objects: int = 0
    nbytes: int = 0

    def places(self) -> list[Path]:
        """The directories that are served now."""
        found = list(self.directories)
        if self.parent is not None:
            found += [p for p in self.parent.glob(PREFIX + "*") if p.is_dir() and p not in found]
        return found

    def _own(self) -> list[Path]:
        return [place for place in self.places() if not _routers(place)]

    def state(self, name: str) -> Entry | str | None:
        """The file of an id; `writing`, `expired` or `failed: …`; `None` when there is none.

        Raises:
            FormatError: the file is there and is not a payload.
        """
        if not ID.fullmatch(name):
            return None
        for place in self.places():
            path = place / f"{name}.r3"
            header = _header(path)
            if header is None and path.with_suffix(".tmp").exists():
                return "writing"
            if header is None:
                # It may have been completed between the two looks.
                header = _header(path)
            if header is not None:
                if 0 < header.expires_ms <= time.time() * 1000:
                    if not _routers(place):
                        self._expire(path)
                    return "expired"
                return Entry(path, header)
            with contextlib.suppress(OSError):
                return "failed: " + path.with_suffix(".err").read_text()
        return "expired" if name in self.expired else None

    def delete(self, name: str) -> bool:
        """Drops an id; `False` when there is none."""
        if not ID.fullmatch(name):
            return False
        for place in self._own():
            for suffix in (".r3", ".err"):
                try:
                    (place / f"{name}{suffix}").unlink()
                except FileNotFoundError:
                    continue
                return True
        return False

    def sweep(self) -> None:
        """Drops what has expired, and counts what is left."""
        now = time.time()
        objects = nbytes = 0
        for place in self._own():
            try:
                entries = list(os.scandir(place))
            except OSError:
                continue
            for entry in entries:
                path = Path(entry.path)
                with contextlib.suppress(OSError, FormatError):
                    status = entry.stat()
                    if path.suffix == ".r3":
                        header = _header(path)
                        limit = (header.expires_ms / 1000 if header.expires_ms else 0.0) if header else 0.0
                        if limit and limit <= now:
                            self._expire(path)
                            continue
                        objects += 1
                        nbytes += status.st_size
                    elif (path.suffix == ".tmp" and now - status.st_mtime > UNFINISHED_SECONDS) or (
                        path.suffix == ".err" and now - status.st_mtime > self.default_expiry_s
                    ):
                        path.unlink(missing_ok=True)
        self.objects, self.nbytes = objects, nbytes

    def abandoned(self) -> bool:
        """Whether nothing is left in any directory; `True` also when they are gone."""
        for place in self._own():
            with contextlib.suppress(OSError):
                if any(entry.name.endswith((".r3", ".tmp")) for entry in os.scandir(place)):
                    return False
        return True

    def remove(self) -> None:
        """Removes the directories that only this agent owns."""
        for place in self.directories:
            if _routers(place):
                continue
            shutil.rmtree(place, ignore_errors=True)

    def _expire(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.expired[path.stem] = time.time()
        self.expired_count += 1
        while len(self.expired) > _TOMBSTONES:
            self.expired.popitem(last=False)


def _routers(place: Path) -> bool:
    return place.name.startswith(ROUTER)


def _header(path: Path) -> Header | None:
    try:
        with path.open("rb") as file:
            return Header.unpack(file.read(HEADER_BYTES))
    except OSError:
        return None


__all__ = ["Entry", "Shelf", "owned"]
