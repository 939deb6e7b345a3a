"""Options of `serve`, made from the description of the settings in the native core. Values stay texts: the core reads them."""

import difflib
import json
from collections.abc import Iterable
from typing import Any, Literal, TypedDict

import click

from r3router.cli.words import Arity, fold
from r3router.native import core


class Setting(TypedDict):
    """One entry of `_core.settings_schema()`, as far as the command line needs it."""

    name: str
    flag: str
    variable: str
    group: str
    help: str
    unit: str
    arity: Arity
    metavar: str
    choices: list[str]
    default: Any
    bare: Any
    peer: str | None


def settings() -> list[Setting]:
    """Every setting, in the order of the help."""
    schema: list[Setting] = json.loads(core.settings_schema())
    return schema


class PeerFlag(TypedDict):
    """One entry of `_core.peer_flags()`."""

    name: str
    flag: str
    arity: Arity
    default: str
    fate: Literal["ignored", "refused"]
    reason: str


def peer_flags() -> list[PeerFlag]:
    """The flags of sglang-router that are no settings, in the order of its help."""
    flags: list[PeerFlag] = json.loads(core.peer_flags())
    return flags


class PeerOption(click.Option):
    """A flag of sglang-router that is taken and that the core ignores or refuses. It is not in the help; FLAGS.md lists it."""

    def __init__(self, peer: PeerFlag) -> None:
        self.peer = peer
        if peer["arity"] == "switch":
            super().__init__([peer["flag"]], is_flag=True, default=None, hidden=True)
        else:
            super().__init__([peer["flag"]], type=str, default=None, multiple=peer["arity"] != "one", hidden=True)


class SettingOption(click.Option):
    """An option that belongs to a section of the help."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        flag, arity = setting["flag"], setting["arity"]
        common: dict[str, Any] = {"help": describe(setting), "default": None}
        if arity == "switch":
            super().__init__([f"{flag}/--no-{flag[2:]}"], **common)
        else:
            super().__init__([flag], metavar=setting["metavar"], type=str, multiple=arity != "one", **common)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or self.setting["arity"] != "switch":
            return record
        # What is off is switched on by its name; only what is on needs the other spelling in the help.
        flag = self.setting["flag"]
        return (f"{flag}, --no-{flag[2:]}" if self.setting["default"] else flag, record[1])


def describe(setting: Setting) -> str:
    """The help of a setting with its names, default and unit."""
    text = setting["help"]
    if setting["choices"]:
        text += f" One of {', '.join(setting['choices'])}."
    default = setting["default"]
    if default is True:
        return f"{text} [on by default]"
    return text if default in (None, False, []) else f"{text} [default: {default}]"


class SettingsCommand(click.Command):
    """A command whose options are settings: varying words, sections in the help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arities = {o.setting["flag"]: o.setting["arity"] for o in self.params if isinstance(o, SettingOption)}
        theirs = {o.peer["flag"]: o.peer["arity"] for o in self.params if isinstance(o, PeerOption)}
        try:
            return super().parse_args(ctx, fold(args, {**theirs, **arities, "--config": "one"}))
        except click.NoSuchOption as error:
            near = difflib.get_close_matches(error.option_name, [*arities, "--config", "--check"], n=1)
            mend = f"did you mean {near[0]}?" if near else f"see `{ctx.command_path} --help` for all of them"
            raise click.UsageError(f"{error.option_name}: there is no such option; {mend}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                section = param.setting["group"] if isinstance(param, SettingOption) else "Other"
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records, col_max=38)


def setting_options() -> Iterable[click.Option]:
    """One option for each setting, and a hidden one for each other flag of sglang-router."""
    return [*(SettingOption(setting) for setting in settings()), *(PeerOption(flag) for flag in peer_flags())]


def given(values: dict[str, Any]) -> dict[str, Any]:
    """What was written on the command line, out of what click hands over."""
    return {name: value for name, value in values.items() if value not in (None, ())}
