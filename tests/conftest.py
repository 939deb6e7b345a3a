"""Fixtures of the behaviour tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from scripted.host import Host
from scripted.lab import Lab

FAILED = pytest.StashKey[bool]()
LAB = pytest.StashKey[Lab]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of open_faults.txt: they run, and their failure is reported as expected."""
    folder = Path(__file__).parent
    known = {line for line in (folder / "open_faults.txt").read_text().splitlines() if line and not line.startswith("#")}
    for item in items:
        name = f"{item.path.relative_to(folder)}::{item.nodeid.split('::', 1)[1]}"
        if name in known or name.split("[")[0] in known:
            item.add_marker(pytest.mark.xfail(reason="a known fault, see tests/open_faults.txt", strict=False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Shows the router's log with a failure, and tells the fixture whether the test passed."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    if report.failed and LAB in item.stash:
        report.sections.append(("router log", item.stash[LAB].logs()))
    return report


@pytest_asyncio.fixture
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    """Engines and routers of one test. See `Lab` for what is checked at the end."""
    lab = Lab(tmp_path)
    request.node.stash[LAB] = lab
    try:
        yield lab
        # What a known fault breaks, it may also break at the end.
        if not request.node.stash.get(FAILED, True) and request.node.get_closest_marker("xfail") is None:
            await lab.finish()
    finally:
        await lab.close()


@pytest_asyncio.fixture
async def host() -> AsyncIterator[Host]:
    """An engine's host with the plug-in's objects. It fails the test that asked it for what it does not have."""
    made = await Host().start()
    yield made
    await made.stop()
    assert not made.problems
