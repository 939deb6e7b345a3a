"""The incident in small (`incident.py`), and engines killed while KV travels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from . import fleet, incident
from .compare import same_generate
from .equality import generate
from .fleet import Process, Trio, call, post
from .stages import eventually, free, idle, queue

Pair = tuple[Process, Process]


@pytest.fixture(scope="module")
def small() -> Iterator[Pair]:
    """Prefill, and decode with few rows and slots; the last two tests kill them."""
    with incident.small() as pair:
        yield pair


def test_no_engine_clock_runs_out_through_r3router(small: Pair) -> None:
    """KVX-1: what decode cannot take waits in the router; decode's figures and the ledger's are the same."""
    prefill, decode = small
    with fleet.router([prefill], [decode], name="incident-r3router") as router:
        column = incident.run("r3router", router, decode, samples=24)
        print(incident.table([column]))
        assert column.outcomes == {"completed": 24}
        assert column.most("transfer") + column.most("prealloc") <= column.most("ledger_transfer")
        assert column.most("ledger_open") <= incident.ROWS
        assert column.logged(1) <= 1.0
        equal, more, fewer = column.agreement()
        assert equal >= 10 and more == 0 and equal > fewer, f"{equal} looks as in the ledger, {more} with more, {fewer} with fewer"
        free(decode)
        idle(prefill)
        eventually(lambda: not any(router.metrics("r3router_rank_open").values()), "the ledger to be empty")


def send(pool: ThreadPoolExecutor, router: Process, bodies: list[dict[str, Any]]) -> list[Future[tuple[int, bytes]]]:
    """Starts a request for each body."""
    return [pool.submit(call, f"{router.url}/generate", body) for body in bodies]


def right(trio: Trio, bodies: list[dict[str, Any]], replies: list[Future[tuple[int, bytes]]]) -> None:
    """All replies are the unified engine's."""
    for body, reply in zip(bodies, replies, strict=True):
        status, raw = reply.result(timeout=300)
        assert status == 200, raw[:500]
        same_generate(json.loads(raw), post(f"{trio.unified.url}/generate", body))


def test_decode_killed_in_mid_transfer(trio: Trio, small: Pair) -> None:
    """The samples of the dead engine are run again on the other one; prefill keeps nothing of them."""
    victim = small[1]
    if victim.popen is None:
        pytest.skip("the engines are not ours to kill")
    bodies = [generate(1200 + at, 6) for at in range(6)]
    with fleet.router([trio.prefill], [victim, trio.decode], name="router-decode-killed") as router, ThreadPoolExecutor(6) as pool:
        replies = send(pool, router, bodies)
        eventually(lambda: queue(victim, "decode_transfer") >= 1, "the victim to hold a transfer")
        victim.kill()
        right(trio, bodies, replies)
        assert max(line["attempts"] for line in router.requests()) > 1, "a sample of the dead engine was run again"
        eventually(lambda: not any(router.metrics("r3router_rank_open").values()), "the ledger to be empty")
    free(trio.decode)
    idle(trio.prefill)


def test_prefill_killed_in_mid_transfer(trio: Trio, small: Pair) -> None:
    """Decode is not told that prefill is gone: the router frees what it holds, and runs the samples again on the other engine."""
    victim = small[0]
    if victim.popen is None:
        pytest.skip("the engines are not ours to kill")
    bodies = [generate(1300 + at, 6) for at in range(6)]
    with fleet.router([victim, trio.prefill], [trio.decode], name="router-prefill-killed") as router, ThreadPoolExecutor(6) as pool:
        replies = send(pool, router, bodies)
        eventually(lambda: sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in victim.loads()) >= 1, "prefill to have one")
        victim.kill()
        right(trio, bodies, replies)
        assert max(line["attempts"] for line in router.requests()) > 1, "a sample of the dead engine was run again"
        eventually(lambda: not any(router.metrics("r3router_rank_open").values()), "the ledger to be empty")
    free(trio.decode)
    idle(trio.prefill)
