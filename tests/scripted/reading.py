"""What an engine reads of a request, and the rules that hold for every leg."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import orjson

from .leg import prompt_tokens

if TYPE_CHECKING:
    from .engine import Engine
    from .leg import Leg

ROOM_TEXT = re.compile(rb'"bootstrap_room"\s*:\s*([^,}\s]+)\s*[,}]')
MAX_ROOM = 2**63 - 1
SMALL_BODY = 1 << 16


def read(engine: Engine, leg: Leg) -> None:
    """Reads the fields that an engine reads, and checks the rules that hold for every leg."""
    raw = leg.raw
    try:
        body = orjson.loads(raw)
    except ValueError:
        try:
            body = json.loads(raw)  # Lone surrogates: Python servers take them.
        except ValueError as error:
            body = {}
            violation(engine, leg, f"body is not JSON ({error}): {raw[:200]!r}")
    if not isinstance(body, dict):
        violation(engine, leg, "body is not an object")
        body = {}
    leg.body = body
    if len(raw) <= SMALL_BODY:
        _check_duplicate_keys(engine, leg)
    leg.rid = body.get("rid") or ""
    leg.prompt_tokens = prompt_tokens(body) + engine.expands
    _check_single(engine, leg)
    if engine.role == "regular":
        leg.rid = leg.rid or f"engine-made-{len(engine.legs)}"
        leg.rank = _rank(engine, leg, None)
        return
    if not isinstance(leg.rid, str) or not leg.rid:
        violation(engine, leg, f"rid is {leg.rid!r}")
        leg.rid = f"none-{len(engine.legs)}"
    leg.room = _room(engine, leg)
    leg.rank = _rank(engine, leg, leg.room)
    leg.asked_rank = body.get("disagg_prefill_dp_rank")
    if engine.role == "prefill" and engine.dp_size > 1 and engine.strict_pairs and body.get("routed_dp_rank") is None:
        violation(engine, leg, "prefill leg without routed_dp_rank")


def _check_duplicate_keys(engine: Engine, leg: Leg) -> None:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        if len(set(names)) != len(names):
            violation(engine, leg, f"duplicate keys {sorted({n for n in names if names.count(n) > 1})}")
        return dict(items)

    if leg.body:
        json.loads(leg.raw, object_pairs_hook=pairs)


def _check_single(engine: Engine, leg: Leg) -> None:
    body = leg.body
    sampling = body.get("sampling_params")
    n = (sampling.get("n") if isinstance(sampling, dict) else None) or body.get("n") or 1
    ids = body.get("input_ids")
    batch = isinstance(body.get("text"), list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
    if engine.role != "regular" and (n != 1 or batch):
        violation(engine, leg, f"a PD leg with n={n}, batch={batch}: one room for several samples")


def _room(engine: Engine, leg: Leg) -> int:
    room = leg.body.get("bootstrap_room")
    if type(room) is not int or not 1 <= room <= MAX_ROOM:
        violation(engine, leg, f"bootstrap_room is {room!r}")
        return 0
    found = ROOM_TEXT.findall(leg.raw) if len(leg.raw) <= SMALL_BODY else [str(room).encode()]
    # Unknown fields of the client may hold a member of the same name further in.
    written = [text.decode() for text in found]
    leg.room_text = str(room) if str(room) in written else "".join(written[:1])
    if leg.room_text != str(room):
        violation(engine, leg, f"bootstrap_room is written {leg.room_text!r}")
    return room


def _rank(engine: Engine, leg: Leg, room: int | None) -> int:
    rank = leg.body.get("routed_dp_rank", leg.body.get("data_parallel_rank"))
    header = leg.request.header("x-data-parallel-rank")
    if header is not None and leg.request.path != "/generate":
        rank = int(header)  # On OpenAI routes the header beats the body.
    if rank is None:
        if room is None:
            engine.turn += 1
            return engine.turn % engine.dp_size
        return room % engine.dp_size
    if type(rank) is not int or not 0 <= rank < engine.dp_size:
        violation(engine, leg, f"rank {rank!r} outside 0..{engine.dp_size}")
        return 0
    return rank


def violation(engine: Engine, leg: Leg, text: str) -> None:
    """Notes a rule that the router broke."""
    engine.violations.append(f"{engine.name} {leg.request.path} rid={leg.rid!r}: {text}")
