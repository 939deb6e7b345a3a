"""Routes that one regular engine serves by itself, and what the edge adds to every route: ids, CORS, a rate, methods."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from scripted.acts import answer
from scripted.calls import GENERATE, statuses
from scripted.calls import ROUTES as CALLS
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.server import Exchange, Request

ROUTES = ["/v1/embeddings", "/v1/score", "/v1/classify", "/classify", "/encode", "/v1/responses", "/v1/messages", "/v1/tokenize"]


class Model(Engine):
    """A regular engine whose other POST routes answer with `reply`, or as `stream` says."""

    reply: Any = None
    events: tuple[bytes, ...] = ()

    async def _control(self, request: Request, exchange: Exchange) -> None:
        known = request.path in (*ROUTES, "/v1/rerank") or request.path.startswith("/v1/responses/")
        if not known:
            return await super()._control(request, exchange)
        self.control.append(request)
        if self.events:
            await exchange.start(200, "text/event-stream", [("x-engine", self.name)])
            for event in self.events:
                await exchange.chunk(event)
                await asyncio.sleep(0.01)
            return await exchange.end()
        if request.path.startswith("/v1/responses/") and request.path.split("/")[3] != f"resp_{self.name}":
            return await exchange.reply(404, b'{"detail": "no such response"}')
        body = json.dumps(self.reply if self.reply is not None else {"by": self.name}).encode()
        return await exchange.reply(200, body, [("x-engine", self.name)])


async def regular(lab: Lab, *flags: str, count: int = 1) -> tuple[list[Model], Any]:
    engines = [Model("regular", f"R{n}") for n in range(count)]
    router = await lab.router(await lab.fleet(Fleet(engines)), *flags)
    return engines, router


@pytest.mark.parametrize("path", ROUTES)
async def test_body_headers_and_reply_pass_as_they_are(lab: Lab, path: str) -> None:
    (engine,), router = await regular(lab)
    engine.reply = {"odd": [1, None, {"a": "\ud800"}]}
    raw = b'{"model":"m","input":"\\ud800 \\u00e9","future":{"a":[1.50,{"b":null}]}}'
    sent = [("x-request-id", "r-1"), ("authorization", "Bearer k"), ("x-smg-routing-key", "key"), ("cookie", "not passed on")]
    got = await router.client.request("POST", path + "?a=b", raw, sent)
    assert got.status == 200
    assert got.body == json.dumps(engine.reply).encode()
    assert (got.header("x-engine"), got.header("x-request-id")) == ("R0", "r-1")
    (call,) = engine.control
    assert (call.path, call.query, call.body) == (path, "a=b", raw)
    assert [call.header(name) for name, _ in sent] == ["r-1", "Bearer k", "key", None]


async def test_a_stream_of_events_passes_as_it_comes(lab: Lab) -> None:
    (engine,), router = await regular(lab)
    engine.events = (b"event: a\ndata: 1\n\n", b"data: 2\n", b"\n", b"data: [DONE]\n\n")
    got = await router.client.post("/v1/responses", {"model": "m", "input": "x", "stream": True})
    assert got.body == b"".join(engine.events)
    assert got.header("content-type") == "text/event-stream"
    assert got.chunks is not None
    assert len(got.chunks) > 1, "it was kept until its end"


async def test_calls_go_to_the_engine_that_has_less_to_do_and_past_one_that_cannot_be_reached(lab: Lab) -> None:
    engines, router = await regular(lab, "--poll-interval-ms", "60000", "--health-check-interval-secs", "600", count=2)
    engines[0].server.refuse()
    for connection in list(engines[0].server.connections):
        connection.rst()
    answers = await asyncio.gather(*(router.client.post("/v1/embeddings", {"input": "x"}) for _ in range(10)))
    assert statuses(answers) == {200: 10}
    assert {answer.json()["by"] for answer in answers} == {"R1"}


async def test_a_client_that_leaves_closes_the_call(lab: Lab) -> None:
    (engine,), router = await regular(lab)
    engine.events = tuple(b"data: %d\n\n" % n for n in range(1000))
    connection = await router.client.connect()
    await connection.post("/v1/responses", b'{"stream": true}')
    await connection.head()
    assert (await router.metrics()).sum("r3router_requests_live") == 1
    connection.rst()
    await router.zero_check()


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": 1}}', b"[]", b'"x"'])
async def test_a_body_that_is_no_json_object_reaches_no_engine(lab: Lab, body: bytes) -> None:
    (engine,), router = await regular(lab)
    for path in ROUTES:
        got = await router.client.request("POST", path, body)
        assert (got.status, got.error()["code"]) == (400, "invalid_json"), path
    assert engine.control == []


async def test_pd_engines_tokenise_and_serve_none_of_the_others(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    for path in (*ROUTES, "/rerank", "/v1/rerank"):
        got = await client.post(path, {"model": "m", "input": "x", "prompt": "x"})
        if path == "/v1/tokenize":
            assert got.status == 200
            continue
        assert got.status == 501
        assert path in got.error()["message"]
    got = await client.get("/v1/responses/resp_1")
    assert got.status == 501
    assert [request.path for engine in fleet.engines for request in engine.control] == ["/v1/tokenize"]


async def test_ranks_come_as_results_as_many_as_asked(lab: Lab) -> None:
    (engine,), router = await regular(lab)
    engine.reply = [{"score": 0.9, "document": "b", "index": 1}, {"score": 0.1, "document": "a", "index": 0}]
    for path in ("/rerank", "/v1/rerank"):
        got = (await router.client.post(path, {"model": "m", "query": "q", "documents": ["a", "b"], "rid": "r-7"})).json()
        assert got.pop("created") > 1_600_000_000
        assert got == {"results": engine.reply, "model": "m", "usage": None, "object": "rerank", "id": "r-7"}
    few = await router.client.post("/rerank", {"query": "q", "documents": ["a", "b"], "top_k": 1, "return_documents": False})
    assert few.json()["results"] == [{"score": 0.9, "index": 1}]
    assert [request.path for request in engine.control] == ["/v1/rerank"] * 3


async def test_a_response_is_found_on_the_engine_that_keeps_it(lab: Lab) -> None:
    _, router = await regular(lab, count=3)
    for name in ("R0", "R1", "R2"):
        got = await router.client.get(f"/v1/responses/resp_{name}")
        assert (got.status, got.json()) == (200, {"by": name})
    assert (await router.client.post("/v1/responses/resp_R1/cancel", {})).json() == {"by": "R1"}
    assert (await router.client.get("/v1/responses/resp_none")).status == 404


async def test_a_changed_worker_shows_its_new_values_and_keeps_the_rest(lab: Lab) -> None:
    (engine,), router = await regular(lab)
    (worker,) = (await router.client.get("/workers")).json()["workers"]
    path = f"/workers/{worker['id']}"
    got = await router.client.request("PUT", path, {"priority": 60, "labels": {"zone": "a"}})
    assert (got.status, got.json()["worker_id"]) == (202, worker["id"])
    shown = (await router.client.get(path)).json()
    assert (shown["priority"], shown["labels"], shown["cost"], shown["url"]) == (60, {"zone": "a"}, 1.0, engine.url)
    for wrong in ({"priority": "x"}, {"cost": None}, {"labels": []}, {"url": "http://a:1"}, [], "x"):
        got = await router.client.request("PUT", path, wrong)
        assert (got.status, got.error()["code"]) == (400, "invalid_field"), wrong
    assert (await router.client.get(path)).json()["priority"] == 60


async def test_every_answer_has_an_id_and_every_405_says_what_is_allowed(lab: Lab) -> None:
    _, _, client = await lab.serve()
    for path in ("/health", "/readiness", "/workers", "/v1/models", "/metrics", "/nowhere", "/generate"):
        got = await client.request("GET", path, b"", [("x-correlation-id", "c-1")])
        assert got.header("x-request-id") == "c-1", path
        assert (await client.get(path)).header("x-request-id"), path
    for method, path, allowed in (
        ("GET", "/generate", "POST"),
        ("DELETE", "/v1/embeddings", "POST"),
        ("PATCH", "/workers", "GET, POST"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/metrics", "GET, HEAD"),
    ):
        got = await client.request(method, path)
        assert (got.status, got.header("allow")) == (405, allowed), path
    assert (await client.request("HEAD", "/health")).status == 200


async def test_pages_of_named_origins_may_call_and_others_may_not(lab: Lab) -> None:
    _, _, client = await lab.serve("--cors-allowed-origins", "https://a.example", "http://b:3000")
    ask = [("access-control-request-method", "POST"), ("access-control-request-headers", "content-type,x-mine")]
    for origin, allowed in (("https://a.example", "https://a.example"), ("http://b:3000", "http://b:3000"), ("https://c.example", None)):
        asked = await client.request("OPTIONS", "/generate", b"", [("origin", origin), *ask])
        assert asked.status == 200
        assert asked.header("access-control-allow-origin") == allowed
        assert asked.header("access-control-allow-headers") == ("content-type,x-mine" if allowed else None)
        for body in (GENERATE, {"text": 5}):
            got = await client.post("/generate", body, [("origin", origin)])
            assert got.header("access-control-allow-origin") == allowed
            assert got.header("vary") == "origin"
    assert (await client.post("/generate", GENERATE)).header("vary") is None


async def test_without_origins_every_page_may_call(lab: Lab) -> None:
    _, _, client = await lab.serve()
    got = await client.request("POST", "/generate", GENERATE, [("origin", "https://a.example")])
    assert got.header("access-control-allow-origin") == "*"
    stream = await client.request("POST", "/generate", {**GENERATE, "stream": True}, [("origin", "https://a.example")])
    assert stream.header("access-control-allow-origin") == "*"


async def test_requests_over_the_rate_wait_and_those_that_would_wait_too_long_are_refused(lab: Lab) -> None:
    flags = ["--rate-limit-tokens-per-second", "1", "--max-concurrent-requests", "3", "--queue-timeout-secs", "1.5"]
    fleet, _, client = await lab.serve(*flags)
    answers = await asyncio.gather(*(client.generate(**GENERATE) for _ in range(10)))
    # Three at once, one that waits a second; the fifth would wait two.
    assert statuses(answers) == {200: 4, 429: 6}
    refused = next(answer for answer in answers if answer.status == 429)
    assert "--rate-limit-tokens-per-second" in refused.error()["message"]
    assert int(refused.header("retry-after") or 0) >= 1
    assert len(fleet.d.legs) == 4


@pytest.mark.parametrize("status", [500, 503])
async def test_a_regular_engines_failure_reaches_the_client_as_the_engine_wrote_it(lab: Lab, status: int) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0"), Engine("regular", "R1")]))
    router = await lab.router(fleet, "--retry-initial-backoff-ms", "1")
    body = b'{"object":"error","message":"it broke","code":%d}' % status
    for engine in fleet.engines:
        engine.script = lambda leg: answer(status, body)
    for path, call in CALLS.items():
        got = await router.client.post(path, call)
        assert (got.status, got.body, got.header("content-type")) == (status, body, "application/json")
        assert got.header("x-smg-error-code") == "engine_failed"
    # All attempts were made before: it is the last one's reply.
    assert fleet.posts() >= 2 * len(CALLS)


async def test_a_failed_engine_without_words_gets_ours(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0")]))
    router = await lab.router(fleet, "--disable-retries")
    fleet.engines[0].script = lambda leg: answer(500, b"")
    got = await router.client.generate(**GENERATE)
    assert got.status == 500
    assert got.error()["worker"].startswith(fleet.engines[0].url)
