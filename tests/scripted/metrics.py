"""Reads the Prometheus text format, strictly enough that a broken label fails the test."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


@dataclass
class Sample:
    """One line."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass
class Metrics:
    """One scrape."""

    samples: list[Sample] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, **labels: str) -> list[Sample]:
        """Samples of a name whose labels include these."""
        return [s for s in self.samples if s.name == name and all(s.labels.get(k) == v for k, v in labels.items())]

    def sum(self, name: str, **labels: str) -> float:
        """Their sum; 0 when there is none."""
        return sum(s.value for s in self.get(name, **labels))


def parse(text: str) -> Metrics:
    """Parses a scrape. Raises on any line that the format does not know."""
    metrics = Metrics()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            metrics.types[name] = kind
            continue
        if not line or line.startswith("#"):
            continue
        match = LINE.match(line)
        if not match:
            raise ValueError(f"not a sample: {line!r}")
        name, labels, value = match.groups()
        found, at = {}, 0
        for label in LABEL.finditer(labels or ""):
            if label.start() != at:
                break
            found[label.group(1)] = label.group(2)
            at = label.end()
        if at != len(labels or ""):
            raise ValueError(f"bad labels: {line!r}")
        metrics.samples.append(Sample(name, found, float(value)))
    return metrics
