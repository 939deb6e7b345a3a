"""Rows by NIXL: one-sided reads from an agent's registered memory (RDMA between hosts, shared memory on one). Needs the package nixl.

On plain TCP it is slower than HTTP; use it where UCX finds RDMA.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import time
import zlib
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from .errors import FetchFailed, FormatError
from .fetch import failure, headers
from .format import numpy_dtype
from .reference import Reference, Segment
from .ucx import load

TRANSFER_SECONDS: Final = 60.0


class NixlReader:
    """A NIXL agent that reads rows of agents started with `--nixl`."""

    def __init__(
        self, http: aiohttp.ClientSession, base: str = "http://127.0.0.1", *, key: str | None = None, agent: str | None = None
    ) -> None:
        """Makes the agent; `http` carries the questions where rows are, `key` is the owners'.

        `agent`: address of the agent to ask for every segment, where the segments' own owner has no NIXL: a router, beside whose store an
        agent runs (`r3router agent --nixl`).

        Raises:
            RuntimeError: nixl is not installed, or has no UCX here.
        """
        try:
            nixl = load()
            config = nixl.nixl_agent_config(backends=["UCX"])
            self._agent = nixl.nixl_agent(f"r3router-client-{os.getpid()}-{secrets.token_hex(4)}", config)
        except Exception as error:
            raise RuntimeError(f"NIXL cannot be used: {error}") from error
        self._http = http
        self._base = base
        self._agent_url = agent.rstrip("/") if agent else None
        self._key = key

    async def read(self, reference: Reference, first: int = 0, end: int | None = None) -> NDArray[Any]:
        """Rows `first..end`, as `Reader.read`.

        Raises:
            R3Error: as `Reader.read`.
            IndexError: the range lies outside.
        """
        end = reference.rows if end is None else end
        out = np.empty((end - first, *reference.shape[1:]), numpy_dtype(reference.dtype))
        for segment, a, b, at in reference.cut(first, end):
            rows = out[at : at + b - a]
            if segment.dtype == reference.dtype:
                await self._segment(segment, a, b, rows)
            else:
                part = np.empty(rows.shape, numpy_dtype(segment.dtype))
                await self._segment(segment, a, b, part)
                rows[...] = part
        return out

    async def _segment(self, segment: Segment, a: int, b: int, out: NDArray[Any]) -> None:
        url = segment.object_url(self._base)
        where, _, name = url.rpartition("/")
        where = self._agent_url or where.removesuffix("/r3")
        row = out.itemsize * int(np.prod(out.shape[1:]))
        skip = segment.skip_bytes() // row
        params = {"rows": f"{skip + a}:{skip + b}"}
        try:
            async with self._http.post(f"{where}/nixl/{name}", params=params, headers=headers(self._key)) as reply:
                if reply.status != 200:
                    raise failure(f"{where}/nixl/{name}", reply.status, await reply.text(errors="replace"))
                offer = await reply.json()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise FetchFailed(f"POST {where}/nixl/{name}: {error!r}") from error
        if offer["dtype"] != segment.dtype or offer["length"] != out.nbytes:
            raise FormatError(f"{url} offers {offer['length']} bytes of {offer['dtype']}, {out.nbytes} of {segment.dtype} were wanted")
        if out.nbytes:
            await self._transfer(offer, out, url)
        if offer["crc32"] is not None and zlib.crc32(out.reshape(-1).view(np.uint8).data) != offer["crc32"]:
            raise FormatError(f"{url}: the rows' checksum is not {offer['crc32']:#010x}")

    async def _transfer(self, offer: dict[str, Any], out: NDArray[Any], url: str) -> None:
        agent = self._agent
        address = int(out.__array_interface__["data"][0])
        registered = agent.register_memory([(address, out.nbytes, 0, "")], "DRAM")
        handle = None
        try:
            # Again for each object: the metadata names the memory that is registered by now.
            remote = agent.add_remote_agent(base64.b64decode(offer["metadata"]))
            remote = remote.decode() if isinstance(remote, bytes) else remote
            here = agent.get_xfer_descs([(address, out.nbytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(offer["address"], offer["length"], offer["device"])], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, remote)
            state = agent.transfer(handle)
            deadline = time.monotonic() + TRANSFER_SECONDS
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise FetchFailed(f"{url}: NIXL did not finish in {TRANSFER_SECONDS:.0f} s")
                await asyncio.sleep(0.0005)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise FetchFailed(f"{url}: NIXL answers {state}")
        except FetchFailed:
            raise
        except Exception as error:
            raise FetchFailed(f"{url}: NIXL: {error}") from error
        finally:
            if handle is not None:
                agent.release_xfer_handle(handle)
            agent.deregister_memory(registered)
