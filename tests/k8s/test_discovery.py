"""K8S: dead pods leave the pool, whichever way the cluster tells it or does not, and what ran on them is failed or finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from scripted.acts import Act, never
from scripted.calls import GENERATE, statuses, until
from scripted.client import Response
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.leg import Leg
from scripted.router import Router
from scripted.server import Exchange

from .api import Api, pod

SOON = 2.0
"""Interval of lists for tests that wait for one."""
NEVER = 3600.0
"""What is right before is so by the watch, or by the list after a break."""
PODS = 5000


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    folder = tmp_path / "account"
    folder.mkdir()
    made = Api(folder)
    await made.start()
    yield made
    await made.stop()


class Cluster:
    """A prefill pod, two decode pods that are in, and one engine without a pod yet. All listen on one port, as pods do."""

    def __init__(self, lab: Lab, api: Api) -> None:
        self.lab, self.api = lab, api
        self.p = Engine("prefill", "P0", host="127.0.0.20")
        self.old = Engine("decode", "D-old", host="127.0.0.10")
        self.other = Engine("decode", "D-other", host="127.0.0.11")
        self.new = Engine("decode", "D-new", host="127.0.0.44")
        self.router: Router

    async def start(self, interval_s: float, *, everything: bool = True) -> None:
        fleet = Fleet([self.p, self.old, self.other, self.new])
        self.lab.fleets.append(fleet)
        for engine in fleet.engines:
            engine.server.port = self.p.server.port
            await engine.start(fleet.violations, fleet.rooms)
        self.api.fill(
            [
                pod("prefill-0", "p0", self.p.host, "prefill", self.p.bootstrap.port),
                pod("decode-0", "d0", self.old.host, "decode"),
                pod("decode-1", "d1", self.other.host, "decode"),
                pod("other-0", "x0", "127.0.0.99", "trainer"),
            ]
        )
        self.router = await self.lab.router(None, *self.api.flags(self.p.server.port, interval_s), env=self.api.env())
        if everything:
            await self.are(self.p, self.old, self.other)
            await until(lambda: self.api.watches, "a watch")

    async def urls(self) -> list[str]:
        listed = (await self.router.client.get("/workers")).json()["workers"]
        return sorted(w["url"] for w in listed if w["state"] == "active")

    async def are(self, *engines: Engine) -> None:
        """Waits until exactly these are in."""
        wanted = sorted(e.url for e in engines)
        for _ in range(1000):
            now = await self.urls()
            if now == wanted:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{now} instead of {wanted}")

    async def calls(self, count: int) -> list[Response]:
        return list(await asyncio.gather(*(self.router.client.generate(**GENERATE) for _ in range(count))))

    async def stuck_on_old(self) -> list[asyncio.Task[Response]]:
        """Calls of which some wait on the old pod; all others have ended."""
        self.other.run_s = 0.3
        prompts = [[1000 + n, 2, 3] for n in range(12)]
        calls = [asyncio.create_task(self.router.client.generate(**{**GENERATE, "input_ids": ids})) for ids in prompts]
        await until(lambda: sum(not call.done() for call in calls) == len(self.old.live) > 0, "some wait on the old pod")
        self.other.run_s = 0.0
        return calls

    async def gets_no_more(self, engine: Engine) -> None:
        before = len(engine.legs)
        assert statuses(await self.calls(20)) == {200: 20}
        assert len(engine.legs) == before, f"{engine.name} got a call after its pod was gone"


Case = Callable[[Cluster], Awaitable[None]]


async def by_a_delete_event_alone(c: Cluster) -> None:
    await c.api.delete("decode-0")
    await c.are(c.p, c.other)
    assert c.api.lists == 1


async def while_the_watch_was_broken(c: Cluster) -> None:
    await c.api.delete("decode-0", told=False)
    await c.api.cut()
    await c.are(c.p, c.other)
    assert c.api.lists == 2


async def for_another_of_its_name_at_another_address(c: Cluster) -> None:
    await c.api.put(pod("decode-0", "d0-again", c.new.host, "decode"))
    await c.are(c.p, c.other, c.new)
    assert c.api.lists == 1


async def while_the_watch_was_open_and_silent(c: Cluster) -> None:
    c.api.silent = True
    told = len(c.api.history)
    await c.api.delete("decode-0")
    assert len(c.api.history) == told + 1, "a watch that spoke would tell"
    await c.are(c.p, c.other)


async def and_its_version_is_gone(c: Cluster) -> None:
    await c.api.delete("decode-0", told=False)
    await c.api.cut()
    c.api.forget()
    await c.are(c.p, c.other)


CASES: dict[str, tuple[Case, float]] = {
    "a": (by_a_delete_event_alone, NEVER),
    "b": (while_the_watch_was_broken, NEVER),
    "c": (for_another_of_its_name_at_another_address, NEVER),
    "d": (while_the_watch_was_open_and_silent, SOON),
    "e": (and_its_version_is_gone, NEVER),
}


@pytest.mark.parametrize("letter", CASES)
async def test_k8s_1_a_pod_that_is_gone_gets_no_call_and_what_ran_on_it_is_made_again(lab: Lab, api: Api, letter: str) -> None:
    go, interval_s = CASES[letter]
    c = Cluster(lab, api)
    await c.start(interval_s)
    # The pod's host is lost, and its sockets never say a word.
    c.old.script = lambda leg: never(joins=True)
    calls = await c.stuck_on_old()
    await go(c)
    assert statuses(await asyncio.gather(*calls)) == {200: len(calls)}
    await c.gets_no_more(c.old)


async def test_a_pod_that_is_about_to_end_finishes_what_it_has_and_gets_no_more(lab: Lab, api: Api) -> None:
    c = Cluster(lab, api)
    await c.start(NEVER)
    may_end = asyncio.Event()

    def slowly(leg: Leg) -> Act:
        async def run(leg: Leg, exchange: Exchange) -> None:
            await may_end.wait()
            await leg.engine.work(leg, exchange)

        return Act(run, joins=True)

    c.old.script = slowly
    calls = await c.stuck_on_old()
    held = len(c.old.live)
    await api.put(pod("decode-0", "d0", c.old.host, "decode", deletionTimestamp="2026-01-01T00:00:00Z"))
    await c.are(c.p, c.other)
    await c.gets_no_more(c.old)
    may_end.set()
    assert statuses(await asyncio.gather(*calls)) == {200: len(calls)}
    assert [leg.end for leg in c.old.legs[-held:]] == ["answered"] * held
    await api.delete("decode-0")


async def test_a_restart_or_another_uid_behind_the_same_address_is_another_worker(lab: Lab, api: Api) -> None:
    c = Cluster(lab, api)
    await c.start(NEVER)

    async def worker_id() -> str | None:
        listed = (await c.router.client.get("/workers")).json()["workers"]
        # The old one goes before the new one comes.
        return next((str(w["id"]) for w in listed if w["url"] == c.old.url), None)

    seen = [await worker_id()]
    restarted = pod("decode-0", "d0", c.old.host, "decode")
    restarted["status"]["containerStatuses"][0]["restartCount"] = 1
    for again in (restarted, pod("decode-0", "d0-again", c.old.host, "decode")):
        await api.put(again)
        for _ in range(1000):
            if (now := await worker_id()) not in (None, seen[-1]):
                break
            await asyncio.sleep(0.01)
        seen.append(now)
    assert len(set(seen)) == 3 and None not in seen
    await c.are(c.p, c.old, c.other)
    assert statuses(await c.calls(20)) == {200: 20}


async def test_an_api_server_that_is_down_takes_no_engine_out(lab: Lab, api: Api) -> None:
    c = Cluster(lab, api)
    await c.start(SOON)
    await api.stop()
    await until(lambda: "cannot be listed" in c.router.tail(), "the router says that it cannot list")
    await c.are(c.p, c.old, c.other)
    assert statuses(await c.calls(20)) == {200: 20}


async def test_five_thousand_pods_are_followed_in_bounded_memory(lab: Lab, api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    c = Cluster(lab, api)
    # As large as real ones, and nobody listens at their addresses.
    ballast = [{"manager": "kubelet", "fieldsV1": "x" * 16384}]
    api.fill(
        [
            pod(f"decode-x{n}", f"x{n}", f"127.1.{n >> 8}.{n & 255}", "decode", managedFields=ballast)
            for n in range(PODS - len(("prefill-0", "decode-0", "decode-1", "other-0")))
        ]
    )
    began = time.monotonic()
    await c.start(NEVER, everything=False)
    answers = await c.calls(1)
    ended = time.monotonic()
    took, listed_s, served_s = ended - began, ended - api.asked_at, ended - api.served_at
    cpu = c.router.cpu_s()
    assert statuses(answers) == {200: 1}
    # All of them are known, dead ones too.
    listed = (await c.router.client.get("/workers")).json()["total"]
    assert listed == PODS - 1
    peak = c.router.rss("VmHWM")
    with capsys.disabled():
        print(
            f"\n{PODS} pods: first reply {listed_s:.2f} s after the first LIST was asked for, {served_s:.2f} s after it was served, "
            f"{took:.2f} s after exec; {cpu:.2f} CPU s, peak {peak / 1e6:.0f} MB"
        )
    assert peak <= 200_000_000
    await api.delete("decode-0")
    for _ in range(1000):
        if c.old.url not in await c.urls():
            break
        await asyncio.sleep(0.01)
    await c.gets_no_more(c.old)
