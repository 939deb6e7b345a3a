"""The servers that the benchmarks measure: prepared backends, r3router, the relay and the peers."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import processes
from .processes import Measured, answers, free_port, peer_python, r3router_python, started, wait_until

LOGS = Path("target/bench-logs")


@dataclass
class Backends:
    """Prepared engines, all in one process of their own."""

    regular: int = field(default_factory=free_port)
    prefill: int = field(default_factory=free_port)
    bootstrap: int = field(default_factory=free_port)
    decode: int = field(default_factory=free_port)

    @contextlib.contextmanager
    def run(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        row_ids: int,
        hold_seconds: float = 0.0,
        honours_start_len: bool = False,
        prefill_holds: bool = False,
        prefill_descriptors: list[str] | None = None,
        decode_descriptors: list[str] | None = None,
    ) -> Iterator[None]:
        """Serves replies of the given sizes; decode, and prefill with `prefill_holds`, answers after `hold_seconds`.

        With descriptors (base64, one for each reply) these stand in the place of the rows.
        """
        common = {
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "row_ids": row_ids,
            "honours_start_len": honours_start_len,
        }
        plans = [
            common | {"role": "regular", "port": self.regular},
            common
            | {"role": "prefill", "port": self.prefill, "bootstrap_port": self.bootstrap, "hold_seconds": hold_seconds * prefill_holds}
            | {"descriptors": prefill_descriptors or []},
            common | {"role": "decode", "port": self.decode, "hold_seconds": hold_seconds, "descriptors": decode_descriptors or []},
        ]
        code = "import sys, r3router._core as core; core.bench_backend(sys.argv[1])"
        command = [r3router_python(), "-u", "-c", code, json.dumps(plans)]
        with started(command, LOGS / "backend.log", wait_line=b"ready"):
            yield


@dataclass
class Fast:
    """Emulated engines in their fast mode, all in one process of their own: a pair, or one unsplit engine."""

    pd: bool

    @contextlib.contextmanager
    def run(self) -> Iterator[Backends]:
        """Plays the fleet; gives the ports of its engines."""
        counts = (1, 1, 0) if self.pd else (0, 0, 1)
        roles = zip(("prefill", "decode", "regular"), counts, strict=True)
        numbers = [word for role, count in roles for word in (f"--{role}", str(count))]
        command = [r3router_python(), "-u", "-m", "r3router", "emulate", "--fast", "--threads", "1", *numbers, "--port", "0"]
        with started(command, LOGS / "emulator.log", wait_line=b"r3router serve") as fleet:
            text = fleet.log.read_text()
            ports = {role: int(port) for role, port in re.findall(r"^(\w+) +http://[\d.]+:(\d+)", text, re.MULTILINE)}
            bootstrap = re.search(r"bootstrap port (\d+)", text)
            unused = 0
            yield Backends(
                regular=ports.get("regular", unused),
                prefill=ports.get("prefill", unused),
                bootstrap=int(bootstrap[1]) if bootstrap else unused,
                decode=ports.get("decode", unused),
            )


def load(address: str, body: dict[str, Any], *, connections: int, seconds: float, requests: int = 0, rate: float = 0.0) -> dict[str, Any]:
    """Runs the load generator in a process of its own; its report. Raises when a request failed."""
    plan = {
        "address": address,
        "path": "/generate",
        "body": json.dumps(body, separators=(",", ":")),
        "connections": connections,
        "requests": requests,
        "seconds": seconds,
        "rate": rate,
    }
    code = "import sys, r3router._core as core; print(core.bench_load(sys.stdin.read()))"
    done = subprocess.run(
        [r3router_python(), "-c", code],
        input=json.dumps(plan).encode(),
        capture_output=True,
        check=True,
        timeout=seconds + 30,
        env=processes.environment(),
    )
    report: dict[str, Any] = json.loads(done.stdout)
    if report["broken"] or report["statuses"] or not report["ok"]:
        raise RuntimeError(f"{address}: not all requests were answered: {report}")
    return report


def versions() -> dict[str, str]:
    """The measured programs' versions."""
    found = {}
    for name, python in (("r3router", r3router_python()), ("sglang-router", peer_python("sglang-router"))):
        if python:
            code = f"from importlib.metadata import version; print(version({name!r}))"
            found[name] = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return found


def names() -> list[str]:
    """What can be measured here: r3router always, the peer where its wheel is installed."""
    return ["r3router"] + (["sglang-router"] if peer_python("sglang-router") else [])


def command_of(name: str, port: int, metrics: int) -> list[str]:
    """What starts a router without engines."""
    module = {"r3router": ["-m", "r3router", "serve"], "sglang-router": ["-m", "sglang_router.launch_router"]}[name]
    python = r3router_python() if name == "r3router" else peer_python(name)
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    return [str(python), *module, *where, "--log-level", "warn"]


@contextlib.contextmanager
def router(
    name: str, backends: Backends, *, pd: bool, extra: tuple[str, ...] = (), under: tuple[str, ...] = ()
) -> Iterator[tuple[str, Measured]]:
    """Starts a router in front of the backends, as a child of the tool `under`; yields its address once it passes requests on."""
    port, metrics = free_port(), free_port()
    if name == "relay":
        code = "import sys, r3router._core as core; core.bench_relay(int(sys.argv[1]), sys.argv[2], sys.argv[3])"
        command = [r3router_python(), "-u", "-c", code, str(port), f"127.0.0.1:{backends.prefill}", f"127.0.0.1:{backends.decode}"]
    else:
        command = [*command_of(name, port, metrics), "--policy", "round_robin", "--disable-retries"]
        if pd:
            command += [
                "--pd-disaggregation",
                "--prefill",
                f"http://127.0.0.1:{backends.prefill}",
                str(backends.bootstrap),
                "--decode",
                f"http://127.0.0.1:{backends.decode}",
            ]
        else:
            command += ["--worker-urls", f"http://127.0.0.1:{backends.regular}"]
        command += extra if name == "r3router" else ()
    address = f"127.0.0.1:{port}"
    with started([*under, *command], LOGS / f"{name}.log") as measured:
        if name == "r3router":
            # Decode may be told to hold its replies for long.
            wait_until(lambda: answers(f"http://{address}/readiness"), f"{name} to be ready", measured)
        else:
            probe = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":1}}'
            wait_until(lambda: answers(f"http://{address}/generate", probe), f"{name} to pass a request on", measured)
        yield address, measured
