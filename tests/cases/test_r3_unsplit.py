"""R3-4 and R3-3 without prefill and decode engines: one engine runs the whole request, and its rows go by reference all the same."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from scripted.calls import CHAT, COMPLETION, until
from scripted.client import events
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.host import Host
from scripted.lab import Lab
from scripted.leg import Leg
from scripted.r3 import R3Model, from_text, to_text
from scripted.reference import RefClient

LAYERS, TOP_K = 4, 2
MODEL = R3Model(layers=LAYERS, topk=TOP_K, experts=256)
SHAPE = ("--r3-layers", str(LAYERS), "--r3-top-k", str(TOP_K), "--r3-experts", "256")
IDS = [1, 2, 3, 4, 5]


def asked(tokens: int, **more: Any) -> dict[str, Any]:
    return {"return_routed_experts": True, "max_tokens": tokens, "sampling_params": {"max_new_tokens": tokens}, **more}


async def serve(lab: Lab, *flags: str, reference: bool = True, **engine: Any) -> tuple[Engine, RefClient]:
    """One engine, its router, and a client that asks for references."""
    lab.by_reference = reference
    fleet = await lab.fleet(Fleet([Engine("regular", "R0", tokens=50, **{"r3": MODEL, **engine})]))
    router = await lab.router(fleet, *flags)
    return fleet.engines[0], router.client  # type: ignore[return-value]


def truth(leg: Leg) -> str:
    """The rows of a leg as the engine would send them in-line."""
    assert leg.r3_sent is not None
    return to_text(leg.r3_sent)


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"input_ids": IDS}),
    "generate text": ("/generate", {"text": "x" * 33}),
    "chat sglext": ("/v1/chat/completions", CHAT),
    "chat choice": ("/v1/chat/completions", {**CHAT, "return_meta_info": True}),
    "completions sglext": ("/v1/completions", COMPLETION),
    "completions choice": ("/v1/completions", {**COMPLETION, "return_meta_info": True}),
}


def texts(node: Any) -> list[str]:
    """Every payload of a value, in order."""
    if isinstance(node, dict):
        own = [node["routed_experts"]] if isinstance(node.get("routed_experts"), str) else []
        return own + [text for value in node.values() for text in texts(value)]
    return [text for value in node for text in texts(value)] if isinstance(node, list) else []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
async def test_r3_4_the_rows_of_one_engine_go_by_reference(lab: Lab, form: str, stream: bool) -> None:
    path, body = FORMS[form]
    if stream and "choice" in form:
        pytest.skip("engines refuse return_meta_info in streams")
    engine, client = await serve(lab, *SHAPE)
    for tokens, start in ((3, 0), (1, 0), (40, 2)):
        got = await client.post(path, {**body, **asked(tokens, stream=stream, routed_experts_start_len=start)})
        assert got.status == 200, got.body[:300]
        values = [json.loads(part) for part in events(got.body) if part != "[DONE]"] if stream else [got.json()]
        assert texts(values) == [truth(engine.legs[-1])], (tokens, start)
    assert client.resolved == 3, "the rows came as references"
    assert engine.legs[0].body.get("return_outputs_via_store") is None


async def test_r3_4_each_of_a_batch_and_of_several_samples_has_its_own(lab: Lab) -> None:
    engine, client = await serve(lab, *SHAPE)
    for body, count in (
        ({"input_ids": [IDS, [6, 7], [8]]}, 3),
        ({"text": "x" * 40, "sampling_params": {"n": 2, "max_new_tokens": 3}}, 2),
    ):
        before = len(engine.legs)
        got = await client.post("/generate", {**asked(3), **body, "return_outputs_via_store": True})
        assert got.status == 200, got.body[:300]
        assert len(got.json()) == count
        legs = engine.legs[before:]
        assert sorted(texts(got.json())) == sorted(truth(leg) for leg in legs)
        assert all(b"return_outputs_via_store" not in leg.raw for leg in legs)
    got = await client.post("/v1/chat/completions", {**CHAT, "n": 2, "return_meta_info": True, **asked(3)})
    assert len(texts(got.json())) == 2


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"missing": True}, "r3_mismatch"),
        ({"short_by": 1}, "r3_mismatch"),
        ({"extra_bytes": 3}, "r3_mismatch"),
        ({"bad_text": True}, "r3_mismatch"),
    ],
    ids=str,
)
async def test_r3_4_rows_that_do_not_fit_are_an_error(lab: Lab, change: dict[str, Any], code: str) -> None:
    def claims(info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "enable_return_routed_experts": True}

    _, client = await serve(lab, *SHAPE, "--disable-retries", r3=R3Model(LAYERS, TOP_K, **change), edit_info=claims)
    got = await client.generate(input_ids=IDS, **asked(3))
    assert (got.status, got.error()["code"]) == (502, code), got.body[:300]


async def test_r3_4_an_engine_that_ignores_the_start_is_cut(lab: Lab) -> None:
    engine, client = await serve(lab, *SHAPE, r3=R3Model(LAYERS, TOP_K, ignores_start_len=True))
    await client.generate(input_ids=IDS, **asked(3))
    got = await client.generate(input_ids=IDS, **asked(3, routed_experts_start_len=2))
    rows = from_text(got.json()["meta_info"]["routed_experts"], LAYERS, TOP_K)
    sent = engine.legs[-1].r3_sent
    assert sent is not None and len(sent) == 7
    assert np.array_equal(rows, sent[2:])


async def test_r3_4_in_line_one_engines_bytes_are_not_touched(lab: Lab) -> None:
    engine, client = await serve(lab, *SHAPE, reference=False)
    for path, body in FORMS.values():
        got = await client.post(path, {**body, **asked(3)})
        assert got.body == engine.legs[-1].sent
        streamed = await client.post(path, {**body, **asked(3, stream=True)})
        assert streamed.body == engine.legs[-1].sent


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("stream", [False, True])
async def test_r3_4_what_the_plug_in_left_on_the_engines_host_reaches_the_client(
    lab: Lab, host: Host, stream: bool, reference: bool
) -> None:
    engine, client = await serve(lab, reference=False, r3=R3Model(LAYERS, TOP_K, keep=host.keep))
    headers = [("x-r3-transport", "ref" if reference else "inline")]
    for path, body in FORMS.values():
        if stream and body.get("return_meta_info"):
            continue
        got = await client.post(path, {**body, **asked(3, stream=stream)}, headers)
        assert got.status == 200, got.body[:300]
        sent = engine.legs[-1].r3_sent
        assert sent is not None
        if not reference:
            values = [json.loads(part) for part in events(got.body) if part != "[DONE]"] if stream else [got.json()]
            assert texts(values) == [to_text(sent)]
            continue
        assert b'"routed_experts":"' not in got.body and host.fetched == []
        ref = json.loads(b'{"output_store_ref"' + got.body.split(b'"output_store_ref"')[1].split(b"}}}")[0] + b"}}}}")["output_store_ref"]
        (segment,) = ref["handle"]["segments"]
        assert ref["fields"]["routed_experts"] == {"dtype": "uint8", "shape": list(sent.shape)}
        assert np.array_equal(host.rows(segment, LAYERS, TOP_K), sent)
    if not reference:  # what was read is let go after the client has its rows
        await until(lambda: len(host.fetched) == len(host.deleted) > 0, "the engine's rows to be let go")


async def test_r3_4_a_garbage_descriptor_of_one_engine_is_an_error(lab: Lab) -> None:
    model = R3Model(LAYERS, TOP_K, keep=lambda rows, pos: b'R3H1{"uri":17}')
    engine, client = await serve(lab, "--disable-retries", reference=False, r3=model)
    for transport in ("ref", "inline"):
        got = await client.post("/generate", {"input_ids": IDS, **asked(3)}, [("x-r3-transport", transport)])
        assert (got.status, got.error()["code"]) == (502, "r3_mismatch"), got.body[:300]
    engine.r3 = MODEL
    assert (await client.generate(input_ids=IDS, **asked(3))).status == 200
    assert base64.b64decode(truth(engine.legs[-1]))
