"""Writes the pages that are made from the code: `python -m r3router.reference --write`. Run from the root of a clone."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from r3router.deploy import alerts, board, values
from r3router.native import core
from r3router.output import may_close

CHART: Final = "deploy/helm/r3router"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "python/ADMIN.md": core.admin_page,
    "python/CHECKS.md": core.checks_page,
    "python/SETTINGS.md": core.settings_page,
    "python/FLAGS.md": core.flags_page,
    "rust/ERRORS.md": core.errors_page,
    "rust/METRICS.md": core.metrics_page,
    f"{CHART}/values.schema.json": values.page,
    f"{CHART}/files/alerts.yaml": alerts.page,
    f"{CHART}/files/dashboard.json": board.page,
}

BEGIN: Final = "<!-- incident table: written by `make readme-table` -->"
END: Final = "<!-- end of the incident table -->"


def drifted(root: Path) -> list[str]:
    """The pages under `root` that differ from the code."""
    return [name for name, page in PAGES.items() if not (root / name).is_file() or (root / name).read_text("utf-8") != page()]


def write(root: Path) -> list[str]:
    """Writes the pages that differ, and returns their names."""
    names = drifted(root)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(PAGES[name](), "utf-8")
    return names


def put_table(readme: str, table: str) -> str:
    """`readme` with `table` between the markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{before}{begin}\n{table.strip()}\n{end}{after}"


def demo_table(report: dict[str, Any]) -> str:
    """The incident table of `target/demo.json`: what ran on what, then one row per router."""

    def seconds(pair: list[float]) -> str:
        return f"{pair[0]:.1f} / {pair[1]:.1f}"

    o, scale = report["options"], f"{report['options']['scale']:g}"
    head = (
        f"{o['prefill']} prefill and {o['decode']} decode ranks, {o['per_gpu']} requests outstanding per GPU, "
        f"{o['cached_tokens']:,} shared ({o['families']} prefixes) and {o['new_tokens'][0]:,} to {o['new_tokens'][1]:,} new prompt tokens, "
        f"{o['output_tokens']} output tokens (median), R3 on, "
        f"engines as SGLang {o['engine_version']}. Emulated on {report['machine']}, {report['date']}, at scale 1:{scale}: "
        f"on the wire everything is {scale} times smaller and faster than in the table; {o['seconds']:,.0f} s of the fleet's time each."
    )
    columns = (
        *("router", "completed", "engine timeouts", "wrong R3 bytes", "rollouts/s", "peak transfers per decode rank"),
        *("mean running per decode rank", "wait in router, p50 / p99 s", "wait in engine, p50 / p99 s"),
    )
    lines = [head, "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for column in report["columns"]:
        cells = [
            column["name"],
            column["completed"],
            column["engine_timeouts"],
            column["wrong_bytes"],
            f"{column['rollouts_per_second']:.2f}",
            column["peak_transfer"],
            f"{column['mean_running']:.1f}",
            seconds(column["router_wait"]),
            seconds(column["engine_wait"]),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    notes = [note for column in report["columns"] for note in demo_notes(column)]
    lines += ["", *notes, *(f"Left out: {why}." for why in report["left_out"])]
    return "\n".join(lines).rstrip()


def demo_notes(column: dict[str, Any]) -> list[str]:
    """What the row of a router leaves unsaid: replies without R3, and other answers than 200."""
    notes = []
    if column["missing_r3"]:
        missing, all_of_them = column["missing_r3"], column["completed"]
        notes.append(f"{missing:,} of its {all_of_them:,} replies had no R3, and each byte that is missing counts as wrong")
    for answer, count in sorted(column["failures"].items(), key=lambda pair: -pair[1])[:3]:
        code = re.search(r'"code":"(\w+)"', answer)
        notes.append(f"{count:,} requests got {answer.split(':')[0]}{f' `{code[1]}`' if code else ''}")
    return [f"- {column['name']}: {'; '.join(notes)}."] if notes else []


def main() -> None:
    """Checks, writes, or puts the table into README.md."""
    with may_close():
        run()


def run() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages that differ")
    parser.add_argument("--demo-table", type=Path, metavar="DEMO.json", help="put the table of a demo into README.md")
    args = parser.parse_args()
    root = Path.cwd()
    if args.demo_table:
        readme = root / "README.md"
        table = demo_table(json.loads(args.demo_table.read_text("utf-8")))
        readme.write_text(put_table(readme.read_text("utf-8"), table), "utf-8")
        print(f"README.md: table of {args.demo_table}")
    elif args.write:
        print("written: " + (", ".join(write(root)) or "nothing, all pages are up to date"))
    elif names := drifted(root):
        sys.exit(f"these pages differ from the code: {', '.join(names)}; run `make docs`")


if __name__ == "__main__":
    main()
