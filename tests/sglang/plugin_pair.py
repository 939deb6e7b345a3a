"""A pair of engines with the plug-in, started once for all that is asked of them."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from r3router.r3.descriptor import MAGIC

from . import fleet
from .equality import generate
from .fleet import Process, Trio, post
from .stages import eventually

LAYERS, TOP_K = 4, 2
PYTHON = Path(__file__).parents[2] / "python"


def variables(folder: Path, **more: str) -> dict[str, str]:
    """Environment in which an engine finds the plug-in as if the package was installed."""
    info = folder / "r3router-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: r3router\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nr3router = r3router.plugin:register\n")
    found = {"PYTHONPATH": f"{PYTHON}{os.pathsep}{folder}", "SGLANG_PLUGINS": "r3router", "R3ROUTER_AGENT_HOST": "127.0.0.1"}
    return found | {"R3ROUTER_PLUGIN_BYTES": "64MiB", "R3ROUTER_PLUGIN_VERIFY": "1"} | more


def process_reply(process: Process) -> Any:
    """A health check's reply: engines of a pair answer requests without a partner when the bootstrap host is the fake one."""
    fake = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 1, "return_routed_experts": True}
    return post(f"{process.url}/generate", generate(6, 3) | fake)


def raw(reply: Any) -> bytes:
    return base64.b64decode(reply["meta_info"].get("routed_experts") or "")


def metric(process: Process, name: str) -> float:
    """A counter of the plug-in of an engine, from its agent."""
    uri = next(line for line in process.text().splitlines() if "R3 rows go by reference: " in line).rsplit("agent at ", 1)[1].strip()
    try:
        lines = fleet.call(f"http://{uri}/metrics", timeout=5)[1].decode().splitlines()
    except OSError:
        return -1
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"r3router_plugin_{name}{{"))


@pytest.fixture(scope="session")
def pair(trio: Trio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """The unified engine without the plug-in, and a pair with it; `R3ROUTER_SGLANG_PLUGIN_PAIR=prefill,bootstrap_port,decode` names one
    that runs already and logs to the usual places."""
    given = os.environ.get("R3ROUTER_SGLANG_PLUGIN_PAIR")
    if given:
        prefill_url, bootstrap, decode_url = given.split(",")
        yield Trio(
            trio.unified,
            Process(prefill_url, None, fleet.LOGS / "plugin-prefill.log", int(bootstrap)),
            Process(decode_url, None, fleet.LOGS / "plugin-decode.log"),
        )
        return
    settings: dict[str, Any] = {"variables": variables(tmp_path_factory.mktemp("site"))}
    with fleet.engines(("prefill", "plugin-prefill", settings), ("decode", "plugin-decode", settings)) as (prefill, decode):
        for process in (prefill, decode):
            eventually(lambda process=process: raw(process_reply(process)).startswith(MAGIC), "the agent to answer")
        yield Trio(trio.unified, prefill, decode)
