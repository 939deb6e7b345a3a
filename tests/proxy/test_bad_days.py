"""Engines that die, that are busy, that are paused: field cases WRK-2, HLT-1 and RL-1."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from scripted.calls import GENERATE, statuses, until
from scripted.client import Client
from scripted.lab import Lab

QUICK = ["--health-check-interval-secs", "0.3", "--health-check-timeout-secs", "0.3", "--health-failure-threshold", "2"]


async def worker(client: Client, url: str) -> dict[str, Any]:
    (found,) = [w for w in (await client.get("/workers")).json()["workers"] if w["url"] == url]
    return dict(found)


async def becomes(client: Client, url: str, **wanted: Any) -> None:
    for _ in range(500):
        found = await worker(client, url)
        if all(found[name] == value for name, value in wanted.items()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{url} is {found}, not {wanted}")


async def test_wrk_2_what_runs_on_a_killed_engine_is_made_again_and_the_engine_is_used_when_it_is_back(lab: Lab) -> None:
    shape = {"waiting_s": 60.0, "disconnect_s": 0.2}
    fleet, _, client = await lab.serve(decodes=2, prefill=shape, decode={**shape, "run_s": 30.0})
    dead, other = fleet.decodes
    prefix = list(range(2000))
    running = [asyncio.create_task(client.generate(input_ids=[*prefix, i], sampling_params={"max_new_tokens": 3})) for i in range(8)]
    await until(lambda: dead.ranks[0].running == 4 and other.ranks[0].running == 4, "four run on each")
    other.run_s = 0.0
    dead.server.die()
    more = [client.generate(input_ids=[*prefix, 100 + i], sampling_params={"max_new_tokens": 3}) for i in range(20)]
    answers = await asyncio.gather(*more)
    assert statuses(answers) == {200: 20}
    # The four that ran there are made again elsewhere, within seconds and not after the engines' own minute.
    await until(lambda: sum(t.done() for t in running) >= 4, "the four that ran there have ended")
    assert [t.result().status for t in running if t.done()] == [200] * 4
    await becomes(client, dead.url, state="down")
    await dead.server.listen()
    dead.run_s = 0.0
    await becomes(client, dead.url, state="active")
    before = len(dead.legs)
    # Used again once it has told its load, which it is asked for every 100 ms.
    for _ in range(100):
        assert statuses(await asyncio.gather(*(client.generate(**GENERATE) for _ in range(10)))) == {200: 10}
        if len(dead.legs) > before:
            break
    assert len(dead.legs) > before
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for engine in fleet.decodes:
        engine.run_s = 0.0


async def test_wrk_2_a_killed_engine_is_met_three_times_at_most(lab: Lab) -> None:
    # Nothing but requests finds out: no look at its load, no health check, no broken leg.
    slow = ["--poll-interval-ms", "30000", "--health-check-interval-secs", "30", "--log-json"]
    fleet, router, client = await lab.serve(*slow, prefills=2)
    prefix = list(range(2000))

    async def call(name: str, last: int) -> int:
        body = {"input_ids": [*prefix, last], "sampling_params": {"max_new_tokens": 3}}
        return (await client.request("POST", "/generate", body, [("x-request-id", name)])).status

    assert [await call("warm", i) for i in range(4)] == [200] * 4
    (dead,) = [engine for engine in fleet.prefills if engine.legs]
    dead.server.die()

    async def caller(first: int) -> list[int]:
        return [await call("more", 100 + i) for i in range(first, 20, 3)]

    # Three at a time, since those that are on their way when the first is refused are refused too.
    answers = [status for part in await asyncio.gather(*map(caller, range(3))) for status in part]
    assert answers == [200] * 20
    # An attempt that cannot connect is followed by another one. (Series of a worker that is down are gone.)
    await until(lambda: router.tail(1 << 24).count('"id":"more"') == 20, "all lines are written")
    lines = [json.loads(line) for line in router.tail(1 << 24).splitlines() if '"id":"more"' in line]
    refused = [line["attempts"] - 1 for line in lines]
    assert max(refused) == 1
    assert 1 <= sum(refused) <= 3
    await dead.server.listen()
    await becomes(client, dead.url, state="active")


async def test_hlt_1_an_engine_whose_health_hangs_while_tokens_flow_stays_in_choice(lab: Lab) -> None:
    # Tokens come in small pieces, several in the time of a check.
    fleet, router, client = await lab.serve(*QUICK, decodes=2, decode={"run_s": 2.0, "write_bytes": 16})
    for engine in fleet.decodes:
        engine.health_hangs_s = 25.0
    for _ in range(2):
        streams = [asyncio.create_task(client.generate(**GENERATE, stream=True)) for _ in range(8)]
        assert statuses(await asyncio.gather(*streams)) == {200: 8}
    assert all(engine.legs for engine in fleet.decodes)
    log = router.tail(1 << 24)
    assert "unhealthy" not in log and "worker down" not in log
    # A real death is found all the same.
    fleet.decodes[0].server.die()
    await becomes(client, fleet.decodes[0].url, state="down")
    await fleet.decodes[0].server.listen()


async def test_hlt_1_of_two_silent_engines_one_goes_and_the_last_of_a_role_stays(lab: Lab) -> None:
    fleet, router, client = await lab.serve(*QUICK, decodes=2)
    for engine in fleet.decodes:
        engine.health_hangs_s = 25.0
    await until(lambda: "unhealthy, taken out of choice" in router.tail(1 << 24), "one is taken out")
    await asyncio.sleep(2.0)
    out = [e for e in fleet.decodes if not (await worker(client, e.url))["is_healthy"]]
    assert len(out) == 1, "the last one stays, however slow"
    assert (await client.get("/readiness")).status == 200
    assert statuses(await asyncio.gather(*(client.generate(**GENERATE) for _ in range(10)))) == {200: 10}
    assert not out[0].legs
    out[0].health_hangs_s = 0.0
    await becomes(client, out[0].url, is_healthy=True)


async def test_hlt_1_a_slow_engine_serves_again_once_the_other_of_its_role_is_dead(lab: Lab) -> None:
    fleet, router, client = await lab.serve(*QUICK, decodes=2)
    slow, other = fleet.decodes
    slow.health_hangs_s = 25.0
    await becomes(client, slow.url, is_healthy=False)
    other.server.die()
    await becomes(client, other.url, state="down")
    await becomes(client, slow.url, is_healthy=True)
    assert statuses(await asyncio.gather(*(client.generate(**GENERATE) for _ in range(10)))) == {200: 10}
    assert len(slow.legs) == 10
    assert "the last of its role that is left" in router.tail(1 << 24)
    await other.server.listen()
    # It is not the last any more, and still slow.
    await becomes(client, slow.url, is_healthy=False)


async def test_hlt_1_during_a_known_pause_missing_health_is_no_death(lab: Lab) -> None:
    fleet, router, client = await lab.serve(*QUICK, decodes=2)
    assert (await client.post("/pause_generation", {"mode": "retract"})).status == 200
    for engine in fleet.engines:
        engine.health_hangs_s = 25.0
    await asyncio.sleep(2.5)
    assert "unhealthy" not in router.tail(1 << 24)
    for engine in fleet.engines:
        engine.health_hangs_s = 0.0
    assert (await client.post("/continue_generation", {})).status == 200
    assert statuses(await asyncio.gather(*(client.generate(**GENERATE) for _ in range(10)))) == {200: 10}
    changes = [line for line in router.tail(1 << 24).splitlines() if "worker unhealthy" in line or "worker back in choice" in line]
    assert changes == [], "no flapping"


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_rl_1_control_reaches_each_engine_once_and_a_refused_flush_stays_refused(lab: Lab, mode: str) -> None:
    fleet, router, client = await lab.serve(
        prefill={"dp_size": 2}, decode={"dp_size": 2, "max_running": 20, "run_s": 1.5, "waiting_s": 30.0}
    )
    calls = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(80)]
    await until(lambda: sum(r.running for r in fleet.d.ranks) == 40, "40 run and 40 wait")
    paused = await client.post("/pause_generation", {"mode": mode})
    assert paused.status == 200
    legs = fleet.posts()
    refusal = {"success": False, "message": "Flush cache failed: #queue-req is 40"}
    fleet.d.control_answers["/flush_cache"] = (400, refusal)
    flushed = await client.post("/flush_cache", {})
    assert flushed.status == 400, "one refusal is not turned into success"
    lines = {line["url"]: (line["status"], line["body"]) for line in flushed.json()["workers"]}
    assert lines[fleet.d.url] == (400, refusal)
    assert lines[fleet.p.url][0] == 200
    assert len(lines) == 2, "every engine with its own status and words"
    assert (await client.post("/update_weights_from_disk", {"model_path": "/m"})).status == 200
    await asyncio.sleep(0.3)
    assert fleet.posts() == legs, "nothing new while paused"
    assert (await client.post("/continue_generation", {})).status == 200
    answers = await asyncio.gather(*calls)
    assert statuses(answers) == {200: 80}
    for engine in fleet.engines:
        paths = [r.path for r in engine.control if r.path != "/abort_request"]
        assert paths == ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"]
    assert (await router.metrics()).sum("r3router_rank_closed", reason="ejected") == 0
    fleet.check()


async def test_an_engine_that_is_away_is_spoken_of_when_it_goes_and_when_it_is_back(lab: Lab) -> None:
    fleet, router, client = await lab.serve()

    def said(words: str) -> list[str]:
        return [line for line in router.tail(1 << 20).splitlines() if words in line and fleet.d.url in line]

    fleet.d.server.die()
    await becomes(client, fleet.d.url, state="down")
    # Its message changes with every look, of which there are several in this time.
    await asyncio.sleep(2.0)
    assert len(said("worker down")) == 1, said("worker down")
    assert said("still down") == []
    await fleet.d.server.listen()
    await becomes(client, fleet.d.url, state="active")
    (back,) = said("worker up again")
    away = float(back.partition("away_s=")[2].split()[0])
    assert away >= 2.0
    # And an engine that was never there is spoken of once, too.
    await client.post("/workers", {"url": "http://127.0.0.1:1", "worker_type": "decode"})
    await asyncio.sleep(1.0)
    assert len([line for line in router.tail(1 << 20).splitlines() if "does not answer yet" in line and '127.0.0.1:1"' in line]) == 1
