"""The table of breaks fits the source: each edit still has the one place that it is made for, and each field case has one."""

from __future__ import annotations

from pathlib import Path

import breaks


def test_every_break_has_exactly_one_place_in_the_source() -> None:
    assert breaks.problems() == []


def test_every_case_that_has_tests_has_a_break() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for one in breaks.BREAKS:
        assert f"def {one.tests}" in tests, f"{one.case} has no test"
    named = {(one.tests, one.where) for one in breaks.BREAKS}
    assert len(named) == len(breaks.BREAKS) == 34
