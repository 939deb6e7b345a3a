"""The helpers for miles and slime, with stand-ins for what they take of the trainers: the samples get exactly what is asserted on them."""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from r3router.r3 import FormatError
from r3router.trainers import common, miles, slime

from .router import ScriptedRouter, envelope, reply, text
from .rows import LAYERS, TOP_K, expert_rows


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    """The members of the trainers' samples that a turn touches, and the trainers' assertion on the rows."""

    prompt: str = "p" * 20
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    multimodal_inputs: Any = None
    session_id: str | None = "s-1"
    status: Status = Status.PENDING
    Status = Status

    def update_from_meta_info(self, args: Any, meta: dict[str, Any]) -> None:
        kind = meta["finish_reason"]["type"]
        self.status = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}[kind]

    def check(self, rows: Any) -> None:
        got = self.rollout_routed_experts
        assert got.dtype == np.int32 and got.flags.c_contiguous and got.shape == (len(self.tokens) - 1, LAYERS, TOP_K)
        assert np.array_equal(got, rows)


class NewSample(Sample):
    """As slime's newer samples, which take a turn's payload themselves."""

    def append_response_tokens(self, args: Any, *, tokens: Any, log_probs: Any, trainable: bool, meta_info: Any, text: str) -> None:
        self.tokens = self.tokens + tokens
        self.response_length += len(tokens)
        self.response += text
        self.rollout_log_probs = (self.rollout_log_probs or []) + log_probs
        start = meta_info.get("routed_experts_start_len", 0)
        rows = meta_info.get("routed_experts")
        if rows is not None:
            assert rows.size == (len(self.tokens) - 1 - start) * LAYERS * TOP_K
            self.rollout_routed_experts = rows if start == 0 else np.concatenate([self.rollout_routed_experts[:start], rows])
        self.update_from_meta_info(args, meta_info)


class Tokenizer:
    def encode(self, prompt: str, add_special_tokens: bool) -> list[int]:
        return list(range(len(prompt)))


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules in the places of the trainers'."""

    def module(name: str, **members: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("slime", "slime.rollout", "miles", "miles.rollout", "miles.rollout.generate_utils"):
        module(name)
    state = types.SimpleNamespace(tokenizer=Tokenizer())
    module("slime.rollout.sglang_rollout", GenerateState=lambda args: state)
    module("miles.rollout.sglang_rollout", GenerateState=lambda args: state)
    module("miles.rollout.base_types", GenerateFnOutput=lambda samples: ("output", samples))

    def payload(args: Any, input_ids: list[int], sampling_params: Any, multimodal_inputs: Any = None) -> Any:
        if sampling_params["max_new_tokens"] <= 0:
            return None, Status.TRUNCATED
        return {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True, "return_routed_experts": True}, None

    async def update(args: Any, sample: Any, payload: Any, output: Any) -> None:
        assert "routed_experts" not in output["meta_info"]
        tokens, logprobs = common.tokens_of(output["meta_info"])
        sample.tokens = sample.tokens + tokens
        sample.response_length += len(tokens)
        sample.response += output["text"]
        sample.rollout_log_probs = (sample.rollout_log_probs or []) + logprobs
        sample.rollout_routed_experts = None
        sample.update_from_meta_info(args, output["meta_info"])

    module(
        "miles.rollout.generate_utils.generate_endpoint_utils",
        compute_prompt_ids_from_sample=lambda state, sample: Tokenizer().encode(sample.prompt, False),
        compute_request_payload=payload,
        compute_routing_headers=lambda args, sample: {"X-SMG-Routing-Key": sample.session_id},
        update_sample_from_response=update,
    )
    yield


class Engine:
    """Answers as one that computes the rows of the sequence `stream` from `routed_experts_start_len` on."""

    def __init__(self, router: ScriptedRouter, *, form: str, finish: str = "length", surplus: int = 0) -> None:
        self.router = router
        self.stream = expert_rows(1, 400)
        self.form = form
        self.finish = finish
        self.surplus = surplus
        router.script = [self.answer]

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt, new = len(body["input_ids"]), min(7, body["sampling_params"]["max_new_tokens"])
        start = body.get("routed_experts_start_len", 0)
        meta: dict[str, Any] = {}
        if body.get("return_routed_experts"):
            rows = self.stream[start : prompt + new - 1 + self.surplus]
            if self.form == "inline":
                meta = {"routed_experts": text(rows)}
            else:
                segment = self.router.put(f"{len(self.router.requests):032x}", rows, pos=start)
                meta = {"output_store_ref": envelope([segment], rows.shape)}
        made = reply(prompt, new, **meta)
        made["meta_info"]["finish_reason"] = {"type": self.finish}
        return web.Response(body=orjson.dumps(made), content_type="application/json")


@pytest_asyncio.fixture
async def args(router: ScriptedRouter) -> AsyncIterator[types.SimpleNamespace]:
    assert router.server is not None
    yield types.SimpleNamespace(
        sglang_router_ip=router.server.host,
        sglang_router_port=router.server.port,
        num_layers=LAYERS,
        moe_router_topk=TOP_K,
        use_rollout_routing_replay=True,
        router_policy="consistent_hashing",
    )
    await common.close()


async def turn(framework: str, args: Any, sample: Any, *, append: bool = False, evaluation: bool = False) -> None:
    params = {"max_new_tokens": 30, "temperature": 1.0}
    name = "generate_append" if append else "generate"
    if framework == "miles":
        given = types.SimpleNamespace(args=args, state=None, sample=sample, sampling_params=params, evaluation=evaluation)
        assert await getattr(miles, name)(given) == ("output", sample)
    elif framework == "miles, older":
        assert await getattr(miles, name)(args, sample, params, evaluation) is sample
    else:
        assert await getattr(slime, name)(args, sample, params, evaluation=evaluation) is sample
    assert params == {"max_new_tokens": 30, "temperature": 1.0}


FRAMEWORKS = [("miles", Sample), ("miles, older", Sample), ("slime", NewSample), ("slime", Sample)]


@pytest.mark.parametrize(("framework", "kind"), FRAMEWORKS)
@pytest.mark.parametrize("form", ["ref", "inline"])
async def test_a_sample_gets_the_rows_of_its_tokens(
    trainers: None, router: ScriptedRouter, args: Any, framework: str, kind: type[Sample], form: str
) -> None:
    engine = Engine(router, form=form)
    sample = kind()
    await turn(framework, args, sample)
    assert sample.tokens == [*range(20), *range(100, 107)] and sample.response == "abc" and sample.response_length == 7
    assert sample.rollout_log_probs == [-0.5] * 7 and sample.status is Status.TRUNCATED
    sample.check(engine.stream[:26])
    assert router.requests[0][1]["x-smg-routing-key"] == "s-1" and not router.objects


@pytest.mark.parametrize(("framework", "kind"), FRAMEWORKS)
@pytest.mark.parametrize("append", [False, True])
async def test_a_partial_rollout_goes_on_where_it_was_aborted(
    trainers: None, router: ScriptedRouter, args: Any, framework: str, kind: type[Sample], append: bool
) -> None:
    engine = Engine(router, form="ref", finish="abort")
    sample = kind()
    await turn(framework, args, sample, append=append)
    assert sample.status is Status.ABORTED
    first = engine.stream[:26].copy()
    # The engine would now compute others for the same tokens.
    engine.stream = expert_rows(2, 400)
    await turn(framework, args, sample, append=append)
    assert router.requests[1][2]["input_ids"] == [*range(20), *range(100, 107)]
    assert router.requests[1][2]["sampling_params"]["max_new_tokens"] == 23
    assert router.requests[1][2].get("routed_experts_start_len", 0) == (26 if append else 0)
    sample.check(np.concatenate([first, engine.stream[26:33]]) if append else engine.stream[:33])


@pytest.mark.parametrize(("framework", "kind"), FRAMEWORKS)
async def test_a_full_sample_is_not_sent(trainers: None, router: ScriptedRouter, args: Any, framework: str, kind: type[Sample]) -> None:
    sample = kind(tokens=list(range(50)), response="x", response_length=30, status=Status.ABORTED)
    await turn(framework, args, sample)
    assert sample.status is Status.TRUNCATED and not router.requests


@pytest.mark.parametrize(("framework", "kind"), FRAMEWORKS)
async def test_evaluation_asks_for_no_rows(trainers: None, router: ScriptedRouter, args: Any, framework: str, kind: type[Sample]) -> None:
    Engine(router, form="ref")
    sample = kind()
    await turn(framework, args, sample, evaluation=True)
    assert "return_routed_experts" not in router.requests[0][2] and sample.rollout_routed_experts is None
    assert sample.response_length == 7


@pytest.mark.parametrize(("framework", "kind"), FRAMEWORKS)
async def test_a_row_for_the_stop_token_is_cut_off_and_other_numbers_are_refused(
    trainers: None, router: ScriptedRouter, args: Any, framework: str, kind: type[Sample]
) -> None:
    engine = Engine(router, form="ref", surplus=1)
    sample = kind()
    await turn(framework, args, sample)
    sample.check(engine.stream[:26])
    for surplus in (2, -1):
        Engine(router, form="ref", surplus=surplus)
        with pytest.raises(FormatError, match="26"):
            await turn(framework, args, kind())
