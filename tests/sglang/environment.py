"""The virtual environment that runs real SGLang on a CPU: built once, kept, and rebuilt when this file's pins change.

torch and SGLang are large (about 5 GB where only the CUDA build of torch can be had), so they live apart from everything else.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ENGINE = HERE / "engine"
VERSION = os.environ.get("R3ROUTER_SGLANG_VERSION", "0.5.23")
_RELEASE = tuple(int(part) for part in VERSION.split(".")[:3])
PREFILL_SENDS_ROWS = _RELEASE >= (0, 5, 18)
"""Prefill of 0.5.12.post1 and 0.5.17 returns no R3 at all; 0.5.23's does. Between them nothing was run."""
OLD = _RELEASE < (0, 5, 13)
"""0.5.12.post1. Its prefill sends its front end tensors in place of lists of top logprobs and of chosen ids, and that process dies of
them; its chat has no `return_meta_info`; its `/v1/loads` dates no load; it has no switch that makes transfers fail."""
NO_BUFFER = (f"--mamba-{'radix-cache' if PREFILL_SENDS_ROWS else 'scheduler'}-strategy", "no_buffer")
"""State without extra buffers, by the release's name of the flag."""
TORCH = "torch==2.13.0" if VERSION == "0.5.23" else "torch==2.11.0"
_OF_TORCH_2_11 = (
    "torchvision==0.26.0",
    "compressed-tensors==0.20.1",
    "xgrammar==0.2.9",
    "apache-tvm-ffi==0.1.15.post2",
    "nixl==1.5.1",
    "nixl-cu13==1.5.1",
)
WITHOUT_DEPENDENCIES = {
    "0.5.12.post1": ("sglang==0.5.12.post1", *_OF_TORCH_2_11),
    "0.5.17": ("sglang==0.5.17", *_OF_TORCH_2_11),
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
INSTEAD = {
    # Later FastAPI keeps routes in a way that this release's middleware cannot read: every reply would be a 500.
    "0.5.12.post1": {"transformers": "==5.6.0", "tokenizers": "==0.22.2", "fastapi": "==0.136.1"},
    "0.5.17": {"transformers": "==5.12.1", "tokenizers": "==0.22.2"},
}
"""What a release needs in place of a line of `requirements.txt`, which is written for the newest."""


def requirements() -> str:
    """`requirements.txt` for this release."""
    instead = dict(INSTEAD.get(VERSION, {}))
    lines = []
    for line in (ENGINE / "requirements.txt").read_text().splitlines(keepends=True):
        name = re.match(r"[\w.-]*", line)
        pin = instead.pop(name[0], None) if name else None
        lines.append(line if pin is None or name is None else f"{name[0]}{pin}\n")
    assert not instead, f"{sorted(instead)} are not in requirements.txt"
    return "".join(lines)


def _folder() -> Path:
    cache = os.environ.get("R3ROUTER_CACHE")
    return Path(cache) / f"sglang-{VERSION}" if cache else HERE.parent.parent / f".venv-sglang-{VERSION}"


def python() -> Path:
    """The interpreter of the environment, which is built when it is missing. Raises with the installer's words when it cannot be."""
    given = os.environ.get("R3ROUTER_SGLANG_PYTHON")
    if given:
        return Path(given)
    folder = _folder()
    if VERSION not in WITHOUT_DEPENDENCIES:
        raise RuntimeError(f"no pins for SGLang {VERSION}: there are some for {', '.join(WITHOUT_DEPENDENCIES)}")
    pins = requirements() + TORCH + repr(WITHOUT_DEPENDENCIES[VERSION])
    stamp = folder / f".pins-{hashlib.sha256(pins.encode()).hexdigest()[:16]}"
    if not stamp.exists():
        began = time.monotonic()
        print(f"building the SGLang {VERSION} environment in {folder} (some minutes)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, TORCH])
        listed = folder / "requirements.txt"
        listed.write_text(requirements())
        _run([*pip, "-r", str(listed), TORCH])
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
