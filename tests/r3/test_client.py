"""The client against a scripted router: rows by reference and in-line, in every chunking; nothing leaks whatever breaks."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from r3router.client import Client, RequestFailed
from r3router.r3 import AccessDenied, FetchFailed, FormatError, Reference, RowsGone
from r3router.r3.descriptor import Descriptor
from r3router.r3.host import boot_id
from r3router.r3.store import StoreDir

from .router import ScriptedRouter, drip, envelope, reply, text
from .rows import LAYERS, TOP_K, expert_rows, put

ROW = (LAYERS, TOP_K)


@pytest_asyncio.fixture
async def client(router: ScriptedRouter) -> AsyncIterator[Client]:
    async with Client(router.url, api_key="k", retries=2, pause_s=0.001, layers=LAYERS, top_k=TOP_K) as made:
        yield made


def two_legs(router: ScriptedRouter, prompt: int = 50, new: int = 12) -> tuple[Any, dict[str, Any]]:
    """A reply whose rows are prefill's and decode's; all rows, and the reply."""
    rows = expert_rows(1, prompt + new - 1)
    segments = [router.put("aa" * 16, rows[:prompt]), router.put("bb" * 16, rows[prompt:], pos=prompt)]
    return rows, reply(prompt, new, output_store_ref=envelope(segments, rows.shape))


async def test_two_legs_become_one_array_and_are_released(router: ScriptedRouter, client: Client) -> None:
    rows, body = two_legs(router)
    router.script = [body]
    got = await client.generate(input_ids=[1], return_routed_experts=True)
    assert got.routed_experts is not None
    assert got.routed_experts.dtype == np.uint8 and np.array_equal(got.routed_experts, rows)
    int32 = got.routed_experts_int32()
    assert int32 is not None and int32.dtype == np.int32 and np.array_equal(int32, rows)
    assert sorted(router.deleted) == ["aa" * 16, "bb" * 16] and not router.objects
    assert client.held == 0
    path, headers, sent = router.requests[0]
    assert path == "/generate" and headers["x-r3-transport"] == "ref" and headers["Authorization"] == "Bearer k"
    assert sent == {"input_ids": [1], "return_routed_experts": True}


async def test_rows_of_a_router_that_does_not_know_the_layers_get_the_clients_shape(router: ScriptedRouter, client: Client) -> None:
    rows = expert_rows(4, 60)
    flat = rows.reshape(60, 1, LAYERS * TOP_K)
    router.script = [reply(50, 11, output_store_ref=envelope([router.put("aa" * 16, flat)], flat.shape))]
    got = await client.generate(load=False)
    part = await got.read_rows(3, 7, dtype="int32")
    assert part.shape == (4, *ROW) and np.array_equal(part, rows[3:7])
    await got.load()
    assert got.routed_experts is not None
    assert got.routed_experts.shape == rows.shape and np.array_equal(got.routed_experts, rows)
    assert not router.objects


async def test_a_reference_of_another_shape_than_the_clients_is_an_error_and_is_released(router: ScriptedRouter) -> None:
    rows, body = two_legs(router)
    router.script = [body]
    for layers, top_k in ((LAYERS + 1, TOP_K), (TOP_K, LAYERS), (1, LAYERS * TOP_K), (LAYERS * 2, TOP_K)):
        two_legs(router)
        async with Client(router.url, retries=0, layers=layers, top_k=top_k) as other:
            with pytest.raises(FormatError, match=f"{LAYERS} layers and {TOP_K} experts.*layers={layers}, top_k={top_k}"):
                await other.generate(return_routed_experts=True)
            for _ in range(1000):  # They are released beside the error.
                if not router.objects:
                    break
                await asyncio.sleep(0.01)
        assert not router.objects, "nobody released the rows"
    async with Client(router.url) as told_nothing:
        two_legs(router)
        got = await told_nothing.generate(return_routed_experts=True)
        assert got.routed_experts is not None and np.array_equal(got.routed_experts, rows)


async def test_a_range_is_read_across_the_legs_without_the_rest(router: ScriptedRouter, client: Client) -> None:
    rows, body = two_legs(router)
    router.script = [body]
    async with await client.generate(load=False) as got:
        assert client.held == 1 and not router.fetched
        assert np.array_equal(await got.read_rows(45, 55), rows[45:55])
        assert np.array_equal(await got.read_rows(0, 5, dtype="int32"), rows[:5])
        assert (await got.read_rows(10, 10)).shape == (0, *ROW)
        with pytest.raises(IndexError):
            await got.read_rows(0, 62)
        assert not router.deleted
    assert sorted(router.deleted) == ["aa" * 16, "bb" * 16]
    with pytest.raises(RowsGone):
        await got.read_rows()


async def test_a_segment_may_be_a_part_of_its_object(router: ScriptedRouter, client: Client) -> None:
    rows = expert_rows(2, 80)
    segment = router.put("cc" * 16, rows) | {"offset": 256 + 20 * LAYERS * TOP_K, "rows": 60, "pos": 20, "crc32": None}
    router.script = [reply(70, 11, output_store_ref=envelope([segment], (60, *ROW)))]
    got = await client.generate()
    assert np.array_equal(got.routed_experts, rows[20:])


async def test_the_address_of_a_part_serves_its_rows_and_no_others(router: ScriptedRouter, client: Client) -> None:
    rows = expert_rows(2, 80)
    segment = router.put("cc" * 16, rows) | {"offset": 256 + 20 * LAYERS * TOP_K, "rows": 50, "pos": 20, "crc32": None}
    segment["uri"] += "?rows=20:70"
    router.script = [reply(70, 11, output_store_ref=envelope([segment], (50, *ROW)))]
    async with await client.generate(load=False) as got:
        assert np.array_equal(await got.read_rows(), rows[20:70])
        assert np.array_equal(await got.read_rows(7, 9), rows[27:29])
        async with client.session.get(segment["uri"]) as naive:
            assert await naive.read() == rows[20:70].astype(np.uint8).tobytes()
    assert router.deleted == ["cc" * 16], "the object is released, whatever part was named"
    for change in (
        {"uri": segment["uri"].replace("20:70", "19:69")},
        {"rows": 49},
        {"offset": 256},
        {"uri": segment["uri"] + "&layers=0:1"},
    ):
        router.script = [reply(70, 11, output_store_ref=envelope([segment | change], ((segment | change)["rows"], *ROW)))]
        with pytest.raises(FormatError, match=r"names others|\?rows=a:b or no query"):
            await client.generate()


def mappings(store: StoreDir) -> list[str]:
    """What this process has mapped of a directory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(store.path) in line]


def files(store: StoreDir) -> dict[str, bytes]:
    """The files of a directory."""
    return {path.name: path.read_bytes() for path in store.path.glob("*.r3")}


@pytest.mark.parametrize("layout", ["prompt here", "output here", "both here", "middle"])
async def test_the_largest_part_of_joined_rows_stays_in_its_file(
    router: ScriptedRouter, client: Client, store: StoreDir, layout: str
) -> None:
    rows = expert_rows(4, 300_000)
    cuts = {"prompt here": (0, 290_001), "output here": (0, 11), "both here": (0, 140_000), "middle": (0, 17, 299_990)}[layout]
    segments = []
    for number, (a, b) in enumerate(zip(cuts, (*cuts[1:], len(rows)), strict=True)):
        segment = router.put(f"{number:032x}", rows[a:b], pos=a)
        here = layout == "both here" or b - a > len(rows) / 2
        if here:
            # An object that begins with rows of its own before the segment's.
            path = put(store, np.concatenate([np.full((number, *ROW), 9, np.int32), rows[a:b]]))
            segment |= {"path": str(path), "offset": 256 + number * LAYERS * TOP_K, "crc32": None}
        segments.append(segment)
    router.script = [reply(299_000, 1001, output_store_ref=envelope(segments, rows.shape))]
    got = await client.generate(keep=True)
    assert np.array_equal(got.routed_experts, rows)
    assert got.routed_experts.dtype == np.uint8
    mapped = mappings(store)
    assert len(mapped) == 1 and "rw-p" in mapped[0], "the larger file is mapped, and the other was copied"
    before = files(store)
    got.routed_experts[...] = 1
    assert files(store) == before, "writing changes no file"
    part = await client.generate(load=False)
    assert np.array_equal(await part.read_rows(5, 299_995), rows[5:299_995])
    await part.release()


async def test_rows_of_another_position_are_refused(router: ScriptedRouter, client: Client) -> None:
    rows = expert_rows(2, 80)
    segment = router.put("cc" * 16, rows, pos=10) | {"offset": 256 + 20 * LAYERS * TOP_K, "rows": 60, "pos": 20, "crc32": None}
    router.script = [reply(70, 11, output_store_ref=envelope([segment], (60, *ROW)))]
    with pytest.raises(FormatError, match="position 30, 20 was wanted"):
        await client.generate()


async def test_an_offset_inside_of_the_header_is_an_error(router: ScriptedRouter, client: Client) -> None:
    rows = expert_rows(2, 80)
    segment = router.put("cc" * 16, rows) | {"offset": 0}
    router.script = [reply(70, 11, output_store_ref=envelope([segment], rows.shape))]
    with pytest.raises(FormatError, match="inside the header"):
        await client.generate()


async def test_rows_on_this_host_are_mapped_and_outlive_their_release(router: ScriptedRouter, client: Client, store: StoreDir) -> None:
    rows = expert_rows(3, 700)
    path = put(store, rows)
    segment = {"uri": f"{router.url}/r3/{path.stem}", "offset": 256, "pos": 0, "rows": 700, "dtype": "uint8", "path": str(path)}
    router.script = [reply(690, 11, output_store_ref=envelope([segment | {"host": boot_id()}], rows.shape))]
    got = await client.generate()
    assert not router.fetched and router.deleted == [path.stem]
    path.unlink()
    assert got.routed_experts is not None and not got.routed_experts.flags.writeable and not got.routed_experts.flags.owndata
    assert np.array_equal(got.routed_experts, rows)


@pytest.mark.parametrize("how", ["another host", "no such file", "not allowed to map"])
async def test_rows_that_cannot_be_mapped_are_fetched(router: ScriptedRouter, store: StoreDir, how: str) -> None:
    rows = expert_rows(4, 30)
    path = put(store, expert_rows(99, 30) if how != "no such file" else rows)
    segment = router.put("dd" * 16, rows, path=str(path), host=boot_id())
    if how == "another host":
        segment["host"] = "11111111-2222-3333-4444-555555555555"
    elif how == "no such file":
        segment["path"] = str(store.path / ("e" * 32 + ".r3"))
    router.script = [reply(20, 11, output_store_ref=envelope([segment], rows.shape))]
    async with Client(router.url, map_files=how != "not allowed to map") as client:
        got = await client.generate()
    assert np.array_equal(got.routed_experts, rows) and router.fetched == ["dd" * 16]


async def test_a_file_that_is_still_written_is_waited_for(router: ScriptedRouter, client: Client, store: StoreDir) -> None:
    rows = expert_rows(5, 40)
    from r3router.r3.store import new_header

    writing = store.reserve(new_header(40, LAYERS, TOP_K, "uint8", start=0, expires_s=60, rid="", weight_version=""))
    segment = {"uri": f"{router.url}/r3/{writing.id}", "offset": 256, "pos": 0, "rows": 40, "dtype": "uint8", "path": str(writing.path)}
    router.script = [reply(30, 11, output_store_ref=envelope([segment], rows.shape))]
    task = asyncio.create_task(client.generate())
    while not router.requests:  # noqa: ASYNC110 - nothing tells that it has come
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert not task.done()
    writing.write([rows])
    assert np.array_equal((await task).routed_experts, rows)


async def test_a_file_of_another_shape_is_refused(router: ScriptedRouter, client: Client, store: StoreDir) -> None:
    path = put(store, expert_rows(6, 30).reshape(30, TOP_K, LAYERS))
    segment = router.put("ee" * 16, expert_rows(6, 30), path=str(path))
    router.script = [reply(20, 11, output_store_ref=envelope([segment], (30, *ROW)))]
    with pytest.raises(FormatError, match="holds uint8"):
        await client.generate()
    assert router.deleted == ["ee" * 16] and client.held == 0


@pytest.mark.parametrize("how", ["gone", "expired", "cut", "500"])
async def test_an_attempt_whose_rows_are_lost_is_dropped_whole_and_made_again(router: ScriptedRouter, client: Client, how: str) -> None:
    rows, first = two_legs(router)
    second = reply(50, 12, output_store_ref=envelope([router.put("ff" * 16, rows)], rows.shape))
    router.break_fetch["bb" * 16] = how
    router.script = [first, second]
    got = await client.generate()
    assert got.attempts == 2 and np.array_equal(got.routed_experts, rows)
    assert sorted(router.deleted) == ["aa" * 16, "bb" * 16, "ff" * 16] and not router.objects and client.held == 0


@pytest.mark.parametrize(("how", "error"), [("gone", RowsGone), ("cut", FetchFailed)])
async def test_the_last_attempts_loss_is_told(router: ScriptedRouter, client: Client, how: str, error: type[Exception]) -> None:
    _, body = two_legs(router)
    router.script = [body]
    router.break_fetch["aa" * 16] = how
    with pytest.raises(error, match="aaaa"):
        await client.generate()
    assert len(router.requests) == 3 and client.held == 0


@pytest.mark.parametrize(("how", "error"), [("denied", AccessDenied), ("flip", FormatError)])
async def test_what_another_attempt_would_not_mend_is_told_at_once(
    router: ScriptedRouter, client: Client, how: str, error: type[Exception]
) -> None:
    _, body = two_legs(router)
    router.script = [body]
    router.break_fetch["bb" * 16] = how
    with pytest.raises(error):
        await client.generate()
    assert len(router.requests) == 1 and sorted(router.deleted) == ["aa" * 16, "bb" * 16]


async def test_busy_answers_are_waited_for_and_refusals_are_not(router: ScriptedRouter, client: Client) -> None:
    router.script = [(503, {"retry-after": "0"}), (429, {}), reply(3, 2)]
    got = await client.generate()
    assert got.attempts == 3 and got.routed_experts is None and got.text == "abc" and got.output_ids == [0, 1]
    router.script = [(400, {})]
    with pytest.raises(RequestFailed) as failed:
        await client.generate()
    assert failed.value.status == 400 and len(router.requests) == 4
    router.script = [(502, {})]
    with pytest.raises(RequestFailed) as failed:
        await client.generate()
    assert failed.value.status == 502 and len(router.requests) == 7


async def test_a_cancelled_load_releases_what_it_did_not_read(router: ScriptedRouter, client: Client) -> None:
    _, body = two_legs(router)
    fetching = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        fetching.set()
        await asyncio.sleep(60)
        raise AssertionError

    router.script = [body]
    router.get_hook = hang
    task = asyncio.create_task(client.generate())
    await fetching.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(router.deleted) == ["aa" * 16, "bb" * 16] and client.held == 0


async def test_closing_releases_what_was_kept(router: ScriptedRouter) -> None:
    _, body = two_legs(router)
    router.script = [body]
    async with Client(router.url) as client:
        got = await client.generate(keep=True)
        assert not router.deleted and client.held == 1 and got.reference is not None
    assert sorted(router.deleted) == ["aa" * 16, "bb" * 16]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 3, 41])
async def test_in_line_rows_are_cut_out_in_any_chunking(router: ScriptedRouter, client: Client, size: int, count: int) -> None:
    rows = expert_rows(7, count)
    body = reply(count, 1, routed_experts=text(rows), note='a "routed_experts": "quoted" and a backslash \\')
    body["text"] = '"routed_experts":"AAAA" and more "'
    router.script = [drip(orjson.dumps(body, option=orjson.OPT_INDENT_2 if count == 3 else 0), size)]
    got = await client.generate(input_ids=[1] * count)
    assert np.array_equal(got.routed_experts, rows) and got.reference is None
    assert "routed_experts" not in got.meta_info and got.meta_info["note"] == body["meta_info"]["note"]
    assert got.text == body["text"] and got.output_ids == [0]


async def test_in_line_rows_without_a_known_shape_are_flat(router: ScriptedRouter) -> None:
    rows = expert_rows(8, 20)
    router.script = [reply(15, 11, routed_experts=text(rows[5:]))]
    async with Client(router.url, transport="inline", retries=0) as client:
        with pytest.raises(FormatError, match="25 rows"):
            await client.generate(input_ids=[1])
        router.script = [reply(15, 11, routed_experts=text(rows[5:]))]
        got = await client.generate(input_ids=[1], routed_experts_start_len=10)
    assert np.array_equal(got.routed_experts, rows[5:].reshape(15, -1))
    assert "x-r3-transport" not in router.requests[0][1]


async def test_an_engines_own_dtype_is_honoured(router: ScriptedRouter, client: Client) -> None:

    rows = expert_rows(9, 10, 512).astype("<u2")
    body = reply(10, 1, routed_experts=base64.b64encode(rows.tobytes()).decode(), routed_experts_dtype="uint16")
    router.script = [body]
    got = await client.generate()
    assert got.routed_experts is not None and got.routed_experts.dtype == np.uint16 and np.array_equal(got.routed_experts, rows)


@pytest.mark.parametrize("bad", ["A", "AAA", "AA=A", "AAAA=", "AA==AAAA", "A*AA", "AAAAA===", "=AAA"])
async def test_text_that_is_not_base64_is_refused(router: ScriptedRouter, client: Client, bad: str) -> None:
    router.script = [reply(1, 1, routed_experts=bad)]
    with pytest.raises(FormatError):
        await client.generate()


async def test_an_empty_payload_has_no_rows(router: ScriptedRouter, client: Client) -> None:
    router.script = [reply(1, 1, routed_experts="")]
    got = await client.generate(routed_experts_start_len=1)
    assert got.routed_experts is not None and got.routed_experts.shape == (0, *ROW)


async def test_batches_chat_and_samples_each_have_their_rows(router: ScriptedRouter, client: Client) -> None:
    rows = [expert_rows(10 + i, 6) for i in range(3)]
    names = [f"{i:032x}" for i in range(3)]
    refs = [envelope([router.put(names[i], rows[i])], rows[i].shape) for i in range(3)]
    router.script = [[reply(5, 2, output_store_ref=ref) for ref in refs]]
    got = await client.generate(input_ids=[[1], [2], [3]])
    assert len(got) == 3
    for sample, expected in zip(got, rows, strict=True):
        assert np.array_equal(sample.routed_experts, expected)
    refs = [envelope([router.put(names[i], rows[i])], rows[i].shape) for i in range(2)]
    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}
    router.script = [{"choices": [choice | {"index": i, "meta_info": {"output_store_ref": refs[i]}} for i in range(2)], "usage": {}}]
    got = await client.chat(messages=[], n=2, return_meta_info=True)
    assert [s.text for s in got] == ["hi", "hi"] and router.requests[-1][0] == "/v1/chat/completions"
    assert all(np.array_equal(s.routed_experts, r) for s, r in zip(got, rows[:2], strict=True))
    ref = envelope([router.put(names[2], rows[2])], rows[2].shape)
    router.script = [{"choices": [choice | {"index": 0}], "sglext": {"output_store_ref": ref}, "usage": {}}]
    assert np.array_equal((await client.chat(messages=[])).routed_experts, rows[2])
    assert not router.objects


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize("form", ["ref", "inline"])
async def test_a_streams_rows_come_with_its_last_event(router: ScriptedRouter, client: Client, size: int, form: str) -> None:
    rows = expert_rows(20, 13)
    meta: dict[str, Any] = {"routed_experts": text(rows)}
    if form == "ref":
        meta = {"output_store_ref": envelope([router.put("ab" * 16, rows)], rows.shape)}
    events = [reply(12, 1), reply(12, 2, **meta)]
    raw = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + b": ping\n\ndata: [DONE]\n\n"
    router.script = [drip(raw, size, "text/event-stream")]
    got = [event async for event in client.stream("/generate", {"input_ids": [1]})]
    assert [len(event.output_ids) for event in got] == [1, 2]
    assert got[0].routed_experts is None and np.array_equal(got[1].routed_experts, rows)
    assert router.requests[0][2]["stream"] is True and client.held == 0


async def test_a_stream_that_breaks_off_is_told_and_made_again_only_before_its_first_event(router: ScriptedRouter, client: Client) -> None:
    event = b"data: " + orjson.dumps(reply(12, 1)) + b"\n\n"
    router.script = [drip(event, 100, "text/event-stream")]
    got = []
    with pytest.raises(RequestFailed, match="DONE"):
        async for one in client.stream("/generate", {}):
            got.append(one)  # noqa: PERF401 - what came before the failure counts
    assert len(got) == 1 and len(router.requests) == 1
    router.script = [(503, {}), drip(event + b"data: [DONE]\n\n", 100, "text/event-stream")]
    assert len([e async for e in client.stream("/generate", {})]) == 1
    assert len(router.requests) == 3


async def test_a_plug_ins_descriptor_is_understood_without_a_router(router: ScriptedRouter, client: Client, store: StoreDir) -> None:

    rows = expert_rows(30, 25)
    path = put(store, rows)
    raw = Descriptor(f"r3://127.0.0.1:1/{path.stem}", 256, 0, 25, "uint8", *ROW, None, str(path), boot_id()).encode()
    router.script = [reply(20, 6, routed_experts=base64.b64encode(raw).decode())]
    got = await client.generate(keep=True)
    assert np.array_equal(got.routed_experts, rows)


BAD_REFERENCES: list[Any] = [
    {"handle": {"type": "mooncake"}, "fields": {"routed_experts": {"dtype": "int32", "shape": [1, 1, 1]}}},
    {"handle": {"type": "r3router", "v": 2, "segments": []}, "fields": {"routed_experts": {"dtype": "uint8", "shape": [0, 1, 1]}}},
    envelope([], (3, 1, 1)),
    envelope([{"uri": "r3://a:1/x", "offset": 256, "pos": 0, "rows": 3, "dtype": "uint8"}] * 2, (6, 1, 1)),
    envelope([{"uri": "r3://a:1/x", "offset": 256, "pos": 0, "rows": 3, "dtype": "int32"}], (3, 1, 1)),
    envelope([{"uri": "r3://a:1/x", "offset": 256, "pos": 0, "rows": 3, "dtype": "float16"}], (3, 1, 1)),
    envelope([{"uri": "r3://a:1/x", "pos": 0, "rows": 3, "dtype": "uint8"}], (3, 1, 1)),
    envelope([{"uri": "r3://a:1/x", "offset": 0, "pos": 0, "rows": -3, "dtype": "uint8"}], (-3, 1, 1)),
]


@pytest.mark.parametrize("how", ["descriptor", "in-line"])
async def test_rows_of_the_indexer_come_beside_the_experts(router: ScriptedRouter, client: Client, store: StoreDir, how: str) -> None:
    experts = expert_rows(5, 25)
    indexer = np.random.default_rng(6).integers(0, 60_000, (25, 2, 64), dtype=np.int32)

    def field(rows: Any, dtype: str) -> str:
        if how == "in-line":
            return text(rows)
        path = put(store, rows, dtype=dtype)
        shape = (rows.shape[1], rows.shape[2])
        raw = Descriptor(f"r3://127.0.0.1:1/{path.stem}", 256, 0, len(rows), dtype, *shape, None, str(path), boot_id()).encode()
        return base64.b64encode(raw).decode()

    router.script = [reply(20, 6, routed_experts=field(experts, "uint8"), indexer_topk=field(indexer, "uint16"))]
    got = await client.generate(input_ids=[1], return_routed_experts=True, return_indexer_topk=True)
    assert np.array_equal(got.routed_experts, experts)  # type: ignore[arg-type]
    found = got.payloads["indexer_topk"].array
    assert found is not None and np.array_equal(found.reshape(indexer.shape), indexer)
    assert client.held == 0
    assert "indexer_topk" not in got.meta_info, "no text is left in the reply"


@pytest.mark.parametrize("bad", BAD_REFERENCES)
async def test_references_that_do_not_fit_together_are_refused(router: ScriptedRouter, client: Client, bad: Any) -> None:
    with pytest.raises(FormatError):
        Reference.parse(bad)
    router.script = [
        [reply(5, 2, output_store_ref=envelope([router.put("cd" * 16, expert_rows(1, 6))], (6, *ROW))), reply(1, 1, output_store_ref=bad)]
    ]
    with pytest.raises(FormatError):
        await client.generate()
    # The sound sample of the same reply is released all the same.
    while not router.deleted:  # noqa: ASYNC110 - nothing tells that it has come
        await asyncio.sleep(0.001)
    assert router.deleted == ["cd" * 16]


async def test_a_thousand_samples_leave_nothing(router: ScriptedRouter) -> None:
    rows = expert_rows(40, 8)
    async with Client(router.url, connections=32) as client:

        async def one(i: int) -> None:
            assert np.array_equal((await client.generate(input_ids=[i])).routed_experts, rows)

        async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            segment = router.put(f"{body['input_ids'][0]:032x}", rows)
            return web.Response(body=orjson.dumps(reply(7, 2, output_store_ref=envelope([segment], rows.shape))))

        router.script = [answer]
        for start in range(0, 1000, 100):
            await asyncio.gather(*(one(i) for i in range(start, start + 100)))
        assert client.held == 0
    assert not router.objects and len(router.deleted) == 1000
