"""`r3router config show`: the settings that come of flags, variables and file, each with where it was written; keys are not shown."""

from typing import Any

import click

from r3router.cli.options import SettingsCommand, setting_options
from r3router.cli.serve import run


def show(config: str | None, **values: Any) -> None:
    """Prints them and starts nothing; the same as `serve --check`."""
    run(config, True, **values)


command = click.Group(
    "config",
    help="What the router would run with.",
    commands=[
        SettingsCommand(
            "show",
            callback=show,
            help="Print the settings with where each was written; keys as ***. It takes what `serve` takes, and starts nothing.",
            short_help="Print the settings with where each was written.",
            params=[*setting_options(), click.Option(["--config"], metavar="FILE", type=str, help="TOML file with settings.")],
        )
    ],
)
