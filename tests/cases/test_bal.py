"""BAL: load counters live as long as the leg that they count."""

from __future__ import annotations

import asyncio
from collections import Counter

from scripted.calls import GENERATE, crowd, statuses, until
from scripted.client import encode
from scripted.lab import Lab


async def test_bal_1_four_hundred_cancelled_calls_leave_no_load_behind(lab: Lab) -> None:
    long = {"waiting_s": 60.0, "disconnect_s": 60.0}
    fleet, router, client = await lab.serve("--poll-interval-ms", "50", decodes=4, prefill={**long, "prefill_s": 60.0}, decode=long)
    connections = [await client.connect() for _ in range(400)]
    await asyncio.gather(*(c.post("/generate", encode(GENERATE)) for c in connections))
    await until(lambda: sum(len(d.legs) for d in fleet.decodes) >= 4, "calls are dispatched")
    await asyncio.sleep(0.3)
    for connection in connections:
        connection.close()
    await fleet.quiet()
    await router.zero_check()

    target = fleet.decodes[2]
    workers = (await client.get("/workers")).json()["workers"]
    (entry,) = [w for w in workers if w["url"] == target.url]
    assert (await client.delete(f"/workers/{entry['id']}")).status < 300
    again = await client.post("/workers", {"url": target.url, "worker_type": "decode"})
    assert again.status < 300

    async def active() -> bool:
        listed = (await client.get("/workers")).json()["workers"]
        return any(w["url"] == target.url and w["is_healthy"] for w in listed)

    for _ in range(200):
        if await active():
            break
        await asyncio.sleep(0.05)
    assert await active()
    await router.sees_idle_engines()

    fleet.p.prefill_s = 0.05
    for engine in fleet.engines:
        engine.legs.clear()
    answers = await crowd([lambda: client.generate(**GENERATE)] * 100, 20)
    assert statuses(answers) == {200: 100}
    spread = Counter(leg.engine.name for leg in fleet.legs("decode"))
    assert all(20 <= spread[d.name] <= 30 for d in fleet.decodes), spread
    fleet.check()


async def test_bal_1_a_leg_of_an_old_registration_cannot_touch_the_new_one(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--poll-interval-ms", "50", decodes=2, decode={"run_s": 1.5, "disconnect_s": 60.0})
    running = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(8)]
    await until(lambda: sum(len(d.legs) for d in fleet.decodes) == 8, "all are dispatched")
    target = fleet.decodes[0]
    workers = (await client.get("/workers")).json()["workers"]
    (entry,) = [w for w in workers if w["url"] == target.url]
    await client.delete(f"/workers/{entry['id']}")
    await client.post("/workers", {"url": target.url, "worker_type": "decode"})
    # Calls on the old registration finish or fail with a reason, within seconds.
    for got in await asyncio.wait_for(asyncio.gather(*running), 30.0):
        assert got.status in (200, 500, 502, 503)
    await router.zero_check()
    for engine in fleet.engines:
        engine.run_s = 0.02
        engine.legs.clear()
    await asyncio.sleep(0.3)
    answers = await crowd([lambda: client.generate(**GENERATE)] * 60, 12)
    assert statuses(answers) == {200: 60}
    spread = Counter(leg.engine.name for leg in fleet.legs("decode"))
    assert min(spread[d.name] for d in fleet.decodes) >= 20, spread
