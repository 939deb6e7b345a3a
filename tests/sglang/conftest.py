"""Engines are started once for the whole run: three of them take about two minutes on two cores."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from . import environment, fleet
from .plugin_pair import pair

__all__ = ["pair"]  # a fixture

BEGAN = time.monotonic()


def pytest_configure() -> None:
    """A run that is ended from outside still stops its engines."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def trio() -> Iterator[fleet.Trio]:
    """Unified, prefill and decode engine of the hybrid model."""
    with fleet.trio("qwen3_5_moe") as started:
        yield started


@pytest.fixture(scope="session")
def router(trio: fleet.Trio) -> Iterator[fleet.Process]:
    """r3router in front of the pair."""
    with fleet.router([trio.prefill], [trio.decode]) as process:
        yield process


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was checked, against which versions, and how long it took."""
    table: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.getreports(outcome):
            if outcome in ("failed", "error") or report.when == "call" or outcome == "skipped":
                file, _, rest = report.nodeid.partition("::")
                group = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
                if rest.startswith("Test"):
                    group += f", {rest.partition('::')[0].removeprefix('Test')}"
                table.setdefault(group, Counter())[outcome] += 1
    if not table:
        return
    terminalreporter.section("real SGLang")
    versions = environment.versions()
    terminalreporter.write_line(", ".join(f"{name} {version}" for name, version in versions.items()))
    terminalreporter.write_line("| checks | " + " | ".join(("passed", "failed", "skipped")) + " |")
    terminalreporter.write_line("|---|---|---|---|")
    for group, counts in table.items():
        failed = counts["failed"] + counts["error"]
        terminalreporter.write_line(f"| {group} | {counts['passed']} | {failed} | {counts['skipped'] + counts['xfailed']} |")
    terminalreporter.write_line(f"{sum(sum(c.values()) for c in table.values())} checks in {time.monotonic() - BEGAN:.0f} s")
