"""Runs the benchmarks and prints their tables: `python benches/run.py [small] [payload] [held] [admission] [--write]`.

`--write` also renders benches/results/end-to-end.md with machine and date. Nothing here passes or fails: the targets stand beside the
figures, and the reader sees both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from e2e import fleet, held, payload, small  # noqa: E402

PARTS = ("admission", "small", "payload", "held")


def machine() -> str:
    """Processor, cores, memory and kernel of this machine."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as a table."""
    head = list(rows[0])
    cells = [["" if row[key] is None else str(row[key]) for key in head] for row in rows]
    widths = [max(len(key), *(len(line[at]) for line in cells)) for at, key in enumerate(head)]
    lines = [head, ["-" * width for width in widths], *cells]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines)


def admission() -> str:
    """The core's own benchmark, as it prints it."""
    done = subprocess.run(
        ["cargo", "bench", "--quiet", "-p", "r3router-core", "--bench", "admission"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> None:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all when none is named")
    parser.add_argument("--quick", action="store_true", help="short rounds and small payloads, to see that everything runs")
    parser.add_argument("--write", action="store_true", help="render benches/results/end-to-end.md")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    parts = args.parts or list(PARTS)
    quick = args.quick
    pages = [f"Measured on {machine()}, {datetime.date.today():%Y-%m-%d}; {json.dumps(fleet.versions())}."]
    for part in parts:
        print(f"== {part} ...", flush=True)
        if part == "admission":
            text = "Admission and pairing, 100k queued (target: <= 1 us a decision, no allocation).\n\n```\n" + admission() + "\n```"
        elif part == "small":
            rows = small.measure(1 if quick else 3, 1.0 if quick else 4.0)
            text = (
                "Small bodies (targets: added p50 <= 100 us and p99 <= 500 us in PD at 1,000 req/s; per router core >= 20,000 req/s "
                "regular, >= 10,000 PD).\n\n" + markdown(rows)
            )
        elif part == "payload":
            rows = payload.measure(10 if quick else 100, (1, 8), 1 if quick else 3)
            text = (
                "R3 replies, both legs of the size given (targets: <= 0.20 CPU s a reply of 100 MB; heap beyond arena <= 8 MB a reply)."
                "\n\n" + markdown(rows)
            )
        else:
            samples, tokens, hold = (10, 6_000, 5.0) if quick else (200, 60_000, 90.0)
            rows = [held.measure(samples, tokens, hold, 12 << 30)]
            text = "R3 samples between prefill's reply and decode's (target: arena <= 0.2 x text, heap flat).\n\n" + markdown(rows)
        print(text + "\n", flush=True)
        pages.append(text)
    if args.write:
        target = Path(__file__).parent / "results" / "end-to-end.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text("# End-to-end benchmarks\n\nRendered by `python benches/run.py --write`.\n\n" + "\n\n".join(pages) + "\n")
        print(f"written: {target}")


if __name__ == "__main__":
    main()
