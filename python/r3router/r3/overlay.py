"""Memory that is a part of a file in the middle of zeros: what joins the rows of two files without copying the larger one.

The kernel maps whole pages, so the array begins at whatever address gives the file's bytes the place that they have in their pages. What
lies on the file's first and last page beside its bytes is zeroed, which copies these two pages and no more (the mapping is private).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_FIXED: Final = 0x10
"""`MAP_FIXED` of Linux; the module mmap does not have it."""
_FAILED: Final = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    """`mmap` of the C library; `None` where there is none."""
    try:
        found = ctypes.CDLL(None, use_errno=True).mmap
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_void_p
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return found


def lay(fd: int, offset: int, length: int, at: int, total: int) -> NDArray[np.uint8] | None:
    """`total` bytes, of which `at..at + length` are the file's `offset..offset + length`; `None` where it cannot be done.

    The file must have these bytes as long as the array lives: it may be removed, and must not be shortened.
    """
    page = mmap.PAGESIZE
    map_ = _libc()
    if map_ is None or length <= 0:
        return None
    # The array's byte `at` has to lie where the file's byte `offset` lies in its page.
    lead = (offset - at) % page
    size = -(-(lead + total) // page) * page
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(region, np.uint8)
    first = lead + at
    begin, end = first // page * page, -(-(first + length) // page) * page
    address = int(raw.__array_interface__["data"][0]) + begin
    # Inside of the region, which is ours alone and ends it all when the array goes.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    got = map_(address, end - begin, protection, mmap.MAP_PRIVATE | _FIXED, fd, offset - (first - begin))
    if got in (None, _FAILED):
        return None
    raw[begin:first] = 0
    raw[first + length : end] = 0
    return raw[lead : lead + total]
