"""DPR: prefill and decode ranks are chosen as a pair, and every field says the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from scripted.calls import CHAT, COMPLETION, GENERATE, crowd, statuses
from scripted.lab import Lab

MAX_ROOM = 2**63 - 1


@pytest.mark.parametrize(("dp", "calls"), [(4, 10_000), (1, 500), (3, 500), (6, 500), (7, 500)])
async def test_dpr_1_the_room_implies_the_rank_that_the_leg_goes_to(lab: Lab, dp: int, calls: int) -> None:
    fleet, _, client = await lab.serve("--log-level", "warn", prefill={"dp_size": dp}, decode={"dp_size": 2, "tokens": 1})
    body = b'{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":1}}'
    answers = await crowd([lambda: client.post("/generate", body)] * calls, 64)
    assert statuses(answers) == {200: calls}
    # The fakes compare every pair: room % dp == rank, decode asks that rank, bootstrap address, one room per attempt.
    fleet.check()
    assert len(fleet.rooms.meetings) == calls
    assert all(1 <= room <= MAX_ROOM for room in fleet.rooms.meetings)
    assert max(fleet.rooms.meetings) > 2**60, "rooms are drawn from the whole range"
    for prefill, decode in fleet.pairs():
        if dp > 1:
            assert prefill.body["routed_dp_rank"] == prefill.room % dp
            assert decode.body["disagg_prefill_dp_rank"] == prefill.rank
        assert decode.body["routed_dp_rank"] == decode.rank
    used = Counter(leg.rank for leg in fleet.p.legs)
    assert set(used) == set(range(dp)), f"ranks without work: {used}"


async def test_dpr_1_holds_for_every_sample_of_a_split_call(lab: Lab) -> None:
    fleet, _, client = await lab.serve(prefill={"dp_size": 3}, decode={"dp_size": 5})
    answer = await client.generate(input_ids=[[1], [2, 2], [3, 3, 3]], sampling_params={"n": 4, "max_new_tokens": 2})
    assert answer.status == 200
    assert len(fleet.pairs()) == len(fleet.rooms.meetings) == 12
    fleet.check()


@pytest.mark.parametrize(("prefill_dp", "decode_dp"), [(1, 8), (2, 8), (8, 2), (4, 4)])
@pytest.mark.parametrize("hostile", [False, True])
async def test_dpr_2_the_two_sides_have_ranks_of_their_own(lab: Lab, prefill_dp: int, decode_dp: int, hostile: bool) -> None:
    fleet, router, client = await lab.serve(prefill={"dp_size": prefill_dp}, decode={"dp_size": decode_dp})
    headers = [("X-Data-Parallel-Rank", "5")] if hostile else []
    extra: dict[str, Any] = {"routed_dp_rank": 5, "disagg_prefill_dp_rank": 6, "data_parallel_rank": 7} if hostile else {}
    for path, body in (("/generate", GENERATE), ("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        answers = await crowd([lambda path=path, body=body: client.post(path, {**body, **extra}, headers)] * 24, 24)
        # A client's rank is not passed on: it is ignored or refused, and no leg gets a rank outside its own range.
        assert set(statuses(answers)) <= ({200, 400} if hostile else {200})
    fleet.check()
    if not hostile:
        pairs = fleet.pairs()
        assert len(pairs) == 72
        assert {p.rank for p, _ in pairs} == set(range(prefill_dp))
        assert {d.rank for _, d in pairs} == set(range(decode_dp))
        log = router.tail(1 << 24)
        for prefill, decode in pairs:
            lines = [line for line in log.splitlines() if prefill.rid in line]
            assert lines, f"no log line for {prefill.rid}"
            assert any(f"@{prefill.rank}" in line and f"@{decode.rank}" in line and str(prefill.room) in line for line in lines), lines
