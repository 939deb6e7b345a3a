"""The calls that are made against both routers, as data. A name is `mode/what`; the order is that of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripted.acts import Act, answer, refusal

# Both engines of a pair have the request before either fails.
LATE_S = 0.05
UNKNOWN = "00000000-0000-4000-8000-000000000000"
IDS = [11, 12, 13, 14, 15]
SAMPLING = {"max_new_tokens": 3, "temperature": 0.5}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "tell me something"}]}
COMPLETION = {"model": "m", "prompt": "tell me something"}
FUTURE = {"future_field": {"a": [1, {"b": None}]}}
TRACE = (
    ("x-request-id", "req-of-client"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("x-smg-routing-key", "k-1"),
)


@dataclass(frozen=True)
class Call:
    """One call. `act` is what every engine does with it instead of serving it."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    act: Act | None = None


def post(name: str, path: str, body: Any = None, *, headers: tuple[tuple[str, str], ...] = (), act: Act | None = None) -> Call:
    return Call(name, "POST", path, body, headers, act)


def get(name: str, path: str) -> Call:
    return Call(name, "GET", path)


def inference() -> list[Call]:
    """What engines generate, in both modes."""
    generate, chat, completions = "/generate", "/v1/chat/completions", "/v1/completions"
    return [
        post("generate-text", generate, {"text": "tell me something", "sampling_params": SAMPLING}),
        post("generate-ids", generate, {"input_ids": IDS, "sampling_params": SAMPLING}),
        post(
            "generate-headers",
            generate,
            {"input_ids": IDS, "sampling_params": SAMPLING},
            headers=(*TRACE, ("authorization", "Bearer k"), ("x-custom", "1")),
        ),
        post("generate-unknown-field", generate, {"input_ids": IDS, "sampling_params": {**SAMPLING, "future_param": 1}, **FUTURE}),
        post("generate-logprob", generate, {"input_ids": IDS, "sampling_params": SAMPLING, "return_logprob": True, "logprob_start_len": 0}),
        post("generate-stream", generate, {"input_ids": IDS, "sampling_params": SAMPLING, "stream": True}),
        post("generate-rid", generate, {"input_ids": IDS, "sampling_params": SAMPLING, "rid": "ep-7::t3"}),
        post("generate-batch-ids", generate, {"input_ids": [IDS, IDS[:2]], "sampling_params": SAMPLING}),
        post("generate-batch-text", generate, {"text": ["one two", "three"], "sampling_params": SAMPLING}),
        post("generate-n", generate, {"input_ids": IDS, "sampling_params": {**SAMPLING, "n": 2}}),
        post("generate-r3", generate, {"input_ids": IDS, "sampling_params": SAMPLING, "return_routed_experts": True}),
        post("generate-target", generate, {"input_ids": IDS}, headers=(("x-smg-target-worker", "0"),)),
        post("generate-target-unknown", generate, {"input_ids": IDS}, headers=(("x-smg-target-worker", "7"),)),
        post("chat", chat, {**CHAT, "max_tokens": 3}),
        post("chat-unknown-field", chat, {**CHAT, **FUTURE, "rid": "ep-7::t4"}),
        post("chat-stream", chat, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
        post("chat-n", chat, {**CHAT, "n": 2}),
        post("chat-r3", chat, {**CHAT, "return_routed_experts": True, "return_meta_info": True}),
        post("completions", completions, {**COMPLETION, "max_tokens": 3}),
        post("completions-stream", completions, {**COMPLETION, "stream": True}),
        post("completions-r3", completions, {**COMPLETION, "return_routed_experts": True}),
        *(
            post(f"{what}-engine-{status}", path, body, act=refusal(status, f"the engine says {status}", after=LATE_S))
            for what, path, body in (("generate", generate, {"text": "x", "sampling_params": {}}), ("chat", chat, CHAT))
            for status in (400, 422, 429, 500, 503)
        ),
        post("generate-engine-says-text", generate, {"text": "x"}, act=answer(500, b"it broke", content_type="text/plain", after=LATE_S)),
    ]


def models() -> list[Call]:
    """Calls that only some models serve."""
    return [
        post("embeddings", "/v1/embeddings", {"model": "m", "input": "a b"}),
        post("rerank", "/rerank", {"query": "q", "documents": ["a", "b"]}),
        post("v1-rerank", "/v1/rerank", {"model": "m", "query": "q", "documents": ["a", "b"], "top_k": 1}),
        post("classify", "/v1/classify", {"model": "m", "input": "a b"}),
        post("old-classify", "/classify", {"text": "a b"}),
        post("score", "/v1/score", {"model": "m", "query": "q", "items": ["a", "b"], "label_token_ids": [1, 2]}),
        post("responses", "/v1/responses", {"model": "m", "input": "a b"}),
        post("tokenize", "/v1/tokenize", {"model": "m", "prompt": "a b"}),
        post("detokenize", "/v1/detokenize", {"model": "m", "tokens": [1, 2]}),
    ]


def information() -> list[Call]:
    """What the routers and the engines say of themselves."""
    paths = ["/liveness", "/health", "/readiness", "/health_generate", "/v1/models", "/get_model_info", "/model_info", "/get_server_info"]
    paths += ["/server_info", "/get_loads", "/v1/loads", "/engine_metrics", "/metrics"]
    return [get(path[1:].replace("/", "-"), path) for path in paths]


def control() -> list[Call]:
    """Calls that every engine must hear."""
    bodies: dict[str, Any] = {
        "/flush_cache": None,
        "/abort_request": {"rid": "ep-7::", "abort_all": False},
        "/pause_generation": {"mode": "in_place"},
        "/continue_generation": {},
        "/update_weights_from_disk": {"model_path": "m2"},
        "/load_lora_adapter": {"lora_name": "a", "lora_path": "p"},
    }
    return [post(path[1:].replace("_", "-"), path, body) for path, body in bodies.items()]


def workers(mode: str) -> list[Call]:
    """The workers API, old and new style. The last ones add and remove a worker that no one listens behind."""
    name, role = {"regular": ("R0", "regular"), "pd": ("D0", "decode")}[mode]
    new = {"url": "http://127.0.0.1:9", "worker_type": role}
    return [
        get("workers", "/workers"),
        get("worker", f"/workers/{{id_{name}}}"),
        get("worker-unknown", f"/workers/{UNKNOWN}"),
        get("worker-no-uuid", "/workers/nobody"),
        Call("worker-delete-unknown", "DELETE", f"/workers/{UNKNOWN}"),
        Call("worker-patch", "PATCH", f"/workers/{{id_{name}}}", {"priority": 60}),
        Call("worker-put", "PUT", f"/workers/{{id_{name}}}", {"priority": 60}),
        Call("worker-put-key", "PUT", f"/workers/{{id_{name}}}", {"api_key": "k", "labels": {"a": "b"}, "cost": 2.0}),
        Call("worker-put-health", "PUT", f"/workers/{{id_{name}}}", {"health_check_timeout_secs": 9, "health_failure_threshold": 4}),
        Call("worker-put-unknown", "PUT", f"/workers/{UNKNOWN}", {"priority": 60}),
        post("worker-again", "/workers", {"url": f"{{url_{name}}}", "worker_type": role}),
        post("worker-without-url", "/workers", {"worker_type": role}),
        post("worker-no-body", "/workers"),
        post("worker-no-json", "/workers", b"{", headers=(("content-type", "application/json"),)),
        post("worker-no-content-type", "/workers", b"x", headers=(("content-type", "text/plain"),)),
        post("worker-malformed-url", "/workers", {"url": "not a url", "worker_type": role}),
        post("worker-unknown-type", "/workers", {**new, "worker_type": "encoder"}),
        post("worker-new", "/workers", new),
        get("old-list", "/list_workers"),
        get("old-urls", "/get_worker_urls"),
        post("old-remove", "/remove_worker?url=http://127.0.0.1:9"),
        post("old-remove-unknown", "/remove_worker?url=http://127.0.0.1:8"),
        Call("workers-wrong-method", "PATCH", "/workers"),
    ]


def bad_input() -> list[Call]:
    """Each route with a missing body, a body that is no JSON, a wrong type, another content type and a wrong method."""
    routes: dict[str, tuple[str, Any]] = {
        "generate": ("/generate", {"text": 5}),
        "chat": ("/v1/chat/completions", {"messages": "x", "model": "m"}),
        "completions": ("/v1/completions", {"prompt": 5, "model": "m"}),
        "embeddings": ("/v1/embeddings", {"model": "m"}),
        "rerank": ("/v1/rerank", {"query": 5}),
        "classify": ("/v1/classify", {"model": 5}),
        "responses": ("/v1/responses", {"model": 5}),
    }
    calls = []
    for name, (path, wrong) in routes.items():
        calls += [
            post(f"bad-{name}-empty", path, b"", headers=(("content-type", "application/json"),)),
            post(f"bad-{name}-json", path, b'{"text": ', headers=(("content-type", "application/json"),)),
            post(f"bad-{name}-type", path, wrong),
            get(f"bad-{name}-method", path),
        ]
    return [
        *calls,
        post("bad-content-type", "/generate", b'{"text": "a"}', headers=(("content-type", "text/plain"),)),
        get("bad-path", "/nowhere"),
        post("bad-path-post", "/v1/nowhere", {}),
        Call("bad-health-method", "POST", "/health"),
    ]


def table(mode: str) -> list[Call]:
    """All calls of a mode, in the order of the run. Control comes last: it changes engines."""
    return [*information(), *inference(), *models(), *workers(mode), *bad_input(), *control()]
