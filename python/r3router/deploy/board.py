"""The Grafana dashboard: rows of panels, from the edge inwards to ranks, payloads and engines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]
_SOURCE: Final[Json] = {"type": "prometheus", "uid": "${source}"}
_RATE: Final = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One panel.

    `queries` are pairs of expression and legend. In an expression `@` stands for the selector of the chosen routers, `%` for that
    and the ranks' role.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    what: str = ""
    stacked: bool = False


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    of = "histogram_quantile({q}, sum by (le) (rate({m}_bucket@{r})))"
    return tuple((of.format(q=q, m=metric, r=_RATE), f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99))


def _rank(metric: str) -> tuple[tuple[str, str], ...]:
    return ((f"{metric}%", "{{role}} {{worker}} {{rank}}"),)


def _rate(metric: str, by: str, selector: str = "@") -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({by}) (rate({metric}{selector}{_RATE}))", "{{" + by + "}}"),)


def _sum(metric: str, legend: str) -> tuple[str, str]:
    return (f"sum({metric}@)", legend)


def _rate_sum(metric: str, legend: str) -> tuple[str, str]:
    return (f"sum(rate({metric}@{_RATE}))", legend)


ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "Requests",
        (
            Panel("Requests that end", "reqps", _rate("r3router_requests_total", "outcome"), "By what their client got.", stacked=True),
            Panel("Requests that arrive", "reqps", _rate("r3router_requests_started_total", "route"), stacked=True),
            Panel(
                "In work",
                "short",
                (
                    _sum("r3router_requests_live", "requests"),
                    _sum("r3router_queued_requests", "of them waiting"),
                    _sum("r3router_place_waiting_requests", "of them waiting for a place"),
                    _sum("r3router_client_connections", "client connections"),
                ),
            ),
            Panel("Time of a request", "s", _quantiles("r3router_request_seconds"), "From arrival to the end of the reply."),
            Panel("Wait in the router", "s", _quantiles("r3router_queue_wait_seconds"), "Where no engine clock runs."),
            Panel("Binding to delivery", "s", _quantiles("r3router_delivery_seconds"), "Prefill and the transfer, in engines."),
            Panel(
                "Spans of traces", "ops", _rate("r3router_trace_spans_total", "result"), "Dropped or failed: the collector is slow or away."
            ),
        ),
    ),
    (
        "Admission",
        (
            Panel("Bound, held and refused", "ops", _rate("r3router_decisions_total", "reason"), "Why requests wait."),
            Panel("Oldest waiting request", "s", (("max(r3router_queue_oldest_seconds@)", "age"),)),
            Panel("Bytes that wait", "bytes", (_sum("r3router_queued_bytes", "bodies"),)),
            Panel("Since the last start", "s", (("time() - max(r3router_start_time_seconds@)", "up"),), "A drop is a restart."),
            Panel("Gate closed by rollout control", "short", (("max(r3router_paused@)", "paused"),)),
            Panel(
                "Attempts, retries, aborts",
                "ops",
                (
                    _rate_sum("r3router_attempts_total", "attempts"),
                    *_rate("r3router_retries_total", "reason"),
                    _rate_sum("r3router_aborts_sent_total", "aborts"),
                ),
            ),
            Panel("Ranks closed, by reason", "short", (("sum by (reason) (r3router_rank_closed%)", "{{reason}}"),), stacked=True),
        ),
    ),
    (
        "Ranks",
        (
            Panel("In transfer", "short", _rank("r3router_rank_in_transfer"), "KV not delivered yet."),
            Panel("Window", "short", _rank("r3router_rank_window"), "Computed bound on transfers in flight."),
            Panel("Open", "short", _rank("r3router_rank_open")),
            Panel(
                "Load of others",
                "short",
                _rank("r3router_rank_foreign"),
                "Not this router's: another one, or clients that call the engine.",
            ),
            Panel("tau", "s", _rank("r3router_rank_tau_seconds"), "Unqueued time from binding to delivery."),
            Panel("Completions", "ops", _rank("r3router_rank_rate"), "That the window counts with."),
            Panel("Free rows", "short", _rank("r3router_rank_rows_free")),
            Panel("Free metadata slots", "short", _rank("r3router_rank_metadata_free")),
            Panel("Free mamba slots, in requests", "short", _rank("r3router_rank_mamba_free")),
            Panel("Free KV tokens", "short", _rank("r3router_rank_kv_free_tokens")),
            Panel("Uncached tokens queued", "short", _rank("r3router_rank_uncached_tokens"), "Prefill's work."),
            Panel("Age of the last report", "s", _rank("r3router_rank_report_age_seconds"), "-1: none yet."),
        ),
    ),
    (
        "Routing payloads (R3)",
        (
            Panel("Arena", "bytes", (("sum by (what) (r3router_r3_arena_bytes@)", "{{what}}"),)),
            Panel("About to leave engines", "bytes", _rank("r3router_rank_r3_bytes")),
            Panel("Text read from engines", "Bps", _rate("r3router_r3_text_bytes_total", "role"), stacked=True),
            Panel(
                "References held",
                "short",
                (_sum("r3router_r3_objects", "objects"), _rate_sum("r3router_r3_fetches_total", "fetches/s")),
            ),
            Panel("Bytes held for references", "bytes", (("sum by (place) (r3router_r3_object_bytes@)", "{{place}}"),), stacked=True),
            Panel("Made, and how they end", "ops", _rate("r3router_r3_objects_total", "event")),
            Panel("References given to the sink", "ops", _rate("r3router_r3_sink_total", "outcome")),
        ),
    ),
    (
        "Engines",
        (
            Panel("Up", "short", (("r3router_worker_up%", "{{role}} {{worker}}"),)),
            Panel("Legs that end", "ops", _rate("r3router_legs_total", "result", "%"), "A leg is one call of a pair.", stacked=True),
            Panel(
                "Legs that fail, by engine",
                "ops",
                (('sum by (worker) (rate(r3router_legs_total{result!="ok",&}' + _RATE + "))", "{{worker}}"),),
            ),
            Panel("Legs open", "short", (("r3router_legs_open%", "{{role}} {{worker}}"),)),
            Panel("Received", "Bps", (("sum by (worker) (rate(r3router_worker_received_bytes_total%" + _RATE + "))", "{{worker}}"),)),
            Panel(
                "Connections",
                "ops",
                (
                    ("sum(rate(r3router_worker_connections_total%" + _RATE + "))", "opened"),
                    ("sum(rate(r3router_worker_resent_total%" + _RATE + "))", "found dead, sent again"),
                ),
            ),
            Panel("Sent to clients", "Bps", (_rate_sum("r3router_reply_bytes_total", "replies"),)),
        ),
    ),
)

_ROUTERS: Final = 'namespace=~"$namespace",instance=~"$instance"'


def expand(expr: str) -> str:
    """The expression with its selectors."""
    ranks = _ROUTERS + ',role=~"$role"'
    return expr.replace("@", "{" + _ROUTERS + "}").replace("%", "{" + ranks + "}").replace("&", ranks)


def _panel(number: int, panel: Panel, at: tuple[int, int]) -> Json:
    custom: Json = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": _SOURCE,
        "gridPos": {"x": at[0], "y": at[1], "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": expand(expr), "legendFormat": legend}
            for at, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _choice(name: str, query: str) -> Json:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> Json:
    """The dashboard, as Grafana imports it."""
    panels: list[Json] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for at, panel in enumerate(row):
            panels.append(_panel(len(panels) + 1, panel, (at % 3 * 8, y + at // 3 * 8)))
        y += (len(row) + 2) // 3 * 8
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus", "current": {}}
    return {
        "title": "r3router",
        "uid": "r3router",
        "description": "Made by `make docs`; a test fails when this file and the code differ.",
        "tags": ["r3router", "sglang"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                source,
                _choice("namespace", "label_values(r3router_requests_live, namespace)"),
                _choice("instance", 'label_values(r3router_requests_live{namespace=~"$namespace"}, instance)'),
                _choice("role", "label_values(r3router_rank_open, role)"),
            ]
        },
        "panels": panels,
    }


def page() -> str:
    """The dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"
