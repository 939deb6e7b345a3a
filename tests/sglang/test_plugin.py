"""The plug-in in real engines: rows by reference are the unified engine's, and whatever fails leaves the engine as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from r3router.client import Client
from r3router.r3 import Reference, open_rows
from r3router.r3.descriptor import MAGIC, Descriptor
from r3router.r3.reader import Reader

from . import fleet
from .compare import plugin, rows
from .equality import generate, prompt
from .fleet import Process, Trio, post
from .plugin_pair import LAYERS, TOP_K, metric, raw, variables
from .stages import eventually
from .test_engine_facts import by_hand


@pytest.fixture(autouse=True)
def with_rows() -> Iterator[None]:
    """R3 is asked of every release: the plug-in collects it where prefill does not."""
    with plugin():
        yield


def read(reply: Any) -> np.ndarray:
    """Rows of a reply of one engine, `[tokens, 8]`, over HTTP from its agent."""

    async def get() -> np.ndarray:
        reference = Reference.of(Descriptor.decode(raw(reply)))
        async with aiohttp.ClientSession() as http:
            fetched = await Reader(http, map_files=False).read(reference)
            mapped = await Reader(http, verify_files=True).read(reference)
            assert np.array_equal(fetched, mapped) and fetched.dtype == mapped.dtype == np.uint8
            assert await Reader(http).release(reference)
        return mapped.astype(np.int32).reshape(len(mapped), -1)

    return asyncio.run(get())


@pytest.mark.parametrize(("length", "new"), [(5, 4), (40, 16), (300, 32), (1500, 8), (1, 2)])
def test_prefills_rows_then_decodes_tail_are_the_unified_rows(pair: Trio, length: int, new: int) -> None:
    body = generate(length, new)
    decode, prefill = by_hand(pair, body, {"routed_experts_start_len": length})
    unified = rows(post(f"{pair.unified.url}/generate", body)["meta_info"]["routed_experts"])
    assert len(prefill["meta_info"]["routed_experts"]) < 700
    left, right = read(prefill), read(decode)
    assert (len(left), len(right)) == (length, new - 1)
    assert np.array_equal(np.concatenate([left, right]), unified)


def test_the_descriptor_and_the_file_say_what_they_hold(pair: Trio) -> None:
    decode, _ = by_hand(pair, generate(40, 6), {"routed_experts_start_len": 30})
    got = Descriptor.decode(raw(decode))
    assert (got.pos, got.rows, got.layers, got.top_k, got.dtype, got.offset) == (30, 15, LAYERS, TOP_K, "uint8", 256)
    read_again = Path(str(got.path))
    eventually(read_again.exists, "the rows to be written")
    header, _ = open_rows(read_again)
    assert header.start == 30 and header.rid and header.expires_ms - header.created_ms == 600_000
    read(decode)
    assert not read_again.exists()


def test_many_at_once_get_the_rows_that_their_engine_had(pair: Trio) -> None:
    """The engines compare each row with a gather at the finish (R3ROUTER_PLUGIN_VERIFY): a batch of many does not compute, to the
    bit, what a unified engine computes for one, but no row may be another request's."""
    time.sleep(3)  # what was before has to be counted: counts are dumped four times a second
    before = {process.url: metric(process, "by_reference_total") for process in (pair.prefill, pair.decode)}

    def both(at: int) -> tuple[int, int]:
        length = 20 + 7 * (at % 16)
        decode, prefill = by_hand(pair, generate(length, 12), {"routed_experts_start_len": length})
        left, right = read(prefill), read(decode)
        return len(left) - length, len(right) - 11

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(both, range(64))) == {(0, 0)}
    for process in (pair.prefill, pair.decode):
        eventually(lambda process=process: metric(process, "by_reference_total") == before[process.url] + 64, "the counters to be told")
        assert metric(process, "failed_total") == 0 and metric(process, "inline_total") <= 8


def test_requests_without_r3_have_none(pair: Trio) -> None:
    body = generate(9, 4)
    del body["return_routed_experts"]
    for reply in by_hand(pair, body):
        assert "routed_experts" not in reply["meta_info"]


def agents(process: Process) -> list[int]:
    """Pids of an engine's agents."""
    if process.popen is None:
        pytest.skip("the engine was started by somebody else")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                session = int((Path("/proc") / str(parent) / "stat").read_text().rpartition(")")[2].split()[3])
            except (OSError, IndexError, ValueError):
                continue
            if b"agent" in command and b"--engine-pid" in command and session == process.popen.pid:
                found.append(int(entry.name))
    return found


def test_rows_go_in_line_while_the_agent_is_dead_and_by_reference_again_after_it(pair: Trio) -> None:
    body = generate(50, 5)
    (agent,) = agents(pair.prefill)
    unified = rows(post(f"{pair.unified.url}/generate", body)["meta_info"]["routed_experts"])
    os.kill(agent, signal.SIGKILL)
    time.sleep(0.5)
    _, prefill = by_hand(pair, body)
    assert not raw(prefill).startswith(MAGIC)
    assert np.array_equal(rows(prefill["meta_info"]["routed_experts"]), unified[:50])
    assert "the agent ended with status -9" in pair.prefill.text() and "go in-line" in pair.prefill.text()
    eventually(lambda: raw(by_hand(pair, body)[1]).startswith(MAGIC), "the agent to be back")
    assert np.array_equal(read(by_hand(pair, body)[1]), unified[:50])


def released(process: Process) -> bool:
    """Whether a reply comes by reference; its rows are read and let go."""
    reply = post(f"{process.url}/generate", generate(4, 2))
    if not raw(reply).startswith(MAGIC):
        return False
    read(reply)
    return True


def test_a_client_reads_a_single_engine_without_a_router(pair: Trio, tmp_path: Path) -> None:
    with fleet.engines(("unified", "plugin-small", {"variables": variables(tmp_path, R3ROUTER_PLUGIN_BYTES="16KiB")})) as (engine,):
        eventually(lambda: metric(engine, "agent_starts_total") == 1, "the agent to answer")
        eventually(lambda: released(engine), "rows by reference")

        async def ask() -> None:
            async with Client(engine.url, layers=LAYERS, top_k=TOP_K) as client:
                held = []
                # One page each: after the earlier ones, the arena of four is full.
                for at in range(6):
                    held.append(await client.generate(generate(30 + at, 4), keep=True))
                    expected = rows(post(f"{pair.unified.url}/generate", generate(30 + at, 4))["meta_info"]["routed_experts"])
                    assert np.array_equal(held[-1].routed_experts_int32().reshape(33 + at, -1), expected)
                assert [reply.reference is None for reply in held[4:]] == [True, True] and held[0].reference is not None
                assert "the arena is full" in engine.text()
                for reply in held:
                    await reply.release()
                assert (
                    await client.generate(input_ids=prompt(8), **{k: v for k, v in generate(8, 2).items() if k != "input_ids"})
                ).reference

        asyncio.run(ask())
        directory = next(line for line in engine.text().splitlines() if "R3 rows go by reference: " in line).split(": ")[1].split(",")[0]
        assert Path(directory).is_dir()
    # Its engine is gone and nothing is held: the agent ends and takes the directory with it, or the sweep of the next owner does.
    eventually(lambda: not list(Path(directory).glob("*.r3")), "the rows to be gone")
