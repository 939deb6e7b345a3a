"""SIGHUP: what can change does, the rest is refused by name, and a file that cannot be read changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from scripted.calls import GENERATE, statuses, until
from scripted.fleet import Fleet
from scripted.lab import Lab


def written(path: Path, fleet: Fleet, decodes: list[int], **more: str) -> Path:
    """A file that names the prefill engine and some decode engines."""
    lines = [
        f'prefill = ["{fleet.p.url} {fleet.p.bootstrap.port}"]',
        f"decode = {[fleet.decodes[i].url for i in decodes]}",
        *(f"{key} = {value}" for key, value in more.items()),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


async def test_named_engines_come_and_go_and_what_cannot_change_is_refused_by_name(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.pd(decodes=2)
    file = written(tmp_path / "router.toml", fleet, [0], log_level='"warn"')
    router = await lab.router(None, "--config", str(file))
    fleet.d.run_s = 0.5
    running = asyncio.create_task(router.client.generate(**GENERATE))
    await until(lambda: fleet.d.live, "a call runs on the first")
    written(file, fleet, [1], log_level='"info"', queue_size="7")
    os.kill(router.pid, signal.SIGHUP)
    await until(lambda: "settings read anew" in router.tail(), "it is done")
    assert "--queue-size cannot change while the router runs" in router.tail()
    listed = {w["url"] for w in (await router.client.get("/workers")).json()["workers"]}
    assert listed == {fleet.p.url, fleet.decodes[1].url}
    assert statuses([await running, *[await router.client.generate(**GENERATE) for _ in range(5)]]) == {200: 6}
    assert (len(fleet.decodes[0].legs), len(fleet.decodes[1].legs)) == (1, 5)
    # What ended under the new level has its line.
    assert router.tail().count('route="generate"') == 6


async def test_a_file_that_is_wrong_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.pd()
    file = written(tmp_path / "router.toml", fleet, [0])
    router = await lab.router(None, "--config", str(file))
    written(file, fleet, [], queue_siz="7")
    os.kill(router.pid, signal.SIGHUP)
    await until(lambda: "cannot be read anew" in router.tail(), "it says so")
    assert "queue_siz" in router.tail()
    assert statuses([await router.client.generate(**GENERATE) for _ in range(3)]) == {200: 3}
