"""R3: the prompt's rows are A, decode's own prompt rows are poison B, its output rows are C. No B may reach a client, in any form."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from scripted.acts import Act, answer
from scripted.calls import CHAT, COMPLETION
from scripted.client import Response, events
from scripted.host import Host
from scripted.lab import Lab
from scripted.r3 import R3Model

A, B, C = 7, 66, 9
PROMPT = 5
"""Tokens of each prompt below, as the scripted engines count them."""
TEXT = "x" * 4 * PROMPT
IDS = [1, 2, 3, 4, 5]
Body = dict[str, Any]

FORMS: dict[str, tuple[str, Body, int]] = {
    "generate": ("/generate", {"input_ids": IDS}, 1),
    "generate text": ("/generate", {"text": TEXT}, 1),
    "generate stream": ("/generate", {"input_ids": IDS, "stream": True}, 1),
    "generate list": ("/generate", {"input_ids": [IDS, [6, 7, 8, 9, 10]]}, 2),
    "generate n": ("/generate", {"text": TEXT, "sampling_params": {"n": 2}}, 2),
    "chat sglext": ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": TEXT}]}, 1),
    "chat choices": ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": TEXT}], "n": 2, "return_meta_info": True}, 2),
    "chat stream": ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": TEXT}], "stream": True}, 1),
    "completions sglext": ("/v1/completions", COMPLETION | {"prompt": TEXT}, 1),
    "completions choice": ("/v1/completions", COMPLETION | {"prompt": TEXT, "return_meta_info": True}, 1),
    "completions stream": ("/v1/completions", COMPLETION | {"prompt": TEXT, "stream": True}, 1),
}
# Bytes of a row modulo 3 are 0, 1 and 2 in each width.
SHAPES = ((3, 2), (2, 2), (5, 1))
DTYPES = (None, "uint8", "uint16")
STARTS = (0, 2, PROMPT)


@dataclass
class Way:
    """How rows travel: from the engines to the router, and from there to the client."""

    reference: bool
    """The client asks for references, and puts what a naive GET of each segment gave where the rows would have been, as int32."""
    prefill: Host | None
    decode: Host | None
    """The host of an engine with the plug-in: its rows stay there."""

    def model(self, side: str, layers: int, topk: int, dtype: str | None = None, **more: Any) -> R3Model:
        """Rows of an engine of this side."""
        host = self.prefill if side == "prefill" else self.decode
        if host is None:
            # Beside a plug-in's rows: int32, as SGLang sends them. See the test of narrow ones below.
            wire = None if self.prefill or self.decode else dtype
            return R3Model(layers, topk, **{"dtype": wire, "marks": (A, C), **more})
        host.dtype = dtype or "int32"
        return R3Model(layers, topk, marks=(A, C), keep=host.keep, **more)


WAYS = {
    "in-line": (False, ()),
    "by reference": (True, ()),
    "plug-in, in-line": (False, ("prefill", "decode")),
    "plug-in, by reference": (True, ("prefill", "decode")),
    "plug-in at prefill, by reference": (True, ("prefill",)),
    "plug-in at decode, by reference": (True, ("decode",)),
}


@pytest_asyncio.fixture(autouse=True, params=WAYS)
async def way(request: pytest.FixtureRequest, lab: Lab) -> AsyncIterator[Way]:
    """Every way that rows can take."""
    reference, plugged = WAYS[request.param]
    lab.by_reference = reference
    hosts = {side: await Host().start() for side in plugged}
    yield Way(reference, hosts.get("prefill"), hosts.get("decode"))
    for host in hosts.values():
        await host.stop()
        assert not host.problems


def asked(body: Body, tokens: int, **more: Any) -> Body:
    sampling = {"max_new_tokens": tokens, **body.get("sampling_params", {})}
    return {**body, "return_routed_experts": True, "max_tokens": tokens, "sampling_params": sampling, **more}


def values(got: Response) -> Iterator[dict[str, Any]]:
    """The JSON values of a reply: the body, or the events of a stream."""
    if "text/event-stream" in (got.header("content-type") or ""):
        *parts, end = events(got.body)
        assert end == "[DONE]"
        yield from (json.loads(part) for part in parts)
    else:
        yield got.json()


def holders(node: Any) -> Iterator[dict[str, Any]]:
    """Every object with rows, in order."""
    if isinstance(node, dict):
        if isinstance(node.get("routed_experts"), str):
            yield node
        for value in node.values():
            yield from holders(value)
    elif isinstance(node, list):
        for value in node:
            yield from holders(value)


def ids(holder: dict[str, Any], *, fetched: bool) -> np.ndarray:
    """The numbers of a payload."""
    dtype = "int32" if fetched else holder.get("routed_experts_dtype", "int32")
    return np.frombuffer(base64.b64decode(holder["routed_experts"], validate=True), dtype)


@pytest.mark.parametrize("form", FORMS)
async def test_r3_1_no_poison_escapes_from_any_form(lab: Lab, way: Way, form: str) -> None:
    path, body, samples = FORMS[form]
    fleet, _, client = await lab.serve("--disable-circuit-breaker", decode={"tokens": 10})
    sizes = cycle((0, 0, 1, 0, 3, 0, 100))
    # Descriptors say the bytes of a row, so that one shape is as good as another.
    for (layers, topk), dtype in product(SHAPES[:1] if way.prefill or way.decode else SHAPES, DTYPES):
        model = f"m-{layers}-{topk}-{dtype}"
        for start, tokens, ignores in product(STARTS, (3, 1), (False, True)):
            fleet.p.r3 = way.model("prefill", layers, topk, dtype)
            fleet.d.r3 = way.model("decode", layers, topk, dtype, junk=B, ignores_start_len=ignores)
            fleet.p.write_bytes, fleet.d.write_bytes = next(sizes), next(sizes)
            got = await client.post(path, asked(body, tokens, model=model, routed_experts_start_len=start))
            what = f"{form} {model} start={start} tokens={tokens} ignores={ignores}"
            assert got.status == 200, f"{what}: {got.body[:300]!r}"
            found = [holder for value in values(got) for holder in holders(value)]
            wanted = [A] * (PROMPT - start) * layers * topk + [C] * (tokens - 1) * layers * topk
            # No rows may be an empty string or no member.
            assert len(found) == samples or (not wanted and not found), f"{what}: {got.body[:300]!r}"
            for holder in found:
                assert ids(holder, fetched=lab.by_reference).tolist() == wanted, what
    fleet.check()


@pytest.mark.parametrize("way", ["plug-in at prefill, by reference"], indirect=True)
async def test_r3_1_narrow_rows_beside_a_plug_ins_are_whole_or_refused(lab: Lab, way: Way) -> None:
    """A descriptor does not say how wide the other engine's ids are, and that one says it behind its rows only."""
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", decode={"tokens": 10})
    statuses = set()
    for body, ignores in product(({"input_ids": IDS}, {"text": TEXT}), (False, True)):
        fleet.p.r3 = way.model("prefill", 3, 2)
        fleet.d.r3 = R3Model(3, 2, dtype="uint8", marks=(A, C), junk=B, ignores_start_len=ignores)
        got = await client.post("/generate", asked(body, 3))
        statuses.add(got.status)
        if got.status == 200:
            assert ids(got.json()["meta_info"], fetched=True).tolist() == [A] * PROMPT * 6 + [C] * 2 * 6
        else:
            assert got.error()["code"] == "r3_mismatch", got.body[:300]
    assert statuses == {200, 502}
    await fleet.quiet()


FAULTS: dict[str, tuple[str, Body]] = {
    # As many rows as it was asked for would be taken for these: nothing in the reply tells them apart.
    "decode is shorter than prefill": ("decode", {"short_by": 3, "ignores_start_len": True}),
    "decode is shorter by a row": ("decode", {"short_by": 1, "ignores_start_len": True}),
    "decode has bytes over": ("decode", {"extra_bytes": 2, "ignores_start_len": True}),
    "prefill is shorter by a row": ("prefill", {"short_by": 1}),
    "decode's dtype is another": ("decode", {"dtype": "uint8"}),
    "prefill's dtype is another": ("prefill", {"dtype": "uint16"}),
}


def refused(got: Response) -> dict[str, Any]:
    """The error of a reply or of the last event of a stream; nothing with rows came before it."""
    if got.status != 200:
        return got.error()
    last = [json.loads(part) for part in events(got.body) if part != "[DONE]"][-1]
    assert not any(holders([json.loads(part) for part in events(got.body) if part != "[DONE]"])), got.body[:500]
    error: dict[str, Any] = last["error"]
    return error


@pytest.mark.parametrize("fault", FAULTS)
async def test_r3_1_a_part_that_does_not_fit_lets_no_poison_escape(lab: Lab, way: Way, fault: str) -> None:
    side, change = FAULTS[fault]
    if (way.prefill or way.decode) and "short_by" not in change:
        pytest.skip("a descriptor has whole rows, and says their dtype")
    fleet, router, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", decode={"tokens": 10})
    count = 0
    for form, (layers, topk) in product(FORMS, SHAPES[:1] if way.prefill or way.decode else SHAPES):
        path, body, _ = FORMS[form]
        fleet.p.r3, fleet.d.r3 = (way.model(one, layers, topk, junk=B) for one in ("prefill", "decode"))
        engine = fleet.p if side == "prefill" else fleet.d
        # One request that fits shows the width, as every earlier reply of a real model does.
        warm = engine.r3
        engine.r3 = way.model(side, layers, topk, junk=B, **change)
        model = f"m-{layers}-{topk}"
        saved, engine.r3 = engine.r3, warm
        assert (await client.post("/generate", asked({"input_ids": IDS}, 3, model=model))).status == 200
        engine.r3 = saved
        got = await client.post(path, asked(body, 3, model=model))
        error = refused(got)
        assert error["code"] == "r3_mismatch", f"{form} {layers}x{topk}: {got.body[:300]!r}"
        count += 1
    metrics = await router.metrics()
    assert metrics.sum("r3router_requests_total", outcome="r3_mismatch") == count
    await fleet.quiet()


@pytest.mark.parametrize("way", ["in-line", "by reference", "plug-in, by reference"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
async def test_r3_1_when_prefill_fails_no_poison_escapes(lab: Lab, way: Way, form: str) -> None:
    path, body, _ = FORMS[form]
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", decode={"tokens": 10})
    fleet.p.r3 = way.model("prefill", 3, 2)
    fleet.d.r3 = way.model("decode", 3, 2, junk=B, ignores_start_len=True)

    async def fails_late(leg: Any, exchange: Any) -> None:
        # The KV is delivered, so that decode answers, and then prefill's own reply is an error.
        await leg.deliver()
        await exchange.reply(500, b'{"error":{"message":"prefill broke"}}')

    for act in (answer(500, {"error": {"message": "prefill broke"}}), Act(fails_late, joins=True)):
        fleet.p.script = lambda leg, act=act: act
        got = await client.post(path, asked(body, 3))
        error = refused(got)
        assert "prefill broke" in json.dumps(error) or error.get("source") == "prefill", got.body[:300]
    await fleet.quiet()


@pytest.mark.parametrize("way", ["in-line", "by reference", "plug-in, by reference"], indirect=True)
@pytest.mark.parametrize("form", [form for form in FORMS if "sglext" not in form and form not in ("chat stream", "completions stream")])
async def test_r3_1_a_retraction_lets_no_rows_escape(lab: Lab, way: Way, form: str) -> None:
    """Engines say `num_retractions` in `meta_info` only, which OpenAI replies have when they are asked for it."""
    path, body, _ = FORMS[form]
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker", decode={"tokens": 10, "retractions": 1})
    for start in STARTS:
        fleet.p.r3, fleet.d.r3 = way.model("prefill", 2, 2), way.model("decode", 2, 2, junk=B)
        got = await client.post(path, asked(body, 3, routed_experts_start_len=start))
        assert refused(got)["code"] == "r3_mismatch", got.body[:300]
    await fleet.quiet()
