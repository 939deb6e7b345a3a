"""Rules that every rendered set of manifests keeps, whoever rendered it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from deploy.schemas import Json, faults, templates, versions
from deploy.tools import module
from r3router.native import core

UNITS = {"": 1, "Mi": 1 << 20, "Gi": 1 << 30}


def size(quantity: str) -> int:
    """Bytes of a quantity."""
    number, unit = re.fullmatch(r"(\d+)(|Mi|Gi)", str(quantity)).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def named(manifests: list[Json], kind: str, name: str | None = None) -> Json:
    """The one manifest of a kind."""
    found = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]


def containers(template: Json) -> dict[str, Json]:
    spec = template["spec"]
    return {c["name"]: c for c in [*spec.get("initContainers", []), *spec["containers"]]}


def routers(manifests: list[Json]) -> list[Json]:
    """Pod templates that run the router."""
    return [t for m in manifests for t in templates(m) if "router" in containers(t)]


def config(manifests: list[Json], template: Json) -> tuple[Json, str]:
    """The router's file, parsed and as it is, found by the way that the pod finds it."""
    router = containers(template)["router"]
    path = router["args"][router["args"].index("--config") + 1]
    folder, _, file = path.rpartition("/")
    mount = next(m["name"] for m in router["volumeMounts"] if m["mountPath"] == folder)
    source = next(v["configMap"]["name"] for v in template["spec"]["volumes"] if v["name"] == mount)
    text: str = named(manifests, "ConfigMap", source)["data"][file]
    return module("tomllib").loads(text), text


def matches(selector: Json, labels: Json) -> bool:
    """Whether a selector of labels takes what has these; an empty one takes everything, which no manifest of ours wants."""
    wanted = selector.get("matchLabels", selector)
    return bool(wanted) and all(labels.get(key) == value for key, value in wanted.items())


def seconds(value: Any) -> int:
    """A duration of a router's file, as far as our files write them."""
    if isinstance(value, int):
        return value
    number, unit = re.fullmatch(r"(\d+)(s|m|h)", value).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def accepted(text: str, folder: Path, env: dict[str, str] | None = None) -> Json:
    """What the router makes of a file. The volumes that a pod mounts are not there: a small arena and a folder stand for them."""
    path = folder / "router.toml"
    path.write_text(text, "utf-8")
    flags = {"r3_arena_bytes": "16MiB", "r3_store_dir": str(folder)}
    given = module("tomllib").loads(text)
    if "r3_spill_dir" in given:
        (folder / "disk").mkdir(exist_ok=True)
        flags["r3_spill_dir"] = str(folder / "disk")
    checked: Json = json.loads(core.check_settings(json.dumps({"flags": flags, "env": env or {}, "config": str(path)})))
    # The arena's own text, by itself.
    alone = {"r3_arena_bytes": module("tomllib").loads(text)["r3_arena_bytes"]}
    try:
        core.check_settings(json.dumps({"flags": alone, "env": {}, "config": None}))
    except core.SettingsError as error:
        assert "/dev/shm" in str(error), error
    assert [w for w in checked["warnings"] if "ignored" in w] == []
    return checked


def check_schemas(manifests: list[Json]) -> None:
    found = [fault for version in versions() for manifest in manifests for fault in faults(manifest, version)]
    assert not found, "\n".join(found)


def check_router(manifests: list[Json], *, more: tuple[str, ...] = ()) -> None:
    """One router: hardened, long enough to drain, with the memory that its arena needs, found by its Service and budget."""
    [template] = routers(manifests)
    spec, router = template["spec"], containers(template)["router"]
    file, _ = config(manifests, template)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] >= 10000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is file.get("service_discovery", False)
    assert spec["enableServiceLinks"] is False
    assert router["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    before = router.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert spec["terminationGracePeriodSeconds"] == before + seconds(file["shutdown_grace_period_secs"]) + 30
    arena = file["r3_arena_bytes"].removesuffix("B")
    limit = router.get("resources", {}).get("limits", {}).get("memory")
    assert limit is None or size(limit) >= size(arena) + (512 << 20)
    shared = [v["emptyDir"] for v in spec["volumes"] if v["name"] == "arena"]
    assert shared in ([], [{"medium": "Memory", "sizeLimit": arena}])
    assert [m["mountPath"] for m in router["volumeMounts"] if m["name"] == "arena"] == ["/dev/shm"] * len(shared)
    ports = {p["name"]: p["containerPort"] for p in router["ports"]}
    assert ports == {"http": file.get("port", 30000), "metrics": file.get("prometheus_port", 29000)}
    probed = "metrics" if "tls_cert_path" in file else "http"
    assert router["readinessProbe"]["httpGet"] == {"path": "/readiness", "port": probed}
    assert router["livenessProbe"]["httpGet"] == {"path": "/liveness", "port": probed}
    labels = template["metadata"]["labels"]
    for manifest in manifests:
        kind, of = manifest["kind"], manifest.get("spec", {})
        if kind in ("Service", "PodDisruptionBudget", "ServiceMonitor", "PodMonitor", *more):
            assert matches(of["selector"], labels), f"{kind} {manifest['metadata']['name']} does not select the router"
        if kind == "NetworkPolicy":
            assert matches(of["podSelector"], labels)
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
