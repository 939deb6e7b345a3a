"""R3-4 into another store: a client that sends `return_outputs_via_store`, as newer miles does, gets that store's handle and no other."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from scripted import mooncake
from scripted.client import events
from scripted.host import Host
from scripted.lab import Lab
from scripted.leg import merged_rows
from scripted.r3 import R3Model
from scripted.server import Exchange, Request, Server

LAYERS, TOP_K = 4, 2
MODEL = R3Model(LAYERS, TOP_K)
SHAPE = ("--r3-layers", str(LAYERS), "--r3-top-k", str(TOP_K), "--r3-experts", "256")
IDS = [1, 2, 3, 4, 5]
ASKED = {"return_routed_experts": True, "return_outputs_via_store": True, "sampling_params": {"max_new_tokens": 3}}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x" * 20}], "max_tokens": 3, "return_meta_info": True}


class Sink:
    """A sink whose answers a test tells."""

    def __init__(self) -> None:
        self.server = Server(self._serve)
        self.problems: list[str] = []
        self.server.problems = self.problems
        self.given: list[dict[str, Any]] = []
        self.answers: list[tuple[int, Any]] = []
        """What it answers first; then a handle with a number."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def _serve(self, request: Request, exchange: Exchange) -> None:
        assert (request.method, request.path) == ("POST", "/put")
        reference = json.loads(request.body)
        self.given.append(reference)
        if self.answers:
            status, answer = self.answers.pop(0)
            return await exchange.reply(status, json.dumps(answer).encode())
        return await exchange.reply(200, json.dumps(other(len(self.given), reference)).encode())


def other(number: int, reference: dict[str, Any]) -> dict[str, Any]:
    """What the other store says in the place of a reference."""
    shape = reference["fields"]["routed_experts"]["shape"]
    return {"handle": {"type": "other", "n": number}, "fields": {"routed_experts": {"dtype": "int32", "shape": shape}}}


@pytest_asyncio.fixture
async def sink() -> AsyncIterator[Sink]:
    made = Sink()
    await made.server.listen()
    yield made
    await made.server.stop()
    assert not made.problems


async def serve(lab: Lab, sink: Sink, *flags: str) -> Any:
    return await lab.serve(*SHAPE, "--r3-sink", sink.url, *flags, prefill={"r3": MODEL}, decode={"r3": MODEL, "tokens": 50})


async def test_r3_4_the_handle_of_the_sinks_store_stands_where_the_reference_would(lab: Lab, sink: Sink) -> None:
    _, router, client = await serve(lab, sink)
    plain = await client.post("/generate", {"input_ids": IDS, **ASKED}, [("x-r3-transport", "ref")])
    assert not sink.given, "who names our own way gets our own references"
    got = await client.generate(input_ids=IDS, **ASKED)
    assert got.status == 200, got.body[:300]
    meta = got.json()["meta_info"]
    assert meta["output_store_ref"] == other(1, sink.given[0]) and "routed_experts" not in meta
    assert int(got.header("content-length") or 0) == len(got.body)
    ours = plain.json()["meta_info"]["output_store_ref"]
    assert sink.given[0]["fields"] == ours["fields"]
    assert sink.given[0]["handle"]["segments"][0].keys() == ours["handle"]["segments"][0].keys(), "the sink is given the whole reference"

    several = await client.generate(input_ids=[IDS, [6, 7, 8]], **ASKED)
    assert [one["meta_info"]["output_store_ref"]["handle"]["type"] for one in several.json()] == ["other", "other"]
    shapes = [one["meta_info"]["output_store_ref"]["fields"]["routed_experts"]["shape"][0] for one in several.json()]
    assert shapes == [7, 5]
    chat = await client.post("/v1/chat/completions", {**CHAT, **ASKED, "n": 2})
    handles = [choice["meta_info"]["output_store_ref"]["handle"] for choice in chat.json()["choices"]]
    assert len({handle["n"] for handle in handles}) == 2
    count = len(sink.given)
    stream = await client.post("/generate", {"input_ids": IDS, "stream": True, **ASKED})
    last = json.loads(events(stream.body)[-2])
    assert last["meta_info"]["output_store_ref"]["handle"]["type"] == "r3router" and len(sink.given) == count, "streams keep ours"
    inline = await client.generate(input_ids=IDS, **{**ASKED, "return_outputs_via_store": False})
    assert isinstance(inline.json()["meta_info"]["routed_experts"], str) and len(sink.given) == count
    # What the sink has put is not kept here too: only the two that clients hold are.
    assert (await router.metrics()).sum("r3router_r3_objects") == 2


async def test_r3_4_a_sink_that_fails_is_tried_again_and_then_told(lab: Lab, sink: Sink) -> None:
    fleet, router, client = await serve(lab, sink)
    sink.answers = [(503, {}), (500, {"error": {"message": "no room"}})]
    got = await client.generate(input_ids=IDS, **ASKED)
    assert got.status == 200 and len(sink.given) == 3, "a finished sample is worth another try"
    assert sink.given[0] == sink.given[2]
    posts = fleet.posts()
    for status, answer, words in (
        (410, {"error": {"message": "expired"}}, "expired"),
        (200, {"handle": 5, "fields": {}}, "no reference"),
        (200, [], "no reference"),
    ):
        sink.answers = [(status, answer)]
        got = await client.generate(input_ids=IDS, **ASKED)
        error = got.error()
        assert (got.status, error["code"], error["source"]) == (502, "r3_sink_failed", "router"), got.body[:300]
        assert words in error["message"] and "r3router sink" in error["advice"]
    assert fleet.posts() == posts + 6, "the sample is not made again for it"
    await sink.server.stop()
    got = await client.generate(input_ids=IDS, **ASKED)
    assert (got.status, got.error()["code"]) == (502, "r3_sink_failed")
    metrics = await router.metrics()
    assert metrics.sum("r3router_requests_total", outcome="r3_sink_failed") == 4
    assert metrics.sum("r3router_r3_objects") == 0 and metrics.sum("r3router_r3_arena_bytes", what="used") == 0
    await fleet.quiet()


async def test_r3_4_an_address_that_is_none_stops_the_start() -> None:
    for more in ((), ("--check",)):
        command = (sys.executable, "-m", "r3router", "serve", "--port", "0", "--prometheus-port", "0", "--r3-sink", "not an address", *more)
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        _, told = await asyncio.wait_for(process.communicate(), 30.0)
        assert process.returncode == 2, told
        assert "--r3-sink" in told.decode() and "not an address" in told.decode(), told


@pytest.mark.parametrize("with_plugin", [False, True], ids=["engines as they come", "plug-in"])
async def test_r3_4_newer_miles_reads_the_rows_from_a_real_mooncake_store(lab: Lab, tmp_path: Path, *, with_plugin: bool) -> None:
    why = await asyncio.to_thread(mooncake.missing)
    if why:
        pytest.skip(why)
    port = mooncake.free_port()
    hosts = [await Host().start() for _ in range(2)] if with_plugin else []
    models = [R3Model(LAYERS, TOP_K, keep=host.keep) for host in hosts] or [MODEL, MODEL]
    flags = (*SHAPE, "--r3-sink", f"http://127.0.0.1:{port}")
    fleet, router, client = await lab.serve(*flags, prefill={"r3": models[0]}, decode={"r3": models[1], "tokens": 50})
    with mooncake.running(tmp_path, f"http://127.0.0.1:{router.port}", port) as store:
        # The second is text, so that decode's object begins with rows of the prompt.
        for number, body in enumerate(({"input_ids": list(range(3000))}, {"text": "x" * 400}, {"input_ids": [7]})):
            got = await client.post("/generate", {**body, **ASKED})
            assert got.status == 200, (got.body[:500], store.log.read_text()[-1000:])
            reference = got.json()["meta_info"]["output_store_ref"]
            assert set(reference) == {"handle", "fields"} and reference["handle"]["type"] == "mooncake_dataproto_ref"
            rows = merged_rows(*fleet.pairs()[number])
            assert reference["fields"] == {"routed_experts": {"dtype": "int32", "shape": list(rows.shape)}}
            seen = await asyncio.to_thread(store.read, reference["handle"])
            assert seen == mooncake.expected(rows)
            assert "error" in await asyncio.to_thread(store.read, reference["handle"]), "the reader has removed it"
        metrics = await router.metrics()
        assert metrics.sum("r3router_r3_objects") == 0 and metrics.sum("r3router_r3_arena_bytes", what="used") == 0
        for host in hosts:
            assert len(host.deleted) == 3, "the engines' objects are released too"
            await host.stop()
            assert not host.problems
