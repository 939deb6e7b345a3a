"""The workers API, and a router that starts with nobody to route to."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

import pytest

from scripted.calls import GENERATE, ROUTES, statuses
from scripted.client import Client
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab


async def listed(client: Client) -> list[dict[str, Any]]:
    """GET /workers."""
    got = await client.get("/workers")
    assert got.status == 200
    assert (got.header("content-type") or "").startswith("application/json")
    return list(got.json()["workers"])


def registration(engine: Engine) -> dict[str, Any]:
    """As miles and slime register an engine."""
    body = {"url": engine.url, "worker_type": engine.role}
    return body | ({"bootstrap_port": engine.bootstrap.port} if engine.role == "prefill" else {})


async def phase(client: Client, worker_id: str) -> str:
    """State of one worker."""
    got = await client.get(f"/workers/{worker_id}")
    return "absent" if got.status == 404 else str(got.json().get("state") or got.json().get("status"))


async def wait_phase(client: Client, worker_id: str, wanted: str) -> None:
    """Waits for a state."""
    for _ in range(400):
        if await phase(client, worker_id) == wanted:
            return
        await asyncio.sleep(0.025)
    raise AssertionError(f"worker {worker_id} is {await phase(client, worker_id)}, not {wanted}")


async def test_without_workers_it_starts_says_so_and_serves_once_they_come(lab: Lab) -> None:
    router = await lab.router(None, ready=False)
    client = router.client
    assert (await client.get("/liveness")).status == (await client.get("/health")).status == 200
    ready = await client.get("/readiness")
    assert ready.status == 503
    assert ready.json()
    for path, body in ROUTES.items():
        start = time.monotonic()
        got = await client.post(path, body)
        assert got.status == 503
        assert got.error()["code"] == "no_available_workers"
        assert any(role in got.error()["message"] for role in ("prefill", "decode"))
        assert time.monotonic() - start < 5.0
    assert await listed(client) == []

    fleet = await lab.pd(prefill={"dp_size": 2}, decode={"dp_size": 4})
    ids = []
    for engine in fleet.engines:
        got = await client.post("/workers", registration(engine))
        assert 200 <= got.status < 300
        ids.append(got.json()["worker_id"])
        if engine.role == "prefill":
            await wait_phase(client, ids[0], "active")
            assert (await client.get("/readiness")).status == 503
            half = await client.generate(**GENERATE)
            assert half.status == 503
            assert "decode" in half.error()["message"]
    await wait_phase(client, ids[1], "active")
    assert (await client.get("/readiness")).status == 200
    assert (await client.generate(**GENERATE)).status == 200
    workers = await listed(client)
    assert [(w["url"], w["worker_type"]) for w in workers] == [(e.url, e.role) for e in fleet.engines]
    assert len({w["id"] for w in workers}) == 2
    assert [w["id"] for w in workers] == ids
    fleet.check()


async def test_registration_is_idempotent_and_pending_until_the_engine_answers(lab: Lab) -> None:
    fleet = await lab.pd(decodes=2)
    router = await lab.router(Fleet([]), "--pd-disaggregation", "--worker-startup-check-interval", "0.05", ready=False)
    client = router.client
    healthy = False
    slow = fleet.decodes[0]
    slow.healthy = lambda: healthy
    for engine in (fleet.p, fleet.decodes[1]):
        got = await client.post("/workers", registration(engine))
        await wait_phase(client, got.json()["worker_id"], "active")
    first = await client.post("/workers", registration(slow))
    assert first.status == 202
    worker_id = first.json()["worker_id"]
    assert first.header("location") == f"/workers/{worker_id}"
    await asyncio.sleep(0.3)
    assert await phase(client, worker_id) == "pending"
    again = await client.post("/workers", registration(slow))
    assert again.json()["worker_id"] == worker_id
    slash = await client.post("/workers", {**registration(slow), "url": slow.url + "/"})
    assert slash.json()["worker_id"] == worker_id
    assert [w["url"] for w in await listed(client)].count(slow.url) == 1
    assert statuses([await client.generate(**GENERATE) for _ in range(10)]) == {200: 10}
    assert not slow.legs, "a pending engine was given a call"
    healthy = True
    await wait_phase(client, worker_id, "active")
    await asyncio.gather(*(client.generate(**GENERATE) for _ in range(40)))
    assert slow.legs, "an active engine was given none"
    fleet.check()


async def test_deleting_while_pending_is_final(lab: Lab) -> None:
    fleet = await lab.pd()
    router = await lab.router(None, "--worker-startup-check-interval", "0.05", ready=False)
    client = router.client
    healthy = False
    fleet.d.healthy = lambda: healthy
    worker_id = (await client.post("/workers", registration(fleet.d))).json()["worker_id"]
    assert 200 <= (await client.delete(f"/workers/{worker_id}")).status < 300
    healthy = True
    await asyncio.sleep(0.5)
    assert await phase(client, worker_id) in ("absent", "removed")
    assert await listed(client) == []
    assert (await client.get("/readiness")).status == 503


async def test_deleting_an_engine_takes_all_its_ranks_and_finishes_what_runs(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decodes=2, decode={"dp_size": 4, "run_s": 0.4})
    running = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(16)]
    await asyncio.sleep(0.15)
    gone = fleet.decodes[0]
    (entry,) = [w for w in await listed(client) if w["url"] == gone.url]
    assert 200 <= (await client.delete(f"/workers/{entry['id']}")).status < 300
    assert statuses(await asyncio.gather(*running)) == {200: 16}
    before = len(gone.legs)
    assert statuses(await asyncio.gather(*(client.generate(**GENERATE) for _ in range(16)))) == {200: 16}
    assert len(gone.legs) == before
    assert gone.url not in [w["url"] for w in await listed(client)]
    again = await client.delete(f"/workers/{entry['id']}")
    assert again.status in (200, 202, 404)
    fleet.check()


async def test_the_url_works_as_an_id_too(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decodes=2)
    url = fleet.decodes[1].url
    assert (await client.get(f"/workers/{quote(url, safe='')}")).json()["url"] == url
    assert 200 <= (await client.delete(f"/workers/{quote(url, safe='')}")).status < 300
    assert url not in [w["url"] for w in await listed(client)]


async def test_the_old_calls_work_and_return_when_the_worker_is_active(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0"), Engine("regular", "R1")]))
    router = await lab.router(Fleet([]), "--worker-startup-check-interval", "0.05", ready=False)
    client = router.client
    for engine in fleet.engines:
        got = await client.request("POST", f"/add_worker?url={quote(engine.url, safe='')}")
        assert got.status == 200, got.body
        assert (await client.generate(**GENERATE)).status == 200, "it had said that the worker was there"
    urls = (await client.get("/list_workers")).json()["urls"]
    assert urls == [e.url for e in fleet.engines]
    got = await client.request("POST", f"/remove_worker?url={quote(fleet.engines[0].url, safe='')}")
    assert got.status == 200
    assert (await client.get("/list_workers")).json()["urls"] == [fleet.engines[1].url]
    before = len(fleet.engines[0].legs)
    assert statuses([await client.generate(**GENERATE) for _ in range(5)]) == {200: 5}
    assert len(fleet.engines[0].legs) == before


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"url": 5},
        {"url": ""},
        {"url": "not a url", "worker_type": "decode"},
        {"url": "ftp://a:1", "worker_type": "decode"},
        {"url": "http://127.0.0.1:9", "worker_type": "encoder"},
        {"url": "http://127.0.0.1:9", "worker_type": 7},
        [],
        {"url": "http://127.0.0.1:9", "worker_type": "prefill", "bootstrap_port": "x"},
        {"url": "http://127.0.0.1:9", "worker_type": "prefill", "bootstrap_port": 70000},
        {"url": "http://127.0.0.1:9", "worker_type": "regular"},
    ],
    ids=str,
)
async def test_a_bad_registration_is_refused_with_a_reason(lab: Lab, body: Any) -> None:
    _, _, client = await lab.serve()
    before = await listed(client)
    got = await client.post("/workers", body)
    assert 400 <= got.status < 500, got.body
    assert got.error()["code"] in ("invalid_field", "invalid_json")
    assert len(await listed(client)) == len(before)


async def test_an_unreachable_worker_stays_pending_and_says_why(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--worker-startup-check-interval", "0.05")
    dead = Engine("decode", "dead")
    await dead.start(fleet.violations, fleet.rooms)
    dead.server.refuse()
    got = await client.post("/workers", registration(dead))
    assert got.status == 202
    worker_id = got.json()["worker_id"]
    await asyncio.sleep(0.4)
    assert await phase(client, worker_id) in ("pending", "failed")
    shown = (await client.get(f"/workers/{worker_id}")).json()
    assert "refused" in str(shown).lower() or "connect" in str(shown).lower(), f"it does not say why: {shown}"
    assert statuses([await client.generate(**GENERATE) for _ in range(5)]) == {200: 5}
    await dead.server.listen()
    await wait_phase(client, worker_id, "active")
    await dead.stop()


async def test_an_unknown_id_is_404_in_the_shape_that_frameworks_know(lab: Lab) -> None:
    _, _, client = await lab.serve()
    for method in ("GET", "PUT", "DELETE"):
        for worker_id in ("00000000-0000-4000-8000-000000000000", "nobody", quote("http://127.0.0.1:9", safe="")):
            got = await client.request(method, f"/workers/{worker_id}", b"{}" if method == "PUT" else b"")
            assert got.status == 404
            assert got.json()["code"] == "WORKER_NOT_FOUND"
            assert "GET /workers" in got.json()["error"]
            assert (got.header("content-type"), got.header("x-smg-error-code")) == ("application/json", "not_found")


async def test_a_changed_key_is_sent_from_then_on_and_never_shown(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0")]))
    router = await lab.router(fleet)
    client = router.client
    (entry,) = await listed(client)

    async def sent() -> str | None:
        assert (await client.generate(**GENERATE)).status == 200
        assert (await client.post("/flush_cache", b"")).status == 200
        leg, control = fleet.engines[0].legs[-1].request, fleet.engines[0].control[-1]
        assert leg.header("authorization") == control.header("authorization")
        return leg.header("authorization")

    assert await sent() is None
    for key, header in (("first-key", "Bearer first-key"), ("second-key", "Bearer second-key"), ("", None)):
        got = await client.request("PUT", f"/workers/{entry['id']}", {"api_key": key, "priority": 7, "labels": {"a": "b"}})
        assert got.status == 202, got.body
        assert await sent() == header
    shown = (await client.get(f"/workers/{entry['id']}")).json()
    assert (shown["priority"], shown["labels"]) == (7, {"a": "b"})
    assert "api_key" not in shown and "second-key" not in router.tail(1 << 20)


async def test_health_numbers_of_one_worker_are_taken_with_a_warning_and_nonsense_is_not(lab: Lab) -> None:
    _, _, client = await lab.serve()
    entry = (await listed(client))[0]
    good = {"health_check_timeout_secs": 9, "health_check_interval_secs": 5, "health_success_threshold": 1, "health_failure_threshold": 4}
    got = await client.request("PUT", f"/workers/{entry['id']}", good)
    assert got.status == 202
    assert len(got.json()["warnings"]) == 4
    shown = (await client.get(f"/workers/{entry['id']}")).json()
    assert not set(good) & set(shown)
    for bad in ({"health_check_timeout_secs": 0}, {"api_key": 5}, {"api_key": "a\nb"}, {"url": "http://127.0.0.1:9"}, {"priority": -1}):
        got = await client.request("PUT", f"/workers/{entry['id']}", bad)
        assert got.status == 400, bad
        assert got.error()["code"] == "invalid_field"


async def test_a_restarted_engine_behind_the_same_address_is_a_new_generation(lab: Lab) -> None:
    fleet, router, client = await lab.serve(
        "--worker-startup-check-interval",
        "0.05",
        "--health-check-interval-secs",
        "0.2",
        "--poll-interval-ms",
        "50",
        "--disable-retries",
        "--disable-circuit-breaker",
        prefill={"disconnect_s": 0.5, "waiting_s": 30.0},
        decode={"run_s": 20.0},
    )
    running = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(8)]
    await asyncio.sleep(0.3)
    fleet.d.server.die()
    for got in await asyncio.wait_for(asyncio.gather(*running), 20.0):
        assert got.status in (500, 502, 503)
    await fleet.quiet()
    fleet.d.run_s = 0.0
    await fleet.d.server.listen()
    for _ in range(200):
        if (await client.generate(**GENERATE)).status == 200:
            break
        await asyncio.sleep(0.05)
    assert statuses([await client.generate(**GENERATE) for _ in range(10)]) == {200: 10}
    await router.zero_check()


async def test_a_switch_lists_one_worker_a_rank_and_its_id_removes_the_engine(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--list-ranks", prefill={"dp_size": 2}, decode={"dp_size": 4})
    workers = await listed(client)
    assert [w["url"] for w in workers] == [f"{e.url}@{rank}" for e in fleet.engines for rank in range(e.dp_size)]
    assert {(w["base_url"], w["id"]) for w in workers} == {
        (w["base_url"], workers[0 if w["worker_type"] == "prefill" else 2]["id"]) for w in workers
    }
    assert 200 <= (await client.delete(f"/workers/{workers[-1]['id']}")).status < 300
    assert [w["url"] for w in await listed(client)] == [f"{fleet.p.url}@{rank}" for rank in range(2)]
