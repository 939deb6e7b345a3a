"""Two data-parallel ranks a side: the checks of `equality.py`, and each request lands where the router said."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from . import fleet
from .compare import same_generate
from .environment import OLD
from .equality import Equality, generate
from .fleet import Front, Process, Trio, call, post
from .stages import eventually, idle

TWO_RANKS = {"arguments": ("--dp-size", "2"), "variables": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
REQUESTS = 24


def rank(place: str) -> int:
    """The rank of `url@rank`."""
    return int(place.rpartition("@")[2])


def computed(prefill: Process) -> list[int]:
    """Tokens that each of two ranks has computed: by `/v1/loads`, or by the log of releases that do not count them there."""
    if not OLD:
        return [load["total_prefill_uncached_tokens"] for load in prefill.loads()]
    return [sum(map(int, re.findall(rf" DP{at}\S*\] Prefill batch, .*?#new-token: (\d+)", prefill.text()))) for at in (0, 1)]


class TestTwoRanks(Equality):
    """Hybrid shape, `--dp-size 2` on prefill and decode; the one-rank unified engine says what is right."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls) -> Iterator[tuple[Process, Process]]:
        with fleet.engines(("prefill", "ranks-prefill", TWO_RANKS), ("decode", "ranks-decode", TWO_RANKS)) as (prefill, decode):
            yield prefill, decode

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, trio: Trio, pair: tuple[Process, Process]) -> Iterator[Front]:
        with fleet.router([pair[0]], [pair[1]], name="router-ranks") as router:
            yield Front(trio.unified, router)

    def test_the_router_reads_two_ranks_from_each_engine(self, front: Front, pair: tuple[Process, Process]) -> None:
        for engine in pair:
            assert [load["dp_rank"] for load in engine.loads()] == [0, 1]
            assert sum(engine.url in labels for labels in front.router.metrics("r3router_rank_open")) == 2

    def test_requests_land_on_the_ranks_that_the_router_named(self, front: Front, pair: tuple[Process, Process]) -> None:
        """DPR-1: decode says its rank in the reply; prefill's ranks count the tokens that they computed."""
        idle(*pair)
        known = len(front.router.requests())
        before = computed(pair[0])
        with ThreadPoolExecutor(8) as pool:
            lengths = [50 + 7 * at for at in range(REQUESTS)]
            replies = list(pool.map(lambda n: post(f"{front.url}/generate", generate(n, 6, rid=f"land-{n}-of-{REQUESTS}")), lengths))
        eventually(lambda: len(front.router.requests()) == known + REQUESTS, "the router's log lines")
        lines = {line["rid"]: line for line in front.router.requests()[known:]}
        expected: Counter[int] = Counter()
        for reply, length in zip(replies, lengths, strict=True):
            line = lines[reply["meta_info"]["id"]]
            assert reply["meta_info"]["dp_rank"] == rank(line["d"])
            assert line["room"] % 2 == rank(line["p"])
            expected[rank(line["p"])] += length
        assert {rank(line["d"]) for line in lines.values()} == {0, 1}, "decode's ranks are both used"
        assert set(expected) == {0, 1}, "prefill's ranks are both used"
        idle(*pair)
        after = computed(pair[0])
        assert [now - then for now, then in zip(after, before, strict=True)] == [expected[0], expected[1]]

    def test_a_rank_that_does_not_exist_is_refused_by_the_engine(self, pair: tuple[Process, Process]) -> None:
        status, raw = call(f"{pair[1].url}/generate", generate(5, 2, routed_dp_rank=5, bootstrap_room=3))
        assert status == 400 and b"out of range" in raw

    def test_many_requests_over_both_ranks_are_right(self, front: Front, pair: tuple[Process, Process]) -> None:
        bodies: list[dict[str, Any]] = [generate(60 + at, 10) for at in range(REQUESTS)]
        with ThreadPoolExecutor(REQUESTS) as pool:
            replies = list(pool.map(lambda body: post(f"{front.url}/generate", body), bodies))
        for at in (0, 11, REQUESTS - 1):
            same_generate(replies[at], post(f"{front.unified.url}/generate", bodies[at]))
        idle(*pair)
