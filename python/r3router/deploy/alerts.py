"""The Prometheus rules: eight alerts, each for a fault that a person has to look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Alert:
    """One alert. `lasts`: how long `expr` has to hold."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    description: str


ALERTS: Final = (
    Alert(
        "R3RouterReservationLeak",
        "min_over_time(r3router_requests_live[5m]) == 0 and max_over_time(r3router_requests_live[5m]) == 0 "
        "and on (instance) sum by (instance) (r3router_rank_open) > 0",
        "2m",
        "critical",
        "Reservations are held though no request is in work",
        "{{ $labels.instance }} has had no request for five minutes and still counts {{ $value }} attempts as open on ranks. "
        "That room is lost until the router restarts. Keep its log and /metrics, restart it, and report it as a fault of the router.",
    ),
    Alert(
        "R3RouterQueueAge",
        "r3router_queue_oldest_seconds > 900",
        "5m",
        "warning",
        "A request has waited for 15 minutes",
        "The oldest request in {{ $labels.instance }} has waited for {{ $value | humanizeDuration }}; after "
        "--queue-timeout-secs it gets 429. "
        "The reasons of r3router_decisions_total say what it waits for: rows, kv and mamba are sizes of the decode ranks, prefill and "
        "window are speeds, arena is the router's memory.",
    ),
    Alert(
        "R3RouterRankEjected",
        'r3router_rank_closed{reason="ejected"} == 1',
        "1m",
        "warning",
        "A rank is out of choice after failures",
        "Rank {{ $labels.rank }} of {{ $labels.worker }} ({{ $labels.role }}) has failed --cb-failure-threshold times in a "
        "row and gets no work. "
        "r3router_legs_total of the worker says how it failed.",
    ),
    Alert(
        "R3RouterRetraction",
        'max by (instance, worker, rank, role) (max_over_time((r3router_rank_closed{reason="retracted"})[5m:])) == 1',
        "10m",
        "warning",
        "A decode rank pushes requests out under memory pressure",
        "Rank {{ $labels.rank }} of {{ $labels.worker }} has retracted requests for ten minutes. The router sends it none "
        "meanwhile. Somebody "
        "else sends to that engine (r3router_rank_foreign), or replies grow past --default-max-new-tokens: raise it, or --kv-margin.",
    ),
    Alert(
        "R3RouterTransferSlow",
        'r3router_rank_tau_seconds{role="decode"} > 3 * min_over_time((r3router_rank_tau_seconds{role="decode"} > 0)[6h:1m])',
        "10m",
        "warning",
        "KV takes three times as long to arrive as it did",
        "From binding to delivery a request of rank {{ $labels.rank }} of {{ $labels.worker }} takes {{ $value | "
        "humanizeDuration }} without "
        "queueing, over three times the least of the last six hours. Look at the network between prefill and decode, and at "
        "prefill's load.",
    ),
    Alert(
        "R3RouterArenaFull",
        'r3router_r3_arena_bytes{what="reserved"} > on (instance) 0.95 * r3router_r3_arena_bytes{what="cap"}',
        "10m",
        "warning",
        "The memory for routing payloads is full",
        "{{ $labels.instance }} has promised {{ $value | humanize1024 }}B of payloads, over 95 % of --r3-arena-bytes: "
        "requests with R3 wait for "
        "it. Clients that forget to release references show in r3router_r3_objects; else the arena is too small for the fleet.",
    ),
    Alert(
        "R3RouterTransferFailures",
        'sum by (instance, worker, role) (increase(r3router_legs_total{result="transfer"}[10m])) > 3',
        "0m",
        "critical",
        "KV transfers fail",
        "{{ $value | humanize }} transfers of {{ $labels.worker }} ({{ $labels.role }}) failed in ten minutes. One worker: "
        "its NIC or its process. "
        "All of them: the network, or engines whose time-outs are shorter than their queues.",
    ),
    Alert(
        "R3RouterRestarts",
        "changes(r3router_start_time_seconds[1h]) > 1",
        "0m",
        "critical",
        "The router restarts again and again",
        "{{ $labels.instance }} has restarted {{ $value }} times in an hour. Requests in work were lost with each. The log of the previous "
        "container has the reason; exit code 137 is a memory limit below what r3-arena-bytes needs.",
    ),
)


def page() -> str:
    """The rule file, YAML. Texts are in JSON's quotes, which YAML reads as they are."""
    lines = ["# Made by `make docs`; a test fails when this file and the code differ.", "groups:", "  - name: r3router", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.lasts}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.description)}",
        ]
    return "\n".join(lines) + "\n"
