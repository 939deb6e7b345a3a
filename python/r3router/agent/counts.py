"""What the plug-ins of a host's engines count, as Prometheus reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from r3router.r3.store import COUNTS

_NAMES: Final = (
    ("by_reference", "by_reference_total", "counter", "Payloads that left the engine by reference."),
    ("written", "written_total", "counter", "Payloads that were written."),
    ("written_bytes", "written_bytes_total", "counter", "Row bytes that were written."),
    ("failed", "failed_total", "counter", "Payloads that could not be written; who asks for them is told."),
    ("pending", "pending", "gauge", "Payloads that wait to be written."),
    ("waits", "waits_total", "counter", "Steps that waited for rows to be read before their slots were used again."),
    ("waited_s", "waited_seconds_total", "counter", "How long they waited."),
    ("arena_bytes", "arena_bytes", "gauge", "Bytes in use."),
    ("arena_cap_bytes", "arena_cap_bytes", "gauge", "Most bytes."),
    ("agent_starts", "agent_starts_total", "counter", "How often the agent was started."),
)


def plugin_lines(places: Iterable[Path]) -> list[str]:
    """Lines of all plug-ins that have left their counts; unreadable ones are left out."""
    found = []
    for place in places:
        try:
            found.append((place.name, json.loads((place / COUNTS).read_text())))
        except (OSError, ValueError):
            continue
    lines: list[str] = []
    for key, name, kind, help_ in _NAMES:
        values = [f'r3router_plugin_{name}{{directory="{place}"}} {counts[key]}' for place, counts in found if key in counts]
        if values:
            lines += [f"# HELP r3router_plugin_{name} {help_}", f"# TYPE r3router_plugin_{name} {kind}", *values]
    inline = [
        f'r3router_plugin_inline_total{{directory="{place}",reason="{reason}"}} {count}'
        for place, counts in found
        for reason, count in sorted(counts.get("inline", {}).items())
    ]
    if inline:
        lines += ["# HELP r3router_plugin_inline_total Payloads that went in-line.", "# TYPE r3router_plugin_inline_total counter", *inline]
    return lines
