"""Validates manifests strictly: what Kubernetes itself defines against its own schemas, at the oldest version that the chart takes and the
newest that is known, and custom resources against the fields that our manifests use, each with its pod templates in full."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from deploy.tools import module

Json = dict[str, Any]
OLDEST = "1.30"
DEFINITIONS = "https://kubernetes.io/api/_definitions.json#/$defs/"
TEMPLATE: Json = {"$ref": DEFINITIONS + "io.k8s.api.core.v1.PodTemplateSpec"}
SELECTOR: Json = {"$ref": DEFINITIONS + "io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"}
META: Json = {"$ref": DEFINITIONS + "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
TEXT: Json = {"type": "string", "minLength": 1}
COUNT: Json = {"type": "integer", "minimum": 0}
DURATION: Json = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}


def _of(properties: Json, *required: str) -> Json:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


def _list(of: Json) -> Json:
    return {"type": "array", "minItems": 1, "items": of}


def _texts() -> Json:
    return {"type": "object", "additionalProperties": {"type": "string"}}


_ENDPOINT = _of({"port": TEXT, "path": {"type": "string", "pattern": "^/"}, "interval": DURATION}, "port")
_RULE = _of(
    {"alert": TEXT, "expr": TEXT, "for": DURATION, "labels": _texts(), "annotations": _texts()}, "alert", "expr", "labels", "annotations"
)
_ROLLING = _of({"maxUnavailable": COUNT, "maxSurge": COUNT, "partition": COUNT})
_ROLE = _of(
    {
        "name": TEXT,
        "replicas": COUNT,
        "rolloutStrategy": _of({"type": {"const": "RollingUpdate"}, "rollingUpdate": _ROLLING}, "type"),
        "standalonePattern": _of({"template": TEMPLATE}, "template"),
    },
    "name",
    "replicas",
    "standalonePattern",
)
CUSTOM: dict[tuple[str, str], Json] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _of({"selector": SELECTOR, "endpoints": _list(_ENDPOINT)}, "selector", "endpoints"),
    ("monitoring.coreos.com/v1", "PodMonitor"): _of(
        {"selector": SELECTOR, "podMetricsEndpoints": _list(_ENDPOINT)}, "selector", "podMetricsEndpoints"
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _of(
        {"groups": _list(_of({"name": TEXT, "rules": _list(_RULE)}, "name", "rules"))}, "groups"
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _of(
        {
            "scaleTargetRef": _of({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}, "name"),
            "minReplicaCount": COUNT,
            "maxReplicaCount": COUNT,
            "pollingInterval": COUNT,
            "cooldownPeriod": COUNT,
            "triggers": _list(
                _of(
                    {
                        "type": {"const": "prometheus"},
                        "metadata": _of({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT}, "serverAddress", "query", "threshold"),
                    },
                    "type",
                    "metadata",
                )
            ),
        },
        "scaleTargetRef",
        "triggers",
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _of(
        {
            "replicas": COUNT,
            "leaderWorkerTemplate": _of(
                {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                    "leaderTemplate": TEMPLATE,
                    "workerTemplate": TEMPLATE,
                },
                "workerTemplate",
            ),
        },
        "leaderWorkerTemplate",
    ),
    ("workloads.x-k8s.io/v1alpha2", "RoleBasedGroup"): _of({"roles": _list(_ROLE)}, "roles"),
}


def versions() -> tuple[str, str]:
    """The oldest and the newest version that manifests are held to."""
    newest: str = module("kubernetes_validate").latest_version()
    return OLDEST, ".".join(newest.split(".")[:2])


@functools.cache
def _definitions(version: str) -> Any:
    referencing = module("referencing")
    document = json.loads(_folder(version).joinpath("_definitions.json").read_text("utf-8"))
    return referencing.Resource.from_contents(document) @ referencing.Registry()


def _folder(version: str) -> Any:
    module("kubernetes_validate")
    return resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"


@functools.cache
def _schema(version: str, api: str, kind: str) -> Any:
    if (api, kind) in CUSTOM:
        spec = CUSTOM[api, kind]
        return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | _of(
            {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": META, "spec": spec},
            "apiVersion",
            "kind",
            "metadata",
            "spec",
        )
    group, _, number = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.split(".")[0], number)))
    return json.loads(_folder(version).joinpath(f"{name}.json").read_text("utf-8"))


def faults(manifest: Json, version: str) -> list[str]:
    """What is wrong with a manifest, each with its place."""
    jsonschema = module("jsonschema")
    schema = _schema(version, manifest["apiVersion"], manifest["kind"])
    validator = jsonschema.Draft202012Validator(schema, registry=_definitions(version))
    name = f"{manifest['kind']} {manifest['metadata'].get('name')} ({version})"
    return [f"{name}: {error.json_path}: {error.message[:300]}" for error in validator.iter_errors(manifest)]


def load(text: str) -> list[Json]:
    """The documents of a YAML text, in which no key may stand twice."""
    yaml = module("yaml")

    class Unique(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        pass

    def mapping(loader: Any, node: Any) -> Json:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{sorted(twice)} twice at line {node.start_mark.line + 1}"
        return dict(zip(keys, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))

    Unique.add_constructor("tag:yaml.org,2002:map", mapping)
    return [document for document in yaml.load_all(text, Loader=Unique) if document]


def templates(manifest: Json) -> list[Json]:
    """The pod templates in a manifest, wherever they are; a Pod is one."""
    found: list[Json] = [manifest] if manifest.get("kind") == "Pod" else []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
                found.append(value)
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    if not found:
        look(manifest)
    return found
