"""Rows for readers that bring a NIXL agent: an object's memory is registered when it is asked for, and read one-sided from then on.

The answer of `POST /nixl/{id}` is JSON: `agent` (name), `metadata` (base64, for `add_remote_agent`), `address`, `length` and `device`
of the rows, and what the rows are. Registered memory is given up when the object is gone.
"""

from __future__ import annotations

import base64
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r3router.r3.format import HEADER_BYTES
from r3router.r3.ucx import load

from .parts import Part
from .shelf import Entry


@dataclass
class _Registered:
    path: Path
    mapping: mmap.mmap
    handle: Any
    address: int


class Exporter:
    """One NIXL agent with UCX over DRAM, and the objects that it has registered."""

    def __init__(self) -> None:
        """Makes the agent.

        Raises:
            RuntimeError: nixl is not installed or has no UCX here.
        """
        try:
            nixl = load()
            self.name = f"r3router-{os.getpid()}-{secrets.token_hex(4)}"
            self._agent = nixl.nixl_agent(self.name, nixl.nixl_agent_config(backends=["UCX"]))
        except Exception as error:
            raise RuntimeError(f"NIXL cannot be used: {error}") from error
        self._objects: dict[str, _Registered] = {}

    def offer(self, entry: Entry, part: Part) -> dict[str, Any]:
        """Registers an object if need be; what a reader needs for a part of it.

        Raises:
            OSError: the file is gone.
        """
        known = self._objects.get(entry.path.stem)
        if known is None:
            known = self._objects[entry.path.stem] = self._register(entry)
        span = part.span or (0, 0)
        return {
            "agent": self.name,
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": known.address + HEADER_BYTES + span[0],
            "length": span[1] - span[0],
            "device": 0,
            "dtype": entry.header.dtype,
            "shape": list(part.shape),
            "crc32": entry.header.crc32 if part.shape[0] == entry.header.rows else None,
        }

    def sweep(self) -> None:
        """Gives up the memory of objects that are gone."""
        for name in [n for n, r in self._objects.items() if not r.path.exists()]:
            self._agent.deregister_memory(self._objects.pop(name).handle)

    def _register(self, entry: Entry) -> _Registered:
        with entry.path.open("r+b") as file:
            size = HEADER_BYTES + entry.header.nbytes
            mapping = mmap.mmap(file.fileno(), size)
        address = int(np.frombuffer(mapping, np.uint8).__array_interface__["data"][0])
        handle = self._agent.register_memory([(address, size, 0, entry.path.stem)], "DRAM")
        return _Registered(entry.path, mapping, handle, address)
