"""`r3router demo` from end to end, on a small load."""

import json
import subprocess
import sys
from pathlib import Path

from processes import environment

FIELDS = {
    *("kind", "name", "arguments", "sent", "completed", "right_replies", "missing_r3", "engine_timeouts", "failures", "wrong_bytes"),
    *("rollouts_per_second", "peak_transfer", "mean_transfer", "mean_running", "router_wait", "engine_wait", "latency"),
    *("router_cores", "harness_cores", "real_seconds", "engines"),
}


def test_the_demo_runs_its_columns_prints_the_table_and_writes_what_it_printed(tmp_path: Path):
    out = tmp_path / "demo.json"
    command = [sys.executable, "-m", "r3router", "demo", "--out", str(out), "--peers", str(tmp_path / "none")]
    # Six rollouts a GPU for two minutes of the fleet's time: enough to complete some, too few to time out.
    small = ["--scale", "30", "--seconds", "120", "--per-gpu", "6"]
    ended = subprocess.run([*command, *small], capture_output=True, text=True, timeout=120, env=environment(), check=False)
    assert out.exists(), ended.stdout + ended.stderr
    report = json.loads(out.read_text("utf-8"))
    assert [column["kind"] for column in report["columns"]] == ["unbounded", "inline", "reference"]
    assert report["left_out"] == ["(a2) sglang-router 0.3.2: not installed"]
    for column in report["columns"]:
        assert column.keys() >= FIELDS
        assert column["completed"] > 0, column
        assert column["right_replies"] == column["completed"], column
        assert (column["wrong_bytes"], column["missing_r3"], column["failures"]) == (0, 0, {})
        assert f"{column['rollouts_per_second']:.2f}" in ended.stdout
    assert "--no-admission" in report["columns"][0]["arguments"]
    assert "scale 1:30:" in ended.stdout
    # 0 exactly when everything holds that the table is to show; so small a load cannot show timeouts.
    held = [criterion["holds"] for criterion in report["criteria"]]
    assert held[1:3] == [True, True], report["criteria"]
    assert ended.returncode == (0 if all(held) else 1)
    assert not held[0]
