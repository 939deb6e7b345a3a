"""`r3router simulate`: scenarios in virtual time."""

import json
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from r3router.native import core

COLUMNS = (
    *("scenario", "completed", "failed", "timeouts", "rollouts/s", "in transfer", "running"),
    *("wait in router s (p50/p99)", "in engine s (p50/p99)"),
)


def row(report: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one run."""

    def wait(name: str) -> str:
        return f"{report[name]['p50']:.1f} / {report[name]['p99']:.1f}"

    return (
        report["scenario"],
        str(report["completed"]),
        str(report["failed"]),
        str(report["engine_timeouts"]),
        f"{report['rollouts_per_s']:.2f}",
        str(report["peak_transfer"]),
        f"{report['mean_running']:.1f}",
        wait("router_wait_s"),
        wait("engine_wait_s"),
    )


def play(path: Path, number: int, count: int) -> str:
    """Plays one scenario; says on standard error that it begins and, as soon as it is through, what came of it."""
    click.echo(f"[{number}/{count}] {path.stem}: playing", err=True)
    began = time.monotonic()
    report = core.simulate(path)
    cells = dict(zip(COLUMNS, row(json.loads(report)), strict=True))
    click.echo(
        f"[{number}/{count}] {path.stem}: completed {cells['completed']}, failed {cells['failed']}, "
        f"{cells['rollouts/s']} rollouts/s, in {time.monotonic() - began:.1f} s",
        err=True,
    )
    return report


def run_sweep(folder: Path, write: Path | None) -> None:
    """Prints a folder's table, writes it to `write`, and exits with 1 when a target is missed."""
    command = f"python -m r3router simulate --sweep {folder}" + (f" --write {write}" if write is not None else "")
    date = datetime.now(timezone.utc).date().isoformat()
    swept = json.loads(core.sweep(folder, date, command, lambda line: click.echo(line, err=True)))
    if write is None:
        click.echo(swept["page"])
    else:
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(swept["page"])
    if swept["missed"]:
        click.echo(f"{len(swept['missed'])} scenarios miss a target", err=True)
        sys.exit(1)


@click.command(short_help="Run scenarios in virtual time with the real admission.")
@click.argument("scenarios", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="SCENARIO.toml...")
@click.option("--json", "as_json", is_flag=True, help="Print each report whole, as JSON.")
@click.option(
    "--sweep",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="FOLDER",
    help="Hold the computed window to its targets over a folder of scenarios: against fixed windows and none. Exit code 1: a miss.",
)
@click.option(
    "--write", type=click.Path(path_type=Path, dir_okay=False), metavar="PAGE.md", help="With --sweep: write the table there too."
)
def command(scenarios: tuple[Path, ...], as_json: bool, sweep: Path | None, write: Path | None) -> None:
    """Run scenarios in virtual time with the real admission: minutes of fleet time in seconds. Scenarios are in tests/sim/scenarios."""
    if bool(scenarios) == (sweep is not None):
        raise click.UsageError("name scenario files, or a folder with --sweep FOLDER")
    if write is not None and sweep is None:
        raise click.UsageError("--write goes with --sweep")
    # The core runs without the interpreter, which would otherwise keep an interrupt until the end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if sweep is not None:
            run_sweep(sweep, write)
            return
        reports = [play(path, number, len(scenarios)) for number, path in enumerate(scenarios, 1)]
    except core.SettingsError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    if as_json:
        click.echo("\n".join(reports))
        return
    lines = [COLUMNS, *(row(json.loads(report)) for report in reports)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(COLUMNS))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        click.echo("  ".join([line[0].ljust(widths[0]), *cells[1:]]))
