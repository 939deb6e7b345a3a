"""`--no-admission`: the baseline of comparisons behaves as the plain PD routers that people ran."""

from __future__ import annotations

from scripted.acts import refusal
from scripted.lab import Lab

MESSAGE = "prefill has no room for this"


async def test_a_failed_prefill_leaves_decode_to_its_own_clock_and_decodes_failure_is_told(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--no-admission", "--disable-retries", decode={"waiting_s": 0.4, "disconnect_s": 60.0})
    fleet.p.script = lambda leg: refusal(500, MESSAGE)
    got = await client.generate(input_ids=list(range(5)))
    assert got.status == 500
    assert b"KVPoll.WaitingForInput" in got.body
    assert MESSAGE.encode() not in got.body
    assert [leg.end for leg in fleet.d.legs] == ["timeout"]
    assert [engine.aborts for engine in fleet.engines] == [[], []]
    # The timeout is what this test is about.
    assert len(fleet.d.violations) == 1
    fleet.d.violations.clear()


async def test_neither_rank_is_named_and_decode_ships_all_rows(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--no-admission", prefill={"dp_size": 4}, decode={"dp_size": 4})
    for _ in range(8):
        got = await client.generate(input_ids=list(range(40)), return_routed_experts=True)
        assert got.status == 200, got.body
    assert len(fleet.p.legs) == len(fleet.d.legs) == 8
    for leg in (*fleet.p.legs, *fleet.d.legs):
        assert not {"routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "routed_experts_start_len"} & leg.body.keys()
    # Rooms are drawn from all there are: they fall on ranks as they come, not in turn.
    rooms = [leg.room for leg in fleet.p.legs]
    assert rooms == [leg.room for leg in fleet.d.legs]
    assert len(set(rooms)) == 8
    assert all(1 <= room < 1 << 63 for room in rooms)
    # The engines of these tests take a missing rank for a broken rule; here it is the point.
    assert len(fleet.violations) == 8
    assert all("without routed_dp_rank" in broken for broken in fleet.violations)
    fleet.violations.clear()
