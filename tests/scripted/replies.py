"""Replies in the shapes of SGLang 0.5.23. Prefill's values are marked 1000+, decode's 2000+, so that a merge can be checked by eye."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from .leg import Leg

PREFILL_MARK = 1000
DECODE_MARK = 2000
CREATED = 1_790_000_000


@dataclass
class Output:
    """What a leg generated."""

    tokens: int
    finish: dict[str, Any]
    text: str
    routed_experts: str | None = None
    routed_experts_dtype: str | None = None
    indexer_topk: str | None = None
    cached_tokens: int = 0


def logprob_fields(leg: Leg, tokens: int) -> dict[str, Any]:
    """The logprob lists of `meta_info`. Decode has no `input_*` values: its lists are empty, as on the wire."""
    body = leg.body
    if not body.get("return_logprob"):
        return {}
    mark = PREFILL_MARK if leg.engine.role != "decode" else DECODE_MARK
    top = body.get("top_logprobs_num") or 0
    wanted = body.get("token_ids_logprob")
    start = body.get("logprob_start_len", -1)
    start = -1 if start is None else start
    inputs: list[list[Any]] = []
    if leg.engine.role != "decode" and start >= 0:
        inputs = [[None if i == 0 else -float(mark + i), leg.token_at(i), None] for i in range(start, leg.prompt_tokens)]
    outputs = [[-float(mark + 500 + i), mark + 500 + i, None] for i in range(tokens)]
    fields: dict[str, Any] = {"input_token_logprobs": inputs, "output_token_logprobs": outputs}
    if top:
        fields["input_top_logprobs"] = [None if i == 0 else [row] * top for i, row in enumerate(inputs)]
        fields["output_top_logprobs"] = [[row] * top for row in outputs]
    if wanted:
        fields["input_token_ids_logprobs"] = [[[row[0], w, None] for w in wanted] for row in inputs]
        decode = leg.engine.role == "decode"
        fields["output_token_ids_logprobs"] = [
            None if i == 0 and decode else [[row[0], w, None] for w in wanted] for i, row in enumerate(outputs)
        ]
    return fields


def experts(output: Output) -> dict[str, Any]:
    """The members for routed experts, of `meta_info` or `sglext`."""
    named = {} if output.routed_experts_dtype is None else {"routed_experts_dtype": output.routed_experts_dtype}
    return {"routed_experts": output.routed_experts, **named}


def meta_info(leg: Leg, output: Output, *, done: bool = True) -> dict[str, Any]:
    """`meta_info` of one reply or of one chunk of a stream."""
    meta: dict[str, Any] = {
        "id": leg.rid,
        "finish_reason": output.finish if done else None,
        "prompt_tokens": leg.prompt_tokens,
        "weight_version": "default",
        "num_retractions": leg.engine.retractions,
        "queue_time": 0.0003,
        **logprob_fields(leg, output.tokens),
        "completion_tokens": output.tokens,
        "cached_tokens": output.cached_tokens,
        "cached_tokens_details": None,
    }
    if done and output.routed_experts is not None:
        meta |= experts(output)
    if done and output.indexer_topk is not None:
        meta["indexer_topk"] = output.indexer_topk
    meta["dp_rank"] = leg.rank
    if done:
        meta["e2e_latency"] = 0.25
    return meta


def generate_object(leg: Leg, output: Output, *, done: bool = True) -> dict[str, Any]:
    """What `/generate` answers."""
    mark = PREFILL_MARK if leg.engine.role != "decode" else DECODE_MARK
    return {
        "text": output.text,
        "output_ids": [mark + 500 + i for i in range(output.tokens)],
        "meta_info": meta_info(leg, output, done=done),
    }


def usage(leg: Leg, output: Output) -> dict[str, Any]:
    """OpenAI usage."""
    return {
        "prompt_tokens": leg.prompt_tokens,
        "total_tokens": leg.prompt_tokens + output.tokens,
        "completion_tokens": output.tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def chat_object(leg: Leg, output: Output) -> dict[str, Any]:
    """What `/v1/chat/completions` or `/v1/completions` answers. R3 sits in `sglext`, or in the choice with `return_meta_info`."""
    chat = leg.request.path.endswith("chat/completions")
    choice: dict[str, Any] = {"index": 0}
    if chat:
        choice["message"] = {"role": "assistant", "content": output.text, "reasoning_content": None, "tool_calls": None}
    else:
        choice["text"] = output.text
    logprobs = None
    if leg.body.get("logprobs"):
        mark = PREFILL_MARK if leg.engine.role != "decode" else DECODE_MARK
        if chat:
            logprobs = {
                "content": [
                    {"token": f"t{i}", "bytes": [116], "logprob": -float(mark + 500 + i), "top_logprobs": []} for i in range(output.tokens)
                ]
            }
        else:
            logprobs = {
                "text_offset": [],
                "token_logprobs": [-float(mark + 500 + i) for i in range(output.tokens)],
                "tokens": [f"t{i}" for i in range(output.tokens)],
                "top_logprobs": [],
            }
    choice |= {"logprobs": logprobs, "finish_reason": output.finish["type"], "matched_stop": None}
    reply: dict[str, Any] = {
        "id": leg.rid,
        "object": "chat.completion" if chat else "text_completion",
        "created": CREATED,
        "model": leg.body.get("model", "m"),
        "choices": [choice],
        "usage": usage(leg, output),
        "metadata": {"weight_version": "default"},
    }
    if leg.body.get("return_meta_info"):
        choice["meta_info"] = meta_info(leg, output)
    if output.routed_experts is not None and (leg.engine.rows_twice or not leg.body.get("return_meta_info")):
        reply["sglext"] = experts(output)
    return reply


def reply_bytes(leg: Leg, output: Output) -> bytes:
    """The whole non-streaming reply."""
    if leg.request.path == "/generate":
        return orjson.dumps(generate_object(leg, output))
    return orjson.dumps(chat_object(leg, output))


def event(payload: Any) -> bytes:
    """One SSE event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def stream_events(leg: Leg, output: Output) -> list[bytes]:
    """Every event of a streaming reply, `[DONE]` included. R3 comes with the last one that carries data."""
    parts = []
    if leg.request.path == "/generate":
        for done in range(1, output.tokens):
            part = Output(done, output.finish, output.text[: done * 2], cached_tokens=output.cached_tokens)
            parts.append(event(generate_object(leg, part, done=False)))
        parts.append(event(generate_object(leg, output)))
    else:
        parts = _openai_events(leg, output)
    return [*parts, b"data: [DONE]\n\n"]


def _openai_events(leg: Leg, output: Output) -> list[bytes]:
    chat = leg.request.path.endswith("chat/completions")
    base = {
        "id": leg.rid,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": CREATED,
        "model": leg.body.get("model", "m"),
    }

    def piece(text: str, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if chat:
            choice["delta"] = {"role": None, "content": text, "reasoning_content": None, "tool_calls": None}
        else:
            choice["text"] = text
        return event({**base, "choices": [{**choice, "logprobs": None, "finish_reason": finish, "matched_stop": None}], "usage": None})

    parts = [piece(f"{output.text[i * 2 : i * 2 + 2]}", None) for i in range(max(output.tokens, 1))]
    parts.append(piece("", output.finish["type"]))
    if output.routed_experts is not None:
        parts.append(event({**base, "choices": [], "sglext": experts(output), "usage": None}))
    if (leg.body.get("stream_options") or {}).get("include_usage"):
        parts.append(event({**base, "choices": [], "usage": usage(leg, output)}))
    return parts
