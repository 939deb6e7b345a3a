"""Aborts, disconnects, pauses and registration against real engines: whatever happens, the engines' slots are free again."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from . import fleet
from .compare import same_generate
from .equality import generate
from .fleet import Process, Trio, call, post

SETTLE_SECONDS = 30


def busy(engine: Process) -> int:
    """Requests that the engine counts anywhere."""
    load = json.loads(call(f"{engine.url}/v1/loads?include=all")[1])["loads"][0]
    split = load["disaggregation"]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) + int(split["prefill_inflight_queue_reqs"])


def eventually(done: Callable[[], bool], what: str, seconds: float = SETTLE_SECONDS) -> None:
    """Polls until `done()`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.1)


def idle(trio: Trio) -> None:
    """Waits until both halves are empty."""
    eventually(lambda: busy(trio.prefill) == 0 and busy(trio.decode) == 0, "both engines to be empty")


def long_request(rid: str, **more: Any) -> dict[str, Any]:
    """A request that generates for many seconds."""
    return generate(24, 4000, rid=rid, **more)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3, 2.0])
def test_abort_through_the_router_frees_the_slots(trio: Trio, router: Process, delay: float) -> None:
    rid = f"abort-{delay}"
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(call, f"{router.url}/generate", long_request(rid))
        time.sleep(0.2 + delay)
        assert call(f"{router.url}/abort_request", {"rid": rid})[0] == 200
        status, raw = reply.result(timeout=30)
    if status == 200:
        assert json.loads(raw)["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert status in (500, 503) and b"abort" in raw.lower()
    idle(trio)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay", [0.02, 0.2, 1.5])
def test_a_client_that_leaves_frees_the_slots(trio: Trio, router: Process, stream: bool, delay: float) -> None:
    at = urlsplit(router.url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port)
    connection.request("POST", "/generate", json.dumps(long_request(f"leave-{stream}-{delay}", stream=stream)))
    time.sleep(delay)
    connection.close()
    idle(trio)


def test_pause_flush_update_continue_with_requests_waiting(trio: Trio, router: Process) -> None:
    assert post(f"{router.url}/pause_generation", {"mode": "abort"})
    replies: list[Any] = []
    waiting = threading.Thread(target=lambda: replies.append(post(f"{router.url}/generate", generate(30, 6))))
    waiting.start()
    time.sleep(1.0)
    assert busy(trio.prefill) == 0 and busy(trio.decode) == 0, "nothing may reach an engine during the pause"
    status, raw = call(f"{router.url}/flush_cache", {})
    assert status == 200, raw
    status, raw = call(f"{router.url}/update_weight_version", {"new_version": "step-2", "abort_all_requests": False})
    assert status == 200, raw
    assert post(f"{router.url}/continue_generation", {})
    waiting.join(timeout=60)
    assert len(replies) == 1 and replies[0]["meta_info"]["weight_version"] == "step-2"
    call(f"{router.url}/update_weight_version", {"new_version": "default", "abort_all_requests": False})


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


def test_an_overlong_prompt_gets_the_engines_400_and_blocks_nobody(trio: Trio, router: Process) -> None:
    status, raw = call(f"{router.url}/generate", generate(9000, 4))
    assert status == 400 and b"9000" in raw
    assert post(f"{router.url}/generate", generate(8, 2))["meta_info"]["completion_tokens"] == 2
    idle(trio)


def test_more_requests_than_rows_all_complete(trio: Trio, router: Process) -> None:
    with ThreadPoolExecutor(48) as pool:
        replies = list(pool.map(lambda at: post(f"{router.url}/generate", generate(20 + at, 12)), range(48)))
    assert all(reply["meta_info"]["completion_tokens"] == 12 for reply in replies)
    same_generate(replies[17], post(f"{trio.unified.url}/generate", generate(37, 12)))
    idle(trio)
