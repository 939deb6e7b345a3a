"""What real engines answered goes through the router and must come out as the unified engine's reply."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripted.acts import answer, chunks
from scripted.client import events
from scripted.lab import Lab

GOLDEN = Path(__file__).parent.parent / "golden" / "sglang-0.5.23"
IDS = [11, 12, 13, 14, 15, 16, 17]
LP = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 6]}
# Values that differ between two engines or two runs; the rest must be equal.
VOLATILE = re.compile(
    r"(_time|_ts|_latency|_wait|_finished_time)$|^(id|created|queue_time|decode_throughput|cached_tokens|cached_tokens_details)$"
)


def generate(tokens: int = 3, **extra: Any) -> dict[str, Any]:
    """The recorded `/generate` requests."""
    return {"input_ids": IDS, "sampling_params": {"max_new_tokens": tokens, "temperature": 0}, "return_routed_experts": True, **extra}


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3, "return_routed_experts": True}
COMP = {"model": "m", "prompt": "hello there", "max_tokens": 3, "return_routed_experts": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gen": ("/generate", generate()),
    "gen_lp": ("/generate", generate(**LP)),
    "gen_one": ("/generate", generate(1)),
    "gen_stream": ("/generate", generate(stream=True)),
    "gen_stream_lp": ("/generate", generate(stream=True, **LP)),
    "chat": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat_meta": ("/v1/chat/completions", {**CHAT, "logprobs": True, "return_meta_info": True}),
    "chat_stream": ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    "comp": ("/v1/completions", COMP),
    "comp_echo": ("/v1/completions", {**COMP, "echo": True, "logprobs": 2}),
    "comp_ids": ("/v1/completions", {"model": "m", "prompt": IDS[:4], "max_tokens": 3}),
    "comp_stream": ("/v1/completions", {**COMP, "stream": True}),
}


def recorded(name: str, who: str) -> bytes:
    """The body of one recorded reply."""
    return (GOLDEN / f"{name}.{who}.txt").read_bytes().split(b"\n\n", 1)[1].lstrip(b"\n")


def stable(value: Any) -> Any:
    """A reply without what differs between runs."""
    if isinstance(value, dict):
        return {k: stable(v) for k, v in value.items() if not VOLATILE.search(k)}
    if isinstance(value, list):
        return [stable(v) for v in value]
    return value


def payloads(body: bytes, stream: bool) -> list[Any]:
    """Reply objects of a body."""
    if not stream:
        return [stable(json.loads(body))]
    return [stable(json.loads(part)) for part in events(body) if part != "[DONE]"]


@pytest.mark.parametrize("name", CASES)
async def test_recorded_replies_of_both_halves_become_the_unified_reply(lab: Lab, name: str) -> None:
    path, body = CASES[name]
    stream = body.get("stream") is True
    fleet, _, client = await lab.serve("--no-start-len-rewrite", "--disable-retries")
    prefill, decode = recorded(name, "P"), recorded(name, "D").rstrip(b"\n")
    fleet.p.script = lambda leg: answer(200, prefill.rstrip(b"\n"), joins=True)
    # Streams leave in odd pieces, so that no event is whole in a chunk.
    decode += b"\n\n" if stream else b""
    fleet.d.script = lambda leg: (
        chunks([decode[i : i + 333] for i in range(0, len(decode), 333)]) if stream else answer(200, decode, joins=True)
    )
    got = await client.post(path, body)
    assert got.status == 200, got.body[:400]
    want = payloads(recorded(name, "unified").rstrip(b"\n") + (b"\n\n" if stream else b""), stream)
    seen = payloads(got.body, stream)
    for part in [*want, *seen]:
        # Decode takes the first token's chosen logprobs from prefill's buffer and leaves this one row out.
        (part.get("meta_info", {}).get("output_token_ids_logprobs") or [None])[0] = None
    assert seen == want
