"""The chart's `values.schema.json`: strict, with the settings as the core declares them."""

from __future__ import annotations

import json
from typing import Any, Final

from r3router.native import core

Json = dict[str, Any]

# Settings that follow from a value of the chart, which has to know them to write the rest of the pod. As `settings` they are refused.
MANAGED: Final = {
    "host": "the pod's address",
    "port": "containerPorts.http",
    "prometheus_host": "the pod's address",
    "prometheus_port": "containerPorts.metrics",
    "api_key": "secrets.clientKey",
    "worker_api_key": "secrets.workerKey",
    "admin_api_key": "secrets.adminKey",
    "tls_cert_path": "tls.server",
    "tls_key_path": "tls.server",
    "tls_client_ca_paths": "tls.server.clientCa",
    "ca_cert_paths": "tls.engines.ca",
    "client_cert_path": "tls.engines.cert",
    "client_key_path": "tls.engines.key",
    "shutdown_grace_period_secs": "shutdown.graceSeconds",
    "r3_arena_bytes": "r3.arena",
    "r3_store_dir": "r3.sharedMemory",
    "r3_spill_dir": "r3.spill",
    "r3_public_url": "r3.publicUrl",
    "log_dir": "the container's standard error",
    "time_scale": "nothing: it is for emulated fleets",
}

_PORT: Final[Json] = {"type": "integer", "minimum": 1, "maximum": 65535}
_NAME: Final[Json] = {"type": "string", "maxLength": 53, "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"}
_TEXT: Final[Json] = {"type": "string"}
# A key of a Secret, which becomes a file's name.
_FILE: Final[Json] = {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$", "maxLength": 253}
_FILE_OR_NONE: Final[Json] = {"type": "string", "pattern": "^[-._a-zA-Z0-9]*$", "maxLength": 253}
_NAME_OF_A_SECRET: Final[Json] = {
    "type": "string",
    "maxLength": 253,
    "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
    "description": "Its name. Empty: no TLS on this side.",
}
_LABELS: Final[Json] = {"type": "object", "additionalProperties": {"type": "string"}}
_QUANTITY: Final[Json] = {"type": "string", "pattern": "^[1-9][0-9]*(Mi|Gi)$"}
_ANY: Final[Json] = {"type": "object"}
_URL: Final[Json] = {"type": "string", "pattern": "^https?://[^\\s]+$"}
_DURATION: Final = r"^([0-9]+(\.[0-9]+)?|([0-9]+(\.[0-9]+)?(us|ms|sec|min|s|m|h|d))+)$"
_SIZE: Final = r"^[0-9]+(\.[0-9]+)? ?([kKmMgGtT][iI]?[bB]|[bB])?$"


def _object(what: str, properties: dict[str, Json], required: tuple[str, ...] = ()) -> Json:
    schema: Json = {"type": "object", "description": what, "additionalProperties": False, "properties": properties}
    return schema | ({"required": list(required)} if required else {})


def _switch(what: str) -> Json:
    return {"type": "boolean", "description": what}


def _list(of: Json, what: str) -> Json:
    return {"type": "array", "description": what, "items": of}


def _range(setting: Json) -> Json:
    low, high = setting["range"] or (None, None)
    # Whole bounds are written as whole numbers.
    bounds = {"minimum": low, "maximum": high}
    return {key: int(bound) if float(bound).is_integer() else bound for key, bound in bounds.items() if bound is not None}


def setting_schema(setting: Json) -> Json:
    """The values that one setting takes, as JSON schema.

    Raises:
        LookupError: the core declares a kind of value that is not known here.
    """
    expects = setting["expects"].split(",")[0]
    kinds: dict[str, Json] = {
        "a text": {"type": "string", "minLength": 1},
        "a key": {"type": "string", "minLength": 1},
        "a port": {"type": "integer", "minimum": 0, "maximum": 65535},
        "true or false": {"type": "boolean"},
        "a whole number": {"type": "integer", **_range(setting)},
        "a number": {"type": "number", **_range(setting)},
        "a list of numbers": {"type": "array", "items": {"type": "number"}},
        "a list of texts": {"type": "array", "items": {"type": "string", "minLength": 1}},
        "a list of hosts": {"type": "array", "items": {"type": "string", "minLength": 1}},
        "a list of worker URLs": {"type": "array", "items": _URL},
        "a duration": {"anyOf": [{"type": "number", **_range(setting)}, {"type": "string", "pattern": _DURATION}]},
        "a size in bytes": {"anyOf": [{"type": "integer", **_range(setting)}, {"type": "string", "pattern": _SIZE}]},
        "one of the names": {"type": "string", "enum": setting["choices"]},
        "computed": {"anyOf": [{"type": "string", "enum": ["computed", "unbounded"]}, {"type": "integer", "minimum": 1}]},
        "worker URLs": {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string", "pattern": "^https?://[^\\s]+( ([0-9]+|none))?$"},
                    _object("A prefill engine.", {"url": _URL, "bootstrap_port": _PORT}, ("url",)),
                ]
            },
        },
    }
    if expects == "a whole number" and "or -1" in setting["expects"]:
        kinds[expects] = {"type": "integer", "minimum": -1}
    if expects not in kinds:
        raise LookupError(f"setting {setting['name']}: no schema for {setting['expects']!r}")
    return {"description": setting["help"], **kinds[expects]}


def _key(what: str) -> Json:
    return _object(f"{what} The Secret is made by you.", {"name": _TEXT, "key": {"type": "string", "minLength": 1}})


def _probe(what: str) -> Json:
    return _object(what, {"periodSeconds": _count(1), "timeoutSeconds": _count(1), "failureThreshold": _count(1)})


def _count(least: int, what: str = "") -> Json:
    return {"type": "integer", "minimum": least} | ({"description": what} if what else {})


def schema() -> Json:
    """The schema of the chart's values."""
    settings = {s["name"]: setting_schema(s) for s in json.loads(core.settings_schema()) if s["name"] not in MANAGED}
    managed = ", ".join(f"{name} ({why})" for name, why in MANAGED.items())
    peers = _list(_ANY, "NetworkPolicy peers. Empty: the release's namespace.")
    properties: dict[str, Json] = {
        # Helm puts it there for a chart that is a part of another one.
        "global": _ANY,
        "nameOverride": _NAME,
        "fullnameOverride": _NAME,
        "image": _object(
            "The image of deploy/Dockerfile.",
            {
                "repository": {"type": "string", "minLength": 1},
                "tag": {"type": "string", "description": "Empty: the chart's version."},
                "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$", "description": "Wins over the tag."},
                "pullPolicy": {"type": "string", "enum": ["Always", "IfNotPresent", "Never"]},
            },
        ),
        "imagePullSecrets": _list(_object("A Secret.", {"name": _TEXT}, ("name",)), "Secrets of the image's registry."),
        "replicas": {
            "type": "integer",
            "minimum": 0,
            "maximum": 1,
            "description": "One router serves one fleet: two would each promise the same room of a rank. More fleets, more releases.",
        },
        "settings": _object(f"Settings of the router by their TOML names. Not here, since the chart sets them: {managed}.", settings),
        "secrets": _object(
            "Keys, from Secrets.",
            {
                "clientKey": _key("What clients must send (api_key); without a name, clients need none."),
                "workerKey": _key("What is sent to engines (worker_api_key)."),
                "adminKey": _key("What the admin listener wants (admin_api_key); without a name it stays on the pod's loopback."),
            },
        ),
        "tls": _object(
            "Certificates in PEM, mounted from Secrets that you make; read anew when they change.",
            {
                "server": _object(
                    "What clients see. With a secret the main port speaks HTTPS only, and probes ask the port of the metrics.",
                    {
                        "secret": _NAME_OF_A_SECRET,
                        "cert": _FILE,
                        "key": _FILE,
                        "clientCa": _FILE_OR_NONE | {"description": "Authorities of clients: only those with a certificate are served."},
                    },
                ),
                "engines": _object(
                    "For engines whose address begins with https://.",
                    {
                        "secret": _NAME_OF_A_SECRET,
                        "ca": _FILE_OR_NONE | {"description": "Authorities of engines. Empty: those that the image trusts."},
                        "cert": _FILE_OR_NONE | {"description": "What the router shows to them."},
                        "key": _FILE_OR_NONE,
                    },
                ),
            },
        ),
        "extraEnv": _list(_ANY, "More variables of the container."),
        "containerPorts": _object("Ports in the pod.", {"http": _PORT, "metrics": _PORT}),
        "service": _object(
            "What clients call.",
            {
                "type": {"type": "string", "enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                "port": _PORT,
                "metricsPort": _PORT,
                "annotations": _LABELS,
            },
        ),
        "shutdown": _object(
            "The end of a pod. It has preStopSeconds + graceSeconds + 30 s.",
            {
                "preStopSeconds": _count(0, "Between leaving the Service's endpoints and SIGTERM, so that nobody calls a closed port."),
                "graceSeconds": _count(0, "How long open rollouts may go on after SIGTERM. Above your longest rollout.")
                | {"maximum": 86400},
            },
        ),
        "strategy": {
            "type": "string",
            "enum": ["RollingUpdate", "Recreate"],
            "description": "RollingUpdate: the new router takes over before the old one drains. Recreate: never two at once, with a gap.",
        },
        "r3": _object(
            "Routing payloads.",
            {
                "arena": {**_QUANTITY, "description": "Most memory for payloads (r3_arena_bytes). The memory limit must be above it."},
                "sharedMemory": _switch("A memory volume of the arena's size at /dev/shm, for payloads by reference."),
                "spill": {
                    "anyOf": [_QUANTITY, {"type": "string", "maxLength": 0}],
                    "description": "Size of a volume on the node's disk for payloads that the arena has no room for. Empty: none.",
                },
                "publicUrl": {
                    "anyOf": [{"type": "string", "enum": ["pod", ""]}, _URL],
                    "description": "Where clients fetch references: `pod` is the pod's own address, so that no Service leads them to "
                    "another pod; a URL; empty: the address that the client called.",
                },
            },
        ),
        "resources": _ANY | {"description": "Of the container. The memory limit, when given, must hold the arena and 512Mi."},
        "probes": _object(
            "A router is alive while it answers, and ready once there is a healthy engine of every role.",
            {"startup": _probe("/health"), "liveness": _probe("/health"), "readiness": _probe("/readiness")},
        ),
        "metrics": _object(
            "Prometheus operator and Grafana.",
            {
                "monitor": {"type": "string", "enum": ["none", "service", "pod"], "description": "ServiceMonitor, PodMonitor or neither."},
                "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                "labels": _LABELS | {"description": "Labels by which the operator finds monitor and rules."},
                "alerts": _switch("A PrometheusRule with the alerts."),
                "dashboard": _switch("A ConfigMap with the Grafana dashboard."),
                "dashboardLabels": _LABELS | {"description": "Labels by which Grafana's side-car finds it."},
            },
        ),
        "keda": _object(
            "A ScaledObject that scales engines (not the router) by the requests that wait in the router.",
            {
                "enabled": {"type": "boolean"},
                "target": _object("What is scaled.", {"apiVersion": _TEXT, "kind": _TEXT, "name": _TEXT}),
                "prometheus": {"anyOf": [_URL, {"type": "string", "maxLength": 0}], "description": "Address of Prometheus."},
                "queuedPerReplica": _count(1, "Requests that wait for each replica of the target."),
                "minReplicas": _count(0),
                "maxReplicas": _count(1),
                "pollingSeconds": _count(1),
                "cooldownSeconds": _count(0),
            },
        ),
        "serviceAccount": _object("Identity of the pod.", {"create": {"type": "boolean"}, "name": _TEXT, "annotations": _LABELS}),
        "podDisruptionBudget": _object("Keeps a node's drain from ending rollouts.", {"enabled": {"type": "boolean"}}),
        "networkPolicy": _object(
            "Who may talk to the router, and whom it may call.",
            {
                "enabled": {"type": "boolean"},
                "clients": peers,
                "scrapers": peers,
                "engines": peers,
                "enginePorts": _list(_PORT, "HTTP ports of engines and of R3 agents. Empty: all."),
            },
        ),
        "topologySpread": _object(
            "Keeps the old and the new router of a rolling update apart.",
            {
                "enabled": {"type": "boolean"},
                "topologyKey": {"type": "string", "minLength": 1},
                "whenUnsatisfiable": {"type": "string", "enum": ["DoNotSchedule", "ScheduleAnyway"]},
            },
        ),
        "podLabels": _LABELS,
        "podAnnotations": _LABELS,
        "nodeSelector": _LABELS,
        "tolerations": _list(_ANY, "Tolerations of the pod."),
        "affinity": _ANY,
        "priorityClassName": _TEXT,
        "tests": _object("The pod of `helm test`.", {"enabled": {"type": "boolean"}}),
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of r3router"} | _object(
        "Made from the router's settings by `make docs`; a test fails when this file and the code differ.", properties
    )


def page() -> str:
    """`values.schema.json`."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
