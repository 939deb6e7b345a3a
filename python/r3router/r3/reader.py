"""References to arrays: mapped where the rows are on this host, fetched where not, segments joined in the order of the sequence."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from . import fetch, local
from .errors import FetchFailed, FormatError, R3Error
from .format import numpy_dtype
from .reference import Reference, Segment

WRITE_SECONDS: Final = 30.0
"""How long a file that an engine still writes is waited for."""


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

        One mapped segment gives a read-only view of shared memory. Several are fetched side by side into one new array. `dtype`
        widens; without it the rows stay narrow, as `reference.dtype`.

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
        out = np.empty(shape, wanted)

        async def fill(segment: Segment, a: int, b: int, at: int) -> None:
            out[at : at + b - a] = await self._part(segment, reference, a, b)

        # The others are of no use when one fails.
        tasks = [asyncio.ensure_future(fill(*part)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return out

    async def _part(self, segment: Segment, reference: Reference, a: int, b: int) -> NDArray[Any]:
        if self._map and local.may_be_here(segment):
            try:
                return await self._mapped(segment, reference, a, b)
            except local.NotHere:
                pass
        out = np.empty((b - a, *reference.shape[1:]), numpy_dtype(segment.dtype))
        key = self._agent_key if segment.uri.startswith("r3://") else self._key
        await fetch.fetch_segment(self._http, segment, self._base, out, a, b, key=key)
        return out

    async def _mapped(self, segment: Segment, reference: Reference, a: int, b: int) -> NDArray[Any]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WRITE_SECONDS
        pause = 0.0005
        while True:
            try:
                return local.read_segment(segment, reference.shape, a, b, verify=self._verify)
            except local.StillWritten:
                if loop.time() > deadline:
                    raise FetchFailed(f"{segment.path} was not complete after {WRITE_SECONDS:.0f} s") from None
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.05)

    async def release(self, reference: Reference) -> bool:
        """Tells the owners that nobody will read on; arrays that are mapped stay valid. `False` when one could not be told."""
        urls = {segment.url(self._base): segment.uri.startswith("r3://") for segment in reference.segments}
        done = await asyncio.gather(
            *(fetch.delete(self._http, url, key=self._agent_key if agent else self._key) for url, agent in urls.items())
        )
        return all(done)


__all__ = ["R3Error", "Reader"]
