"""What long R3 samples that finish together do to everybody else on an engine, with and without the plug-in.

    python -m tests.sglang.r3_stall [without] [with]

Starts one real engine after the other (2 KiB of R3 a token, prompts of 10,240 tokens: 21 MB a sample), and in rounds of 8 samples that end
at the same step measures what others see: `/model_info`, requests for one token, a stream; how long the scheduler thread is kept; what
the engine's processes use. The samples share their prompt, which is computed once: what is left is what R3 costs. Prints one table, and
puts it into benches/results/r3_stall.md with `--write`.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import environment, fleet
from .equality import prompt
from .fleet import Process
from .plugin_pair import variables

LAYERS, TOP_K = 8, 64
PROMPT, OUTPUT = 10_240, 24
SAMPLES = 8
ROUNDS = int(os.environ.get("STALL_ROUNDS", "4"))
TOKENS = 65_536
ROW_BYTES = LAYERS * TOP_K * 4
RESULTS = Path("benches/results/r3_stall.md")
COLUMNS = ("without", "with")


@dataclass
class Column:
    """What was measured on one engine."""

    name: str
    model_info: list[float] = field(default_factory=list)
    one_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between events of a stream that runs beside the samples."""
    kept: list[float] = field(default_factory=list)
    """How long the scheduler thread was kept after a step."""
    cpu: dict[str, float] = field(default_factory=dict)
    """CPU seconds a sample, by process, those of an engine that computes the same without R3 taken off."""
    walls: list[float] = field(default_factory=list)
    """From the first of a round to its last reply."""
    reply_bytes: int = 0


def model() -> Path:
    """The folder of the model, made when missing."""
    folder = environment.models() / "wide"
    if not (folder / "qwen3_moe" / "config.json").exists():
        command = [str(environment.python()), str(environment.ENGINE / "make_model.py"), str(folder), "wide"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder / "qwen3_moe"


@contextlib.contextmanager
def engine(name: str, folder: Path) -> Iterator[Process]:
    """A unified engine, with the plug-in or without."""
    more = {"LAB_STEPS": str(folder / f"steps-{name}")}
    if name == "with":
        # Not compared with a gather at the finish, as the tests do: that is what the plug-in saves.
        more |= variables(folder, R3ROUTER_PLUGIN_VERIFY="0", R3ROUTER_PLUGIN_BYTES="2GiB")
    settings: dict[str, Any] = {"model": str(model()), "tokens": TOKENS, "variables": more, "arguments": ("--context-length", "16384")}
    with fleet.engines(("unified", f"stall-{name}", settings)) as (process,):
        yield process


def sample(*, rows: bool, new: int = OUTPUT) -> dict[str, Any]:
    """The request of every sample: the same prompt, so that all but the first find it computed."""
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt(PROMPT, 7), "sampling_params": sampling, "return_routed_experts": rows}


def read(url: str, raw: bytes) -> int:
    """POSTs and reads the reply without keeping it; its bytes. Fails when it is not 200."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=300)
    connection.request("POST", "/generate", raw, {"content-type": "application/json"})
    reply = connection.getresponse()
    size, first = 0, b""
    while piece := reply.read(1 << 20):
        size += len(piece)
        first = first or piece[:300]
    connection.close()
    if reply.status != 200:
        raise RuntimeError(f"{url}: {reply.status} {first!r}")
    return size


def probe(url: str, what: str, ended: Any, out: Any) -> None:
    """In a process of its own: asks again and again and times each answer; for `stream` the time between events."""
    host = url.removeprefix("http://")
    times: list[float] = []
    one = {"input_ids": prompt(16, 3), "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    while not ended.is_set():
        connection = http.client.HTTPConnection(host, timeout=300)
        if what == "stream":
            body = {
                "input_ids": prompt(16, 5),
                "sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True},
                "stream": True,
            }
            connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            last = None
            while line := reply.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        times.append(now - last)
                    last = now
                if ended.is_set():
                    break
        else:
            began = time.perf_counter()
            if what == "model_info":
                connection.request("GET", "/model_info")
            else:
                connection.request("POST", "/generate", json.dumps(one), {"content-type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            if reply.status == 200:
                times.append(time.perf_counter() - began)
            time.sleep(0.02)
        connection.close()
    out.put((what, times))


def cpu(process: Process) -> dict[str, float]:
    """CPU seconds so far of the engine's processes, by what they are."""
    assert process.popen is not None
    found: dict[str, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            text = stat.read_text()
            fields = text.rpartition(")")[2].split()
            if int(fields[2]) != process.popen.pid:  # its process group
                continue
            title = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            kind = next((k for k in ("scheduler", "detokenizer", "agent") if k in title), "http")
            tasks = (stat.parent / "task").glob("*/schedstat")
            found[kind] = found.get(kind, 0.0) + sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
    return found


def rounds(process: Process, count: int, *, rows: bool) -> tuple[list[float], int, dict[str, float]]:
    """`count` rounds of samples that run together: seconds of each, bytes of a reply, CPU seconds a sample."""
    raw = json.dumps(sample(rows=rows)).encode()
    walls, size = [], 0
    before = cpu(process)
    with ThreadPoolExecutor(SAMPLES) as pool:
        for _ in range(count):
            began = time.perf_counter()
            size = max(size, *pool.map(lambda _: read(process.url, raw), range(SAMPLES)))
            walls.append(time.perf_counter() - began)
            time.sleep(0.5)
    after = cpu(process)
    return walls, size, {kind: (after[kind] - before.get(kind, 0.0)) / (count * SAMPLES) for kind in after}


def measure(name: str, folder: Path) -> Column:
    """One engine: first its CPU without R3 and with R3, undisturbed; then what others see."""
    column = Column(name)
    with engine(name, folder) as process:
        read(process.url, json.dumps(sample(rows=True, new=2)).encode())  # computes the prompt; starts the plug-in's agent
        time.sleep(5 if name == "with" else 1)
        size = read(process.url, json.dumps(sample(rows=True, new=2)).encode())
        by_reference = size < 64 << 10
        assert by_reference == (name == "with"), f"a reply of {size} bytes from the engine {name} the plug-in"
        _, _, bare = rounds(process, 1, rows=False)
        _, column.reply_bytes, used = rounds(process, 1, rows=True)
        column.cpu = {kind: used[kind] - bare.get(kind, 0.0) for kind in used}
        ended, out = multiprocessing.Event(), multiprocessing.Queue()
        whats = ("model_info", "one_token", "stream")
        probes = [multiprocessing.Process(target=probe, args=(process.url, what, ended, out)) for what in whats]
        steps = folder / f"steps-{name}"
        skip = len(steps.read_text().splitlines())
        for one in probes:
            one.start()
        time.sleep(1)
        column.walls, _, _ = rounds(process, ROUNDS, rows=True)
        ended.set()
        got = dict(out.get(timeout=120) for _ in probes)
        for one in probes:
            one.join(30)
        column.model_info, column.one_token, column.gaps = (got[what] for what in whats)
        column.kept = [float(line.split()[1]) for line in steps.read_text().splitlines()[skip:]]
    return column


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed, milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 if ordered else float("nan")


def table(columns: list[Column]) -> str:
    """The figures as Markdown."""

    def both(of: Callable[[Column], list[float]]) -> Callable[[Column], str]:
        return lambda c: f"{percentile(of(c), 0.5):.1f} / {percentile(of(c), 0.99):.1f} / {percentile(of(c), 1):.1f} ({len(of(c))})"

    def used(kind: str) -> Callable[[Column], str]:
        return lambda c: f"{c.cpu.get(kind, 0.0) * 1e3:.0f}"

    lines: list[tuple[str, Callable[[Column], str]]] = [
        ("`/model_info`: p50 / p99 / most, ms (asked)", both(lambda c: c.model_info)),
        ("one token: p50 / p99 / most, ms (asked)", both(lambda c: c.one_token)),
        ("between events of a stream: p50 / p99 / most, ms (events)", both(lambda c: c.gaps)),
        ("scheduler thread kept after a step: p50 / p99 / most, ms (steps)", both(lambda c: c.kept)),
        ("engine CPU of R3 a sample, scheduler, ms", used("scheduler")),
        ("… detokenizer, ms", used("detokenizer")),
        ("… HTTP process, ms", used("http")),
        ("… agent, ms", used("agent")),
        (f"a round of {SAMPLES} samples, median s", lambda c: f"{statistics.median(c.walls):.2f}"),
        ("bytes of a reply", lambda c: f"{c.reply_bytes:,}"),
    ]
    head = ["| | " + " | ".join(f"{column.name} the plug-in" for column in columns) + " |", "|---|" + "---|" * len(columns)]
    return "\n".join([*head, *(f"| {title} | " + " | ".join(of(column) for column in columns) + " |" for title, of in lines)])


def page(columns: list[Column]) -> str:
    """The page with the machine and the day."""
    about = environment.versions()
    megabytes = (PROMPT + OUTPUT - 1) * ROW_BYTES / 1e6
    return (
        "# Long R3 samples that finish together, on a real engine\n\n"
        "Rendered by `python -m tests.sglang.r3_stall --write`.\n\n"
        f"SGLang {about['sglang']}, torch {about['torch']}, CPU only, {os.cpu_count()} cores, {platform.machine()}, "
        f"{datetime.date.today():%Y-%m-%d}. One unsplit engine; {ROUNDS} rounds of {SAMPLES} samples of {PROMPT:,} + {OUTPUT} tokens "
        f"that end at the same step, {megabytes:.0f} MB of int32 each (a tiny model with {LAYERS} layers and {TOP_K} experts a token). "
        "They share their prompt, which is computed once, so that what is seen is what R3 costs. Engine, probes and readers share the "
        "cores.\n\n"
        "CPU a sample is that of a round without probes, less that of the same round without R3. The readers take in-line replies off the "
        "socket and do not decode them; rows by reference were left where they are.\n\n" + table(columns) + "\n"
    )


def main(*names: str) -> None:
    """Measures the named engines (both without names)."""
    write = "--write" in names
    wanted = tuple(name for name in names if name != "--write") or COLUMNS
    if set(wanted) - set(COLUMNS):
        raise SystemExit(f"there are {', '.join(COLUMNS)}")
    with tempfile.TemporaryDirectory() as folder:
        done = []
        for name in wanted:
            done.append(measure(name, Path(folder)))
            print(table(done[-1:]), flush=True)
    print(table(done))
    if write:
        RESULTS.write_text(page(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
