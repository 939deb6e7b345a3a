"""Restart by overlap: a new router takes the sockets of the old one under load; nothing fails and nothing is reserved twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from scripted.calls import GENERATE, statuses, until
from scripted.client import Client
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.router import Router

RESTARTS = 10
CLIENTS = 12
"""Three times what the engines take at once, so that requests wait in whichever router binds."""


async def exit_code(router: Router) -> int:
    """Of a router that ends by itself."""
    process = router.process
    assert process is not None
    await until(lambda: process.poll() is not None, "the old router ends", 60.0)
    assert process.returncode is not None
    return process.returncode


async def successor(lab: Lab, old: Router, flags: list[str]) -> Router:
    """Starts a router on the port of `old`, which ends by itself."""
    new = Router(flags, lab.folder / f"router-{len(lab.routers)}.log")
    lab.routers.append(new)
    # The old router waits for clients that may still use their idle connections: these do not.
    old.client.close()
    await new.start(ports=(old.port, old.metrics_port))
    new.client.close()
    assert await exit_code(old) == 0, old.tail()
    assert "a new router has taken over" in old.tail()
    return new


async def overlapping(lab: Lab, fleet: Fleet, tmp_path: Path) -> tuple[Router, list[str]]:
    """A router that can be taken over, and its flags."""
    flags = [*fleet.flags(), "--r3-store-dir", str(lab.store), "--handover-socket", str(tmp_path / "handover"), "--disable-retries"]
    router = Router(flags, lab.folder / f"router-{len(lab.routers)}.log")
    lab.routers.append(router)
    await router.start()
    return router, flags


async def test_ten_restarts_by_overlap_under_load_fail_no_request_and_over_reserve_nothing(lab: Lab, tmp_path: Path) -> None:
    # An engine that gets more than it holds answers 500 and breaks a rule: both are counted.
    room = {"dp_size": 2, "max_running": 2, "on_over": "fail", "run_s": 0.02, "waiting_s": 60.0}
    fleet = await lab.fleet(Fleet.pd(prefills=1, decodes=1, prefill={"waiting_s": 60.0}, decode=room))
    router, flags = await overlapping(lab, fleet, tmp_path)
    stop = False
    answers: list[tuple[int, bool]] = []

    async def client(number: int) -> None:
        mine = Client(router.port)
        while not stop:
            streams = (len(answers) + number) % 2 == 0
            answer = await mine.post("/generate", {**GENERATE, "stream": streams})
            whole = answer.body.rstrip().endswith(b"data: [DONE]") if streams else b"meta_info" in answer.body
            answers.append((answer.status, whole))
        mine.close()

    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    await until(lambda: len(answers) > 20, "the load runs")
    for _ in range(RESTARTS):
        before = len(answers)
        router = await successor(lab, router, flags)
        await until(lambda b=before: len(answers) > b + 20, "the load goes on", 60.0)  # type: ignore[misc]
    stop = True
    await asyncio.gather(*clients)
    failed = [answer for answer in answers if answer != (200, True)]
    assert (len(failed), len(fleet.violations)) == (0, 0), (failed[:5], fleet.violations[:5])


async def test_what_runs_and_waits_in_the_old_router_ends_there(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(Fleet.pd(prefill={"waiting_s": 60.0}, decode={"max_running": 1, "on_over": "fail", "run_s": 1.0}))
    router, flags = await overlapping(lab, fleet, tmp_path)
    before = [asyncio.create_task(router.client.generate(**GENERATE)) for _ in range(3)]
    await until(lambda: fleet.d.live, "one runs, two wait")
    handing = asyncio.create_task(successor(lab, router, flags))
    await until(lambda: "a new router has taken over" in router.tail(), "the new one has the port", 60.0)
    # It waits in the new router until the old one's queue is empty.
    after = asyncio.create_task(Client(router.port).generate(**GENERATE))
    assert statuses(await asyncio.gather(*before, after)) == {200: 4}
    new = await handing
    assert (await new.metrics()).sum("r3router_requests_total") >= 1


async def test_workers_that_were_registered_are_known_to_the_next_router(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(Fleet.pd())
    flags = ["--pd-disaggregation", "--r3-store-dir", str(lab.store), "--handover-socket", str(tmp_path / "handover")]
    router = Router(flags, lab.folder / "router-first.log")
    lab.routers.append(router)
    await router.start(ready=False)
    await router.client.post("/workers", {"url": fleet.p.url, "worker_type": "prefill", "bootstrap_port": fleet.p.bootstrap.port})
    await router.client.post("/workers", {"url": fleet.d.url, "worker_type": "decode"})
    for _ in range(1000):
        if (await router.client.get("/readiness")).status == 200:
            break
        await asyncio.sleep(0.01)
    new = await successor(lab, router, flags)
    assert (await new.client.generate(**GENERATE)).status == 200


async def test_a_new_router_that_dies_before_it_is_ready_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(Fleet.pd())
    router, flags = await overlapping(lab, fleet, tmp_path)
    # It names an engine that nobody is, and waits for it.
    stuck = Router([*flags, "--decode", "http://127.0.0.1:9"], lab.folder / "router-stuck.log")
    lab.routers.append(stuck)
    starting = asyncio.create_task(stuck.start(ports=(router.port, router.metrics_port), ready=False))
    await until(lambda: "has the sockets" in router.tail(), "it asked for the sockets")
    assert stuck.process is not None
    stuck.process.kill()
    starting.cancel()
    await until(lambda: "did not take over" in router.tail(), "the old one noticed")
    assert statuses([await router.client.generate(**GENERATE) for _ in range(10)]) == {200: 10}
    new = await successor(lab, router, flags)
    assert (await new.client.generate(**GENERATE)).status == 200


async def test_a_new_router_that_dies_after_it_took_over_gives_the_port_back(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(Fleet.pd(prefill={"waiting_s": 60.0}, decode={"max_running": 1, "run_s": 3.0, "waiting_s": 60.0}))
    router, flags = await overlapping(lab, fleet, tmp_path)
    waiting = [asyncio.create_task(router.client.generate(**GENERATE)) for _ in range(2)]
    await until(lambda: fleet.d.live, "one runs, one waits")
    new = Router(flags, lab.folder / "router-dies.log")
    lab.routers.append(new)
    starting = asyncio.create_task(new.start(ports=(router.port, router.metrics_port), ready=False))
    await until(lambda: "a new router has taken over" in router.tail(), "it took over", 60.0)
    assert new.process is not None
    new.process.kill()
    starting.cancel()
    await until(lambda: "did not take over" in router.tail(), "the old one noticed")
    fleet.d.run_s = 0.0
    assert statuses(await asyncio.gather(*waiting, router.client.generate(**GENERATE))) == {200: 3}
