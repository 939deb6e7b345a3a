"""Large R3 replies: CPU seconds and peak memory of in-line merging, against a relay of the same bytes and the peer."""

from __future__ import annotations

import statistics
import subprocess
import time
from typing import Any

from .fleet import Backends, load, names, router
from .processes import Measured

LAYERS, TOP_K = 40, 8
MERGED = "r3router in-line, both legs full"
AT_HAND = "r3router in-line, both legs full and at hand"
DECODE_LATER_SECONDS = 0.5
"""Between prefill's reply and decode's, where both are not meant to be at hand at once."""
CELLS = ("reply MB", "CPU s/reply", "least", "wall s", "peak RSS over idle MB")
ROW_IDS = LAYERS * TOP_K
TEXT_BYTES_PER_ROW = ROW_IDS * 4 * 4 / 3


def rows_of(text_mb: float) -> int:
    """Rows whose base64 text is about `text_mb` MB."""
    return round(text_mb * 1e6 / TEXT_BYTES_PER_ROW)


def request(prompt_tokens: int, output_tokens: int, **more: Any) -> dict[str, Any]:
    """An R3 request with `prompt_tokens` input ids."""
    return {
        "input_ids": [151643] * prompt_tokens,
        "sampling_params": {"max_new_tokens": output_tokens},
        "return_routed_experts": True,
        **more,
    }


def measure(text_mb: float, concurrency: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """One row per target and concurrency; both legs send `text_mb` MB of R3 text."""
    prompt, output = rows_of(text_mb), 8
    junk = ("--no-start-len-rewrite",)
    cases: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [
        ("relay, unmerged", "relay", (), {}),
        (AT_HAND, "r3router", junk, {}),
    ]
    if "sglang-router" in names():
        cases += [
            ("sglang-router (no merge: decode's junk)", "sglang-router", (), {}),
            ("sglang-router + logprobs (its merge path)", "sglang-router", (), {"return_logprob": True}),
        ]
    table = []
    backends = Backends()
    with backends.run(prompt_tokens=prompt, output_tokens=output, row_ids=ROW_IDS):
        for label, name, extra, more in cases:
            table += case(backends, label, name, extra, request(prompt, output, **more), concurrency, repeats)
    backends = Backends()
    with backends.run(prompt_tokens=prompt, output_tokens=output, row_ids=ROW_IDS, hold_seconds=DECODE_LATER_SECONDS):
        for label, more in ((MERGED, {}), (MERGED + " + logprobs", {"return_logprob": True})):
            table += case(backends, label, "r3router", junk, request(prompt, output, **more), concurrency, repeats)
    backends = Backends()
    with backends.run(
        prompt_tokens=prompt, output_tokens=output, row_ids=ROW_IDS, hold_seconds=DECODE_LATER_SECONDS, honours_start_len=True
    ):
        label = "r3router as it comes: decode asked for its own rows"
        table += case(backends, label, "r3router", (), request(prompt, output), concurrency, repeats)
    relay_cpu = {row["concurrent"]: row["CPU s/reply"] for row in table if row["case"].startswith("relay")}
    for row in table:
        if row["CPU s/reply"] is None:
            row |= {"CPU / relay": None, "beyond arena MB/reply": None}
            continue
        row["CPU / relay"] = round(row["CPU s/reply"] / relay_cpu[row["concurrent"]], 2)
        # Prefill's rows wait in the arena: a byte an id, or, where decode's reply is at hand, the text that came.
        held = text_mb if row["case"] == AT_HAND else prompt * ROW_IDS / 1e6
        arena = held if row["case"].startswith("r3router") else 0.0
        row["beyond arena MB/reply"] = round(row["peak RSS over idle MB"] / row["concurrent"] - arena, 1)
    return table


def case(
    backends: Backends,
    label: str,
    name: str,
    extra: tuple[str, ...],
    body: dict[str, Any],
    concurrency: tuple[int, ...],
    repeats: int,
) -> list[dict[str, Any]]:
    """One router, at every concurrency. A peer that leaves a request unanswered gets one more try, then an empty row."""

    def tried(may_fail: bool) -> list[dict[str, Any]] | None:
        try:
            with router(name, backends, pd=True, extra=extra) as (address, process):
                return [{"case": label, "concurrent": count} | one(address, process, body, count, repeats) for count in concurrency]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            if not may_fail:
                raise
            print(f"   {label}: {error}", flush=True)
            return None

    if name in ("r3router", "relay"):
        return tried(may_fail=False) or []
    empty = [{"case": label + ": did not answer", "concurrent": count} | dict.fromkeys(CELLS) for count in concurrency]
    return tried(may_fail=True) or tried(may_fail=True) or empty


def one(address: str, process: Measured, body: dict[str, Any], count: int, repeats: int) -> dict[str, Any]:
    """`repeats` waves of `count` replies at once."""
    load(address, body, connections=1, seconds=30, requests=1)
    time.sleep(0.3)
    idle = process.memory_mb("VmRSS")
    cpu, wall, size = [], [], 0
    process.reset_peak()
    # Eight at once are a sample of their own: fewer waves.
    for _ in range(repeats if count == 1 else (repeats + 1) // 2):
        before = process.cpu_seconds()
        report = load(address, body, connections=count, seconds=90, requests=count)
        cpu.append((process.cpu_seconds() - before) / count)
        wall.append(report["seconds"])
        size = report["body_bytes"] // count
    peak = process.memory_mb("VmHWM")
    return {
        "reply MB": round(size / 1e6, 1),
        "CPU s/reply": round(statistics.median(cpu), 3),
        "least": round(min(cpu), 3),
        "wall s": round(statistics.median(wall), 2),
        "peak RSS over idle MB": round(peak - idle, 1),
    }
