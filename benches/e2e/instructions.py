"""Instructions of user code that a small request takes, counted by callgrind: a figure that what else the machine does cannot move."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from .fleet import LOGS, Backends, Fast, load, names, router
from .small import BODY

CONNECTIONS = 4
WARM = 300
"""Requests before counting begins: connections, pools and tables are made by then."""
TOTALS = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


def measure(requests: int) -> list[dict[str, Any]]:
    """A row a mode and router. Empty where valgrind is not installed."""
    if not shutil.which("valgrind"):
        return []
    rows = []
    for mode in ("regular", "pd"):
        with Fast(mode == "pd").run() as backends:
            for name in [*names(), *(["relay"] if mode == "pd" else [])]:
                thousands = count(name, backends, mode == "pd", requests) / 1e3
                rows.append({"mode": mode, "router": name, "requests": requests, "thousand instructions": round(thousands, 1)})
    return rows


def count(name: str, backends: Backends, pd: bool, requests: int) -> float:
    """Instructions a request: what was counted between two dumps, probes and polls of that time included."""
    folder = (LOGS / "callgrind").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tool = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", "--quiet")
    with router(name, backends, pd=pd, under=tool) as (address, measured):
        load(address, BODY, connections=CONNECTIONS, seconds=60.0, requests=WARM)
        dump(measured.process.pid, folder)
        load(address, BODY, connections=CONNECTIONS, seconds=120.0, requests=requests)
        return dump(measured.process.pid, folder) / requests


def dump(pid: int, folder: Path) -> int:
    """Has callgrind write, and forget, what it has counted since it did so last: so many instructions."""
    before = set(folder.iterdir())
    subprocess.run(["callgrind_control", "-d", str(pid)], check=True, capture_output=True, timeout=60)
    for _ in range(600):
        for path in set(folder.iterdir()) - before:
            if found := TOTALS.search(path.read_text()):
                return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"callgrind wrote no dump of process {pid} in a minute")
