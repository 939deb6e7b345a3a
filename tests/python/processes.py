"""Starts `python -m r3router …` on free ports and stops it by its id."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def environment() -> dict[str, str]:
    """The environment without settings of a router."""
    return {name: value for name, value in os.environ.items() if not name.startswith("R3ROUTER_")}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Process:
    """One running command, its output in a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits for a line of output."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            found = re.search(pattern, self.output())
            if found:
                return found
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.output()}"
            time.sleep(0.01)

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Its exit status after `how`."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def started(log: Path, *command: str) -> Iterator[Process]:
    """Runs a command; kills it at exit if it still lives."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment())
    try:
        yield Process(process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serving(tmp_path: Path, *flags: str, path: str = "/health") -> Iterator[tuple[str, Process]]:
    """A router and its base URL, once `path` answers 200."""
    port = free_port()
    alone = ["--host", "127.0.0.1", "--prometheus-port", "0", "--admin-port", "0"]
    command = [sys.executable, "-m", "r3router", "serve", "--port", str(port), *alone, *flags]
    with started(tmp_path / f"serve-{port}.log", *command) as process:
        url = f"http://127.0.0.1:{port}"
        until_ok(url + path, process)
        yield url, process


@contextlib.contextmanager
def emulating(tmp_path: Path, *flags: str) -> Iterator[list[str]]:
    """A fleet of emulated engines; the flags of the router that fits it."""
    with started(tmp_path / "emulate.log", sys.executable, "-m", "r3router", "emulate", "--port", "0", *flags) as process:
        yield process.wait_for(r"python -m r3router serve (.*)\n").group(1).split()


def until_ok(url: str, process: Process) -> None:
    """Waits until `url` answers 200."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while call(url)[0] != 200:
        assert process.process.poll() is None, f"ended with {process.process.returncode}:\n{process.output()}"
        assert time.monotonic() < deadline, f"{url} does not answer 200:\n{process.output()}"
        time.sleep(0.01)


def call(url: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """Status and answer (JSON where it is, else text); 0 when nobody listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with OPENER.open(request, timeout=60) as reply:
            return reply.status, read(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, read(error.read())
    except (urllib.error.URLError, ConnectionError):
        return 0, None


def read(data: bytes) -> Any:
    """JSON where it is, else text."""
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
