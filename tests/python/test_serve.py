"""The router process: it starts without engines, ends as asked, and lets Python run."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import STOP_TIMEOUT_S, call, environment, free_port, serving, started


@pytest.mark.parametrize("mode", [["--pd-disaggregation"], []])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_without_engines_and_ends_with_0(tmp_path: Path, mode: list[str], how: int):
    with serving(tmp_path, *mode) as (url, process):
        assert call(url + "/liveness")[0] == 200
        assert call(url + "/readiness")[0] == 503
        status, answer = call(url + "/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}})
        assert (status, answer["error"]["code"]) == (503, "no_available_workers")
        assert process.stop(how) == 0, process.output()


def test_a_port_that_is_taken_is_named_and_ends_with_1(tmp_path: Path):
    with serving(tmp_path) as (url, _):
        port = url.rpartition(":")[2]
        with started(tmp_path / "second.log", sys.executable, "-m", "r3router", "serve", "--host", "127.0.0.1", "--port", port) as second:
            assert second.process.wait(STOP_TIMEOUT_S) == 1
            assert "Error: " in second.output()
            assert port in second.output()
            assert "Traceback" not in second.output()


def test_settings_come_from_a_file_too(tmp_path: Path):
    port = free_port()
    file = tmp_path / "r3router.toml"
    file.write_text(f'host = "127.0.0.1"\nport = {port}\nprometheus_port = 0\npd_disaggregation = true\n')
    with serving(tmp_path, "--config", str(file)) as (url, _):
        assert call(url + "/health")[0] == 200


PYTHON_BESIDE_THE_ROUTER = """
import json, sys, threading
from r3router.native import core

ticks = 0

def tick():
    global ticks
    while True:
        ticks += 1
        threading.Event().wait(0.001)

sources = json.dumps({"flags": {"host": "127.0.0.1", "port": int(sys.argv[1]), "prometheus_port": 0}})
threading.Thread(target=tick, daemon=True).start()
threading.Thread(target=core.serve, args=(sources,), daemon=True).start()
for _ in sys.stdin:
    print(ticks, flush=True)
"""


def test_python_runs_on_while_requests_flow(tmp_path: Path):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", PYTHON_BESIDE_THE_ROUTER, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = f"http://127.0.0.1:{port}/health"
        while call(url)[0] != 200:
            assert process.poll() is None
        assert process.stdout.readline() == f"r3router listens on http://127.0.0.1:{port}\n"
        seen = []
        for _ in range(3):
            for _ in range(50):
                assert call(url)[0] == 200
            # A held interpreter lock would leave this question without an answer, and the ticks where they were.
            print("ticks?", file=process.stdin, flush=True)
            seen.append(int(process.stdout.readline()))
        assert seen[0] < seen[1] < seen[2]
    finally:
        process.kill()
        process.wait()
