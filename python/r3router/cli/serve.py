"""`r3router serve`: hands flags and variables to the core, which reads, checks and serves."""

import json
import os
import signal
import sys
from typing import Any

import click

from r3router.cli.options import SettingsCommand, given, setting_options
from r3router.native import core

HELP = """Route requests to engines.

Two engines, split: r3router serve --pd-disaggregation --prefill http://P:30000 8998 --decode http://D:30000

Every option is also a variable (--port is R3ROUTER_PORT) and a key of the TOML file (port = 30000). An option wins over
a variable, a variable over the file. A bare number is taken in the unit that the option's name ends in; 300s, 250ms,
1h30m and 512MiB, 8GiB are understood too. A switch can be undone with --no- in front of its name. Every flag of sglang-router
0.3.2 is taken; python/FLAGS.md says what becomes of those that are not listed here."""


def run(config: str | None, check: bool, **values: Any) -> None:
    """Serves until SIGTERM or SIGINT."""
    env = {name: value for name, value in os.environ.items() if name.startswith("R3ROUTER_")}
    sources = json.dumps({"flags": given(values), "env": env, "config": config})
    try:
        if check:
            click.echo(report(json.loads(core.check_start(sources))))
        else:
            # The core watches signals itself; the interpreter would raise a KeyboardInterrupt after it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            core.serve(sources)
    except core.SettingsError as error:
        for line in str(error).splitlines():
            click.echo(f"Error: {line}", err=True)
        sys.exit(2)
    except core.RunError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)


def report(checked: dict[str, Any]) -> str:
    """The settings as TOML, each with where it was written."""
    lines = [f"# warning: {warning}" for warning in checked["warnings"]]
    for name, value in checked["values"].items():
        origin = checked["origins"].get(name, "default")
        text = f"# {name} is not set" if value is None else f"{name} = {json.dumps(value)}"
        lines.append(f"{text:<60} # {origin}" if value is not None else text)
    return "\n".join(lines)


command = SettingsCommand(
    "serve",
    callback=run,
    help=HELP,
    short_help="Route requests to engines.",
    params=[
        *setting_options(),
        click.Option(["--config"], metavar="FILE", type=str, help="TOML file with settings."),
        click.Option(
            ["--check"],
            is_flag=True,
            help="Do all that comes before a port is taken, print the settings with where each was written, and leave.",
        ),
    ],
)
