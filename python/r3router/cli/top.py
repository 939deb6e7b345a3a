"""`r3router top`: the live table of a running router, in the terminal."""

import contextlib
import json
import shutil
import sys

import click

from r3router.live.admin import Admin, AdminError
from r3router.live.table import ROLES, SORTS, Choice, plain


@click.command(
    "top",
    help="""Show every rank of a running router, live: what runs and what is in transfer, what bounds it, and why it is closed.

Asks the router's admin listener (--admin-host, --admin-port of `r3router serve`), here or elsewhere. Keys sort, filter, drain and
undrain; ? lists them. With --once, or when its output is no terminal, it prints the table and leaves.""",
)
@click.option("--url", default="http://127.0.0.1:29001", show_default=True, envvar="R3ROUTER_ADMIN_URL", help="The admin listener.")
@click.option(
    "--admin-api-key",
    envvar="R3ROUTER_ADMIN_API_KEY",
    metavar="KEY",
    help="Its key. The variable keeps it out of the list of processes.",
)
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.1, 3600), help="Seconds between looks.")
@click.option("--sort", default="rank", show_default=True, type=click.Choice(SORTS), help="Column to sort by.")
@click.option("--role", type=click.Choice(ROLES[1:]), help="Only ranks of this role.")
@click.option("--filter", "words", default="", metavar="WORDS", help="Only lines with all of these words.")
@click.option("--once", is_flag=True, help="Print the table once, as text.")
@click.option("--json", "as_json", is_flag=True, help="Print it once, as JSON.")
def command(
    url: str, admin_api_key: str | None, interval: float, sort: str, role: str | None, words: str, once: bool, as_json: bool
) -> None:
    """Shows or prints the table."""
    admin = Admin(url, admin_api_key)
    choice = Choice(sort=sort, role=role or "", filter=words)
    try:
        table = admin.get("/admin/ranks")
    except AdminError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(table))
        return
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        click.echo(plain(table, choice, shutil.get_terminal_size((120, 24)).columns))
        return
    # Not everybody who prints needs it, and not every Python has it.
    try:
        import curses

        from r3router.live.screen import show
    except ImportError:
        click.echo("Error: this Python was built without curses; use --once or the status page", err=True)
        sys.exit(1)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            show(admin, interval, choice)
    except curses.error as error:
        click.echo(f"Error: the terminal cannot be used ({error}); set TERM, or use --once", err=True)
        sys.exit(1)
