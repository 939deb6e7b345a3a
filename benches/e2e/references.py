"""R3 by reference against R3 in the reply: what it costs the client and the router, all through a running router.

Two kinds of engines, both prepared replies in a process of their own: as SGLang sends them (rows as base64 in the JSON), and as SGLang with
the plug-in sends them (descriptors of rows that lie in shared memory, with a real agent beside them). The emulator plays the plug-in too.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from r3router.r3.descriptor import Descriptor
from r3router.r3.host import boot_id
from r3router.r3.store import SHM, StoreDir, new_header
from r3router.r3.ucx import load as load_nixl

from .fleet import LOGS, Backends
from .processes import Measured, answers, environment, free_port, r3router_python, started, wait_until

LAYERS, TOP_K, EXPERTS = 48, 8, 128
PROMPT, OUTPUT = 58_000, 2_001
ROWS = PROMPT + OUTPUT - 1
ROW_IDS = LAYERS * TOP_K
NARROW_MB = ROWS * ROW_IDS / 1e6
TEXT_MB = ROWS * ROW_IDS * 4 / 3 * 4 / 1e6
ARENA = 2 << 30
SMALL_ARENA = 512 << 20
CHECKED_ROWS = (0, PROMPT - 1, PROMPT, ROWS - 1)
HOWS = {
    "httpx": "in-line, httpx + json + base64",
    "ours": "in-line, our client",
    "http": "reference, HTTP",
    "mapped": "reference, mmap",
    "nixl": "reference, NIXL",
}
# How long a router without work is watched, seconds: polls and timers are taken off what a run costs.
IDLE_SECONDS = 5.0
SENT = re.compile(r"^r3router_agent_sent_bytes_total (\d+)$", re.MULTILINE)


@dataclass
class Row:
    """One line of the table."""

    engines: str
    how: str
    samples: int
    wall: float | None = None
    cpu: float | None = None
    freeze: float | None = None
    json_bytes: int | None = None
    said_bytes: int | None = None
    """Of the JSON: the generated text and ids."""
    client_rss_mb: float | None = None
    router_cpu: float | None = None
    """Seconds a sample, what the router uses without work taken off."""
    bare_cpu: float | None = None
    """The same for the same request without rows."""
    bare_wall: float | None = None
    """`wall` of the same requests without rows: what sending 400 KB of ids and having them answered takes."""
    router_rss_mb: float | None = None
    r3_in: int | None = None
    """Bytes that engines sent to the router in the place of rows, all samples: base64 text of rows or of descriptors."""
    fetches: int | None = None
    """Fetches of rows that the router answered."""
    note: str = ""


def hold_seconds(samples: int) -> float:
    """How long decode runs: prefill's replies are in by then, as they are when a real sample ends minutes after its prefill."""
    return {1: 1.0, 8: 4.0}.get(samples, 0.32 * samples)


def first_id(token: int) -> int:
    """The first id of a row of the prepared engines."""
    return token * 31 % 251


def rows_of(first: int, end: int) -> np.ndarray:
    """Rows `first..end` of the prepared engines, uint8."""
    tokens = np.arange(first, end, dtype=np.int64)[:, None] * 31 + np.arange(ROW_IDS, dtype=np.int64)[None, :] * 7
    return (tokens % 251).astype(np.uint8).reshape(-1, LAYERS, TOP_K)


def nixl_missing() -> str | None:
    """Why NIXL cannot be used here; `None` when it can."""
    try:
        load_nixl()
    except RuntimeError as error:
        return str(error)
    return None


def installed(name: str) -> bool:
    """Whether a package can be imported."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def decode_seconds() -> float:
    """One base64-simd decode of the text of all rows of a sample, the median of five."""
    code = "import sys, json, r3router._core as core; print(json.dumps(core.bench_decode(int(sys.argv[1]), 5)))"
    done = subprocess.run(
        [r3router_python(), "-c", code, str(round(TEXT_MB * 1e6))], capture_output=True, check=True, timeout=60, env=environment()
    )
    return statistics.median(json.loads(done.stdout))


@contextlib.contextmanager
def router(backends: Backends, store: Path, *extra: str, arena: int = ARENA) -> Iterator[tuple[str, Measured]]:
    """A router that knows the model; its address."""
    port = free_port()
    command = [r3router_python(), "-m", "r3router", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", "0", "--log-level", "warn", "--policy", "round_robin", "--disable-retries", "--window", "unbounded"]
    command += ["--r3-layers", str(LAYERS), "--r3-top-k", str(TOP_K), "--r3-experts", str(EXPERTS)]
    command += ["--r3-arena-bytes", str(arena), "--r3-store-dir", str(store), "--delivery-timeout-secs", "600", "--pd-disaggregation"]
    command += ["--prefill", f"http://127.0.0.1:{backends.prefill}", str(backends.bootstrap)]
    command += ["--decode", f"http://127.0.0.1:{backends.decode}", *extra]
    address = f"http://127.0.0.1:{port}"
    with started(command, LOGS / "r3-router.log") as measured:
        wait_until(lambda: answers(f"{address}/readiness"), "the router to be ready", measured)
        yield address, measured


@contextlib.contextmanager
def agent(*place: str, nixl: bool) -> Iterator[str]:
    """An agent of this host; its address."""
    port = free_port()
    command = [r3router_python(), "-m", "r3router", "agent", "--host", "127.0.0.1", "--port", str(port), *place]
    command += ["--nixl"] if nixl else []
    with started(command, LOGS / "r3-agent.log") as measured:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), "the agent to be ready", measured)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in shared memory, gone at the end."""
    path = Path(tempfile.mkdtemp(prefix="r3-bench-", dir=SHM))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def body(*, rows: bool = True) -> dict[str, Any]:
    """The request of every sample."""
    sampling = {"max_new_tokens": OUTPUT, "ignore_eos": True}
    return {"input_ids": [151643] * PROMPT, "sampling_params": sampling, "return_routed_experts": rows}


def r3_bytes(address: str) -> tuple[int, int]:
    """Bytes that engines sent to the router in the place of rows (text), and fetches of rows that the router has answered."""
    import urllib.request

    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{address}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    came = re.findall(r"^r3router_r3_text_bytes_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    fetched = re.findall(r"^r3router_r3_fetches_total(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return int(sum(float(n) for n in came)), int(sum(float(n) for n in fetched))


def client(plan: dict[str, Any], what: str) -> dict[str, Any]:
    """Runs a client of its own; what it measured."""
    script = Path(__file__).parent / "reader.py"
    done = subprocess.run(
        [r3router_python(), str(script)], input=json.dumps(plan).encode(), capture_output=True, timeout=380, env=environment()
    )
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace")[-1500:]
        raise RuntimeError(f"{what}: the client ended with {done.returncode}:\n{tail}")
    # NIXL says things on standard output too.
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def read(
    row: Row,
    how: str,
    address: str,
    process: Measured,
    *,
    hold: float,
    agent_url: str | None = None,
    key: bool = True,
    bare: bool = False,
) -> Row:
    """Runs the client against a router that has just started, and fills the row. `bare`: the same request without rows, too."""
    keys = [n for token in CHECKED_ROWS for n in (token, first_id(token))] if key else []
    plan = {"url": address, "how": how, "body": body(), "samples": row.samples, "layers": LAYERS, "top_k": TOP_K, "rows": ROWS}
    plan |= {"hold_seconds": hold, "agent": agent_url, "key": keys}
    what = f"{row.engines}, {row.how}, {row.samples} at once"
    began, idle = time.monotonic(), process.cpu_seconds()
    time.sleep(IDLE_SECONDS)
    idle = (process.cpu_seconds() - idle) / (time.monotonic() - began)

    def cost(plan: dict[str, Any]) -> tuple[dict[str, Any], float]:
        began, before = time.monotonic(), process.cpu_seconds()
        got = client(plan, what)
        return got, (process.cpu_seconds() - before - idle * (time.monotonic() - began)) / row.samples

    came = r3_bytes(address)
    process.reset_peak()
    got, cpu = cost(plan)
    peak, after = process.memory_mb("VmHWM"), r3_bytes(address)
    without, alone = cost(plan | {"body": body(rows=False), "rows": 0, "key": []}) if bare else ({}, None)
    return replace(
        row,
        wall=got["wall"],
        cpu=got["cpu"],
        freeze=got["freeze"],
        json_bytes=got["json_bytes"],
        said_bytes=got["said_bytes"],
        client_rss_mb=got["rss_mb"],
        router_cpu=cpu,
        bare_cpu=alone,
        bare_wall=without.get("wall"),
        router_rss_mb=peak,
        r3_in=after[0] - came[0],
        fetches=after[1] - came[1],
    )


def plain_engines(counts: tuple[int, ...], hows: tuple[str, ...], *, arena: int = ARENA, note: str = "") -> Iterator[Row]:
    """Engines as they come."""
    for count in counts:
        hold = hold_seconds(count)
        backends = Backends()
        with backends.run(prompt_tokens=PROMPT, output_tokens=OUTPUT, row_ids=ROW_IDS, hold_seconds=hold, honours_start_len=True):
            for how in hows:
                row = Row("as they come", HOWS[how], count, note=note)
                missing = nixl_missing() if how == "nixl" else None
                if missing:
                    yield replace(row, note=f"not run: {missing}")
                    continue
                with shared_folder() as store, contextlib.ExitStack() as more:
                    agent_url = more.enter_context(agent("--parent", str(store), nixl=True)) if how == "nixl" else None
                    address, process = more.enter_context(router(backends, store, arena=arena))
                    yield read(row, how, address, process, hold=hold, agent_url=agent_url)


def plugged_engines(counts: tuple[int, ...], hows: tuple[str, ...]) -> Iterator[Row]:
    """Engines with the plug-in: rows in shared memory, written before the sample ends; an agent of the host serves them."""
    prompt, output = rows_of(0, PROMPT), rows_of(PROMPT, ROWS)
    for count in counts:
        for how in hows:
            row = Row("with the plug-in", HOWS[how], count)
            missing = nixl_missing() if how == "nixl" else None
            if missing:
                yield replace(row, note=f"not run: {missing}")
                continue
            with shared_folder() as folder, contextlib.ExitStack() as more:
                store = StoreDir(folder / "r3router-bench", round(NARROW_MB * 1e6 * (count + 1)))
                url = more.enter_context(agent("--directory", str(store.path), "--parent", str(folder), nixl=how == "nixl"))
                descriptors: list[list[str]] = [[], []]
                for _ in range(count):
                    for side, (rows, start) in zip(descriptors, ((prompt, 0), (output, PROMPT)), strict=True):
                        side.append(put(store, rows, start, url))
                backends = Backends()
                # Once more for the requests without rows, whose descriptors nobody reads.
                sides = {"prefill_descriptors": descriptors[0] * 2, "decode_descriptors": descriptors[1] * 2}
                more.enter_context(backends.run(prompt_tokens=PROMPT, output_tokens=OUTPUT, row_ids=ROW_IDS, **sides))
                address, process = more.enter_context(router(backends, folder))
                yield read(row, how, address, process, hold=0.0, bare=how == "mapped")


def put(store: StoreDir, rows: np.ndarray, start: int, url: str) -> str:
    """Writes rows as the plug-in does; the descriptor's text."""
    header = new_header(len(rows), LAYERS, TOP_K, "uint8", start=start, expires_s=600, rid="bench", weight_version="")
    writing = store.reserve(header)
    crc = writing.write([rows]).crc32
    descriptor = Descriptor(
        uri=f"r3://{url.removeprefix('http://')}/{writing.id}",
        offset=256,
        pos=start,
        rows=len(rows),
        dtype="uint8",
        layers=LAYERS,
        top_k=TOP_K,
        crc32=crc,
        path=str(writing.path),
        host=boot_id(),
    )
    return base64.b64encode(descriptor.encode()).decode()


def emulated(counts: tuple[int, ...]) -> Iterator[Row]:
    """The emulator plays engines with the plug-in, and their agents."""
    command = [r3router_python(), "-u", "-m", "r3router", "emulate", "--plugin", "--prefill", "8", "--decode", "8", "--port", "0"]
    command += ["--layers", str(LAYERS), "--top-k", str(TOP_K), "--experts", str(EXPERTS), "--max-total-tokens", "2000000"]
    for count in counts:
        with started(command, LOGS / "r3-emulator.log", wait_line=b"r3router serve") as fleet, shared_folder() as store:
            text = fleet.log.read_text()
            ports = {role: int(port) for role, port in re.findall(r"^(\w+) +http://[\d.]+:(\d+)", text, re.MULTILINE)}
            bootstrap = re.search(r"bootstrap port (\d+)", text)
            backends = Backends(prefill=ports["prefill"], decode=ports["decode"], bootstrap=int(bootstrap[1]) if bootstrap else 0)
            with router(backends, store) as (address, process):
                row = Row("emulator as plug-in", HOWS["http"], count, note="wall and client CPU with the emulated sample")
                yield read(row, "http", address, process, hold=0.0, key=False, bare=True)
