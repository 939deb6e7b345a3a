"""A fleet of scripted engines and the rules that no test may break."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from .engine import Engine
from .leg import Leg
from .rooms import Rooms


class Fleet:
    """Engines that share a room table. `check` fails with every rule that was broken."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.engines = list(engines)
        self.violations: list[str] = []
        self.rooms = Rooms(self.violations)

    @classmethod
    def pd(
        cls, *, prefills: int = 1, decodes: int = 1, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
    ) -> Fleet:
        """`prefills` prefill engines and `decodes` decode engines, named P0…, D0…."""
        return cls(
            [
                *(Engine("prefill", f"P{i}", **(prefill or {})) for i in range(prefills)),
                *(Engine("decode", f"D{i}", **(decode or {})) for i in range(decodes)),
            ]
        )

    @property
    def prefills(self) -> list[Engine]:
        """Prefill engines."""
        return [e for e in self.engines if e.role == "prefill"]

    @property
    def decodes(self) -> list[Engine]:
        """Decode engines."""
        return [e for e in self.engines if e.role == "decode"]

    @property
    def p(self) -> Engine:
        """The first prefill engine."""
        return self.prefills[0]

    @property
    def d(self) -> Engine:
        """The first decode engine."""
        return self.decodes[0]

    async def start(self) -> None:
        """All listen."""
        for engine in self.engines:
            await engine.start(self.violations, self.rooms)

    async def stop(self) -> None:
        """All end."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def flags(self) -> list[str]:
        """The router flags that name these engines."""
        flags: list[str] = []
        if any(e.role != "regular" for e in self.engines):
            flags.append("--pd-disaggregation")
        for engine in self.engines:
            if engine.role == "prefill":
                flags += ["--prefill", engine.url, str(engine.bootstrap.port)]
            elif engine.role == "decode":
                flags += ["--decode", engine.url]
        regular = [e.url for e in self.engines if e.role == "regular"]
        return flags + (["--worker-urls", *regular] if regular else [])

    def legs(self, role: str) -> list[Leg]:
        """All legs of one role, in order of arrival."""
        return sorted((leg for e in self.engines if e.role == role for leg in e.legs), key=lambda leg: leg.arrived)

    def pairs(self) -> list[tuple[Leg, Leg]]:
        """Prefill and decode leg of every attempt that reached both sides, by rid."""
        decode = {leg.rid: leg for leg in self.legs("decode")}
        return [(leg, decode[leg.rid]) for leg in self.legs("prefill") if leg.rid in decode]

    def pair_of(self, room: int) -> tuple[Leg, Leg]:
        """The two legs of a room."""
        meeting = self.rooms.meetings[room]
        assert meeting.prefill is not None and meeting.decode is not None, f"room {room} never met"
        return meeting.prefill, meeting.decode

    def posts(self) -> int:
        """Generation requests that reached any engine."""
        return sum(len(e.legs) for e in self.engines)

    async def quiet(self, timeout_s: float = 10.0) -> None:
        """Waits until no leg is open on any engine."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while any(e.open_legs for e in self.engines):
            if loop.time() > end:
                still = [(e.name, leg.rid, leg.closed_at is not None) for e in self.engines for leg in e.legs if leg.ended is None]
                raise AssertionError(f"legs are still open after {timeout_s} s: {still[:10]}")
            await asyncio.sleep(0.01)

    def check(self) -> None:
        """Fails with every broken rule."""
        assert not self.violations, f"{len(self.violations)} rules broken, first: " + "\n".join(self.violations[:10])
