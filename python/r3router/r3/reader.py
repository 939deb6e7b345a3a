"""References to arrays: mapped where the rows are on this host, fetched where not, segments joined in the order of the sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import aiohttp
import numpy as np
from numpy.typing import NDArray

from . import fetch, local
from .errors import FetchFailed, FormatError, R3Error
from .format import numpy_dtype
from .reference import Reference, Segment

WRITE_SECONDS: Final = 30.0
"""How long a file that an engine still writes is waited for."""
_PLACED_BYTES: Final = 1 << 20
"""Less is copied at once: two pages and a system call cost as much."""
_T = TypeVar("_T")


class Reader:
    """Reads and releases references. Safe for many at once on one event loop."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        base: str = "http://127.0.0.1",
        *,
        key: str | None = None,
        agent_key: str | None = None,
        map_files: bool = True,
        verify_files: bool = False,
    ) -> None:
        """`base`: the router, whose key is `key`; agents get `agent_key`, or the same when there is none.

        `map_files=False` fetches over HTTP even what lies on this host. Rows that travel are always checked against their
        checksum; mapped ones with `verify_files`.
        """
        self._http = http
        self._base = base
        self._key = key
        self._agent_key = key if agent_key is None else agent_key
        self._map = map_files
        self._verify = verify_files

    async def read(self, reference: Reference, first: int = 0, end: int | None = None, *, dtype: str | None = None) -> NDArray[Any]:
        """Rows `first..end` of a reference, `[rows, layers, top_k]`; all of them without a range.

        One mapped segment gives a read-only view of shared memory. Several are joined in one new array, in which the largest is still
        the file's memory when it is on this host; the others are copied, or fetched side by side into their places. `dtype` widens;
        without it the rows stay narrow, as `reference.dtype`.

        Raises:
            R3Error: see `r3router.r3.errors`. Nothing is returned in part.
            IndexError: the range lies outside.
        """
        end = reference.rows if end is None else end
        parts = reference.cut(first, end)
        wanted = numpy_dtype(dtype or reference.dtype)
        if wanted.itemsize < numpy_dtype(reference.dtype).itemsize:
            raise FormatError(f"{reference.dtype} rows do not fit into {wanted.name}")
        shape = (end - first, *reference.shape[1:])
        if len(parts) == 1:
            rows = await self._part(parts[0][0], reference, parts[0][1], parts[0][2])
            return rows if rows.dtype == wanted else rows.astype(wanted)
        if not parts:
            return np.empty(shape, wanted)
        # The largest part stays where it is, and the others come to it: most samples are nearly all prompt or nearly all output.
        largest = max(parts, key=lambda part: part[2] - part[1])
        placed = await self._placed(largest, reference, shape[0], wanted)
        out = np.empty(shape, wanted) if placed is None else placed

        async def fill(segment: Segment, a: int, b: int, at: int) -> None:
            await self._into(segment, reference, a, b, out[at : at + b - a])

        # The others are of no use when one fails.
        tasks = [asyncio.ensure_future(fill(*part)) for part in parts if placed is None or part is not largest]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return out

    async def _placed(
        self, part: tuple[Segment, int, int, int], reference: Reference, total: int, wanted: np.dtype[Any]
    ) -> NDArray[Any] | None:
        """An array for all rows in which this part's are mapped; `None` when it is not on this host, small, or of another dtype."""
        segment, a, b, at = part
        small = (b - a) * reference.row_bytes < _PLACED_BYTES
        if not self._map or small or not local.may_be_here(segment) or numpy_dtype(segment.dtype) != wanted:
            return None
        try:
            return await self._when_written(
                lambda: local.place_segment(segment, reference.shape, a, b, at, total, verify=self._verify), segment
            )
        except local.NotHere:
            return None

    async def _part(self, segment: Segment, reference: Reference, a: int, b: int) -> NDArray[Any]:
        """Rows of one segment: a view of its file, or fetched."""
        if self._map and local.may_be_here(segment):
            try:
                return await self._mapped(segment, reference, a, b)
            except local.NotHere:
                pass
        out = np.empty((b - a, *reference.shape[1:]), numpy_dtype(segment.dtype))
        await self._fetch(segment, a, b, out)
        return out

    async def _into(self, segment: Segment, reference: Reference, a: int, b: int, out: NDArray[Any]) -> None:
        """Rows of one segment, into their place in the result."""
        here = self._map and local.may_be_here(segment)
        if here or numpy_dtype(segment.dtype) != out.dtype:
            rows = await self._part(segment, reference, a, b)
            # Tens of milliseconds when it is large; the loop goes on meanwhile.
            if out.nbytes > _PLACED_BYTES:
                await asyncio.to_thread(np.copyto, out, rows)
            else:
                out[...] = rows
        else:
            await self._fetch(segment, a, b, out)

    async def _fetch(self, segment: Segment, a: int, b: int, out: NDArray[Any]) -> None:
        key = self._agent_key if segment.uri.startswith("r3://") else self._key
        await fetch.fetch_segment(self._http, segment, self._base, out, a, b, key=key)

    async def _mapped(self, segment: Segment, reference: Reference, a: int, b: int) -> NDArray[Any]:
        return await self._when_written(lambda: local.read_segment(segment, reference.shape, a, b, verify=self._verify), segment)

    async def _when_written(self, look: Callable[[], _T], segment: Segment) -> _T:
        """What `look` says once the engine has written the file."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WRITE_SECONDS
        pause = 0.0005
        while True:
            try:
                return look()
            except local.StillWritten:
                if loop.time() > deadline:
                    raise FetchFailed(f"{segment.path} was not complete after {WRITE_SECONDS:.0f} s") from None
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.05)

    async def release(self, reference: Reference) -> bool:
        """Tells the owners that nobody will read on; arrays that are mapped stay valid. `False` when one could not be told."""
        urls = {segment.object_url(self._base): segment.uri.startswith("r3://") for segment in reference.segments}
        done = await asyncio.gather(
            *(fetch.delete(self._http, url, key=self._agent_key if agent else self._key) for url, agent in urls.items())
        )
        return all(done)


__all__ = ["R3Error", "Reader"]
