"""Client libraries as people use them, in front of emulated engines: the `openai` package, httpx with keep-alive, aiohttp."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from processes import emulating, serving

httpx = pytest.importorskip("httpx", reason="httpx is not installed; `make build` installs what the tests need")
openai = pytest.importorskip("openai", reason="openai is not installed; `make build` installs what the tests need")

LAYERS, TOP_K = 6, 4
ROW = LAYERS * TOP_K * 4
MODEL = "emulated-moe"
MESSAGES = [{"role": "user", "content": "tell me something"}]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    shape = ["--prefill", "2", "--decode", "2", "--layers", str(LAYERS), "--top-k", str(TOP_K), "--experts", "64", "--scale", "20"]
    with (
        emulating(tmp_path_factory.mktemp("fleet"), *shape) as flags,
        serving(tmp_path_factory.mktemp("router"), *flags, path="/readiness") as (url, _),
    ):
        yield url


@pytest.fixture
def client(router: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)) as made:
        yield made


def test_openai_chat(client: Any) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, extra_body={"ignore_eos": True})
    assert reply.object == "chat.completion"
    assert reply.usage.completion_tokens == 5
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 5
    assert [(c.index, c.message.role, c.finish_reason) for c in reply.choices] == [(0, "assistant", "length")]
    assert reply.choices[0].message.content
    assert reply._request_id.startswith("chatcmpl-")


def test_openai_chat_of_several_samples(client: Any) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, n=3, extra_body={"ignore_eos": True})
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert reply.usage.completion_tokens == 9


def test_openai_chat_as_a_stream_with_usage_at_its_end(client: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in finishes if reason] == ["length"]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage][-1] == 5


def test_openai_completions_whole_and_as_a_stream(client: Any) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "tell me something", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    reply = client.completions.create(**ask)
    assert (reply.object, reply.usage.completion_tokens, reply.choices[0].finish_reason) == ("text_completion", 4, "length")
    chunks = list(client.completions.create(**ask, stream=True))
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]


def test_openai_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_openai_reads_routing_rows_that_it_does_not_know(client: Any) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, extra_body={"return_routed_experts": True, "ignore_eos": True}
    )
    rows = base64.b64decode(reply.model_extra["sglext"]["routed_experts"])
    assert len(rows) == (reply.usage.prompt_tokens + 3 - 1) * ROW


def test_openai_raises_its_own_errors_with_what_is_wrong(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, n=0)
    assert wrong.value.status_code == 400
    assert wrong.value.code == "invalid_field"
    assert wrong.value.type == "invalid_request_error"
    assert "n: it must be at least 1" in str(wrong.value)
    with pytest.raises(openai.BadRequestError) as large:
        client.completions.create(model=MODEL, prompt=[7] * 5_000_000)
    assert large.value.code == "too_large_for_fleet"
    with pytest.raises(openai.NotFoundError):
        client.files.list()
    with pytest.raises(openai.InternalServerError) as unserved:
        client.embeddings.create(model=MODEL, input="x")
    assert unserved.value.status_code == 501


def test_openai_without_workers_or_without_the_key(tmp_path: Any) -> None:
    with serving(tmp_path, "--api-key", "k-1") as (url, _):
        for key, error, status in (("wrong", openai.AuthenticationError, 401), ("k-1", openai.InternalServerError, 503)):
            with (
                openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=httpx.Client(trust_env=False)) as client,
                pytest.raises(error) as told,
            ):
                client.chat.completions.create(model=MODEL, messages=MESSAGES)
            assert told.value.status_code == status


async def test_openai_asynchronous_calls_at_once(router: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{router}/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(trust_env=False)
    ) as client:
        ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
        replies = await asyncio.gather(*(client.chat.completions.create(**ask, max_tokens=n) for n in range(1, 17)))
    assert [reply.usage.completion_tokens for reply in replies] == list(range(1, 17))


async def test_httpx_keeps_one_connection_over_replies_errors_and_streams(router: str) -> None:
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    generate = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    used = set()
    async with httpx.AsyncClient(base_url=router, limits=limits, trust_env=False) as client:
        for nth in range(40):
            path, body = [
                ("/generate", generate),
                ("/generate", {"input_ids": "x"}),
                ("/generate", {**generate, "return_routed_experts": True, "return_logprob": True, "logprob_start_len": 0}),
                ("/generate", {**generate, "stream": True}),
                ("/nowhere", {}),
            ][nth % 5]
            async with client.stream("POST", path, json=body) as reply:
                used.add(reply.extensions["network_stream"].get_extra_info("client_addr"))
                text = await reply.aread()
            assert reply.status_code == [200, 400, 200, 200, 404][nth % 5], text
    assert len(used) == 1


async def test_aiohttp_reads_every_merged_reply_as_json(router: str) -> None:
    generate = {"sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "return_logprob": True, "logprob_start_len": 0}
    async with aiohttp.ClientSession(router) as session:
        for prompt, samples in (([1, 2, 3], 1), ([[1, 2, 3], [4]], 2)):
            async with session.post("/generate", json={**generate, "input_ids": prompt, "return_routed_experts": True}) as reply:
                got = await reply.json()
            parts = got if samples > 1 else [got]
            assert len(parts) == samples
            for part in parts:
                meta = part["meta_info"]
                assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
                assert len(base64.b64decode(meta["routed_experts"])) == (meta["prompt_tokens"] + 3 - 1) * ROW
        for path in ("/workers", "/v1/loads", "/get_loads", "/v1/models", "/server_info", "/model_info", "/readiness"):
            async with session.get(path) as reply:
                assert await reply.json(), path


async def test_what_a_serving_benchmark_asks_for(router: str) -> None:
    """The calls of `sglang.bench_serving`: information, a flush, and streams whose events it times and counts."""
    async with aiohttp.ClientSession(router) as session:
        async with session.get("/v1/models") as reply:
            assert (await reply.json())["data"][0]["id"] == MODEL
        async with session.get("/get_model_info") as reply:
            assert (await reply.json())["model_path"]
        async with session.get("/get_server_info") as reply:
            assert "max_total_num_tokens" in await reply.json()
        async with session.post("/flush_cache") as reply:
            assert reply.status == 200
        native = {
            "text": "tell me something",
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True},
            "stream": True,
            "lora_path": None,
            "return_logprob": False,
            "logprob_start_len": -1,
        }
        openai_like = {
            "model": MODEL,
            "prompt": "tell me something",
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": 6,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        for path, body in (("/generate", native), ("/v1/completions", openai_like)):
            generated = 0
            async with session.post(path, json=body, headers={"authorization": "Bearer "}) as reply:
                assert reply.status == 200
                async for line in reply.content:
                    text = line.strip().decode().removeprefix("data: ")
                    if not text or text == "[DONE]":
                        continue
                    event = json.loads(text)
                    usage = event["meta_info"] if path == "/generate" else event.get("usage") or {}
                    generated = usage.get("completion_tokens", generated)
            assert generated == 6, path
