"""Compares rows that came through a router with those of a unified engine, which is given the same tokens as a prompt.

The unified engine runs other batches and other chunks, so a few near ties among 256 experts fall the other way. What is counted is, for
each token, the share of the chosen experts that the unified engine also chose: near 1 for the right rows, near top_k/experts for another
token's or for junk. A row with less than half is wrong.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from engines import call
from model import Shape
from numpy.typing import NDArray


def unified(url: str, ids: list[int], shape: Shape) -> NDArray[np.uint8]:
    """Rows of all tokens, by one unified engine."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}, "return_routed_experts": True}
    status, raw = call(f"{url}/generate", body, timeout=120)
    if status != 200:
        raise RuntimeError(f"the unified engine answers {status} {raw[:300]!r}")
    rows = np.frombuffer(base64.b64decode(json.loads(raw)["meta_info"]["routed_experts"]), "<i4")
    return rows.astype(np.uint8).reshape(-1, shape.layers, shape.top_k)


def shares(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> NDArray[np.float64]:
    """For each row the share of experts, over all layers, that are in both."""
    both = np.zeros(len(left))
    for at in range(left.shape[2]):
        both += (left[:, :, at : at + 1] == right).any(axis=2).sum(axis=1)
    found: NDArray[np.float64] = both / (left.shape[1] * left.shape[2])
    return found


def compare(place: Path, url: str, shape: Shape) -> dict[str, Any]:
    """All kept replies of a column."""
    total: dict[str, Any] = {"replies": 0, "rows": 0, "wrong_rows": 0, "wrong_replies": 0}
    least, mean = 1.0, []
    for path in sorted(place.glob("sample-*.npz")):
        with np.load(path) as kept:
            ids, rows = kept["ids"].tolist(), kept["rows"]
        try:
            right = unified(url, ids, shape)
        except (OSError, RuntimeError, KeyError) as error:
            total["error"] = str(error)[:300]
            break
        if rows.shape != right.shape:
            total["wrong_replies"] += 1
            total["shapes"] = [rows.shape, right.shape]
            continue
        share = shares(rows, right)
        wrong = int((share < 0.5).sum())
        total["replies"] += 1
        total["rows"] += len(share)
        total["wrong_rows"] += wrong
        total["wrong_replies"] += wrong > 0
        least, mean = min(least, float(share.min())), [*mean, float(share.mean())]
        path.unlink()
    return total | {"least_share": round(least, 3), "mean_share": round(float(np.mean(mean)), 4) if mean else None}
