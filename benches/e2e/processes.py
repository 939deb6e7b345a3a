"""Starts the processes of a benchmark, measures them from outside, and stops them by their ids."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


def free_port() -> int:
    """A loopback TCP port that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Measured:
    """One process group seen from outside."""

    process: subprocess.Popen[bytes]
    log: Path

    def _pids(self) -> list[int]:
        """The process and its children (a peer may start its server as one)."""
        pids = [self.process.pid]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    pids.extend(int(child) for child in task.read_text().split())
        return pids

    def cpu_seconds(self) -> float:
        """User and system time of all threads that live, seconds, children included, to the nanosecond as the scheduler counts it."""
        total = 0
        for pid in self._pids():
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    total += int(task.read_text().split()[0])
        return total / 1e9

    def memory_mb(self, field: str) -> float:
        """A field of /proc/PID/status (`VmRSS`, `VmHWM`), MB, summed over the group."""
        total = 0.0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith(field + ":"):
                        total += int(line.split()[1]) * 1024 / 1e6
        return total

    def reset_peak(self) -> None:
        """Makes VmHWM start anew from the present size."""
        for pid in self._pids():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def log_tail(self, lines: int = 15) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def environment() -> dict[str, str]:
    """The environment without proxies, which peers would send loopback traffic to."""
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    return env | {"HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, wait_line: bytes | None = None
) -> Iterator[Measured]:
    """Runs `command` in a process group of its own, waits for `wait_line` on its output if asked, ends the group at exit."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command), stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=dict(env or environment())
        )
        measured = Measured(process, log)
        try:
            if wait_line is not None:
                wait_until(lambda: wait_line in log.read_bytes(), f"{command} to print {wait_line!r}", measured)
            yield measured
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the group, SIGKILL after 5 s."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
            return


def wait_until(ready: Callable[[], bool], what: str, measured: Measured, seconds: float = 60.0) -> None:
    """Polls `ready()` until it is true; raises with the process's output when it ends or takes too long."""
    deadline = time.monotonic() + seconds
    while not ready():
        if measured.process.poll() is not None:
            raise RuntimeError(f"waited for {what}, but the process ended:\n{measured.log_tail()}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:.0f} s for {what}:\n{measured.log_tail()}")
        time.sleep(0.05)


def answers(url: str, body: bytes | None = None) -> bool:
    """Whether a request to `url` gets 200."""
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as reply:
            reply.read()
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def r3router_python() -> str:
    """The interpreter that has r3router installed."""
    return os.environ.get("R3ROUTER_PYTHON", sys.executable)


def peer_python(name: str) -> str | None:
    """The interpreter of a peer's environment (`R3ROUTER_PEERS/NAME`), or None when it is not installed."""
    path = Path(os.environ.get("R3ROUTER_PEERS", ".venv-peers")) / name / "bin" / "python"
    return str(path) if path.exists() else None
