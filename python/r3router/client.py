"""Asynchronous client for rollouts: replies with their R3 rows as arrays, whether the rows came by reference or in the reply.

    async with Client("http://router:30000") as client:
        reply = await client.generate(input_ids=ids, sampling_params={"max_new_tokens": 64}, return_routed_experts=True)
        reply.routed_experts        # numpy [rows, layers, top_k], narrow, in shared memory when the rows are on this host

Needs the extra `client` (aiohttp, orjson, numpy; `r3router.client.install_uvloop()` where uvloop is installed).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from .r3 import descriptor
from .r3.errors import FetchFailed, FormatError, R3Error, RowsGone
from .r3.inline import Lines, Scanner
from .r3.reader import Reader
from .r3.reference import FIELDS, Reference
from .r3.reply import Payload, Reply, Sample

RETRY_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_PAUSE_S: Final = 5.0


class RequestFailed(Exception):
    """The router or an engine refused the request, or every attempt failed."""

    def __init__(self, status: int, text: str, attempts: int) -> None:
        super().__init__(f"{status} after {attempts} attempt(s): {text[:1000]}")
        self.status = status
        """HTTP status of the last attempt; 0 when there was none."""
        self.text = text


class Client:
    """Client of one router (or one engine)."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        agent_key: str | None = None,
        transport: str = "ref",
        layers: int | None = None,
        top_k: int | None = None,
        retries: int = 60,
        pause_s: float = 0.25,
        timeout_s: float | None = None,
        connections: int = 0,
        map_files: bool = True,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        """`transport`: `ref` asks for references, `inline` does not; both kinds of replies are understood either way.

        `layers`, `top_k`: shape of a row of in-line replies, which do not say it; without them their rows are flat,
        `[rows, layers * top_k]`, or a list of ids where the reply does not tell its tokens. A reference says its own shape: where its
        router does not know the layers (one layer wide, without `--r3-layers`) the rows get the shape that is said here, and a shape that
        contradicts it is a `FormatError`. `retries`: attempts after the first; pauses
        double from `pause_s` to 5 s, or are the server's `Retry-After`. `timeout_s`: for one attempt, none by default, since a
        rollout may take hours. `connections`: at once, 0 for any number. A `session` that is given is used and left open.
        """
        if transport not in ("ref", "inline"):
            raise ValueError(f"transport is ref or inline, not {transport!r}")
        self.url = url.rstrip("/")
        self._key = api_key
        self._agent_key = agent_key
        self._transport = transport
        self._row = (layers, top_k)
        self._retries = retries
        self._pause = pause_s
        self._timeout = timeout_s
        self._connections = connections
        self._map = map_files
        self._session = session
        self._own = session is None
        self._reader: Reader | None = None
        self._held: set[Payload] = set()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP session; made when first used, on the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections)
            # Large reads: a payload of 100 MB in pieces of 64 KiB would wake the loop 1,500 times.
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=1 << 20)
        return self._session

    @property
    def reader(self) -> Reader:
        """Reads references with this client's keys."""
        if self._reader is None:
            self._reader = Reader(self.session, self.url, key=self._key, agent_key=self._agent_key, map_files=self._map)
        return self._reader

    @property
    def held(self) -> int:
        """References that this client has received and neither read nor released."""
        return len(self._held)

    def forget(self, payload: Payload) -> None:
        """Called by a payload that is released."""
        self._held.discard(payload)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Releases what is still held and closes the connections."""
        await asyncio.gather(*(payload.release() for payload in list(self._held)))
        if self._own and self._session is not None:
            await self._session.close()
            self._session = None
            self._reader = None

    async def generate(self, body: Mapping[str, Any] | None = None, /, *, load: bool = True, keep: bool = False, **fields: Any) -> Reply:
        """`POST /generate`. See `post`."""
        return await self.post("/generate", {**(body or {}), **fields}, load=load, keep=keep)

    async def chat(self, body: Mapping[str, Any] | None = None, /, *, load: bool = True, keep: bool = False, **fields: Any) -> Reply:
        """`POST /v1/chat/completions`. See `post`; rows of each choice need `return_meta_info=True`."""
        return await self.post("/v1/chat/completions", {**(body or {}), **fields}, load=load, keep=keep)

    async def post(self, path: str, body: Mapping[str, Any], *, load: bool = True, keep: bool = False, key: str | None = None) -> Reply:
        """Sends a request until it is answered and its rows are read; what an attempt leaves unread is released.

        `load=False`: the rows stay where they are, for `read_rows` or to hand the reference on; release them, or use the reply as
        a context manager. `keep=True`: they are read and stay. `key`: routing key of the session (`X-SMG-Routing-Key`).

        Raises:
            RequestFailed: refused, or the last attempt failed.
            R3Error: the last attempt's rows could not be read.
        """
        for attempt in range(1, self._retries + 2):
            last = attempt > self._retries
            pause: float | None = None
            try:
                reply = await self._attempt(path, body, attempt, key)
            except _Again as again:
                if last:
                    raise RequestFailed(again.status, again.text, attempt) from again.cause
                pause = again.pause
            else:
                if not load:
                    return reply
                try:
                    return await reply.load(keep=keep)
                except (RowsGone, FetchFailed):
                    # Rows of one sample are gone: all of this attempt is dropped, or its other references would leak.
                    await reply.release()
                    if last:
                        raise
                except BaseException:
                    await asyncio.shield(asyncio.ensure_future(reply.release()))
                    raise
            await asyncio.sleep(self._wait(attempt) if pause is None else pause)
        raise AssertionError("unreachable")

    async def stream(
        self, path: str, body: Mapping[str, Any], *, load: bool = True, keep: bool = False, key: str | None = None
    ) -> AsyncIterator[Reply]:
        """The events of a streamed request; the rows come with the last ones. Retried only while no event has been given out.

        Raises:
            RequestFailed, R3Error: as `post`; also when the stream breaks off or an event says an error.
        """
        body = {**body, "stream": True}
        for attempt in range(1, self._retries + 2):
            given = False
            pause: float | None = None
            try:
                async for reply in self._events(path, body, attempt, key):
                    given = True
                    if load:
                        try:
                            await reply.load(keep=keep)
                        except BaseException:
                            await asyncio.shield(asyncio.ensure_future(reply.release()))
                            raise
                    yield reply
                return
            except _Again as again:
                if given or attempt > self._retries:
                    raise RequestFailed(again.status, again.text, attempt) from again.cause
                pause = again.pause
            await asyncio.sleep(self._wait(attempt) if pause is None else pause)

    def _wait(self, attempt: int) -> float:
        return min(MAX_PAUSE_S, self._pause * 2.0 ** min(attempt - 1, 10)) * random.uniform(0.8, 1.2)  # noqa: S311

    def _headers(self, key: str | None) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self._transport == "ref":
            headers["x-r3-transport"] = "ref"
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        if key:
            headers["x-smg-routing-key"] = key
        return headers

    def _send(self, path: str, body: Mapping[str, Any], key: str | None) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._timeout, sock_connect=10)
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return self.session.post(self.url + path, data=data, headers=self._headers(key), timeout=timeout)

    async def _attempt(self, path: str, body: Mapping[str, Any], attempt: int, key: str | None) -> Reply:
        scanner = Scanner()
        skeleton = bytearray()
        try:
            async with self._send(path, body, key) as response:
                await _refuse(response)
                async for piece in response.content.iter_any():
                    skeleton += scanner.feed(piece)
                skeleton += scanner.finish()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _Again(0, f"POST {path}: {error!r}", cause=error) from error
        return self._reply(bytes(skeleton), scanner, body, attempt)

    async def _events(self, path: str, body: Mapping[str, Any], attempt: int, key: str | None) -> AsyncIterator[Reply]:
        scanner, lines = Scanner(), Lines()
        done = False
        try:
            async with self._send(path, body, key) as response:
                await _refuse(response)
                async for piece in response.content.iter_any():
                    for data in lines.feed(scanner.feed(piece)):
                        if data == b"[DONE]":
                            done = True
                            continue
                        yield self._reply(data, scanner, body, attempt)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _Again(0, f"POST {path}: {error!r}", cause=error) from error
        if not done:
            raise _Again(0, f"POST {path}: the stream ended without [DONE]")

    def _reply(self, raw: bytes, scanner: Scanner, request: Mapping[str, Any], attempt: int) -> Reply:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise _Again(0, f"the reply is not JSON: {error}", cause=error) from error
        if isinstance(body, dict) and "error" in body and not ({"meta_info", "choices"} & body.keys()):
            raise _Again(0, f"the reply is an error: {body['error']!r:.500}")
        samples: list[Sample] = []
        made: list[Payload] = []
        try:
            for element, meta in _places(body):
                payloads = self._payloads(meta, scanner, request)
                made += payloads.values()
                samples.append(Sample(element, meta, payloads))
        except R3Error:
            # What was promised in the samples before this one will not be read.
            for payload in made:
                _later(payload.release())
            raise
        return Reply(body, samples, attempt)

    def _payloads(self, meta: dict[str, Any], scanner: Scanner, request: Mapping[str, Any]) -> dict[str, Payload]:
        payloads: dict[str, Payload] = {}
        envelope = meta.get("output_store_ref")
        if envelope is not None:
            for field in FIELDS:
                if field in envelope.get("fields", {}):
                    payloads[field] = self._hold(Reference.parse(envelope, field), field)
        for field in FIELDS:
            name = meta.get(field)
            raw = scanner.payloads.pop(name, None) if isinstance(name, str) else None
            if raw is None:
                continue
            del meta[field]
            if raw.startswith(descriptor.MAGIC):
                payloads[field] = self._hold(Reference.of(descriptor.Descriptor.decode(bytes(raw))), field)
            else:
                payloads[field] = Payload(self, array=self._inline(raw, field, meta, request))
        return payloads

    def _hold(self, reference: Reference, field: str = "routed_experts") -> Payload:
        payload = Payload(self, reference=reference)
        self._held.add(payload)
        layers, top_k = self._row
        if field == "routed_experts" and layers and top_k and reference.shape[1:] != (layers, top_k):
            if reference.shape[1:] != (1, layers * top_k):
                _later(payload.release())
                raise FormatError(
                    f"the reference has rows of {reference.shape[1]} layers and {reference.shape[2]} experts,"
                    f" and this client was made with layers={layers}, top_k={top_k}; give the model's own, or neither"
                )
            payload.row = (layers, top_k)
        return payload

    def _inline(self, raw: bytearray, field: str, meta: Mapping[str, Any], request: Mapping[str, Any]) -> NDArray[Any]:
        dtype = np.dtype(str(meta.get("routed_experts_dtype", "int32"))).newbyteorder("<")
        if len(raw) % dtype.itemsize:
            raise FormatError(f"{len(raw)} bytes of {field} are no {dtype.name}")
        ids = np.frombuffer(raw, dtype)
        layers, top_k = self._row
        if field == "routed_experts" and layers and top_k:
            if ids.size % (layers * top_k):
                raise FormatError(f"{ids.size} ids are no rows of {layers} layers and {top_k} experts")
            return ids.reshape(-1, layers, top_k)
        prompt, new = meta.get("prompt_tokens"), meta.get("completion_tokens")
        if prompt is None or new is None:
            # Nothing says how many rows these are; the caller may know.
            return ids
        start = meta.get("routed_experts_start_len", request.get("routed_experts_start_len")) or 0
        rows = max(0, int(prompt) + int(new) - 1 - (int(start) if field == "routed_experts" else 0))
        if rows == 0 or ids.size % rows:
            if ids.size == 0:
                return ids.reshape(0, 0)
            raise FormatError(f"{ids.size} ids of {field} are no {rows} rows")
        return ids.reshape(rows, -1)


class _Again(Exception):
    """The attempt failed in a way that another may not."""

    def __init__(self, status: int, text: str, *, pause: float | None = None, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.pause = pause
        self.cause = cause


async def _refuse(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text(errors="replace")
    if response.status not in RETRY_STATUSES:
        raise RequestFailed(response.status, text, 1)
    after = response.headers.get("retry-after", "")
    raise _Again(response.status, text, pause=min(float(after), 60.0) if after.isdigit() else None)


def _places(body: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each sample of a reply, and the object that its payloads are in."""
    for element in body if isinstance(body, list) else [body]:
        if not isinstance(element, dict):
            raise FormatError(f"a reply is an object, not {element!r:.100}")
        choices = element.get("choices")
        if choices is None:
            yield element, element.setdefault("meta_info", {})
            continue
        extra = element.get("sglext") or {}
        if not choices:
            yield element, {**_usage(element), **extra}
        for at, choice in enumerate(choices):
            meta = choice.get("meta_info")
            if meta is None:
                # An engine sends the first choice's rows at response level; the router has the others' in their choices.
                meta = {**_usage(element), **extra} if at == 0 else dict(choice.get("sglext") or {})
            yield choice, meta


def _usage(element: Mapping[str, Any]) -> dict[str, Any]:
    usage = element.get("usage") or {}
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage}


_LATER: set[asyncio.Task[None]] = set()


def _later(work: Any) -> None:
    """Runs on, whatever becomes of the caller."""
    task = asyncio.ensure_future(work)
    _LATER.add(task)
    task.add_done_callback(_LATER.discard)


def install_uvloop() -> bool:
    """Makes uvloop the event loop of new loops; `False` where it is not installed."""
    try:
        import uvloop
    except ImportError:
        return False
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    return True


__all__ = ["Client", "Payload", "Reply", "RequestFailed", "Sample", "install_uvloop"]
