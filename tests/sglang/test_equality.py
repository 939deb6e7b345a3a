"""The checks of `equality.py` on the hybrid (gated delta net and attention) and on the plain MoE shape, one rank each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import fleet
from .equality import Equality
from .fleet import Front, Process, Trio


class TestHybrid(Equality):
    """Qwen3.5-MoE shape: KV and mamba state travel."""

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, trio: Trio, router: Process) -> Front:
        return Front(trio.unified, router)


class TestPlain(Equality):
    """Qwen3-MoE shape: KV only."""

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls) -> Iterator[Front]:
        with fleet.trio("qwen3_moe") as trio, fleet.router([trio.prefill], [trio.decode], name="router-plain") as router:
            yield Front(trio.unified, router)
