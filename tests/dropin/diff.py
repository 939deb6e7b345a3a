"""Where two records differ, and whether that was expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


class _Missing:
    def __repr__(self) -> str:
        return "(absent)"


MISSING = _Missing()


@dataclass(frozen=True)
class Found:
    """One place at which the records of a call differ."""

    where: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.where}: sglang-router {self.theirs!r:.300}, r3router {self.ours!r:.300}"


@dataclass(frozen=True)
class Difference:
    """A difference that is meant. `where` is a path of the record and may hold `*`; so may the names of calls."""

    where: tuple[str, ...]
    calls: tuple[str, ...]
    why: str
    case: str = ""
    modes: tuple[str, ...] = ("regular", "pd")

    def covers(self, mode: str, call: str, found: Found) -> bool:
        named = mode in self.modes and any(fnmatchcase(call, name) for name in self.calls)
        return named and any(fnmatchcase(found.where, where) for where in self.where)


def compare(theirs: Any, ours: Any, where: str = "") -> Iterator[Found]:
    """Every place at which two JSON values differ; lists of other lengths differ as a whole."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in dict.fromkeys([*theirs, *ours]):
            yield from compare(theirs.get(key, MISSING), ours.get(key, MISSING), f"{where}.{key}" if where else key)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for nth, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from compare(one, other, f"{where}.{nth}")
    elif type(theirs) is not type(ours) or theirs != ours:
        yield Found(where, theirs, ours)
