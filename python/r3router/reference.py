"""Writes the pages that are made from the code: `python -m r3router.reference --write`. Run from the root of a clone."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from r3router.native import core

PAGES: Final[dict[str, Callable[[], str]]] = {
    "python/SETTINGS.md": core.settings_page,
    "rust/ERRORS.md": core.errors_page,
    "rust/METRICS.md": core.metrics_page,
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
    """The incident table of `target/demo.json`: its head line, then one row per router."""
    columns: list[str] = report["columns"]
    lines = [report["head"], "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in report["rows"]]
    return "\n".join(lines)


def main() -> None:
    """Checks, writes, or puts the table into README.md."""
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
