"""R3: routed experts. Prefill's rows, then decode's own rows; anything that cannot be made right is an error with a name."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scripted.acts import Act
from scripted.calls import CHAT, COMPLETION, until
from scripted.client import Response, events
from scripted.lab import Lab
from scripted.leg import Leg, merged_rows, merged_text
from scripted.r3 import R3Model, from_text, to_text
from scripted.replies import Output, reply_bytes
from scripted.server import Exchange

Place = Callable[[Any], str]


@pytest.fixture(autouse=True, params=["in-line", "by reference"])
def transport(request: pytest.FixtureRequest, lab: Lab) -> str:
    """Every case holds in both forms. By reference the client fetches the rows and puts them where they would have been."""
    lab.by_reference = request.param == "by reference"
    return str(request.param)


PLACES: dict[str, tuple[str, dict[str, Any], Place]] = {
    "generate": ("/generate", {}, lambda r: r["meta_info"]["routed_experts"]),
    "chat sglext": ("/v1/chat/completions", CHAT, lambda r: r["sglext"]["routed_experts"]),
    "chat choice": ("/v1/chat/completions", {**CHAT, "return_meta_info": True}, lambda r: r["choices"][0]["meta_info"]["routed_experts"]),
    "completions sglext": ("/v1/completions", COMPLETION, lambda r: r["sglext"]["routed_experts"]),
    "completions choice": (
        "/v1/completions",
        {**COMPLETION, "return_meta_info": True},
        lambda r: r["choices"][0]["meta_info"]["routed_experts"],
    ),
}


def rooms_in(response: Response) -> list[int]:
    """Rooms that the fakes wrote into the texts of a reply, in order."""
    return [int(part.split(b'"', 1)[0]) for part in response.body.split(b" room ")[1:]]


def asked(tokens: int) -> dict[str, Any]:
    """Wishes for R3 with so many output tokens, on any route."""
    return {"return_routed_experts": True, "max_tokens": tokens, "sampling_params": {"max_new_tokens": tokens}}


def claims_r3(info: dict[str, Any]) -> dict[str, Any]:
    """Server information of an engine that was started with the option."""
    return {**info, "enable_return_routed_experts": True}


async def test_r3_1_the_example_of_the_case(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    got = await client.generate(input_ids=[1, 2, 3, 4, 5], **asked(3))
    text = got.json()["meta_info"]["routed_experts"]
    rows = from_text(text)
    assert rows.nbytes == 112
    prefill, decode = fleet.pairs()[0]
    assert prefill.r3_sent is not None and decode.r3_output is not None
    assert np.array_equal(rows[:5], prefill.r3_sent)
    assert np.array_equal(rows[5:], decode.r3_output)
    assert (rows >= 0).all(), "decode's junk reached the client"
    assert text == to_text(rows), "base64 as the engine writes it"


@pytest.mark.parametrize("tokens", [1, 2, 3, 300])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("junk", [-1, 3], ids=["marked junk", "junk that looks right"])
async def test_r3_1_in_every_place_the_rows_are_those_of_one_engine(lab: Lab, place: str, tokens: int, junk: int) -> None:
    path, body, at = PLACES[place]
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 2, "tokens": 1000, "r3": R3Model(junk=junk)})
    prompts: list[dict[str, Any]] = [{"input_ids": list(range(n))} for n in (1, 2, 3, 4, 50)] if path == "/generate" else [{}]
    for prompt in prompts:
        got = await client.post(path, {**body, **prompt, **asked(tokens)})
        assert got.status == 200, got.body[:300]
        prefill, decode = fleet.pair_of(rooms_in(got)[0])
        assert at(got.json()) == merged_text(prefill, decode)
        rows = from_text(at(got.json()))
        assert len(rows) == prefill.prompt_tokens + tokens - 1
        assert got.header("content-type") == "application/json"
    fleet.check()


@pytest.mark.parametrize(
    "model",
    [
        R3Model(layers=1, topk=1),
        R3Model(layers=1, topk=3),
        R3Model(layers=3, topk=8, experts=128),
        R3Model(layers=5, topk=7, experts=384),
        R3Model(layers=2, topk=2, experts=70_000),
        R3Model(layers=2, topk=2, experts=2**31 - 1),
        R3Model(layers=4, topk=8, experts=257),
    ],
    ids=lambda m: f"{m.layers}x{m.topk}x{m.experts}",
)
@pytest.mark.parametrize("ignores", [False, True])
async def test_r3_1_for_every_row_size_and_id_range(lab: Lab, model: R3Model, ignores: bool) -> None:
    fleet, _, client = await lab.serve(
        prefill={"r3": model}, decode={"tokens": 50, "r3": dataclasses.replace(model, ignores_start_len=ignores)}
    )
    # Row counts for each remainder of the raw length by 3, so that the seam falls on every position inside a quantum.
    for prompt in (1, 2, 3, 4, 5, 64, 1001):
        for tokens in (1, 2, 3, 4, 33):
            got = await client.generate(input_ids=list(range(prompt)), **asked(tokens))
            assert got.status == 200, got.body[:300]
            assert got.json()["meta_info"]["routed_experts"] == merged_text(*fleet.pair_of(rooms_in(got)[0])), (prompt, tokens)


@pytest.mark.parametrize("late", ["prefill", "decode"])
@pytest.mark.parametrize("ignores", [False, True])
async def test_r3_1_rows_wait_as_text_only_while_decodes_reply_is_at_hand(lab: Lab, transport: str, late: str, ignores: bool) -> None:
    model = R3Model(layers=4, topk=8)

    async def slow(leg: Leg, exchange: Exchange) -> None:
        await leg.deliver()
        await until(lambda: bool(fleet.d.legs[-1].sent), "decode has replied")
        await asyncio.sleep(0.05)
        await exchange.reply(200, reply_bytes(leg, leg.engine.output(leg)))

    fleet, router, client = await lab.serve(
        prefill={"r3": model, "script": (lambda _: Act(slow, joins=True)) if late == "prefill" else None},
        decode={"tokens": 50, "r3": dataclasses.replace(model, ignores_start_len=ignores), "run_s": 0.3 if late == "decode" else 0.0},
    )
    # Row counts for each remainder of the raw length by 3; about 2 MB of text each.
    for prompt in (12_000, 12_001, 12_002):
        got = await client.generate(input_ids=list(range(prompt)), **asked(33))
        assert got.status == 200, got.body[:300]
        assert got.json()["meta_info"]["routed_experts"] == merged_text(*fleet.pair_of(rooms_in(got)[0])), prompt
    peak = (await router.metrics()).sum("r3router_r3_arena_bytes", what="peak")
    text = 12_000 * 4 * 8 * 4 / 3 * 4
    assert (peak >= text) == (late == "prefill" and transport == "in-line"), (peak, text)
    await router.zero_check()


@pytest.mark.parametrize("start", [0, 1, 4, 5])
@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("rewrite", [True, False])
async def test_r3_1_a_clients_start_len_is_kept(lab: Lab, start: int, ignores: bool, rewrite: bool) -> None:
    flags = [] if rewrite else ["--no-start-len-rewrite"]
    fleet, _, client = await lab.serve(*flags, decode={"r3": R3Model(ignores_start_len=ignores)})
    # With no rows from prefill only an earlier reply of the model can tell how wide a row is.
    assert (await client.generate(input_ids=[1, 2, 3, 4, 5], **asked(3))).status == 200
    for tokens in (1, 3):
        got = await client.generate(input_ids=[1, 2, 3, 4, 5], routed_experts_start_len=start, **asked(tokens))
        assert got.status == 200, got.body[:300]
        prefill, decode = fleet.pair_of(rooms_in(got)[0])
        assert got.json()["meta_info"]["routed_experts"] == merged_text(prefill, decode)
        assert len(merged_rows(prefill, decode)) == 5 + tokens - 1 - start
        assert prefill.body["routed_experts_start_len"] == start


async def test_r3_1_a_prompt_that_the_engine_counts_longer_than_its_ids(lab: Lab) -> None:
    fleet, _, client = await lab.serve(prefill={"expands": 37}, decode={"expands": 37})
    got = await client.generate(input_ids=[1, 2, 3], image_data="abc", **asked(4))
    assert got.status == 200, got.body[:300]
    prefill, decode = fleet.pairs()[0]
    assert got.json()["meta_info"]["routed_experts"] == merged_text(prefill, decode)
    assert len(merged_rows(prefill, decode)) == 40 + 3 - 1


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [[1, 2], [3, 4, 5], [6]]},
        {"input_ids": [[1, 2]]},
        {"text": ["a" * 9, "b" * 30]},
        {"text": "abc" * 9, "n": 3},
        {"input_ids": [[1, 2], [3, 4, 5]], "n": 2},
    ],
    ids=str,
)
async def test_r3_1_list_replies_are_merged_element_by_element(lab: Lab, body: dict[str, Any]) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 4})
    body = dict(body)
    n = body.pop("n", None)
    wishes = asked(3)
    if n:
        wishes["sampling_params"]["n"] = n
    got = await client.post("/generate", {**body, **wishes})
    assert got.status == 200, got.body[:300]
    replies = got.json()
    rooms = rooms_in(got)
    assert len(replies) == len(rooms) == len(set(rooms))
    for reply, room in zip(replies, rooms, strict=True):
        assert reply["meta_info"]["routed_experts"] == merged_text(*fleet.pair_of(room))
    fleet.check()


async def test_r3_1_indexer_rows_are_merged_the_same_way(lab: Lab) -> None:
    model = R3Model(layers=2, topk=3, experts=5000)
    fleet, _, client = await lab.serve(prefill={"indexer": model}, decode={"indexer": model, "tokens": 5})
    got = await client.generate(input_ids=[1, 2, 3, 4, 5], return_indexer_topk=True, **asked(4))
    assert got.status == 200, got.body[:300]
    prefill, decode = fleet.pairs()[0]
    rows = from_text(got.json()["meta_info"]["indexer_topk"], 2, 3)
    want_p = from_text(json.loads(prefill.sent)["meta_info"]["indexer_topk"], 2, 3)
    want_d = from_text(json.loads(decode.sent)["meta_info"]["indexer_topk"], 2, 3)
    assert np.array_equal(rows, np.concatenate([want_p, want_d[5:]]))
    assert got.json()["meta_info"]["routed_experts"] == merged_text(prefill, decode)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "prefill sends none": ("prefill", {"missing": True}),
    "decode sends none": ("decode", {"missing": True}),
    "decode is short": ("decode", {"short_by": 1, "ignores_start_len": True}),
    "prefill is short": ("prefill", {"short_by": 1}),
    "decode has bytes over": ("decode", {"extra_bytes": 3}),
    "prefill has bytes over": ("prefill", {"extra_bytes": 5}),
    "decode has other layers": ("decode", {"layers": 3}),
    "prefill has other layers": ("prefill", {"layers": 3}),
    "decode is no base64": ("decode", {"bad_text": True}),
    "prefill is no base64": ("prefill", {"bad_text": True}),
}


@pytest.mark.parametrize("place", ["generate", "chat sglext", "chat choice"])
@pytest.mark.parametrize("what", BAD)
async def test_r3_1_a_part_that_is_missing_or_does_not_fit_is_an_error_with_a_name(lab: Lab, place: str, what: str) -> None:
    side, change = BAD[what]
    path, body, _ = PLACES[place]
    # The engine claims that it can: one that says it cannot is not asked at all.
    shape = {side: {"r3": R3Model(**change), "edit_info": claims_r3}}
    fleet, router, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", **shape)
    prompt: dict[str, Any] = {"input_ids": [1, 2, 3, 4, 5, 6, 7]} if path == "/generate" else {}
    got = await client.post(path, {**body, **prompt, **asked(3)})
    assert got.status == 502, got.body[:300]
    error = got.error()
    assert error["code"] == "r3_mismatch"
    # Which of two widths is the right one cannot always be told.
    if "layers" not in change and what != "prefill is short":
        assert side in json.dumps(error), f"the error does not say which side: {error}"
    metrics = await router.metrics()
    assert metrics.sum("r3router_requests_total", outcome="r3_mismatch") == 1
    await fleet.quiet()


async def test_r3_1_a_retraction_on_decode_means_rows_that_cannot_be_trusted(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", decode={"retractions": 1})
    got = await client.generate(input_ids=[1, 2, 3, 4, 5], **asked(3))
    assert got.status == 502
    assert got.error()["code"] == "r3_mismatch"
    plain = await client.generate(input_ids=[1, 2, 3, 4, 5], sampling_params={"max_new_tokens": 3})
    assert plain.status == 200, "without R3 a retraction is no fault"
    await fleet.quiet()


@pytest.mark.parametrize("prefill_rows", ["rows", "none", "error"])
@pytest.mark.parametrize("decode_rows", ["absent", "null", "partial of 2"])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_r3_2_an_aborted_request_is_answered_as_an_abort(lab: Lab, prefill_rows: str, decode_rows: str, logprobs: bool) -> None:
    fleet, _, client = await lab.serve(
        "--disable-retries",
        "--disable-circuit-breaker",
        prefill={"r3": R3Model(missing=prefill_rows == "none"), "edit_info": claims_r3},
    )
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    tokens = 2 if decode_rows == "partial of 2" else 0

    async def decode_aborts(leg: Leg, exchange: Any) -> None:
        await leg.deliver()
        output = Output(tokens, finish, "partial" if tokens else "")
        if tokens:
            output.routed_experts = fleet.d.r3.text(fleet.d.r3_rows(leg, tokens, fleet.d.r3))
        else:
            leg.r3_output = None
        body = json.loads(reply_bytes(leg, output))
        if decode_rows == "null":
            body["meta_info"]["routed_experts"] = None
        await exchange.reply(200, json.dumps(body).encode())

    fleet.d.script = lambda leg: Act(decode_aborts, joins=True)
    if prefill_rows == "error":
        # Prefill was aborted as well and says so in its own way, after decode's answer.
        async def prefill_errs(leg: Leg, exchange: Any) -> None:
            await leg.deliver()
            await until(lambda: all(d.ended for d in fleet.d.legs), "decode has answered")
            await exchange.reply(500, b'{"detail":"Prefill transfer failed: Aborted by AbortReq."}')

        fleet.p.script = lambda leg: Act(prefill_errs, joins=True)
    wishes = {"return_logprob": True, "logprob_start_len": 0} if logprobs else {}
    got = await client.generate(input_ids=[1, 2, 3, 4, 5], **asked(8), **wishes)
    assert got.status == 200, got.body[:400]
    meta = got.json()["meta_info"]
    assert meta["finish_reason"] == finish
    assert meta["completion_tokens"] == tokens
    text = meta.get("routed_experts")
    if text is not None:
        rows = from_text(text)
        assert len(rows) == 5 + tokens - 1
        prefill, decode = fleet.pairs()[0]
        assert prefill.r3_sent is not None
        truth = prefill.r3_sent if decode.r3_output is None else np.concatenate([prefill.r3_sent, decode.r3_output])
        assert np.array_equal(rows, truth[: len(rows)])
    if prefill_rows == "rows" and tokens:
        assert text is not None, "all rows were there"
    await fleet.quiet()


async def test_r3_2_abort_all_on_the_engines_ends_running_calls_as_aborts(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--disable-retries", decode={"dp_size": 2, "run_s": 30.0})
    import asyncio

    calls = [asyncio.create_task(client.generate(input_ids=[1, 2, i], **asked(3))) for i in range(8)]
    await until(lambda: sum(rank.running for rank in fleet.d.ranks) == 8, "all run")
    from scripted.client import Client

    for engine in fleet.engines:
        probe = Client(engine.server.port)
        await probe.post("/abort_request", {"abort_all": True})
        probe.close()
    for got in await asyncio.gather(*calls):
        assert got.status == 200, got.body[:300]
        meta = got.json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert "routed_experts" not in meta or meta["routed_experts"] is None or len(from_text(meta["routed_experts"])) == 2
    await fleet.quiet()


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"input_ids": [1, 2, 3, 4, 5]}),
    "generate text": ("/generate", {"text": "x" * 33}),
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", COMPLETION),
}


def r3_of_events(body: bytes) -> list[str]:
    """Every R3 text in a stream, in order."""
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("routed_experts"), str):
                found.append(node["routed_experts"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    *parts, end = events(body)
    assert end == "[DONE]"
    for part in parts:
        walk(json.loads(part))
    return found


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("tokens", [1, 3])
async def test_r3_3_a_stream_has_the_whole_rows_in_its_last_data_event(lab: Lab, stream: str, tokens: int) -> None:
    path, body = STREAMS[stream]
    fleet, _, client = await lab.serve(prefill={"prefill_s": 0.05}, decode={"tokens": 10})
    got = await client.post(path, {**body, "stream": True, **asked(tokens)})
    assert got.status == 200, got.body[:300]
    prefill, decode = fleet.pairs()[0]
    assert r3_of_events(got.body) == [merged_text(prefill, decode)]
    fleet.check()


async def test_r3_3_a_stream_that_comes_byte_by_byte_is_merged_all_the_same(lab: Lab) -> None:
    from scripted.acts import chunks
    from scripted.replies import stream_events

    fleet, _, client = await lab.serve()
    size = 1

    async def run(leg: Leg, exchange: Any) -> None:
        data = b"".join(stream_events(leg, fleet.d.output(leg)))
        await chunks([data[i : i + size] for i in range(0, len(data), size)]).run(leg, exchange)

    fleet.d.script = lambda leg: Act(run, joins=True)
    for size in (1, 2, 3, 7, 100, 100_000):
        got = await client.generate(input_ids=list(range(9)), stream=True, **asked(3))
        assert got.status == 200
        prefill, decode = fleet.pairs()[-1]
        assert r3_of_events(got.body) == [merged_text(prefill, decode)], f"chunks of {size}"


@pytest.mark.parametrize("meta_info", [True, False])
async def test_r3_3_each_of_several_choices_has_the_rows_that_match_it(lab: Lab, meta_info: bool) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 2})
    got = await client.post("/v1/chat/completions", {**CHAT, "n": 3, "return_meta_info": meta_info, **asked(3)})
    if got.status == 400 and not meta_info:
        assert fleet.posts() == 0, "refused after it was dispatched"
        return
    assert got.status == 200, got.body[:300]
    rooms = rooms_in(got)
    assert len(set(rooms)) == 3
    reply = got.json()
    texts = [merged_text(*fleet.pair_of(room)) for room in rooms]
    if meta_info:
        assert [choice["meta_info"]["routed_experts"] for choice in reply["choices"]] == texts
    else:
        # One unsplit engine has the first choice's rows here; ours must be some choice's whole rows, and say no wrong ones.
        assert reply["sglext"]["routed_experts"] in (texts[0], texts)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", ["generate", "chat"])
async def test_r3_3_an_engine_without_the_option_is_an_explicit_error_in_a_stream_too(lab: Lab, side: str, stream: str) -> None:
    path, body = STREAMS[stream]
    shape = {side: {"r3": R3Model(missing=True), "edit_info": claims_r3}}
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", **shape)
    got = await client.post(path, {**body, "stream": True, **asked(3)})
    if got.status != 200:
        assert got.status in (400, 501, 502)
        assert got.error()["code"] in ("r3_mismatch", "r3_unsupported")
    else:
        said = events(got.body)
        payloads = [json.loads(part) for part in said if part != "[DONE]"]
        assert payloads[-1]["error"]["code"] == "r3_mismatch", payloads[-1]
        # A client that reads to the end marker has seen the error.
        assert "[DONE]" not in said[: len(payloads)], said[-3:]
        assert b'"routed_experts":"' not in got.body, "rows of one side alone reached the client"
    await fleet.quiet()


async def test_r3_3_an_engine_that_says_it_cannot_is_not_asked(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decode={"r3": R3Model(missing=True)})
    got = await client.generate(input_ids=[1, 2], **asked(3))
    assert got.status == 501
    assert got.error()["code"] == "r3_unsupported"
    assert fleet.posts() == 0


async def test_r3_rows_are_not_touched_when_nobody_asked(lab: Lab) -> None:
    _, _, client = await lab.serve()
    got = await client.generate(input_ids=[1, 2], return_routed_experts=False)
    assert got.status == 200
    assert "routed_experts" not in got.json()["meta_info"]
