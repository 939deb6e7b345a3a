"""What R3 costs a client and the router, in the reply and by reference: `python benches/r3.py [PART ...] [--write] [--counts 1,8,64]`.

One table and its targets. `--write` renders benches/results/r3.md with machine and date. The exit code is 1 when a target is missed; a row
that could not be measured here says why by name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from e2e import fleet, references  # noqa: E402
from e2e.references import ARENA, HOWS, SMALL_ARENA, Row  # noqa: E402
from run import RESULTS, Verdict, at_least, at_most, machine, markdown  # noqa: E402

STORE = Path("target/bench-parts")
PARTS = (
    "httpx",
    "ours",
    "http",
    "mapped",
    "nixl",
    "arena",
    "plugin-httpx",
    "plugin-ours",
    "plugin-http",
    "plugin-mapped",
    "plugin-nixl",
    "emulator",
)
"""Each runs by itself, so that a machine that others want can be had in turns; the first five are engines as they come."""
MEMORY_OF_A_SAMPLE = {"httpx": 3.2, "ours": 1.3}
"""What a client of in-line replies holds for a sample, in units of its text: body and rows, and a second copy while a body is joined."""


def counts_that_fit(how: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The counts, smaller ones where memory forces it."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 1e6
    cached = next((int(line.split()[1]) / 1e3 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Cached")), 0.0)
    most = int(0.85 * (free + cached - ARENA / 1e6) / (references.TEXT_MB * MEMORY_OF_A_SAMPLE.get(how, 0.4)))
    return tuple(sorted({min(count, max(1, most)) for count in counts}))


def part(name: str, counts: tuple[int, ...]) -> Iterator[Row]:
    """The rows of one part."""
    if name in HOWS:
        yield from references.plain_engines(counts_that_fit(name, counts), (name,))
    elif name == "arena":
        note = f"arena of {SMALL_ARENA >> 20} MiB: {SMALL_ARENA // round(references.NARROW_MB * 1e6)} samples fit"
        yield from references.plain_engines((min(8, max(counts)),), ("mapped",), arena=SMALL_ARENA, note=note)
    elif name == "emulator":
        yield from references.emulated(tuple(count for count in counts if count <= 8))
    else:
        how = name.removeprefix("plugin-")
        yield from references.plugged_engines(counts_that_fit(how, counts), (how,))


def warm() -> float:
    """Touches the memory that is free once, in a process of its own; seconds that it took.

    The first touch of a page costs a virtual machine a hundred times what later ones cost (its host finds the page), and would be charged
    to whichever row comes first.
    """
    began = time.monotonic()
    size = int(0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")) >> 20
    code = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]) << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"
    subprocess.run([sys.executable, "-c", code, str(size)], check=True, timeout=300)
    return time.monotonic() - began


def line(row: Row) -> dict[str, Any]:
    """A row as the table shows it."""

    def number(value: float | None, digits: int, factor: float = 1.0) -> str | None:
        return None if value is None else f"{value * factor:,.{digits}f}"

    return {
        "engines": row.engines,
        "how": row.how,
        "at once": row.samples,
        "wall s": number(row.wall, 3),
        "the same without rows, s": number(row.bare_wall, 3),
        "client CPU s": number(row.cpu, 3),
        "longest freeze ms": number(row.freeze, 0, 1e3),
        "client peak RSS MB": number(row.client_rss_mb, 0),
        "JSON bytes": number(row.json_bytes, 0),
        "of them text and ids": number(row.said_bytes, 0),
        # An emulated sample takes half a minute, in which the polls of 16 engines vary by more than a reply costs.
        "router CPU ms/sample": None if row.engines.startswith("emulator") else number(row.router_cpu, 2, 1e3),
        "the same without rows": None if row.engines.startswith("emulator") else number(row.bare_cpu, 2, 1e3),
        "router peak RSS MB": number(row.router_rss_mb, 0),
        "R3 text into the router, bytes/sample": number(None if row.r3_in is None else row.r3_in / row.samples, 0),
        "note": row.note,
    }


def verdicts(rows: list[Row], decode: float) -> list[Verdict]:
    """Targets beside what was measured."""
    found: list[Verdict] = []

    def of(engines: str, how: str) -> list[Row]:
        return [r for r in rows if (r.engines, r.how) == (engines, HOWS[how]) and r.wall is not None]

    for engines in ("as they come", "with the plug-in"):
        target = f"{engines}, 8 at once: reference + mmap at least 100 times faster than in-line + httpx"
        fast, slow = ([r for r in of(engines, how) if r.samples == 8] for how in ("mapped", "httpx"))
        if fast and slow and fast[0].wall and slow[0].wall:
            found.append(at_least(target, round(slow[0].wall / fast[0].wall), 100, "times"))
        else:
            found.append((target, "", None))
    limit = 1.5 * decode
    target = f"router CPU per full leg, reference + mmap <= 1.5 x one base64-simd decode of its text ({decode * 1e3:.1f} ms)"
    legs = [r.router_cpu for r in of("as they come", "mapped") if r.router_cpu is not None]
    found.append(at_most(target, round(max(legs) / decode, 2), limit / decode, "x") if legs else (target, "", None))
    for cap in (ARENA, SMALL_ARENA):
        small = cap == SMALL_ARENA
        peaks = [r.router_rss_mb for r in rows if r.router_rss_mb is not None and r.note.startswith("arena of") == small]
        target = f"router RSS <= arena of {cap >> 20} MiB + 64 MB, whatever is in flight"
        found.append(at_most(target, round(max(peaks)), cap / 1e6 + 64, "MB") if peaks else (target, "", None))
    replies = [(r.json_bytes, r.said_bytes or 0) for r in rows if r.json_bytes is not None and r.how.startswith("reference")]
    target = "JSON of a reply by reference <= 4 KB"
    found.append(at_most(target, max(whole for whole, _ in replies), 4096, "bytes") if replies else (target, "", None))
    target = "the same beside what was generated (`text`, `output_ids`)"
    found.append(at_most(target, max(whole - said for whole, said in replies), 4096, "bytes") if replies else (target, "", None))
    plugged = [r for r in rows if r.engines != "as they come" and r.how.startswith("reference") and r.wall is not None]
    # What is left is the text of descriptors, some hundred bytes.
    moved = [(r.r3_in or 0) / r.samples > 2048 or r.fetches for r in plugged]
    target = "plug-in, by reference: payload bytes through the router 0"
    words = f"{sum(map(bool, moved))} of {len(moved)} rows with payload"
    found.append((target, words, not any(moved)) if plugged else (target, "", None))
    # Read by HTTP the router is asked for nothing more: the rows come from the agents.
    prepared = [r for r in plugged if r.engines == "with the plug-in"]
    costs = [(r.router_cpu, r.bare_cpu) for r in prepared if r.router_cpu is not None and r.bare_cpu is not None]
    kilobytes = len(json.dumps(references.body(), separators=(",", ":"))) / 1e3
    target = (
        f"plug-in, by reference: router CPU <= 1 ms a reply, its request of {kilobytes:.0f} KB read once and sent to two engines included"
    )
    found.append(at_most(target, round(max(cpu for cpu, _ in costs) * 1e3, 2), 1.0, "ms") if costs else (target, "", None))
    target = "plug-in, by reference: router CPU <= 1 ms a reply beyond the same request without rows"
    found.append(at_most(target, round(max(cpu - bare for cpu, bare in costs) * 1e3, 2), 1.0, "ms") if costs else (target, "", None))
    return found


WHY = """## What the targets that are missed are made of

Router CPU of a plug-in reply: of 1.6 ms (64 samples, `perf record`, before ids were looked at eight at a time) 53 % is the kernel -
406 KB of request in and the same out to two engines, and page faults on buffers of that size -, 18 % the scan of 58,000 ids, 7 % malloc
and memmove, and nothing else of the router's is above 4 %. The column "the same without rows" has the same request without R3: what rows
by reference add is the difference of the two.

mmap with engines as they come, by reading the code and not by a profile: what is left after the sample's end is decode's own 2,000 rows
(4 MB of text a sample), the reply, one `open` and one `mmap` a sample in the client, and a request of 406 KB that was sent before.
The prompt's rows are in their file by then. In slower hours of the same machine the factor was 26 and 42.

The largest reply is the emulated engines', with 12 bytes of text and ids a token. Their rows say nothing of router CPU: a sample takes half
a minute, in which the polls of 16 engines vary by more than a reply costs.
"""
"""What was found beside the table; not rendered from a run."""


def render(rows: list[Row], decode: float, took: float, busy: str) -> str:
    """The page's text."""
    words = {True: "met", False: "**missed**", None: "not measured"}
    judged = verdicts(rows, decode)
    targets = [{"target": target, "measured": measured, "": words[holds]} for target, measured, holds in judged]
    have = [name for name in ("httpx", "pybase64", "uvloop") if references.installed(name)]
    head = (
        "# R3 in the reply and by reference\n\n"
        "Rendered by `make bench-r3` (`python benches/r3.py --write`); what is measured and how: [../README.md](../README.md).\n\n"
        f"Samples of {references.ROWS + 1:,} tokens ({references.PROMPT:,} of them prompt) of a "
        f"{references.LAYERS} x {references.TOP_K} model: "
        f"{references.TEXT_MB:.0f} MB of base64, {references.NARROW_MB:.0f} MB narrow. All through a running router.\n\n"
        f"Machine: {machine()}. Programs: {json.dumps(fleet.versions())}; the clients have {', '.join(have) or 'no extras'}. "
        f"{datetime.date.today():%Y-%m-%d}, {took:.0f} s; load average before: {busy}.\n\n"
    )
    return head + markdown([line(row) for row in rows]) + "\n\n" + markdown(targets) + "\n\n" + WHY


def main() -> int:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all when none is named")
    parser.add_argument("--counts", default="1,8,64", help="samples at once")
    parser.add_argument("--write", action="store_true", help="render benches/results/r3.md; parts that are not run keep their rows")
    parser.add_argument("--warm", action="store_true", help="touch the machine's free memory first")
    args = parser.parse_args()
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    counts = tuple(int(count) for count in args.counts.split(","))
    begun, busy = time.monotonic(), Path("/proc/loadavg").read_text().split()[0]
    if args.warm:
        print(f"touched the free memory once: {warm():.0f} s", flush=True)
    decode = references.decode_seconds()
    print(f"one base64-simd decode of {references.TEXT_MB:.0f} MB: {decode * 1e3:.1f} ms", flush=True)
    STORE.mkdir(parents=True, exist_ok=True)
    for name in args.parts or PARTS:
        found = []
        for row in part(name, counts):
            print(" | ".join(str(value) for value in line(row).values()), flush=True)
            found.append(row)
        (STORE / f"r3-{name}.json").write_text(json.dumps([asdict(row) for row in found]))
    wanted = PARTS if args.write else args.parts or PARTS
    stored = [path for name in wanted if (path := STORE / f"r3-{name}.json").exists()]
    rows = [Row(**row) for path in stored for row in json.loads(path.read_text())]
    text = render(rows, decode, time.monotonic() - begun, busy)
    print("\n" + text)
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "r3.md").write_text(text)
        print(f"written: {RESULTS / 'r3.md'}")
    return int(any(holds is False for _, _, holds in verdicts(rows, decode)))


if __name__ == "__main__":
    sys.exit(main())
