"""Where r3router answers or passes on otherwise than sglang-router 0.3.2, on purpose: each with its reason and, where there is one, the
field case that it mends (named as in tests/cases; EPT, RL and WRK are cases of routes and are held here). A difference that is not listed
fails the test, and so does a listed one that no longer occurs."""

from __future__ import annotations

from .diff import Difference

PD = ("pd",)
REGULAR = ("regular",)
GENERATE = (
    *("generate-text", "generate-ids", "generate-headers", "generate-unknown-field", "generate-logprob", "generate-stream", "generate-rid"),
    *("generate-r3", "generate-engine-*", "generate-engine-says-text", "generate-target"),
)
CHAT = ("chat", "chat-unknown-field", "chat-stream", "chat-r3", "chat-engine-*")
COMPLETIONS = ("completions", "completions-stream", "completions-r3")
# In PD mode these are several requests, of which the next group speaks.
SAMPLES = ("generate-batch-ids", "generate-n", "chat-n")
REFUSED_LATE = ("bad-chat-type", "bad-embeddings-type", "bad-rerank-type", "bad-classify-type", "bad-responses-type")


def sent(*fields: str) -> tuple[str, ...]:
    """These members of what engines received."""
    return tuple(f"engines.*.0.body.{field}" for field in fields)


PASSED_ON = [
    Difference(
        sent(
            "model",
            "return_text_in_logprobs",
            "log_metrics",
            "return_hidden_states",
            "background",
            "no_logs",
            "return_bytes",
            "return_entropy",
        ),
        GENERATE,
        "The peer reads a request into a struct and writes it anew, with defaults of fields that nobody sent. Ours goes as it came.",
        "JSN-1",
    ),
    Difference(
        sent("no_stop_trim", "ignore_eos", "skip_special_tokens", "return_hidden_states"),
        (*CHAT, *COMPLETIONS),
        "Defaults of fields that nobody sent, as above.",
        "JSN-1",
    ),
    Difference(sent("echo"), COMPLETIONS, "The default of a field that nobody sent.", "JSN-1"),
    Difference(
        sent("logprobs", "continue_final_message", "separate_reasoning", "stream_reasoning"),
        CHAT,
        "Defaults of fields that nobody sent; the engine has its own.",
        "JSN-1",
    ),
    Difference(
        sent("stream"),
        (*(name for name in (*GENERATE, *CHAT, *COMPLETIONS) if not name.endswith("-stream")),),
        "`stream: false` is added by the peer to requests that do not say it.",
        "JSN-1",
    ),
    Difference(
        sent("stream"),
        ("generate-stream", "chat-stream", "completions-stream"),
        "Prefill never streams: its reply has the prompt's logprobs and rows, which a merge needs whole.",
        modes=PD,
    ),
    Difference(sent("stream_options"), ("chat-stream",), "Nothing of a stream goes to prefill, which does not stream here.", modes=PD),
    Difference(
        sent("model", "return_text_in_logprobs", "stream", "log_metrics", "return_entropy"),
        ("generate-batch-ids", "generate-n"),
        "Defaults of fields that nobody sent, as above.",
        "JSN-1",
        REGULAR,
    ),
    Difference(
        sent("return_hidden_states", "background", "no_logs", "return_bytes"),
        ("generate-batch-ids", "generate-n"),
        "Defaults of fields that nobody sent, as above.",
        "JSN-1",
        REGULAR,
    ),
    Difference(
        sent("logprobs", "stream", "no_stop_trim", "ignore_eos", "continue_final_message", "skip_special_tokens"),
        ("chat-n",),
        "Defaults of fields that nobody sent, as above.",
        "JSN-1",
        REGULAR,
    ),
    Difference(
        sent("separate_reasoning", "stream_reasoning", "return_hidden_states"),
        ("chat-n",),
        "Defaults of fields that nobody sent, as above.",
        "JSN-1",
        REGULAR,
    ),
    Difference(sent("future_field"), ("generate-unknown-field", "chat-unknown-field"), "The peer drops what it has no name for.", "JSN-1"),
    Difference(sent("sampling_params.future_param"), ("generate-unknown-field",), "The peer drops what it has no name for.", "JSN-1"),
    Difference(
        sent("return_routed_experts"),
        ("generate-r3", "chat-r3"),
        "The peer passes R3 on for completions alone, so that R3 is silently off on the other routes.",
        "JSN-1",
    ),
    Difference(sent("return_meta_info"), ("chat-r3",), "The peer drops it; miles' sessions read the rows from there.", "JSN-1"),
    Difference(
        sent("max_tokens", "max_completion_tokens"),
        ("chat",),
        "The peer renames `max_tokens` of chat requests. Engines know both names; ours goes as it came.",
        "JSN-1",
    ),
    Difference(
        sent("rid"),
        (*GENERATE, *CHAT, *COMPLETIONS),
        "Every attempt has an id of its own, which begins with the client's, so that an abort hits it and nothing else.",
        "ABT-1",
    ),
    Difference(
        sent("routed_dp_rank", "disagg_prefill_dp_rank"),
        (*GENERATE, *CHAT, *COMPLETIONS),
        "A pair of ranks is chosen for every attempt and both engines are told. The peer leaves the ranks to the room and the engines.",
        "DPR-3",
        PD,
    ),
    Difference(
        sent("routed_experts_start_len"),
        ("generate-r3",),
        "Decode has no rows of the prompt; it is asked for its own only. The reply has the prompt's from prefill.",
        "R3-1",
        PD,
    ),
    Difference(
        ("body", "engines.P0", "engines.D0"),
        ("generate-batch-ids", "generate-n"),
        "Each sample needs a room and a pair of its own. The peer sends a batch under a list of rooms, and n samples under one room.",
        "RM-3",
        PD,
    ),
    Difference(
        ("body.choices", "body.usage.*_tokens", "engines.P0", "engines.D0"),
        ("chat-n",),
        "As above: the samples of a chat are one request each, joined in order.",
        "RM-3",
        PD,
    ),
    Difference(
        sent("store", "temperature", "top_p", "priority", "top_k", "min_p", "repetition_penalty", "stream"),
        ("responses",),
        "The peer adds defaults of fields that nobody sent.",
        "JSN-1",
        REGULAR,
    ),
    Difference(
        sent("model", "return_documents", "rid", "user"),
        ("rerank",),
        "The peer adds defaults of fields that nobody sent.",
        "JSN-1",
        REGULAR,
    ),
    Difference(
        (*sent("model", "top_k", "return_documents", "rid", "user"), "body.model", "body.results"),
        ("v1-rerank",),
        "The peer reads query and documents only: the model that was asked for and the number of results are lost.",
        "JSN-1",
        REGULAR,
    ),
]

ANSWERS = [
    Difference(
        ("headers.content-type",),
        ("generate-stream", "chat-stream", "completions-stream"),
        "The engine's own content type, with its character set.",
    ),
    Difference(("body.meta_info.id",), ("generate-rid",), "The id of the attempt, which begins with the client's id.", "ABT-1"),
    Difference(("body.meta_info.routed_experts",), ("generate-r3",), "The rows that the peer did not ask for.", "R3-1"),
    Difference(("body.choices.0.meta_info",), ("chat-r3",), "What the peer did not ask for.", "JSN-1"),
    Difference(
        ("body.sglext.routed_experts",),
        ("completions-r3",),
        "The prompt's rows are prefill's. The peer gives decode's, which never ran the prompt. (Without a split, the engine's rows differ "
        "by the request's id alone.)",
        "R3-1",
    ),
    Difference(
        ("status", "headers.x-engine", "body.*", "engines.*"),
        ("generate-target-unknown",),
        "The header names a worker under every policy, and one that is not there is 503; the peer reads it under consistent_hashing only.",
    ),
    Difference(
        ("headers.content-type", "headers.x-engine"),
        ("generate-logprob",),
        "The peer labels a merged reply application/octet-stream and loses the engine's headers.",
        "LPM-1",
        PD,
    ),
    Difference(
        ("status", "headers.*", "body", "engines.*"),
        ("generate-batch-text", "bad-content-type"),
        "Engines take a list of texts, and a body without the content type of JSON; so does the router. The peer refuses both.",
        "JSN-1",
    ),
    Difference(
        ("body*",),
        ("generate-engine-says-text",),
        "A failed engine's own sentence in the one shape that every error of a pair has, with the engine's address.",
        modes=PD,
    ),
    Difference(
        ("body.*",),
        ("*-engine-500", "*-engine-503"),
        "As above: one shape for every failed engine of a pair, with which of the two it was.",
        modes=PD,
    ),
    Difference(
        ("body.*",),
        ("*-engine-400", "*-engine-422", "*-engine-429"),
        "An engine's refusal reaches the client as the engine wrote it; the peer keeps the message only.",
        modes=PD,
    ),
    Difference(
        ("status",),
        ("*-engine-422", "*-engine-429"),
        "An engine's refusal keeps its status; the peer makes 500 of it.",
        modes=PD,
    ),
]

INFORMATION = [
    Difference(("body.healthy",), ("readiness",), "Healthy engines by role, beside the peer's fields."),
    Difference(
        ("headers.content-type", "body", "engines.*"),
        ("health_generate",),
        "The engines are really asked whether they generate.",
        "EPT-1",
    ),
    Difference(
        ("headers.content-type", "body.data.0.owned_by", "body.data.0.created", "engines.*"),
        ("v1-models",),
        "An engine's own list, labelled as the JSON that it is.",
        "EPT-1",
    ),
    Difference(
        ("headers.content-type", "body.*"), ("get_server_info",), "An engine's own information instead of a count of workers.", "EPT-1"
    ),
    Difference(
        ("status", "headers.content-type", "request_id", "body"),
        ("model_info", "server_info", "v1-loads", "metrics"),
        "The peer has no such route. Engines have the first three, and benchmarks ask for them.",
        "EPT-1",
    ),
    Difference(("headers.content-type",), ("engine_metrics",), "The content type of the Prometheus text format, with its version."),
]

MODELS = [
    Difference(
        ("status", "headers.*", "request_id", "body", "engines.*"),
        ("score", "old-classify"),
        "The peer has no such route; engines do.",
        "EPT-1",
        REGULAR,
    ),
    Difference(
        ("status", "headers.*", "request_id", "body"),
        ("score", "old-classify"),
        "A route of regular engines, named as such. The peer says 404 without a word.",
        "EPT-1",
        PD,
    ),
    Difference(
        ("headers.content-type", "body"),
        ("embeddings", "classify", "responses", "bad-embeddings-empty", "bad-classify-empty"),
        "501 as the peer, in the shape that every error has.",
        modes=PD,
    ),
    Difference(
        ("status", "headers.x-engine", "body", "engines.*"),
        ("rerank", "v1-rerank"),
        "A reranker keeps no KV that decode could go on with. The peer sends it to a pair and answers with decode's reply.",
        modes=PD,
    ),
    Difference(
        ("status", "body.*", "engines.*", "headers.*"),
        ("tokenize", "detokenize"),
        "Engines tokenise; the router has no tokenizer of its own and asks one of them.",
        "EPT-1",
    ),
    Difference(("request_id",), ("responses", "bad-responses-*"), "An id of ours begins with req- where the client sent none."),
    Difference(("headers.x-engine",), ("rerank", "v1-rerank"), "The engine's headers stay on the reply.", modes=REGULAR),
]

WORKERS = [
    Difference(
        ("*metadata.version", "*metadata.weight_version", "*dp_size", "*message", "*ranks", "*since_s", "*state"),
        ("workers", "worker"),
        "What is known of an engine beside the peer's fields: its state and why, its ranks. `url` is its address, whatever its ranks.",
        "RL-2",
    ),
    Difference(
        ("body.message", "body.state"),
        ("worker-again", "worker-new"),
        "The reply says in which state the worker is: accepted is not active.",
        "WRK-1",
    ),
    Difference(("body.message",), ("worker-put", "worker-put-key", "worker-put-health"), "It is changed when the reply comes, not queued."),
    Difference(
        ("body.warnings",),
        ("worker-put-health",),
        "Health checks are set for all workers at once; the peer takes numbers for one worker, and ours says that they change nothing.",
    ),
    Difference(
        ("body.error",),
        ("worker-unknown", "worker-no-uuid", "worker-delete-unknown", "worker-put-unknown"),
        "Our own sentence beside the peer's code: it says where the list of workers is.",
    ),
    Difference(("body.code",), ("worker-no-uuid",), "As the status: a word that is no UUID is an unknown worker."),
    Difference(("status",), ("worker-no-uuid",), "A worker's address is taken as its id, so a word that is no UUID is merely unknown."),
    Difference(("body", "headers.*"), ("worker-patch", "workers-wrong-method"), "405 with a body that says what to use."),
    Difference(
        ("status", "headers.content-type", "body"),
        ("worker-without-url", "worker-no-body", "worker-no-content-type"),
        "A registration that is wrong gets 400 with what to send; the peer answers 422 or 415 in plain text.",
    ),
    Difference(("headers.content-type", "body"), ("worker-no-json",), "400 as the peer, in the shape that every error has."),
    Difference(
        ("status", "headers.location", "body.*"),
        ("worker-malformed-url", "worker-unknown-type"),
        "What can never become a worker is refused at once; the peer accepts it and fails in the background.",
        "WRK-1",
    ),
    Difference(
        ("status", "headers.content-type", "request_id", "body"),
        ("old-list", "old-urls", "old-remove"),
        "The calls of older routers, which frameworks still try; gone in the peer.",
        "RL-2",
    ),
    Difference(
        ("headers.content-type", "request_id", "body"),
        ("old-remove-unknown",),
        "404 that says why and where the list of workers is.",
        "RL-2",
    ),
]

BAD_INPUT = [
    Difference(
        ("headers.*", "body"),
        ("bad-*-method", "bad-health-method"),
        "405 with a body that says what to use, and `allow` in the spelling of its specification.",
    ),
    Difference(
        ("headers.content-type", "body"),
        ("bad-generate-empty", "bad-generate-json", "bad-completions-empty", "bad-completions-json"),
        "400 as the peer, as JSON with the place of the fault instead of plain text.",
    ),
    Difference(
        ("body.error.message", "body.error.code", "body.error.measured", "body.error.source", "body.error.status"),
        ("bad-chat-empty", "bad-chat-json"),
        "The same shape with more in it; codes are the same on all routes.",
    ),
    Difference(
        ("status", "headers.content-type", "body"),
        ("bad-generate-type", "bad-completions-type"),
        "400 as JSON that names the field; the peer answers 422 in plain text.",
    ),
    Difference(
        ("headers.content-type", "body"),
        ("bad-embeddings-empty", "bad-embeddings-json", "bad-rerank-empty", "bad-rerank-json", "bad-classify-empty", "bad-classify-json"),
        "400 as the peer, as JSON with the place of the fault.",
        modes=REGULAR,
    ),
    Difference(
        ("body.error*",), ("bad-responses-empty", "bad-responses-json"), "400 as the peer, with the place of the fault.", modes=REGULAR
    ),
    Difference(
        ("status", "body*", "engines.*", "headers.*"),
        REFUSED_LATE,
        "Fields that the router does not read are the engine's to judge: models differ in what they take, and its message says more.",
        "JSN-1",
        REGULAR,
    ),
    Difference(
        ("status", "body*", "engines.*", "headers.*"),
        ("bad-chat-type",),
        "As in regular mode: messages are the engine's to judge.",
        "JSN-1",
        PD,
    ),
    Difference(
        ("headers.content-type", "request_id", "body"),
        ("bad-path", "bad-path-post"),
        "404 that names the path and says where the list of routes is; the peer's is empty.",
        "EPT-1",
    ),
    Difference(
        ("status", "headers.content-type", "body*"),
        ("bad-embeddings-*", "bad-classify-*", "bad-rerank-*", "bad-responses-*"),
        "In PD mode these routes are 501 whatever the body is.",
        modes=PD,
    ),
]

CONTROL = [
    Difference(
        ("body.message", "body.paused", "body.success", "body.workers"),
        ("flush-cache",),
        "Every engine's own answer beside the peer's fields.",
        "EPT-1",
    ),
    Difference(
        ("status", "headers.content-type", "request_id", "body", "engines.*"),
        ("pause-generation", "continue-generation", "update-weights-from-disk", "load-lora-adapter", "abort-request"),
        "The peer has no such route, so that a framework that talks to the router gets 404 and goes on as if it had been heard.",
        "EPT-1",
    ),
]

DIFFERENCES: tuple[Difference, ...] = (*PASSED_ON, *ANSWERS, *INFORMATION, *MODELS, *WORKERS, *BAD_INPUT, *CONTROL)
