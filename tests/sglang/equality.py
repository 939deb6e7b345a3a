"""Through r3router a pair answers what one unified engine answers: tokens, logprobs and R3, on every route and in every form.

`Equality` is the list of checks; each fleet of engines runs all of it (`test_equality.py`, `test_ranks.py`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from .compare import TOP, r3, same_generate, same_logprobs, same_rows
from .environment import OLD
from .fleet import Front, events, post

GREEDY = {"temperature": 0, "ignore_eos": True}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0} | ({"top_logprobs_num": 2, "token_ids_logprob": [5, 6]} if TOP else {})


def prompt(length: int, seed: int = 1) -> list[int]:
    """Random ids of the models' byte vocabulary."""
    draw = random.Random(seed * 10_000 + length)
    return [draw.randrange(256) for _ in range(length)]


def generate(length: int, new: int, **more: Any) -> dict[str, Any]:
    """A greedy R3 request."""
    return {"input_ids": prompt(length), "sampling_params": {"max_new_tokens": new, **GREEDY}, "return_routed_experts": r3(), **more}


def completion(text: str, **more: Any) -> dict[str, Any]:
    """The same as a `/v1/completions` body."""
    return {"model": "tiny", "prompt": text, "max_tokens": 4, "return_routed_experts": r3(), **GREEDY, **more}


def chat(**more: Any) -> dict[str, Any]:
    """The same as a `/v1/chat/completions` body."""
    messages = [{"role": "user", "content": "route me"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 5, "return_routed_experts": r3(), **GREEDY, **more}


def in_sglext(reply: dict[str, Any]) -> str | None:
    """The R3 text of a chat or completions reply or event."""
    return (reply.get("sglext") or {}).get("routed_experts") or None


class Equality:
    """The checks. A subclass gives the fixture `front`."""

    @pytest.mark.parametrize(("length", "new"), [(5, 4), (40, 16), (300, 32), (1500, 8), (7, 1), (1, 2)])
    def test_generate_is_the_unified_engines(self, front: Front, length: int, new: int) -> None:
        same_generate(*front.both("/generate", generate(length, new, **LOGPROBS)), logprobs=True)

    @pytest.mark.parametrize("start", [0, 20, 40])
    def test_start_len_cuts_the_same_rows(self, front: Front, start: int) -> None:
        same_generate(*front.both("/generate", generate(40, 6, routed_experts_start_len=start)))

    @pytest.mark.parametrize("start", [-1, 2])
    def test_logprobs_from_the_middle_are_the_unified_engines(self, front: Front, start: int) -> None:
        body = generate(12, 3, **LOGPROBS | {"logprob_start_len": start})
        same_generate(*front.both("/generate", body), logprobs=True)

    def test_a_text_prompt_gets_the_same_rows(self, front: Front) -> None:
        body = {key: value for key, value in generate(1, 6).items() if key != "input_ids"} | {"text": "route me, twice"}
        same_generate(*front.both("/generate", body))

    def test_generate_stream_events_are_the_unified_engines(self, front: Front) -> None:
        body = generate(30, 6, stream=True, **LOGPROBS)
        got, expected = front.events("/generate", body), events(f"{front.unified.url}/generate", body)
        same_generate(got[-1], expected[-1], logprobs=True)
        by_length = {len(event["output_ids"]): event for event in expected}
        for event in got:
            twin = by_length.get(len(event["output_ids"]))
            if twin is not None:
                same_generate(event, twin, r3=event is got[-1], logprobs=True)

    def test_a_stream_of_one_token_ends_with_prefills_rows(self, front: Front) -> None:
        body = generate(9, 1, stream=True)
        got, expected = front.events("/generate", body), events(f"{front.unified.url}/generate", body)
        same_generate(got[-1], expected[-1])

    @pytest.mark.parametrize("new", [1, 5])
    def test_batch_is_a_list_in_order(self, front: Front, new: int) -> None:
        body = generate(3, new) | {"input_ids": [prompt(9, 2), prompt(21, 3), prompt(4, 4)]} | LOGPROBS
        got = front.post("/generate", body)
        assert isinstance(got, list) and len(got) == 3
        for at, element in enumerate(got):
            single = body | {"input_ids": body["input_ids"][at]}
            same_generate(element, post(f"{front.unified.url}/generate", single), logprobs=True)

    def test_two_samples_each_carry_their_own_rows(self, front: Front) -> None:
        body = generate(12, 5)
        body["sampling_params"]["n"] = 2
        got = front.post("/generate", body)
        expected = post(f"{front.unified.url}/generate", generate(12, 5))
        assert isinstance(got, list) and len(got) == 2
        for element in got:
            same_generate(element, expected)

    def test_chat_carries_rows_in_sglext(self, front: Front) -> None:
        got, expected = front.both("/v1/chat/completions", chat(logprobs=True, top_logprobs=2 if TOP else 0))
        assert got["choices"][0]["message"] == expected["choices"][0]["message"]
        same_logprobs(got["choices"][0]["logprobs"]["content"], expected["choices"][0]["logprobs"]["content"])
        assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        same_rows(in_sglext(got), in_sglext(expected))

    @pytest.mark.skipif(OLD, reason="chat of this release has no return_meta_info")
    @pytest.mark.parametrize("tokens", [1, 5])
    def test_chat_with_meta_info_carries_rows_in_the_choice(self, front: Front, tokens: int) -> None:
        got, expected = front.both("/v1/chat/completions", chat(return_meta_info=True, max_tokens=tokens))
        same_rows(got["choices"][0]["meta_info"].get("routed_experts"), expected["choices"][0]["meta_info"].get("routed_experts"))
        # 0.5.17 says them in both places; references are made for one.
        assert in_sglext(got) in (None, in_sglext(expected))

    def test_chat_samples_are_joined_as_choices(self, front: Front) -> None:
        body = chat() if OLD else chat(return_meta_info=True)
        got, expected = front.post("/v1/chat/completions", body | {"n": 2}), post(f"{front.unified.url}/v1/chat/completions", body)
        assert [choice["index"] for choice in got["choices"]] == [0, 1]
        for choice in got["choices"]:
            assert choice["message"] == expected["choices"][0]["message"]
            if not OLD:
                same_rows(choice["meta_info"].get("routed_experts"), expected["choices"][0]["meta_info"].get("routed_experts"))

    @pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
    def test_openai_streams_end_with_the_rows(self, front: Front, route: str) -> None:
        body = chat() if "chat" in route else completion("route me")
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        got, expected = front.events(route, body), events(front.unified.url + route, body)

        def payload(stream: list[Any]) -> str | None:
            found = [rows for event in stream if (rows := in_sglext(event)) is not None]
            assert len(found) == int(r3())
            return found[0] if found else None

        same_rows(payload(got), payload(expected))
        assert got[-1]["usage"]["completion_tokens"] == expected[-1]["usage"]["completion_tokens"]

    @pytest.mark.skipif(not TOP, reason="prefill of this release dies of a request for top logprobs, which this route always asks for")
    def test_completions_echo_has_the_prompts_logprobs(self, front: Front) -> None:
        got, expected = front.both("/v1/completions", completion("hello there", echo=True, logprobs=2))
        assert got["choices"][0]["text"] == expected["choices"][0]["text"]
        left, right = got["choices"][0]["logprobs"], expected["choices"][0]["logprobs"]
        assert left["tokens"] == right["tokens"]
        same_logprobs(left["token_logprobs"], right["token_logprobs"])
        same_rows(in_sglext(got), in_sglext(expected))

    def test_requests_without_r3_have_none(self, front: Front) -> None:
        body = {key: value for key, value in generate(20, 4).items() if key != "return_routed_experts"}
        got, expected = front.both("/generate", body)
        same_generate(got, expected, r3=False)
        assert "routed_experts" not in got["meta_info"]
