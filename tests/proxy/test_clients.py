"""The clients that people use: what they parse must parse, and regular engines are served as well as split ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from scripted.acts import answer, refusal
from scripted.calls import GENERATE, ROUTES, statuses
from scripted.client import events
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab

WISHES: list[dict[str, Any]] = [
    {},
    {"return_logprob": True, "logprob_start_len": 0},
    {"return_routed_experts": True},
    {"return_routed_experts": True, "return_logprob": True, "logprob_start_len": 0},
]


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("path", ROUTES)
async def test_aiohttp_reads_merged_replies_as_json(lab: Lab, path: str, wish: dict[str, Any]) -> None:
    _, router, _ = await lab.serve()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{router.port}") as session:
        for extra in ({}, {"n": 2} if path != "/generate" else {"input_ids": [[1, 2], [3]]}):
            async with session.post(path, json={**ROUTES[path], **wish, **extra}) as response:
                assert response.status == 200
                assert await response.json()  # Refuses any other content type.
        async with session.post(path, json={**ROUTES[path], **wish, "stream": True}) as response:
            assert response.content_type == "text/event-stream"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        async with session.post(path, data=b"{") as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "invalid_json"


async def test_request_ids_and_engine_headers_come_back(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    for header in ("x-request-id", "x-correlation-id"):
        got = await client.post("/generate", GENERATE, [(header, "abc-1")])
        assert got.header("x-request-id") == "abc-1"
    got = await client.generate(**GENERATE)
    assert got.header("x-request-id")
    assert fleet.d.legs


async def test_clients_id_is_in_the_reply_and_not_the_routers(lab: Lab) -> None:
    _, _, client = await lab.serve()
    for extra in ({}, {"return_logprob": True}, {"return_routed_experts": True}):
        got = await client.generate(**GENERATE, rid="ep-7::t3", **extra)
        assert got.json()["meta_info"]["id"].startswith("ep-7::t3")


async def test_regular_engines_are_routed_by_rank_and_relayed_byte_for_byte(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0", dp_size=2), Engine("regular", "R1", dp_size=2)]))
    router = await lab.router(fleet)
    client = router.client
    answers = await asyncio.gather(*(client.post(path, body) for path, body in ROUTES.items() for _ in range(20)))
    assert statuses(answers) == {200: 60}
    used = {(leg.engine.name, leg.rank) for e in fleet.engines for leg in e.legs}
    assert used == {("R0", 0), ("R0", 1), ("R1", 0), ("R1", 1)}
    for leg in (leg for e in fleet.engines for leg in e.legs):
        assert not [k for k in leg.body if k.startswith("bootstrap")]
    got = await client.generate(input_ids=[1, 2, 3], return_logprob=True, logprob_start_len=0, return_routed_experts=True)
    last = max((leg for e in fleet.engines for leg in e.legs), key=lambda leg: leg.arrived)
    assert got.json() == json.loads(last.sent) or {**got.json()["meta_info"], "id": 0} == {**json.loads(last.sent)["meta_info"], "id": 0}
    stream = await client.generate(**GENERATE, stream=True)
    assert events(stream.body)[-1] == "[DONE]"
    fleet.check()


async def test_regular_batches_and_samples_reach_the_engine(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0")]))
    router = await lab.router(fleet)
    got = await router.client.generate(input_ids=[[1], [2, 2]], sampling_params={"max_new_tokens": 2})
    assert got.status == 200
    assert [r["meta_info"]["prompt_tokens"] for r in got.json()] == [1, 2]
    chat = await router.client.chat(n=3)
    assert [c["index"] for c in chat.json()["choices"]] == [0, 1, 2]
    fleet.check()


async def test_regular_failures_are_retried_elsewhere_and_client_errors_are_not(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0"), Engine("regular", "R1")]))
    router = await lab.router(fleet)
    fleet.engines[0].script = lambda leg: answer(500, {"detail": "x"})
    answers = [await router.client.generate(**GENERATE) for _ in range(6)]
    assert statuses(answers) == {200: 6}
    for engine in fleet.engines:
        engine.script = lambda leg: refusal(400, "not you")
        engine.legs.clear()
    got = await router.client.generate(**GENERATE)
    assert got.status == 400
    assert "not you" in got.body.decode()
    assert fleet.posts() == 1


async def test_an_abort_by_the_clients_id_ends_its_call(lab: Lab) -> None:
    fleet, router, client = await lab.serve(decodes=2, decode={"run_s": 30.0})
    calls = {rid: asyncio.create_task(client.generate(**GENERATE, rid=rid)) for rid in ("ep-7::t3", "ep-7::t30", "ep-8::t3")}
    for _ in range(200):
        if sum(rank.running for d in fleet.decodes for rank in d.ranks) == 3:
            break
        await asyncio.sleep(0.02)
    got = await client.post("/abort_request", {"rid": "ep-7::t3"})
    assert got.status == 200
    done = await asyncio.wait_for(calls["ep-7::t3"], 10.0)
    assert done.status in (200, 503)
    await asyncio.sleep(0.2)
    assert not calls["ep-7::t30"].done()
    assert not calls["ep-8::t3"].done()
    await client.post("/abort_request", {"rid": "ep-7::", "prefix": True})
    await asyncio.wait_for(calls["ep-7::t30"], 10.0)
    assert not calls["ep-8::t3"].done()
    await client.post("/abort_request", {"abort_all": True})
    await asyncio.wait_for(calls["ep-8::t3"], 10.0)
    await router.zero_check()
    fleet.violations = [v for v in fleet.violations if "strangers" in v]
    fleet.check()


async def test_info_routes_answer_with_an_engines_own_data(lab: Lab) -> None:
    _, _, client = await lab.serve()
    for path in ("/model_info", "/get_model_info"):
        got = await client.get(path)
        assert got.status == 200
        assert got.json()["model_path"] == "m"
    models = await client.get("/v1/models")
    assert models.json()["data"][0]["id"] == "m"
