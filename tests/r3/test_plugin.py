"""The plug-in without an engine: the writing thread, its guard, the agent's keeper, and the hooks around stand-ins of functions of SGLang.

Against real engines: `tests/sglang/test_plugin.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3router.agent.counts import plugin_lines
from r3router.plugin import hooks as hooks_module
from r3router.plugin.hooks import Hooks, State
from r3router.plugin.keeper import Keeper
from r3router.plugin.runtime import Gathered, Runtime, dtype_of
from r3router.plugin.settings import Settings, size
from r3router.plugin.writer import Job, Writer
from r3router.r3 import open_rows
from r3router.r3.descriptor import Descriptor
from r3router.r3.store import StoreDir, new_header

from .rows import LAYERS, TOP_K, expert_rows


def eventually(done: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def header(rows: int, dtype: str = "uint8") -> Any:
    return new_header(rows, LAYERS, TOP_K, dtype, start=0, expires_s=60, rid="r", weight_version="")


def test_rows_are_gathered_by_slot_in_the_order_of_the_sequence(store: StoreDir) -> None:
    buffer = expert_rows(1, 5000)
    slots = np.random.default_rng(1).permutation(5000)[:3000]
    writing = store.reserve(header(3000))
    writer = Writer(store, 8)
    writer.submit(Job(writing, buffer, slots))
    assert writer.drain()
    _, rows = open_rows(writing.path)
    assert np.array_equal(rows, buffer[slots]) and (writer.written, writer.failed, writer.waits) == (1, 0, 0)


class Held:
    """Holds the writing thread up until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        whole = Writer._whole

        def wait(writer: Writer, job: Job) -> Iterator[Any]:
            assert self.go.wait(30)
            yield from whole(writer, job)

        monkeypatch.setattr(Writer, "_whole", wait)


def test_the_engine_waits_only_for_slots_that_are_still_to_be_read(store: StoreDir, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    buffer = expert_rows(2, 100)
    expected = buffer[10:20].copy()
    writer = Writer(store, 8)
    writing = store.reserve(header(10))
    writer.submit(Job(writing, buffer, np.arange(10, 20)))
    # Others may be written at once, in this buffer and in another.
    writer.guard(buffer, np.array([0, 9, 20, 99]))
    writer.guard(expert_rows(3, 100), np.array([15]))
    assert writer.waits == 0
    overwritten = threading.Event()

    def engine() -> None:
        writer.guard(buffer, np.array([3, 15]))
        buffer[15] = 255
        overwritten.set()

    threading.Thread(target=engine, daemon=True).start()
    assert not overwritten.wait(0.1) and writer.waits == 1
    held.go.set()
    assert overwritten.wait(30) and writer.drain()
    assert np.array_equal(open_rows(writing.path)[1], expected)


def test_rows_that_were_overwritten_all_the_same_never_pass(store: StoreDir, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr("r3router.plugin.writer.WAIT_SECONDS", 0.05)
    buffer = expert_rows(2, 100)
    writer = Writer(store, 8)
    writing = store.reserve(header(10))
    writer.submit(Job(writing, buffer, np.arange(10, 20)))
    writer.guard(buffer, np.array([15]))
    buffer[15] = 255
    held.go.set()
    assert writer.drain(30) and writer.failed == 1
    assert not writing.path.exists() and "overwrote" in writing.path.with_suffix(".err").read_text()
    monkeypatch.undo()
    # The next ones are not touched by it.
    writing = store.reserve(header(10))
    writer.submit(Job(writing, buffer, np.arange(10)))
    assert writer.drain(30) and np.array_equal(open_rows(writing.path)[1], buffer[:10])


def test_the_comparison_finds_rows_of_another_request(store: StoreDir, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    buffer = expert_rows(2, 100)
    writer = Writer(store, 8)
    sound, spoiled = store.reserve(header(10)), store.reserve(header(10))
    for writing, first in ((sound, 0), (spoiled, 50)):
        slots = np.arange(first, first + 10)
        writer.submit(Job(writing, buffer, slots, buffer[slots]))
    # An engine that does not ask.
    buffer[55] += 1
    held.go.set()
    assert writer.drain() and (writer.written, writer.failed) == (1, 1)
    assert sound.path.exists() and not spoiled.path.exists()


def test_two_requests_that_share_a_prefix_release_its_slots_together(store: StoreDir, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    buffer = expert_rows(2, 100)
    writer = Writer(store, 8)
    for first in (0, 5):
        writer.submit(Job(store.reserve(header(10)), buffer, np.arange(first, first + 10)))
    held.go.set()
    assert writer.drain() and writer.written == 2
    assert all(not counts.any() for counts in writer._reads.values())


def test_an_id_over_the_dtype_is_a_told_failure(store: StoreDir) -> None:
    buffer = expert_rows(1, 10)
    buffer[7, 0, 0] = 300
    writing = store.reserve(header(10))
    writer = Writer(store, 8)
    writer.submit(Job(writing, buffer, None))
    assert writer.drain() and writer.failed == 1
    assert "300" in writing.path.with_suffix(".err").read_text()


@pytest.mark.parametrize(
    ("text", "expected"), [("16GiB", 16 << 30), ("512M", 512 << 20), ("4096", 4096), ("1.5k", 1536), ("2 TB", 2 << 40)]
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert size(text) == expected


def test_settings_come_from_variables_and_wrong_ones_are_told() -> None:
    got = Settings.read({"R3ROUTER_PLUGIN_BYTES": "1GiB", "R3ROUTER_AGENT_PORT": "9400", "R3ROUTER_PLUGIN_EXPIRES_S": "30"})
    assert (got.cap(), got.agent_port, got.expires_s, got.enabled) == (1 << 30, 9400, 30.0, True)
    for name, value in (
        ("R3ROUTER_PLUGIN_BYTES", "lots"),
        ("R3ROUTER_PLUGIN", "maybe"),
        ("R3ROUTER_AGENT_PORT", "x"),
        ("R3ROUTER_PLUGIN_GID", "staff"),
    ):
        with pytest.raises(ValueError, match=name):
            Settings.read({name: value})


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({"num_experts": 128}, "uint8"), ({"n_routed_experts": 384}, "uint16"), ({"num_local_experts": 8}, "uint8"), ({}, "int32")],
)
def test_the_models_number_of_experts_decides_the_dtype(config: dict[str, int], dtype: str) -> None:
    assert dtype_of(types.SimpleNamespace(hf_text_config=types.SimpleNamespace(**config))) == dtype


class Tensor:
    """As much of torch's tensor as the hooks touch."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        self.shape = self.array.shape
        self.ndim = self.array.ndim

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self.array

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key])


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch")
    module.uint8, module.int32 = np.uint8, np.int32  # type: ignore[attr-defined]
    module.frombuffer = lambda raw, dtype: Tensor(np.frombuffer(raw, dtype))  # type: ignore[attr-defined]
    module.empty = lambda shape, dtype: Tensor(np.empty(shape, dtype))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(hooks_module, "_guarded", lambda: True)


class Scheduler:
    """Collects as SGLang's does: through the capturer's `get_topk`, with a check of the number of rows."""

    def __init__(self, hooks: Hooks, *, streams: bool = True) -> None:
        self.hooks = hooks
        self.buffer = expert_rows(7, 200)
        self.host_cache = types.SimpleNamespace(buffer=Tensor(self.buffer))
        # Request 3's tokens lie in these slots.
        table = np.zeros((4, 300), np.int64)
        table[3, :150] = np.random.default_rng(3).permutation(200)[:150]
        self.table = table
        self.pool = types.SimpleNamespace(req_to_token=Tensor(table))
        sender = types.SimpleNamespace(socket=object() if streams else None)
        self.output_streamer = types.SimpleNamespace(send_to_detokenizer=sender)
        self.model_config = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(num_experts=256))
        self.gathers = 0

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Tensor:
        self.gathers += 1
        return Tensor(self.buffer[self.table[req_pool_idx, min(start_len, seqlen - 1) : seqlen - 1]])

    def _collect(self, owner: Any, req: Any) -> None:
        if not req.return_routed_experts:
            return
        hooked = lambda *a, **k: self.hooks.get_topk(type(self).get_topk, self, *a, **k)  # noqa: E731
        req.routed_experts = hooked(req_pool_idx=3, seqlen=req.seqlen, req_to_token_pool=self.pool, start_len=req.routed_experts_start_len)
        assert req.routed_experts.shape[0] == max(0, req.seqlen - 1 - req.routed_experts_start_len)

    def finish(self, **more: Any) -> Any:
        req = types.SimpleNamespace(
            rid="r-1", return_routed_experts=True, routed_experts=None, routed_experts_start_len=0, seqlen=100, retraction_count=0
        )
        vars(req).update(more)
        self.hooks.collect(self._collect, self, req)
        return req


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    """A runtime whose agent is said to live."""
    monkeypatch.setattr(Keeper, "start", lambda self: None)
    monkeypatch.setattr(Keeper, "alive", property(lambda self: True))
    made = State(Settings(parent=tmp_path, cap_bytes=1 << 20, agent_uri="10.1.2.3:9400"))
    made.runtime = Runtime(made.settings)
    yield made
    made.runtime.store.remove()


def descriptor(req: Any) -> Descriptor:
    return Descriptor.decode(req.routed_experts.numpy().tobytes())


@pytest.mark.parametrize("start", [0, 40, 98])
def test_a_descriptor_takes_the_payloads_place_and_the_engine_gathers_nothing(torch: None, state: State, start: int) -> None:
    scheduler = Scheduler(Hooks(state))
    req = scheduler.finish(routed_experts_start_len=start)
    got = descriptor(req)
    assert state.runtime is not None and state.runtime.writer.drain()
    assert scheduler.gathers == 0 and (got.rows, got.pos, got.dtype, got.offset) == (99 - start, start, "uint8", 256)
    assert got.uri == f"r3://10.1.2.3:9400/{Path(str(got.path)).stem}" and req.routed_experts.array.nbytes < 400
    head, rows = open_rows(str(got.path))
    assert np.array_equal(rows, scheduler.buffer[scheduler.table[3, start:99]]) and head.start == start and head.rid == "r-1"


def test_without_the_guard_the_engines_own_gather_is_narrowed(torch: None, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks_module, "_guarded", lambda: False)
    scheduler = Scheduler(Hooks(state))
    got = descriptor(scheduler.finish())
    assert state.runtime is not None and state.runtime.writer.drain()
    assert scheduler.gathers == 1 and np.array_equal(open_rows(str(got.path))[1], scheduler.buffer[scheduler.table[3, :99]])


def inline(scheduler: Scheduler, req: Any) -> None:
    assert np.array_equal(req.routed_experts.array, scheduler.buffer[scheduler.table[3, : req.seqlen - 1]])
    assert scheduler.gathers >= 1


def test_whatever_stands_in_the_way_goes_in_line_and_is_logged(
    torch: None, state: State, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = state.runtime
    assert runtime is not None
    scheduler = Scheduler(Hooks(state))
    inline(scheduler, scheduler.finish(retraction_count=1))
    assert "retracted" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "alive", property(lambda self: False))
        inline(scheduler, scheduler.finish())
        assert "agent does not answer" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(runtime.store, "cap", 4096)
        scheduler.finish(seqlen=5)
        inline(scheduler, scheduler.finish())
        assert "arena is full" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "publish", lambda *a, **k: 1 / 0)
        inline(scheduler, scheduler.finish())
        assert "the hook failed (ZeroDivisionError)" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "full", lambda self: True)
        inline(scheduler, scheduler.finish())
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "output_streamer", None)
        inline(scheduler, scheduler.finish())
    assert sum(runtime.inline.values()) == 6 and runtime.by_reference == 1


async def test_the_agent_tells_what_the_plug_in_counts(torch: None, state: State) -> None:
    runtime = state.runtime
    assert runtime is not None
    scheduler = Scheduler(Hooks(state))
    scheduler.finish()
    scheduler.finish(retraction_count=1)
    scheduler.finish(retraction_count=1)
    assert runtime.writer.drain()
    runtime.dump()
    lines = plugin_lines([runtime.store.path, runtime.store.path / "missing"])
    labels = f'{{directory="{runtime.store.path.name}"'
    for line in (
        f"r3router_plugin_by_reference_total{labels}}} 1",
        f"r3router_plugin_written_bytes_total{labels}}} {99 * LAYERS * TOP_K}",
        f"r3router_plugin_arena_bytes{labels}}} 4096",
        f'r3router_plugin_inline_total{labels},reason="the request was retracted"}} 2',
    ):
        assert line in lines


def test_no_rows_stay_an_empty_payload(torch: None, state: State) -> None:
    req = Scheduler(Hooks(state)).finish(seqlen=1)
    assert req.routed_experts.shape == (0, LAYERS, TOP_K)


class Prefill:
    """A prefill scheduler of 0.5.11 to 0.5.17: a finished transfer's slots are freed and its reply is sent without R3."""

    def __init__(self, hooks: Hooks, *, parts: bool) -> None:
        self.hooks = hooks
        self.scheduler = Scheduler(hooks)
        self.output_streamer = self.scheduler.output_streamer
        self.freed: list[Any] = []
        collect = lambda req: hooks.collect(self.scheduler._collect, self.scheduler, req)  # noqa: E731
        if parts:
            self.batch_result_processor = types.SimpleNamespace(_maybe_collect_routed_experts=collect)
        else:
            self.maybe_collect_routed_experts = collect

    def request(self, **more: Any) -> Any:
        made = types.SimpleNamespace(
            rid="p-1", return_routed_experts=True, routed_experts=None, routed_experts_start_len=0, seqlen=100, retraction_count=0
        )
        vars(made).update(more)
        return made

    def free(self, req: Any) -> None:
        """`release_kv_cache` behind the hook: from here on the slots are others'."""
        self.hooks.release(lambda request: self.freed.append((request, request.routed_experts)), req)

    def look(self, *done: Any) -> None:
        """`process_disagg_prefill_inflight_queue` behind the hook."""
        self.hooks.in_flight(lambda scheduler: [self.free(req) for req in done], self)


@pytest.mark.parametrize("parts", [False, True], ids=["mixin", "parts"])
def test_prefill_engines_that_collect_no_rows_have_them_collected_before_their_slots_are_freed(
    torch: None, state: State, parts: bool
) -> None:
    prefill = Prefill(Hooks(state), parts=parts)
    first, second, plain = prefill.request(), prefill.request(seqlen=60, routed_experts_start_len=20), prefill.request()
    plain.return_routed_experts = False
    prefill.look(first, second, plain)
    assert state.runtime is not None and state.runtime.writer.drain()
    assert [req for req, _ in prefill.freed] == [first, second, plain]
    for req, rows in prefill.freed[:2]:
        assert rows is not None and rows is req.routed_experts, "the rows are there when the slots are freed"
        got = descriptor(req)
        table = prefill.scheduler.table[3, req.routed_experts_start_len : req.seqlen - 1]
        assert np.array_equal(open_rows(str(got.path))[1], prefill.scheduler.buffer[table]) and got.pos == req.routed_experts_start_len
    assert prefill.freed[2][1] is None, "who asked for no rows gets none"


def test_slots_that_are_freed_elsewhere_are_left_alone(torch: None, state: State, caplog: pytest.LogCaptureFixture) -> None:
    prefill = Prefill(Hooks(state), parts=False)
    aborted = prefill.request()
    prefill.free(aborted)
    assert prefill.freed == [(aborted, None)], "an abort, a retraction: nothing is collected outside of the look at transfers"
    have = prefill.request(routed_experts="there")
    prefill.look(have)
    assert have.routed_experts == "there", "an engine that collects itself is not asked twice"
    prefill.maybe_collect_routed_experts = lambda req: 1 / 0
    broken = prefill.request()
    prefill.look(broken)
    assert prefill.freed[-1] == (broken, None) and "cannot be collected on prefill" in caplog.text, "the engine goes on"
    prefill.free(prefill.request())
    assert prefill.freed[-1][1] is None, "the look is over, whatever happened in it"


def test_ranks_that_do_not_stream_gather_nothing(torch: None, state: State) -> None:
    scheduler = Scheduler(Hooks(state), streams=False)
    assert scheduler.finish().routed_experts is None and scheduler.gathers == 0


def test_requests_without_r3_are_left_alone(torch: None, state: State) -> None:
    scheduler = Scheduler(Hooks(state))
    assert scheduler.finish(return_routed_experts=False).routed_experts is None and scheduler.gathers == 0


def test_a_plug_in_that_cannot_start_leaves_the_engine_as_it_was(torch: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = State(Settings(parent=tmp_path / "missing" / "\0"))
    scheduler = Scheduler(Hooks(state))
    for _ in range(2):
        inline(scheduler, scheduler.finish())
    assert caplog.text.count("the plug-in cannot start") == 1


def test_the_step_after_a_finish_waits_before_it_overwrites(torch: None, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    hooks = Hooks(state)
    scheduler = Scheduler(hooks)
    expected = scheduler.buffer[scheduler.table[3, :99]].copy()
    got = descriptor(scheduler.finish())
    slot = int(scheduler.table[3, 50])
    output = types.SimpleNamespace(host_cache=scheduler.host_cache, out_cache_loc=Tensor(np.array([slot])))

    def scatter(output: Any) -> None:
        scheduler.buffer[slot] = 255

    done = threading.Event()
    threading.Thread(target=lambda: (hooks.finalize(scatter, output), done.set()), daemon=True).start()
    assert not done.wait(0.1)
    held.go.set()
    assert done.wait(30) and state.runtime is not None and state.runtime.writer.drain()
    assert np.array_equal(open_rows(str(got.path))[1], expected) and scheduler.buffer[slot, 0, 0] == 255


def test_rows_do_not_pass_when_the_guard_fails(
    torch: None, state: State, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held(monkeypatch)
    hooks = Hooks(state)
    got = descriptor(Scheduler(hooks).finish())
    gone = types.SimpleNamespace(host_cache=types.SimpleNamespace(buffer=None), out_cache_loc=None)
    assert hooks.finalize(lambda output: "done", gone) == "done" and "will not pass" in caplog.text
    held.go.set()
    assert state.runtime is not None and state.runtime.writer.drain() and state.runtime.writer.failed == 1
    assert not Path(str(got.path)).exists()


def test_an_agent_that_is_killed_is_started_again_on_its_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    store = StoreDir(tmp_path / "r3router-kept", 1 << 20)
    keeper = Keeper(Settings(parent=tmp_path, agent_host="127.0.0.1", agent_port=port - 2), store.path, 2)
    assert keeper.uri == f"127.0.0.1:{port}" and not keeper.alive
    keeper.start()
    try:
        eventually(lambda: keeper.alive)
        first = keeper._process
        assert first is not None
        first.send_signal(signal.SIGKILL)
        eventually(lambda: not keeper.alive)
        eventually(lambda: keeper.alive)
        assert keeper.starts == 2 and keeper._process is not first and "ended with status -9" in caplog.text
        assert (store.path / "owner").read_text().startswith(f"{os.getpid()} ")
    finally:
        keeper._look = lambda: None  # type: ignore[method-assign]
        time.sleep(0.3)
        with contextlib.suppress(AttributeError):
            keeper._process.kill()  # type: ignore[union-attr]
            keeper._process.wait()  # type: ignore[union-attr]


def test_releases_that_are_not_known_are_refused_loudly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for release in ((0, 5, 10), (0, 5, 24), (0, 6, 0), None):
        monkeypatch.setattr(hooks_module, "version", lambda release=release: release)
        caplog.clear()
        hooks_module.register()
        assert "does not know SGLang" in caplog.text and caplog.records[0].levelname == "ERROR"


def test_gathered_rows_know_their_shape() -> None:
    buffer = expert_rows(1, 10)
    assert Gathered(buffer, None, 0).shape == (10, LAYERS, TOP_K)
    assert Gathered(buffer, np.arange(4), 0).shape == (4, LAYERS, TOP_K)
