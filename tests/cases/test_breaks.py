"""The table of breaks fits the source: each edit still has the one place that it is made for, and each field case has one."""

from __future__ import annotations

import re

import breaks


def test_every_break_has_exactly_one_place_in_the_source() -> None:
    assert breaks.problems() == []


def test_every_case_that_has_tests_has_a_break() -> None:
    for one in breaks.BREAKS:
        where = breaks.ROOT / one.where
        tests = "".join(path.read_text() for path in (where.glob("test_*.py") if where.is_dir() else [where]))
        assert re.search(rf"def \w*{one.tests}", tests), f"{one.case} has no test"
    named = {one.case for one in breaks.BREAKS}
    assert len(named) == len(breaks.BREAKS) == 42
