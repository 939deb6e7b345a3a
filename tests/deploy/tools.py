"""The programs that the tests of deploy/ run. `make deploy-check` brings them; without one its tests are skipped, and say which."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "r3router"
GOLDEN = Path(__file__).parent / "golden"

# Set by `make deploy-check`: what is missing is a failure.
REQUIRED = os.environ.get("DEPLOY_REQUIRED") == "1"
# Set by `make deploy-golden`: what differs is written.
WRITE = os.environ.get("DEPLOY_WRITE") == "1"


def _missing(what: str) -> None:
    text = f"{what} is not there; `make deploy-check` brings it"
    if REQUIRED:
        pytest.fail(text)
    pytest.skip(text)


@functools.cache
def _found(name: str) -> str | None:
    folder = os.environ.get("DEPLOY_TOOLS")
    return (shutil.which(name, path=folder) if folder else None) or shutil.which(name)


def need(name: str) -> str:
    """The path of a program."""
    found = _found(name)
    if found is None:
        _missing(f"the program {name}")
        raise AssertionError
    return found


def module(name: str) -> ModuleType:
    """A Python package that only these tests need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        _missing(f"the Python package {name}")
        raise


def run(name: str, *arguments: str | Path, stdin: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program of [`need`]; its status is for the caller to judge."""
    command = [need(name), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=cwd, timeout=240, check=False)


def same_as_golden(name: str, text: str) -> None:
    """Compares with a file of golden/."""
    path = GOLDEN / name
    if WRITE:
        path.write_text(text, "utf-8")
    assert path.is_file(), f"{path.name} is not in golden/; `make deploy-golden` writes it"
    assert text == path.read_text("utf-8"), f"{path.name} differs; look at the difference, then `make deploy-golden`"
