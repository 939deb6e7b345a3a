"""Commands whose reader has gone, as `head` does after its lines: they end quietly, and what serves goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import Process as Running
from processes import call, environment, free_port, until_ok

COMMANDS = [
    ["r3router", "--help"],
    ["r3router", "version"],
    ["r3router", "serve", "--help"],
    ["r3router", "serve", "--check"],
    ["r3router", "config", "show"],
    ["r3router", "check", "--quick", "--worker-urls", "http://127.0.0.1:1"],
    ["r3router", "check", "--quick", "--json", "--worker-urls", "http://127.0.0.1:1"],
    *(["r3router", name, "--help"] for name in ("check", "top", "emulate", "simulate", "demo", "agent", "sink")),
    ["r3router.launch_router", "--help"],
    ["r3router.shim", "--help"],
    ["r3router.shim", "status"],
    ["r3router.reference", "--help"],
]


def closed() -> int:
    """The writing end of a pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    return writes


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_whose_reader_has_gone_ends_quietly(command: list[str], buffered: bool) -> None:
    out = closed()
    try:
        env = environment() | ({} if buffered else {"PYTHONUNBUFFERED": "1"})
        done = subprocess.run(
            [sys.executable, "-m", *command], stdout=out, stderr=subprocess.PIPE, text=True, env=env, timeout=60, check=False
        )
    finally:
        os.close(out)
    assert done.stderr == ""
    # `argparse` takes a help that nobody reads for read.
    assert done.returncode in (0, 1)


@pytest.mark.parametrize("gone", [True, False], ids=["a reader that has gone", "no output at all"])
def test_a_router_serves_on_when_nobody_reads_what_it_prints(tmp_path: Path, gone: bool) -> None:
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", "0", "--admin-port", "0"]
    command = [sys.executable, "-m", "r3router", "serve", *flags]
    log = tmp_path / "serve.log"
    out = closed() if gone else None
    with log.open("wb") as err:
        shell = command if gone else ["bash", "-c", 'exec "$@" >&-', "bash", *command]
        process = subprocess.Popen(shell, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment())
    running = Running(process, log)
    try:
        until_ok(f"http://127.0.0.1:{port}/health", running)
        assert call(f"http://127.0.0.1:{port}/health")[0] == 200
        assert running.stop() == 0, running.output()
        assert "Traceback" not in running.output()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if out is not None:
            os.close(out)
