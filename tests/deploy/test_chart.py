"""The chart: every example, rendered and held to Kubernetes' own schemas, to the router, and to what was rendered before."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.rendered import accepted, check_router, check_schemas, config, containers, named, routers
from deploy.schemas import OLDEST, Json, load
from deploy.tools import CHART, DEPLOY, module, run, same_as_golden
from r3router.native import core

EXAMPLES = sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))
NAMES = [path.stem for path in EXAMPLES]


def template(*arguments: str | Path, chart: Path = CHART) -> tuple[int, str, str]:
    done = run("helm", "template", "r3", chart, "--namespace", "rollouts", "--kube-version", f"{OLDEST}.0", *arguments)
    return done.returncode, done.stdout, done.stderr


@functools.cache
def rendered(name: str) -> str:
    status, out, err = template("--values", DEPLOY / "helm" / "examples" / f"{name}.yaml")
    assert status == 0, err
    return out


def manifests(name: str) -> list[Json]:
    return load(rendered(name))


def test_the_chart_lints_without_a_remark():
    for values in ([], *(["--values", str(path)] for path in EXAMPLES)):
        done = run("helm", "lint", "--strict", "--kube-version", f"{OLDEST}.0", CHART, *values)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "[WARNING]" not in done.stdout
        assert "[ERROR]" not in done.stdout


def test_the_examples_are_there():
    assert NAMES == ["closed", "discovery", "pd", "regular", "scaled", "tls"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_renders_as_before(name: str):
    # The generated files have tests of their own.
    text = re.sub(r"(?s)(  r3router\.json: \|\n).*?(?=\n---|\Z)", r"\1    …", rendered(name))
    text = re.sub(r"(?s)(\n  # Made by `make docs`[^\n]*\n  groups:\n).*?(?=\n---|\Z)", r"\1    …", text)
    same_as_golden(f"{name}.yaml", text)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_what_kubernetes_takes(name: str):
    check_schemas(manifests(name))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_hardened_and_may_end_in_its_own_time(name: str):
    check_router(manifests(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_router_takes_the_file_that_an_example_renders(name: str, tmp_path: Path):
    shown = manifests(name)
    [pod] = routers(shown)
    file, text = config(shown, pod)
    env = {e["name"]: e.get("value", "secret") for e in containers(pod)["router"]["env"] if e["name"].startswith("R3ROUTER_")}
    env = {key: value.replace("$(POD_IP)", "192.0.2.7") for key, value in env.items()}
    checked = accepted(text, tmp_path, env)
    yaml = module("yaml")
    asked = yaml.safe_load((DEPLOY / "helm" / "examples" / f"{name}.yaml").read_text("utf-8"))
    plain = {k: v for k, v in asked["settings"].items() if not isinstance(v, (list, str))}
    assert {k: checked["values"][k] for k in plain} == plain
    assert {k: file[k] for k in asked["settings"]} == asked["settings"]


def test_an_example_of_split_engines_reaches_the_router_as_written(tmp_path: Path):
    shown = manifests("pd")
    file, _ = config(shown, routers(shown)[0])
    assert file["prefill"] == ["http://prefill-0.prefill:30000 8998", {"url": "http://prefill-1.prefill:30000", "bootstrap_port": 8998}]
    # A million is no float, and 2 is as good a number as 2.0.
    assert (file["queue_size"], file["kv_margin"], file["retry_backoff_multiplier"], file["log_json"]) == (1000000, 0.1, 2, True)
    assert (file["r3_arena_bytes"], file["r3_spill_dir"], file["shutdown_grace_period_secs"]) == ("32GiB", "/var/spill", 14400)
    env = {e["name"]: e for e in containers(routers(shown)[0])["router"]["env"]}
    assert env["R3ROUTER_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "rollout-keys", "key": "client"}}
    assert env["R3ROUTER_WORKER_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "rollout-keys", "key": "engines"}}
    assert env["R3ROUTER_R3_PUBLIC_URL"]["value"] == "http://$(POD_IP):30000"


def test_certificates_reach_the_router_from_their_secrets(tmp_path: Path):
    shown = manifests("tls")
    [pod] = routers(shown)
    router, (file, _) = containers(pod)["router"], config(shown, pod)
    mounts = {m["name"]: m for m in router["volumeMounts"]}
    volumes = {v["name"]: v.get("secret") for v in pod["spec"]["volumes"]}
    named_files = {
        "tls-server": ("router-tls", [file["tls_cert_path"], file["tls_key_path"], *file["tls_client_ca_paths"]]),
        "tls-engines": ("engines-tls", [*file["ca_cert_paths"], file["client_cert_path"], file["client_key_path"]]),
    }
    for name, (secret, paths) in named_files.items():
        assert volumes[name] == {"secretName": secret, "defaultMode": 0o440}
        assert mounts[name]["readOnly"] is True
        assert {path.rpartition("/")[0] for path in paths} == {mounts[name]["mountPath"]}
    # Not under the other mount: a volume inside a read-only one cannot be made.
    assert not any(m["mountPath"].startswith("/etc/r3router/") for m in mounts.values())
    assert [path.rpartition("/")[2] for path in named_files["tls-server"][1]] == ["tls.crt", "tls.key", "clients.crt"]
    env = {e["name"]: e.get("value") for e in router["env"]}
    assert env["R3ROUTER_R3_PUBLIC_URL"] == "https://$(POD_IP):30000"
    # No probe can show a certificate, and none of the other manifests says http of the main port.
    assert {router[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "liveness", "readiness")} == {"metrics"}
    [test] = [m for m in shown if m["kind"] == "Pod"]
    service = named(shown, "Service")
    ports = {p["name"]: p["port"] for p in service["spec"]["ports"]}
    assert set(re.findall(r":(\d+)/", test["spec"]["containers"][0]["args"][0])) == {str(ports["metrics"])}
    # Without a Secret there is neither a mount nor a setting.
    plain, _ = config(manifests("pd"), routers(manifests("pd"))[0])
    assert [key for key in plain if "cert" in key or "tls" in key] == []


def test_generated_files_reach_the_cluster_as_they_are():
    yaml, shown = module("yaml"), manifests("pd")
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text("utf-8"))
    assert named(shown, "PrometheusRule")["spec"] == rules
    board = named(shown, "ConfigMap", "r3-r3router-dashboard")["data"]["r3router.json"]
    assert json.loads(board) == json.loads((CHART / "files" / "dashboard.json").read_text("utf-8"))


def test_a_network_policy_names_its_peers_both_ways():
    policy = named(manifests("closed"), "NetworkPolicy")["spec"]
    clients, scrapers = policy["ingress"]
    assert clients["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "training"}}}]
    assert clients["ports"] == [{"port": "http", "protocol": "TCP"}]
    assert scrapers["ports"] == [{"port": "metrics", "protocol": "TCP"}]
    assert policy["egress"][1] == {
        "to": [{"podSelector": {"matchLabels": {"app": "engine"}}}],
        "ports": [{"port": 30000, "protocol": "TCP"}, {"port": 9400, "protocol": "TCP"}],
    }


@pytest.mark.parametrize(
    ("namespace", "kind", "where"), [(None, "Role", "rollouts"), ("other", "Role", "other"), ("*", "ClusterRole", None)]
)
def test_discovery_may_see_pods_and_nothing_else(namespace: str | None, kind: str, where: str | None):
    more = [] if namespace is None else ["--set", f"settings.service_discovery_namespace={namespace}"]
    status, out, err = template("--values", DEPLOY / "helm" / "examples" / "discovery.yaml", *more)
    assert status == 0, err
    shown = load(out)
    check_schemas(shown)
    role, binding = named(shown, kind), named(shown, f"{kind}Binding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert role["metadata"].get("namespace") == binding["metadata"].get("namespace") == where
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role["metadata"]["name"]}
    account = named(shown, "ServiceAccount")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "rollouts"}]
    assert routers(shown)[0]["spec"]["serviceAccountName"] == account
    assert [m for m in manifests("pd") if "Role" in m["kind"]] == []


def test_discovery_by_endpoint_slices_may_see_those_and_no_pods():
    status, out, err = template(
        "--values", DEPLOY / "helm" / "examples" / "discovery.yaml", "--set", "settings.service_discovery_source=endpoint_slices"
    )
    assert status == 0, err
    shown = load(out)
    check_schemas(shown)
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    assert named(shown, "Role")["rules"] == [rule]


def test_another_setting_is_another_pod():
    sums = set()
    for settings in ("settings.log_level=info", "settings.log_level=warn"):
        status, out, _ = template("--set", settings)
        assert status == 0
        sums.add(named(load(out), "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/config"])
    assert len(sums) == 2


# Values, and what the refusal has to say.
REFUSED: list[tuple[str, str]] = [
    ("settings.queue_sise=5", "queue_sise"),
    ("settings.port=8080", "port"),
    ("settings.r3_arena_bytes=8GiB", "r3_arena_bytes"),
    ("settings.shutdown_grace_period_secs=5", "shutdown_grace_period_secs"),
    ("settings.api_key=secret", "api_key"),
    ("settings.policy=best", "policy"),
    ("settings.kv_margin=2", "kv_margin"),
    ("settings.request_timeout_secs=4 parsecs", "request_timeout_secs"),
    ("settings.pd_disaggregation=maybe", "pd_disaggregation"),
    ("settings.decode[0]=decode-0", "decode"),
    ("replicas=2", "replicas"),
    ("replicaCount=1", "replicaCount"),
    ("r3.arena=8GB", "arena"),
    ("r3.arena=16Gi", "raise the limit or lower r3.arena"),
    ("settings.r3_transport=ref", "need r3.sharedMemory: true"),
    ("shutdown.graceSeconds=-1", "graceSeconds"),
    ("strategy=BlueGreen", "strategy"),
    ("metrics.monitor=both", "monitor"),
    ("keda.enabled=true", "needs keda.target.name"),
    ("keda.enabled=true,keda.target.name=d,keda.prometheus=http://p,keda.minReplicas=9", "above keda.maxReplicas (8)"),
    ("containerPorts.metrics=30000", "the same port"),
    ("image.digest=sha256:1234", "digest"),
    ("service.type=ExternalName", "type"),
    ("probes.liveness.path=/", "path"),
    ("settings.tls_cert_path=/cert.pem", "tls_cert_path"),
    ("tls.server.clientCa=ca.crt", "tls.server.secret, which is not named"),
    ("tls.engines.cert=tls.crt", "tls.engines.secret, which is not named"),
    ("tls.engines.secret=e,tls.engines.cert=tls.crt", "come together"),
    ("tls.engines.secret=e,tls.engines.ca=", "none of its files"),
    ("tls.server.secret=s,tls.server.cert=../key", "cert"),
    ("tls.server.secret=No_Name", "secret"),
]


@pytest.mark.parametrize(("value", "told"), REFUSED, ids=[v for v, _ in REFUSED])
def test_a_wrong_value_is_refused_by_name(value: str, told: str):
    status, out, err = template("--set", value)
    assert (status, out) == (1, ""), out
    assert told in err


def test_the_chart_has_the_routers_version():
    chart = (CHART / "Chart.yaml").read_text("utf-8")
    assert f'\nappVersion: "{core.__version__}"\n' in chart
    assert f"\nversion: {core.__version__}\n" in chart


def test_values_and_schema_have_the_same_keys():
    values = module("yaml").safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))

    def compare(value: Any, described: Json, where: str) -> None:
        properties = described.get("properties")
        if not properties or where == ".settings":
            return
        assert set(value) == set(properties) - {"global"}, where
        for key, inner in value.items():
            compare(inner, properties[key], f"{where}.{key}")

    compare(values, schema, "")


def test_the_notes_say_what_a_router_without_engines_waits_for(tmp_path: Path):
    # Helm shows notes to those with a cluster; here a manifest carries them.
    chart = shutil.copytree(CHART, tmp_path / "r3router")
    text = (CHART / "templates" / "NOTES.txt").read_text("utf-8")
    (chart / "templates" / "_notes.tpl").write_text('{{ define "notes" }}' + text + "{{ end }}", "utf-8")
    manifest = 'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata: {text: {{ include "notes" . | toJson }}}\n'
    (chart / "templates" / "notes.yaml").write_text(manifest, "utf-8")
    notes = {}
    for name, values in {"none": [], "pd": ["--values", DEPLOY / "helm" / "examples" / "pd.yaml"]}.items():
        status, out, err = template(*values, chart=chart)
        assert status == 0, err
        notes[name] = named(load(out), "ConfigMap", "notes")["data"]["text"]
    assert "It knows no engine yet and is not ready until it does" in notes["none"]
    assert "Clients need no key." in notes["none"]
    assert "A pod may take 3640 s to end" in notes["none"]
    assert "knows no engine" not in notes["pd"]
    assert "need no key" not in notes["pd"]
    assert "http://r3-r3router.rollouts:30000" in notes["pd"]


def test_the_test_pod_asks_the_service(tmp_path: Path):
    [pod] = [m for m in manifests("regular") if m["kind"] == "Pod"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    script = pod["spec"]["containers"][0]["args"][0]
    compile(script, "test", "exec")
    assert "http://r3-r3router" in script
    service = named(manifests("regular"), "Service")
    assert {f":{p['port']}/" for p in service["spec"]["ports"]} == set(re.findall(r":\d+/", script))
    # The test's pod must not take the Service's traffic.
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] != service["spec"]["selector"]["app.kubernetes.io/component"]
