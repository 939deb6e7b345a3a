"""A reply and its samples, each with its R3 rows: loaded, or a reference that is read by ranges and released."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import R3Error, RowsGone
from .reader import Reader
from .reference import Reference

if TYPE_CHECKING:
    import torch


class Holder(Protocol):
    """Who received a reference, and knows which are still held."""

    @property
    def reader(self) -> Reader:
        """Reads and releases them."""

    def forget(self, payload: Payload) -> None:
        """The payload is released."""


class Payload:
    """R3 rows of one sample. `array` is there once they are loaded."""

    def __init__(self, client: Holder, *, reference: Reference | None = None, array: NDArray[Any] | None = None) -> None:
        self._client = client
        self.reference = reference
        """Where the rows are; `None` when they came in the reply."""
        self.array = array
        self.row: tuple[int, int] | None = None
        """Layers and experts of a layer, where the reference does not tell them apart."""
        self._held = reference is not None

    @property
    def held(self) -> bool:
        """Whether somebody keeps the rows for us: a reference that is neither released nor expired."""
        return self._held

    async def read(self, first: int = 0, end: int | None = None, *, dtype: str | None = None) -> NDArray[Any]:
        """Rows `first..end`: what one rank of a trainer needs. Raises as `Reader.read`."""
        if self.array is not None:
            rows = self.array[first:end]
            return rows if dtype is None else rows.astype(np.dtype(dtype), copy=False)
        if self.reference is None or not self._held:
            raise RowsGone("this payload was released")
        read = await self._client.reader.read(self.reference, first, end, dtype=dtype)
        return read if self.row is None else read.reshape(len(read), *self.row)

    async def load(self, *, keep: bool = False) -> NDArray[Any]:
        """All rows into `array`; the reference is released then, unless it is to be kept."""
        if self.array is None:
            self.array = await self.read()
        if not keep:
            await self.release()
        return self.array

    async def release(self) -> None:
        """Lets the owners of the rows drop them. An array that was loaded stays valid."""
        if self.reference is not None and self._held:
            self._held = False
            self._client.forget(self)
            await self._client.reader.release(self.reference)


class Sample:
    """One element of a reply: its own members, and its rows."""

    def __init__(self, body: dict[str, Any], meta: dict[str, Any], payloads: dict[str, Payload]) -> None:
        self.body = body
        self.meta_info = meta
        """`meta_info` of the reply or the choice, or `sglext`; without payloads."""
        self.payloads = payloads
        """By field: `routed_experts`, `indexer_topk`."""

    def __getitem__(self, key: str) -> Any:
        return self.body[key]

    @property
    def text(self) -> str:
        """The generated text."""
        if "text" in self.body:
            return str(self.body["text"])
        return str((self.body.get("message") or {}).get("content") or "")

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens, where the route sends them."""
        return list(self.body.get("output_ids") or ())

    @property
    def finish_reason(self) -> Any:
        """As the engine said it."""
        return self.meta_info.get("finish_reason", self.body.get("finish_reason"))

    @property
    def payload(self) -> Payload | None:
        """The routed experts; `None` when the reply has none."""
        return self.payloads.get("routed_experts")

    @property
    def reference(self) -> Reference | None:
        """Where the routed experts are, to hand on; `None` when they came in the reply."""
        return self.payload.reference if self.payload else None

    @property
    def routed_experts(self) -> NDArray[Any] | None:
        """Rows `[rows, layers, top_k]`, narrow (`uint8`, `uint16`) by reference and `int32` in-line; `None` when the reply has none.

        They may be read-only. Raises `R3Error` when they are not loaded.
        """
        if self.payload is None:
            return None
        if self.payload.array is None:
            raise R3Error("the rows are not loaded: await reply.load(), or read a range with await reply.read_rows(first, end)")
        return self.payload.array

    def routed_experts_torch(self) -> torch.Tensor | None:
        """The rows as a tensor that shares their memory. Do not write into it: shared memory is mapped read-only."""
        rows = self.routed_experts
        if rows is None:
            return None
        import warnings

        import torch

        with warnings.catch_warnings():
            # torch has no read-only tensors and says so each time.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.from_numpy(rows)

    def routed_experts_int32(self) -> NDArray[np.int32] | None:
        """The rows as int32 of their own, which is what miles and slime keep."""
        rows = self.routed_experts
        return None if rows is None else np.ascontiguousarray(rows, dtype=np.int32)

    async def load(self, *, keep: bool = False) -> Sample:
        """Reads all rows; see `Payload.load`."""
        await asyncio.gather(*(p.load(keep=keep) for p in self.payloads.values()))
        return self

    async def read_rows(self, first: int = 0, end: int | None = None, *, dtype: str | None = None) -> NDArray[Any]:
        """A range of the routed experts' rows; see `Payload.read`."""
        if self.payload is None:
            raise R3Error("the reply has no routed_experts")
        return await self.payload.read(first, end, dtype=dtype)

    async def release(self) -> None:
        """Releases what is held; see `Payload.release`."""
        await asyncio.gather(*(p.release() for p in self.payloads.values()))


class Reply(Sample):
    """A whole reply. For a batch, `n > 1` and chat it has several `samples`; its own members are then those of the first.

    As a context manager it releases its references at the end.
    """

    def __init__(self, body: Any, samples: list[Sample], attempts: int) -> None:
        first = samples[0] if samples else Sample({}, {}, {})
        super().__init__(body if isinstance(body, dict) else first.body, first.meta_info, first.payloads)
        self.raw = body
        """The reply's JSON without payloads."""
        self.samples = samples
        self.attempts = attempts
        """Requests that it took."""

    @property
    def text(self) -> str:
        return self.samples[0].text if self.samples else ""

    @property
    def finish_reason(self) -> Any:
        return self.samples[0].finish_reason if self.samples else None

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    async def load(self, *, keep: bool = False) -> Reply:
        """Reads the rows of all samples."""
        await asyncio.gather(*(s.load(keep=keep) for s in self.samples))
        return self

    async def release(self) -> None:
        """Releases what the samples hold."""
        await asyncio.gather(*(s.release() for s in self.samples))

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.release()
