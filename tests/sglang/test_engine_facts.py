"""The engine facts that the router is built on, asked of the engines themselves, without the router."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from .compare import rows
from .environment import OLD, PREFILL_SENDS_ROWS
from .equality import generate
from .fleet import Trio, call, post


def by_hand(trio: Trio, body: dict[str, Any], decode: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Sends a request to both halves as a router would; both replies."""
    paired = body | {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": trio.prefill.bootstrap_port,
        "bootstrap_room": random.getrandbits(62) + 1,
    }
    with ThreadPoolExecutor(2) as pool:
        prefill = pool.submit(post, f"{trio.prefill.url}/generate", paired)
        return post(f"{trio.decode.url}/generate", paired | (decode or {})), prefill.result()


@pytest.mark.skipif(not PREFILL_SENDS_ROWS, reason="prefill of this release sends no R3")
def test_prefill_rows_then_decodes_tail_are_the_unified_rows(trio: Trio) -> None:
    body = generate(40, 16)
    decode, prefill = by_hand(trio, body)
    unified = rows(post(f"{trio.unified.url}/generate", body)["meta_info"]["routed_experts"])
    left, right = rows(prefill["meta_info"]["routed_experts"]), rows(decode["meta_info"]["routed_experts"])
    assert (len(left), len(right)) == (40, 55)
    assert np.array_equal(np.concatenate([left, right[40:]]), unified)
    assert not np.array_equal(right[:40], unified[:40]), "decode's prompt rows are expected to be junk"


@pytest.mark.skipif(not PREFILL_SENDS_ROWS, reason="prefill of this release sends no R3")
def test_start_len_at_the_prompts_end_shortens_decodes_reply(trio: Trio) -> None:
    body = generate(40, 16)
    decode, _ = by_hand(trio, body, {"routed_experts_start_len": 40})
    assert len(rows(decode["meta_info"]["routed_experts"])) == 15


@pytest.mark.skipif(not PREFILL_SENDS_ROWS, reason="prefill of this release sends no R3")
def test_one_output_token_leaves_decodes_field_out(trio: Trio) -> None:
    decode, prefill = by_hand(trio, generate(9, 1))
    assert "routed_experts" not in decode["meta_info"]
    assert len(rows(prefill["meta_info"]["routed_experts"])) == 9


def test_a_body_without_a_room_is_refused_by_both(trio: Trio) -> None:
    for engine in (trio.prefill, trio.decode):
        status, raw = call(f"{engine.url}/generate", generate(5, 2))
        assert status == 400 and b"bootstrap room id" in raw


def test_an_abort_of_an_unknown_rid_is_answered_with_200(trio: Trio) -> None:
    for engine in (trio.prefill, trio.decode):
        assert call(f"{engine.url}/abort_request", {"rid": "nobody"})[0] == 200


def test_loads_route_and_info_have_the_fields_that_are_read(trio: Trio) -> None:
    for engine, mode in ((trio.prefill, "prefill"), (trio.decode, "decode"), (trio.unified, "null")):
        load = json.loads(call(f"{engine.url}/v1/loads?include=all")[1])["loads"][0]
        assert load["disaggregation"]["mode"] == mode if mode != "null" else True
        assert OLD or {"timestamp", "dp_rank"} <= set(load)
        assert {"num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens"} <= set(load)
        info = json.loads(call(f"{engine.url}/server_info")[1])
        assert info["max_total_num_tokens"] == 8192
        assert info["internal_states"][0]["effective_max_running_requests_per_dp"] >= 1
    url = f"http://127.0.0.1:{trio.prefill.bootstrap_port}/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    route = json.loads(call(url)[1])
    assert route["dp_size"] == 1 and route["follow_bootstrap_room"] is True
