"""One test's engines and router, with the checks that hold for every test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from .client import Client
from .fleet import Fleet
from .reference import RefClient
from .router import Router


class Lab:
    """Starts fleets and routers, and at the end requires: no rule broken, all gauges at 0, a clean exit, no panic."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fleets: list[Fleet] = []
        self.routers: list[Router] = []
        self.by_reference = False
        """Clients ask for payloads by reference."""
        self.store = folder / "store"
        self.store.mkdir()

    async def fleet(self, fleet: Fleet) -> Fleet:
        """Starts the engines of a fleet."""
        self.fleets.append(fleet)
        await fleet.start()
        return fleet

    async def pd(self, **shape: Any) -> Fleet:
        """A started PD fleet; see `Fleet.pd`."""
        return await self.fleet(Fleet.pd(**shape))

    async def router(self, fleet: Fleet | None, *flags: str, ready: bool = True, env: dict[str, str] | None = None) -> Router:
        """A router in front of a fleet; `None` is a PD router without workers."""
        base = fleet.flags() if fleet is not None else ["--pd-disaggregation"]
        log = self.folder / f"router-{len(self.routers)}.log"
        router = Router(["--r3-store-dir", str(self.store), *base, *flags], log, env)
        self.routers.append(router)
        await router.start(ready=ready)
        if ready and fleet is not None:
            await settled(router)
        if self.by_reference:
            router.client = RefClient(router.port)
        return router

    async def serve(self, *flags: str, **shape: Any) -> tuple[Fleet, Router, Client]:
        """Fleet, router and client in one step."""
        fleet = await self.pd(**shape)
        router = await self.router(fleet, *flags)
        return fleet, router, router.client

    def logs(self) -> str:
        """The ends of all router logs."""
        return "\n".join(f"--- {r.log.name}: {' '.join(r.flags)}\n{r.tail()}" for r in self.routers)

    async def finish(self) -> None:
        """The checks at the end of a test that passed so far."""
        for router in self.routers:
            if router.alive():
                await router.zero_check()
        for fleet in self.fleets:
            fleet.check()
        for router in self.routers:
            if router.alive():
                code = await router.stop()
                assert code == 0, f"exit code {code} after SIGTERM"
            assert "panicked at" not in router.tail(1 << 24), "the router panicked"
        if all(router.process is not None and router.process.returncode == 0 for router in self.routers):
            assert not list(self.store.iterdir()), "the router left files behind"

    async def close(self) -> None:
        """Ends whatever still runs."""
        for router in self.routers:
            if router.process is not None and router.alive():
                router.process.kill()
                router.process.wait()
            router.client.close()
        await asyncio.gather(*(fleet.stop() for fleet in self.fleets))


async def settled(router: Router) -> None:
    """Waits until every engine that the router was given has answered: one of each role makes it ready, shares of ranks need all. Engines
    that a test keeps from answering, and routers that want a key, are not waited for long."""
    for _ in range(100):
        got = await router.client.get("/workers")
        if got.status != 200 or all(worker["state"] != "pending" for worker in got.json()["workers"]):
            return
        await asyncio.sleep(0.01)
