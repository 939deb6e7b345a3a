"""A scripted SGLang engine: prefill, decode or regular, with ranks, a ledger, aborts by prefix, and the engine's own endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import orjson

from . import facts, replies
from .acts import Script
from .ledger import Rank, mamba_metrics
from .leg import Abort, Leg, prompt_tokens
from .r3 import R3Model, Rows
from .reading import read, violation
from .rooms import Rooms
from .server import Exchange, Request, Server

GENERATION_PATHS = ("/generate", "/v1/chat/completions", "/v1/completions")
MAMBA_TEXT = "Not enough space for mamba cache, try to increase --mamba-full-memory-ratio or --max-mamba-cache-size."


class Timeout(Exception):
    """The engine's own waiting timeout: the router must never let it happen."""


@dataclass(eq=False)
class Engine:
    """See the module. All times in seconds, all sizes per rank."""

    role: str
    name: str = "E"
    host: str = "127.0.0.1"
    """A loopback address; engines that share a port, as pods do, differ in it. `::1` for an engine of an IPv6 cluster."""
    dp_size: int = 1
    kv_pool: int = 10_000_000
    max_running: int = 4096
    mamba_slots: int | None = None
    slots_per_request: int = 1
    page_size: int = 1
    tokens: int = 3
    """Output tokens unless `max_new_tokens` is smaller."""
    grows_to_max_new: bool = False
    """Generate up to `max_new_tokens` (or `default_growth` without it) instead of `tokens`; only the ledger sees so many."""
    default_growth: int = 4096
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    run_s: float = 0.0
    tokenise_s: float = 0.0
    """Time after arrival in which an abort is lost."""
    waiting_s: float = 5.0
    """The engine's own timeout for a leg whose partner does not come."""
    disconnect_s: float = 4.0
    """How long a closed connection goes unnoticed when no abort comes."""
    abort_words: str = "Aborted by AbortReq."
    """What ends an aborted transfer; 0.5.12 says `NIXL KVReceiver Exception` to every one that ends."""
    rows_twice: bool = False
    """Chat with `return_meta_info` has the rows in `sglext` too, as in 0.5.17."""
    transfer_limit: int | None = None
    on_over: str = "fail"
    """A rank over its limits: `fail` (500, a violation), `freeze` (every rank stops, a violation), `die`, `mamba_500`
    or `wait` (as real engines do: it is queued there)."""
    retractions: int = 0
    expands: int = 0
    """Prompt tokens that the engine counts beyond the ids that it was sent, as multimodal inputs do."""
    r3: R3Model = field(default_factory=R3Model)
    indexer: R3Model | None = None
    write_bytes: int = 0
    """Replies leave in pieces of so many bytes; 0: in one."""
    script: Script | None = None
    healthy: Callable[[], bool] | None = None
    health_hangs_s: float = 0.0
    """How long a health check takes, as that of a busy engine."""
    control_answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """What a control path is answered, instead of 200."""
    edit_loads: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    edit_info: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    edit_model: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    edit_topology: Callable[[dict[str, Any]], dict[str, Any] | int] | None = None
    """Changes what the bootstrap server tells; a number is answered as a status."""
    key: str | None = None
    """The engine's `--api-key`: without it all but health checks and metrics get 401."""
    unauthorized: list[Request] = field(default_factory=list)
    strict_pairs: bool = True
    legs: list[Leg] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    control: list[Request] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    rooms: Rooms | None = None
    live: dict[str, Leg] = field(default_factory=dict)
    open_legs: int = 0
    peak_legs: int = 0

    def __post_init__(self) -> None:
        self.ranks = [Rank() for _ in range(self.dp_size)]
        self.server = Server(self._serve, host=self.host)
        self.bootstrap = Server(self._bootstrap, host=self.host)
        self.moving = asyncio.Event()
        self.moving.set()
        self._rids: set[str] = set()
        self.turn = 0

    async def start(self, violations: list[str], rooms: Rooms | None) -> None:
        """Listens. Violations go to the fleet's list."""
        self.violations = self.server.problems = self.bootstrap.problems = violations
        self.rooms = rooms
        await self.server.listen()
        if self.role == "prefill":
            await self.bootstrap.listen()

    async def stop(self) -> None:
        """Ends everything at once."""
        await self.server.stop()
        await self.bootstrap.stop()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"{'https' if self.server.tls else 'http'}://{self.url_host}:{self.server.port}"

    @property
    def url_host(self) -> str:
        """The host as it stands in a URL."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def bootstrap_address(self) -> tuple[str, int]:
        """What decode must be told."""
        return self.url_host, self.bootstrap.port

    @property
    def dead(self) -> bool:
        """Killed by a rank over its limits."""
        return self.server._listener is None

    def bodies(self) -> list[dict[str, Any]]:
        """Parsed bodies of all legs, in order of arrival."""
        return [leg.body for leg in self.legs]

    # --- generation -----------------------------------------------------------------------------------------------

    async def _serve(self, request: Request, exchange: Exchange) -> None:
        opens = request.path.startswith(("/health", "/metrics")) or request.header("authorization") == f"Bearer {self.key}"
        if self.key is not None and not opens:
            self.unauthorized.append(request)
            await exchange.reply(401, b'{"error":"Unauthorized"}')
        elif request.path in GENERATION_PATHS:
            await self._generate(request, exchange)
        else:
            await self._control(request, exchange)

    async def _generate(self, request: Request, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        leg = Leg(self, request, arrived=loop.time(), task=asyncio.current_task())
        self.legs.append(leg)
        self.open_legs += 1
        self.peak_legs = max(self.peak_legs, self.open_legs)
        exchange.on_closed.append(lambda: self._peer_left(leg))
        entered = False
        try:
            read(self, leg)
            if self.tokenise_s:
                await asyncio.sleep(self.tokenise_s)
            self._make_live(leg)
            act = self.script(leg) if self.script else None
            if self.rooms is not None and self.role != "regular" and (act is None or act.joins):
                leg.meeting = self.rooms.enter(leg)
            entered = True
            if not await self._reserve(leg, exchange):
                return
            await (act.run(leg, exchange) if act else self.work(leg, exchange))
            leg.end = "answered" if exchange.finished else "broken"
        except asyncio.CancelledError:
            if leg.aborted_at is None and leg.closed_at is None:
                raise
            _uncancel()
            leg.end = "left" if leg.aborted_at is None else "aborted"
            if leg.aborted_at is not None and not exchange.closed:
                await self._answer_abort(leg, exchange)
        except ConnectionError:
            # The peer had gone when the answer was ready: there is nothing left to abort.
            leg.end = "late" if leg.sent and not exchange.chunked else "left"
            if leg.end == "left":
                if leg.aborted_at is None:
                    await self._linger(leg)
                if leg.aborted_at is not None:
                    leg.end = "aborted"
        except Timeout as timeout:
            leg.end = "timeout"
            self.violations.append(f"{self.name}: {timeout}")
            with contextlib.suppress(ConnectionError):
                await exchange.reply(500, orjson.dumps({"detail": str(timeout)}))
        finally:
            leg.ended = loop.time()
            self.open_legs -= 1
            if self.live.get(leg.rid) is leg:
                del self.live[leg.rid]
            if entered and not leg.leaks:
                self._release(leg)

    def _make_live(self, leg: Leg) -> None:
        if leg.rid in self._rids:
            violation(self, leg, "this rid was generated before on this engine")
        self._rids.add(leg.rid)
        if len(self.live) <= 512:
            for other in self.live:
                if other != leg.rid and (other.startswith(leg.rid) or leg.rid.startswith(other)):
                    violation(self, leg, f"prefix of, or prefixed by, the live rid {other!r}")
        self.live[leg.rid] = leg

    async def _reserve(self, leg: Leg, exchange: Exchange) -> bool:
        """Takes the leg's memory on its rank. `False` when the rank was over its limits and the leg was dealt with."""
        rank = self.ranks[leg.rank]
        slots = self.slots_per_request if self.mamba_slots is not None else 0
        leg._held = (leg.prompt_tokens, slots)
        rank.transfer += 1
        rank.kv += leg.prompt_tokens
        rank.mamba += slots
        rank.note()
        problem = self._over(leg.rank)
        if problem is None:
            return True
        if self.on_over == "wait":
            return True
        if self.on_over == "mamba_500":
            await exchange.reply(500, orjson.dumps({"detail": MAMBA_TEXT}))
            leg.end = "answered"
            return False
        violation(self, leg, problem)
        if self.on_over == "freeze":
            self.moving.clear()
        elif self.on_over == "die":
            self.server.die()
        else:
            await exchange.reply(500, orjson.dumps({"detail": problem}))
            leg.end = "answered"
            return False
        await asyncio.get_running_loop().create_future()
        return False

    def _over(self, index: int) -> str | None:
        rank = self.ranks[index]
        if self.role == "prefill":
            return None
        if self.transfer_limit is not None and rank.transfer + rank.foreign_transfer > self.transfer_limit:
            return f"rank {index}: {rank.transfer}+{rank.foreign_transfer} in transfer, it can take {self.transfer_limit}"
        if rank.kv + rank.foreign_kv > self.kv_pool:
            return f"rank {index}: {rank.kv}+{rank.foreign_kv} KV tokens in a pool of {self.kv_pool}"
        if self.mamba_slots is not None and rank.mamba > self.mamba_slots:
            return f"rank {index}: {rank.mamba} mamba slots of {self.mamba_slots}"
        rows = rank.transfer + rank.running + rank.foreign_transfer
        if rows > self.max_running:
            return f"rank {index}: {rows} requests in {self.max_running} rows"
        return None

    def _start_running(self, leg: Leg) -> None:
        rank = self.ranks[leg.rank]
        rank.transfer -= 1
        rank.running += 1
        leg._running = True  # type: ignore[attr-defined]

    def _release(self, leg: Leg) -> None:
        rank = self.ranks[leg.rank]
        if getattr(leg, "_running", False):
            rank.running -= 1
        else:
            rank.transfer -= 1
        rank.kv -= leg._held[0]
        rank.mamba -= leg._held[1]
        leg._held = (0, 0)
        leg.leaks = False

    def free_leaked(self) -> int:
        """Frees what legs with `leaks` still hold; returns how many."""
        leaked = [leg for leg in self.legs if leg.leaks and leg.ended is not None]
        for leg in leaked:
            self._release(leg)
        return len(leaked)

    @property
    def leaked(self) -> list[Leg]:
        """Legs that are over and hold their slot."""
        return [leg for leg in self.legs if leg.leaks and leg.ended is not None]

    async def wait_for(self, future: asyncio.Future[None], leg: Leg) -> None:
        """Waits for the other half, at most as long as the engine does."""
        if future.done():
            return
        try:
            await asyncio.wait_for(asyncio.shield(future), self.waiting_s)
        except asyncio.TimeoutError:
            raise Timeout(
                f"{self.role} leg {leg.rid!r} room {leg.room} on rank {leg.rank}: timed out after "
                f"{self.waiting_s}s in KVPoll.WaitingForInput"
            ) from None

    async def work(self, leg: Leg, exchange: Exchange) -> None:
        """What a healthy engine does."""
        stream = leg.body.get("stream") is True
        if stream and self.role != "prefill":
            await exchange.start(200, "text/event-stream; charset=utf-8")
        await leg.deliver()
        if self.role != "prefill":
            self._start_running(leg)
            await self._run(leg)
        output = self.output(leg)
        if stream:
            parts = replies.stream_events(leg, output)
            leg.sent = b"".join(parts)
            if self.role == "prefill":
                return await exchange.reply(200, leg.sent, content_type="text/event-stream")
            if self.write_bytes:
                parts = [leg.sent[i : i + self.write_bytes] for i in range(0, len(leg.sent), self.write_bytes)]
            for part in parts:
                await exchange.chunk(part)
                if self.run_s:
                    await asyncio.sleep(self.run_s / len(parts))
            return await exchange.end()
        leg.sent = replies.reply_bytes(leg, output) if self.role != "regular" else self._regular_reply(leg, output)
        return await exchange.reply(200, leg.sent, [("x-engine", self.name)], pieces=self.write_bytes)

    def _regular_reply(self, leg: Leg, output: replies.Output) -> bytes:
        """An unsplit engine serves batches and samples itself."""
        sampling = leg.body.get("sampling_params")
        n = (sampling.get("n") if isinstance(sampling, dict) else None) or leg.body.get("n") or 1
        prompts = leg.body.get("input_ids") if leg.body.get("input_ids") is not None else leg.body.get("text")
        batch = prompts if isinstance(prompts, list) and prompts and isinstance(prompts[0], (list, str)) else None
        if n == 1 and batch is None:
            return replies.reply_bytes(leg, output)
        if leg.request.path == "/generate":
            parts = []
            for prompt in batch or [prompts]:
                leg.prompt_tokens = prompt_tokens({"input_ids" if isinstance(prompt, list) else "text": prompt})
                parts += [replies.generate_object(leg, output) for _ in range(n)]
            return orjson.dumps(parts)
        reply = replies.chat_object(leg, output)
        reply["choices"] = [{**reply["choices"][0], "index": index} for index in range(n)]
        return orjson.dumps(reply)

    async def _run(self, leg: Leg) -> None:
        """Decoding: the KV grows."""
        steps = 5 if self.grows_to_max_new else 1
        growth = 0
        if self.grows_to_max_new:
            growth = (leg.body.get("sampling_params") or {}).get("max_new_tokens") or self.default_growth
        for step in range(steps):
            await self.moving.wait()
            share = growth // steps if step else growth - (steps - 1) * (growth // steps)
            rank = self.ranks[leg.rank]
            rank.kv += share
            leg._held = (leg._held[0] + share, leg._held[1])
            rank.note()
            problem = None if self.on_over == "wait" else self._over(leg.rank)
            if problem:
                violation(self, leg, f"while it grows: {problem}")
                self.moving.clear()
            if self.run_s and leg.body.get("stream") is not True:
                await asyncio.sleep(self.run_s / steps)

    def output(self, leg: Leg, *, tokens: int | None = None, finish: dict[str, Any] | None = None) -> replies.Output:
        """What this engine answers for a leg: text, tokens, R3."""
        if tokens is None:
            limit = (leg.body.get("sampling_params") or {}).get("max_new_tokens") or leg.body.get("max_tokens") or self.tokens
            tokens = 1 if self.role == "prefill" else min(self.tokens, int(limit))
        finish = finish or {"type": "length", "length": 0 if self.role == "prefill" else tokens}
        text = f"{self.name}@{leg.rank} room {leg.room}"
        output = replies.Output(tokens, finish, text, cached_tokens=0)
        if leg.body.get("return_routed_experts") is True and not self.r3.missing:
            rows = self.r3_rows(leg, tokens, self.r3)
            # A decode reply of one token carries no field at all (seen on real engines).
            output.routed_experts = None if self.role == "decode" and tokens <= 1 else self.r3.text(rows, self._start(leg))
            output.routed_experts_dtype = self.r3.dtype
        if leg.body.get("return_indexer_topk") is True and self.indexer is not None:
            rows = self.r3_rows(leg, tokens, self.indexer, start_len=0, record=False)
            output.indexer_topk = None if self.role == "decode" and tokens <= 1 else self.indexer.text(rows)
        return output

    def _start(self, leg: Leg) -> int:
        return 0 if self.r3.ignores_start_len else leg.body.get("routed_experts_start_len") or 0

    def r3_rows(self, leg: Leg, tokens: int, model: R3Model, *, start_len: int | None = None, record: bool = True) -> Rows:
        """Rows `[start, prompt + tokens - 1)`; on decode the prompt's rows are junk."""
        start = (leg.body.get("routed_experts_start_len") or 0) if start_len is None else start_len
        if model.ignores_start_len:
            start = 0
        prompt = leg.prompt_tokens
        last = prompt + tokens - 1
        start = min(start, last)
        true_prompt = model.cached_rows(leg.seed, start, max(min(prompt, last) - start, 0))
        first_output = max(prompt, start)
        output = model.rows(zlib.crc32(leg.rid.encode()), first_output, max(last - first_output, 0))
        head = model.junk_rows(len(true_prompt)) if self.role == "decode" else true_prompt
        sent = np.concatenate([head, output])
        if record:
            leg.r3_output = output
            leg.r3_sent = sent
        return sent

    def _peer_left(self, leg: Leg) -> None:
        loop = asyncio.get_running_loop()
        if leg.ended is not None or leg.closed_at is not None:
            return
        leg.closed_at = loop.time()
        task = leg.task
        if task is not None:
            loop.call_later(self.disconnect_s, lambda: None if task.done() else task.cancel())

    async def _linger(self, leg: Leg) -> None:
        """A write failed because the peer had gone: the engine still holds the request until it notices."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(self.disconnect_s)

    async def _answer_abort(self, leg: Leg, exchange: Exchange) -> None:
        """As SGLang does: an error while KV is in transfer, a graceful end when it runs."""
        finish = {"type": "abort", "message": "Abort in waiting queue"}
        with contextlib.suppress(ConnectionError):
            if exchange.started:
                await exchange.chunk(replies.event(replies.generate_object(leg, replies.Output(0, finish, ""))))
                await exchange.chunk(b"data: [DONE]\n\n")
                await exchange.end()
            elif getattr(leg, "_running", False) or self.role == "regular":
                await exchange.reply(200, replies.reply_bytes(leg, self.output(leg, tokens=0, finish=finish)))
            else:
                message = f"Decode transfer failed for request rank={leg.rank} {leg.rid!r}: {self.abort_words}"
                await exchange.reply(500, orjson.dumps({"detail": message}))

    # --- the engine's other endpoints -----------------------------------------------------------------------------

    async def _control(self, request: Request, exchange: Exchange) -> None:
        if request.method == "POST":
            self.control.append(request)
        path = request.path
        if path == "/abort_request":
            self._abort(orjson.loads(request.body))
            return await exchange.reply(200, b"")
        if path == "/v1/loads":
            return await exchange.reply(200, orjson.dumps(facts.loads(self)))
        if path in ("/server_info", "/get_server_info"):
            return await exchange.reply(200, orjson.dumps(facts.server_info(self)))
        if path in ("/model_info", "/get_model_info"):
            return await exchange.reply(200, orjson.dumps(facts.model_info(self)))
        if path in ("/health", "/health_generate", "/ready"):
            if self.health_hangs_s:
                await asyncio.sleep(self.health_hangs_s)
            good = self.healthy() if self.healthy else True
            return await exchange.reply(200 if good else 503, b"")
        if path == "/metrics":
            text = mamba_metrics(self.role, self.ranks, self.mamba_slots) if self.mamba_slots is not None else ""
            return await exchange.reply(200, text.encode(), content_type="text/plain; version=0.0.4")
        if path == "/v1/models":
            models = {"object": "list", "data": [{"id": "m", "object": "model", "created": replies.CREATED, "owned_by": "sglang"}]}
            return await exchange.reply(200, orjson.dumps(models))
        if path in self.control_answers:
            status, said = self.control_answers[path]
            return await exchange.reply(status, orjson.dumps(said))
        if request.method == "POST":
            return await exchange.reply(200, orjson.dumps({"success": True, "message": f"{path} at {self.name}"}))
        return await exchange.reply(404, orjson.dumps({"detail": "Not Found"}))

    def _abort(self, body: dict[str, Any]) -> None:
        now = asyncio.get_running_loop().time()
        rid = body.get("rid") or ""
        everything = body.get("abort_all") is True
        hit: list[Leg] = []
        if everything or rid in self.live:
            hit = [leg for other, leg in self.live.items() if everything or other.startswith(rid)]
        for leg in hit:
            leg.aborted_at = leg.aborted_at or now
            if leg.task is not None:
                leg.task.cancel()
        if not everything and len(hit) > 1:
            self.violations.append(f"{self.name}: abort of {rid!r} hit strangers: {[leg.rid for leg in hit]}")
        self.aborts.append(Abort(rid, now, hit, body))

    def aborted(self, rid: str) -> list[Abort]:
        """Aborts that name exactly this rid."""
        return [abort for abort in self.aborts if abort.rid == rid]

    async def _bootstrap(self, request: Request, exchange: Exchange) -> None:
        if request.path == "/health":
            return await exchange.reply(200, b"OK", content_type="text/plain")
        query = parse_qs(request.query)
        if request.path == "/route" and query.get("prefill_dp_rank", ["-1"]) == ["-1"]:
            told = facts.topology(self)
            if isinstance(told, int):
                return await exchange.reply(told, b"")
            return await exchange.reply(200, orjson.dumps(told))
        return await exchange.reply(404, b"")


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()
