"""SSE: streams pass byte for byte, end where the engine ends them, and errors are whole events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from scripted.acts import answer, chunks, cut_short, head_then_rst
from scripted.calls import CHAT, ROUTES, crowd
from scripted.client import encode, events
from scripted.lab import Lab

TRICKY = (
    b'data: {"text":"write data: [DONE] at the end","meta_info":{"finish_reason":null}}\n\n'
    b'data: {"text":"data: [DONE]\\n\\ndata: [DONE]","meta_info":{"finish_reason":null}}\n\n'
    b": a comment line\n\n"
    b'event: named\nid: 7\ndata: {"text":"\xc3\xa9\\ud83d","meta_info":{"finish_reason":null}}\n\n'
    b'data: {"text":"last","meta_info":{"finish_reason":{"type":"stop"},"prompt_tokens":2,"completion_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_sse_1_cut_at_every_byte_the_clients_bytes_are_the_engines(lab: Lab, path: str) -> None:
    fleet, _, client = await lab.serve("--log-level", "warn")
    cuts = {f"call {at}": at for at in range(1, len(TRICKY))}

    def script(leg: Any) -> Any:
        text = leg.body["text"] if path == "/generate" else leg.body["messages"][0]["content"]
        at = cuts[text]
        return chunks([TRICKY[:at], TRICKY[at:]])

    fleet.d.script = script

    async def call(text: str) -> None:
        body = {"text": text} if path == "/generate" else {"model": "m", "messages": [{"role": "user", "content": text}]}
        got = await client.post(path, {**body, "stream": True})
        assert got.status == 200
        assert got.body == TRICKY, f"cut at {cuts[text]}"
        assert (got.header("content-type") or "").startswith("text/event-stream")

    await crowd([lambda text=text: call(text) for text in cuts], 32)
    fleet.check()


@pytest.mark.parametrize(
    "tail",
    [
        b"",  # The engine ends without the marker.
        b"data: [DONE]\n",
        b"data: [DONE]\r\n\r\n",
        b'data: [DONE]\n\ndata: {"after":"the marker"}\n\n',
    ],
)
async def test_sse_1_the_stream_ends_when_the_engine_ends_it(lab: Lab, tail: bytes) -> None:
    body = b'data: {"text":"a","meta_info":{"finish_reason":null}}\n\n' + tail
    fleet, _, client = await lab.serve()
    fleet.d.script = lambda leg: chunks([body[i : i + 1] for i in range(len(body))])
    got = await client.generate(text="x", stream=True)
    # What comes after the marker may be cut off; nothing before it may.
    assert got.body == body or got.body == body.split(b"data: [DONE]\n\n")[0] + b"data: [DONE]\n\n"


async def test_sse_1_tokens_are_not_held_back(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    fleet.d.script = lambda leg: chunks([b'data: {"text":"first","meta_info":{"finish_reason":null}}\n\n'], then="hang")
    connection = await client.connect()
    await connection.post("/generate", encode({"text": "x", "stream": True}))
    status, _ = await connection.head()
    assert status == 200
    data = await asyncio.wait_for(connection.reader.read(1000), 10.0) if not connection._buffer else connection._buffer
    assert b"first" in data
    connection.close()
    await fleet.quiet()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("status", "length_header"), [(400, True), (422, True), (429, True), (500, True)])
async def test_sse_2_refused_before_the_first_event_is_a_plain_json_answer(lab: Lab, path: str, status: int, length_header: bool) -> None:
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker")
    message = "temperature must be at least 0, got -7.5 \u00e9"
    error = {"object": "error", "message": message, "type": "BadRequestError", "param": "temperature", "code": status}
    fleet.d.script = lambda leg: answer(status, error, headers=[("x-engine-says", "no")])
    connection = await client.connect()
    for _ in range(2):  # The connection stays usable.
        got = await connection.call(path, encode({**ROUTES[path], "stream": True}))
        assert got.status == status
        assert (got.header("content-type") or "").startswith("application/json")
        assert got.framing == "length"
        assert len(got.head.all("content-length")) == 1
        assert message in json.dumps(got.json(), ensure_ascii=False)
    connection.close()
    await fleet.quiet()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("half", [False, True])
async def test_sse_2_broken_in_mid_stream_is_one_valid_error_event_and_the_end(lab: Lab, path: str, half: bool) -> None:
    fleet, _, client = await lab.serve("--disable-circuit-breaker")
    good = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    parts = [good, good, b'data: {"cho'] if half else [good, good]
    fleet.d.script = lambda leg: chunks(parts, then="rst")
    connection = await client.connect()
    got = await connection.call(path, encode({**ROUTES[path], "stream": True}))
    assert got.status == 200
    assert got.framing == "chunked"
    assert got.header("content-length") is None
    assert got.body.startswith(good + good)
    if half:
        assert b'"cho' not in got.body[len(good + good) :].split(b'"error"')[0], "half an event was passed on before the error"
    seen = events(got.body)
    payloads = [json.loads(part) for part in seen if part != "[DONE]"]
    errors = [p for p in payloads if "error" in p]
    assert len(errors) == 1
    assert errors[0]["error"]["message"]
    assert errors[0]["error"]["code"]
    assert payloads.index(errors[0]) == len(payloads) - 1
    # One attempt: after the first byte nothing may be tried again.
    assert len(fleet.d.legs) == 1
    connection.close()


async def test_sse_2_an_engines_error_event_passes_as_it_is(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    body = (
        b'data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Decode transfer failed for request rank=0",'
        b'"status_code":500}}}\n\ndata: [DONE]\n\n'
    )
    fleet.d.script = lambda leg: chunks([body])
    got = await client.generate(text="x", stream=True)
    assert got.status in (200, 500)
    assert b"Decode transfer failed for request rank=0" in got.body
    if got.status == 200:
        assert events(got.body)[-1] == "[DONE]" or b'"error"' in got.body


async def test_sse_2_a_plain_reply_that_breaks_is_an_error_not_half_a_body(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker")
    for act in (cut_short(b'{"text":"hal', 100), head_then_rst()):
        fleet.d.script = lambda leg, act=act: act
        got = await client.generate(text="x")
        assert got.status == 502
        assert got.error()["code"] == "connection_reset"
        await fleet.quiet()


async def test_sse_2_stale_headers_of_the_engine_do_not_reach_the_client(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    reply = {
        "text": "x",
        "output_ids": [1],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 5,
            "completion_tokens": 1,
            "input_token_logprobs": [],
            "output_token_logprobs": [],
        },
    }
    fleet.d.script = lambda leg: answer(
        200, reply, joins=True, headers=[("x-kept", "yes"), ("keep-alive", "timeout=5"), ("connection", "keep-alive")]
    )
    got = await client.generate(input_ids=[1, 2, 3, 4, 5], return_logprob=True, logprob_start_len=0)
    assert got.status == 200
    assert got.header("x-kept") == "yes", "end-to-end headers are kept"
    assert got.header("keep-alive") is None, "hop-by-hop headers are not"
    assert len(got.json()["meta_info"]["input_token_logprobs"]) == 5
    assert int(got.header("content-length") or -1) == len(got.body)
    chat = await client.post("/v1/chat/completions", CHAT)
    assert chat.status == 200
