"""The command line. Commands are imported when they are called, so that each starts with what it needs and no more."""

import importlib
import sys
from typing import Final

import click

from r3router.output import may_close

# Name, and what `--help` says of it. Each lives in a module of the same name, as `command`.
COMMANDS: Final = {
    "serve": "Route requests to engines.",
    "config": "Show what the router would run with.",
    "check": "Ask every engine, and say what does not fit.",
    "top": "Show every rank of a running router, live; drain and undrain.",
    "emulate": "Run a fleet of emulated engines on loopback, with the router command that fits it.",
    "simulate": "Run scenarios in virtual time with the real admission.",
    "demo": "Show the incident and its cure on an emulated fleet.",
    "agent": "Serve R3 rows of the engines on this host.",
    "sink": "Put R3 rows into a Mooncake store, for trainers that read from one.",
    "version": "Print the version.",
}


class Commands(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"r3router.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"r3router.cli.{cmd_name}.command is not a command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        # `r3router --prefill …` is what people type who come from a router without commands.
        if args and args[0].startswith("--") and args[0] != "--help":
            ctx.fail(f"the command is missing: write `{ctx.command_path} serve {args[0]} …`")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Without importing any of them.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "ignore_unknown_options": True},
)
def group() -> None:
    """Router for RL rollouts on SGLang: prefill/decode pairs, admission control, routing payloads out of band."""


def main() -> None:
    """Runs the command line and leaves with its status: 0 done, 1 failed, 2 written wrongly."""
    with may_close():
        group(prog_name="r3router" if sys.argv[0].endswith("r3router") else "python -m r3router")
