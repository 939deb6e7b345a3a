"""Start and idle: time from exec to the open port, idle memory, memory of a queued request, size of the wheel."""

from __future__ import annotations

import json
import re
import socket
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from .fleet import Backends, command_of, router
from .processes import Measured, free_port, started, wait_until
from .small import BODY

QUEUED = re.compile(r"^r3router_queued_requests (\S+)$", re.MULTILINE)
WHEELS = Path("dist")


def ready(name: str, repeats: int) -> dict[str, Any]:
    """Time from exec of the Python command until its port takes connections, without any engine."""
    walls, cpus, idle = [], [], 0.0
    for _ in range(repeats + 1):
        port = free_port()
        begun = time.perf_counter()
        with started(command_of(name, port, free_port()), Path("target/bench-logs") / f"start-{name}.log") as process:
            while not takes_connections(port):
                if process.process.poll() is not None or time.perf_counter() - begun > 60:
                    raise RuntimeError(f"{name} did not start:\n{process.log_tail()}")
                time.sleep(0.001)
            walls.append(1e3 * (time.perf_counter() - begun))
            cpus.append(1e3 * process.cpu_seconds())
            time.sleep(0.5)
            idle = process.memory_mb("VmRSS")
    # The first run reads files that no cache has.
    return {
        "router": name,
        "ready ms": round(statistics.median(walls[1:])),
        "CPU ms until ready": round(statistics.median(cpus[1:])),
        "first run ms": round(walls[0]),
        "idle RSS MB": round(idle, 1),
    }


def takes_connections(port: int) -> bool:
    """Whether somebody listens on the port."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def queued(count: int) -> dict[str, Any]:
    """Resident memory of `count` requests that wait in r3router's queue, each on a connection of its own."""
    backends = Backends()
    body = json.dumps(BODY, separators=(",", ":")).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with (
        backends.run(prompt_tokens=64, output_tokens=8, row_ids=0, hold_seconds=3.0, prefill_holds=True),
        router("r3router", backends, pd=True, extra=("--window", "1")) as (address, process),
    ):
        host, _, port = address.partition(":")
        sockets = []
        try:
            before = process.memory_mb("VmRSS")
            for _ in range(count):
                sockets.append(socket.create_connection((host, int(port))))
            probe = b"GET /liveness HTTP/1.1\r\nhost: r\r\n\r\n"
            for sock in sockets:
                sock.sendall(probe)
                if not sock.recv(4096):
                    raise RuntimeError("an idle connection was closed")
            connected = process.memory_mb("VmRSS")
            for sock in sockets:
                sock.sendall(head.encode() + body)
            # One is with prefill at a time, and a few may be through.
            wait_until(lambda: waiting(address, process) > 0.98 * count, "the requests to be queued", process)
            full = process.memory_mb("VmRSS")
            held = waiting(address, process)
        finally:
            for sock in sockets:
                sock.close()
    return {
        "queued": round(held),
        "body bytes": len(body),
        "kB a connection": round((connected - before) * 1e3 / count, 1),
        "kB a queued request more": round((full - connected) * 1e3 / held, 1),
        "kB in all beyond the body": round(((full - before) * 1e6 / held - len(body)) / 1e3, 1),
    }


def waiting(address: str, process: Measured) -> float:
    """Requests in the queue."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=30) as reply:
        gauge = QUEUED.search(reply.read().decode())
    if gauge is None:
        raise RuntimeError("the router's /metrics has no r3router_queued_requests: " + process.log_tail())
    return float(gauge[1])


def wheel_mb() -> float | None:
    """Size of the wheel that `make wheel` left, MB; None where it was not built."""
    wheels = sorted(WHEELS.glob("r3router-*.whl"), key=lambda path: path.stat().st_mtime)
    return wheels[-1].stat().st_size / 1e6 if wheels else None
