"""Rules and metrics, judged by Prometheus' own tool."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from deploy.test_generated import families
from deploy.tools import CHART, module, run
from r3router.deploy import alerts, board
from scripted.lab import Lab

RULES = CHART / "files" / "alerts.yaml"


def test_prometheus_reads_the_rules():
    done = run("promtool", "check", "rules", RULES)
    assert done.returncode == 0, done.stderr
    assert "8 rules found" in done.stdout


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path):
    yaml = module("yaml")
    tests = yaml.safe_load((Path(__file__).parent / "alerts.test.yaml").read_text("utf-8"))
    tests["rule_files"] = [str(RULES)]
    texts = {a.name: {"summary": a.summary, "description": a.description} for a in alerts.ALERTS}
    fires, quiet = set(), 0
    for group in tests["tests"]:
        for case in group["alert_rule_test"]:
            fires |= {case["alertname"]} if case["exp_alerts"] else set()
            quiet += not case["exp_alerts"]
    assert fires == set(texts)
    assert quiet == 7
    # Texts have values in them; they are compared without.
    bare = yaml.safe_load(RULES.read_text("utf-8"))
    for rule in bare["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(bare), "utf-8")
    tests["rule_files"] = [str(tmp_path / "rules.yaml")]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests), "utf-8")
    done = run("promtool", "test", "rules", tmp_path / "tests.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_texts_of_alerts_can_be_filled_in(tmp_path: Path):
    for alert in alerts.ALERTS:
        labels = set(re.findall(r"\$labels\.(\w+)", alert.description))
        assert labels <= {"instance", "worker", "rank", "role"}
        if " by (" in alert.expr.partition(" > ")[0]:
            [kept] = set(re.findall(r"^(?:sum|max) by \((.*?)\)", alert.expr)) or {"instance"}
            assert labels <= set(kept.split(", ")), alert.name


def test_the_expressions_of_the_dashboard_are_prometheus(tmp_path: Path):
    expressions = [t["expr"] for p in board.dashboard()["panels"] for t in p.get("targets", [])]
    assert len(expressions) > 40
    rules = [{"record": f"panel:{at}", "expr": expr.replace("$__rate_interval", "1m")} for at, expr in enumerate(expressions)]
    path = tmp_path / "panels.json"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), "utf-8")
    done = run("promtool", "check", "rules", path)
    assert done.returncode == 0, done.stderr
    assert f"{len(expressions)} rules found" in done.stdout


async def test_prometheus_finds_nothing_to_remark_on_the_metrics(lab: Lab):
    _, _, client = await lab.serve()
    await client.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}})
    scraped = (await client.get("/metrics")).body.decode()
    assert set(re.findall(r"# TYPE (r3router_\w+)", scraped)) == set(families())
    assert "\nr3router_rank_window{" in scraped
    done = await asyncio.to_thread(run, "promtool", "check", "metrics", stdin=scraped)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
