"""The virtual environment that runs real SGLang on a CPU: built once, kept, and rebuilt when this file's pins change.

torch and SGLang are large (about 5 GB where only the CUDA build of torch can be had), so they live apart from everything else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ENGINE = HERE / "engine"
VERSION = os.environ.get("R3ROUTER_SGLANG_VERSION", "0.5.23")
PREFILL_SENDS_ROWS = tuple(int(part) for part in VERSION.split(".")[:3]) >= (0, 5, 18)
"""Prefill of 0.5.12.post1 and 0.5.17 returns no R3 at all; 0.5.23's does. Between them nothing was run."""
NO_BUFFER = (f"--mamba-{'radix-cache' if PREFILL_SENDS_ROWS else 'scheduler'}-strategy", "no_buffer")
"""State without extra buffers, by the release's name of the flag."""
TORCH = "torch==2.13.0"
WITHOUT_DEPENDENCIES = {
    "0.5.23": (
        "sglang==0.5.23",
        "torchvision==0.28.0",
        "compressed-tensors==0.18.0",
        "xgrammar==0.2.7",
        "apache-tvm-ffi==0.1.11",
        "nixl==1.5.1",
        "nixl-cu13==1.5.1",
    ),
}


def _folder() -> Path:
    cache = os.environ.get("R3ROUTER_CACHE")
    return Path(cache) / f"sglang-{VERSION}" if cache else HERE.parent.parent / f".venv-sglang-{VERSION}"


def python() -> Path:
    """The interpreter of the environment, which is built when it is missing. Raises with the installer's words when it cannot be."""
    given = os.environ.get("R3ROUTER_SGLANG_PYTHON")
    if given:
        return Path(given)
    folder = _folder()
    pins = (ENGINE / "requirements.txt").read_text() + TORCH + repr(WITHOUT_DEPENDENCIES[VERSION])
    stamp = folder / f".pins-{hashlib.sha256(pins.encode()).hexdigest()[:16]}"
    if not stamp.exists():
        began = time.monotonic()
        print(f"building the SGLang {VERSION} environment in {folder} (some minutes)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, TORCH])
        _run([*pip, "-r", str(ENGINE / "requirements.txt"), TORCH])
        _run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES[VERSION]])
        stamp.touch()
        print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    return folder / "bin" / "python"


def versions() -> dict[str, str]:
    """Releases of the packages that matter, in the environment that runs the engines."""
    names = ("sglang", "torch", "transformers", "nixl")
    code = f"import importlib.metadata as m; print(*(m.version(name) for name in {names}))"
    done = subprocess.run([str(python()), "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def models() -> Path:
    """A folder with the tiny models `qwen3_5_moe` (hybrid) and `qwen3_moe`, made when missing."""
    given = os.environ.get("R3ROUTER_SGLANG_MODELS")
    folder = Path(given) if given else _folder().parent / "sglang-models"
    if not (folder / "qwen3_5_moe" / "config.json").exists():
        _run([str(python()), str(ENGINE / "make_model.py"), str(folder)])
    return folder


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the SGLang environment could not be built: {' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
