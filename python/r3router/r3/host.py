"""Which machine this is, and whether a process still lives: what decides if a path in a reference means anything here."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """The id that the kernel drew at boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when it is not there. Pid and start together name a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command's name may have blanks and brackets; the fields after it do not.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return 0
    return int(fields[19])


def owner_line(pid: int | None = None) -> str:
    """`pid start` of a process, as it stands in the file `owner` of a directory."""
    pid = os.getpid() if pid is None else pid
    return f"{pid} {start_time(pid)}"


def alive(line: str) -> bool:
    """Whether the process that `owner_line` named still lives."""
    pid, _, began = line.strip().partition(" ")
    if not pid.isdigit() or not began.isdigit():
        return False
    return start_time(int(pid)) == int(began) != 0
