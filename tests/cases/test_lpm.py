"""LPM: log-probabilities. What prefill alone knows is in the reply, in the place where one unsplit engine has it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from scripted.client import events
from scripted.lab import Lab


def unsplit(prefill: bytes, decode: bytes) -> dict[str, Any]:
    """What a single engine would have answered: decode's reply with prefill's `input_*` lists."""
    p, d = json.loads(prefill), json.loads(decode)
    merged = copy.deepcopy(d)
    for key, value in p["meta_info"].items():
        if key.startswith("input_"):
            merged["meta_info"][key] = value
    return merged


def room_of(reply: dict[str, Any]) -> int:
    """The room that the fake wrote into the text."""
    return int(reply["text"].rsplit(" ", 1)[1])


def comparable(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without the request id, which the router may translate."""
    reply = copy.deepcopy(reply)
    reply["meta_info"].pop("id")
    return reply


WISHES: list[dict[str, Any]] = [
    {"logprob_start_len": 0, "top_logprobs_num": 1},
    {"logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [5, 6]},
    {"logprob_start_len": -1},
    {"logprob_start_len": -1, "top_logprobs_num": 2},
    {"logprob_start_len": 2},
    {},
]
PROMPTS: dict[str, Any] = {
    "single": [11, 12, 13, 14],
    "batch of 1": [[11, 12, 13, 14]],
    "batch of 2": [[11, 12, 13, 14], [21, 22]],
    "batch of 5": [[i] * 3 for i in range(1, 6)],
}


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("wish", WISHES, ids=str)
async def test_lpm_1_replies_are_what_one_engine_would_give(lab: Lab, prompts: str, wish: dict[str, Any]) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 2}, decode={"dp_size": 2, "tokens": 4})
    ids = PROMPTS[prompts]
    got = await client.generate(input_ids=ids, sampling_params={"max_new_tokens": 4, "temperature": 0}, return_logprob=True, **wish)
    assert got.status == 200
    assert got.header("content-type") == "application/json"
    assert got.header("x-engine") is None or got.header("x-engine") == "D0"
    replies = got.json()
    assert isinstance(replies, list) == isinstance(ids[0], list)
    replies = replies if isinstance(replies, list) else [replies]
    assert len(replies) == (len(ids) if isinstance(ids[0], list) else 1)
    fleet.check()
    for reply in replies:
        prefill, decode = fleet.pair_of(room_of(reply))
        assert comparable(reply) == comparable(unsplit(prefill.sent, decode.sent))
        values = [row[0] for row in reply["meta_info"]["output_token_logprobs"]]
        assert values == [-2500.0, -2501.0, -2502.0, -2503.0], "output values are decode's"
        assert all(row[0] is None or -1999 <= row[0] <= -1000 for row in reply["meta_info"]["input_token_logprobs"])


async def test_lpm_1_key_order_and_spelling_of_the_rest_are_untouched(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    got = await client.generate(input_ids=[1, 2, 3], return_logprob=True, logprob_start_len=0)
    decode = json.loads(fleet.d.legs[0].sent)
    assert list(got.json()) == list(decode)
    assert list(got.json()["meta_info"]) == list(decode["meta_info"])


async def test_lpm_1_a_list_of_per_prompt_options_is_split_with_the_prompts(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decode={"dp_size": 2})
    got = await client.generate(
        input_ids=[[1, 2, 3], [4, 5]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        top_logprobs_num=[1, 0],
    )
    assert got.status == 200
    one, two = got.json()
    assert len(one["meta_info"]["input_token_logprobs"]) == 3
    assert "input_token_logprobs" not in two["meta_info"]
    assert (one["meta_info"]["completion_tokens"], two["meta_info"]["completion_tokens"]) == (1, 2)
    fleet.check()


async def test_lpm_1_streams_carry_prefills_lists_too(lab: Lab) -> None:
    fleet, _, client = await lab.serve(decode={"tokens": 3})
    got = await client.generate(
        input_ids=[1, 2, 3, 4], return_logprob=True, logprob_start_len=0, stream=True, sampling_params={"max_new_tokens": 3}
    )
    *parts, end = events(got.body)
    assert end == "[DONE]"
    want = json.loads(fleet.p.legs[0].sent)["meta_info"]["input_token_logprobs"]
    last = json.loads(parts[-1])
    assert last["meta_info"]["input_token_logprobs"] == want
    assert [len(json.loads(p)["meta_info"]["output_token_logprobs"]) for p in parts] == [1, 2, 3]


async def test_lpm_1_without_logprobs_the_bytes_are_decodes(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    got = await client.generate(input_ids=[1, 2, 3])
    want = fleet.d.legs[0].sent
    assert comparable(got.json()) == comparable(json.loads(want))
    assert (got.header("content-type") or "").startswith("application/json")
    assert got.header("x-engine") == "D0"


async def test_lpm_1_a_prefill_reply_that_is_not_the_protocol_is_an_error(lab: Lab) -> None:
    from scripted.acts import answer

    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker")
    for body in (b"[]", b"not json", b'{"text":"x"}', b""):
        fleet.p.script = lambda leg, body=body: answer(200, body, joins=True)
        got = await client.generate(input_ids=[1, 2, 3], return_logprob=True, logprob_start_len=0)
        assert got.status == 502, (body, got.body[:200])
        assert got.error()["code"] == "engine_protocol"
        await fleet.quiet()
