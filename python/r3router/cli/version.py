"""`r3router version`."""

import platform

import click

from r3router.native import core


@click.command()
def command() -> None:
    """Print the version."""
    click.echo(f"r3router {core.__version__} ({core.BUILD} build, Python {platform.python_version()})")
