"""Pages that are made from the code and from results."""

from pathlib import Path

import pytest

from r3router.reference import BEGIN, END, PAGES, demo_table, drifted, put_table, write

ROOT = Path(__file__).parents[2]

REPORT = {
    "options": {
        "prefill": 4,
        "decode": 4,
        "per_gpu": 96,
        "cached_tokens": 54_000,
        "families": 96,
        "new_tokens": [1_800, 4_200],
        "output_tokens": 120,
        "engine_version": "0.5.23",
        "scale": 30.0,
        "seconds": 1800.0,
    },
    "machine": "a machine",
    "date": "2026-01-02",
    "columns": [
        {
            "name": "unbounded router",
            "completed": 7,
            "engine_timeouts": 8,
            "wrong_bytes": 9,
            "rollouts_per_second": 0.125,
            "peak_transfer": 50,
            "mean_running": 6.5,
            "router_wait": [0.0, 0.1],
            "engine_wait": [100.0, 299.96],
            "missing_r3": 0,
            "failures": {},
        }
    ],
    "left_out": ["(a2) sglang-router 0.3.2: not installed"],
}


def test_the_incident_table_says_what_ran_where_and_when():
    lines = demo_table(REPORT).splitlines()
    assert "54,000 shared (96 prefixes) and 1,800 to 4,200 new prompt tokens" in lines[0]
    assert "a machine, 2026-01-02, at scale 1:30:" in lines[0]
    assert lines[4] == "| unbounded router | 7 | 8 | 9 | 0.12 | 50 | 6.5 | 0.0 / 0.1 | 100.0 / 300.0 |"
    assert lines[-1] == "Left out: (a2) sglang-router 0.3.2: not installed."


def test_what_a_row_leaves_unsaid_stands_below_the_table():
    refused = '503: {"error":{"type":"Service Unavailable","code":"server_selection_failed","mess'
    failures = {refused: 2_000, "client gone": 1}
    column = {**REPORT["columns"][0], "name": "peer", "completed": 1_111, "missing_r3": 1_110, "failures": failures}
    lines = demo_table({**REPORT, "columns": [*REPORT["columns"], column], "left_out": []}).splitlines()
    assert lines[-1] == (
        "- peer: 1,110 of its 1,111 replies had no R3, and each byte that is missing counts as wrong; "
        "2,000 requests got 503 `server_selection_failed`; 1 requests got client gone."
    )
    assert not any(line.startswith("- unbounded") for line in lines)


def test_the_table_goes_between_the_markers_and_nothing_else_changes():
    readme = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = put_table(readme, "new\n")
    assert once == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert put_table(once, "new") == once
    with pytest.raises(SystemExit, match="lacks the markers"):
        put_table("no markers", "new")
    assert put_table((ROOT / "README.md").read_text("utf-8"), "x").count("\nx\n") == 1


def test_a_page_that_differs_is_found_and_written(tmp_path: Path):
    assert drifted(tmp_path) == list(PAGES)
    assert write(tmp_path) == list(PAGES)
    page = tmp_path / "python" / "SETTINGS.md"
    page.write_text(page.read_text("utf-8").replace("`30000`", "`30001`"), "utf-8")
    assert drifted(tmp_path) == ["python/SETTINGS.md"]
