"""The emulator is held to real engines: one script against both, what they answer and how long their queues are after each step."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from . import fleet
from .compare import rows
from .equality import GREEDY, LOGPROBS, chat, completion, generate, prompt
from .fleet import Process, Trio, call, events
from .stages import busy, eventually

RUNNING, TOKENS, SLOTS = 16, 8192, 64
"""As `fleet.engine` starts engines."""
PAGE = 64
"""The emulator's page. The CPU engine's is one token, so prompts of the script fill whole pages."""


@dataclass
class Pair:
    """A prefill and a decode engine, real or emulated."""

    prefill: Process
    decode: Process
    replies: list[tuple[str, int, bytes]] = field(default_factory=list)
    """What decode answered to `send`: rid, status, body, in the order of the replies."""

    def room(self, body: dict[str, Any], room: int | None = None) -> dict[str, Any]:
        """A body with the fields that pair its halves."""
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port}
        return body | pair | {"bootstrap_room": room or random.getrandbits(61) + 1}

    def both(self, path: str, body: dict[str, Any]) -> tuple[tuple[int, bytes], tuple[int, bytes]]:
        """Both halves' replies; prefill is never asked to stream."""
        body = self.room(body)
        with ThreadPoolExecutor(1) as pool:
            prefill = pool.submit(call, self.prefill.url + path, {k: v for k, v in body.items() if k not in ("stream", "stream_options")})
            decode = call(self.decode.url + path, body)
            return prefill.result(), decode

    def send(self, engine: Process, rid: str, room: int, new: int) -> None:
        """Sends one half on a thread of its own."""
        body = self.room(generate(PAGE, new, rid=rid), room)

        def one() -> None:
            with contextlib.suppress(OSError):
                answer = call(f"{engine.url}/generate", body, timeout=240)
                if engine is self.decode:
                    self.replies.append((rid, *answer))

        threading.Thread(target=one, daemon=True).start()

    def lengths(self) -> dict[str, int]:
        """Lengths of the queues that the router reads."""
        prefill, decode = self.prefill.loads()[0], self.decode.loads()[0]
        p, d = prefill["disaggregation"], decode["disaggregation"]
        return {
            "prefill bootstrap": p["prefill_bootstrap_queue_reqs"],
            "prefill inflight": p["prefill_inflight_queue_reqs"],
            "prefill waiting": prefill["num_waiting_reqs"],
            "decode prealloc": d["decode_prealloc_queue_reqs"],
            "decode transfer": d["decode_transfer_queue_reqs"],
            "decode running": decode["num_running_reqs"],
            "decode waiting": decode["num_waiting_reqs"],
        }

    def settled(self) -> dict[str, int]:
        """The lengths once they have not changed for a second."""
        last, since, deadline = self.lengths(), time.monotonic(), time.monotonic() + 60
        while time.monotonic() - since < 1.0 and time.monotonic() < deadline:
            time.sleep(0.1)
            now = self.lengths()
            if now != last:
                last, since = now, time.monotonic()
        return last


@pytest.fixture(scope="module")
def real(trio: Trio) -> Pair:
    """The real pair."""
    return Pair(trio.prefill, trio.decode)


@pytest.fixture(scope="module")
def emulated() -> Iterator[Pair]:
    """The emulator with the same limits."""
    port = fleet.free_ports(3)
    limits = {"max-running": RUNNING, "max-total-tokens": TOKENS, "mamba-slots": SLOTS, "layers": 4, "top-k": 2, "experts": 8}
    command = [sys.executable, "-m", "r3router", "emulate", "--prefill", "1", "--decode", "1", "--port", str(port)]
    command += [word for name, value in limits.items() for word in (f"--{name}", str(value))]
    with fleet.process(command, f"http://127.0.0.1:{port}", "emulator", "/health") as prefill:
        prefill.bootstrap_port = port + 2
        yield Pair(prefill, Process(f"http://127.0.0.1:{port + 1}", None, prefill.log))


def shape(value: Any) -> Any:
    """Names and kinds of a JSON value, without its values. A list is as its first element. Completions' `top_logprobs` have texts of
    tokens for names, which are values."""
    if isinstance(value, dict):
        if value and "token" not in value and all(isinstance(inner, float) for inner in value.values()):
            return {"a token's text": "number"}
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def differences(real: Any, emulated: Any, path: str = "") -> list[str]:
    """Paths at which two shapes differ. A null stands for any kind."""
    if isinstance(real, dict) and isinstance(emulated, dict):
        found = [f"{path}.{name} is missing" for name in real if name not in emulated]
        found += [f"{path}.{name} is not the engine's" for name in emulated if name not in real]
        for name in real:
            if name in emulated:
                found += differences(real[name], emulated[name], f"{path}.{name}")
        return found
    if isinstance(real, list) and isinstance(emulated, list):
        return differences(real[0], emulated[0], f"{path}[]") if real and emulated else []
    return [] if real == emulated or "NoneType" in (real, emulated) else [f"{path}: {real} but {emulated}"]


# What the emulator leaves out of replies, and why nobody misses it.
LEFT_OUT = {
    "timings": ("time", "latency", "_ts", "throughput", "wait"),
    "nothing in the router or the clients reads it": (
        "cached_tokens_details",
        "spec_",
        "matched_stop",
        "reasoning",
        "system_fingerprint",
        "embedding",
    ),
}


def meant(found: list[str]) -> list[str]:
    """Differences without those of `LEFT_OUT`."""
    words = [word for group in LEFT_OUT.values() for word in group]
    return [text for text in found if not (text.endswith("is missing") and any(word in text for word in words))]


SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", generate(9, 3)),
    "logprobs": ("/generate", generate(9, 3, **LOGPROBS)),
    "one token": ("/generate", generate(9, 1)),
    "start_len": ("/generate", generate(9, 3, routed_experts_start_len=9)),
    "chat": ("/v1/chat/completions", chat()),
    "chat meta_info": ("/v1/chat/completions", chat(return_meta_info=True, logprobs=True)),
    "completions": ("/v1/completions", completion("route me")),
    "echo": ("/v1/completions", completion("route me", echo=True, logprobs=2)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_replies_have_the_shape_and_the_rows_of_real_ones(real: Pair, emulated: Pair, name: str) -> None:
    path, body = SINGLE[name]
    for side, (left, right) in zip("PD", zip(real.both(path, body), emulated.both(path, body), strict=True), strict=True):
        assert left[0] == right[0] == 200, (side, left, right)
        engine, model = json.loads(left[1]), json.loads(right[1])
        assert meant(differences(shape(engine), shape(model))) == [], side
        if path == "/generate":
            lengths = [len(rows(text)) if (text := reply["meta_info"].get("routed_experts")) else None for reply in (engine, model)]
            assert lengths[0] == lengths[1], side
            assert engine["meta_info"]["finish_reason"] == model["meta_info"]["finish_reason"], side


@pytest.mark.parametrize("name", ["generate", "chat", "completions"])
def test_streams_carry_rows_in_the_same_place(real: Pair, emulated: Pair, name: str) -> None:
    path, body = SINGLE[name]
    body = body | {"stream": True}
    places = []
    for pair in (real, emulated):
        paired = pair.room(body)
        twin = {key: value for key, value in paired.items() if key != "stream"}
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(call, pair.prefill.url + path, twin)
            stream = events(pair.decode.url + path, paired)
            other.result()
        with_rows = ["routed_experts" in json.dumps(event) for event in stream]
        places.append((with_rows.count(True), with_rows.index(True) - len(stream)))
    assert places[0] == places[1]


@pytest.mark.parametrize("path", ["/v1/loads?include=all", "/model_info"])
def test_what_is_polled_has_the_same_fields(real: Pair, emulated: Pair, path: str) -> None:
    for left, right in ((real.prefill, emulated.prefill), (real.decode, emulated.decode)):
        found = differences(shape(json.loads(call(left.url + path)[1])), shape(json.loads(call(right.url + path)[1])))
        assert meant([text for text in found if text.endswith("is missing") or "but" in text]) == []


@pytest.mark.parametrize(
    "change", [{"bootstrap_room": None}, {"routed_dp_rank": 5}, {"input_ids": prompt(9000)}], ids=["no room", "no such rank", "too long"]
)
def test_refusals_have_the_same_status_and_shape(real: Pair, emulated: Pair, change: dict[str, Any]) -> None:
    answers = []
    for pair in (real, emulated):
        body = {key: value for key, value in (pair.room(generate(5, 2)) | change).items() if value is not None}
        status, raw = call(f"{pair.decode.url}/generate", body, timeout=60)
        answers.append((status, shape(json.loads(raw))))
    assert answers[0] == answers[1]


def script(pair: Pair) -> list[tuple[str, dict[str, int]]]:
    """The load, and the queues' lengths after each step."""
    base = 2**41 + random.getrandbits(30)
    seen = [("at rest", pair.settled())]

    def step(name: str) -> None:
        seen.append((name, pair.settled()))

    for at in range(30):
        pair.send(pair.decode, f"half-{at:02}", base + at, 2000 if at < 20 else 4)
        time.sleep(0.05)
    step("30 halves reach decode alone")
    for at in range(4):
        pair.send(pair.prefill, f"half-{at:02}", base + at, 2000)
        time.sleep(0.05)
    step("prefill gets the first 4")
    call(f"{pair.decode.url}/abort_request", {"rid": "half-29"})
    step("one that waits for memory is aborted")
    call(f"{pair.decode.url}/abort_request", {"rid": "half-06"})
    step("one in transfer is aborted")
    pair.send(pair.prefill, "lonely", base + 99, 4)
    step("prefill gets a half without a twin")
    for rid in ("half-00", "half-01"):
        call(f"{pair.decode.url}/abort_request", {"rid": rid})
    step("two that run are aborted")
    for engine in (pair.decode, pair.prefill):
        call(f"{engine.url}/abort_request", {"rid": "", "abort_all": True})
    eventually(lambda: busy(pair.decode) + busy(pair.prefill) == 0, "the engines to be empty")
    step("all are aborted")
    return seen


def test_queues_have_the_lengths_of_real_ones_after_each_step(real: Pair, emulated: Pair) -> None:
    """Decode's reservation (rows, KV with growth, FIFO up to the first misfit), prefill's bootstrap queue, aborts in each stage."""
    engine, model = script(real), script(emulated)
    print("| after | queue | engine | emulator |")
    wrong = []
    for (name, left), (_, right) in zip(engine, model, strict=True):
        for queue in left:
            if left[queue] or right[queue]:
                print(f"| {name} | {queue} | {left[queue]} | {right[queue]} |")
            if left[queue] != right[queue]:
                wrong.append(f"{name}: {queue} is {left[queue]}, the emulator says {right[queue]}")
    assert wrong == []
    statuses = [sorted((rid, status) for rid, status, _ in pair.replies if rid.startswith("half")) for pair in (real, emulated)]
    assert statuses[0] == statuses[1]


def test_decode_serves_in_the_order_in_which_it_reserved(real: Pair, emulated: Pair) -> None:
    """The last to reserve is the first for which prefill delivers: it runs at once, the others keep their places."""
    orders = []
    for pair in (real, emulated):
        base = 2**42 + random.getrandbits(30)
        with ThreadPoolExecutor(3) as pool:
            ended: list[int] = []

            def one(at: int, pair: Pair = pair, base: int = base, ended: list[int] = ended) -> None:
                call(
                    f"{pair.decode.url}/generate",
                    pair.room({"input_ids": prompt(30 + at), "sampling_params": {"max_new_tokens": 3, **GREEDY}}, base + at),
                )
                ended.append(at)

            for at in range(3):
                pool.submit(one, at)
                time.sleep(0.2)
            for at in (2, 0, 1):
                call(
                    f"{pair.prefill.url}/generate",
                    pair.room({"input_ids": prompt(30 + at), "sampling_params": {"max_new_tokens": 3, **GREEDY}}, base + at),
                )
                eventually(lambda at=at, ended=ended: at in ended, "decode to answer")
        orders.append(ended)
    assert orders[0] == orders[1] == [2, 0, 1]
