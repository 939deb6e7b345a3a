"""Engines are started once for the whole run: three of them take about two minutes on two cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import fleet


@pytest.fixture(scope="session")
def trio() -> Iterator[fleet.Trio]:
    """Unified, prefill and decode engine of the hybrid model."""
    with fleet.trio("qwen3_5_moe") as started:
        yield started


@pytest.fixture(scope="session")
def router(trio: fleet.Trio) -> Iterator[fleet.Process]:
    """r3router in front of the pair."""
    with fleet.router([trio.prefill], [trio.decode]) as process:
        yield process
