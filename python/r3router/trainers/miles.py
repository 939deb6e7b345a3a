"""For miles: `--custom-generate-function-path r3router.trainers.miles.generate`.

`generate` takes miles' `GenerateFnInput` and, from older releases, `(args, sample, sampling_params)`. `generate_append` resumes partial
rollouts without fetching the rows that the sample has. Requests are made by miles' own helpers, so what it adds to them stays.
"""

from __future__ import annotations

import importlib
import inspect
from copy import deepcopy
from typing import Any

from . import common


async def generate(input: Any, sample: Any = None, sampling_params: dict[str, Any] | None = None, evaluation: bool = False) -> Any:  # noqa: A002
    """One turn; `GenerateFnOutput`, or the sample when called as older releases do."""
    return await _entry(input, sample, sampling_params, evaluation, append=False)


async def generate_append(
    input: Any,  # noqa: A002
    sample: Any = None,
    sampling_params: dict[str, Any] | None = None,
    evaluation: bool = False,
) -> Any:
    """As `generate`; a resumed sample keeps its rows, and only those of new tokens are asked for (`routed_experts_start_len`)."""
    return await _entry(input, sample, sampling_params, evaluation, append=True)


async def _entry(given: Any, sample: Any, sampling_params: dict[str, Any] | None, evaluation: bool, *, append: bool) -> Any:
    if sample is not None:
        state = None
        module = _optional("miles.rollout.sglang_rollout")
        if module is not None and hasattr(module, "GenerateState"):
            state = module.GenerateState(given)
        return await _turn(given, state, sample, sampling_params or {}, evaluation, append)
    types = importlib.import_module("miles.rollout.base_types")
    done = await _turn(given.args, given.state, given.sample, given.sampling_params, bool(getattr(given, "evaluation", evaluation)), append)
    return types.GenerateFnOutput(samples=done)


async def _turn(args: Any, state: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool, append: bool) -> Any:
    helpers = importlib.import_module("miles.rollout.generate_utils.generate_endpoint_utils")
    status = type(sample).Status
    if sample.status not in (status.PENDING, status.ABORTED):
        raise ValueError(f"a sample that is {sample.status} cannot be generated")
    prompt = helpers.compute_prompt_ids_from_sample(state, sample)
    params = deepcopy(sampling_params)
    resumed = len(sample.response) > 0
    if resumed:
        params["max_new_tokens"] -= len(sample.tokens) - len(prompt)
        if params["max_new_tokens"] <= 0:
            sample.status = status.TRUNCATED
            return sample
    input_ids = list(sample.tokens if resumed else prompt)
    known = {
        "input_ids": input_ids,
        "sampling_params": params,
        "multimodal_inputs": getattr(sample, "multimodal_inputs", None),
        "rollout_video_inputs": getattr(sample, "rollout_video_inputs", None),
        "evaluation": evaluation,
    }
    if hasattr(helpers, "compute_rollout_input_ids"):
        known["rollout_input_ids"] = helpers.compute_rollout_input_ids(sample, input_ids, prompt)
    # Releases differ in what they take.
    taken = inspect.signature(helpers.compute_request_payload).parameters
    payload, halted = helpers.compute_request_payload(args, **{name: value for name, value in known.items() if name in taken})
    if payload is None:
        sample.status = halted
        return sample
    if evaluation:
        # Rows are for training only.
        payload = {name: value for name, value in payload.items() if name != "return_routed_experts"}
    if not sample.tokens:
        sample.tokens = list(prompt)
    key = None
    if hasattr(helpers, "compute_routing_headers"):
        key = (helpers.compute_routing_headers(args, sample) or {}).get("X-SMG-Routing-Key")
    before = sample.rollout_routed_experts if append else None
    reply, start = await common.ask(args, payload, key, append=append, sample=sample)
    output = {"text": reply.text, "output_ids": reply.output_ids, "meta_info": reply.meta_info}
    await _await(helpers.update_sample_from_response(args, sample, payload=payload, output=output))
    rows = await common.rows_of(reply, start, len(sample.tokens), args)
    if before is not None:
        sample.rollout_routed_experts = before
    if rows is not None:
        sample.rollout_routed_experts = common.joined(sample, start, rows)
    return sample


async def _await(value: Any) -> None:
    if inspect.isawaitable(value):
        await value


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
