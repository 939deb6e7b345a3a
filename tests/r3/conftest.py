"""Directories, agents and scripted routers of the R3 tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from r3router.agent.server import Agent, Options, build
from r3router.r3.store import StoreDir

from .router import ScriptedRouter


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreDir]:
    """A directory with room for 4 MiB."""
    made = StoreDir(tmp_path / "r3router-test", 4 << 20)
    yield made
    made.remove()


@pytest_asyncio.fixture
async def agent(store: StoreDir, tmp_path: Path) -> AsyncIterator[tuple[Agent, TestServer]]:
    """An agent that serves `store`, with a key."""
    made = build(Options(directory=store.path, parent=tmp_path, api_key="secret"))
    server = TestServer(made.app())
    await server.start_server()
    yield made, server
    await server.close()


@pytest_asyncio.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    """A router that answers what a test tells it to."""
    made = ScriptedRouter()
    await made.start()
    yield made
    await made.close()
