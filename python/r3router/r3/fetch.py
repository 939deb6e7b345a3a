"""Rows over HTTP, from a router or an agent, straight into the array that is wanted, checked while they come in."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from .errors import AccessDenied, FetchFailed, FormatError, R3Error, RowsGone
from .format import numpy_dtype
from .reference import Segment

IDLE_SECONDS: Final = 60.0
"""A fetch that gets no byte for so long is given up."""


def failure(url: str, status: int, text: str) -> R3Error:
    """What an answer that is no success means."""
    message = f"GET {url}: {status} {text[:300]}"
    if status in (404, 410):
        return RowsGone(message)
    if status in (401, 403):
        return AccessDenied(message)
    if status in (400, 416):
        return FormatError(message)
    return FetchFailed(message)


def headers(key: str | None) -> dict[str, str]:
    """Headers with the owner's key."""
    return {"authorization": f"Bearer {key}"} if key else {}


async def fetch_segment(
    http: aiohttp.ClientSession,
    segment: Segment,
    base: str,
    out: NDArray[Any],
    first: int,
    end: int,
    *,
    key: str | None = None,
    verify: bool = True,
) -> None:
    """Fills `out`, C-contiguous `[end - first, layers, top_k]` of the segment's dtype, with rows `first..end` of the segment.

    Raises:
        RowsGone, AccessDenied, FetchFailed, FormatError: see there.
    """
    if out.dtype != numpy_dtype(segment.dtype) or not out.flags.c_contiguous:
        raise FormatError(f"rows are fetched as {segment.dtype} in C order")
    row = out.itemsize * int(np.prod(out.shape[1:]))
    skip, odd = divmod(segment.skip_bytes(), row)
    if odd:
        raise FormatError(f"{segment.uri}: byte {segment.offset} is no row's first")
    url = segment.object_url(base)
    whole = (first, end) == (0, segment.rows)
    into = out.reshape(-1).view(np.uint8).data
    at = crc = 0
    try:
        params = {"rows": f"{skip + first}:{skip + end}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=IDLE_SECONDS)
        async with http.get(url, params=params, headers=headers(key), timeout=timeout, auto_decompress=False) as reply:
            if reply.status not in (200, 206):
                raise failure(url, reply.status, await reply.text(errors="replace"))
            told = reply.headers.get("x-r3-dtype", segment.dtype)
            if told != segment.dtype:
                raise FormatError(f"{url} serves {told}, the reference says {segment.dtype}")
            # Of the first row that is sent, or of the object's first; anything else are other rows.
            pos = reply.headers.get("x-r3-pos", str(segment.pos + first))
            if pos not in (str(segment.pos + first), str(segment.pos - skip)):
                raise FormatError(f"{url} serves rows from position {pos}, {segment.pos + first} was wanted")
            if reply.content_length not in (None, len(into)):
                raise FormatError(f"{url} serves {reply.content_length} bytes for {end - first} rows, which have {len(into)}")
            async for chunk in reply.content.iter_any():
                if at + len(chunk) > len(into):
                    raise FormatError(f"{url} serves more than {len(into)} bytes")
                into[at : at + len(chunk)] = chunk
                if verify:
                    crc = zlib.crc32(chunk, crc)
                at += len(chunk)
            expected = segment.crc32 if whole else None
            told_crc = reply.headers.get("x-r3-crc32", "")
            # The owner's checksum covers its whole object.
            if expected is None and whole and skip == 0 and reply.headers.get("x-r3-shape", "").split(",")[0] == str(segment.rows):
                expected = int(told_crc, 0) if told_crc else None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise FetchFailed(f"GET {url}: broke after {at} of {len(into)} bytes: {error!r}") from error
    if at != len(into):
        raise FetchFailed(f"GET {url}: ended after {at} of {len(into)} bytes")
    if verify and expected is not None and crc != expected:
        raise FormatError(f"{url}: the rows' checksum is {crc:#010x}, {expected:#010x} was promised")


async def delete(http: aiohttp.ClientSession, url: str, *, key: str | None = None) -> bool:
    """Releases an object; `False` when nobody answered, and its owner will let it expire."""
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with http.delete(url, headers=headers(key), timeout=timeout) as reply:
            return reply.status in (200, 202, 204, 404, 410)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        return False
