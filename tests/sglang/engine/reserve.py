"""Let engines start where several share the memory of a small machine.

Decode makes a host pool for retracted requests and leaves 10 GiB of the machine free beside it; the tests' pools have a few MB.
"""

import importlib

RESERVE_BYTES = 1 << 30


def install():
    for name in ("pool_host.base", "memory_pool_host"):  # the latter in older releases
        try:
            module = importlib.import_module(f"sglang.srt.mem_cache.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):
            module.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
