"""Every route of the router with a call that is good there, by what becomes of it. `test_routes.py` holds it to `GET /routes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripted.calls import ROUTES
from scripted.engine import Engine
from scripted.fleet import Fleet

GENERATION = tuple(ROUTES)
ANY_ENGINE = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
REGULAR_ONLY = (
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v1/score",
    "/v1/classify",
    "/classify",
    "/encode",
    "/v1/responses",
    "/v1/messages",
)
EVERY_ENGINE = (
    "/flush_cache",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/begin_weight_update",
    "/end_weight_update",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/open_session",
    "/close_session",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/configure_logging",
    "/weights_checker",
    "/set_internal_state",
    "/clear_hicache_storage_backend",
    "/hicache/storage-backend/clear",
    "/slow_down",
    "/freeze_gc",
    "/set_trace_level",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
)
INFO = (
    "/get_model_info",
    "/model_info",
    "/server_info",
    "/get_server_info",
    "/v1/models",
    "/get_weights_by_name",
    "/get_weight_version",
    "/weight_version",
)
LOADS = ("/v1/loads", "/get_loads", "/engine_metrics", "/metrics")
WORKERS = ("/workers", "/workers/{id}", "/add_worker", "/remove_worker", "/list_workers")
# What engines are asked of their own accord: by probes and polls.
OWN = ("/server_info", "/model_info", "/v1/loads", "/health", "/metrics", "/get_server_info", "/get_model_info", "/v1/models")

RERANK = {"query": "which", "documents": ["one", "two"]}
PLAIN = {"model": "m", "input": "tell me something", "text": "tell me something", "messages": []}


def body_of(path: str) -> dict[str, Any]:
    """A good body of a POST route."""
    # Without a name of the client's, the router would add one.
    session = {"session_id": "s"} if path == "/open_session" else {}
    return ROUTES.get(path) or (RERANK if "rerank" in path else {**PLAIN, **session})


@dataclass(frozen=True)
class At:
    """A POST route in one mode."""

    mode: str
    path: str

    def fleet(self, **shape: Any) -> Fleet:
        """Two engines of each role of the mode."""
        roles = ("prefill", "decode") if self.mode == "pd" else ("regular",)
        return Fleet([Engine(role, f"{role[0].upper()}{i}", **shape) for role in roles for i in range(2)])

    @property
    def generates(self) -> bool:
        """Goes through admission."""
        return self.path in GENERATION

    def reached(self, fleet: Fleet) -> list[tuple[str, bytes]]:
        """Engine and body of every call of this route, in order for each engine."""
        if self.generates:
            return [(e.name, leg.raw) for e in fleet.engines for leg in e.legs if leg.request.path == self.path]
        path = "/v1/rerank" if self.path == "/rerank" else self.path
        return [(e.name, request.body) for e in fleet.engines for request in e.control if request.path == path]

    def __str__(self) -> str:
        return f"{self.mode}{self.path}"


ONE_ENGINE = [
    *(At(mode, path) for mode in ("pd", "regular") for path in (*GENERATION, *ANY_ENGINE)),
    *(At("regular", path) for path in REGULAR_ONLY),
]
"""Calls that are served once: by a pair, or by one engine."""
ALL_ENGINES = [At(mode, path) for mode in ("pd", "regular") for path in EVERY_ENGINE]
POSTS = [*ONE_ENGINE, *ALL_ENGINES]
