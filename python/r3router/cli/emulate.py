"""`r3router emulate`: a fleet of emulated engines on loopback."""

import ipaddress
import json
import signal
import sys
from typing import Any, Final

import click

from r3router.cli.numbers import Bounded, Type, bounded
from r3router.native import core


class Host(Type):
    """A literal IP address: engines tell it to each other."""

    name = "ip"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The address; a usage error with the option's name otherwise."""
        try:
            return str(ipaddress.ip_address(value))
        except ValueError:
            self.fail(f"{value!r} is not an IP address.", param, ctx)


# Name of the option in the core, type, help. A test compares the names with the core's.
OPTIONS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("prefill", int, "Prefill ranks in all."),
    ("prefill_engines", int, "Engines over which the prefill ranks are spread evenly."),
    ("decode", int, "Decode ranks in all."),
    ("decode_engines", int, "Engines over which the decode ranks are spread evenly."),
    ("regular", int, "Regular (unsplit) ranks in all; with --prefill 0 --decode 0 for a fleet without PD."),
    ("regular_engines", int, "Engines over which the regular ranks are spread evenly."),
    ("host", Host(), "Address to listen on."),
    ("port", int, "First port; engines take the following ones, then the bootstrap servers. 0 takes free ones."),
    ("engine_version", click.Choice(["0.5.23", "0.5.12"]), "SGLang release to play."),
    ("scale", float, "Time runs this many times faster, and everything on the wire is as much smaller."),
    ("layers", int, "Layers with experts (num_hidden_layers)."),
    ("top_k", int, "Experts per token (num_experts_per_tok)."),
    ("experts", int, "Experts; above 256 the narrow form takes two bytes."),
    ("plugin", bool, "Engines have the r3router plug-in: R3 leaves as a descriptor."),
    ("fast", bool, "Prepared small replies at once, no model (for benchmarks)."),
    ("max_running", int, "Running requests of one rank. Left out: the model's."),
    ("max_total_tokens", int, "KV pool of one rank, tokens, unscaled. Left out: the model's."),
    ("mamba_slots", int, "Mamba slots of one decode rank; 0 for a model without state. Left out: the model's."),
    ("timeout", Bounded(float, 0.001, 2_592_000), "The engines' waiting and bootstrap timeouts, seconds, unscaled. Left out: 300."),
    ("model_name", str, "Model name that the engines answer with."),
    ("threads", int, "Threads that serve the fleet."),
)


def params() -> list[click.Parameter]:
    """One option for each of the core's."""
    defaults, bounds = json.loads(core.emulate_options()), core.emulate_bounds()
    return [
        click.Option(
            [f"--{name.replace('_', '-')}"],
            is_flag=kind is bool,
            type=None if kind is bool else bounded(bounds, name, kind),
            default=defaults[name],
            show_default=defaults[name] is not None and kind is not bool,
            help=text,
        )
        for name, kind, text in OPTIONS
    ]


def run(**values: Any) -> None:
    """Plays the fleet until SIGTERM or SIGINT."""
    try:
        # The core watches signals itself; the interpreter would raise a KeyboardInterrupt after it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        core.emulate(json.dumps(values))
    except core.SettingsError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except core.RunError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)


command = click.Command(
    "emulate",
    callback=run,
    params=params(),
    help="""Run a fleet of emulated engines on loopback, and print the router command that fits it.

The engines answer as SGLang does, with its queues, clocks, costs and R3 payloads; no GPU and no model is needed. Without options it is
the fleet of the incident: four prefill and four decode ranks.""",
)
