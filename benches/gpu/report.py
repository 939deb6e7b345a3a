"""What the files of a column say, as numbers and as a table."""

from __future__ import annotations

import contextlib
import json
import math
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

DECODE = re.compile(
    r"Decode batch.*?#running-req: (\d+).*?mamba usage: ([\d.]+).*?pre-allocated usage: ([\d.]+), "
    r"#prealloc-req: (\d+), #transfer-req: (\d+)"
)


def lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines; the last may be cut."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(text))
    return found


def quantile(values: list[float], part: float) -> float | None:
    """By the nearest rank."""
    return sorted(values)[min(len(values) - 1, math.ceil(part * len(values)) - 1)] if values else None


def series(watched: list[dict[str, Any]], kind: str, role: str, take: Callable[[dict[str, Any]], float]) -> list[float]:
    """One figure over time."""
    return [take(entry) for entry in watched if entry["kind"] == kind and entry.get("role") == role]


def usage(watched: list[dict[str, Any]], name: str) -> dict[str, dict[str, float]]:
    """Cores and most memory of the parts of a program."""
    seen = [entry for entry in watched if entry["kind"] == "process" and entry["name"] == name]
    found: dict[str, dict[str, float]] = {}
    for part in {part for entry in seen for part in entry["parts"]}:
        its = [(entry["at"], *entry["parts"][part]) for entry in seen if part in entry["parts"]]
        seconds = its[-1][1] - its[0][1]
        span = its[-1][0] - its[0][0]
        found[part] = {
            "cpu_s": round(seconds, 2),
            "cores": round(seconds / span, 3) if span else 0.0,
            "rss_mb": round(max(entry[2] for entry in its) / 1e6),
        }
    return found


def column(name: str, place: Path, seconds: float, logs: dict[str, str]) -> dict[str, Any]:
    """Everything of one column."""
    results, watched = lines(place / "results.jsonl"), lines(place / "watch.jsonl")
    ends = [entry for entry in results if entry.get("end")]
    results = [entry for entry in results if not entry.get("end")]
    done = [entry for entry in results if "why" not in entry]
    took = [entry["took"] for entry in done]
    load = ends[0] if ends else {}
    logged = [tuple(map(float, found.groups())) for found in DECODE.finditer(logs["decode"])]

    def disagg(field: str) -> Callable[[dict[str, Any]], float]:
        return lambda entry: float(sum((rank.get("disaggregation") or {}).get(field, 0) for rank in entry["ranks"]))

    def gauge(field: str) -> Callable[[dict[str, Any]], float]:
        return lambda entry: max((v for k, v in entry["values"].items() if k.startswith(field)), default=0.0)

    transfer = series(watched, "loads", "decode", disagg("decode_transfer_queue_reqs"))
    running = series(watched, "loads", "decode", lambda e: float(sum(rank["num_running_reqs"] for rank in e["ranks"])))
    probes = {role: series(watched, "probe", role, lambda e: e["took"]) for role in ("prefill", "decode")}

    def said(family: str) -> list[float]:
        router = [entry["values"] for entry in watched if entry["kind"] == "router"]
        return [sum(v for k, v in values.items() if k.startswith(family) and "prefill" not in k) for values in router]

    return {
        "name": name,
        "outcomes": dict(Counter(entry.get("why", "completed") for entry in results)),
        "rows": dict(Counter(entry["r3"] for entry in done if "r3" in entry)),
        "unfinished": load.get("running"),
        "broken_clients": load.get("broken"),
        "took": {"p50": quantile(took, 0.5), "p99": quantile(took, 0.99)},
        "rollouts_s": round(len(done) / seconds, 3),
        "tokens_s": round(sum(entry["tokens"] for entry in done) / seconds, 1),
        "mean_prompt": round(sum(entry["prompt"] for entry in done) / len(done)) if done else None,
        "reply_mb": round(sum(entry.get("bytes", 0) for entry in done) / len(done) / 1e6, 1) if done else None,
        "half": [sum(entry["at"] <= seconds / 2 for entry in done), sum(entry["at"] > seconds / 2 for entry in done)],
        "transfer_peak": max([*transfer, *(entry[4] for entry in logged)], default=None),
        "transfer_mean": round(sum(transfer) / len(transfer), 1) if transfer else None,
        "prealloc_peak": max(series(watched, "loads", "decode", disagg("decode_prealloc_queue_reqs")), default=None),
        "running_mean": round(sum(running) / len(running), 1) if running else None,
        "mamba_peak": max([entry[1] for entry in logged] + series(watched, "gauges", "decode", gauge("sglang:mamba_usage")), default=None),
        "preallocated_peak": max((entry[2] for entry in logged), default=None),
        "bootstrap_peak": max(series(watched, "loads", "prefill", disagg("prefill_bootstrap_queue_reqs")), default=None),
        "inflight_peak": max(series(watched, "loads", "prefill", disagg("prefill_inflight_queue_reqs")), default=None),
        "model_info": {r: {"p50": quantile(v, 0.5), "p99": quantile(v, 0.99), "max": max(v, default=None)} for r, v in probes.items()},
        "router_queue_peak": max(said("r3router_queued_requests"), default=None),
        "window": quantile([value for value in said("r3router_rank_window") if value], 0.5),
        "processes": {part: usage(watched, part) for part in ("prefill", "decode", "router")},
    }


def number(value: Any, digits: int = 2) -> str:
    """A figure of the table."""
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def front(result: dict[str, Any], role: str) -> str:
    """CPU of an engine's HTTP process and detokenizer, in cores."""
    parts = result["processes"][role]
    return f"{parts.get('http', {}).get('cores', 0):.2f} + {parts.get('detoken', {}).get('cores', 0):.2f}"


def milliseconds(result: dict[str, Any], role: str) -> str:
    """Latencies of the probe."""
    return " / ".join(number(1000 * (value or 0.0), 0) for value in result["model_info"][role].values())


def router_cpu(result: dict[str, Any]) -> str:
    """CPU seconds of the router, in all and for a rollout."""
    seconds = sum(part["cpu_s"] for part in result["processes"]["router"].values())
    done = result["outcomes"].get("completed", 0)
    return f"{seconds:.1f} ({seconds / done:.3f} a rollout)" if done else f"{seconds:.1f}"


ROWS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("completed", lambda r: str(r["outcomes"].get("completed", 0))),
    ("engine timeouts", lambda r: str(sum(n for why, n in r["outcomes"].items() if "engine timeout" in why))),
    ("failed otherwise", lambda r: str(sum(n for why, n in r["outcomes"].items() if why != "completed" and "engine timeout" not in why))),
    ("replies without whole R3", lambda r: str(sum(n for what, n in r["rows"].items() if what != "whole"))),
    (
        "replies compared, with wrong R3 rows",
        lambda r: "{replies}, {wrong_replies} ({wrong_rows} of {rows} rows)".format(**r["compared"]),
    ),
    ("rollouts/s", lambda r: number(r["rollouts_s"])),
    ("output tokens/s", lambda r: number(r["tokens_s"], 0)),
    ("rollout p50 / p99 s", lambda r: f"{number(r['took']['p50'], 1)} / {number(r['took']['p99'], 1)}"),
    ("decode: peak `#transfer-req`", lambda r: number(r["transfer_peak"], 0)),
    ("decode: mean running", lambda r: number(r["running_mean"], 1)),
    ("decode: peak mamba usage", lambda r: number(r["mamba_peak"])),
    ("decode: peak pre-allocated usage", lambda r: number(r["preallocated_peak"])),
    ("prefill `/model_info` p50 / p99 / max ms", lambda r: milliseconds(r, "prefill")),
    ("decode `/model_info` p50 / p99 / max ms", lambda r: milliseconds(r, "decode")),
    ("prefill front end, HTTP + detokenizer, cores", lambda r: front(r, "prefill")),
    ("decode front end, HTTP + detokenizer, cores", lambda r: front(r, "decode")),
    ("router CPU s", router_cpu),
    ("router peak RSS MB", lambda r: str(sum(part["rss_mb"] for part in r["processes"]["router"].values()))),
]


def table(results: list[dict[str, Any]]) -> str:
    """All columns as Markdown."""
    head = ["| | " + " | ".join(result["name"] for result in results) + " |", "|---|" + "---|" * len(results)]
    return "\n".join(head + [f"| {title} | " + " | ".join(value(result) for result in results) + " |" for title, value in ROWS]) + "\n"


def pack(folder: Path, out: Path) -> None:
    """The logs, their ends where they are long, and the lines of each column, in one archive."""
    with tarfile.open(out / "logs.tar.xz", "w:xz") as archive:
        for path in [*folder.glob("*.log"), *folder.glob("*/*.log"), *folder.glob("*/*.jsonl"), folder / "commands.txt"]:
            if path.exists() and path.stat().st_size < 20_000_000:
                archive.add(path, str(path.relative_to(folder)))
