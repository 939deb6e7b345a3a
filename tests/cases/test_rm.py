"""RM: bootstrap rooms. One room, one attempt, one sample; set by the router alone."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from scripted.acts import Act, answer, first, refusal, rst
from scripted.calls import CHAT, COMPLETION, GENERATE, ROUTES, statuses, until, without_owned
from scripted.client import events
from scripted.lab import Lab
from scripted.leg import Leg, merged_text

ROOM_ON_THE_WIRE = re.compile(rb'"bootstrap_room":\s*(\d{1,19})[,}]')
HOSTILE_ROOMS: list[Any] = [9007199254740993, 9223372036854775807, 18446744073709551616, -1, 0, 1.5, "7", [1, 2], None, {"a": 1}, True]


@pytest.mark.parametrize("path", ROUTES)
async def test_rm_1_rooms_of_clients_are_never_used(lab: Lab, path: str) -> None:
    fleet, _, client = await lab.serve(prefills=2, prefill={"dp_size": 4}, decode={"dp_size": 2})
    fields = [{"bootstrap_host": "192.0.2.7", "bootstrap_port": 1, "bootstrap_room": room} for room in HOSTILE_ROOMS]
    fields += [{"bootstrap_host": None, "bootstrap_port": "x", "bootstrap_room": 5}, {"bootstrap_host": [1], "bootstrap_port": [2]}]
    answers = await asyncio.gather(*(client.post(path, {**ROUTES[path], **f}) for f in fields for _ in range(2)))
    assert statuses(answers) == {200: 2 * len(fields)}
    fleet.check()
    pairs = fleet.pairs()
    assert len(pairs) == 2 * len(fields)
    taken = {9007199254740993, 9223372036854775807}
    for prefill, decode in pairs:
        rooms = [ROOM_ON_THE_WIRE.findall(leg.raw) for leg in (prefill, decode)]
        assert len(rooms[0]) == 1, prefill.raw
        assert rooms[0] == rooms[1], "the two legs differ in the room's digits"
        assert int(rooms[0][0]) < 2**63
        assert int(rooms[0][0]) not in taken
        for leg in (prefill, decode):
            assert leg.raw.count(b'"bootstrap_host"') == leg.raw.count(b'"bootstrap_port"') == 1, leg.raw
            assert (leg.body["bootstrap_host"], leg.body["bootstrap_port"]) == prefill.engine.bootstrap_address


@pytest.mark.parametrize(
    ("side", "act"),
    [
        ("decode", refusal(503, "overloaded", after=0.05)),
        ("decode", answer(500, {"detail": "Decode handshake failed"}, after=0.05)),
        ("decode", rst(after=0.4)),
        ("prefill", refusal(503, "overloaded", after=0.05)),
        ("prefill", answer(500, {"detail": "Prefill bootstrap failed"}, after=0.05)),
        ("prefill", rst(after=0.4)),
    ],
    ids=["decode-503", "decode-500", "decode-rst", "prefill-503", "prefill-500", "prefill-rst"],
)
async def test_rm_2_a_retry_is_a_whole_new_attempt(lab: Lab, side: str, act: Act) -> None:
    fleet, router, client = await lab.serve(
        prefills=2 if side == "prefill" else 1,
        decodes=2 if side == "decode" else 1,
        prefill={"waiting_s": 20.0},
        decode={"waiting_s": 20.0},
    )
    script = first(1, act)
    for engine in fleet.engines:
        if engine.role == side:
            engine.script = script
    body = {"input_ids": list(range(300_000)), "sampling_params": {"max_new_tokens": 3}}
    got = await client.post("/generate", body)
    assert got.status == 200
    fleet.check()
    for role in ("prefill", "decode"):
        legs = fleet.legs(role)
        assert len(legs) == 2
        one, two = legs
        assert one.room != two.room
        assert one.rid != two.rid
        assert not one.rid.startswith(two.rid) and not two.rid.startswith(one.rid)
        for leg in legs:
            assert len(leg.raw) == int(leg.request.header("content-length") or -1)
            assert leg.body["input_ids"] == body["input_ids"]
    # The engine whose leg survived was told before, or at the latest just after, the new attempt began.
    other = "decode" if side == "prefill" else "prefill"
    survivor, second = fleet.legs(other)
    await until(lambda: survivor.aborted_at is not None, "the surviving leg is aborted")
    assert survivor.aborted_at is not None
    assert survivor.aborted_at <= second.arrived + 1.0
    if side == "decode":
        assert len({leg.engine.name for leg in fleet.legs("decode")}) == 2, "the retry went to the engine that had just failed"
    meta = got.json()["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (300_000, 3)
    metrics = await router.metrics()
    assert metrics.sum("r3router_requests_total", outcome="ok") == 1
    assert metrics.sum("r3router_attempts_total") == 2
    assert metrics.sum("r3router_retries_total") == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_rm_2_a_request_that_engines_die_of_is_given_to_two_of_them_at_most(lab: Lab, side: str) -> None:
    """Retries would end the whole fleet, one engine after the other."""
    fleet, router, client = await lab.serve(prefills=4, decodes=4, prefill={"waiting_s": 20.0}, decode={"waiting_s": 20.0})
    for engine in fleet.engines:
        if engine.role == side:
            engine.script = lambda leg: rst(after=0.4) if leg.body["input_ids"] == [6, 6, 6] else None
    got = await client.generate(input_ids=[6, 6, 6])
    assert got.status == 502, got.body[:300]
    assert b"2 engines were lost with this request" in got.body
    assert len({leg.engine.name for leg in fleet.legs(side)}) == len(fleet.legs(side)) == 2
    assert statuses([await client.generate(input_ids=[1, at]) for at in range(8)]) == {200: 8}
    assert (await router.metrics()).sum("r3router_attempts_total") == 10


async def test_rm_2_a_refused_connect_goes_elsewhere(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decodes=2)
    fleet.d.server.refuse()
    answers = [await client.generate(**GENERATE) for _ in range(6)]
    assert statuses(answers) == {200: 6}
    fleet.check()
    assert len({leg.room for leg in fleet.legs("prefill")}) == len(fleet.legs("prefill"))


def same_but_owned(leg: Leg, body: dict[str, Any]) -> dict[str, Any]:
    """The leg's body without the fields that splitting changes."""
    return {k: v for k, v in without_owned(leg.body).items() if k not in ("n", "sampling_params")} | {
        "sampling_params": {k: v for k, v in (leg.body.get("sampling_params") or {}).items() if k != "n"}
    }


async def test_rm_3_samples_of_one_generate_call_are_calls_of_their_own(lab: Lab) -> None:
    fleet, router, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 4})
    answer_ = await client.generate(
        text="x" * 40,
        sampling_params={"n": 4, "temperature": 1, "max_new_tokens": 3},
        return_logprob=True,
        logprob_start_len=0,
        return_routed_experts=True,
    )
    assert answer_.status == 200
    replies = answer_.json()
    assert isinstance(replies, list)
    assert len(replies) == 4
    fleet.check()
    assert len(fleet.rooms.meetings) == 4
    rooms = [int(reply["text"].rsplit(" ", 1)[1]) for reply in replies]
    assert len(set(rooms)) == 4
    for reply, room in zip(replies, rooms, strict=True):
        prefill, decode = fleet.pair_of(room)
        assert reply["meta_info"]["routed_experts"] == merged_text(prefill, decode)
        sent = json.loads(prefill.sent)["meta_info"]
        assert reply["meta_info"]["input_token_logprobs"] == sent["input_token_logprobs"]
        assert same_but_owned(prefill, {})["sampling_params"] == {"temperature": 1, "max_new_tokens": 3}
    metrics = await router.metrics()
    assert metrics.sum("r3router_requests_total", outcome="ok") == 1, "one client call is counted once"


async def test_rm_3_each_prompt_of_a_batch_has_options_and_samples_of_its_own(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decode={"dp_size": 4})
    options = [{"n": 2, "temperature": 0, "max_new_tokens": 3}, {"max_new_tokens": 2, "n": 2}]
    got = await client.generate(input_ids=[[1, 2], [3]], sampling_params=options)
    assert got.status == 200, got.body
    assert len(got.json()) == 4
    fleet.check()
    sent = sorted(json.dumps(leg.body["sampling_params"], sort_keys=True) for leg in fleet.legs("decode"))
    one = [json.dumps({**option, "n": 1}, sort_keys=True) for option in options]
    assert sent == sorted(one * 2)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_rm_3_choices_are_joined_in_order_and_usage_is_summed(lab: Lab, path: str) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 4, "tokens": 3})
    # Later samples are faster, so that order cannot come from arrival.
    fleet.d.run_s = 0.05
    answer_ = await client.post(
        path,
        {
            **ROUTES[path],
            "n": 4,
            "temperature": 1,
            "logprobs": True if "chat" in path else 2,
            "return_routed_experts": True,
            "return_meta_info": True,
        },
    )
    assert answer_.status == 200
    reply = answer_.json()
    fleet.check()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    texts = [c["message"]["content"] if "message" in c else c["text"] for c in reply["choices"]]
    rooms = [int(text.rsplit(" ", 1)[1]) for text in texts]
    assert len(set(rooms)) == 4
    for choice, room in zip(reply["choices"], rooms, strict=True):
        assert choice["meta_info"]["routed_experts"] == merged_text(*fleet.pair_of(room))
        assert choice["logprobs"]
    prompt = fleet.p.legs[0].prompt_tokens
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["prompt_tokens"] == prompt
    assert reply["usage"]["total_tokens"] == prompt + 12


@pytest.mark.parametrize("path", ROUTES)
async def test_rm_3_a_stream_of_several_samples_has_the_right_index_and_one_end(lab: Lab, path: str) -> None:
    fleet, _, client = await lab.serve(decode={"dp_size": 4})
    body = {**ROUTES[path], "stream": True}
    body |= (
        {"sampling_params": {"n": 3, "max_new_tokens": 3}} if path == "/generate" else {"n": 3, "stream_options": {"include_usage": True}}
    )
    answer_ = await client.post(path, body)
    assert answer_.status == 200
    assert (answer_.header("content-type") or "").startswith("text/event-stream")
    *parts, end = events(answer_.body)
    fleet.check()
    assert end == "[DONE]"
    assert "[DONE]" not in parts
    payloads = [json.loads(part) for part in parts]
    if path == "/generate":
        finals = {p["index"]: p for p in payloads if p["meta_info"]["finish_reason"]}
        texts = {i: p["text"] for i, p in finals.items()}
    else:
        texts = {0: "", 1: "", 2: ""}
        for payload in payloads:
            for choice in payload["choices"]:
                texts[choice["index"]] += choice.get("text", "") or (choice.get("delta") or {}).get("content") or ""
        assert [p["usage"]["completion_tokens"] for p in payloads if p.get("usage")] == [9]
    assert sorted(texts) == [0, 1, 2]
    assert len(fleet.rooms.meetings) == 3
    assert {leg.room for leg in fleet.d.legs} == set(fleet.rooms.meetings)
    for text in texts.values():
        assert text.startswith("D0@"), text


@pytest.mark.parametrize("stream", [False, True])
async def test_rm_3_more_samples_than_the_fleet_has_rows_take_turns(lab: Lab, stream: bool) -> None:
    fleet, _, client = await lab.serve("--poll-interval-ms", "20", decode={"max_running": 2, "tokens": 3})
    got = await asyncio.wait_for(client.chat(n=7, stream=stream), 30.0)
    assert got.status == 200
    fleet.check()
    assert len(fleet.rooms.meetings) == 7
    if stream:
        assert events(got.body)[-1] == "[DONE]"
        seen = {c["index"] for part in events(got.body)[:-1] for c in json.loads(part)["choices"]}
    else:
        seen = {c["index"] for c in got.json()["choices"]}
    assert seen == set(range(7))


async def test_rm_3_one_failing_sample_fails_the_call_and_aborts_the_others(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--disable-retries", prefill={"waiting_s": 20.0}, decode={"dp_size": 4, "run_s": 5.0})
    seen = 0

    def script(leg: Leg) -> Act | None:
        nonlocal seen
        seen += 1
        return refusal(400, "this sample cannot be", after=0.1) if seen == 3 else None

    fleet.d.script = script
    answer_ = await client.post("/v1/chat/completions", {**CHAT, "n": 4})
    assert answer_.status == 400
    assert b"this sample cannot be" in answer_.body
    await fleet.quiet()
    others = [leg for leg in fleet.d.legs if leg.end != "answered"]
    assert len(others) <= 3
    assert all(leg.end == "aborted" for leg in others), [leg.end for leg in others]
    assert len(fleet.d.legs) + len(fleet.p.legs) <= 8


async def test_rm_3_batches_are_split_and_joined_in_order(lab: Lab) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 4})
    batch = [[10 + i] * (i + 1) for i in range(6)]
    answer_ = await client.generate(input_ids=batch, sampling_params={"max_new_tokens": 2}, rid=[f"client-{i}" for i in range(6)])
    assert answer_.status == 200
    assert [r["meta_info"]["prompt_tokens"] for r in answer_.json()] == [1, 2, 3, 4, 5, 6]
    fleet.check()
    assert sorted(leg.body["input_ids"] for leg in fleet.d.legs) == batch
    # One prompt in a list is a list in the answer too.
    one = await client.generate(input_ids=[[1, 2]], sampling_params=[{"max_new_tokens": 2}])
    assert isinstance(one.json(), list)
    assert len(one.json()) == 1
    completion = await client.post("/v1/completions", {**COMPLETION, "prompt": ["a" * 8, "b" * 16], "n": 2})
    reply = completion.json()
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    rooms = [int(c["text"].rsplit(" ", 1)[1]) for c in reply["choices"]]
    assert [fleet.pair_of(room)[1].body["prompt"] for room in rooms] == ["a" * 8, "a" * 8, "b" * 16, "b" * 16]
    fleet.check()
