"""The plug-in's hooks on SGLang's own code, without a model: in the release of the engine tests, and in others that are at hand."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from . import environment
from .test_plugin import variables

OTHERS = [Path(p) for p in os.environ.get("R3ROUTER_SGLANG_OTHERS", "").split(os.pathsep) if p]
"""Interpreters of environments with other releases."""


@pytest.mark.parametrize("interpreter", [None, *OTHERS], ids=lambda p: "engines" if p is None else p.parts[-3])
def test_the_hooks_work_on_the_real_code(interpreter: Path | None, tmp_path: Path) -> None:
    script = environment.ENGINE / "plugin_hooks.py"
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | variables(tmp_path) | {"SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([str(interpreter or environment.python()), str(script)], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stdout.endswith("OK\n"), done.stdout[-3000:] + done.stderr[-6000:]
    print(done.stdout)
