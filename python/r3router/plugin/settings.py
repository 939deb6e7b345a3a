"""The plug-in's settings. An engine's command line is not ours, so they are variables."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from r3router.r3.store import SHM

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Settings:
    """`R3ROUTER_PLUGIN_*` and `R3ROUTER_AGENT_*`."""

    enabled: bool = True
    """`R3ROUTER_PLUGIN=0` switches the plug-in off."""
    parent: Path = SHM
    """`R3ROUTER_PLUGIN_PARENT`: where the directory of each scheduler process is made."""
    cap_bytes: int | None = None
    """`R3ROUTER_PLUGIN_BYTES`: most bytes of one scheduler process, e.g. `16GiB`; without it, a quarter of what is free at the start."""
    expires_s: float = 600.0
    """`R3ROUTER_PLUGIN_EXPIRES_S`: rows that nobody fetched or released go after so long."""
    group: int | None = None
    """`R3ROUTER_PLUGIN_GID`: group whose members may map the files; without it only the same user."""
    agent_uri: str | None = None
    """`R3ROUTER_AGENT_URI`: `host:port` of an agent that somebody else runs (a side-car); without it each process starts its own."""
    agent_host: str | None = None
    """`R3ROUTER_AGENT_HOST`: address that others reach this host by; without it, that of the route out."""
    agent_port: int = 0
    """`R3ROUTER_AGENT_PORT`: port of the first rank's agent, the following ranks' after it; 0 takes free ones."""
    agent_key: str | None = None
    """`R3ROUTER_AGENT_API_KEY`: key that readers must bring."""
    nixl: bool = False
    """`R3ROUTER_AGENT_NIXL=1`: the agent also serves readers with NIXL."""
    indexer: bool = False
    """`R3ROUTER_PLUGIN_INDEXER=1`: indexer top-k by reference too. Its reader must know; the router passes it on as it is."""
    force: bool = False
    """`R3ROUTER_PLUGIN_FORCE=1`: also with releases of SGLang that this version was not tried with."""
    verify: bool = False
    """`R3ROUTER_PLUGIN_VERIFY=1`: rows are also gathered when the request finishes, as without the plug-in, and what is written later is
    compared with them. For tests: it costs what the plug-in saves."""
    pending: int = 64
    """`R3ROUTER_PLUGIN_PENDING`: payloads that may wait for the writing thread; more go in-line."""

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Reads the variables.

        Raises:
            ValueError: one is written wrongly; the text says which.
        """

        def number(name: str, default: float) -> float:
            try:
                return float(env.get(name, default))
            except ValueError as error:
                raise ValueError(f"{name}={env[name]} is not a number") from error

        def switch(name: str, default: bool) -> bool:
            value = env.get(name, "1" if default else "0").lower()
            if value not in ("0", "1", "true", "false"):
                raise ValueError(f"{name}={value} is neither 0 nor 1")
            return value in ("1", "true")

        gid = env.get("R3ROUTER_PLUGIN_GID")
        if gid is not None and not gid.isdigit():
            raise ValueError(f"R3ROUTER_PLUGIN_GID={gid} is not the number of a group")
        return cls(
            enabled=switch("R3ROUTER_PLUGIN", True),
            parent=Path(env.get("R3ROUTER_PLUGIN_PARENT", str(SHM))),
            cap_bytes=size(env["R3ROUTER_PLUGIN_BYTES"]) if "R3ROUTER_PLUGIN_BYTES" in env else None,
            expires_s=number("R3ROUTER_PLUGIN_EXPIRES_S", 600.0),
            group=None if gid is None else int(gid),
            agent_uri=env.get("R3ROUTER_AGENT_URI"),
            agent_host=env.get("R3ROUTER_AGENT_HOST"),
            agent_port=int(number("R3ROUTER_AGENT_PORT", 0)),
            agent_key=env.get("R3ROUTER_AGENT_API_KEY"),
            nixl=switch("R3ROUTER_AGENT_NIXL", False),
            indexer=switch("R3ROUTER_PLUGIN_INDEXER", False),
            force=switch("R3ROUTER_PLUGIN_FORCE", False),
            verify=switch("R3ROUTER_PLUGIN_VERIFY", False),
            pending=int(number("R3ROUTER_PLUGIN_PENDING", 64)),
        )

    def cap(self) -> int:
        """The cap in bytes on this host, now."""
        if self.cap_bytes is not None:
            return self.cap_bytes
        room = os.statvfs(self.parent)
        return room.f_bavail * room.f_frsize // 4


def size(text: str) -> int:
    """Bytes of `16GiB`, `512M` or `4096`; units are powers of 1024.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise ValueError(f"R3ROUTER_PLUGIN_BYTES={text} is not a size such as 16GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def address() -> str:
    """The address of this host on its route out; loopback when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            # Nothing is sent: this asks the routing table.
            sock.connect(("192.0.2.1", 9))
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"
