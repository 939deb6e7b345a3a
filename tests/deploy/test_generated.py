"""Dashboard, alerts and the chart's schema against what the router really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deploy.tools import CHART, ROOT, module
from r3router.deploy import alerts, board, values
from r3router.native import core

ROW = re.compile(r"^\| `(r3router_\w+)` \| (\w+) \| (.*?) \| .*\|$", re.MULTILINE)
NAME = re.compile(r"\br3router_\w+")
# Labels that a family has beside those that METRICS.md lists, and those that a scrape adds.
RANK, WORKER, SCRAPE = {"worker", "rank", "role"}, {"worker", "role"}, {"instance", "namespace", "pod", "job", "le"}
UNLISTED = {"r3router_rank_closed": {"reason"}, "r3router_legs_total": {"result"}, "r3router_legs_open": set()}


def families() -> dict[str, tuple[str, dict[str, set[str]]]]:
    """Name -> type, and labels with the values that METRICS.md closes them to (none: open)."""
    found = {}
    for name, kind, labels in ROW.findall((ROOT / "rust" / "METRICS.md").read_text("utf-8")):
        listed = {}
        for part in filter(None, labels.split("; ")):
            label, _, closed = part.partition(": ")
            listed[label.strip("`")] = set(closed.split(", "))
        found[name] = (kind, listed)
    assert len(found) > 40
    return found


def series(family: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", family)


def labels_of(name: str) -> set[str]:
    own = RANK if name.startswith("r3router_rank_") else WORKER if name.startswith(("r3router_worker_", "r3router_legs_")) else set()
    return own | UNLISTED.get(name, set()) | set(families()[name][1])


def expressions() -> list[tuple[str, str]]:
    panels = [p for p in board.dashboard()["panels"] if p["type"] == "timeseries"]
    of_panels = [(f"panel {p['title']}", t["expr"]) for p in panels for t in p["targets"]]
    keda = re.search(r"query: (.*)", (CHART / "templates" / "keda.yaml").read_text("utf-8"))
    assert keda
    choices = [(f"choice {c['name']}", c["query"]["query"]) for c in board.dashboard()["templating"]["list"] if c["type"] == "query"]
    return of_panels + choices + [(f"alert {a.name}", a.expr) for a in alerts.ALERTS] + [("keda", keda[1])]


@pytest.mark.parametrize(("where", "expr"), expressions(), ids=lambda v: v if len(v) < 60 else "")
def test_every_metric_and_label_that_is_named_exists(where: str, expr: str):
    known = families()
    names = NAME.findall(expr)
    assert names, where
    for name in names:
        kind = known.get(series(name), known.get(name, ("none", {})))[0]
        assert kind != "none", f"{where}: {name} is no metric of the router"
        assert (kind == "histogram") == (series(name) != name), f"{where}: {name} is a {kind}"
    for name, inside in re.findall(r"\b(r3router_\w+)\{([^}]*)\}", expr):
        for label, value in re.findall(r'(\w+)\s*(?:=~|!=|!~|=)\s*"([^"]*)"', inside):
            family = series(name) if series(name) in known else name
            assert label in labels_of(family) | SCRAPE, f"{where}: {name} has no label {label}"
            closed = known[family][1].get(label, set())
            assert not closed or value in closed or value.startswith("$"), f"{where}: {label}={value} is never written"


def test_counters_are_looked_at_as_rates_and_gauges_as_they_are():
    known = families()
    for where, expr in expressions():
        for name, function in ((n, f) for f, n in re.findall(r"(\w+)\((r3router_\w+)", expr)):
            kind = known.get(series(name), known.get(name, ("none", {})))[0]
            if function in ("rate", "increase", "resets"):
                assert kind in ("counter", "histogram"), f"{where}: {function} of {name}, a {kind}"
            elif function in ("sum", "max", "max_over_time", "min_over_time"):
                assert kind == "gauge", f"{where}: {function} of {name}, a {kind}"


def test_every_metric_of_the_router_is_on_the_dashboard():
    shown = {
        series(name) if series(name) in families() else name
        for _, expr in expressions()[: -len(alerts.ALERTS) - 1]
        for name in NAME.findall(expr)
    }
    assert set(families()) - shown == set()


def test_reasons_and_results_that_alerts_name_are_the_routers():
    decisions = families()["r3router_decisions_total"][1]["reason"]
    failures = families()["r3router_retries_total"][1]["reason"]
    text = " ".join(a.expr for a in alerts.ALERTS)
    assert set(re.findall(r'reason="(\w+)"', text)) <= decisions
    assert set(re.findall(r'result="(\w+)"', text)) <= failures
    assert 'reason="ejected"' in text
    assert 'result="transfer"' in text


def test_there_are_eight_alerts_with_a_text_that_says_what_to_do():
    assert len(alerts.ALERTS) == len({a.name for a in alerts.ALERTS}) == 8
    flags = {s["flag"] for s in json.loads(core.settings_schema())}
    for alert in alerts.ALERTS:
        assert len(alert.description) > 100
        assert alert.severity in ("warning", "critical")
        assert set(re.findall(r"--[a-z0-9-]+", alert.description)) <= flags
        assert set(NAME.findall(alert.description)) <= set(families())


def test_panels_do_not_overlap_and_each_has_a_title_of_its_own():
    taken: dict[tuple[int, int], str] = {}
    titles = set()
    for panel in board.dashboard()["panels"]:
        at = panel["gridPos"]
        assert panel["title"] not in titles
        titles.add(panel["title"])
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]
            assert cell[0] < 24


def test_the_schema_has_every_setting_or_says_which_value_sets_it():
    settings = {s["name"] for s in json.loads(core.settings_schema())}
    properties = values.schema()["properties"]["settings"]
    assert set(properties["properties"]) | set(values.MANAGED) == settings
    assert set(properties["properties"]) & set(values.MANAGED) == set()
    assert properties["additionalProperties"] is False


def test_every_default_of_the_router_passes_the_schema():
    jsonschema = module("jsonschema")
    for setting in json.loads(core.settings_schema()):
        if setting["default"] is not None:
            jsonschema.validate(setting["default"], values.setting_schema(setting))


def test_a_kind_of_setting_that_has_no_schema_is_told():
    setting = {"name": "new", "expects": "a colour", "help": "", "range": None, "choices": []}
    with pytest.raises(LookupError, match="setting new: no schema for 'a colour'"):
        values.setting_schema(setting)


# A value, and whether the router takes it. The schema must say the same, or the router would refuse at its start what helm let pass.
SAMPLES = [
    ("request_timeout_secs", ["4h", "1h30m", 300, 0.5, "300", "250ms"], ["4 parsecs", 0, -1, True, "", "h"]),
    ("max_payload_size", ["512MiB", 4096, "1.5GB", "8 GiB"], ["8Gb/s", 12, "big"]),
    ("policy", ["random"], ["best", 1]),
    ("window", ["computed", "unbounded", 4], ["wide", 0]),
    ("queue_size", [0, 10], [-1, 1.5, True]),
    ("max_concurrent_requests", [-1, 5], [-2]),
    ("kv_margin", [0, 0.5], [0.95, "x"]),
    ("pd_disaggregation", [True, False], ["maybe"]),
    (
        "prefill",
        [["http://p:1 8998"], [{"url": "http://p:1", "bootstrap_port": 8998}], [{"url": "http://p:1"}], ["http://p:1 none"]],
        [[{"uri": "http://p:1"}], [{"url": "http://p:1", "bootstrap_port": 0}]],
    ),
    ("decode", [["http://d:1"]], [["d:1 2 3"]]),
    ("log_level", ["debug"], ["loud"]),
    ("r3_layers", [48], [0, 70000]),
    ("retry_backoff_multiplier", [1.5, 2], [0.5]),
    ("poll_interval_ms", [200, "1s"], [1]),
]


@pytest.mark.parametrize(("name", "good", "bad"), SAMPLES, ids=[s[0] for s in SAMPLES])
def test_the_schema_takes_and_refuses_what_the_router_does(name: str, good: list[object], bad: list[object], tmp_path: Path):
    jsonschema = module("jsonschema")
    setting = next(s for s in json.loads(core.settings_schema()) if s["name"] == name)
    schema = values.setting_schema(setting)
    pd = {} if name == "pd_disaggregation" else {"pd_disaggregation": "true"}
    for value, right in [*((v, True) for v in good), *((v, False) for v in bad)]:
        path = tmp_path / "r3router.toml"
        path.write_text("\n".join(f"{k} = {v}" for k, v in {**pd, name: toml(value)}.items()))
        try:
            core.check_settings(json.dumps({"flags": {}, "env": {}, "config": str(path)}))
            taken = True
        except core.SettingsError:
            taken = False
        assert taken == right, f"the router {'takes' if taken else 'refuses'} {name} = {value!r}"
        assert jsonschema.Draft7Validator(schema).is_valid(value) == right, f"the schema differs on {name} = {value!r}"


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)
