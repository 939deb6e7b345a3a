"""`r3router demo`: the incident and its cure on an emulated fleet."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from r3router.cli.numbers import bounded
from r3router.native import core


@click.command(short_help="Show the incident and its cure on an emulated fleet.")
@click.option("--out", default="target/demo.json", show_default=True, help="Where the result goes, as JSON.")
@click.option("--peers", envvar="R3ROUTER_PEERS", metavar="FOLDER", help="Folder of environments in which `make peers` installed peers.")
@click.option("--seconds", type=bounded(core.demo_bounds(), "seconds", float), help="Length of a run, seconds of the fleet's time.")
@click.option(
    "--scale",
    type=bounded(core.demo_bounds(), "scale", float),
    help="Time runs this many times faster, and everything on the wire is as much smaller.",
)
@click.option("--per-gpu", type=bounded(core.demo_bounds(), "per_gpu", int), help="Requests outstanding per GPU.")
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="LETTER",
    type=click.Choice(["a", "a2", "b", "c"]),
    help="Run only this column (a, a2, b, c). Repeatable.",
)
def command(out: str, peers: str | None, columns: tuple[str, ...], **more: Any) -> None:
    """Show the incident and its cure on an emulated fleet.

    Plays the fleet of the public report (four prefill and four decode ranks, 96 requests per GPU, 57k-token prompts, R3 on) behind an
    unbounded router, behind sglang-router where its wheel is installed, and behind r3router, one after the other, and prints a table.
    Ends with 1 when something does not hold that the table is to show.
    """
    peer = Path(peers or ".venv-peers") / "sglang-router" / "bin" / "python"
    options: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
    options |= {"out": out, "columns": list(columns), "router": [sys.executable, "-m", "r3router", "serve"]}
    if os.access(peer, os.X_OK):
        options["peer"] = [str(peer), "-m", "sglang_router.launch_router"]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    # The core runs without the interpreter, which would otherwise keep an interrupt until the end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        held = core.demo(json.dumps(options))
    except core.R3RouterError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2 if isinstance(error, core.SettingsError) else 1)
    click.echo(f"written: {out}")
    sys.exit(0 if held else 1)
