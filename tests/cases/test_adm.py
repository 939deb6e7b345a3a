"""ADM: admission against the headroom of each decode rank."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from scripted.calls import crowd, long_bodies, statuses
from scripted.client import Response
from scripted.lab import Lab

POOL = 100_000
RANKS = 8


@pytest.mark.parametrize(
    ("prompt", "sampling", "growth"),
    [
        (45_000, {"max_new_tokens": 20_000}, 0),
        (45_000, {"max_new_tokens": None}, 4096),
        (45_000, {}, 4096),
        (40_000, {"max_new_tokens": 4096}, 0),
        (30_000, {"max_new_tokens": 1}, 0),
    ],
)
async def test_adm_1_no_rank_grows_past_its_pool(lab: Lab, prompt: int, sampling: dict[str, Any], growth: int) -> None:
    fleet, _, client = await lab.serve(
        "--poll-interval-ms",
        "50",
        prefill={"transfer_s": 0.1, "waiting_s": 20.0},
        decode={
            "dp_size": RANKS,
            "kv_pool": POOL,
            "grows_to_max_new": True,
            "default_growth": growth,
            "run_s": 0.2,
            "on_over": "freeze",
            "waiting_s": 20.0,
        },
    )
    bodies = long_bodies(3 * RANKS, prompt=prompt, shared=0, sampling_params=sampling)
    answers = await asyncio.gather(*(client.post("/generate", body) for body in bodies))
    assert statuses(answers) == {200: 3 * RANKS}
    fleet.check()
    assert max(rank.peak_kv for rank in fleet.d.ranks) <= POOL
    assert all(rank.peak_open for rank in fleet.d.ranks), "a rank was left idle"


async def test_adm_1_a_call_that_fits_no_rank_is_refused_at_once_and_blocks_nobody(lab: Lab) -> None:
    fleet, _, client = await lab.serve(
        prefill={"transfer_s": 0.3, "waiting_s": 20.0},
        decode={"dp_size": RANKS, "kv_pool": POOL, "run_s": 0.3, "on_over": "freeze", "waiting_s": 20.0},
    )
    (too_long,) = long_bodies(1, prompt=150_000, shared=0, sampling_params={"max_new_tokens": 16})
    others = [
        asyncio.create_task(client.post("/generate", body))
        for body in long_bodies(3 * RANKS, prompt=45_000, shared=0, sampling_params={"max_new_tokens": 20_000})
    ]
    await asyncio.sleep(0.1)
    start = time.monotonic()
    answer = await client.post("/generate", too_long)
    took = time.monotonic() - start
    assert not all(task.done() for task in others)
    assert answer.status == 400
    error = answer.error()
    assert error["code"] == "too_large_for_fleet"
    assert error["limit"] <= POOL
    assert error["measured"] >= 150_000
    assert took < 1.0
    assert statuses(await asyncio.gather(*others)) == {200: 3 * RANKS}
    assert all(leg.prompt_tokens < 150_000 for engine in fleet.engines for leg in engine.legs)


async def test_adm_2_slots_per_request_of_the_worker_bound_a_hybrid_rank(lab: Lab) -> None:
    fleet, _, client = await lab.serve(
        "--mamba-slots-per-request",
        "3",
        prefill={"transfer_s": 0.02},
        decode={"mamba_slots": 12, "max_running": 12, "slots_per_request": 3, "run_s": 0.02, "on_over": "die"},
    )
    answers = await asyncio.gather(*(client.generate(input_ids=[1, 2, 3]) for _ in range(100)))
    assert statuses(answers) == {200: 100}
    fleet.check()
    assert fleet.d.ranks[0].peak_mamba == 12, "four requests at once use the pool to its end"


async def test_adm_2_a_wrong_setting_is_learned_from_the_engine_without_hammering(lab: Lab) -> None:
    fleet, _, client = await lab.serve(
        "--mamba-slots-per-request",
        "1",
        "--poll-interval-ms",
        "20",
        "--disable-circuit-breaker",
        decodes=2,
        prefill={"transfer_s": 0.05},
        decode={"mamba_slots": 12, "max_running": 12, "slots_per_request": 3, "run_s": 0.05, "on_over": "mamba_500"},
    )

    async def wave(number: int) -> tuple[list[Response], int]:
        """24 calls at once; the answers and how many legs the engines refused."""
        before = sum(len(d.legs) for d in fleet.decodes)
        answers = list(await crowd([lambda i=i: client.generate(text=f"call {number}-{i} ") for i in range(24)], 24))
        legs = [leg for d in fleet.decodes for leg in d.legs][0:]
        tries: dict[str, int] = {}
        for leg in legs:
            tries[leg.body["text"]] = tries.get(leg.body["text"], 0) + 1
        assert max(tries.values()) <= 2, f"more than one extra attempt: {max(tries.values())}"
        return answers, sum(len(d.legs) for d in fleet.decodes) - before - statuses(answers).get(200, 0)

    refused = [(await wave(number))[1] for number in range(5)]
    assert refused[0] > 0, "the wrong setting was never noticed by the engines: the test shows nothing"
    answers, last = await wave(5)
    assert statuses(answers) == {200: 24}, f"refused legs per wave: {refused}"
    assert last == 0, f"the limit did not fall to what the ranks hold; refused legs per wave: {[*refused, last]}"
