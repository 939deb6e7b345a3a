"""An engine changes its role while the fleet serves: through the worker API, and through the settings of a running router."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from scripted.calls import GENERATE, until
from scripted.client import Client
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.router import Router

CLIENTS = 8
# An engine that gets more than it holds answers 500 and breaks a rule: both are counted.
SHAPE = {"max_running": 4, "on_over": "fail", "run_s": 0.01, "waiting_s": 60.0}


async def restarted(engine: Engine, role: str) -> None:
    """The engine's process ends, once it has nothing to do, and another one begins in its place, in another mode."""
    await until(lambda: not engine.open_legs, "what runs on it ends")
    engine.server.die()
    engine.role = role
    if role == "prefill":
        await engine.bootstrap.listen()
    else:
        engine.bootstrap.die()
    await engine.server.listen()


async def state(client: Client, engine: Engine) -> str | None:
    """Role and state of the engine's entry, when it has one."""
    found = [w for w in (await client.get("/workers")).json()["workers"] if w["url"] == engine.url]
    return f"{found[0]['worker_type']} {found[0]['state']}" if found else None


async def becomes(client: Client, engine: Engine, wanted: str | None) -> None:
    for _ in range(500):
        is_now = await state(client, engine)
        if is_now == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{engine.name} is {is_now}, not {wanted}")


def by_calls(router: Router, client: Client, engine: Engine) -> Callable[[str], Awaitable[None]]:
    """Through the worker API: taken out, restarted, registered."""

    async def change(role: str) -> None:
        (entry,) = [w for w in (await client.get("/workers")).json()["workers"] if w["url"] == engine.url]
        assert (await client.delete(f"/workers/{entry['id']}")).status == 202
        await restarted(engine, role)
        body = {"url": engine.url, "worker_type": role}
        if role == "prefill":
            body["bootstrap_port"] = engine.bootstrap.port
        assert (await client.post("/workers", body)).status == 202
        await becomes(client, engine, f"{role} active")

    return change


def by_settings(router: Router, client: Client, engine: Engine, write: Callable[[], None]) -> Callable[[str], Awaitable[None]]:
    """Through the settings: they say the new role first, so the engine is in the wrong mode until it is restarted."""

    async def change(role: str) -> None:
        before, engine.role = engine.role, role
        write()
        engine.role = before
        os.kill(router.pid, signal.SIGHUP)
        await becomes(client, engine, f"{role} failed")
        await restarted(engine, role)
        await becomes(client, engine, f"{role} active")

    return change


@pytest.mark.parametrize("way", ["calls", "settings"])
async def test_an_engine_that_changes_its_role_under_load_costs_no_request(lab: Lab, tmp_path: Path, way: str) -> None:
    fleet = await lab.fleet(Fleet.pd(prefills=2, decodes=2, prefill={"waiting_s": 60.0}, decode=SHAPE))
    changing = fleet.decodes[1]
    file = tmp_path / "router.toml"

    def write() -> None:
        prefill = [f"{e.url} {e.bootstrap.port}" for e in fleet.prefills]
        file.write_text(f"prefill = {prefill}\ndecode = {[e.url for e in fleet.decodes]}\n")

    # Its port is in the file, whatever it is at first.
    await changing.bootstrap.listen()
    changing.bootstrap.die()
    write()
    router = await lab.router(None, "--config", str(file), "--disable-retries", "--worker-startup-check-interval", "0.1")
    client = Client(router.port)
    change = by_calls(router, client, changing) if way == "calls" else by_settings(router, client, changing, write)
    stop, answers = False, list[int]()

    async def load(number: int) -> None:
        mine = Client(router.port)
        while not stop:
            answers.append((await mine.post("/generate", {**GENERATE, "stream": number % 2 == 0})).status)
        mine.close()

    clients = [asyncio.create_task(load(number)) for number in range(CLIENTS)]
    for role in ("prefill", "decode", "prefill", "decode"):
        await change(role)
        before = len(changing.legs)
        await until(lambda b=before: len(changing.legs) > b + 3, f"it serves as {role}", 20.0)  # type: ignore[misc]
        bootstraps = {leg.body["bootstrap_port"] for leg in fleet.d.legs[-5:]}
        assert bootstraps <= {e.bootstrap.port for e in fleet.engines}
    stop = True
    await asyncio.gather(*clients)
    client.close()
    assert set(answers) == {200} and len(answers) > 4 * CLIENTS
    assert fleet.violations == []


async def test_an_engine_with_the_wrong_key_is_taken_once_that_is_mended(lab: Lab) -> None:
    fleet = await lab.pd()
    fleet.d.key = "another"
    router = await lab.router(fleet, "--worker-startup-check-interval", "0.1", ready=False)
    await becomes(router.client, fleet.d, "decode failed")
    # Nobody registers it again: it is one that the settings name.
    fleet.d.key = None
    await becomes(router.client, fleet.d, "decode active")
    assert (await router.client.generate(**GENERATE)).status == 200
    said = [line for line in router.tail(1 << 24).splitlines() if fleet.d.url in line and " WARN " in line]
    assert len(said) == 1 and "wants a key" in said[0] and "looked at again" in said[0], said
