"""`serve` in front of `emulate`, as a person types them: replies, payloads, workers by HTTP, drain."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import call, emulating, serving, until_ok

# Small rows, so that a payload is a few kilobytes: layers x top_k x 4 bytes of int32 a token.
LAYERS, TOP_K = 6, 4
FLEET = ["--prefill", "2", "--decode", "2", "--layers", str(LAYERS), "--top-k", str(TOP_K), "--experts", "64", "--scale", "20"]
ROW = LAYERS * TOP_K * 4


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with emulating(tmp_path_factory.mktemp("fleet"), *FLEET) as flags:
        yield flags


@pytest.fixture(scope="module")
def router(fleet: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("router"), *fleet, path="/readiness") as (url, _):
        yield url


def generate(url: str, tokens: int, new: int, **more: Any) -> Any:
    body = {"input_ids": list(range(1, tokens + 1)), "sampling_params": {"max_new_tokens": new, "ignore_eos": True}, **more}
    status, answer = call(url + "/generate", body)
    assert status == 200, answer
    return answer


def test_generate_comes_back_with_both_halves(router: str):
    answer = generate(router, 50, 7, return_logprob=True, logprob_start_len=0)
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (50, 7)
    assert len(answer["output_ids"]) == 7
    assert len(meta["output_token_logprobs"]) == 7
    # Prefill alone has the prompt's logprobs, one a token.
    assert len(meta["input_token_logprobs"]) == 50


def test_routing_rows_are_whole_and_the_same_for_the_same_prompt(router: str):
    answers = [generate(router, 300, 9, return_routed_experts=True) for _ in range(3)]
    payloads = {base64.b64decode(answer["meta_info"]["routed_experts"]) for answer in answers}
    assert {len(payload) for payload in payloads} == {(300 + 9 - 1) * ROW}
    # The emulator's rows are a function of prompt, token and layer; junk that decode sends for the prompt is not.
    assert len(payloads) == 1


def test_a_batch_is_split_and_joined_in_order(router: str):
    body = {"input_ids": [[1] * 10, [2] * 20, [3] * 30], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    status, answers = call(router + "/generate", body)
    assert status == 200, answers
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [10, 20, 30]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openai_routes_answer_whole_and_as_a_stream(router: str, path: str):
    body: dict[str, Any] = {"model": "emulated-moe", "max_tokens": 5, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}
    status, answer = call(router + path, body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 5
    status, text = call(router + path, {**body, "stream": True})
    assert status == 200, text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]][-1] == "length"


def test_bad_input_is_refused_and_names_the_mend(router: str):
    status, answer = call(router + "/generate", {"input_ids": "abc"})
    assert (status, answer["error"]["code"]) == (400, "invalid_field")
    status, answer = call(router + "/nowhere", {})
    assert status == 404


def test_metrics_and_probes(router: str):
    generate(router, 5, 1)
    assert call(router + "/health")[0] == 200
    assert call(router + "/readiness")[1]["status"] == "ready"
    status, text = call(router + "/metrics")
    assert status == 200
    assert 'r3router_requests_total{route="generate",outcome="ok"}' in text
    assert "\nr3router_requests_live 0\n" in text


def test_engines_come_and_go_by_http(fleet: list[str], tmp_path: Path):
    prefill, port, decode = fleet[2], int(fleet[3]), fleet[5]
    with serving(tmp_path, "--pd-disaggregation") as (url, process):
        assert call(url + "/readiness")[0] == 503
        for worker in [{"url": prefill, "worker_type": "prefill", "bootstrap_port": port}, {"url": decode, "worker_type": "decode"}]:
            assert call(url + "/workers", worker)[0] == 202
        until_ok(url + "/readiness", process)
        assert sorted(worker["url"] for worker in call(url + "/workers")[1]["workers"]) == sorted([prefill, decode])
        generate(url, 20, 3)
        for worker in call(url + "/workers")[1]["workers"]:
            assert call(f"{url}/workers/{worker['id']}", method="DELETE")[0] == 202
        while call(url + "/workers")[1]["total"]:
            assert process.process.poll() is None
        assert process.stop() == 0
