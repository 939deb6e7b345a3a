"""r3router beside sglang-router 0.3.2: the same calls, the same scripted engines, in turn. What each engine received and what the client
got are equal but for the differences that `differences.py` lists, each with its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .diff import MISSING, Difference, Found, compare
from .differences import DIFFERENCES
from .sides import OURS, PEER, THEIRS, side
from .table import table

CALL_TIMEOUT_S = 30.0
MODES = ("regular", "pd")
CALLS = [(mode, call.name) for mode in MODES for call in table(mode)]

pytestmark = pytest.mark.skipif(not PEER.exists(), reason="sglang-router is not installed; run `make peer-sglang-router`")


async def record(name: str, mode: str, folder: Path) -> dict[str, Any]:
    """Every call of a mode against one router."""
    async with side(name, mode, folder) as router:
        return {call.name: await asyncio.wait_for(router.run(call), CALL_TIMEOUT_S) for call in table(mode)}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """By mode and router. The routers run one after the other: they would take each other's time."""
    folder = tmp_path_factory.mktemp("dropin")
    return {mode: {name: asyncio.run(record(name, mode, folder)) for name in (THEIRS, OURS)} for mode in MODES}


def found(records: dict[str, dict[str, dict[str, Any]]], mode: str, call: str) -> list[Found]:
    return list(compare(records[mode][THEIRS][call], records[mode][OURS][call]))


@pytest.mark.parametrize(("mode", "call"), CALLS, ids=[f"{mode}-{call}" for mode, call in CALLS])
def test_a_call_is_answered_and_passed_on_as_by_the_peer(records: Any, mode: str, call: str) -> None:
    unlisted = [one for one in found(records, mode, call) if not any(d.covers(mode, call, one) for d in DIFFERENCES)]
    assert not unlisted, "differences that are not listed:\n" + "\n".join(map(str, unlisted))


@pytest.mark.parametrize("nth", range(len(DIFFERENCES)), ids=lambda nth: f"{nth}-{DIFFERENCES[nth].where[0]}")
def test_a_listed_difference_occurs(records: Any, nth: int) -> None:
    listed = DIFFERENCES[nth]
    everything = [(mode, call, one) for mode, call in CALLS for one in found(records, mode, call)]
    for where in listed.where:
        for name in listed.calls:
            for mode in listed.modes:
                alone = Difference((where,), (name,), listed.why, listed.case, (mode,))
                assert any(alone.covers(*one) for one in everything), f"{where} of {name} is the same in {mode} mode; take it off the list"


def test_every_difference_says_why() -> None:
    for listed in DIFFERENCES:
        assert len(listed.why) > 20, listed


def test_calls_have_names_of_their_own() -> None:
    for mode in MODES:
        names = [call.name for call in table(mode)]
        assert len(names) == len(set(names))


def test_the_comparison_finds_what_differs() -> None:
    same = {"a": [1, {"b": None}], "c": "x"}
    assert list(compare(same, {"c": "x", "a": [1, {"b": None}]})) == []
    got = list(compare({"a": [1, 2], "b": {"c": 1}, "d": 1, "e": [1]}, {"a": [1, 3], "b": {}, "d": 1.0, "e": []}))
    assert got == [Found("a.1", 2, 3), Found("b.c", 1, MISSING), Found("d", 1, 1.0), Found("e", [1], [])]
