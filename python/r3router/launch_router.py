"""The names of `sglang_router.launch_router`: `RouterArgs`, `launch_router(args)` and `python -m r3router.launch_router`.

A framework that imports them from `sglang_router` finds the same class with the same fields here. Every setting of r3router is a field
too. A field that was not changed says nothing, so that variables and a file (`config`) can: see python/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from r3router.cli.options import PeerFlag, Setting, describe, peer_flags, settings
from r3router.native import core
from r3router.output import may_close

__all__ = ["RouterArgs", "launch_router", "main", "parse_router_args"]

# Where the field of sglang-router's dataclass is named otherwise than its flag.
FIELDS: Final = {"prefill": "prefill_urls", "decode": "decode_urls", "tls_cert_path": "server_cert_path", "tls_key_path": "server_key_path"}
# With a prefix these keep their names.
UNPREFIXED: Final = ("host", "port", "worker_urls")
SELECTORS: Final = ("selector", "prefill_selector", "decode_selector")
ROLES: Final = ("admin", "user")


def number(text: str) -> int | float | str:
    """A number as the peer's flags take it; anything else (`4h`, `8GiB`) stays a text for the core to read."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(text) if text.lstrip("+-").isdigit() else value


def selector(words: Iterable[str] | None) -> dict[str, str]:
    """`k=v k=v`, also as one word with spaces; words without `=` are dropped, as the peer does."""
    pairs = ((key, value) for key, _, value in (pair.partition("=") for word in words or () for pair in word.split() if "=" in pair))
    return dict(pairs)


def prefill_urls(given: Iterable[Sequence[str]] | None) -> list[tuple[str, int | None]]:
    """`URL [PORT|none]` of each `--prefill`."""
    out: list[tuple[str, int | None]] = []
    for words in given or ():
        url, port, *more = (*words, "none") if len(words) < 2 else words
        if more or (port.lower() != "none" and not port.isdigit()):
            raise ValueError(f"--prefill {' '.join(words)}: expected URL [PORT|none]")
        out.append((url, None if port.lower() == "none" else int(port)))
    return out


def api_keys(given: Iterable[str] | None) -> list[tuple[str, str, str, str]]:
    """`id:name:role:key` as (id, name, key, role)."""
    out = []
    for nth, text in enumerate(given or (), 1):
        parts = text.split(":", 3)
        if len(parts) != 4 or parts[2].lower() not in ROLES:
            # The text is not quoted: it holds a key.
            raise ValueError(f"--control-plane-api-keys: word {nth} is not id:name:role:key with the role admin or user")
        out.append((parts[0], parts[1], parts[3], parts[2].lower()))
    return out


def role_mapping(given: Iterable[str] | None) -> dict[str, str]:
    """`role-of-the-provider=admin|user`."""
    out = {}
    for text in given or ():
        theirs, equals, ours = text.partition("=")
        if not equals or ours.lower() not in ROLES:
            raise ValueError(f"--jwt-role-mapping {text}: expected PROVIDERS_ROLE=admin|user")
        out[theirs] = ours.lower()
    return out


READERS: Final = {
    "prefill_urls": prefill_urls,
    "decode_urls": lambda given: [word for words in given or () for word in words],
    "control_plane_api_keys": api_keys,
    "jwt_role_mapping": role_mapping,
    **dict.fromkeys(SELECTORS, selector),
}


def peer_default(flag: PeerFlag) -> Any:
    """The default of a peer's flag as a Python value."""
    default = flag["default"]
    if default in ("None", "False"):
        return {"None": None, "False": False}[default]
    if default in ("[]", "{}") or flag["arity"] == "many":
        return {} if default == "{}" or flag["name"] == "jwt_role_mapping" else []
    return number(default)


def field(name: str, default: Any) -> tuple[str, Any, Any]:
    """A field of the dataclass."""
    name = FIELDS.get(name, name)
    if isinstance(default, (list, dict)):
        return name, Any, dataclasses.field(default_factory=type(default))
    return name, Any, default


class _Methods:
    """What `RouterArgs` can do; its fields are made from the tables of the native core."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, use_router_prefix: bool = False, exclude_host_port: bool = False) -> None:
        """Adds every flag of sglang-router and every setting of r3router.

        With `use_router_prefix` they begin with `--router-`, but for --host, --port and --worker-urls; with `exclude_host_port` the
        parser has --host and --port already.
        """
        prefix = "router-" if use_router_prefix else ""
        groups: dict[str, argparse._ArgumentGroup] = {}

        def add(name: str, group: str, **how: Any) -> None:
            if exclude_host_port and name in ("host", "port"):
                return
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            lead = "" if name in UNPREFIXED else prefix
            groups[group].add_argument(f"--{lead}{name.replace('_', '-')}", **how)

        for setting in settings():
            add(setting["name"], setting["group"], **_as_argument(setting))
        for flag in peer_flags():
            how: dict[str, Any] = {
                "help": f"{flag['fate'].capitalize()}: {flag['reason']}.".replace("%", "%%"),
                "default": peer_default(flag),
            }
            if flag["arity"] == "switch":
                how["action"] = "store_true"
            else:
                how |= {"type": str, "nargs": "*"} if flag["arity"] == "many" else {"type": number}
            add(flag["name"], "Flags of sglang-router that are ignored or refused", **how)
        add("config", "Other", metavar="FILE", help="TOML file with settings.")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, use_router_prefix: bool = False) -> RouterArgs:
        """The arguments of a parsed command line.

        With `use_router_prefix`, names of sglang-router that are missing with the prefix are read without it.
        """
        given = vars(args)
        values: dict[str, Any] = {}
        theirs = {s["name"] for s in settings() if s["peer"] is not None} | {f["name"] for f in peer_flags()}
        flags = {FIELDS.get(name, name): name for name in (*theirs, *(s["name"] for s in settings()), "config")}
        for name, flag in flags.items():
            if use_router_prefix and f"router_{flag}" in given:
                value = given[f"router_{flag}"]
            elif flag in given and (flag in theirs or not use_router_prefix):
                value = given[flag]
            else:
                continue
            read = READERS.get(name)
            values[name] = read(value) if read and not isinstance(value, dict) else value
        return RouterArgs(**values)


def _as_argument(setting: Setting) -> dict[str, Any]:
    """How argparse takes a setting."""
    how: dict[str, Any] = {"help": describe(setting).replace("%", "%%"), "default": {} if setting["name"] in SELECTORS else setting["bare"]}
    arity = setting["arity"]
    if arity == "switch":
        return how | {"action": argparse.BooleanOptionalAction}
    if arity == "url_port":
        return how | {"nargs": "+", "action": "append", "metavar": ("URL", "PORT"), "default": None}
    if setting["name"] == "decode":
        return how | {"nargs": 1, "action": "append", "metavar": "URL", "default": None}
    how["metavar"] = setting["metavar"]
    if arity == "many":
        return how | {"nargs": "*", "type": str if setting["metavar"] != "X" else number}
    # Names are checked by the core, which knows more of them than the peer's parser lets through.
    return how | {"type": str if setting["metavar"] in ("TEXT", "KEY", "NAME") else number}


if TYPE_CHECKING:

    class RouterArgs(_Methods):
        """Arguments of a router; see the module."""

        def __init__(self, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    RouterArgs = dataclasses.make_dataclass(
        "RouterArgs",
        [
            *(field(s["name"], {} if s["name"] in SELECTORS else s["bare"]) for s in settings()),
            *(field(f["name"], peer_default(f)) for f in peer_flags()),
            ("config", Any, None),
        ],
        bases=(_Methods,),
    )
    RouterArgs.__doc__ = "Arguments of a router; see the module. Fields may be set after parsing."
    # Where pickle looks for it in a spawned process.
    RouterArgs.__module__ = "r3router.launch_router"


def sources(args: RouterArgs) -> dict[str, Any]:
    """What the core is handed: the fields that are not at their defaults, variables and the file."""
    flags: dict[str, Any] = {}
    names = {field: name for name, field in FIELDS.items()}
    for made in dataclasses.fields(args):  # type: ignore[arg-type]
        value = getattr(args, made.name)
        default = made.default if made.default_factory is dataclasses.MISSING else made.default_factory()
        if made.name == "config" or value is None or value == default:
            continue
        if made.name == "prefill_urls":
            value = [[url] if port is None else [url, port] for url, port in value]
        if made.name in SELECTORS:
            value = [f"{key}={label}" for key, label in value.items()]
        flags[names.get(made.name, made.name)] = value
    env = {name: value for name, value in os.environ.items() if name.startswith("R3ROUTER_")}
    return {"flags": flags, "env": env, "config": args.config}


def launch_router(args: RouterArgs | argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT. Made to be the target of a process of its own; a parsed command line will do for `args`.

    Raises `SettingsError` for what is written wrongly and `RunError` when it cannot start.
    """
    if isinstance(args, argparse.Namespace):
        args = RouterArgs.from_cli_args(args)
    if threading.current_thread() is threading.main_thread():
        # The core watches signals itself; the interpreter would raise a KeyboardInterrupt after it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    core.serve(json.dumps(sources(args)))


def parse_router_args(args: Sequence[str]) -> RouterArgs:
    """The arguments of a command line without a prefix."""
    parser = argparse.ArgumentParser(
        prog="python -m r3router.launch_router",
        description="Start a router with the flags of sglang-router. `python -m r3router serve` is the same with checks and sections.",
    )
    RouterArgs.add_cli_args(parser)
    parsed = parser.parse_args(args)
    try:
        return RouterArgs.from_cli_args(parsed)
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    """`python -m r3router.launch_router`: exit status 1 when it cannot run, 2 when it is written wrongly."""
    try:
        with may_close():
            launch_router(parse_router_args(sys.argv[1:]))
    except core.SettingsError as error:
        for line in str(error).splitlines():
            print(f"Error: {line}", file=sys.stderr)
        sys.exit(2)
    except core.RunError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
