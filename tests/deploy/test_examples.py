"""The kustomizations, and the fleets of the two operators."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy.rendered import accepted, check_router, check_schemas, config, containers, named, routers, seconds, size
from deploy.schemas import Json, faults, load, templates
from deploy.tools import DEPLOY, run, same_as_golden

FLEETS = ["lws", "rbg"]
ALL = ["kustomize/plain", "kustomize/pd", *FLEETS]


@functools.cache
def text(name: str) -> str:
    if name == "rbg":
        return (DEPLOY / "rbg" / "fleet.yaml").read_text("utf-8")
    done = run("kustomize", "build", DEPLOY / name)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower()
    return done.stdout


def manifests(name: str) -> list[Json]:
    return load(text(name))


@pytest.mark.parametrize("name", ALL)
def test_an_example_is_what_kubernetes_takes(name: str):
    check_schemas(manifests(name))


@pytest.mark.parametrize("name", ALL)
def test_its_router_is_hardened_and_may_end_in_its_own_time(name: str):
    check_router(manifests(name))


@pytest.mark.parametrize("name", ALL[:3])
def test_a_kustomization_renders_as_before(name: str):
    same_as_golden(f"{name.replace('/', '-')}.yaml", text(name))


@pytest.mark.parametrize("name", ALL)
def test_the_router_takes_the_file(name: str, tmp_path: Path):
    shown = manifests(name)
    _, file = config(shown, routers(shown)[0])
    accepted(file, tmp_path)


def engines(name: str, role: str) -> tuple[Json, str]:
    """The workload of a role, and the name pattern of the pods that the router calls."""
    if name == "lws":
        workload = named(manifests(name), "LeaderWorkerSet", role)
        return workload["spec"], f"{role}-{{}}.{role}"
    group = named(manifests(name), "RoleBasedGroup")
    [found] = [r for r in group["spec"]["roles"] if r["name"] == role]
    fleet = group["metadata"]["name"]
    return found, f"{fleet}-{role}-{{}}.s-{fleet}-{role}"


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_router_names_every_engine_of_a_fleet_once(name: str, role: str):
    workload, pattern = engines(name, role)
    shown = manifests(name)
    file, _ = config(shown, routers(shown)[0])
    urls = [entry.split() for entry in file[role]]
    assert [urlsplit(words[0]).hostname for words in urls] == [pattern.format(at) for at in range(workload["replicas"])]
    leader = templates({"spec": workload})[0]
    ports = {p["name"]: p["containerPort"] for p in containers(leader)["engine"]["ports"]}
    assert {urlsplit(words[0]).port for words in urls} == {ports["http"]}
    assert [words[1:] for words in urls] == [[str(ports["bootstrap"])] if role == "prefill" else []] * len(urls)


@pytest.mark.parametrize("name", FLEETS)
def test_an_agent_shares_memory_processes_and_user_with_its_engine(name: str):
    pods = [t for m in manifests(name) for t in templates(m) if "engine" in containers(t)]
    # LeaderWorkerSets have a leader and a worker each.
    assert len(pods) == {"lws": 4, "rbg": 2}[name]
    for pod in pods:
        spec, parts = pod["spec"], containers(pod)
        engine, agent, plugin = parts["engine"], parts["agent"], parts["plugin"]
        env = {e["name"]: e.get("value") for e in engine["env"]}
        assert spec["shareProcessNamespace"] is True
        assert spec["securityContext"]["runAsUser"] == 0
        assert all("runAsUser" not in part.get("securityContext", {}) for part in parts.values())
        assert agent["restartPolicy"] == "Always"
        [port] = agent["ports"]
        assert agent["args"] == ["agent", "--port", str(port["containerPort"])]
        assert env["R3ROUTER_AGENT_URI"] == f"$(POD_IP):{port['containerPort']}"
        # A variable is only put into those that come after it.
        assert list(env).index("POD_IP") < list(env).index("R3ROUTER_AGENT_URI")
        assert {m["name"]: m["mountPath"] for m in agent["volumeMounts"]} == {"shm": "/dev/shm"}
        mounts = {m["name"]: m["mountPath"] for m in engine["volumeMounts"]}
        assert mounts["shm"] == "/dev/shm"
        assert env["PYTHONPATH"] == mounts["plugin"] == plugin["command"][-1].rstrip("/")
        volumes = {v["name"]: v for v in spec["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        arguments = engine["args"]
        gpus = engine["resources"]["limits"]["nvidia.com/gpu"]
        share = int(re.fullmatch(r"(\d+)GiB", env["R3ROUTER_PLUGIN_BYTES"])[1]) << 30  # type: ignore[index]
        assert gpus * share < size(volumes["shm"]["emptyDir"]["sizeLimit"]) <= size(engine["resources"]["limits"]["memory"])
        assert arguments[arguments.index("--disaggregation-transfer-backend") + 1] == "nixl"
        assert "--enable-return-routed-experts" in arguments
        ranks = int(arguments[arguments.index("--dp-size") + 1])
        assert ranks == gpus * (2 if name == "lws" else 1)
        # The probe of a busy engine hangs; only its start is asked.
        assert "httpGet" not in engine.get("livenessProbe", {}) | engine.get("readinessProbe", {})


def test_overlays_leave_more_time_than_requests_take():
    for name in ALL:
        shown = manifests(name)
        file, _ = config(shown, routers(shown)[0])
        assert seconds(file["shutdown_grace_period_secs"]) >= seconds(file["request_timeout_secs"])


WRONG = [
    ("Deployment", ("spec", "template", "spec", "containers", 0, "imagePullPolicies"), "Always", "imagePullPolicies"),
    ("Deployment", ("spec", "replicas"), "one", "replicas"),
    ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec", "container"), [], "container"),
    ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "restartPolicy"), "Sometimes", "Sometimes"),
    ("Service", ("spec", "ports", 0, "port"), "http", "port"),
]


@pytest.mark.parametrize(("kind", "path", "value", "told"), WRONG, ids=[f"{w[0]}-{w[1][-1]}" for w in WRONG])
def test_the_schemas_find_what_is_wrong(kind: str, path: tuple[str | int, ...], value: object, told: str):
    manifest = next(m for m in manifests("lws") if m["kind"] == kind)
    assert faults(manifest, "1.30") == []
    at = manifest
    for key in path[:-1]:
        at = at[key]  # type: ignore[index]
    at[path[-1]] = value  # type: ignore[index]
    assert told in "\n".join(faults(manifest, "1.30"))
