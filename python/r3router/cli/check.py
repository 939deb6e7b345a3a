"""`r3router check`: asks every engine that the settings name, and prints what does not fit."""

import json
import os
import signal
import sys
import textwrap
from typing import Any, Final, NoReturn

import click

from r3router.cli.options import SettingsCommand, given, setting_options
from r3router.native import core

HELP = """Ask every engine, and say what does not fit: engines with each other, with the router, or with what is known of their releases.

r3router check --pd-disaggregation --prefill http://P:30000 8998 --decode http://D:30000

Takes the options, variables and file of `r3router serve`. Nothing is generated and nothing is changed. Findings are numbered, worst
first, each with what to change. Leaves with 0 when there is nothing but notes, with 1 when there are errors or warnings, with 2 when
the options themselves are wrong. python/CHECKS.md lists all findings."""

WIDTH: Final = 100
INDENT: Final = " " * 4


def run(config: str | None, admin: str | None, as_json: bool, quick: bool, prompt_tokens: int | None, **values: Any) -> None:
    """Asks, prints and leaves."""
    if admin:
        finish(running(admin, values.get("admin_api_key")), as_json)
    env = {name: value for name, value in os.environ.items() if name.startswith("R3ROUTER_")}
    sources = json.dumps({"flags": given(values), "env": env, "config": config})
    # The core asks without the interpreter, which could not act on the signal meanwhile.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        report = json.loads(core.check_fleet(sources, prompt_tokens, quick))
    except core.SettingsError as error:
        for line in str(error).splitlines():
            click.echo(f"Error: {line}", err=True)
        sys.exit(2)
    except core.RunError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    finish(report, as_json)


def finish(report: dict[str, Any], as_json: bool) -> NoReturn:
    """Prints the report and leaves."""
    click.echo(json.dumps(report, indent=2) if as_json else text(report))
    sys.exit(1 if report["worst"] else 0)


def running(url: str, key: str | None) -> dict[str, Any]:
    """What a running router has found of the engines that it has, those that came as pods too."""
    from r3router.live.admin import Admin, AdminError

    listener = Admin(url, key or os.environ.get("R3ROUTER_ADMIN_API_KEY"))
    try:
        findings, ranks = listener.get("/admin/findings")["findings"], listener.get("/admin/ranks")["ranks"]
        models = {worker["id"]: worker.get("metadata", {}).get("model_path") for worker in listener.get("/workers")["workers"]}
    except AdminError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    workers: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        there = rank["rank"] is not None
        known = {"url": rank["url"], "role": rank["role"], "answers": there, "why": rank["why"], "ranks": 0, "version": rank["version"]}
        worker = workers.setdefault(
            rank["worker"], {**known, "model": models.get(rank["worker"]), "rows_per_rank": rank["rows"], "tokens_per_rank": rank["kv"]}
        )
        worker["ranks"] += there
    worst = next((s for s in ("error", "warning") if any(f["severity"] == s for f in findings)), None)
    return {"warnings": [], "engines": list(workers.values()), "findings": findings, "worst": worst}


def text(report: dict[str, Any]) -> str:
    """The report for a person."""
    lines = [*(f"warning: {warning}" for warning in report["warnings"]), *engines(report["engines"]), ""]
    for finding in report["findings"]:
        lines += [f"{finding['number']:>2}. {finding['severity']} {finding['code']}"]
        if finding["workers"]:
            lines += wrapped(f"at {', '.join(finding['workers'])}")
        lines += [*wrapped(sentence(finding["what"])), *wrapped(f"Change: {finding['advice']}."), ""]
    counts = [
        f"{n} {name}{'s' if n != 1 else ''}"
        for name in ("error", "warning", "note")
        if (n := sum(f["severity"] == name for f in report["findings"]))
    ]
    lines.append(f"{', '.join(counts)}." if counts else "Nothing is wrong.")
    return "\n".join(lines)


def engines(asked: list[dict[str, Any]]) -> list[str]:
    """One line an engine."""
    width = max((len(e["url"]) for e in asked), default=0)
    lines = []
    for engine in asked:
        if engine["answers"]:
            parts = [
                f"{engine['ranks']} rank{'s' if engine['ranks'] != 1 else ''}",
                f"SGLang {engine['version'] or 'of unknown version'}",
                *([str(engine["model"])] if engine["model"] else []),
                *([f"{engine['rows_per_rank']:,} rows a rank"] if engine["rows_per_rank"] else []),
                *([f"{engine['tokens_per_rank']:,} KV tokens a rank"] if engine["tokens_per_rank"] else []),
            ]
        else:
            parts = [f"no answer: {engine['why']}"]
        lines.append(f"{engine['role']:<8} {engine['url']:<{width}}  {', '.join(parts)}")
    return lines


def sentence(words: str) -> str:
    """With a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def wrapped(words: str) -> list[str]:
    """Lines of `WIDTH` columns; addresses are not cut."""
    return textwrap.wrap(words, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)


command = SettingsCommand(
    "check",
    callback=run,
    help=HELP,
    short_help="Ask every engine, and say what does not fit.",
    params=[
        *setting_options(),
        click.Option(["--config"], metavar="FILE", type=str, help="TOML file with settings."),
        click.Option(
            ["--prompt-tokens"],
            type=click.IntRange(1),
            help="Tokens of a typical prompt, for what routing payloads weigh. Left out: what fills a row's share of decode's KV pool.",
        ),
        click.Option(
            ["--admin"],
            metavar="URL",
            envvar="R3ROUTER_ADMIN_URL",
            help="Ask a running router's admin listener instead, for the engines that it has, pods too.",
        ),
        click.Option(["--quick"], is_flag=True, help="Do not watch idle connections, which takes --upstream-idle-secs."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the report as JSON."),
    ],
)
