"""The real router process: started as a person starts it, watched, and stopped by its PID."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .client import Client, Response
from .metrics import Metrics, parse

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
SETTLE_TIMEOUT_S = 10.0

# Gauges of work in hand. All of them must be there, and 0 when nothing is going on.
ZERO_GAUGES = (
    "r3router_requests_live",
    "r3router_queued_requests",
    "r3router_queued_bytes",
    "r3router_place_waiting_requests",
    "r3router_rank_in_transfer",
    "r3router_rank_open",
    "r3router_rank_r3_bytes",
    "r3router_legs_open",
    "r3router_r3_arena_bytes",
)


FIXED_PORTS = range(20_000, 32_768)
"""Below those that the kernel gives out by itself: an engine or a connection of another test cannot get one of them meanwhile."""


def free_ports() -> tuple[int, int, int]:
    """Three different ports that were free a moment ago."""
    found: list[int] = []
    while len(found) < 3:
        port = secrets.choice(FIXED_PORTS)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            found.extend([port] if port not in found else [])
    return found[0], found[1], found[2]


class Router:
    """One router process."""

    def __init__(self, flags: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.flags = flags
        self.env = env or {}
        self.clients: Callable[[int], Client] = Client
        """What talks to its main port."""
        self.log = log
        self.port = 0
        self.metrics_port = 0
        self.admin_port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.client = Client(0)

    async def start(self, *, ready: bool = True, ports: tuple[int, int] | None = None) -> None:
        """Starts it and waits until it listens; with `ready` until it has workers of every role. Without `ports` on free ones."""
        for _ in range(3):
            free = free_ports()
            self.port, self.metrics_port = ports or free[:2]
            self.admin_port = free[2]
            command = [
                sys.executable,
                "-m",
                "r3router",
                "serve",
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--prometheus-host",
                "127.0.0.1",
                "--prometheus-port",
                str(self.metrics_port),
                "--admin-port",
                str(self.admin_port),
                *self.flags,
            ]
            env = {k: v for k, v in os.environ.items() if not k.startswith("R3ROUTER_")} | self.env
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
            self.client = self.clients(self.port)
            if await self._listens("/readiness" if ready else "/liveness"):
                return
            if b"in use" not in self.log.read_bytes():
                break
        code = self.process.poll() if self.process else None
        await self.stop()
        raise AssertionError(f"the router did not get ready (exit code {code}):\n{self.tail()}")

    async def _listens(self, path: str) -> bool:
        end = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while asyncio.get_running_loop().time() < end:
            if self.process is None or self.process.poll() is not None:
                return False
            with contextlib.suppress(OSError):
                if (await self.client.get(path)).status == 200:
                    return True
            await asyncio.sleep(0.02)
        return False

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process is not None
        return self.process.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process is not None and self.process.poll() is None

    def tail(self, size: int = 20000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def rss(self, field: str = "VmRSS") -> int:
        """Resident bytes now, or the peak with `VmHWM`."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"no {field} in /proc")

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def reset_peak(self) -> None:
        """Starts the peak anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    async def metrics(self) -> Metrics:
        """A scrape of the metrics port."""
        client = Client(self.metrics_port)
        response: Response = await client.get("/metrics")
        client.close()
        assert response.status == 200, response.head.raw
        return parse(response.body.decode())

    async def zero_check(self) -> None:
        """Every gauge of work in hand is there and gets to 0."""
        end = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
        while True:
            metrics = await self.metrics()
            absent = [name for name in ZERO_GAUGES if metrics.types.get(name) != "gauge"]
            assert not absent, f"gauges are missing: {absent}"
            # The arena's limit and its peak are no work in hand, and what references name is held on purpose.
            kept = metrics.sum("r3router_r3_object_bytes", place="arena")
            left = [
                (s.name, s.labels, s.value)
                for s in metrics.samples
                if s.name in ZERO_GAUGES
                and s.labels.get("what") not in ("cap", "peak")
                and s.value != (kept if s.labels.get("what") == "used" else 0)
            ]
            if not left:
                return
            assert asyncio.get_running_loop().time() < end, f"gauges are not back at 0: {left}"
            await asyncio.sleep(0.05)

    async def sees_idle_engines(self) -> None:
        """The engines' reports show nothing that is not the router's own. Three reports after the engines have freed what was aborted:
        until then the router counts it as theirs."""
        end = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
        assert (await self.metrics()).types.get("r3router_rank_foreign") == "gauge"
        while foreign := (await self.metrics()).sum("r3router_rank_foreign"):
            assert asyncio.get_running_loop().time() < end, f"{foreign:g} requests of idle engines are still counted"
            await asyncio.sleep(0.02)

    async def stop(self, how: int = signal.SIGTERM) -> int | None:
        """Stops it by its PID; killed when it does not end in time."""
        self.client.close()
        process = self.process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(how)
        end = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
        while process.poll() is None:
            if asyncio.get_running_loop().time() > end:
                process.kill()
                process.wait()
                raise AssertionError(f"the router did not stop in {STOP_TIMEOUT_S} s:\n{self.tail()}")
            await asyncio.sleep(0.01)
        return process.returncode
