"""A scripted SGLang engine: prefill, decode or regular, with ranks, a ledger, aborts by prefix, and the engine's own endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import orjson

from . import replies
from .acts import Script
from .ledger import Rank, load_entry, mamba_metrics
from .r3 import R3Model, Rows, to_text
from .rooms import Meeting, Rooms
from .server import Exchange, Request, Server

GENERATION_PATHS = ("/generate", "/v1/chat/completions", "/v1/completions")
ROOM_TEXT = re.compile(rb'"bootstrap_room"\s*:\s*([^,}\s]+)\s*[,}]')
MAX_ROOM = 2**63 - 1
SMALL_BODY = 1 << 16
MAMBA_TEXT = "Not enough space for mamba cache, try to increase --mamba-full-memory-ratio or --max-mamba-cache-size."


class Timeout(Exception):
    """The engine's own waiting timeout: the router must never let it happen."""


@dataclass(eq=False)
class Leg:
    """One generation request as an engine saw it."""

    engine: Engine
    request: Request
    body: dict[str, Any] = field(default_factory=dict)
    rid: str = ""
    room: int = 0
    room_text: str = ""
    rank: int = 0
    asked_rank: int | None = None
    prompt_tokens: int = 0
    arrived: float = 0.0
    ended: float | None = None
    end: str = "open"
    """How it ended: `answered`, `aborted`, `left` (connection closed, no abort), `late` (closed when the answer was ready),
    `broken` (by script) or `timeout`."""
    closed_at: float | None = None
    aborted_at: float | None = None
    leaks: bool = False
    delivered: bool = False
    sent: bytes = b""
    """The whole reply of a healthy engine (streams: all events)."""
    r3_sent: Rows | None = None
    r3_output: Rows | None = None
    meeting: Meeting | None = None
    task: asyncio.Task[Any] | None = None
    _held: tuple[int, int] = (0, 0)

    @property
    def raw(self) -> bytes:
        """The body's bytes."""
        return self.request.body

    @property
    def seed(self) -> int:
        """Names the prompt's rows: the same for both legs of an attempt. Long prompts share a few rows, so that texts can be cached."""
        ids = self.body.get("input_ids")
        if isinstance(ids, list):
            return zlib.crc32(str(ids if len(ids) < 1000 else (ids[:32], ids[-1] & 3)).encode())
        return zlib.crc32(
            str(self.body.get("text") or self.body.get("messages") or self.body.get("prompt"))[:4096].encode("utf-8", "replace")
        )

    def token_at(self, index: int) -> int:
        """Id of a prompt token."""
        ids = self.body.get("input_ids")
        return ids[index] if isinstance(ids, list) and index < len(ids) else 7

    async def deliver(self) -> None:
        """The leg's part of the KV transfer: prefill computes and sends, decode waits for it."""
        if self.meeting is None:
            return
        engine, meeting = self.engine, self.meeting
        if engine.role == "prefill":
            await engine.wait_for(meeting.both, self)
            if engine.prefill_s or engine.transfer_s:
                await asyncio.sleep(engine.prefill_s + engine.transfer_s)
            self.delivered = True
            if not meeting.delivered.done():
                meeting.delivered.set_result(None)
        elif engine.role == "decode":
            await engine.wait_for(meeting.delivered, self)
            self.delivered = True
        await engine.moving.wait()


@dataclass
class Abort:
    """One `/abort_request` and the legs that it hit (by prefix; none when it came too early or too late)."""

    rid: str
    at: float
    hit: list[Leg]
    body: dict[str, Any]


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
        self._round_robin = 0

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
            self._read(leg)
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

    def _read(self, leg: Leg) -> None:
        """Reads the fields that an engine reads, and checks the rules that hold for every leg."""
        raw = leg.raw
        try:
            body = orjson.loads(raw)
        except ValueError:
            try:
                body = json.loads(raw)  # Lone surrogates: Python servers take them.
            except ValueError as error:
                body = {}
                self._violation(leg, f"body is not JSON ({error}): {raw[:200]!r}")
        if not isinstance(body, dict):
            self._violation(leg, "body is not an object")
            body = {}
        leg.body = body
        if len(raw) <= SMALL_BODY:
            self._check_duplicate_keys(leg)
        leg.rid = body.get("rid") or ""
        leg.prompt_tokens = prompt_tokens(body) + self.expands
        self._check_single(leg)
        if self.role == "regular":
            leg.rid = leg.rid or f"engine-made-{len(self.legs)}"
            leg.rank = self._rank(leg, None)
            return
        if not isinstance(leg.rid, str) or not leg.rid:
            self._violation(leg, f"rid is {leg.rid!r}")
            leg.rid = f"none-{len(self.legs)}"
        leg.room = self._room(leg)
        leg.rank = self._rank(leg, leg.room)
        leg.asked_rank = body.get("disagg_prefill_dp_rank")
        if self.role == "prefill" and self.dp_size > 1 and self.strict_pairs and body.get("routed_dp_rank") is None:
            self._violation(leg, "prefill leg without routed_dp_rank")

    def _check_duplicate_keys(self, leg: Leg) -> None:
        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            names = [name for name, _ in items]
            if len(set(names)) != len(names):
                self._violation(leg, f"duplicate keys {sorted({n for n in names if names.count(n) > 1})}")
            return dict(items)

        if leg.body:
            json.loads(leg.raw, object_pairs_hook=pairs)

    def _check_single(self, leg: Leg) -> None:
        body = leg.body
        sampling = body.get("sampling_params")
        n = (sampling.get("n") if isinstance(sampling, dict) else None) or body.get("n") or 1
        ids = body.get("input_ids")
        batch = isinstance(body.get("text"), list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
        if self.role != "regular" and (n != 1 or batch):
            self._violation(leg, f"a PD leg with n={n}, batch={batch}: one room for several samples")

    def _room(self, leg: Leg) -> int:
        room = leg.body.get("bootstrap_room")
        if type(room) is not int or not 1 <= room <= MAX_ROOM:
            self._violation(leg, f"bootstrap_room is {room!r}")
            return 0
        found = ROOM_TEXT.findall(leg.raw) if len(leg.raw) <= SMALL_BODY else [str(room).encode()]
        # Unknown fields of the client may hold a member of the same name further in.
        written = [text.decode() for text in found]
        leg.room_text = str(room) if str(room) in written else "".join(written[:1])
        if leg.room_text != str(room):
            self._violation(leg, f"bootstrap_room is written {leg.room_text!r}")
        return room

    def _rank(self, leg: Leg, room: int | None) -> int:
        rank = leg.body.get("routed_dp_rank", leg.body.get("data_parallel_rank"))
        header = leg.request.header("x-data-parallel-rank")
        if header is not None and leg.request.path != "/generate":
            rank = int(header)  # On OpenAI routes the header beats the body.
        if rank is None:
            if room is None:
                self._round_robin += 1
                return self._round_robin % self.dp_size
            return room % self.dp_size
        if type(rank) is not int or not 0 <= rank < self.dp_size:
            self._violation(leg, f"rank {rank!r} outside 0..{self.dp_size}")
            return 0
        return rank

    def _violation(self, leg: Leg, text: str) -> None:
        self.violations.append(f"{self.name} {leg.request.path} rid={leg.rid!r}: {text}")

    def _make_live(self, leg: Leg) -> None:
        if leg.rid in self._rids:
            self._violation(leg, "this rid was generated before on this engine")
        self._rids.add(leg.rid)
        if len(self.live) <= 512:
            for other in self.live:
                if other != leg.rid and (other.startswith(leg.rid) or leg.rid.startswith(other)):
                    self._violation(leg, f"prefix of, or prefixed by, the live rid {other!r}")
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
        self._violation(leg, problem)
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
                self._violation(leg, f"while it grows: {problem}")
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
            return await exchange.reply(200, orjson.dumps(self.loads()))
        if path in ("/server_info", "/get_server_info"):
            return await exchange.reply(200, orjson.dumps(self.server_info()))
        if path in ("/model_info", "/get_model_info"):
            return await exchange.reply(200, orjson.dumps(self.model_info()))
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

    def loads(self) -> dict[str, Any]:
        """`/v1/loads`."""
        entries = [
            load_entry(i, rank, role=self.role, kv_pool=self.kv_pool, max_running=self.max_running) for i, rank in enumerate(self.ranks)
        ]
        if self.edit_loads:
            entries = self.edit_loads(entries)
        return {
            "timestamp": datetime.now(timezone.utc).isoformat(),
            "version": "0.5.23",
            "accelerator": "fake",
            "num_accelerators": 1,
            "loads": entries,
        }

    def server_info(self) -> dict[str, Any]:
        """`/server_info`."""
        state: dict[str, Any] = {
            "effective_max_running_requests_per_dp": self.max_running,
            "memory_usage": {"token_capacity": self.kv_pool},
            "disaggregation_mode": self.role,
        }
        if self.mamba_slots is not None:
            state["max_mamba_cache_size"] = self.mamba_slots
        info: dict[str, Any] = {
            "model_path": "m",
            "served_model_name": "m",
            "tp_size": self.dp_size,
            "dp_size": self.dp_size,
            "attn_dp_size": 1,
            "enable_dp_attention": self.dp_size > 1,
            "disaggregation_mode": self.role if self.role != "regular" else "null",
            "load_balance_method": "follow_bootstrap_room" if self.role == "prefill" else "round_robin",
            "disaggregation_bootstrap_port": self.bootstrap.port or None,
            "disaggregation_transfer_backend": "nixl",
            "max_running_requests": self.max_running * self.dp_size,
            "max_mamba_cache_size": None,
            "page_size": self.page_size,
            "num_reserved_decode_tokens": 512,
            "disaggregation_decode_extra_slots": 0,
            "chunked_prefill_size": 1_000_000,
            "enable_return_routed_experts": not self.r3.missing,
            "max_total_num_tokens": self.kv_pool,
            "max_req_input_len": 1_000_000_000,
            "internal_states": [state] * self.dp_size,
            "version": "0.5.23",
            "frontend": "python",
        }
        return self.edit_info(info) if self.edit_info else info

    def model_info(self) -> dict[str, Any]:
        """`/model_info`."""
        info = {
            "model_path": "m",
            "served_model_name": "m",
            "tokenizer_path": "m",
            "is_generation": True,
            "weight_version": "default",
            "disaggregation_mode": self.role if self.role != "regular" else "null",
            "model_type": "fake",
            "answered_by": self.name,
        }
        return self.edit_model(info) if self.edit_model else info

    async def _bootstrap(self, request: Request, exchange: Exchange) -> None:
        if request.path == "/health":
            return await exchange.reply(200, b"OK", content_type="text/plain")
        query = parse_qs(request.query)
        if request.path == "/route" and query.get("prefill_dp_rank", ["-1"]) == ["-1"]:
            topology: dict[str, Any] | int = {
                "attn_tp_size": 1,
                "attn_cp_size": 1,
                "dp_size": self.dp_size,
                "pp_size": 1,
                "page_size": self.page_size,
                "kv_cache_dtype": "bfloat16",
                "follow_bootstrap_room": True,
                "decode_allocation_policy": "early",
                "prefill_http_port": self.server.port,
            }
            if self.edit_topology:
                topology = self.edit_topology(topology)
            if isinstance(topology, int):
                return await exchange.reply(topology, b"")
            return await exchange.reply(200, orjson.dumps(topology))
        return await exchange.reply(404, b"")


def prompt_tokens(body: dict[str, Any]) -> int:
    """Prompt length as this fake counts it: ids, or a token for every four characters."""
    ids = body.get("input_ids")
    if isinstance(ids, list):
        return len(ids) if not ids or not isinstance(ids[0], list) else sum(len(x) for x in ids)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    text = body.get("text") if body.get("text") is not None else prompt
    if not isinstance(text, str):
        text = "".join(str(m.get("content")) for m in body.get("messages") or [] if isinstance(m, dict))
    return max(1, len(text) // 4)


def merged_rows(prefill: Leg, decode: Leg) -> Rows:
    """What one unsplit engine would have returned for these two legs."""
    assert prefill.r3_sent is not None and decode.r3_output is not None
    return np.concatenate([prefill.r3_sent, decode.r3_output])


def merged_text(prefill: Leg, decode: Leg) -> str:
    """`merged_rows` as the field's value."""
    return to_text(merged_rows(prefill, decode))


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()
