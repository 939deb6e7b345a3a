"""Runs inside an engine's environment: SGLang's own plug-in loader, hook registry, capturer, collect method and base64, without a model.

The environment has the plug-in's entry point. Prints OK, or fails.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import shutil
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
with contextlib.suppress(ImportError):
    # As in serve.py; releases other than that of the engine tests are imported as they are.
    import cpu_kernels

    cpu_kernels.install()
import numpy as np
import psutil
import torch
from sglang.srt.plugins import load_plugins

LAYERS, TOP_K, SLOTS = 4, 2, 500
load_plugins()

from sglang.srt.managers.detokenizer_manager import DetokenizerManager  # noqa: E402
from sglang.srt.state_capturer.base import BaseTopkCapturer, TopkCaptureOutput  # noqa: E402

from r3router.plugin import hooks  # noqa: E402
from r3router.r3 import open_rows  # noqa: E402
from r3router.r3.descriptor import Descriptor  # noqa: E402

release = hooks.version()
print("SGLang", release, "guarded", hooks._guarded(), "prefill collects", hooks._prefill_collects())
assert hooks._guarded()

# The real capturer, with a buffer of ours: its own would pin memory.
capturer = object.__new__(BaseTopkCapturer)
capturer.host_cache = types.SimpleNamespace(buffer=torch.randint(0, 8, (SLOTS, LAYERS, TOP_K), dtype=torch.int32))
table = torch.zeros((4, 400), dtype=torch.int32)
table[2, :300] = torch.randperm(SLOTS)[:300].to(torch.int32)
pool = types.SimpleNamespace(req_to_token=table)

for name in hooks.COLLECT:
    module_name, _, rest = name.rpartition(".")
    module_name, _, class_name = module_name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        continue
    collect = getattr(getattr(module, class_name), rest)
module.get_global_experts_capturer = lambda: capturer


class Sender:
    socket = object()


def owner(**more: object) -> types.SimpleNamespace:
    config = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(num_experts=8))
    made = types.SimpleNamespace(
        req_to_token_pool=pool,
        model_config=config,
        send_to_detokenizer=Sender,
        output_streamer=types.SimpleNamespace(send_to_detokenizer=Sender),
    )
    vars(made).update(more)
    return made


def request(length: int = 100, start: int = 0, **more: object) -> types.SimpleNamespace:
    made = types.SimpleNamespace(
        rid="rid-1",
        return_routed_experts=True,
        routed_experts=None,
        routed_experts_start_len=start,
        origin_input_ids=[0] * (length - 4),
        output_ids=[0] * 4,
        output_ids_through_stop=[0] * 4,
        seqlen=length,
        cached_tokens=0,
        retraction_count=0,
        req_pool_idx=2,
        kv=types.SimpleNamespace(req_pool_idx=2),
    )
    vars(made).update(more)
    return made


def expected(start: int, end: int) -> np.ndarray:
    return capturer.host_cache.buffer[table[2, start:end].long()].numpy()


def text(req: types.SimpleNamespace) -> str:
    """The payload as the real detokenizer writes it; in older releases it is written by the same line elsewhere."""
    encode = getattr(DetokenizerManager, "_b64_encode_per_request", None)
    if encode is None:
        return base64.b64encode(req.routed_experts.numpy().tobytes()).decode()
    return str(encode([req.routed_experts])[0])


def by_reference(req: types.SimpleNamespace, start: int, end: int) -> None:
    written = text(req)
    assert len(written) < 700, len(written)
    got = Descriptor.decode(base64.b64decode(written))
    assert (got.pos, got.rows, got.dtype, got.layers, got.top_k) == (start, end - start, "uint8", LAYERS, TOP_K), got
    deadline = time.monotonic() + 30
    while not Path(str(got.path)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert np.array_equal(open_rows(str(got.path))[1], expected(start, end))


# The first one finds no agent: in-line, and the agent is started by it.
req = request()
collect(owner(), req)
assert np.array_equal(req.routed_experts.numpy(), expected(0, 99))
deadline = time.monotonic() + 120
while req.routed_experts.dtype != torch.uint8:
    assert time.monotonic() < deadline, "the agent does not come up"
    time.sleep(0.1)
    req = request()
    collect(owner(), req)
by_reference(req, 0, 99)
for start in (0, 40, 96):
    req = request(start=start)
    collect(owner(), req)
    by_reference(req, start, 99)

req = request(retraction_count=1)
collect(owner(), req)
assert np.array_equal(req.routed_experts.numpy(), expected(0, 99))

silent = types.SimpleNamespace(socket=None)
req = request()
collect(owner(send_to_detokenizer=silent, output_streamer=types.SimpleNamespace(send_to_detokenizer=silent)), req)
assert req.routed_experts is None

# A step that overwrites the finished request's slots at once, by the real method.
for _ in range(50):
    before = expected(0, 299).copy()
    req = request(300)
    collect(owner(), req)
    slots = table[2, :300].long()
    TopkCaptureOutput(
        out_cache_loc=slots, topk=torch.randint(0, 8, (300, LAYERS, TOP_K), dtype=torch.int32), host_cache=capturer.host_cache
    ).finalize()
    path = Path(str(Descriptor.decode(base64.b64decode(text(req))).path))
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert np.array_equal(open_rows(path)[1], before)

if not hooks._prefill_collects():
    prefill = importlib.import_module("sglang.srt.disaggregation.prefill")
    freed: list[object] = []
    success = prefill.KVPoll.Success
    poll = next(n for n in vars(prefill) if n.startswith("poll_and_all_reduce_attn"))
    setattr(prefill, poll, lambda *a, **k: [success])

    class Anything:
        def __getattr__(self, name: str) -> object:
            return lambda *a, **k: None

    # What frees the slots is behind the hook: it must see the rows already collected.
    original = prefill.release_kv_cache.__wrapped__
    original.__code__ = (lambda req, *a, **k: req.freed.append(req.routed_experts)).__code__
    original.__defaults__, original.__kwdefaults__ = None, None
    streamed: list[object] = []
    req = request(
        100,
        freed=[],
        time_stats=Anything(),
        disagg_kv_sender=Anything(),
        bootstrap_host="x",
        pending_bootstrap=False,
        return_logprob=False,
        finished_reason=None,
        metadata_buffer_index=-1,
    )
    mixin = prefill.SchedulerDisaggregationPrefillMixin
    names = {
        "disagg_prefill_inflight_queue": [req],
        "attn_cp_cpu_group": None,
        "attn_tp_cpu_group": None,
        "tree_cache": None,
        "enable_metrics": False,
        "stream_output": lambda reqs, *a: streamed.extend(reqs),
        "req_to_metadata_buffer_idx_allocator": Anything(),
        "pp_rank": 0,
    }
    scheduler = owner(**names)
    setattr(scheduler, rest, types.MethodType(collect, scheduler))
    # Releases with parts instead of mixins.
    scheduler.batch_result_processor = scheduler
    scheduler.output_streamer.stream_output = scheduler.stream_output
    done = mixin.process_disagg_prefill_inflight_queue(scheduler)
    assert done == [req] and streamed == [req] and req.freed[0] is not None
    by_reference(req, 0, 99)
    print("rows of prefill collected by the plug-in")

# The agent would go on until its rows expire.
for child in psutil.Process().children():
    child.kill()
shutil.rmtree(Path(str(Descriptor.decode(base64.b64decode(text(req))).path)).parent)
print("OK", flush=True)
os._exit(0)
