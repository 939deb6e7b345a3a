"""What each rank of a fake engine holds: transfers, running requests, KV tokens and mamba slots, with their peaks."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Rank:
    """Counts of one rank. `foreign_*` is load that does not come from the router under test."""

    transfer: int = 0
    running: int = 0
    kv: int = 0
    mamba: int = 0
    foreign_transfer: int = 0
    foreign_kv: int = 0
    peak_transfer: int = 0
    peak_kv: int = 0
    peak_mamba: int = 0
    peak_open: int = 0

    def note(self) -> None:
        """Moves the peaks."""
        self.peak_transfer = max(self.peak_transfer, self.transfer + self.foreign_transfer)
        self.peak_kv = max(self.peak_kv, self.kv + self.foreign_kv)
        self.peak_mamba = max(self.peak_mamba, self.mamba)
        self.peak_open = max(self.peak_open, self.transfer + self.running)

    @property
    def empty(self) -> bool:
        """Nothing of the router under test is held."""
        return not (self.transfer or self.running or self.kv or self.mamba)


def load_entry(rank: int, state: Rank, *, role: str, kv_pool: int, max_running: int) -> dict[str, object]:
    """One entry of `/v1/loads`, in the shape of SGLang 0.5.23."""
    transfer = state.transfer + state.foreign_transfer
    used = state.kv + state.foreign_kv
    decode = role == "decode"
    return {
        "timestamp": time.time(),
        "dp_rank": rank,
        "num_running_reqs": state.running,
        "num_waiting_reqs": transfer,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "max_total_num_tokens": kv_pool,
        "max_running_requests": max_running,
        "token_usage": round(used / kv_pool, 4),
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "memory": {"token_capacity": kv_pool},
        "disaggregation": {
            "mode": role if role in ("prefill", "decode") else "null",
            "prefill_bootstrap_queue_reqs": 0,
            "prefill_inflight_queue_reqs": 0 if decode else transfer,
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": transfer if decode else 0,
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        },
        "queues": {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }


def mamba_metrics(role: str, ranks: list[Rank], slots: int) -> str:
    """The mamba gauges of an engine's `/metrics`; slots, despite their names."""
    lines = []
    for name in ("mamba_available_tokens", "mamba_evictable_tokens", "mamba_used_tokens"):
        lines.append(f"# TYPE sglang:{name} gauge")
        for index, rank in enumerate(ranks):
            value = {"mamba_available_tokens": slots - rank.mamba, "mamba_evictable_tokens": 0, "mamba_used_tokens": rank.mamba}[name]
            lines.append(f'sglang:{name}{{engine_type="{role}",model_name="m",tp_rank="0",pp_rank="0",dp_rank="{index}"}} {value}.0')
    return "\n".join(lines) + "\n"
