"""What a scripted engine tells about itself."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from .ledger import load_entry

if TYPE_CHECKING:
    from .engine import Engine


def loads(engine: Engine) -> dict[str, Any]:
    """`/v1/loads`."""
    entries = [
        load_entry(i, rank, role=engine.role, kv_pool=engine.kv_pool, max_running=engine.max_running) for i, rank in enumerate(engine.ranks)
    ]
    if engine.edit_loads:
        entries = engine.edit_loads(entries)
    return {
        "timestamp": datetime.now(timezone.utc).isoformat(),
        "version": "0.5.23",
        "accelerator": "fake",
        "num_accelerators": 1,
        "loads": entries,
    }


def server_info(engine: Engine) -> dict[str, Any]:
    """`/server_info`."""
    state: dict[str, Any] = {
        "effective_max_running_requests_per_dp": engine.max_running,
        "memory_usage": {"token_capacity": engine.kv_pool},
        "disaggregation_mode": engine.role,
    }
    if engine.mamba_slots is not None:
        state["max_mamba_cache_size"] = engine.mamba_slots
    info: dict[str, Any] = {
        "model_path": "m",
        "served_model_name": "m",
        "tp_size": engine.dp_size,
        "dp_size": engine.dp_size,
        "attn_dp_size": 1,
        "enable_dp_attention": engine.dp_size > 1,
        "disaggregation_mode": engine.role if engine.role != "regular" else "null",
        "load_balance_method": "follow_bootstrap_room" if engine.role == "prefill" else "round_robin",
        "disaggregation_bootstrap_port": engine.bootstrap.port or None,
        "disaggregation_transfer_backend": "nixl",
        "max_running_requests": engine.max_running * engine.dp_size,
        "max_mamba_cache_size": None,
        "page_size": engine.page_size,
        "num_reserved_decode_tokens": 512,
        "disaggregation_decode_extra_slots": 0,
        "chunked_prefill_size": 1_000_000,
        "enable_return_routed_experts": not engine.r3.missing,
        "max_total_num_tokens": engine.kv_pool,
        "max_req_input_len": 1_000_000_000,
        "internal_states": [state] * engine.dp_size,
        "version": "0.5.23",
        "frontend": "python",
    }
    return engine.edit_info(info) if engine.edit_info else info


def model_info(engine: Engine) -> dict[str, Any]:
    """`/model_info`."""
    info = {
        "model_path": "m",
        "served_model_name": "m",
        "tokenizer_path": "m",
        "is_generation": True,
        "weight_version": "default",
        "disaggregation_mode": engine.role if engine.role != "regular" else "null",
        "model_type": "fake",
        "answered_by": engine.name,
    }
    return engine.edit_model(info) if engine.edit_model else info


def topology(engine: Engine) -> dict[str, Any] | int:
    """What the bootstrap server's `/route` tells; a number is a status."""
    told: dict[str, Any] = {
        "attn_tp_size": 1,
        "attn_cp_size": 1,
        "dp_size": engine.dp_size,
        "pp_size": 1,
        "page_size": engine.page_size,
        "kv_cache_dtype": "bfloat16",
        "follow_bootstrap_room": True,
        "decode_allocation_policy": "early",
        "prefill_http_port": engine.server.port,
    }
    return engine.edit_topology(told) if engine.edit_topology else told
