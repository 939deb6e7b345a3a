"""Small bodies: added latency at a fixed rate, requests per second of one router core, in regular and in PD mode."""

from __future__ import annotations

import statistics
import subprocess
from dataclasses import dataclass, field
from typing import Any

from .fleet import Backends, Fast, load, names, router

BODY = {"input_ids": list(range(100, 164)), "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
CONNECTIONS = 32
RATE = 1000.0


@dataclass
class Row:
    """Medians over the rounds."""

    mode: str
    router: str
    per_second: list[float] = field(default_factory=list)
    per_core: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)

    def as_dict(self, straight: Row) -> dict[str, Any]:
        """The table's cells; latencies are over those of the straight connection."""
        median = statistics.median
        return {
            "mode": self.mode,
            "router": self.router,
            "req/s": round(median(self.per_second)),
            "req/s per router core": round(median(self.per_core)) if self.per_core else None,
            "router CPU us/req": round(1e6 / median(self.per_core), 1) if self.per_core else None,
            "p50 us": round(median(self.p50_us)),
            "p99 us": round(median(self.p99_us)),
            "added p50 us": round(median(self.p50_us) - median(straight.p50_us)),
            "added p99 us": round(median(self.p99_us) - median(straight.p99_us)),
        }


def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Straight, r3router and the peers in turn, `rounds` times, each `seconds` of closed loop and of fixed rate. In PD mode also the relay,
    which sends a request to both engines and copies decode's reply: what of the latency is the way and the machine, not the router."""
    table: list[dict[str, Any]] = []
    for mode in ("regular", "pd"):
        with Fast(mode == "pd").run() as backends:
            targets = [*names(), *(["relay"] if mode == "pd" else [])]
            rows = {name: Row(mode, name) for name in ["straight", *targets]}
            for _ in range(rounds):
                straight = f"127.0.0.1:{backends.decode if mode == 'pd' else backends.regular}"
                one(rows["straight"], straight, seconds, None)
                for name in targets:
                    through(rows[name], backends, seconds)
            table += [row.as_dict(rows["straight"]) for row in rows.values() if row.p50_us]
    return table


def through(row: Row, backends: Backends, seconds: float) -> None:
    """One round through a router. A peer that leaves a request unanswered has one round less."""
    try:
        with router(row.router, backends, pd=row.mode == "pd") as (address, process):
            one(row, address, seconds, process.cpu_seconds)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        if row.router in ("r3router", "relay"):
            raise
        print(f"   {row.mode}, {row.router}: {str(error)[:300]}", flush=True)


def one(row: Row, address: str, seconds: float, cpu: Any) -> None:
    """One round of one target."""
    load(address, BODY, connections=CONNECTIONS, seconds=0.5)
    before = cpu() if cpu else 0.0
    closed = load(address, BODY, connections=CONNECTIONS, seconds=seconds)
    spent = cpu() - before if cpu else 0.0
    paced = load(address, BODY, connections=CONNECTIONS, seconds=seconds, rate=RATE)
    row.p50_us.append(paced["p50_us"])
    row.p99_us.append(paced["p99_us"])
    row.per_second.append(closed["per_second"])
    if cpu:
        row.per_core.append(closed["ok"] / spent)
