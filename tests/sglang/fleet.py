"""Starts real SGLang engines and r3router on loopback, and stops them by their process groups."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import environment

START_SECONDS = 900
LOGS = Path(os.environ.get("R3ROUTER_SGLANG_LOGS", "target/sglang-logs"))
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    """A loopback TCP port that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of `count` loopback ports in a row that nobody listens on at the moment; below the range that connections take."""
    while True:
        first = random.randrange(12_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                sock = held.enter_context(socket.socket())
                sock.bind(("127.0.0.1", port))
            return first


def call(
    url: str, body: Any = None, *, timeout: float = 120, method: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and raw body of a GET (no body) or POST; HTTP errors are answers, not exceptions."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"} | (headers or {}), method=method)
    try:
        with _OPENER.open(request, timeout=timeout) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def post(url: str, body: Any, *, timeout: float = 120, headers: dict[str, str] | None = None) -> Any:
    """The JSON reply of a POST; raises with status and text when it is not 200."""
    status, raw = call(url, body, timeout=timeout, headers=headers)
    if status != 200:
        raise AssertionError(f"{url}: {status} {raw[:500]!r}")
    return json.loads(raw)


def events(url: str, body: Any, *, timeout: float = 120, headers: dict[str, str] | None = None) -> list[Any]:
    """The JSON events of an SSE reply, without `[DONE]`, which must be the last."""
    status, raw = call(url, body, timeout=timeout, headers=headers)
    assert status == 200, (status, raw[:500])
    blocks = [block.removeprefix("data: ") for block in raw.decode().split("\n\n") if block.strip()]
    assert blocks[-1] == "[DONE]", blocks[-1][:200]
    return [json.loads(block) for block in blocks[:-1]]


@dataclass
class Process:
    """One engine or router."""

    url: str
    popen: subprocess.Popen[bytes] | None
    log: Path
    bootstrap_port: int | None = None

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Ends the process group; kills it when it does not end in 15 s."""
        if self.popen is None:
            return
        for step in (sig, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, step)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills the process group, as an out-of-memory killer does."""
        self.stop(signal.SIGKILL)

    def metrics(self, name: str) -> dict[str, float]:
        """The series of one Prometheus family, by label text (empty without labels)."""
        found = {}
        for line in call(f"{self.url}/metrics")[1].decode().splitlines():
            family, _, rest = line.partition("{") if "{" in line.split(" ")[0] else (line.split(" ")[0], "", line)
            if family == name:
                labels, _, value = rest.rpartition(" ")
                found[labels.rstrip("}") if "{" in line else ""] = float(value)
        return found

    def loads(self) -> list[Any]:
        """An engine's `/v1/loads`, one entry a rank in rank order."""
        loads = json.loads(call(f"{self.url}/v1/loads?include=all")[1])["loads"]
        # Older engines with one rank do not say that it is 0.
        return sorted(loads, key=lambda load: int(load.get("dp_rank", 0)))

    def requests(self) -> list[dict[str, Any]]:
        """The router's log lines of finished requests: `rid`, `room`, `p` and `d` (`url@rank`), outcome."""
        lines = [json.loads(line) for line in self.text().splitlines() if line.startswith("{")]
        return [line.get("fields", line) for line in lines if line.get("target") == "r3router::request"]

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _spawn(command: list[str], name: str, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env), log


def _wait(process: Process, path: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if call(process.url + path, timeout=3)[0] == 200:
                return
        if process.popen is not None and process.popen.poll() is not None:
            raise RuntimeError(f"{process.url} ended while starting:\n{process.text()[-4000:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{process.url} did not come up in {seconds:.0f} s:\n{process.text()[-4000:]}")
        time.sleep(0.5)


def engine(
    role: str,
    *,
    model: str = "qwen3_5_moe",
    tokens: int = 8192,
    arguments: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    name: str | None = None,
) -> Process:
    """Starts `unified`, `prefill` or `decode`; does not wait (see `ready`)."""
    # Older engines open a gRPC port 10,000 above this one, and do not start where that is none.
    port = free_ports(1)
    bootstrap = free_port() if role == "prefill" else None
    command = [
        str(environment.python()),
        str(environment.ENGINE / "serve.py"),
        "--model-path",
        str(environment.models() / model),
        "--load-format",
        "dummy",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-total-tokens",
        str(tokens),
        "--mem-fraction-static",
        "0.2",
        "--device",
        "cpu",
        "--disable-overlap-schedule",
        "--sleep-on-idle",
        *environment.NO_BUFFER,
        # Without it the engine sizes a host pool by the machine's free memory, which the other engines have taken.
        *("--hicache-ratio", "1.5"),
        "--skip-server-warmup",
        "--enable-metrics",
        "--enable-return-routed-experts",
    ]
    if "--max-running-requests" not in arguments:
        command += ["--max-running-requests", "16"]
    if "--max-mamba-cache-size" not in arguments:
        command += ["--max-mamba-cache-size", "64"]
    if role != "unified":
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl"]
    if bootstrap is not None:
        command += ["--disaggregation-bootstrap-port", str(bootstrap)]
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    env |= {"LAB_DUMMY_SCALE": "0.15", "HF_HUB_OFFLINE": "1"} | (variables or {})
    popen, log = _spawn([*command, *arguments], name or role, env)
    return Process(f"http://127.0.0.1:{port}", popen, log, bootstrap)


def ready(process: Process) -> Process:
    """Waits until an engine answers `/health`."""
    _wait(process, "/health", START_SECONDS)
    return process


@contextlib.contextmanager
def engines(*wanted: tuple[str, str, dict[str, Any]]) -> Iterator[list[Process]]:
    """Starts engines (role, name, further arguments of `engine`) one after another: together they take twice as long on two cores."""
    started: list[Process] = []
    try:
        for role, name, settings in wanted:
            started.append(engine(role, name=name, **settings))
            ready(started[-1])
        yield started
    finally:
        for process in started:
            process.stop()


@contextlib.contextmanager
def process(command: list[str], url: str, name: str, ready_path: str) -> Iterator[Process]:
    """Any other program, up when `ready_path` answers 200; stopped at the end."""
    popen, log = _spawn(command, name, dict(os.environ))
    started = Process(url, popen, log)
    try:
        _wait(started, ready_path, 120)
        yield started
    finally:
        started.stop()


@contextlib.contextmanager
def router(prefill: list[Process], decode: list[Process], *arguments: str, name: str = "router") -> Iterator[Process]:
    """r3router in front of engines, ready when it takes requests."""
    port, metrics = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "r3router",
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(metrics),
        "--pd-disaggregation",
        "--log-json",
        "--shutdown-grace-period-secs",
        "1",
        *arguments,
    ]
    for engine_ in prefill:
        command += ["--prefill", engine_.url, str(engine_.bootstrap_port)]
    for engine_ in decode:
        command += ["--decode", engine_.url]
    with process(command, f"http://127.0.0.1:{port}", name, "/readiness" if prefill and decode else "/health") as started:
        yield started


@dataclass
class Front:
    """A router in front of a pair, and the unified engine that says what is right."""

    unified: Process
    router: Process

    @property
    def url(self) -> str:
        """The router's address."""
        return self.router.url

    def post(self, path: str, body: Any) -> Any:
        """The router's reply."""
        return post(self.url + path, body)

    def events(self, path: str, body: Any) -> list[Any]:
        """The router's events."""
        return events(self.url + path, body)

    def both(self, path: str, body: Any) -> tuple[Any, Any]:
        """The router's reply and the unified engine's."""
        return self.post(path, body), post(self.unified.url + path, body)


@dataclass
class Trio:
    """A unified engine and a pair of the same model."""

    unified: Process
    prefill: Process
    decode: Process


@contextlib.contextmanager
def trio(model: str) -> Iterator[Trio]:
    """Starts the three, or uses the running ones that `R3ROUTER_SGLANG_TRIO=unified,prefill,bootstrap_port,decode` names."""
    given = os.environ.get("R3ROUTER_SGLANG_TRIO")
    if given and model == "qwen3_5_moe":
        unified, prefill, bootstrap, decode = given.split(",")
        none = Path("/dev/null")
        yield Trio(Process(unified, None, none), Process(prefill, None, none, int(bootstrap)), Process(decode, None, none))
        return
    with engines(*((role, f"{model}-{role}", {"model": model}) for role in ("unified", "prefill", "decode"))) as started:
        yield Trio(*started)
