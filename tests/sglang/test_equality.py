"""Through r3router a pair answers what one unified engine answers: tokens, logprobs and R3, on every route and in every form."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .compare import same_generate, same_logprobs, same_rows
from .fleet import Process, Trio, events, post

GREEDY = {"temperature": 0, "ignore_eos": True}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 6]}


def prompt(length: int, seed: int = 1) -> list[int]:
    """Random ids of the models' byte vocabulary."""
    draw = random.Random(seed * 10_000 + length)
    return [draw.randrange(256) for _ in range(length)]


def generate(length: int, new: int, **more: Any) -> dict[str, Any]:
    """A greedy R3 request."""
    return {"input_ids": prompt(length), "sampling_params": {"max_new_tokens": new, **GREEDY}, "return_routed_experts": True, **more}


@pytest.mark.parametrize(("length", "new"), [(5, 4), (40, 16), (300, 32), (1500, 8), (7, 1), (1, 2)])
def test_generate_is_the_unified_engines(trio: Trio, router: Process, length: int, new: int) -> None:
    body = generate(length, new, **LOGPROBS)
    same_generate(post(f"{router.url}/generate", body), post(f"{trio.unified.url}/generate", body), logprobs=True)


@pytest.mark.parametrize("start", [0, 20, 40])
def test_start_len_cuts_the_same_rows(trio: Trio, router: Process, start: int) -> None:
    body = generate(40, 6, routed_experts_start_len=start)
    got = post(f"{router.url}/generate", body)
    same_generate(got, post(f"{trio.unified.url}/generate", body))


def test_generate_stream_events_are_the_unified_engines(trio: Trio, router: Process) -> None:
    body = generate(30, 6, stream=True, **LOGPROBS)
    got, expected = events(f"{router.url}/generate", body), events(f"{trio.unified.url}/generate", body)
    same_generate(got[-1], expected[-1], logprobs=True)
    by_length = {len(event["output_ids"]): event for event in expected}
    for event in got:
        twin = by_length.get(len(event["output_ids"]))
        if twin is not None:
            same_generate(event, twin, r3=event is got[-1], logprobs=True)


def test_batch_is_a_list_in_order(trio: Trio, router: Process) -> None:
    body = generate(3, 5) | {"input_ids": [prompt(9, 2), prompt(21, 3), prompt(4, 4)]} | LOGPROBS
    got = post(f"{router.url}/generate", body)
    assert isinstance(got, list) and len(got) == 3
    for at, element in enumerate(got):
        single = body | {"input_ids": body["input_ids"][at]}
        same_generate(element, post(f"{trio.unified.url}/generate", single), logprobs=True)


def test_two_samples_each_carry_their_own_rows(trio: Trio, router: Process) -> None:
    body = generate(12, 5)
    body["sampling_params"]["n"] = 2
    got = post(f"{router.url}/generate", body)
    single = generate(12, 5)
    expected = post(f"{trio.unified.url}/generate", single)
    assert isinstance(got, list) and len(got) == 2
    for element in got:
        same_generate(element, expected)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "route me"}], "max_tokens": 5, "return_routed_experts": True, **GREEDY}


def test_chat_carries_rows_in_sglext(trio: Trio, router: Process) -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    got, expected = post(f"{router.url}/v1/chat/completions", body), post(f"{trio.unified.url}/v1/chat/completions", body)
    assert got["choices"][0]["message"] == expected["choices"][0]["message"]
    same_logprobs(got["choices"][0]["logprobs"]["content"], expected["choices"][0]["logprobs"]["content"])
    assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    same_rows(got["sglext"]["routed_experts"], expected["sglext"]["routed_experts"])


def test_chat_with_meta_info_carries_rows_in_the_choice(trio: Trio, router: Process) -> None:
    body = CHAT | {"return_meta_info": True}
    got, expected = post(f"{router.url}/v1/chat/completions", body), post(f"{trio.unified.url}/v1/chat/completions", body)
    same_rows(got["choices"][0]["meta_info"]["routed_experts"], expected["choices"][0]["meta_info"]["routed_experts"])
    assert not (got.get("sglext") or {}).get("routed_experts")


def test_chat_samples_are_joined_as_choices(trio: Trio, router: Process) -> None:
    body = CHAT | {"n": 2, "return_meta_info": True}
    got, expected = (
        post(f"{router.url}/v1/chat/completions", body),
        post(f"{trio.unified.url}/v1/chat/completions", CHAT | {"return_meta_info": True}),
    )
    assert [choice["index"] for choice in got["choices"]] == [0, 1]
    for choice in got["choices"]:
        assert choice["message"] == expected["choices"][0]["message"]
        same_rows(choice["meta_info"]["routed_experts"], expected["choices"][0]["meta_info"]["routed_experts"])


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_openai_streams_end_with_the_rows(trio: Trio, router: Process, route: str) -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    if route == "/v1/completions":
        body = {key: value for key, value in body.items() if key != "messages"} | {"prompt": "route me"}
    got, expected = events(router.url + route, body), events(trio.unified.url + route, body)

    def payload(stream: list[Any]) -> str:
        found = [event["sglext"]["routed_experts"] for event in stream if (event.get("sglext") or {}).get("routed_experts")]
        assert len(found) == 1
        return str(found[0])

    same_rows(payload(got), payload(expected))
    assert got[-1]["usage"]["completion_tokens"] == expected[-1]["usage"]["completion_tokens"]


def test_completions_echo_has_the_prompts_logprobs(trio: Trio, router: Process) -> None:
    body = {"model": "tiny", "prompt": "hello there", "max_tokens": 4, "echo": True, "logprobs": 2, "return_routed_experts": True, **GREEDY}
    got, expected = post(f"{router.url}/v1/completions", body), post(f"{trio.unified.url}/v1/completions", body)
    assert got["choices"][0]["text"] == expected["choices"][0]["text"]
    left, right = got["choices"][0]["logprobs"], expected["choices"][0]["logprobs"]
    assert left["tokens"] == right["tokens"]
    same_logprobs(left["token_logprobs"], right["token_logprobs"])
    same_rows(got["sglext"]["routed_experts"], expected["sglext"]["routed_experts"])
