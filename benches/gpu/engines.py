"""The engines of the bench: started once for all columns, in sessions of their own, and found again by a later command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GRAPHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Batch sizes for which decode has a CUDA graph."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Size:
    """Everything that differs between the GPU machine and a CPU that tries the script."""

    cpu: bool
    waiting_s: int
    """`SGLANG_DISAGGREGATION_WAITING_TIMEOUT` and `_BOOTSTRAP_TIMEOUT`; SGLang's default is 300 s."""
    told_s: int
    """What r3router is told of it; 300 s is its default."""
    prefixes: tuple[int, ...]
    """Lengths of the shared prefixes."""
    fresh: tuple[int, int]
    """New tokens of a prompt, from and to."""
    outputs: tuple[int, int]
    outstanding: int
    rows: int
    """Decode's `--max-running-requests`."""
    decode_tokens: int
    prefill_tokens: int
    chunk: int
    """Prefill's `--chunked-prefill-size`."""


GPU = Size(
    cpu=False,
    waiting_s=20,
    told_s=300,
    prefixes=(14_000, 20_000, 26_000, 32_000, 38_000, 44_000, 50_000, 53_000),
    fresh=(2_000, 4_000),
    outputs=(512, 1024),
    outstanding=64,
    rows=128,
    decode_tokens=2_600_000,
    prefill_tokens=500_000,
    chunk=2048,
)
CPU = Size(
    cpu=True,
    waiting_s=20,
    told_s=300,
    prefixes=(200, 400, 800, 1200),
    fresh=(50, 100),
    outputs=(8, 16),
    outstanding=8,
    rows=16,
    decode_tokens=65_536,
    prefill_tokens=65_536,
    chunk=2048,
)


@dataclass
class Engine:
    """A running engine."""

    role: str
    url: str
    pid: int
    log: str
    bootstrap: int | None = None

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return Path(f"/proc/{self.pid}").exists()

    def ready(self) -> bool:
        """Whether it answers its health check."""
        with contextlib.suppress(OSError):
            return call(f"{self.url}/health", timeout=3)[0] == 200
        return False

    def loads(self) -> list[dict[str, Any]]:
        """`/v1/loads`, one entry a rank."""
        loads: list[dict[str, Any]] = json.loads(call(f"{self.url}/v1/loads?include=all", timeout=5)[1])["loads"]
        return loads

    def busy(self) -> int:
        """Requests that it counts anywhere."""
        return sum(
            int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) + int(load["disaggregation"]["prefill_inflight_queue_reqs"])
            for load in self.loads()
        )

    def stop(self) -> None:
        """Kills its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def call(url: str, body: Any = None, *, timeout: float = 30, method: str | None = None) -> tuple[int, bytes]:
    """Status and body; HTTP errors are answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with _OPENER.open(request, timeout=timeout) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def spawn(command: list[str], log: Path, env: dict[str, str]) -> int:
    """Starts a program in a session of its own; its process id."""
    with log.open("wb") as out:
        files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, start_new_session=True, env=env, **files).pid


def start(role: str, size: Size, model: Path, folder: Path, *, gpu: int, graphs: bool, plug_in: bool) -> Engine:
    """Starts `unified`, `prefill` or `decode`; does not wait."""
    port, bootstrap = free_port(), free_port() if role == "prefill" else None
    command = [sys.executable, str(HERE / "serve.py"), "--model-path", str(model), "--load-format", "dummy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup", "--enable-metrics", "--enable-return-routed-experts"]
    tokens = {"prefill": size.prefill_tokens, "decode": size.decode_tokens, "unified": 150_000}[role]
    rows = {"prefill": 32, "decode": size.rows, "unified": 8}[role]
    command += ["--max-total-tokens", str(min(tokens, size.decode_tokens)), "--max-running-requests", str(min(rows, size.rows))]
    command += ["--chunked-prefill-size", str(size.chunk), "--decode-log-interval", "20"]
    if size.cpu:
        command += ["--device", "cpu", "--disable-overlap-schedule", "--sleep-on-idle", "--mem-fraction-static", "0.2"]
        command += [os.environ.get("BENCH_CPU_STRATEGY", "--mamba-radix-cache-strategy"), "no_buffer", "--max-mamba-cache-size", "64"]
    else:
        command += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton"]
        command += ["--linear-attn-prefill-backend", "triton", "--linear-attn-decode-backend", "triton"]
        command += ["--mm-attention-backend", "triton_attn"]
        command += ["--disable-custom-all-reduce", "--grammar-backend", "none", "--base-gpu-id", str(gpu)]
        command += ["--max-mamba-cache-size", {"prefill": "120", "decode": str(size.rows), "unified": "32"}[role]]
        # Pools have the sizes above; the engines share a GPU, and this is of what each finds free when it starts.
        command += ["--mem-fraction-static", "0.95", *(["--sleep-on-idle"] if role == "unified" else [])]
        if role == "decode" and graphs:
            command += ["--disable-prefill-cuda-graph", "--cuda-graph-bs-decode", *map(str, GRAPHS)]
        else:
            command += ["--disable-cuda-graph"]
    if role != "unified":
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl"]
    if bootstrap is not None:
        command += ["--disaggregation-bootstrap-port", str(bootstrap)]
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    env |= {f"SGLANG_DISAGGREGATION_{clock}_TIMEOUT": str(size.waiting_s) for clock in ("WAITING", "BOOTSTRAP")}
    if size.cpu:
        env["BENCH_CPU"] = "1"
    if plug_in and role != "unified":
        env |= {"BENCH_ASIDE": str(folder / "aside"), "SGLANG_PLUGINS": "r3router", "R3ROUTER_AGENT_HOST": "127.0.0.1"}
        env |= {"R3ROUTER_PLUGIN_BYTES": "4GiB"}
    else:
        env["R3ROUTER_PLUGIN"] = "0"
    log = folder / f"{role}.log"
    return Engine(role, f"http://127.0.0.1:{port}", spawn(command, log, env), str(log), bootstrap)


def wait(engine: Engine, until: float) -> bool:
    """Waits until it is ready; `False` when it ends, or at the time."""
    while time.monotonic() < until:
        if engine.ready():
            return True
        if not engine.alive:
            return False
        time.sleep(0.5)
    return False


def tail(engine: Engine, size: int = 3000) -> str:
    """The end of its log."""
    return Path(engine.log).read_text(errors="replace")[-size:]


def idle(engines: list[Engine], seconds: float) -> bool:
    """Ends what is in the engines and waits until they are empty. Their prefix caches stay as they are."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, KeyError, ValueError):
            for engine in engines:
                call(f"{engine.url}/abort_request", {"rid": "", "abort_all": True})
            time.sleep(1)
            if all(engine.busy() == 0 for engine in engines):
                return True
    return False


def save(path: Path, engines: list[Engine]) -> None:
    """Writes where they are."""
    path.write_text(json.dumps([asdict(engine) for engine in engines]))


def found(path: Path) -> list[Engine] | None:
    """Engines of an earlier command, if all of them still answer."""
    if not path.exists():
        return None
    engines = [Engine(**entry) for entry in json.loads(path.read_text())]
    return engines if all(engine.ready() for engine in engines) else None
