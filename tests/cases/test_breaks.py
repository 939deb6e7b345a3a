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
    assert len(named) == len(breaks.BREAKS) == 41


def test_the_page_has_a_row_of_every_break_and_each_was_caught() -> None:
    rows = breaks.page_rows()
    assert list(rows) == [one.case for one in breaks.BREAKS]
    assert [row for row in rows.values() if "NOT CAUGHT" in row] == []
    for one in breaks.BREAKS:
        assert one.what in rows[one.case] and one.file in rows[one.case], f"{one.case} was not run as it is now"
