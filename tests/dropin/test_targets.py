"""`X-SMG-Target-Worker` and `X-SMG-Routing-Key` under consistent_hashing, in front of the same three engines as sglang-router 0.3.2."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scripted.client import Client
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.router import free_ports

from .sides import PEER, START_TIMEOUT_S

pytestmark = pytest.mark.skipif(not PEER.exists(), reason="sglang-router is not installed; run `make peer-sglang-router`")
# The peer's command line refuses this name of its own; frameworks set the field, as miles does.
LAUNCH = """
import sys
from {module} import RouterArgs, launch_router
launch_router(RouterArgs(policy="consistent_hashing", **eval(sys.argv[1])))
"""
MODULES = {"peer": (str(PEER), "sglang_router.launch_router"), "ours": (sys.executable, "r3router.launch_router")}
BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}


@contextlib.asynccontextmanager
async def serving(name: str, folder: Path) -> AsyncIterator[tuple[Fleet, Client]]:
    """A router with three engines behind it."""
    fleet = Fleet([Engine("regular", f"R{n}") for n in range(3)])
    await fleet.start()
    port, metrics, admin = free_ports()
    python, module = MODULES[name]
    fields = {"host": "127.0.0.1", "port": port, "prometheus_host": "127.0.0.1", "prometheus_port": metrics}
    fields["worker_urls"] = [engine.url for engine in fleet.engines]  # type: ignore[assignment]
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith("R3ROUTER_")}
    env |= {"HF_HUB_OFFLINE": "1", "R3ROUTER_ADMIN_PORT": str(admin)}
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        command = [python, "-c", LAUNCH.format(module=module), repr(fields)]
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env)
    client = Client(port)
    try:
        end = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            assert process.poll() is None and asyncio.get_running_loop().time() < end, log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                ready = await client.get("/readiness")
                if ready.status == 200 and ready.json()["healthy_workers"] == 3:
                    break
            await asyncio.sleep(0.05)
        yield fleet, client
    finally:
        client.close()
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        await fleet.stop()


async def served(fleet: Fleet, client: Client, *headers: tuple[str, str]) -> tuple[int, list[str]]:
    """Status, and which engines were asked."""
    for engine in fleet.engines:
        engine.legs.clear()
    got = await client.post("/generate", BODY, list(headers))
    return got.status, [engine.name for engine in fleet.engines for _ in engine.legs]


@pytest.mark.parametrize("name", MODULES)
async def test_a_number_names_one_engine_and_beats_the_key_and_one_too_large_is_503(name: str, tmp_path: Path) -> None:
    async with serving(name, tmp_path) as (fleet, client):
        named = []
        for number in ("0", "1", "2"):
            first = await served(fleet, client, ("x-smg-target-worker", number))
            again = await served(fleet, client, ("x-smg-target-worker", number), ("x-smg-routing-key", "another"))
            assert first == again
            assert first[0] == 200
            named += first[1]
        assert sorted(named) == ["R0", "R1", "R2"]
        for wrong in ("3", "x"):
            status, engines = await served(fleet, client, ("x-smg-target-worker", wrong))
            assert (status, engines) == (503, [])


@pytest.mark.parametrize("name", MODULES)
async def test_a_key_is_on_one_engine_and_keys_are_on_all(name: str, tmp_path: Path) -> None:
    async with serving(name, tmp_path) as (fleet, client):
        homes = {}
        for turn in range(3):
            for key in range(30):
                status, engines = await served(fleet, client, ("x-smg-routing-key", f"key-{key}"))
                assert status == 200
                assert homes.setdefault(key, engines) == engines, f"key {key} moved in turn {turn}"
        assert {engine for engines in homes.values() for engine in engines} == {"R0", "R1", "R2"}
