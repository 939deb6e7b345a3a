"""The fakes must see each fault, and must be quiet when nothing is wrong. Driven by a mini router that is wrong on demand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from .acts import answer, chunks, cut_short, every, first, head_then_rst, never, rst
from .client import Client, Closed, events, request_bytes
from .engine import Engine
from .facts import server_info
from .fleet import Fleet
from .lab import Lab
from .leg import merged_rows
from .metrics import parse
from .mini import Faults, MiniRouter
from .r3 import JUNK, from_text
from .wire import Body, ProtocolError, framing_of, parse_head

BODY: dict[str, Any] = {"input_ids": [5, 6, 7, 8, 9], "sampling_params": {"max_new_tokens": 3}}
SHAPE = {"prefill": {"dp_size": 4, "waiting_s": 0.3}, "decode": {"dp_size": 8, "waiting_s": 0.3, "disconnect_s": 0.3}}


async def broken(
    fleet: Fleet, faults: Faults, text: str, *, calls: int = 1, body: dict[str, Any] | None = None, path: str = "/generate"
) -> None:
    """Drives the fleet with a wrong router; the fleet must say what was wrong."""
    mini = MiniRouter(fleet, faults)
    for _ in range(calls):
        await mini.call(body or BODY, path)
    mini.close()
    with pytest.raises(AssertionError, match=text):
        fleet.check()
    fleet.violations.clear()


async def test_a_right_router_breaks_no_rule(lab: Lab) -> None:
    fleet = await lab.pd(**SHAPE)
    mini = MiniRouter(fleet)
    answers = await asyncio.gather(*(mini.call(BODY) for _ in range(64)))
    mini.close()
    assert {(p.status, d.status) for p, d in answers} == {(200, 200)}
    fleet.check()
    assert all(rank.empty for e in fleet.engines for rank in e.ranks)
    assert [rank.peak_transfer for rank in fleet.d.ranks] == [8] * 8


@pytest.mark.parametrize(
    ("faults", "calls", "text"),
    [
        (Faults(room=12345 * 4), 2, "is used again by"),
        (Faults(rid="r" * 16), 2, "generated before"),
        (Faults(decode_rid="other"), 1, "decode 'other'"),
        (Faults(room_shift=1), 1, "implies prefill rank 1, the leg went to rank 0"),
        (Faults(asked=3), 1, "decode asks prefill rank 3"),
        (Faults(routed=4), 1, r"rank 4 outside 0\.\.4"),
        (Faults(ranks=False), 1, "without routed_dp_rank"),
        (Faults(room=2**63, room_shift=0), 1, "bootstrap_room is 9223372036854775808"),
        (Faults(room=0), 1, "bootstrap_room is 0"),
        (Faults(bootstrap_port=1), 1, "was sent to bootstrap"),
        (Faults(room=400, decode_room_text="4e2"), 1, "bootstrap_room is 400.0"),
    ],
)
async def test_a_wrong_pairing_is_seen(lab: Lab, faults: Faults, calls: int, text: str) -> None:
    await broken(await lab.pd(**SHAPE), faults, text, calls=calls)


async def test_legs_that_never_meet_run_into_the_engines_timeout(lab: Lab) -> None:
    fleet = await lab.pd(**SHAPE)
    lone = Client(fleet.d.server.port)
    answer_ = await lone.post("/generate", {**BODY, "rid": "a" * 8, "bootstrap_room": 9, "bootstrap_host": "h", "bootstrap_port": 1})
    lone.close()
    assert answer_.status == 500
    assert b"timed out after 0.3s" in answer_.body
    with pytest.raises(AssertionError, match=r"timed out after 0\.3s"):
        fleet.check()
    fleet.violations.clear()


async def test_several_samples_in_one_room_are_seen(lab: Lab) -> None:
    fleet = await lab.pd(**SHAPE)
    await broken(fleet, Faults(), "one room for several samples", body={"text": "x", "sampling_params": {"n": 4}})
    await broken(fleet, Faults(), "one room for several samples", body={"input_ids": [[1], [2]]})


async def test_a_rank_header_beats_the_body_on_chat_but_not_on_generate(lab: Lab) -> None:
    fleet = await lab.pd(**SHAPE)
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    mini = MiniRouter(fleet, Faults(headers=(("X-Data-Parallel-Rank", "5"),)))
    await mini.call(BODY)
    fleet.check()
    mini.close()
    await broken(fleet, Faults(headers=(("X-Data-Parallel-Rank", "5"),)), r"rank 5 outside 0\.\.4", body=chat, path="/v1/chat/completions")


async def test_duplicate_keys_and_bad_json_are_seen(lab: Lab) -> None:
    fleet = await lab.pd(**SHAPE)
    client = Client(fleet.d.server.port)
    for raw, text in ((b'{"rid":"a1","bootstrap_room":4,"bootstrap_room":4}', "duplicate keys"), (b'{"rid":', "not JSON")):
        task = asyncio.create_task(client.post("/generate", raw))
        await asyncio.sleep(0.05)
        with pytest.raises(AssertionError, match=text):
            fleet.check()
        await task
        fleet.violations.clear()
    client.close()


@pytest.mark.parametrize(("on_over", "status"), [("fail", 500), ("mamba_500", 500)])
async def test_more_transfers_than_a_rank_takes_are_refused(lab: Lab, on_over: str, status: int) -> None:
    fleet = await lab.pd(prefill={"transfer_s": 0.2, "waiting_s": 0.5}, decode={"transfer_limit": 2, "on_over": on_over, "waiting_s": 0.5})
    mini = MiniRouter(fleet)
    answers = await asyncio.gather(
        *(mini.d.post("/generate", mini.bodies(BODY)[1]) for _ in range(1)), *(mini.call(BODY) for _ in range(2)), return_exceptions=True
    )
    mini.close()
    statuses = sorted(a[1].status for a in answers if isinstance(a, tuple))
    assert statuses == [200, status]
    seen = " ".join(fleet.violations)
    assert ("in transfer, it can take 2" in seen) == (on_over == "fail")
    fleet.violations.clear()


async def test_kv_growth_past_the_pool_freezes_every_rank(lab: Lab) -> None:
    decode = {"kv_pool": 100, "grows_to_max_new": True, "run_s": 0.1, "on_over": "freeze"}
    fleet = await lab.pd(decode=decode)
    mini = MiniRouter(fleet)
    body = {"input_ids": list(range(40)), "sampling_params": {"max_new_tokens": 30}}
    calls = asyncio.gather(mini.call(body), mini.call(body))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(calls, 0.5)
    assert "while it grows" in fleet.violations[0]
    assert not fleet.d.moving.is_set()
    fleet.violations.clear()
    mini.close()


async def test_mamba_slots_over_the_limit_kill_the_process(lab: Lab) -> None:
    fleet = await lab.pd(
        prefill={"transfer_s": 0.2, "waiting_s": 0.4}, decode={"mamba_slots": 12, "slots_per_request": 3, "on_over": "die"}
    )
    mini = MiniRouter(fleet)
    results = await asyncio.gather(*(mini.d.post("/generate", mini.bodies(BODY)[1]) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(r, ConnectionError) for r in results)
    assert fleet.d.dead
    with pytest.raises(ConnectionRefusedError):
        await mini.d.post("/generate", b"{}")
    assert "15 mamba slots of 12" in fleet.violations[0]
    fleet.violations.clear()
    mini.close()


async def test_loads_and_metrics_report_what_each_rank_holds(lab: Lab) -> None:
    fleet = await lab.pd(prefill={"dp_size": 2}, decode={"dp_size": 2, "mamba_slots": 6, "script": first(1, never(leaks=True))})
    fleet.d.ranks[1].foreign_transfer = 3
    mini = MiniRouter(fleet)
    stuck = asyncio.create_task(mini.d.post("/generate", mini.bodies(BODY)[1]))
    await asyncio.sleep(0.05)
    probe = Client(fleet.d.server.port)
    loads = (await probe.get("/v1/loads")).json()["loads"]
    assert [entry["disaggregation"]["decode_transfer_queue_reqs"] for entry in loads] == [1, 3]
    assert [entry["num_used_tokens"] for entry in loads] == [5, 0]
    metrics = parse((await probe.get("/metrics")).body.decode())
    assert metrics.sum("sglang:mamba_available_tokens", dp_rank="0") == 5
    rid = fleet.d.legs[0].rid
    await probe.post("/abort_request", {"rid": rid})
    assert (await stuck).status == 500
    assert fleet.d.ranks[0].transfer == 1, "a leaking leg keeps its slot"
    assert fleet.d.free_leaked() == 1
    assert fleet.d.ranks[0].empty
    probe.close()
    mini.close()


async def test_abort_matches_by_prefix_only_when_the_exact_rid_is_live(lab: Lab) -> None:
    fleet = await lab.pd(decode={"script": lambda leg: never(), "tokenise_s": 0.1})
    client = Client(fleet.d.server.port)

    def post(rid: str) -> asyncio.Task[Any]:
        return asyncio.create_task(client.post("/generate", {"rid": rid, "bootstrap_room": hash(rid) % 1000 + 1}))

    long = post("r10")
    await asyncio.sleep(0.02)
    await client.post("/abort_request", {"rid": "r10"})
    assert fleet.d.aborts[-1].hit == [], "too early: lost"
    await asyncio.sleep(0.15)
    await client.post("/abort_request", {"rid": "r1"})
    assert fleet.d.aborts[-1].hit == [], "not live itself: nothing happens"
    short = post("r1")
    await asyncio.sleep(0.15)
    assert any("prefix" in v for v in fleet.violations)
    fleet.violations.clear()
    await client.post("/abort_request", {"rid": "r1"})
    assert len(fleet.d.aborts[-1].hit) == 2
    assert (await long).status == (await short).status == 500
    with pytest.raises(AssertionError, match="hit strangers"):
        fleet.check()
    fleet.violations.clear()
    client.close()


async def test_a_closed_connection_without_abort_holds_the_slot_for_a_while(lab: Lab) -> None:
    fleet = await lab.pd(decode={"disconnect_s": 0.3, "script": lambda leg: never()})
    connection = await Client(fleet.d.server.port).connect()
    await connection.post("/generate", b'{"rid":"abc","bootstrap_room":5}')
    await asyncio.sleep(0.05)
    connection.close()
    await asyncio.sleep(0.1)
    assert fleet.d.legs[0].closed_at is not None
    assert fleet.d.ranks[0].transfer == 1
    await fleet.quiet()
    assert fleet.d.ranks[0].empty
    assert fleet.d.legs[0].end == "left"


async def test_scripted_faults_are_what_the_client_sees(lab: Lab) -> None:
    fleet = await lab.pd()
    client = Client(fleet.d.server.port)
    fleet.d._rids = set()

    async def call() -> Any:
        fleet.d._rids.clear()
        return await client.post("/generate", {"rid": "a", "bootstrap_room": 3})

    for act, error in ((rst(), ConnectionResetError), (head_then_rst(), ConnectionResetError), (cut_short(b"{}", 5, joins=False), Closed)):
        fleet.d.script = first(1, act)
        with pytest.raises(error):
            await call()
    fleet.d.script = every(1, answer(422, {"no": 1}, headers=[("x-a", "b")]))
    got = await call()
    assert (got.status, got.json(), got.header("x-a")) == (422, {"no": 1}, "b")
    fleet.d.server.refuse()
    client.close()
    with pytest.raises(ConnectionRefusedError):
        await call()
    await fleet.d.server.listen()
    assert (await call()).status == 422
    client.close()


async def test_chunk_boundaries_are_exact(lab: Lab) -> None:
    fleet = await lab.pd()
    parts = [b"data: a", b"b\n", b"\ndata: [DO", b"NE]\n\n"]
    fleet.d.script = lambda leg: chunks(parts)
    mini = MiniRouter(fleet)
    _, got = await mini.call(BODY)
    assert got.chunks == parts
    assert events(got.body) == ["ab", "[DONE]"]
    mini.close()
    fleet.check()


async def test_idle_connections_are_closed_and_reuse_can_be_broken(lab: Lab) -> None:
    fleet = await lab.pd()
    server = fleet.d.server
    server.idle_close_s = 0.1
    connection = await Client(server.port).connect()
    raw = request_bytes("GET", "/health")
    await connection.send(raw)
    await connection.answer()
    await asyncio.sleep(0.3)
    with pytest.raises(ConnectionError):
        await connection.send(raw)
        await connection.answer()
    server.idle_close_s = None
    server.on_reuse = lambda: "rst"
    connection = await Client(server.port).connect()
    await connection.send(raw)
    await connection.answer()
    await connection.send(raw)
    with pytest.raises(ConnectionError):
        await connection.answer()


async def test_r3_rows_are_true_on_prefill_and_junk_for_the_prompt_on_decode(lab: Lab) -> None:
    fleet = await lab.pd()
    mini = MiniRouter(fleet)
    p, d = await mini.call({**BODY, "return_routed_experts": True})
    prefill, decode = fleet.pairs()[0]
    rows_p, rows_d = (from_text(x.json()["meta_info"]["routed_experts"]) for x in (p, d))
    assert rows_p.shape == (5, 2, 2)
    assert rows_d.shape == (7, 2, 2)
    assert (rows_d[:5] == JUNK).all()
    assert (rows_p >= 0).all()
    merged = merged_rows(prefill, decode)
    assert merged.nbytes == 112
    assert np.array_equal(merged, np.concatenate([rows_p, rows_d[5:]]))
    p, d = await mini.call({**BODY, "return_routed_experts": True, "routed_experts_start_len": 5})
    assert from_text(d.json()["meta_info"]["routed_experts"]).shape == (2, 2, 2)
    mini.close()
    fleet.check()


async def test_streams_carry_r3_in_the_last_data_event(lab: Lab) -> None:
    fleet = await lab.pd()
    mini = MiniRouter(fleet)
    for path, body in (("/generate", BODY), ("/v1/chat/completions", {"model": "m", "messages": []})):
        _, d = await mini.call({**body, "stream": True, "return_routed_experts": True}, path)
        *parts, done = events(d.body)
        assert done == "[DONE]"
        where = ["routed_experts" in json.dumps(json.loads(part)) for part in parts]
        assert where == [False] * (len(parts) - 1) + [True]
    mini.close()
    fleet.check()


def test_framing_that_contradicts_itself_is_refused() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n")
    with pytest.raises(ProtocolError):
        framing_of(head, response=True)
    with pytest.raises(ProtocolError):
        parse_head(b"HTTP/1.1 200 OK\r\nbad line\r\n\r\n")
    body = Body("chunked")
    for byte in b"3\r\nabc\r\n0\r\n\r\n":
        assert body.feed(bytes([byte])) == b""
    assert body.done
    assert body.chunks == [b"abc"]
    with pytest.raises(ProtocolError):
        Body("chunked").feed(b"xyz\r\n")


@pytest.mark.parametrize("text", ['a{b="c"d"} 1', 'a{b="c\n"} 1', "a{b=c} 1", "a b c d"])
def test_a_broken_metric_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_a_good_metric_line_is_read() -> None:
    metrics = parse('# TYPE a gauge\na{b="c\\"d",e="f"} 2\na{b="x"} 3\n')
    assert metrics.sum("a") == 5
    assert metrics.get("a", b="x")[0].value == 3


async def test_the_load_that_the_cases_need_is_carried(lab: Lab) -> None:
    fleet = await lab.pd(prefill={"dp_size": 4}, decode={"dp_size": 8})
    mini = MiniRouter(fleet)
    big = {"text": "x" * (8 << 20), "sampling_params": {}}
    answers = await asyncio.gather(*(mini.call(big) for _ in range(4)))
    assert all(p.status == d.status == 200 for p, d in answers)
    assert {len(leg.body["text"]) for e in fleet.engines for leg in e.legs} == {8 << 20}
    mini.close()
    fleet.check()


def test_an_engine_reports_its_size_per_rank_and_as_a_whole() -> None:
    async def info() -> dict[str, Any]:
        return server_info(Engine("decode", dp_size=4, max_running=32, kv_pool=1000, mamba_slots=7))

    got = asyncio.run(info())
    assert (got["dp_size"], got["max_running_requests"]) == (4, 128)
    assert len(got["internal_states"]) == 4
    assert got["internal_states"][0]["max_mamba_cache_size"] == 7
