"""Runs the benchmarks and prints their tables: `python benches/run.py [PART ...] [--write]`.

Beside each table stand the targets with what was measured. `--write` also renders benches/results/bench.md with machine and date. It
fails when a run fails (a request unanswered, a server that does not start), and only then: a missed target is a line on the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from e2e import fleet, held, instructions, payload, small, start  # noqa: E402

Rows = list[dict[str, Any]]
# What is wanted, what was measured, whether it holds; None where nothing was measured.
Verdict = tuple[str, str, bool | None]
RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """Processor, cores, memory and kernel of this machine."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"


def markdown(rows: Rows) -> str:
    """Rows of equal keys as a table."""
    head = list(rows[0])
    cells = [["" if row[key] is None else str(row[key]) for key in head] for row in rows]
    widths = [max(len(key), *(len(line[at]) for line in cells)) for at, key in enumerate(head)]
    lines = [head, ["-" * width for width in widths], *cells]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines)


def page(title: str, table: str, verdicts: list[Verdict]) -> str:
    """One part as text: its table, then the targets."""
    words = {True: "met", False: "**missed**", None: "not measured"}
    targets: Rows = [{"target": target, "measured": found, "": words[holds]} for target, found, holds in verdicts]
    return f"## {title}\n\n{table}\n\n{markdown(targets)}"


def at_most(target: str, value: float, limit: float, unit: str) -> Verdict:
    """A verdict on an upper bound."""
    return (target, f"{value:g} {unit}".strip(), value <= limit)


def at_least(target: str, value: float, limit: float, unit: str) -> Verdict:
    """A verdict on a lower bound."""
    return (target, f"{value:,g} {unit}".strip(), value >= limit)


def admission(quick: bool) -> str:
    """The core's own benchmark."""
    command = ["cargo", "bench", "--quiet", "--profile", "fast", "-p", "r3router-core", "--bench", "admission"]
    env = os.environ | ({"BENCH_CYCLES": "20000"} if quick else {})
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    table = done.stdout.strip()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if re.match(r"\| \d", line)]
    if not rows:
        raise RuntimeError("the admission benchmark printed no table:\n" + table)
    nanoseconds = max(float(row[3]) for row in rows)
    allocations = max(float(row[5]) for row in rows)
    return page(
        "Admission and pairing, 100,000 requests queued",
        table,
        [
            at_most("<= 1,000 ns a decision, slowest row", nanoseconds, 1000, "ns"),
            at_most("no allocation on the path", allocations, 0, "allocations a decision"),
        ],
    )


def small_bodies(quick: bool) -> str:
    """Throughput and latency."""
    rows = small.measure(*((1, 1.0) if quick else (3, 2.0)))
    of = {(row["mode"], row["router"]): row for row in rows}
    ours = of["pd", "r3router"]
    return page(
        "Small bodies: closed loop for throughput, 1,000 requests/s for latency",
        markdown(rows),
        [
            at_least("regular: >= 20,000 req/s per router core", of["regular", "r3router"]["req/s per router core"], 20_000, "req/s"),
            at_least("PD: >= 10,000 req/s per router core", ours["req/s per router core"], 10_000, "req/s"),
            at_most("PD: added p50 <= 100 us", ours["added p50 us"], 100, "us"),
            at_most("PD: added p99 <= 500 us", ours["added p99 us"], 500, "us"),
        ],
    )


def counted(quick: bool) -> str:
    """Instructions a small request. Nobody set a target for them; they say what the machine's other work hides in the figures above."""
    rows = instructions.measure(200 if quick else 2000)
    ours = {row["mode"]: row["thousand instructions"] for row in rows if row["router"] == "r3router"}
    for row in rows:
        row["of r3router's"] = f"{row['thousand instructions'] / ours[row['mode']]:.2f} x"
    table = markdown(rows) if rows else "Not measured: valgrind is not installed."
    return f"## Instructions of user code, a small request (callgrind)\n\n{table}"


def payloads(quick: bool) -> str:
    """Large replies."""
    text_mb, repeats = (10, 1) if quick else (100, 5)
    rows = payload.measure(text_mb, (1, 8), repeats)
    ours = [row for row in rows if row["case"] == payload.MERGED]
    at_hand = [row for row in rows if row["case"] == payload.AT_HAND]
    scale = 100 / text_mb
    return page(
        f"R3 replies, {text_mb} MB of text from each leg",
        markdown(rows),
        [
            at_most("CPU <= 0.20 s a reply of 100 MB, by way of the arena", scale * max(r["CPU s/reply"] for r in ours), 0.20, "s"),
            at_most("heap beyond the arena <= 8 MB a reply", max(r["beyond arena MB/reply"] for r in ours), 8, "MB"),
            at_most("CPU <= 1.2 x relaying the same bytes, spliced as text", max(r["CPU / relay"] for r in at_hand), 1.2, "x"),
        ],
    )


def held_rows(quick: bool) -> str:
    """Samples between prefill's reply and decode's."""
    samples, tokens, hold = (10, 6_000, 5.0) if quick else (200, 60_000, 60.0)
    row = held.measure(samples, tokens, hold, 12 << 30)
    per_sample = (row["heap beyond arena MB"] - row["request bodies MB"]) / samples
    return page(
        f"{samples} R3 samples of {tokens:,} tokens between prefill's reply and decode's",
        markdown([row]),
        [
            at_most("arena <= 0.2 x the text", row["arena / text"], 0.2, "x"),
            at_most("heap flat: <= 1 MB a held sample beyond arena and request body", round(per_sample, 2), 1, "MB"),
        ],
    )


def starting(quick: bool) -> str:
    """Start and idle."""
    rows = [start.ready(name, 1 if quick else 5) for name in fleet.names()]
    queue = start.queued(500 if quick else 4000)
    wheel = start.wheel_mb()
    return page(
        "Start, idle, queue",
        markdown(rows) + "\n\n" + markdown([queue]),
        [
            at_most("ready <= 300 ms after exec", rows[0]["ready ms"], 300, "ms"),
            at_most("idle memory <= 32 MB", rows[0]["idle RSS MB"], 32, "MB"),
            at_most("a queued request beyond its body <= 8 kB", queue["kB a queued request more"], 8, "kB"),
            ("wheel <= 10 MB (`make wheel`)", "" if wheel is None else f"{wheel:.1f} MB", None if wheel is None else wheel <= 10),
        ],
    )


PARTS: dict[str, Callable[[bool], str]] = {
    "admission": admission,
    "small": small_bodies,
    "instructions": counted,
    "payload": payloads,
    "held": held_rows,
    "start": starting,
}


def main() -> None:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all when none is named")
    parser.add_argument("--quick", action="store_true", help="short rounds and small payloads, to see that everything runs")
    parser.add_argument("--write", action="store_true", help="render benches/results/bench.md; parts that are not run keep their text")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if args.quick and args.write:
        parser.error("--quick is no measurement: nothing to write")
    store = Path("target/bench-parts")
    for part in args.parts or PARTS:
        begun, busy = time.monotonic(), Path("/proc/loadavg").read_text().split()[0]
        print(f"== {part} ...", flush=True)
        text = PARTS[part](args.quick)
        took = time.monotonic() - begun
        text += f"\n\n`python benches/run.py {part}`, {datetime.date.today():%Y-%m-%d}, {took:.0f} s; load average before: {busy}."
        print(text + "\n", flush=True)
        if args.write:
            store.mkdir(parents=True, exist_ok=True)
            (store / f"{part}.md").write_text(text + "\n")
    if args.write:
        pages = [path.read_text() for part in PARTS if (path := store / f"{part}.md").exists()]
        head = "# Benchmarks: results\n\nRendered by `make bench` (`python benches/run.py --write`); "
        head += "what is measured and how: [../README.md](../README.md).\n\n"
        head += f"Machine: {machine()}. Programs: {json.dumps(fleet.versions())}.\n\n"
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "bench.md").write_text(head + "\n".join(pages))
        print(f"written: {RESULTS / 'bench.md'}")


if __name__ == "__main__":
    main()
