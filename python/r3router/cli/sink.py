"""`r3router sink`: puts rows by reference into a Mooncake store."""

import logging
import sys

import click


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=9500, show_default=True, help="Port to listen on.")
@click.option("--router", default="http://127.0.0.1:30000", show_default=True, help="Where this process reaches the router.")
@click.option("--api-key", envvar="R3ROUTER_API_KEY", help="The router's key (variable R3ROUTER_API_KEY).")
@click.option("--agent-key", envvar="R3ROUTER_AGENT_API_KEY", help="The agents' key (variable R3ROUTER_AGENT_API_KEY).")
@click.option("--workers", default=4, show_default=True, help="Puts at once; each holds one sample's rows as int32.")
@click.option("--expires-s", default=600.0, show_default=True, help="Objects that no reader removed go after so long; 0: never.")
@click.option("--master", envvar="MOONCAKE_MASTER", required=True, help="host:port of the Mooncake master (variable MOONCAKE_MASTER).")
@click.option("--local-hostname", envvar="MOONCAKE_LOCAL_HOSTNAME", default="127.0.0.1", show_default=True, help="This host, to others.")
@click.option("--protocol", envvar="MOONCAKE_PROTOCOL", default="tcp", show_default=True, help="tcp or rdma.")
@click.option("--device", envvar="MOONCAKE_DEVICE", default="", help="RDMA devices.")
@click.option("--metadata", envvar="MOONCAKE_TE_META_DATA_SERVER", default="P2PHANDSHAKE", show_default=True, help="Metadata server.")
@click.option("--buffer-mb", default=512, show_default=True, help="Memory that rows are staged in.")
@click.option("--key-prefix", default="miles-object-store", show_default=True, help="Prefix of keys: the reader's.")
@click.option("--namespace", default="default", show_default=True, help="Namespace of the objects.")
@click.option("--replicas", default=1, show_default=True, help="Copies of each object.")
def command(
    host: str,
    port: int,
    router: str,
    api_key: str | None,
    agent_key: str | None,
    workers: int,
    expires_s: float,
    master: str,
    local_hostname: str,
    protocol: str,
    device: str,
    metadata: str,
    buffer_mb: int,
    key_prefix: str,
    namespace: str,
    replicas: int,
) -> None:
    """Put rows of R3 references into a Mooncake store, for the router that is started with --r3-sink.

    Trainers that ask with return_outputs_via_store then get the Mooncake handle that they know. Needs the package
    mooncake-transfer-engine (or mooncake-transfer-engine-non-cuda) and the system's libibverbs1.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        from r3router.sink import mooncake
        from r3router.sink.server import Options, run
    except ImportError as error:
        click.echo(
            f"Error: the sink needs the extra `client` (pip install 'r3router-….whl[client]', the wheel of `make wheel`): {error}", err=True
        )
        sys.exit(1)
    store = mooncake.Options(master, local_hostname, protocol, device, metadata, buffer_mb << 20, key_prefix, namespace, replicas)
    try:
        run(Options(host, port, router, api_key, agent_key, workers, expires_s), mooncake.Mooncake(store))
    except (OSError, RuntimeError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
