"""Aborts, disconnects, pauses and registration against real engines: whatever happens, the engines' slots are free again."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from . import fleet
from .compare import same_generate
from .environment import OLD
from .equality import generate
from .fleet import Process, Trio, call, post
from .stages import busy, eventually, free, idle, queue

_NAMES = itertools.count()
RETRACTS = pytest.mark.skipif(OLD, reason="what decode of this release retracts in a pause never ends: it waits for prefill")


@pytest.fixture(scope="module")
def unbounded(trio: Trio) -> Iterator[Process]:
    """A router without admission: requests wait where decode makes them wait."""
    with fleet.router([trio.prefill], [trio.decode], "--no-admission", name="router-unbounded") as process:
        yield process


class Client:
    """A client that can leave: one request on a connection of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        at = urlsplit(url)
        self._connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=120)
        self._connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})

    def reply(self) -> tuple[int, bytes]:
        """The whole reply."""
        with contextlib.closing(self._connection):
            reply = self._connection.getresponse()
            return reply.status, reply.read()

    def leave(self) -> None:
        """Closes the connection in whatever state it is."""
        self._connection.close()


@dataclass
class Held:
    """A request that has reached a stage and stays there for seconds."""

    router: Process
    rid: str
    client: Client


def decode_labels(router: Process) -> str:
    """The labels of decode's only rank in the router's metrics."""
    (labels,) = (labels for labels in router.metrics("r3router_rank_open") if 'role="decode"' in labels)
    return labels


@contextlib.contextmanager
def full(trio: Trio) -> Iterator[None]:
    """Decode's pool is full: a request, which prefill will never send, has reserved nearly all of it, past the router."""
    rid = f"blocker-{next(_NAMES)}"
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": trio.prefill.bootstrap_port, "bootstrap_room": 2**40 + next(_NAMES)}
    blocker = Client(trio.decode.url, generate(6000, 2, rid=rid, **pair))
    eventually(lambda: queue(trio.decode, "decode_transfer") == 1, "the blocker to reserve")
    try:
        yield
    finally:
        call(f"{trio.decode.url}/abort_request", {"rid": rid})
        blocker.leave()


@contextlib.contextmanager
def queued(trio: Trio, router: Process, stream: bool) -> Iterator[Held]:
    """In the router's queue, since decode has no room; no engine sees it."""
    with full(trio):
        eventually(lambda: router.metrics("r3router_rank_kv_free_tokens")[decode_labels(router)] < 3000, "the router to know")
        rid = f"queued-{next(_NAMES)}"
        held = Held(router, rid, Client(router.url, generate(3000, 400, rid=rid, stream=stream)))
        eventually(lambda: router.metrics("r3router_queued_requests")[""] == 1, "the request to be queued")
        yield held
        assert (busy(trio.decode), busy(trio.prefill)) == (1, 0), "an engine saw the queued request"


@contextlib.contextmanager
def prealloc(trio: Trio, router: Process, stream: bool) -> Iterator[Held]:
    """In decode's prealloc queue, where a router without admission sends it."""
    with full(trio):
        rid = f"prealloc-{next(_NAMES)}"
        held = Held(router, rid, Client(router.url, generate(3000, 400, rid=rid, stream=stream)))
        eventually(lambda: queue(trio.decode, "decode_prealloc") == 1, "the request to wait for decode's memory")
        yield held
        if not OLD:  # looks at what waits for memory again when there is some, or when another request comes
            eventually(lambda: queue(trio.decode, "decode_prealloc") == 0, "decode's prealloc queue to be empty")


@contextlib.contextmanager
def transfer(trio: Trio, router: Process, stream: bool) -> Iterator[Held]:
    """Decode has reserved, prefill computes 6000 tokens."""
    rid = f"transfer-{next(_NAMES)}"
    held = Held(router, rid, Client(router.url, generate(6000, 400, rid=rid, stream=stream)))
    eventually(lambda: queue(trio.decode, "decode_transfer") == 1, "the request to be in transfer")
    yield held


@contextlib.contextmanager
def running(trio: Trio, router: Process, stream: bool) -> Iterator[Held]:
    """Decode generates."""
    rid = f"running-{next(_NAMES)}"
    held = Held(router, rid, Client(router.url, generate(24, 4000, rid=rid, stream=stream)))
    eventually(lambda: trio.decode.loads()[0]["num_running_reqs"] == 1, "the request to run")
    yield held


STAGES = {
    "queued": (queued, "router"),
    "prealloc": (prealloc, "unbounded"),
    "transfer": (transfer, "router"),
    "running": (running, "router"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("how", ["abort", "leave"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_request_that_ends_early_frees_its_slots(trio: Trio, request: pytest.FixtureRequest, stage: str, how: str, stream: bool) -> None:
    """ABT-1: `/abort_request` by the client's id, or the client's close, in every stage."""
    reach, fixture = STAGES[stage]
    router: Process = request.getfixturevalue(fixture)
    free(trio.decode)
    idle(trio.prefill)
    with reach(trio, router, stream) as held:
        if how == "leave":
            held.client.leave()
        else:
            assert call(f"{router.url}/abort_request", {"rid": held.rid})[0] == 200
            status, raw = held.client.reply()
            assert b"abort" in raw.lower(), raw[:300]
            assert status in (200, 500, 503)
        eventually(lambda: router.metrics("r3router_queued_requests")[""] == 0, "the router's queue to be empty")
    free(trio.decode)
    idle(trio.prefill)
    for family in ("r3router_rank_open", "r3router_rank_in_transfer", "r3router_requests_live"):
        eventually(lambda family=family: not any(router.metrics(family).values()), f"{family} to be 0")


def test_abort_all_ends_everything(trio: Trio, router: Process) -> None:
    """R3-2: replies of aborted requests are aborts; their rows are those of their tokens or absent."""
    with ThreadPoolExecutor(6) as pool:
        replies = [pool.submit(call, f"{router.url}/generate", generate(30 + at, 600)) for at in range(6)]
        eventually(lambda: trio.decode.loads()[0]["num_running_reqs"] == 6, "all to run")
        assert call(f"{router.url}/abort_request", {"abort_all": True})[0] == 200
        for at, reply in enumerate(replies):
            status, raw = reply.result(timeout=60)
            assert status in (200, 503) and b"abort" in raw.lower(), raw[:300]
            if status == 200:
                meta = json.loads(raw)["meta_info"]
                assert meta["finish_reason"]["type"] == "abort"
                if meta.get("routed_experts") is not None:
                    rows = len(meta["routed_experts"]) * 3 // 4 // 32
                    assert rows == 30 + at + meta["completion_tokens"] - 1
    free(trio.decode)


def test_pause_flush_update_continue_with_requests_waiting(trio: Trio, router: Process) -> None:
    """RL-1: nothing reaches an engine during a pause, and what waited is served with the new weights."""
    idle(trio.prefill, trio.decode)
    assert post(f"{router.url}/pause_generation", {"mode": "abort"})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, f"{router.url}/generate", generate(30, 6))
        time.sleep(1.0)
        assert busy(trio.prefill) == 0 and busy(trio.decode) == 0, "nothing may reach an engine during the pause"
        status, raw = call(f"{router.url}/flush_cache", {})
        assert status == 200, raw
        status, raw = call(f"{router.url}/update_weight_version", {"new_version": "step-2", "abort_all_requests": False})
        assert status == 200, raw
        assert post(f"{router.url}/continue_generation", {})
        assert waiting.result(timeout=60)["meta_info"]["weight_version"] == "step-2"
    call(f"{router.url}/update_weight_version", {"new_version": "default", "abort_all_requests": False})


def paused(trio: Trio, router: Process, mode: str, body: dict[str, Any]) -> tuple[list[Future[tuple[int, bytes]]], tuple[int, bytes]]:
    """Four requests run, are paused, the caches are flushed, and they go on: their replies, and flush's answer."""
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(call, f"{router.url}/generate", body) for _ in range(4)]
        eventually(lambda: trio.decode.loads()[0]["num_running_reqs"] == 4, "all to run")
        assert post(f"{router.url}/pause_generation", {"mode": mode})
        flushed = call(f"{router.url}/flush_cache", {})
        assert post(f"{router.url}/continue_generation", {})
    return replies, flushed


def test_a_pause_in_place_goes_on_as_if_nothing_had_been(trio: Trio, router: Process) -> None:
    """RL-1: flush's refusal by one engine comes back as it is, with each engine's own answer, once."""
    body = generate(24, 120)
    replies, (status, raw) = paused(trio, router, "in_place", body)
    assert status == 400
    answers = {worker["role"]: worker["status"] for worker in json.loads(raw)["workers"]}
    assert answers == {"prefill": 200, "decode": 400}
    expected = post(f"{trio.unified.url}/generate", body)
    for reply in replies:
        same_generate(json.loads(reply.result()[1]), expected)


@RETRACTS
def test_a_pause_that_retracts_never_gives_wrong_rows(trio: Trio, router: Process) -> None:
    """Decode computes the retracted part again on prefill, so its own rows of that part are junk: refused by name, not returned."""
    body = generate(24, 120)
    replies, (status, _) = paused(trio, router, "retract", body)
    assert status == 200
    expected = post(f"{trio.unified.url}/generate", body)
    for reply in replies:
        status, raw = reply.result()
        if status == 200:
            same_generate(json.loads(raw), expected)
        else:
            assert (status, json.loads(raw)["error"]["code"]) == (502, "r3_mismatch"), raw[:300]
    free(trio.decode)


@RETRACTS
def test_a_pause_that_retracts_keeps_the_tokens(trio: Trio, router: Process) -> None:
    """Without R3 nothing is lost: the same tokens as without a pause."""
    body = generate(24, 120) | {"return_routed_experts": False}
    replies, _ = paused(trio, router, "retract", body)
    expected = post(f"{trio.unified.url}/generate", body)
    for reply in replies:
        status, raw = reply.result()
        assert status == 200, raw[:300]
        same_generate(json.loads(raw), expected, r3=False)
    free(trio.decode)


def test_a_router_without_workers_takes_them_as_they_come(trio: Trio) -> None:
    with fleet.router([], [], name="router-empty") as router:
        status, raw = call(f"{router.url}/generate", generate(5, 2))
        assert status == 503 and b"prefill" in raw
        spec = {"url": trio.prefill.url, "worker_type": "prefill", "bootstrap_port": trio.prefill.bootstrap_port}
        for body in (spec, {"url": trio.decode.url, "worker_type": "decode"}):
            assert call(f"{router.url}/workers", body)[0] in (200, 202)
        eventually(lambda: call(f"{router.url}/readiness")[0] == 200, "the router to be ready")
        body = generate(50, 5)
        same_generate(post(f"{router.url}/generate", body), post(f"{trio.unified.url}/generate", body))
        listed = json.loads(call(f"{router.url}/workers")[1])["workers"]
        assert {worker["url"] for worker in listed} == {trio.prefill.url, trio.decode.url}
        for worker in listed:
            assert call(f"{router.url}/workers/{worker['id']}", method="DELETE")[0] in (200, 202)
        eventually(lambda: not json.loads(call(f"{router.url}/workers")[1])["workers"], "the workers to be gone")
        assert call(f"{router.url}/generate", generate(5, 2))[0] == 503


def test_an_overlong_prompt_gets_400_and_blocks_nobody(trio: Trio, router: Process) -> None:
    status, raw = call(f"{router.url}/generate", generate(9000, 4))
    assert status == 400 and b"9000" in raw
    assert post(f"{router.url}/generate", generate(8, 2))["meta_info"]["completion_tokens"] == 2
    idle(trio.prefill, trio.decode)


def test_what_only_the_engine_can_refuse_comes_back_as_its_400(trio: Trio, router: Process) -> None:
    """LEG-1: both halves refuse, nothing is retried, no breaker opens, and decode holds nothing."""
    before = router.metrics("r3router_attempts_total")[""]
    for _ in range(12):
        status, raw = call(f"{router.url}/generate", generate(8, 4) | {"sampling_params": {"top_p": 7.0}})
        assert status == 400 and b"top_p" in raw, raw[:300]
    assert router.metrics("r3router_attempts_total")[""] == before + 12
    assert all(router.metrics("r3router_worker_up").values())
    free(trio.decode)
    body = generate(8, 2)
    same_generate(post(f"{router.url}/generate", body), post(f"{trio.unified.url}/generate", body))


def test_more_requests_than_rows_all_complete(trio: Trio, router: Process) -> None:
    with ThreadPoolExecutor(48) as pool:
        replies = list(pool.map(lambda at: post(f"{router.url}/generate", generate(20 + at, 12)), range(48)))
    assert all(reply["meta_info"]["completion_tokens"] == 12 for reply in replies)
    same_generate(replies[17], post(f"{trio.unified.url}/generate", generate(37, 12)))
    free(trio.decode)
