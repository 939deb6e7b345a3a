"""`r3router agent`: serves R3 rows of the engines on this host."""

import logging
import sys
from pathlib import Path

import click

SHM = "/dev/shm"  # noqa: S108 - shared memory is the point


@click.command()
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104
@click.option("--port", default=9400, show_default=True, help="Port to listen on.")
@click.option("--directory", type=click.Path(path_type=Path), help="Serve this directory only. Left out: all of --parent.")
@click.option(
    "--parent", type=click.Path(path_type=Path), default=Path(SHM), show_default=True, help="Where engines make their directories."
)
@click.option("--api-key", envvar="R3ROUTER_AGENT_API_KEY", help="Key that readers must bring (variable R3ROUTER_AGENT_API_KEY).")
@click.option("--engine-pid", type=int, help="End when this process is dead and nothing is left to serve.")
@click.option("--engine-start", type=int, default=0, hidden=True)
@click.option("--connections", default=1024, show_default=True, help="Fetches at once; more are refused with 503.")
@click.option("--nixl/--no-nixl", default=False, help="Let readers with a NIXL agent read the rows' memory (package nixl).")
def command(
    host: str,
    port: int,
    directory: Path | None,
    parent: Path,
    api_key: str | None,
    engine_pid: int | None,
    engine_start: int,
    connections: int,
    nixl: bool,
) -> None:
    """Serve R3 rows that engines on this host have left in shared memory (GET and DELETE /r3/{id}).

    An engine with the plug-in starts its own agent. Start one by hand, with the same /dev/shm, where an engine's container must not
    open ports (R3ROUTER_AGENT_URI tells the plug-in its address).
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        from r3router.agent.server import Options, run
    except ImportError as error:
        click.echo(
            f"Error: the agent needs the extra `agent` (pip install 'r3router-….whl[agent]', the wheel of `make wheel`): {error}", err=True
        )
        sys.exit(1)
    try:
        run(Options(host, port, directory, parent, api_key, engine_pid, engine_start, connections, nixl))
    except (OSError, RuntimeError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
