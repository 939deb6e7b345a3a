"""The checks of `equality.py` on the hybrid (gated delta net and attention) and on the plain MoE shape, one rank each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import fleet
from .environment import PREFILL_SENDS_ROWS
from .equality import Equality, generate
from .fleet import Front, Process, Trio, call
from .stages import free


class TestHybrid(Equality):
    """Qwen3.5-MoE shape: KV and mamba state travel."""

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, trio: Trio, router: Process) -> Front:
        return Front(trio.unified, router)

    @pytest.mark.skipif(PREFILL_SENDS_ROWS, reason="these engines send R3")
    @pytest.mark.parametrize("stream", [False, True])
    def test_r3_that_prefill_does_not_send_is_refused_by_name(self, trio: Trio, front: Front, stream: bool) -> None:
        """The prompt's rows exist nowhere: an error with the reason, decode's half ended, nothing run again."""
        before = front.router.metrics("r3router_attempts_total")[""]
        status, raw = call(f"{front.url}/generate", generate(20, 400, stream=stream) | {"return_routed_experts": True})
        assert b"prefill's reply has no routed_experts" in raw and b"0.5.17" in raw, raw[:500]
        assert b"r3_mismatch" in raw and (stream or status == 502)
        assert front.router.metrics("r3router_attempts_total")[""] == before + 1
        free(trio.decode)


class TestPlain(Equality):
    """Qwen3-MoE shape: KV only."""

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls) -> Iterator[Front]:
        with fleet.trio("qwen3_moe") as trio, fleet.router([trio.prefill], [trio.decode], name="router-plain") as router:
            yield Front(trio.unified, router)
