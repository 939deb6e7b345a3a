"""The incident in small: decode with few rows and state slots, slow prefill, 64 long R3 samples at once, engine timeouts of 20 s.

    python -m tests.sglang.incident [unbounded] [peer] [r3router]

runs the columns one after another on one pair of engines, prints what became of the samples, and puts decode's own figures
(its log and `/v1/loads`) beside the router's ledger. `R3ROUTER_SGLANG_SMALL=prefill,bootstrap_port,decode,decode_log` uses engines
that are up; `R3ROUTER_SGLANG_PEER` is a Python that has sglang-router.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import fleet
from .equality import GREEDY, prompt
from .fleet import Process, call

TIMEOUT_S = 20
SAMPLES = 64
PROMPT, OUTPUT = 4000, 32
RUNNING = 8
"""Decode's running requests. With 16 extra rows (the engine's default below 33) that makes 24 rows and as many state slots."""
ROWS = 3 * RUNNING
CLOCKS = {f"SGLANG_DISAGGREGATION_{clock}_TIMEOUT": str(TIMEOUT_S) for clock in ("WAITING", "BOOTSTRAP")}
TOKENS = 131_072
SETTLED_S = 1.0
"""Decode's figure, at the time that the engine put on it, is compared with what the ledger said within this time around: the ledger is
looked at every 0.25 s, and prefill's reply comes a little after decode has the KV."""

LOG_LINE = re.compile(
    r"#running-req: (\d+).*?mamba usage: ([\d.]+), pre-allocated usage: ([\d.]+), #prealloc-req: (\d+), #transfer-req: (\d+)"
)


@contextlib.contextmanager
def small() -> Iterator[tuple[Process, Process]]:
    """A prefill engine, and a decode engine with few rows and slots, both with clocks of 20 s."""
    given = os.environ.get("R3ROUTER_SGLANG_SMALL")
    if given:
        prefill, bootstrap, decode, log = given.split(",")
        yield Process(prefill, None, Path("/dev/null"), int(bootstrap)), Process(decode, None, Path(log))
        return
    few = ("--max-running-requests", str(RUNNING), "--max-mamba-cache-size", str(ROWS), "--decode-log-interval", "1")
    with fleet.engines(
        ("prefill", "small-prefill", {"tokens": TOKENS, "variables": CLOCKS}),
        ("decode", "small-decode", {"tokens": TOKENS, "variables": CLOCKS, "arguments": few}),
    ) as (prefill_, decode_):
        yield prefill_, decode_


@dataclass
class Seen:
    """One look at decode and at the router, at about the same time."""

    at: float
    said_at: float
    """When decode made its report (its own clock is this machine's): it publishes every 15 steps."""
    transfer: int
    """Decode: requests whose KV has not arrived, `decode_transfer_queue_reqs`."""
    prealloc: int
    """Decode: requests that wait for memory."""
    running: int
    """Decode: requests that run or wait for a row in the batch."""
    ledger_transfer: int | None
    """Router: `r3router_rank_in_transfer`."""
    ledger_open: int | None
    """Router: `r3router_rank_open`."""


@dataclass
class Column:
    """What became of the samples behind one router."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    log: list[tuple[int, float, float, int, int]] = field(default_factory=list)
    """Decode's log: running, mamba usage, pre-allocated usage, prealloc, transfer."""

    def most(self, name: str) -> int:
        """The largest value of a field of `Seen`."""
        return max((getattr(seen, name) or 0 for seen in self.seen), default=0)

    def logged(self, at: int) -> float:
        """The largest value in decode's log."""
        return max((line[at] for line in self.log), default=0)

    def agreement(self) -> tuple[int, int, int]:
        """Looks by what they say of decode's transfers beside the ledger's around that time: equal or between, more, fewer.

        More would be a request at decode that the ledger does not know of. Fewer is a transfer that has arrived and that the ledger
        still counts, because it hears of the arrival with prefill's reply.
        """
        equal = more = fewer = 0
        for seen in self.seen:
            near = [other.ledger_transfer or 0 for other in self.seen if abs(other.at - seen.said_at) <= SETTLED_S]
            at_decode = seen.transfer + seen.prealloc
            more += bool(near) and at_decode > max(near)
            fewer += bool(near) and at_decode < min(near)
            equal += bool(near) and min(near) <= at_decode <= max(near)
        return equal, more, fewer


def reason(status: int, raw: bytes) -> str:
    """Why a sample failed, in the engines' words without ids."""
    if status == 200:
        return "completed"
    text = raw.decode(errors="replace")
    clock = re.search(r"timed out after [\d.]+s? in (KVPoll\.\w+)", text)
    if clock:
        return f"{status} engine timeout in {clock[1]}"
    return f"{status} " + re.sub(r"\d+", "N", text)[:100]


def look(decode: Process, router: Process | None, began: float) -> Seen:
    """Asks decode and the router."""
    load = decode.loads()[0]
    split = load["disaggregation"]
    transfer, prealloc = int(split["decode_transfer_queue_reqs"]), int(split["decode_prealloc_queue_reqs"])
    age = time.time() - float(load["timestamp"])
    at = time.monotonic() - began
    seen = Seen(at, at - age, transfer, prealloc, int(load["num_running_reqs"]), None, None)
    if router is not None:
        for family, name in (("r3router_rank_in_transfer", "ledger_transfer"), ("r3router_rank_open", "ledger_open")):
            setattr(seen, name, sum(int(value) for labels, value in router.metrics(family).items() if 'role="decode"' in labels))
    return seen


def run(name: str, router: Process, decode: Process, *, samples: int = SAMPLES, ledger: bool = True) -> Column:
    """Sends all samples at once and looks at decode until they have ended."""
    column, ended, began = Column(name), threading.Event(), time.monotonic()
    logged = decode.log.stat().st_size if decode.log.is_file() else 0

    def watch() -> None:
        while not ended.wait(0.25):
            with contextlib.suppress(OSError, KeyError, ValueError):
                column.seen.append(look(decode, router if ledger else None, began))

    def one(at: int) -> str:
        body = {
            "input_ids": prompt(PROMPT, 1000 + at),
            "sampling_params": {"max_new_tokens": OUTPUT, **GREEDY},
            "return_routed_experts": True,
        }
        try:
            return reason(*call(f"{router.url}/generate", body, timeout=360))
        except OSError as error:
            return f"no answer: {error}"

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(samples) as pool:
        column.outcomes.update(pool.map(one, range(samples)))
    column.seconds = time.monotonic() - began
    ended.set()
    watcher.join()
    if decode.log.is_file():
        with decode.log.open("rb") as log:
            log.seek(logged)
            for found in LOG_LINE.finditer(log.read().decode(errors="replace")):
                running, mamba, allocated, prealloc, transfer = found.groups()
                column.log.append((int(running), float(mamba), float(allocated), int(prealloc), int(transfer)))
    return column


@contextlib.contextmanager
def peer(prefill: Process, decode: Process) -> Iterator[Process]:
    """sglang-router in front of the pair, without retries: they would send what timed out once more."""
    port = fleet.free_port()
    command = [os.environ["R3ROUTER_SGLANG_PEER"], "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(fleet.free_port()), "--disable-retries"]
    with fleet.process(command, f"http://127.0.0.1:{port}", "peer", "/health") as started:
        time.sleep(5)  # it answers before its workers are ready
        yield started


def columns(prefill: Process, decode: Process) -> dict[str, Callable[[], contextlib.AbstractContextManager[Process]]]:
    """The routers, by the name of their column."""
    return {
        "unbounded": lambda: fleet.router([prefill], [decode], "--no-admission", "--disable-retries", name="incident-unbounded"),
        "peer": lambda: peer(prefill, decode),
        "r3router": lambda: fleet.router([prefill], [decode], name="incident-r3router"),
    }


def table(done: list[Column]) -> str:
    """The figures as Markdown."""
    rows: list[tuple[str, Callable[[Column], Any]]] = [
        ("samples completed", lambda c: c.outcomes["completed"]),
        ("failed by an engine timeout", lambda c: sum(n for why, n in c.outcomes.items() if "engine timeout" in why)),
        ("failed otherwise", lambda c: sum(n for why, n in c.outcomes.items() if "engine timeout" not in why and why != "completed")),
        ("seconds in all", lambda c: f"{c.seconds:.0f}"),
        ("decode: most `#transfer-req` (log)", lambda c: f"{c.logged(4):.0f}"),
        ("decode: most in transfer (`/v1/loads`)", lambda c: c.most("transfer")),
        ("decode: most in prealloc (`/v1/loads`)", lambda c: c.most("prealloc")),
        ("decode: highest mamba usage (log)", lambda c: f"{c.logged(1):.2f}"),
        ("decode: highest pre-allocated usage (log)", lambda c: f"{c.logged(2):.2f}"),
        ("ledger: most in transfer", lambda c: c.most("ledger_transfer") if c.name != "peer" else "-"),
        ("ledger: most open", lambda c: c.most("ledger_open") if c.name != "peer" else "-"),
        ("looks: as many as in the ledger, more, fewer", lambda c: "{}, {}, {}".format(*c.agreement()) if c.name != "peer" else "-"),
    ]
    lines = ["| | " + " | ".join(column.name for column in done) + " |", "|---|" + "---|" * len(done)]
    lines += [f"| {title} | " + " | ".join(str(value(column)) for column in done) + " |" for title, value in rows]
    return "\n".join(lines)


def main(*names: str) -> None:
    """Runs the named columns (all of them without names)."""
    with small() as (prefill, decode):
        routers = columns(prefill, decode)
        done = []
        for name in names or tuple(routers):
            with routers[name]() as router:
                done.append(run(name, router, decode, ledger=name != "peer"))
            print(name, dict(done[-1].outcomes), flush=True)
            time.sleep(5)
        print(table(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
