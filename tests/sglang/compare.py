"""What a client can see of a reply, reduced to what must be equal between a unified engine and a pair behind the router."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .environment import OLD, PREFILL_SENDS_ROWS

_rows = PREFILL_SENDS_ROWS


def r3() -> bool:
    """Whether R3 can be asked for now: with older engines the checks run without it, and one checks the refusal."""
    return _rows


@contextlib.contextmanager
def plugin() -> Iterator[None]:
    """While prefill has the plug-in, which collects rows where the release does not: R3 can be asked for."""
    global _rows
    before, _rows = _rows, True
    try:
        yield
    finally:
        _rows = before


ROW_IDS = 8
"""R3 ids a token in the tiny models: 4 layers x top-2."""

TOP = not OLD
"""Whether top logprobs and those of chosen ids can be asked for; the other logprobs are compared with every release."""

LOGPROB_LISTS = (
    "input_token_logprobs",
    "output_token_logprobs",
    *(("input_top_logprobs", "output_top_logprobs", "input_token_ids_logprobs") if TOP else ()),
)
"""`output_token_ids_logprobs` is left out: the engine documents that in PD its first row is empty."""

# bfloat16 weights, float32 sums: the pair runs the same arithmetic, but batches may differ.
LOGPROB_TOLERANCE = 0.02


def rows(text: str | None) -> NDArray[np.int32]:
    """Decodes an R3 string to int32 rows `[tokens, ROW_IDS]`."""
    assert text is not None, "the reply has no routed_experts"
    raw = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    assert raw.size % ROW_IDS == 0, f"{raw.size} ids are no whole rows of {ROW_IDS}"
    return raw.reshape(-1, ROW_IDS)


def same_rows(got: str | None, expected: str | None) -> None:
    """Both strings are equal to the byte; both are absent where the engines have none."""
    if not r3():
        assert got is None and expected is None
        return
    left, right = rows(got), rows(expected)
    assert left.shape == right.shape, f"{left.shape[0]} rows, expected {right.shape[0]}"
    wrong = np.flatnonzero((left != right).any(axis=1))
    assert wrong.size == 0, f"rows {wrong[:10].tolist()} of {left.shape[0]} differ"
    assert got == expected


def same_logprobs(got: Any, expected: Any, path: str = "") -> None:
    """Same structure, tokens and order; values within `LOGPROB_TOLERANCE`."""
    if isinstance(expected, list):
        assert isinstance(got, list) and len(got) == len(expected), f"{path}: {got!r:.200} is not like {expected!r:.200}"
        for at, (left, right) in enumerate(zip(got, expected, strict=True)):
            same_logprobs(left, right, f"{path}[{at}]")
    elif isinstance(expected, float):
        assert isinstance(got, float) and abs(got - expected) <= LOGPROB_TOLERANCE, f"{path}: {got} is not {expected}"
    else:
        assert got == expected, f"{path}: {got!r} is not {expected!r}"


def same_generate(got: dict[str, Any], expected: dict[str, Any], *, r3: bool = True, logprobs: bool = False) -> None:
    """Two `/generate` objects say the same."""
    assert got["text"] == expected["text"]
    assert got["output_ids"] == expected["output_ids"]
    left, right = got["meta_info"], expected["meta_info"]
    for name in ("prompt_tokens", "completion_tokens", "finish_reason"):
        assert left[name] == right[name], name
    if r3:
        same_rows(left.get("routed_experts"), right.get("routed_experts"))
    if logprobs:
        for name in LOGPROB_LISTS:
            same_logprobs(left.get(name), right[name], name)
