"""A scripted engine that keeps every call, and answers the routes that only some models have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from scripted.engine import Engine
from scripted.server import Exchange, Request

# What routers ask on their own. Whether a client's call reached an engine by one of these is seen in its answer.
BACKGROUND = ("/health", "/v1/loads", "/get_load", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/metrics")
EMBEDDING = {"object": "embedding", "embedding": [0.25, -0.5], "index": 0}
REPLIES: dict[str, Any] = {
    "/v1/embeddings": {"object": "list", "data": [EMBEDDING], "model": "m", "usage": {"prompt_tokens": 2, "total_tokens": 2}},
    "/v1/rerank": [{"score": 0.9, "document": "b", "index": 1}, {"score": 0.1, "document": "a", "index": 0}],
    "/v1/classify": {
        "id": "classify-1",
        "object": "list",
        "created": 1,
        "model": "m",
        "data": [{"index": 0, "label": "x", "probs": [1.0]}],
    },
    "/v1/score": {"scores": [[0.5, 0.5]], "model": "m", "object": "scoring", "usage": None},
    "/v1/responses": {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": []},
    "/v1/tokenize": {"tokens": [1, 2], "count": 2, "max_model_len": 10},
    "/v1/detokenize": {"text": "x"},
}
REPLIES["/rerank"] = REPLIES["/v1/rerank"]
REPLIES["/classify"] = [{"embedding": [0.25], "meta_info": {"id": "c1", "prompt_tokens": 2}}]


@dataclass(eq=False)
class Recorder(Engine):
    """See the module."""

    seen: list[Request] = field(default_factory=list)

    async def _serve(self, request: Request, exchange: Exchange) -> None:
        # PRI is a question whether HTTP/2 is spoken.
        if request.method != "PRI" and (request.method != "GET" or request.path not in BACKGROUND):
            self.seen.append(request)
        if request.path in REPLIES and request.method == "POST":
            return await exchange.reply(200, orjson.dumps(REPLIES[request.path]), [("x-engine", self.name)])
        return await super()._serve(request, exchange)

    async def _control(self, request: Request, exchange: Exchange) -> None:
        if request.path == "/metrics":
            text = '# HELP sglang:num_running_reqs x\n# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{model_name="m"} 3.0\n'
            return await exchange.reply(200, text.encode(), content_type="text/plain; version=0.0.4")
        if request.path == "/get_load":
            loads = [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
            return await exchange.reply(200, orjson.dumps(loads))
        return await super()._control(request, exchange)
