"""Bad input: a JSON error with the right status that says what to do; the connection goes on, and nothing reaches an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripted.calls import GENERATE, ROUTES
from scripted.client import request_bytes
from scripted.lab import Lab

HUGE = 10**30
WRONG: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"text": 5},
        {"text": ["a", 5]},
        {"text": {"a": 1}},
        {"text": []},
        {"input_ids": "1,2"},
        {"input_ids": [1, "2"]},
        {"input_ids": []},
        {"input_ids": [[1], 2]},
        {"input_ids": [1.5]},
        {"input_ids": [[1], []]},
        {"input_ids": {"0": 1}},
        {"text": "a", "stream": "yes"},
        {"text": "a", "stream": []},
        {"text": "a", "sampling_params": "x"},
        {"text": "a", "sampling_params": [5]},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"text": "a", "sampling_params": {"n": 0}},
        {"text": "a", "sampling_params": {"n": -1}},
        {"text": "a", "sampling_params": {"n": "two"}},
        {"text": "a", "sampling_params": {"n": 1.5}},
        {"text": "a", "sampling_params": {"n": HUGE}},
        {"text": "a", "sampling_params": {"max_new_tokens": "many"}},
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        {"text": "a", "return_routed_experts": "maybe"},
        {"text": "a", "return_logprob": {"a": 1}},
        {"text": "a", "return_routed_experts": True, "routed_experts_start_len": -1},
        {"text": "a", "routed_experts_start_len": "x"},
        {"text": ["a", "b"], "return_logprob": [True]},
        {"text": ["a", "b"], "logprob_start_len": [1, 2, 3]},
    ],
    "/v1/chat/completions": [
        {"messages": [], "n": 0},
        {"messages": [], "n": "x"},
        {"messages": [], "n": HUGE},
        {"messages": [], "stream": 7},
        {"messages": [], "max_tokens": "x"},
        {"messages": [], "max_completion_tokens": -5},
        {"messages": [], "stream_options": 5},
        {"messages": [], "return_routed_experts": [1]},
        {"messages": [], "input_ids": [[1]]},
        {"messages": [], "input_ids": "x"},
    ],
    "/v1/completions": [
        {"prompt": 5},
        {"prompt": [1, "a"]},
        {"prompt": []},
        {"prompt": {"a": 1}},
        {"prompt": "a", "n": -1},
        {"prompt": "a", "max_tokens": []},
        {"prompt": "a", "stream": "x"},
        {"prompt": "a", "echo": "x"},
        {"prompt": ["a", ["b"]]},
    ],
}


@pytest.mark.parametrize("path", WRONG)
async def test_wrong_types_in_fields_that_are_read_are_named(lab: Lab, path: str) -> None:
    fleet, _, client = await lab.serve()
    connection = await client.connect()
    taken = []
    for body in WRONG[path]:
        got = await connection.call(path, json.dumps({"model": "m", **body}).encode())
        if got.status == 200:
            taken.append(body)  # Shown together below: a list says more than the first.
            continue
        assert got.status == 400, (body, got.status, got.body)
        error = got.error()
        assert error["code"] == "invalid_field", (body, error)
        fields = set(body) | set(body.get("sampling_params") or {} if isinstance(body.get("sampling_params"), dict) else {})
        assert any(field in error["message"] for field in fields), (body, error)
    assert taken == []
    assert fleet.posts() == 0
    good = await connection.call(path, json.dumps(ROUTES[path]).encode())
    assert good.status == 200
    connection.close()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("raw", [b"[]", b"5", b'"text"', b"null", b"true", b"[{}]"])
async def test_json_that_is_no_object_is_refused(lab: Lab, path: str, raw: bytes) -> None:
    fleet, _, client = await lab.serve()
    got = await client.request("POST", path, raw)
    assert got.status == 400
    assert "object" in got.error()["message"]
    assert fleet.posts() == 0


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_is_cut_off_by_its_own_length_is_not_dispatched(lab: Lab, path: str) -> None:
    fleet, router, client = await lab.serve()
    raw = json.dumps(ROUTES[path]).encode()
    connection = await client.connect()
    await connection.send(request_bytes("POST", path, raw)[:-5])
    connection.close()
    short = await client.request("POST", path, raw[:-5])
    assert short.status == 400
    assert short.error()["code"] == "invalid_json"
    await router.zero_check()
    assert fleet.posts() == 0


async def test_a_prompt_larger_than_every_rank_is_refused_on_every_route(lab: Lab) -> None:
    fleet, _, client = await lab.serve(prefill={"kv_pool": 1000}, decode={"kv_pool": 1000})
    ids = list(range(2000))
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"input_ids": ids}),
        ("/generate", {"input_ids": ids, "stream": True}),
        ("/generate", {"input_ids": [[1], ids]}),
        ("/v1/completions", {"model": "m", "prompt": ids}),
        ("/v1/chat/completions", {"model": "m", "messages": [], "input_ids": ids}),
    ]
    for path, body in bodies:
        got = await client.post(path, body)
        assert got.status == 400, (path, got.body)
        error = got.error()
        assert error["code"] == "too_large_for_fleet"
        assert error["limit"] <= 1000
        assert error["measured"] >= 2000
        assert error.get("advice"), "it does not say what to do"
    assert fleet.posts() == 0, "a part of a refused batch was dispatched"
    assert (await client.generate(**GENERATE)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v2/generate", 404),
        ("GET", "/generate", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("DELETE", "/generate", 405),
        ("PATCH", "/workers", 405),
        ("GET", "/%00", 404),
        ("GET", "/../etc/passwd", 404),
    ],
)
async def test_unknown_paths_and_methods_are_named(lab: Lab, method: str, path: str, status: int) -> None:
    fleet, _, client = await lab.serve()
    got = await client.request(method, path)
    assert got.status == status
    error = got.error()
    assert path.split("?")[0].strip("/").split("/")[-1] in error["message"]
    if status == 405:
        assert got.header("allow") or error.get("advice")
    assert fleet.posts() == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /generate HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n{}",
        b"GET / HTTP/1.1\r\n" + b"a: " + b"x" * 2_000_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
async def test_bytes_that_are_no_http_cost_one_connection(lab: Lab, raw: bytes) -> None:
    fleet, router, client = await lab.serve()
    connection = await client.connect()
    try:
        await connection.send(raw)
        while await connection.reader.read(65536):
            pass
    except ConnectionError:
        pass
    connection.close()
    assert router.alive()
    assert fleet.posts() == 0
    assert (await client.generate(**GENERATE)).status == 200


async def test_expect_continue_is_answered(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    raw = json.dumps(GENERATE).encode()
    connection = await client.connect()
    await connection.send(request_bytes("POST", "/generate", raw, [("expect", "100-continue")])[: -len(raw)])
    status, _ = await connection.head()
    if status == 100:
        await connection.send(raw)
        status, _ = await connection.head()
    assert status == 200
    connection.close()
    await fleet.quiet()


async def test_a_content_type_is_not_asked_for(lab: Lab) -> None:
    _, _, client = await lab.serve()
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        got = await client.request("POST", "/generate", GENERATE, [("content-type", content_type)])
        assert got.status == 200, content_type
