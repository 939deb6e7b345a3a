"""Our client through the router: rows by reference from engines with the plug-in are those that engines without it send in-line."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from processes import emulating, serving
from r3router.client import Client, Reply

LAYERS, TOP_K = 6, 4
FLEET = ["--prefill", "1", "--decode", "1", "--layers", str(LAYERS), "--top-k", str(TOP_K), "--experts", "64", "--scale", "20"]


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A router in front of engines with the plug-in, and one in front of engines without."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("ref", "inline")}
    with (
        emulating(folders["ref"], *FLEET, "--plugin") as plugged,
        emulating(folders["inline"], *FLEET) as plain,
        serving(folders["ref"], *plugged, path="/readiness") as (ref, _),
        serving(folders["inline"], *plain, path="/readiness") as (inline, _),
    ):
        yield {"ref": ref, "inline": inline}


def client(url: str, transport: str = "ref") -> Client:
    return Client(url, layers=LAYERS, top_k=TOP_K, retries=3, transport=transport)


def body(tokens: int, new: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": list(range(1, tokens + 1)), "sampling_params": sampling, "return_routed_experts": True, **more}


def same(got: Reply, expected: Reply) -> None:
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.reference is not None and theirs.reference is None
        assert ours.routed_experts is not None and theirs.routed_experts is not None
        assert (ours.routed_experts.dtype, theirs.routed_experts.dtype) == (np.dtype("uint8"), np.dtype("<i4"))
        assert np.array_equal(ours.routed_experts, theirs.routed_experts)


@pytest.mark.parametrize(("tokens", "new"), [(300, 9), (5, 2), (40, 1), (1, 3)])
async def test_rows_by_reference_are_the_in_line_rows(routers: dict[str, str], tokens: int, new: int) -> None:
    async with client(routers["ref"]) as ref, client(routers["inline"], "inline") as inline:
        got, expected = await ref.generate(body(tokens, new)), await inline.generate(body(tokens, new))
        assert got.routed_experts is not None and got.routed_experts.shape == (tokens + new - 1, LAYERS, TOP_K)
        same(got, expected)
        assert ref.held == 0


@pytest.mark.parametrize("start", [0, 20, 40])
async def test_a_start_cuts_the_same_rows(routers: dict[str, str], start: int) -> None:
    async with client(routers["ref"]) as ref, client(routers["inline"], "inline") as inline:
        asked = body(40, 5, routed_experts_start_len=start)
        same(await ref.generate(asked), await inline.generate(asked))


async def test_a_batch_and_its_ranges(routers: dict[str, str]) -> None:
    asked = body(1, 4) | {"input_ids": [[1] * 10, [2] * 20, [3] * 30]}
    async with client(routers["ref"]) as ref, client(routers["inline"], "inline") as inline:
        got, expected = await ref.generate(asked, load=False), await inline.generate(asked)
        for ours, theirs in zip(got, expected, strict=True):
            assert theirs.routed_experts is not None
            assert np.array_equal(await ours.read_rows(5, 12), theirs.routed_experts[5:12])
        assert ref.held == 3
        await got.release()
        assert ref.held == 0


async def test_a_stream_ends_with_the_rows(routers: dict[str, str]) -> None:
    async with client(routers["ref"]) as ref, client(routers["inline"], "inline") as inline:
        got = [event async for event in ref.stream("/generate", body(30, 6))]
        expected = [event async for event in inline.stream("/generate", body(30, 6))]
        assert all(event.payload is None for event in got[:-1])
        same(got[-1], expected[-1])


async def test_chat_without_meta_info_has_the_rows_of_every_choice(routers: dict[str, str]) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "n": 2, "ignore_eos": True}
    asked |= {"model": "emulated-moe", "return_routed_experts": True}
    async with client(routers["ref"]) as ref:
        got = list(await ref.chat(asked))
        assert [sample.routed_experts is not None for sample in got] == [True, True]
        assert ref.held == 0


async def test_chat_choices_carry_their_rows(routers: dict[str, str]) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True}
    asked |= {"model": "emulated-moe", "return_routed_experts": True, "return_meta_info": True}
    async with client(routers["ref"]) as ref, client(routers["inline"], "inline") as inline:
        same(await ref.chat(asked), await inline.chat(asked))


async def test_either_kind_of_engine_gives_either_form(routers: dict[str, str]) -> None:
    asked = body(300, 9)
    async with (
        client(routers["inline"], "inline") as plain,
        client(routers["inline"]) as stored,
        client(routers["ref"], "inline") as pulled,
    ):
        expected = (await plain.generate(asked)).routed_experts
        by_reference = await stored.generate(asked)
        assert next(iter(by_reference)).reference is not None
        assert by_reference.routed_experts is not None and expected is not None
        assert np.array_equal(by_reference.routed_experts.reshape(expected.shape), expected)
        in_line = await pulled.generate(asked)
        assert next(iter(in_line)).reference is None
        assert in_line.routed_experts is not None
        assert np.array_equal(in_line.routed_experts, expected)
        chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "return_routed_experts": True}
        streamed = [event async for event in pulled.stream("/v1/chat/completions", {**chat, "stream": True})]
        assert streamed
