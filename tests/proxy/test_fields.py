"""Property: whatever JSON a client sends, both legs get every field that is not the router's, with an equal value."""

from __future__ import annotations

import json
from functools import partial
from random import Random
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from scripted.calls import OWNED, ROUTES, crowd
from scripted.lab import Lab

# Fields that the router reads, or that splitting changes; everything else must pass.
READ = {
    *OWNED,
    "stream",
    "stream_options",
    "n",
    "text",
    "input_ids",
    "input_embeds",
    "prompt",
    "messages",
    "sampling_params",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "return_routed_experts",
    "routed_experts_start_len",
    "return_indexer_topk",
    "return_meta_info",
    "return_logprob",
    "return_outputs_via_store",
    "bootstrap_pair_key",
    "echo",
    "logprobs",
    "session_id",
    "session_params",
}
CALLS = 400
CALLS_AT_ONCE = 40

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.integers(min_value=2**53, max_value=2**70))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
fields = st.dictionaries(texts.filter(lambda name: name not in READ), values, max_size=6)
calls = st.tuples(st.sampled_from(list(ROUTES)), fields, st.booleans(), st.sampled_from([None, 0, 2]), st.integers(0, 2**32))


def shuffled(body: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same members in another order."""
    names = list(body)
    Random(seed).shuffle(names)
    return {name: body[name] for name in names}


def normal(value: Any) -> str:
    """JSON text that is equal for equal values; integers and floats are told apart."""
    return json.dumps(value, sort_keys=True)


async def test_random_fields_reach_both_legs_with_equal_values(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--log-level", "warn", prefill={"dp_size": 2}, decode={"dp_size": 3})
    drawn: list[Any] = []

    @settings(max_examples=CALLS, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(calls)
    def draw(call: Any) -> None:
        drawn.append(call)

    draw()
    assert len(drawn) >= CALLS // 2
    bodies: list[dict[str, Any]] = []

    async def call(path: str, body: dict[str, Any], ascii_only: bool, indent: int | None, seed: int) -> None:
        raw = json.dumps(shuffled(body, seed), ensure_ascii=ascii_only, indent=indent).encode("utf-8")
        got = await client.request("POST", path, raw)
        assert got.status == 200, (raw, got.body)

    jobs = []
    for number, (path, extra, ascii_only, indent, seed) in enumerate(drawn):
        bodies.append({**ROUTES[path], **extra, "test_case": number})
        jobs.append(partial(call, path, bodies[-1], ascii_only, indent, seed))
    await crowd(jobs, CALLS_AT_ONCE)
    fleet.check()
    for engine in fleet.engines:
        assert len(engine.legs) == len(drawn)
        for leg in engine.legs:
            seen = json.loads(leg.raw)
            want = bodies[seen["test_case"]]
            got = {k: v for k, v in seen.items() if k not in OWNED and (k != "stream" or "stream" in want)}
            assert normal(got) == normal(want), f"{engine.name} got another body for {want}"
    assert router.alive()
