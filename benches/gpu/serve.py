"""Starts SGLang's own server; its arguments go to SGLang unchanged. Spawned processes import this file again, as `__mp_main__`.

What is put in place before it, in each of its processes:
- dummy weights that make routing depend on token and context, the same in every engine (`weights`);
- with BENCH_ASIDE=FILE, the plug-in leaves rows in-line while FILE exists, so that one set of engines serves all columns. Prefill's rows
  are collected by the plug-in either way, where the release does not collect them itself;
- with BENCH_CPU=1, the stand-ins of the tests for a machine without a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
CPU = os.environ.get("BENCH_CPU") == "1"

if CPU:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "sglang" / "engine"))
    import cpu_kernels
    import nixl_dram

    cpu_kernels.install()
    nixl_dram.install()

GAIN = 0.3
"""Rows of a matrix have this norm, about: each layer then adds a few per cent to the residual stream, so that routing follows the token
first and its context second, and the rounding of one kernel or another does not grow from layer to layer until nothing can be compared."""


def weights() -> None:
    """Replaces SGLang's dummy weights, which are +-1e-3 everywhere."""
    from sglang.srt.model_loader import loader, weight_utils

    base = weight_utils.initialize_dummy_weights

    def wide(model: Any, *_: Any, **__: Any) -> None:
        base(model)
        import torch

        for at, (name, weight) in enumerate(sorted(model.state_dict().items())):
            if not torch.is_floating_point(weight):
                continue
            if weight.dim() == 1:
                # The norm of the delta nets multiplies by its weight; the others by one more than theirs.
                if name.endswith("linear_attn.norm.weight"):
                    weight.data.fill_(1.0)
                continue
            generator = torch.Generator(device=weight.device).manual_seed(at)
            limit = 1.0 if "embed" in name or name.endswith(("lm_head.weight", "mlp.gate.weight")) else GAIN * 3**0.5
            if "embed" not in name:
                limit /= weight.shape[-1] ** 0.5
            weight.data.uniform_(-limit, limit, generator=generator)

    weight_utils.initialize_dummy_weights = wide
    if hasattr(loader, "initialize_dummy_weights"):
        loader.initialize_dummy_weights = wide


def aside(flag: str) -> None:
    """Lets the plug-in leave rows in-line while the file exists."""
    from r3router.plugin.runtime import Runtime

    refusal = Runtime.refusal

    def refused(self: Runtime, request: Any) -> str | None:
        return "this column is in-line" if os.path.exists(flag) else refusal(self, request)  # noqa: PTH110 - for every finished request

    Runtime.refusal = refused  # type: ignore[method-assign]


weights()
if os.environ.get("BENCH_ASIDE"):
    aside(os.environ["BENCH_ASIDE"])

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
