"""A tiny PD router in the test's own process, right by default and wrong on demand: it proves that the fakes see each fault."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass
from typing import Any

from .client import Client, Response
from .fleet import Fleet


@dataclass
class Faults:
    """What the mini router does wrong."""

    room: int | None = None
    rid: str | None = None
    decode_rid: str | None = None
    room_shift: int = 0
    ranks: bool = True
    routed: int | None = None
    asked: int | None = None
    bootstrap_port: int | None = None
    keep_n: bool = False
    decode_room_text: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


class MiniRouter:
    """Sends both legs of one call."""

    def __init__(self, fleet: Fleet, faults: Faults | None = None) -> None:
        self.fleet = fleet
        self.faults = faults or Faults()
        self.p = Client(fleet.p.server.port)
        self.d = Client(fleet.d.server.port)
        self._next = 0

    def bodies(self, body: dict[str, Any]) -> tuple[bytes, bytes]:
        """The two legs' bodies."""
        faults, prefill, decode = self.faults, self.fleet.p, self.fleet.d
        p_rank = self._next % prefill.dp_size
        d_rank = self._next % decode.dp_size
        self._next += 1
        room = faults.room
        if room is None:
            room = secrets.randbelow(2**60) * prefill.dp_size + p_rank + prefill.dp_size
        room += faults.room_shift
        shared = {
            **body,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": faults.bootstrap_port or prefill.bootstrap.port,
            "bootstrap_room": room,
            "rid": faults.rid or secrets.token_hex(16),
        }
        p_body, d_body = dict(shared), dict(shared)
        if faults.ranks:
            p_body["routed_dp_rank"] = p_rank if faults.routed is None else faults.routed
            d_body["routed_dp_rank"] = d_rank
            d_body["disagg_prefill_dp_rank"] = p_rank if faults.asked is None else faults.asked
        if faults.decode_rid:
            d_body["rid"] = faults.decode_rid
        d_text = json.dumps(d_body)
        if faults.decode_room_text:
            d_text = d_text.replace(f'"bootstrap_room": {room}', f'"bootstrap_room": {faults.decode_room_text}')
        return json.dumps(p_body).encode(), d_text.encode()

    async def call(self, body: dict[str, Any], path: str = "/generate") -> tuple[Response, Response]:
        """One call; both answers."""
        p_body, d_body = self.bodies(body)
        headers = list(self.faults.headers)
        p_answer, d_answer = await asyncio.gather(self.p.post(path, p_body, headers), self.d.post(path, d_body, headers))
        return p_answer, d_answer

    def close(self) -> None:
        """Leaves."""
        self.p.close()
        self.d.close()
