"""The room table and the rendezvous that real engines hold over the wire: both legs of a room must meet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .leg import Leg


class Meeting:
    """One room: its two legs, and the two moments that they wait for."""

    def __init__(self) -> None:
        self.prefill: Leg | None = None
        self.decode: Leg | None = None
        self.both = asyncio.get_running_loop().create_future()
        self.delivered = asyncio.get_running_loop().create_future()


class Rooms:
    """Shared by all engines of a fleet. A room is used by one attempt, ever."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = violations
        self.meetings: dict[int, Meeting] = {}
        self.rid_of: dict[int, str] = {}

    def enter(self, leg: Leg) -> Meeting:
        """A leg arrives. A second leg of the same role in one room, or a room that another attempt had, is a violation."""
        owner = self.rid_of.setdefault(leg.room, leg.rid)
        if owner != leg.rid:
            self.violations.append(f"room {leg.room} of {owner!r} is used again by {leg.rid!r}")
        meeting = self.meetings.get(leg.room)
        if meeting is None:
            meeting = self.meetings[leg.room] = Meeting()
        role = leg.engine.role
        if getattr(meeting, role) is not None:
            self.violations.append(f"duplicate room {leg.room}: a second {role} leg ({leg.rid!r}, first {getattr(meeting, role).rid!r})")
        setattr(meeting, role, leg)
        if meeting.prefill is not None and meeting.decode is not None and not meeting.both.done():
            self._compare(meeting.prefill, meeting.decode)
            meeting.both.set_result(None)
        return meeting

    def forget(self) -> None:
        """Lets go of rooms whose legs have met; whoever still waits for the other half keeps its room."""
        self.meetings = {room: meeting for room, meeting in self.meetings.items() if not meeting.both.done()}

    def _compare(self, prefill: Leg, decode: Leg) -> None:
        """What must agree between the two legs, or the KV never arrives."""
        room = f"room {prefill.room}"
        if prefill.rid != decode.rid:
            self.violations.append(f"{room}: prefill has rid {prefill.rid!r}, decode {decode.rid!r}")
        if prefill.room_text != decode.room_text:
            self.violations.append(f"{room}: written {prefill.room_text} for prefill and {decode.room_text} for decode")
        if decode.asked_rank is not None and decode.asked_rank != prefill.rank:
            self.violations.append(f"{room}: decode asks prefill rank {decode.asked_rank}, the KV is on rank {prefill.rank}")
        implied = prefill.room % prefill.engine.dp_size
        if implied != prefill.rank:
            self.violations.append(f"{room} implies prefill rank {implied}, the leg went to rank {prefill.rank}")
        address = (decode.body.get("bootstrap_host"), decode.body.get("bootstrap_port"))
        if address != prefill.engine.bootstrap_address:
            self.violations.append(f"{room}: decode was sent to bootstrap {address}, prefill is {prefill.engine.bootstrap_address}")
