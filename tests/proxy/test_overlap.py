"""Restart by overlap: a new router takes the sockets of the old one under load; nothing fails and nothing is reserved twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from scripted.calls import GENERATE, statuses, until
from scripted.client import Client
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.leg import Leg
from scripted.r3 import R3Model
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


async def overlapping(lab: Lab, fleet: Fleet, tmp_path: Path, *more: str) -> tuple[Router, list[str]]:
    """A router that can be taken over, and its flags."""
    flags = [*fleet.flags(), "--r3-store-dir", str(lab.store), "--handover-socket", str(tmp_path / "handover"), "--disable-retries", *more]
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


MODEL = R3Model(layers=4, topk=2, experts=256)
SHAPE = ("--r3-layers", "4", "--r3-top-k", "2", "--r3-experts", "256")
HEADER = 256


class Reference:
    """What a client was told of one payload, and its bytes."""

    def __init__(self, answer: Any) -> None:
        assert answer.status == 200, answer.body
        (self.segment,) = answer.json()["meta_info"]["output_store_ref"]["handle"]["segments"]
        self.at = "/r3/" + self.segment["uri"].rsplit("/", 1)[1]
        self.file = Path(self.segment["path"])
        self.body = b""

    async def read(self, client: Client) -> None:
        """The whole, a range of bytes, a range of rows, and the file: each as the first time."""
        got = await client.get(self.at)
        assert got.status == 200, got.body
        self.body = self.body or got.body
        assert got.body == self.body and len(got.body) == self.segment["rows"] * 8
        assert got.header("x-r3-crc32") == str(self.segment["crc32"])
        part = await client.request("GET", self.at, b"", [("range", "bytes=8-23")])
        assert (part.status, part.body) == (206, self.body[8:24])
        assert (await client.get(self.at + "?rows=1:3")).body == self.body[8:24]
        head = await client.request("HEAD", self.at)
        assert (head.status, head.header("content-length"), head.body) == (200, str(len(self.body)), b"")
        assert self.file.read_bytes()[HEADER:] == self.body

    async def delete(self, client: Client) -> None:
        """Lets it go: it is gone for everybody."""
        assert (await client.delete(self.at)).status == 204
        assert not self.file.exists()
        for again in (await client.get(self.at), await client.delete(self.at)):
            assert (again.status, again.error()["code"]) == (410, "r3_deleted")


async def ask(client: Client, number: int) -> Reference:
    """A new reference; of another length for every number."""
    prompt = list(range(10 + number))
    return Reference(await client.generate(input_ids=prompt, return_routed_experts=True, return_outputs_via_store=True, **GENERATE_SHORT))


GENERATE_SHORT: dict[str, Any] = {"sampling_params": {"max_new_tokens": 3}}


def with_rows(**decode: Any) -> Fleet:
    """A fleet that returns routed experts."""
    return Fleet.pd(prefill={"r3": MODEL, "waiting_s": 60.0}, decode={"r3": MODEL, "tokens": 50, **decode})


def hold(engine: Engine, tokens: int) -> asyncio.Event:
    """Has requests with so many prompt tokens run until the event."""
    go, work = asyncio.Event(), engine._run

    async def run(leg: Leg) -> None:
        if leg.prompt_tokens == tokens:
            await go.wait()
        await work(leg)

    engine._run = run  # type: ignore[method-assign]
    return go


async def used(router: Router) -> int:
    """Bytes of the arena."""
    return int((await router.metrics()).sum("r3router_r3_arena_bytes", what="used"))


async def test_references_of_ten_generations_are_read_and_deleted_through_the_last_router(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(with_rows())
    router, flags = await overlapping(lab, fleet, tmp_path, *SHAPE)
    made: list[Reference] = []
    for number in range(RESTARTS + 1):
        made.append(await ask(router.client, number))
        await made[-1].read(router.client)
        if number < RESTARTS:
            router = await successor(lab, router, flags)
    for reference in made:
        await reference.read(router.client)
    assert await used(router) == sum(HEADER + len(reference.body) for reference in made)
    assert (await router.metrics()).sum("r3router_r3_objects_total", event="inherited") == RESTARTS
    for reference in made[::2]:
        await reference.delete(router.client)
    for reference in made[1::2]:
        await reference.read(router.client)
    assert await used(router) == sum(HEADER + len(reference.body) for reference in made[1::2])


async def test_both_routers_answer_for_all_references_while_the_old_one_drains(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(with_rows())
    router, flags = await overlapping(lab, fleet, tmp_path, *SHAPE)
    early = await ask(router.client, 0)
    kept = [Client(router.port) for _ in range(6)]
    for client in kept:
        assert (await client.get("/health")).status == 200
    go = hold(fleet.d, 11)
    running = asyncio.create_task(ask(Client(router.port), 1))
    await until(lambda: fleet.d.live, "it runs")
    handing = asyncio.create_task(successor(lab, router, flags))
    await until(lambda: "a new router has taken over" in router.tail(), "the new one has the port", 60.0)
    new = Client(router.port)
    await early.read(new)
    await until(lambda: "this router binds now" in lab.routers[-1].tail(), "it binds", 60.0)
    later = await ask(new, 2)
    await later.read(new)
    assert router.alive() and not running.done(), "the old one still works"
    # What the new one has made, on a connection to the old one, which has to pass it on.
    got = await kept[0].get(later.at)
    assert (got.status, got.body) == (200, later.body)
    head = await kept[1].request("HEAD", later.at)
    assert (head.status, head.header("content-length")) == (200, str(len(later.body)))
    assert (await kept[2].delete(later.at)).status == 204
    assert (await new.get(later.at)).status == 410
    # What was deleted through the new one is gone for the old one.
    await early.delete(new)
    assert (await kept[3].get(early.at)).status == 410
    go.set()
    late = await running
    await late.read(new)
    for client in (*kept, new):
        client.close()
    await handing
    after = Client(router.port)
    await late.read(after)
    await late.delete(after)
    after.close()


async def test_references_expire_when_their_first_router_said(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(with_rows())
    router, flags = await overlapping(lab, fleet, tmp_path, *SHAPE, "--r3-ref-expiry-secs", "12")
    reference = await ask(router.client, 0)
    # The next router keeps its own for an hour.
    router = await successor(lab, router, [*flags[:-1], "3600"])
    await reference.read(router.client)
    await until(lambda: not reference.file.exists(), "its time is over", 30.0)
    answer = await router.client.get(reference.at)
    assert (answer.status, answer.error()["code"]) == (410, "r3_expired")
    assert await used(router) == 0
    assert [entry.name for entry in lab.store.iterdir() if not (entry / "owner").exists()] == []


async def test_requests_wait_for_room_where_references_of_the_old_router_hold_more_than_there_is(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(with_rows())
    router, flags = await overlapping(lab, fleet, tmp_path, *SHAPE, "--r3-arena-bytes", "8388608")
    held = [await ask(router.client, 20_000) for _ in range(8)]
    router = await successor(lab, router, [*flags[:-1], "1048576"])
    assert await used(router) > 1048576
    for reference in held:
        await reference.read(router.client)
    waiting = asyncio.create_task(ask(Client(router.port), 20_000))
    for _ in range(1000):
        if (await router.metrics()).sum("r3router_queued_requests") == 1:
            break
        await asyncio.sleep(0.02)
    assert not waiting.done()
    assert (await router.metrics()).sum("r3router_queued_requests") == 1
    for reference in held:
        await reference.delete(router.client)
    await (await waiting).delete(router.client)
    assert await used(router) == 0


@pytest.mark.parametrize("taken", [False, True])
async def test_references_outlive_an_old_router_that_is_killed_in_the_midst(lab: Lab, tmp_path: Path, taken: bool) -> None:
    fleet = await lab.fleet(with_rows())
    router, flags = await overlapping(lab, fleet, tmp_path, *SHAPE)
    reference = await ask(router.client, 0)
    await reference.read(router.client)
    # One that stays keeps the old router alive after it has handed over; an engine that nobody is keeps the new one from it.
    kept = await router.client.connect()
    more = [] if taken else ["--decode", "http://127.0.0.1:9"]
    new = Router([*flags, *more], lab.folder / "router-new.log")
    lab.routers.append(new)
    starting = asyncio.create_task(new.start(ports=(router.port, router.metrics_port), ready=taken))
    said = "a new router has taken over" if taken else "has the sockets"
    await until(lambda: said in router.tail(), "so far it came", 60.0)
    assert router.process is not None
    router.process.kill()
    router.process.wait()
    kept.close()
    await starting
    # What answered it may have been the old one.
    new.client.close()
    await reference.read(new.client)
    other = await ask(new.client, 1)
    await reference.delete(new.client)
    await until(lambda: len(list(lab.store.iterdir())) == 1, "the dead router's directory goes with its last reference")
    await other.read(new.client)
    assert await new.stop() == 0
    assert not list(lab.store.iterdir())


async def test_references_outlive_a_new_router_that_dies(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(with_rows(max_running=1))
    router, flags = await overlapping(lab, fleet, tmp_path, *SHAPE)
    reference, deleted = await ask(router.client, 0), await ask(router.client, 1)
    new = Router(flags, lab.folder / "router-dies.log")
    lab.routers.append(new)
    go = hold(fleet.d, 12)
    running = asyncio.create_task(ask(Client(router.port), 2))
    await until(lambda: fleet.d.live, "it runs")
    # The old router has more to bind, so that the new one may not yet.
    waiting = asyncio.create_task(ask(Client(router.port), 3))
    for _ in range(1000):
        if (await router.metrics()).sum("r3router_queued_requests") == 1:
            break
        await asyncio.sleep(0.01)
    starting = asyncio.create_task(new.start(ports=(router.port, router.metrics_port), ready=False))
    await until(lambda: "a new router has taken over" in router.tail(), "it took over", 60.0)
    other = Client(router.port)
    await reference.read(other)
    assert (await other.delete(deleted.at)).status == 204
    other.close()
    assert new.process is not None
    new.process.kill()
    new.process.wait()
    starting.cancel()
    await until(lambda: "did not take over" in router.tail(), "the old one noticed")
    go.set()
    for task in (running, waiting):
        await (await task).read(router.client)
    await reference.read(router.client)
    assert (await router.client.get(deleted.at)).status == 410
    last = await successor(lab, router, flags)
    await reference.read(last.client)
    assert await last.stop() == 0
    assert not list(lab.store.iterdir())


async def test_what_persons_decided_about_engines_is_known_to_the_next_router(lab: Lab, tmp_path: Path) -> None:
    fleet = await lab.fleet(Fleet.pd(decodes=4, decode={"dp_size": 2}))
    base = ["--pd-disaggregation", "--r3-store-dir", str(lab.store), "--handover-socket", str(tmp_path / "handover")]
    base += ["--prefill", fleet.p.url, str(fleet.p.bootstrap.port)]
    whole, rank, dropped, registered = fleet.decodes
    named = [*base, "--decode", whole.url, "--decode", rank.url]
    router = Router([*named, "--decode", dropped.url], lab.folder / "router-first.log")
    lab.routers.append(router)
    await router.start()
    body = {"url": registered.url, "worker_type": "decode", "priority": 7, "labels": {"rack": "b"}}
    assert (await router.client.post("/workers", body)).status == 202
    for out in ({"worker": whole.url}, {"worker": rank.url, "rank": 1}, {"worker": registered.url, "rank": 0}):
        admin = Client(router.admin_port)
        headers = [("content-type", "application/json"), ("host", f"127.0.0.1:{router.admin_port}")]
        assert (await admin.request("POST", "/admin/drain", out, headers)).status == 200
        admin.close()
    new = await successor(lab, router, named)
    listed = {w["url"]: w for w in (await new.client.get("/workers")).json()["workers"]}
    # What this router's settings do not name any more is gone, what somebody registered is there as it was.
    assert set(listed) == {fleet.p.url, whole.url, rank.url, registered.url}
    assert (listed[registered.url]["priority"], listed[registered.url]["labels"]) == (7, {"rack": "b"})
    for engine in fleet.engines:
        engine.legs.clear()
    assert statuses([await new.client.generate(**GENERATE) for _ in range(40)]) == {200: 40}
    assert {(leg.engine.name, leg.rank) for leg in fleet.legs("decode")} == {(rank.name, 0), (registered.name, 1)}
    # And so to the one after it.
    last = await successor(lab, new, named)
    for engine in fleet.engines:
        engine.legs.clear()
    assert statuses([await last.client.generate(**GENERATE) for _ in range(40)]) == {200: 40}
    assert {(leg.engine.name, leg.rank) for leg in fleet.legs("decode")} == {(rank.name, 0), (registered.name, 1)}
