"""What miles and slime send, call by call: registration, rollouts, aborts, partial rollouts, sessions, retries, scraping, removal."""

from __future__ import annotations

import asyncio
import base64
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import numpy as np
import pytest

from scripted.acts import answer, first
from scripted.calls import statuses
from scripted.client import Client, events
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab

SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 3,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
TOKENS = [151644, 872, 198, 3838, 374]


def payload(**more: Any) -> dict[str, Any]:
    """A rollout request as both frameworks write it."""
    return {"input_ids": TOKENS, "sampling_params": SAMPLING, "return_logprob": True, "return_routed_experts": True, **more}


async def register(client: Client, engine: Engine) -> str:
    """As an engine's actor registers it; raises for a status as they do."""
    body: dict[str, Any] = {"url": engine.url, "worker_type": engine.role}
    if engine.role == "prefill":
        body["bootstrap_port"] = engine.bootstrap.port
    got = await client.post("/workers", body)
    assert got.status // 100 == 2, got.body
    return str(got.json()["worker_id"])


async def until_ready(client: Client) -> None:
    """As miles' readiness probe: a generation of one token, a 503 is tried again."""
    for _ in range(400):
        got = await client.generate(input_ids=[0], sampling_params={"max_new_tokens": 1})
        if got.status == 200:
            return
        assert got.status == 503, got.body
        await asyncio.sleep(0.025)
    raise AssertionError("never ready")


def rows(reply: dict[str, Any], engine: Engine) -> np.ndarray[Any, Any]:
    """As the trainers read the payload: int32, a row for every token but the last."""
    meta = reply["meta_info"]
    count = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    return flat.reshape(count, engine.r3.layers, engine.r3.topk)


async def test_a_run_from_an_empty_router_to_the_last_removal(lab: Lab) -> None:
    router = await lab.router(None, "--log-level", "warn", "--request-timeout-secs", "14400", "--disable-health-check", ready=False)
    client = router.client
    assert (await client.get("/workers")).json()["workers"] == []
    fleet = await lab.pd(prefills=2, decodes=2)
    for engine in fleet.engines:
        await register(client, engine)
    await until_ready(client)
    replies = await asyncio.gather(*(client.post("/generate", payload(), [("x-smg-routing-key", f"s-{n % 4}")]) for n in range(16)))
    assert statuses(replies) == {200: 16}
    for reply in replies:
        got = reply.json()
        assert rows(got, fleet.p).shape[0] == len(TOKENS) + 3 - 1
        assert len(got["meta_info"]["output_token_logprobs"]) == 3
    # A trainer finds its engine by the URL that it registered and removes it by the id.
    for engine in fleet.engines:
        (entry,) = [w for w in (await client.get("/workers")).json()["workers"] if w["url"] == engine.url]
        assert (await client.delete(f"/workers/{entry['id']}")).status // 100 == 2
    assert (await client.get("/workers")).json()["workers"] == []
    assert (await client.generate(input_ids=[0], sampling_params={"max_new_tokens": 1})).status == 503
    fleet.check()


async def test_removal_by_quoted_url_and_the_calls_of_older_routers(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0"), Engine("regular", "R1")]))
    router = await lab.router(Fleet([]), "--worker-startup-check-interval", "0.05", ready=False)
    client = router.client
    for engine in fleet.engines:
        assert (await client.request("POST", f"/add_worker?url={engine.url}")).status == 200
    # Multi-LoRA asks the old list first and falls back on any other status.
    assert (await client.get("/list_workers")).json() == {"urls": [e.url for e in fleet.engines]}
    assert (await client.delete(f"/workers/{quote(fleet.engines[0].url, safe='')}")).status // 100 == 2
    assert (await client.request("POST", f"/remove_worker?url={fleet.engines[1].url}")).status == 200
    assert (await client.get("/list_workers")).json() == {"urls": []}


async def test_rollouts_are_aborted_straight_at_the_listed_urls(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decodes=2, decode={"dp_size": 2, "run_s": 30.0}, prefill={"dp_size": 2})
    calls = [asyncio.create_task(client.post("/generate", payload())) for _ in range(6)]
    for _ in range(400):
        if sum(rank.running for d in fleet.decodes for rank in d.ranks) == 6:
            break
        await asyncio.sleep(0.025)
    urls = [w["url"] for w in (await client.get("/workers")).json()["workers"]]
    assert sorted(urls) == sorted(e.url for e in fleet.engines), "one address an engine, without ranks"
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.post(f"{url}/abort_request", json={"abort_all": True}) as reply:
                assert reply.status == 200
    # What was generated so far comes back as an aborted sample.
    for reply in await asyncio.wait_for(asyncio.gather(*calls), 20.0):
        assert reply.status == 200, reply.body
        assert reply.json()["meta_info"]["finish_reason"]["type"] == "abort"
    for engine in fleet.engines:
        assert [abort.body for abort in engine.aborts if abort.body.get("abort_all")] == [{"abort_all": True}]


async def test_a_partial_rollout_goes_on_with_its_tokens_and_all_rows_come_again(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    sample = list(TOKENS)
    for turn in range(3):
        got = (await client.post("/generate", payload(input_ids=sample))).json()
        assert got["meta_info"]["prompt_tokens"] == len(sample)
        assert rows(got, fleet.p).shape[0] == len(sample) + 3 - 1, turn
        sample += got["output_ids"]


async def test_a_partial_rollout_may_ask_for_the_new_rows_only(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    got = (await client.post("/generate", payload(routed_experts_start_len=4))).json()
    flat = np.frombuffer(base64.b64decode(got["meta_info"]["routed_experts"]), np.int32)
    assert flat.size == (len(TOKENS) + 3 - 1 - 4) * fleet.p.r3.layers * fleet.p.r3.topk


async def test_a_stream_of_a_rollout_ends_with_its_rows(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    got = await client.post("/generate", payload(stream=True))
    parts = events(got.body)
    assert parts[-1] == "[DONE]"
    last = httpx.Response(200, text=parts[-2]).json()
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert rows(last, fleet.p).shape[0] == len(TOKENS) + 3 - 1


async def test_every_option_of_a_rollout_reaches_both_engines(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    options = {
        "logprob_start_len": 0,
        "return_indexer_topk": False,
        "lora_path": None,
        "image_data": ["data:image/png;base64,iVBORw0KGgo="],
        "return_text_in_logprobs": False,
        "priority": 3,
        "extra_key": "salt",
    }
    assert (await client.post("/generate", payload(**options))).status == 200
    for leg in (*fleet.p.legs, *fleet.d.legs):
        assert {key: leg.body[key] for key in options} == options
        assert leg.body["sampling_params"] == SAMPLING
        assert leg.body["input_ids"] == TOKENS


async def test_a_session_over_chat_reads_rows_and_logprobs_from_its_choice(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    messages = [{"role": "user", "content": "hello"}]
    for turn in range(3):
        got = await client.post(
            "/v1/chat/completions?trace=1",
            {
                "model": "m",
                "messages": messages,
                "logprobs": True,
                "return_meta_info": True,
                "return_routed_experts": True,
                "max_tokens": 3,
            },
            [("x-smg-routing-key", "session-7")],
        )
        assert got.status == 200, got.body
        (choice,) = got.json()["choices"]
        assert rows(choice, fleet.p).shape[0] == choice["meta_info"]["prompt_tokens"] + 3 - 1
        assert len(choice["logprobs"]["content"]) == 3
        messages += [choice["message"], {"role": "user", "content": f"turn {turn}"}]
    for leg in (*fleet.p.legs, *fleet.d.legs):
        assert leg.request.query == "trace=1"
        assert leg.request.header("x-smg-routing-key") == "session-7"


async def test_a_client_that_tries_sixty_times_gets_through_and_no_attempt_is_left_behind(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--disable-retries", "--disable-circuit-breaker")
    fleet.d.script = first(59, answer(503, {"detail": "busy"}))
    replies = [await client.post("/generate", payload()) for _ in range(60)]
    assert [reply.status for reply in replies] == [503] * 59 + [200]
    rooms = [leg.room for leg in fleet.d.legs]
    assert len(set(rooms)) == len(rooms) == 60
    await router.zero_check()


async def test_engine_metrics_name_their_engine(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decode={"mamba_slots": 100}, prefill={"mamba_slots": 100})
    got = await client.get("/engine_metrics")
    assert got.status == 200
    assert (got.header("content-type") or "").startswith("text/plain")
    lines = [line for line in got.body.decode().splitlines() if line and not line.startswith("#")]
    assert lines
    assert all(":" not in line.split("{")[0] for line in lines)
    for engine in fleet.engines:
        assert [line for line in lines if f'worker_addr="{engine.url}"' in line]


@pytest.mark.parametrize("role", ["P", "D"])
async def test_loads_are_polled_at_the_engine_and_at_the_router(lab: Lab, role: str) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 2})
    engine = fleet.p if role == "P" else fleet.d
    direct = Client(engine.server.port)
    own = (await direct.get("/v1/loads?include=core")).json()["loads"]
    direct.close()
    told = [load for load in (await client.get("/v1/loads?include=core")).json()["loads"] if load["worker"] == engine.url]
    assert [load["dp_rank"] for load in told] == [load["dp_rank"] for load in own] == [0, 1]
    fleet.check()
