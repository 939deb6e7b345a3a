"""`python -m r3router.shim`: the package `sglang_router` for frameworks that import it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3router import shim

ROOT = Path(__file__).parents[2]


def run(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("R3ROUTER_")}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "python")])
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, timeout=60, check=False)


def test_a_framework_that_imports_sglang_router_finds_its_names(tmp_path: Path) -> None:
    done = run("-m", "r3router.shim", "install", "--folder", str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    code = """
import importlib.metadata, pickle, sglang_router
from sglang_router.launch_router import RouterArgs, launch_router
from sglang_router.router_args import RouterArgs as same
import r3router.launch_router as ours
major, minor, patch = (int(n) for n in sglang_router.__version__.split("+")[0].split("."))
assert (major, minor, patch) >= (0, 3, 0), sglang_router.__version__
assert importlib.metadata.version("sglang-router") == sglang_router.__version__
assert RouterArgs is same is ours.RouterArgs and launch_router is ours.launch_router
assert pickle.loads(pickle.dumps(RouterArgs(port=7))) == RouterArgs(port=7)
"""
    done = run("-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run("-m", "sglang_router.launch_router", "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--pd-disaggregation" in done.stdout


def test_it_goes_as_it_came_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other" / "module.py"
    other.parent.mkdir()
    other.write_text("x = 1\n")
    shim.install(tmp_path)
    assert shim.install(tmp_path), "installing again replaces it"
    run("-c", "import sglang_router.launch_router", folder=tmp_path)
    mine = tmp_path / "sglang_router" / "notes.txt"
    mine.write_text("kept")
    assert len(shim.remove(tmp_path)) == 2
    assert [p.name for p in (tmp_path / "sglang_router").iterdir()] == ["notes.txt"]
    mine.unlink()
    mine.parent.rmdir()
    assert [p.name for p in tmp_path.iterdir()] == ["other"]
    assert shim.remove(tmp_path) == []
    assert run("-m", "r3router.shim", "remove", "--folder", str(tmp_path), folder=tmp_path).returncode == 1


@pytest.mark.parametrize("there", ["sglang_router/__init__.py", "sglang_router.py", "sglang_router-0.3.2.dist-info/METADATA"])
def test_another_sglang_router_is_neither_overwritten_nor_hidden_nor_removed(tmp_path: Path, there: str) -> None:
    theirs = tmp_path / "theirs"
    path = theirs / there
    path.parent.mkdir(parents=True)
    path.write_text("__version__ = '0.3.2'\n")
    for folder in (theirs, tmp_path / "mine"):
        folder.mkdir(exist_ok=True)
        done = run("-m", "r3router.shim", "install", "--folder", str(folder), folder=theirs)
        assert done.returncode == 1
        assert "is another sglang_router; uninstall it first" in done.stderr
        assert run("-m", "r3router.shim", "remove", "--folder", str(folder), folder=theirs).returncode == 1
    assert path.read_text() == "__version__ = '0.3.2'\n"
    assert not list((tmp_path / "mine").iterdir())


def test_pip_takes_it_away_as_any_package(tmp_path: Path) -> None:
    shim.install(tmp_path)
    record = (tmp_path / shim.INFO / "RECORD").read_text().splitlines()
    named = {line.split(",")[0] for line in record}
    assert named == {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
