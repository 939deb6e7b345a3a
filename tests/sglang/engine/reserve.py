"""Let engines start where several share the memory of a small machine.

Decode makes a host pool for retracted requests and leaves 10 GiB of the machine free beside it; the tests' pools have a few MB.
"""

RESERVE_BYTES = 1 << 30


def install():
    try:
        from sglang.srt.mem_cache.pool_host import base
    except ImportError:  # releases before 0.5.23
        return
    if hasattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
