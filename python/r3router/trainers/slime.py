"""For slime: `--custom-generate-function-path r3router.trainers.slime.generate`.

`generate` does what slime's own does for prompts of text; the R3 rows reach the sample as an int32 array instead of 100 MB of JSON.
`generate_append` resumes partial rollouts without fetching the rows that the sample has. Samples with images go through slime's own.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import common


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """One turn; the sample with its new tokens, log-probabilities, rows and status."""
    return await _generate(args, sample, sampling_params, evaluation, append=False)


async def generate_append(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """As `generate`; a resumed sample keeps its rows, and only those of new tokens are asked for (`routed_experts_start_len`)."""
    return await _generate(args, sample, sampling_params, evaluation, append=True)


async def _generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool, *, append: bool) -> Any:
    rollout = importlib.import_module("slime.rollout.sglang_rollout")
    if any(value is not None for value in (getattr(sample, "multimodal_inputs", None) or {}).values()):
        return await rollout.generate(args, sample, sampling_params)
    status = type(sample).Status
    if sample.status not in (status.PENDING, status.ABORTED):
        raise ValueError(f"a sample that is {sample.status} cannot be generated")
    prompt = sample.tokens or rollout.GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    params = dict(sampling_params)
    params["max_new_tokens"] -= sample.response_length
    if params["max_new_tokens"] < 0:
        raise ValueError(f"the sample has {-params['max_new_tokens']} tokens more than it may")
    if params["max_new_tokens"] == 0:
        sample.status = status.TRUNCATED
        return sample
    payload: dict[str, Any] = {"sampling_params": params, "return_logprob": True, "input_ids": list(prompt)}
    # Rows are for training only.
    if getattr(args, "use_rollout_routing_replay", False) and not evaluation:
        payload["return_routed_experts"] = True
    if not sample.tokens:
        sample.tokens = list(prompt)
    session = getattr(sample, "session_id", None)
    key = session if getattr(args, "router_policy", None) == "consistent_hashing" else None
    reply, start = await common.ask(args, payload, key, append=append, sample=sample)
    tokens, logprobs = common.tokens_of(reply.meta_info)
    rows = await common.rows_of(reply, start, len(sample.tokens) + len(tokens), args)
    meta = dict(reply.meta_info)
    if hasattr(sample, "append_response_tokens"):
        # It checks the number of ids, and joins them with the sample's earlier ones at `routed_experts_start_len`.
        if rows is not None:
            meta["routed_experts"] = rows
        sample.append_response_tokens(args, tokens=tokens, log_probs=logprobs, trainable=True, meta_info=meta, text=reply.text)
        return sample
    rows = common.joined(sample, start, rows)
    sample.tokens = list(sample.tokens) + tokens
    sample.response_length += len(tokens)
    sample.response += reply.text
    sample.rollout_log_probs = list(sample.rollout_log_probs or []) + logprobs
    if rows is not None:
        sample.rollout_routed_experts = rows
    sample.update_from_meta_info(args, meta)
    return sample
