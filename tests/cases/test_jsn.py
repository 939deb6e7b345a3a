"""JSN: what the router does not own reaches the engines as it was written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripted.calls import CHAT, ROUTES, without_owned
from scripted.lab import Lab

FUTURE: dict[str, Any] = {
    "return_routed_experts": True,
    "return_meta_info": True,
    "input_ids": [1, 2],
    "future_field": {"a": [1, {"b": None}]},
    "cache_salt": "s",
    "priority": 3,
    "null_field": None,
    "big": 123456789012345678901234567890,
    "small": 1e-320,
    "neg_zero": -0.0,
    "nested": {"bootstrap_room": 5, "rid": "inner", "routed_dp_rank": 9, "stream": True, "n": 4},
    "empty": {},
    "list": [],
    "lora_path": ["a", None],
    "return_hidden_states": "last",
    "return_indexer_topk": False,
    "custom_logit_processor": '\\u0000"\\',
    "": "empty key",
    "ключ": "значение",
    "a.b": 1,
    "extra_key": "x",
}


@pytest.mark.parametrize("path", ROUTES)
async def test_jsn_1_both_legs_get_every_field_with_its_value(lab: Lab, path: str) -> None:
    fleet, _, client = await lab.serve("--no-start-len-rewrite", prefill={"dp_size": 2}, decode={"dp_size": 2})
    body = {**ROUTES[path], **FUTURE}
    got = await client.post(path, body)
    assert got.status == 200, got.body[:300]
    fleet.check()
    for leg in (fleet.p.legs[0], fleet.d.legs[0]):
        seen = without_owned(json.loads(leg.raw))
        seen.pop("stream", None)
        assert json.dumps(seen, sort_keys=True) == json.dumps(body, sort_keys=True), f"{leg.engine.name} got another body"


async def test_jsn_1_only_owned_fields_are_added_and_the_text_is_untouched(lab: Lab) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 2})
    # White space, number spellings, order and escapes as no serialiser would write them.
    raw = b'{ "text" :\t"a\\u0062\\/c" ,\n"sampling_params":{"temperature":1.0E+0,"max_new_tokens" : 3},"x":1.50,  "y":[ 1 ,2 ] }'
    got = await client.request("POST", "/generate", raw)
    assert got.status == 200
    for leg in (fleet.p.legs[0], fleet.d.legs[0]):
        for piece in (b'"text" :\t"a\\u0062\\/c"', b'{"temperature":1.0E+0,"max_new_tokens" : 3}', b'"x":1.50', b'"y":[ 1 ,2 ]'):
            assert piece in leg.raw, leg.raw
        assert set(json.loads(leg.raw)) <= {
            "text",
            "sampling_params",
            "x",
            "y",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "rid",
            "routed_dp_rank",
            "disagg_prefill_dp_rank",
            "stream",
        }


async def test_jsn_1_the_two_legs_differ_only_in_what_the_roles_need(lab: Lab) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 2})
    got = await client.generate(input_ids=list(range(7)), return_routed_experts=True, stream=True, sampling_params={"max_new_tokens": 3})
    assert got.status == 200
    prefill, decode = fleet.p.legs[0].body, fleet.d.legs[0].body
    assert prefill.get("stream") in (None, False), "prefill answers once, whatever the client wants"
    assert decode["stream"] is True
    assert prefill.get("routed_experts_start_len") is None
    assert decode.get("routed_experts_start_len") == 7, "decode is not asked for rows that it does not have"


ODD_TEXTS = {
    "lone high surrogate": b"cut \\ud83d here",
    "lone low surrogate": b"\\ude00",
    "surrogates in the wrong order": b"\\ude00\\ud83d",
    "NUL": b"\\u0000",
    "line separator": b"\\u2028",
    "escaped quote and backslash": b'\\"\\\\\\"',
    "raw line separator": "\u2028".encode(),
    "raw emoji": "\U0001f600".encode(),
    "upper-case escape": b"\\uD83D\\uDE00",
    "raw U+FEFF inside": "\ufeff".encode(),
    "DEL": b"\x7f",
}


@pytest.mark.parametrize("what", ODD_TEXTS)
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_jsn_2_odd_escapes_arrive_as_they_were_sent(lab: Lab, what: str, path: str) -> None:
    fleet, _, client = await lab.serve()
    text = b"before " + ODD_TEXTS[what] + b" after"
    raw = b'{"text":"%b"}' % text if path == "/generate" else b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % text
    got = await client.request("POST", path, raw)
    assert got.status == 200, got.body
    for leg in (fleet.p.legs[0], fleet.d.legs[0]):
        assert b'"' + text + b'"' in leg.raw, leg.raw
    fleet.check()


@pytest.mark.parametrize(
    "raw",
    [
        b'{"text":"a\xffb"}',
        b'{"text":"\xc3("}',
        b'{"text":"\xed\xa0\x80"}',
        b'{"text":"a\nb"}',
        b'{"text":"\\x41"}',
        b'{"text":"\\u12g4"}',
        b'{"text":"abc',
        b'{"text":"a",}',
        b"{'text':'a'}",
        b'{"a":01}',
        b'{"text":"a"} trailing',
        b'{"text":"a"}{"text":"b"}',
        b'{"a":NaNx}',
        b"\xff\xfe{\x00}\x00",
        b"",
        b"   ",
        b"nonsense",
        b'{"text" "a"}',
        b'{"a":1 "b":2}',
        b"[1,2",
        b'{"a":tru}',
        b"\x00",
    ],
    ids=repr,
)
async def test_jsn_2_what_is_not_json_is_refused_with_a_position_and_the_connection_goes_on(lab: Lab, raw: bytes) -> None:
    fleet, _, client = await lab.serve()
    connection = await client.connect()
    for path in ROUTES:
        got = await connection.call(path, raw)
        assert got.status == 400, got.body
        error = got.error()
        assert error["code"] == "invalid_json", error
        assert isinstance(error.get("measured"), (int, float)), f"no position: {error}"
        assert 0 <= error["measured"] <= len(raw)
    assert fleet.posts() == 0
    good = await connection.call("/v1/chat/completions", json.dumps(CHAT).encode())
    assert good.status == 200
    connection.close()


async def test_jsn_2_a_byte_order_mark_is_taken_or_refused_but_never_a_fault(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    got = await client.request("POST", "/generate", b"\xef\xbb\xbf" + b'{"text":"a"}')
    assert got.status in (200, 400)
    if got.status == 400:
        assert got.error()["measured"] == 0
        assert fleet.posts() == 0


async def test_jsn_2_depth_cannot_take_the_router_down(lab: Lab) -> None:
    fleet, router, client = await lab.serve()
    for raw in (b'{"text":"a","deep":' + b"[" * 200_000 + b"]" * 200_000 + b"}", b"[" * 500_000, b'{"a":' * 100_000):
        got = await client.request("POST", "/generate", raw)
        assert got.status in (200, 400)
    assert router.alive()
    assert (await client.generate(text="x")).status == 200
    fleet.violations.clear()  # The fake's own JSON parser may refuse such depth.
