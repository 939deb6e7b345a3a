"""The engines' own fault switches: transfers that fail at random, and requests pushed out of decode's memory and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from . import fleet
from .compare import same_generate
from .environment import OLD
from .equality import generate
from .fleet import Process, Trio, call, post
from .stages import eventually, free, idle

FAILING = {"variables": {"SGLANG_TEST_DISAGG_FAILURE_PROB": "0.01"}}
RETRACTING = {"variables": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}}


@pytest.fixture(scope="module")
def faulty() -> Iterator[tuple[Process, Process]]:
    """A prefill engine whose transfers fail, and a decode engine that retracts."""
    with fleet.engines(("prefill", "failing-prefill", FAILING), ("decode", "retracting-decode", RETRACTING)) as (prefill, decode):
        yield prefill, decode


@pytest.mark.skipif(OLD, reason="this release has no switch that makes transfers fail")
def test_transfers_that_fail_are_run_again_and_leave_nothing(trio: Trio, faulty: tuple[Process, Process]) -> None:
    """LEG-1: prefill fails a request and does not tell decode; the router ends decode's half and tries again."""
    bodies = [generate(200 + at, 6) for at in range(24)]
    with fleet.router([faulty[0]], [trio.decode], name="router-failing") as router:
        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda body: call(f"{router.url}/generate", body), bodies))
        attempts = router.metrics("r3router_attempts_total")[""]
        assert attempts > len(bodies), "the switch made at least one transfer fail"
        completed = 0
        for body, (status, raw) in zip(bodies, replies, strict=True):
            if status == 200:
                completed += 1
                same_generate(json.loads(raw), post(f"{trio.unified.url}/generate", body))
            else:
                assert status == 500 and b"Prefill" in raw, raw[:300]
        assert completed >= len(bodies) // 2
        eventually(lambda: not any(router.metrics("r3router_rank_open").values()), "the ledger to be empty")
    free(trio.decode)
    idle(faulty[0])


def test_retracted_requests_keep_their_tokens(trio: Trio, faulty: tuple[Process, Process]) -> None:
    decode = faulty[1]
    bodies = [generate(40 + at, 30) | {"return_routed_experts": False} for at in range(4)]
    with fleet.router([trio.prefill], [decode], name="router-retracting") as router, ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda body: post(f"{router.url}/generate", body), bodies))
    assert sum(decode.metrics("sglang:num_retracted_requests_total").values()) > 0, "the switch retracted at least one request"
    for body, reply in zip(bodies, replies, strict=True):
        same_generate(reply, post(f"{trio.unified.url}/generate", body), r3=False)
    free(decode)


def test_rows_of_a_retracted_request_are_right_or_refused(trio: Trio, faulty: tuple[Process, Process]) -> None:
    """R3-1: decode's rows are looked up by slot, and a retracted request has new slots: its rows must not be passed on as they are."""
    decode = faulty[1]
    bodies = [generate(60 + at, 30) for at in range(4)]
    with fleet.router([trio.prefill], [decode], "--disable-retries", name="router-retracting-r3") as router, ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda body: call(f"{router.url}/generate", body), bodies))
    refused = 0
    for body, (status, raw) in zip(bodies, replies, strict=True):
        if status == 200:
            same_generate(json.loads(raw), post(f"{trio.unified.url}/generate", body))
        else:
            refused += 1
            assert (status, json.loads(raw)["error"]["code"]) == (502, "r3_mismatch"), raw[:300]
    assert refused > 0, "at least one request was retracted"
    free(decode)
