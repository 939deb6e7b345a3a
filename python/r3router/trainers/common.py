"""What both trainers need: one client per event loop and router, and rows in the form that a `Sample` keeps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from r3router.client import Client
from r3router.r3.errors import FormatError
from r3router.r3.reply import Reply

_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Client]] = WeakKeyDictionary()


def client(args: Any) -> Client:
    """The client of this loop for `args.sglang_router_ip` and `…_port`. `R3ROUTER_API_KEY` and `R3ROUTER_AGENT_API_KEY` are its keys."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    clients = _CLIENTS.setdefault(asyncio.get_running_loop(), {})
    if url not in clients:
        layers, top_k = shape(args)
        clients[url] = Client(
            url,
            api_key=os.environ.get("R3ROUTER_API_KEY"),
            agent_key=os.environ.get("R3ROUTER_AGENT_API_KEY"),
            layers=layers,
            top_k=top_k,
            timeout_s=getattr(args, "sglang_router_request_timeout_secs", None),
        )
    return clients[url]


async def close() -> None:
    """Closes the clients of this loop; for tests and orderly ends."""
    for made in _CLIENTS.pop(asyncio.get_running_loop(), {}).values():
        await made.close()


def shape(args: Any) -> tuple[int | None, int | None]:
    """Layers and experts of a layer, as the trainers' arguments say them; `None` where they do not."""
    return getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)


def covered(sample: Any) -> int:
    """Rows that a sample has from earlier turns and that lie before its last token; 0 when there are none."""
    rows = getattr(sample, "rollout_routed_experts", None)
    return 0 if rows is None else min(len(rows), max(0, len(sample.tokens) - 1))


async def ask(args: Any, payload: Mapping[str, Any], key: str | None, *, append: bool, sample: Any) -> tuple[Reply, int]:
    """Sends a `/generate` request and reads its rows; the reply, and `routed_experts_start_len` as it was asked for.

    With `append`, rows that the sample already has are neither computed nor sent again: a resumed sample keeps the routing with which
    its tokens were sampled. Without, each turn brings the rows of the whole sequence, as the trainers' own code asks for them.
    """
    body = dict(payload)
    start = covered(sample) if append and body.get("return_routed_experts") and "input_ids" in body else 0
    if start:
        body["routed_experts_start_len"] = start
    reply = await client(args).post("/generate", body, key=key)
    # Engines do not echo it, and slime reads it.
    reply.meta_info["routed_experts_start_len"] = start
    return reply, start


async def rows_of(reply: Reply, start: int, tokens: int, args: Any) -> NDArray[np.int32] | None:
    """The reply's rows as int32 `[tokens - 1 - start, layers, top_k]`; `None` when it has none.

    Raises:
        FormatError: there are fewer or more rows than tokens. One more is cut off: some engines count the stop token.
    """
    if reply.payload is None:
        return None
    narrow = reply.routed_experts
    if narrow is None:
        return None
    wanted = max(0, tokens - 1 - start)
    layers, top_k = shape(args)
    if narrow.ndim < 3:
        if not layers or (narrow.size and narrow.size % layers):
            raise FormatError(f"{narrow.size} ids are no rows of {layers} layers")
        narrow = narrow.reshape(wanted, layers, -1) if wanted else narrow.reshape(0, layers, top_k or 0)
    if len(narrow) == wanted + 1:
        narrow = narrow[:wanted]
    if len(narrow) != wanted:
        raise FormatError(f"the reply has {len(narrow)} rows from {start} on, {tokens} tokens need {wanted}")
    # Tens of milliseconds for a long sample; the loop goes on meanwhile.
    return await asyncio.to_thread(np.ascontiguousarray, narrow, np.int32)


def joined(sample: Any, start: int, rows: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    """The sample's rows before `start`, and the new ones."""
    if rows is None or start == 0:
        return rows
    earlier = np.ascontiguousarray(np.asarray(sample.rollout_routed_experts)[:start], dtype=np.int32)
    return np.concatenate([earlier.reshape(start, *rows.shape[1:]), rows])


def tokens_of(meta: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Generated tokens and their log-probabilities from `output_token_logprobs`."""
    listed = meta.get("output_token_logprobs") or []
    return [item[1] for item in listed], [item[0] for item in listed]
