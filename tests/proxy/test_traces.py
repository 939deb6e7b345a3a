"""Traces: the client's, the router's and the engines' spans are one trace, and tracing never stands in a request's way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from scripted.acts import never, refusal, rst
from scripted.calls import CHAT, GENERATE, ROUTES, until
from scripted.client import Client
from scripted.collector import Collector, Span
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.router import Router, free_ports

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{CALLER}-01"
UNSAMPLED = f"00-{TRACE}-{CALLER}-00"
HEADERS = [("traceparent", SAMPLED), ("tracestate", "a=1"), ("tracestate", "b=2,c=3")]
R3 = {"return_routed_experts": True}


@pytest_asyncio.fixture
async def collector() -> AsyncIterator[Collector]:
    made = await Collector().start()
    yield made
    await made.stop()


def flags(collector: Collector, protocol: str = "grpc") -> list[str]:
    to = f"localhost:{collector.grpc_port}" if protocol == "grpc" else f"http://localhost:{collector.http_port}/v1/traces"
    return ["--enable-trace", "--otlp-traces-endpoint", to]


async def post(client: Client, path: str, body: dict[str, Any], headers: list[tuple[str, str]] = HEADERS) -> Any:
    return await client.request("POST", path, json.dumps(body).encode(), headers)


async def traced(collector: Collector, path: str = "/generate", count: int = 1) -> Span:
    """Waits for the last spans of so many requests."""
    await until(lambda: len(collector.named(f"POST {path}")) >= count, "the request's span has come")
    return collector.named(f"POST {path}")[-1]


def parent_of(request: Any) -> tuple[str, str, str]:
    """Trace, span and flags that an engine got."""
    version, trace, span, flags = request.header("traceparent").split("-")
    assert version == "00"
    return trace, span, flags


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("path", ROUTES)
async def test_client_router_and_engines_are_one_trace(lab: Lab, collector: Collector, path: str, protocol: str) -> None:
    before = time.time_ns()
    shape = {"prefill": {"dp_size": 2}, "decode": {"dp_size": 2}}
    fleet, _, client = await lab.serve(*flags(collector, protocol), **shape)
    assert (await post(client, path, ROUTES[path])).status == 200
    server = await traced(collector, path)
    prefill, decode = fleet.pairs()[0]
    assert (server.trace, server.parent, server.kind, server.remote) == (TRACE, CALLER, "server", True)
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["http.route"] == server.attributes["url.path"] == path
    assert (server.attributes["http.request.method"], server.attributes["url.scheme"]) == ("POST", "http")
    assert server.attributes["r3router.outcome"] == "ok"
    assert server.error is None and "error.type" not in server.attributes
    assert collector.below(server) == ["attempt", "queue"]
    (attempt,), (queue,) = collector.named("attempt"), collector.named("queue")
    assert queue.attributes == {"r3router.attempt": 1, "r3router.queue.result": "bound"}
    assert attempt.attributes == {
        "r3router.attempt": 1,
        "r3router.rid": prefill.rid,
        "r3router.room": prefill.room,
        "r3router.result": "ok",
    }
    assert attempt.events == ["delivered"]
    assert {"prefill", "decode"} <= set(collector.below(attempt))
    for name, leg, engine in (("prefill", prefill, fleet.p), ("decode", decode, fleet.d)):
        (span,) = collector.named(name)
        assert parent_of(leg.request) == (TRACE, span.id, "01"), name
        assert (span.kind, span.parent, span.trace, span.error) == ("client", attempt.id, TRACE, None)
        said = span.attributes
        port = int(engine.url.rsplit(":", 1)[1])
        assert (said["url.full"], said["server.address"], said["server.port"]) == (engine.url + path, "127.0.0.1", port)
        assert (said["r3router.role"], said["r3router.worker"], said["r3router.rank"]) == (name, engine.url, leg.rank)
        assert (said["r3router.rid"], said["r3router.room"]) == (leg.rid, leg.room)
        assert (said["http.request.method"], said["http.response.status_code"], said["r3router.result"]) == ("POST", 200, "ok")
        assert said["http.request.body.size"] == len(leg.raw)
        assert said["http.response.body.size"] == len(leg.sent)
        assert "http.request.resend_count" not in said
        assert leg.request.head.get("tracestate") == "a=1"
        assert b"tracestate: b=2,c=3\r\n" in leg.request.head.raw.lower() + b"\r\n"
    inside = [attempt, queue, *collector.named("prefill"), *collector.named("decode")]
    assert all(before <= server.began <= s.began <= s.ended for s in inside)
    assert server.ended <= time.time_ns()
    assert server.resource["service.name"] == "r3router"
    assert len({s.id for s in collector.spans}) == len(collector.spans)
    if protocol == "http":
        assert collector.headers[0]["path"] == "/v1/traces"


@pytest.mark.parametrize("stream", [False, True])
async def test_r3_bytes_stand_at_the_legs_and_at_the_merge(lab: Lab, collector: Collector, stream: bool) -> None:
    _, router, client = await lab.serve(*flags(collector))
    assert (await post(client, "/generate", {**GENERATE, **R3, "stream": stream})).status == 200
    await traced(collector)
    metrics = await router.metrics()
    (attempt,), (merge,) = collector.named("attempt"), collector.named("merge")
    assert (merge.parent, merge.kind, merge.error) == (attempt.id, "internal", None)
    for role in ("prefill", "decode"):
        want = metrics.sum("r3router_r3_text_bytes_total", role=role)
        assert want > 0
        assert merge.attributes[f"r3router.r3.{role}.bytes"] == want
        assert collector.named(role)[0].attributes["r3router.r3.bytes"] == want


async def test_without_a_place_of_the_clients_a_trace_begins_at_the_router(lab: Lab, collector: Collector) -> None:
    fleet, _, client = await lab.serve(*flags(collector))
    bad = [("traceparent", SAMPLED.replace("-01", "-0x")), ("tracestate", "a=1")]
    twice = [("traceparent", SAMPLED), ("traceparent", SAMPLED)]
    for headers in ([], bad, twice, [("tracestate", "a=1")]):
        assert (await post(client, "/generate", GENERATE, headers)).status == 200
    await traced(collector, count=4)
    servers = collector.named("POST /generate")
    assert len({s.trace for s in servers} | {TRACE}) == 5
    assert [(s.parent, s.remote) for s in servers] == [("", False)] * 4
    for server, (prefill, decode) in zip(servers, fleet.pairs(), strict=True):
        for leg in (prefill, decode):
            trace, span, sampled = parent_of(leg.request)
            assert trace == server.trace and int(sampled, 16) & 1
            assert span in {s.id for s in collector.spans if s.kind == "client"}
            assert leg.request.head.get("tracestate") is None, "it belonged to a trace that nobody continues"


async def test_a_trace_that_is_not_sampled_passes_and_nothing_is_recorded(lab: Lab, collector: Collector) -> None:
    fleet, _, client = await lab.serve(*flags(collector))
    headers = [("traceparent", UNSAMPLED), ("tracestate", "a=1")]
    assert (await post(client, "/generate", GENERATE, headers)).status == 200
    # The next one's spans come after those of the first would have.
    assert (await post(client, "/generate", GENERATE, [])).status == 200
    await traced(collector)
    assert TRACE not in {s.trace for s in collector.spans}
    for leg in fleet.pairs()[0]:
        assert (leg.request.header("traceparent"), leg.request.header("tracestate")) == (UNSAMPLED, "a=1")


async def test_without_the_flag_headers_pass_as_they_came(lab: Lab, collector: Collector) -> None:
    fleet, router, client = await lab.serve("--otlp-traces-endpoint", f"localhost:{collector.grpc_port}")
    for value in (SAMPLED, "no trace at all"):
        assert (await post(client, "/generate", GENERATE, [("traceparent", value), ("tracestate", "a=1")])).status == 200
    assert (await post(client, "/generate", GENERATE, [])).status == 200
    for pair, want in zip(fleet.pairs(), (SAMPLED, "no trace at all", None), strict=True):
        assert [leg.request.header("traceparent") for leg in pair] == [want, want]
    assert await router.stop() == 0
    assert (collector.asked, collector.spans) == (0, [])


async def test_each_attempt_has_its_own_spans(lab: Lab, collector: Collector) -> None:
    # Late: a reused connection that breaks at once is only opened anew.
    asked: list[Any] = []

    def first_breaks(leg: Any) -> Any:
        asked.append(leg)
        return rst(after=0.3) if len(asked) == 1 else None

    fleet, _, client = await lab.serve(*flags(collector), decodes=2)
    for engine in fleet.decodes:
        engine.script = first_breaks
    assert (await post(client, "/generate", GENERATE)).status == 200
    server = await traced(collector)
    assert (server.error, server.attributes["r3router.attempts"]) == (None, 2)
    one, two = collector.named("attempt")
    assert [s.attributes["r3router.attempt"] for s in (one, two)] == [1, 2]
    assert [s.attributes["r3router.result"] for s in (one, two)] == ["connection_reset", "ok"]
    assert "connection broke" in (one.error or "") and two.error is None
    assert one.attributes["error.type"] == "connection_reset"
    assert one.attributes["r3router.room"] != two.attributes["r3router.room"]
    assert [s.attributes["r3router.attempt"] for s in collector.named("queue")] == [1, 2]
    lost, good = collector.named("decode")
    assert (lost.parent, good.parent) == (one.id, two.id)
    assert (lost.attributes["r3router.result"], lost.attributes["error.type"]) == ("reset", "reset")
    assert "http.response.status_code" not in lost.attributes
    assert "connection broke" in (lost.error or "") and good.error is None
    assert good.attributes["http.request.resend_count"] == 1
    assert {parent_of(leg.request)[1] for leg in fleet.legs("decode")} == {lost.id, good.id}


async def test_an_engines_refusal_is_an_error_of_its_leg_and_not_of_the_server(lab: Lab, collector: Collector) -> None:
    fleet, _, client = await lab.serve(*flags(collector))
    fleet.p.script = lambda leg: refusal(400, "too long for me")
    assert (await post(client, "/generate", GENERATE)).status == 400
    server = await traced(collector)
    assert (server.error, server.attributes["error.type"]) == (None, "engine_rejected")
    assert server.attributes["http.response.status_code"] == 400
    (leg,) = collector.named("prefill")
    assert (leg.error, leg.attributes["error.type"], leg.attributes["http.response.status_code"]) == ("too long for me", "400", 400)
    assert leg.attributes["r3router.result"] == "rejected"


async def test_a_server_that_fails_says_so(lab: Lab, collector: Collector) -> None:
    fleet, _, client = await lab.serve("--disable-retries", *flags(collector))
    fleet.d.script = lambda leg: refusal(500, "out of luck")
    assert (await post(client, "/generate", GENERATE)).status == 500
    server = await traced(collector)
    assert (server.error, server.attributes["error.type"]) == ("engine_failed", "engine_failed")
    (leg,) = collector.named("decode")
    assert (leg.error, leg.attributes["error.type"]) == ("out of luck", "500")


async def test_a_refusal_that_reaches_no_engine_is_a_span_too(lab: Lab, collector: Collector) -> None:
    _, _, client = await lab.serve(*flags(collector))
    assert (await client.request("POST", "/generate", b"{", HEADERS)).status == 400
    server = await traced(collector)
    assert (server.trace, server.parent, server.error) == (TRACE, CALLER, None)
    assert (server.attributes["error.type"], server.attributes["r3router.outcome"]) == ("invalid_json", "invalid")
    assert collector.below(server) == []


async def test_an_abort_and_a_client_that_leaves_end_their_spans_without_an_error(lab: Lab, collector: Collector) -> None:
    fleet, _, client = await lab.serve(*flags(collector))
    fleet.d.script = lambda leg: never(joins=True)
    call = asyncio.create_task(post(client, "/generate", {**GENERATE, "rid": "sample-1"}))
    await until(lambda: fleet.legs("decode"), "decode has the request")
    assert (await client.post("/abort_request", {"rid": "sample-1"})).status == 200
    assert (await call).json()["meta_info"]["finish_reason"]["type"] == "abort"
    server = await traced(collector)
    assert (server.attributes["r3router.outcome"], server.error) == ("aborted", None)
    (attempt,) = collector.named("attempt")
    assert attempt.error is None
    collector.spans.clear()

    connection = await client.connect()
    await connection.post("/generate", json.dumps(GENERATE).encode(), HEADERS)
    await until(lambda: len(fleet.legs("decode")) == 2, "decode has the request")
    connection.close()
    server = await traced(collector)
    assert (server.attributes["r3router.outcome"], server.error) == ("cancelled_running", None)
    assert "http.response.status_code" not in server.attributes
    (attempt,), (decode,) = collector.named("attempt"), collector.named("decode")
    assert (attempt.attributes["r3router.result"], attempt.error) == ("cancelled", None)
    assert (decode.attributes["r3router.result"], decode.error) == ("cancelled", None)
    collector.spans.clear()


async def test_who_leaves_the_queue_ends_the_wait(lab: Lab, collector: Collector) -> None:
    fleet, _, client = await lab.serve(*flags(collector), decode={"max_running": 1, "run_s": 30.0})
    busy = await client.connect()
    await busy.post("/generate", json.dumps(GENERATE).encode(), [("traceparent", UNSAMPLED)])
    await until(lambda: fleet.legs("decode"), "the only place is taken")
    waits = await client.connect()
    await waits.post("/generate", json.dumps(GENERATE).encode(), HEADERS)
    await asyncio.sleep(0.1)
    waits.close()
    server = await traced(collector)
    assert server.attributes["r3router.outcome"] == "cancelled_queued"
    assert collector.below(server) == ["queue"]
    (queue,) = collector.named("queue")
    assert (queue.attributes["r3router.queue.result"], queue.error) == ("cancelled", None)
    busy.close()


async def test_parts_of_a_batch_are_attempts_of_one_request(lab: Lab, collector: Collector) -> None:
    fleet, _, client = await lab.serve(*flags(collector))
    assert (await post(client, "/generate", {**GENERATE, "input_ids": [[1, 2], [3, 4, 5], [6]]})).status == 200
    server = await traced(collector)
    assert collector.below(server) == ["attempt"] * 3 + ["queue"] * 3
    assert {s.attributes["r3router.rid"] for s in collector.named("attempt")} == {leg.rid for leg in fleet.legs("decode")}


async def test_what_one_engine_serves_is_traced_too(lab: Lab, collector: Collector) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0")]))
    router = await lab.router(fleet, *flags(collector))
    assert (await post(router.client, "/v1/chat/completions", CHAT)).status == 200
    server = await traced(collector, "/v1/chat/completions")
    (attempt,), (leg,) = collector.named("attempt"), collector.named("engine")
    assert (attempt.parent, leg.parent, leg.kind) == (server.id, attempt.id, "client")
    assert "r3router.room" not in attempt.attributes
    assert parent_of(fleet.legs("regular")[0].request) == (TRACE, leg.id, "01")
    collector.spans.clear()

    (engine,) = fleet.engines
    engine.control_answers["/v1/embeddings"] = (200, {"data": []})
    assert (await post(router.client, "/v1/embeddings", {"input": "a"})).status == 200
    server = await traced(collector, "/v1/embeddings")
    (leg,) = collector.named("engine")
    assert (server.trace, server.parent, leg.parent, leg.attributes["r3router.result"]) == (TRACE, CALLER, server.id, "ok")
    (request,) = [r for r in engine.control if r.path == "/v1/embeddings"]
    assert parent_of(request) == (TRACE, leg.id, "01")
    assert leg.attributes["url.full"] == engine.url + "/v1/embeddings"


async def test_every_span_leaves_before_the_router_does(lab: Lab, collector: Collector) -> None:
    _, router, client = await lab.serve(*flags(collector))
    for _ in range(20):
        assert (await post(client, "/generate", GENERATE)).status == 200
    # No pause: the end is what makes the last of them leave.
    assert await router.stop() == 0
    assert len(collector.named("POST /generate")) == 20
    assert len([s for s in collector.spans if s.trace == TRACE]) == 20 * 5


def warnings(router: Router) -> list[str]:
    return [line for line in router.tail().splitlines() if "traces are not delivered" in line]


@pytest.mark.parametrize("how", ["down", "refuses"])
async def test_a_collector_that_takes_nothing_is_one_warning(lab: Lab, collector: Collector, how: str) -> None:
    if how == "down":
        port = free_ports()[0]
        to = f"localhost:{port}"
    else:
        collector.refuses = True
        to = f"localhost:{collector.grpc_port}"
    _, router, client = await lab.serve("--enable-trace", "--otlp-traces-endpoint", to)
    failed = 0.0
    for _ in range(3):
        assert (await post(client, "/generate", GENERATE)).status == 200
        before = failed
        for _ in range(1000):
            failed = (await router.metrics()).sum("r3router_trace_spans_total", result="failed")
            if failed > before:
                break
            await asyncio.sleep(0.01)
        assert failed > before
    assert len(warnings(router)) == 1, warnings(router)
    assert to in warnings(router)[0]
    if how == "down":
        collector = await Collector().start(port=port)
    collector.refuses = False
    assert (await post(client, "/generate", GENERATE)).status == 200
    await traced(collector)
    await until(lambda: "traces are delivered again" in router.tail(), "it says when it works again")
    if how == "down":
        await collector.stop()


async def test_a_slow_collector_holds_up_no_request_and_not_the_end(lab: Lab, collector: Collector) -> None:
    collector.open.clear()
    _, router, client = await lab.serve(*flags(collector))
    answers = [await post(client, "/generate", GENERATE) for _ in range(100)]
    await until(lambda: collector.asked == 1, "a batch is under way")
    answers += [await post(client, "/generate", GENERATE) for _ in range(100)]
    assert {a.status for a in answers} == {200}
    # Its process ends within the time that `stop` gives it, with 0.
    assert await router.stop() == 0
    assert "were not delivered in time" in router.tail()


async def test_a_collector_behind_tls_is_believed_by_its_authority_only(lab: Lab, tmp_path: Any) -> None:
    import grpc
    import trustme

    authority = trustme.CA()
    own = authority.issue_cert("localhost")
    keys = [(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())]
    collector = await Collector().start(grpc.ssl_server_credentials(keys))
    try:
        to = f"https://localhost:{collector.grpc_port}"
        for name, ca in (("good", authority), ("other", trustme.CA())):
            ca.cert_pem.write_to_path(str(tmp_path / name))
            flags = ["--enable-trace", "--otlp-traces-endpoint", to, "--ca-cert-paths", str(tmp_path / name)]
            _, router, client = await lab.serve(*flags)
            assert (await post(client, "/generate", GENERATE)).status == 200
            assert await router.stop() == 0
            assert len(collector.named("POST /generate")) == 1
            assert len(warnings(router)) == (name == "other")
    finally:
        await collector.stop()


async def test_of_the_traces_that_begin_here_a_part_is_recorded_and_engines_hear_of_the_rest(lab: Lab, collector: Collector) -> None:
    fleet, router, client = await lab.serve(*flags(collector), "--trace-ratio", "0.5")
    for _ in range(60):
        assert (await post(client, "/generate", GENERATE, [("tracestate", "a=1")])).status == 200
    # A client's own sampling is its own business.
    assert (await post(client, "/generate", GENERATE)).status == 200
    await fleet.quiet()
    assert await router.stop() == 0
    recorded = {s.trace for s in collector.named("POST /generate")}
    told: dict[str, set[bool]] = {}
    for pair in fleet.pairs():
        for leg in pair:
            trace, _, sampled = parent_of(leg.request)
            told.setdefault(trace, set()).add(bool(int(sampled, 16) & 1))
            assert (leg.request.head.get("tracestate") is not None) == (trace == TRACE)
    # Both legs of a request are told the same, and what is recorded here is what they are told.
    assert len(told) == 61
    assert told == {trace: {trace in recorded} for trace in told}
    assert TRACE in recorded
    assert 10 < len(recorded) < 51, "one in two, but for one run in ten million"


async def test_calls_that_generate_nothing_have_a_span_by_their_route(lab: Lab, collector: Collector) -> None:
    _, router, client = await lab.serve(*flags(collector))
    told = (await post(client, "/generate", {**GENERATE, **R3, "return_outputs_via_store": True})).json()["meta_info"]
    path = "/r3/" + told["output_store_ref"]["handle"]["segments"][0]["uri"].rsplit("/", 1)[1]
    await traced(collector)
    worker = (await client.get("/workers")).json()["workers"][0]["id"]
    calls = {
        ("POST", "/pause_generation"): ("POST /pause_generation", 200),
        ("POST", "/continue_generation"): ("POST /continue_generation", 200),
        ("POST", "/flush_cache"): ("POST /flush_cache", 200),
        ("GET", f"/workers/{worker}"): ("GET /workers/{id}", 200),
        ("GET", path): ("GET /r3/{id}", 200),
        ("GET", "/no/such/path"): ("GET", 404),
        ("GET", "/readiness"): (None, 200),
    }
    for (method, target), (_, status) in calls.items():
        assert (await client.request(method, target, b"", HEADERS)).status == status, target
    unsampled = [("traceparent", UNSAMPLED)]
    assert (await client.request("POST", "/flush_cache", b"", unsampled)).status == 200
    assert await router.stop() == 0
    spans = [s for s in collector.spans if s.kind == "server" and s.trace == TRACE and s.name != "POST /generate"]
    assert [(s.name, s.attributes["http.response.status_code"]) for s in spans] == [(n, c) for n, c in calls.values() if n]
    assert {(s.parent, s.remote) for s in spans} == {(CALLER, True)}
    for span in spans:
        assert span.attributes["r3router.outcome"] == ("ok" if span.error is None and span.name != "GET" else "invalid")
        assert path.rsplit("/", 1)[1] not in str(span.attributes), "whoever has the id has the rows"
