"""A command in a terminal of its own: keys go in, the screen comes out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator

import pyte

from processes import environment

WAIT_S = 20.0


class Terminal:
    """The screen of a running command."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, columns: int, lines: int) -> None:
        self.process = process
        self.master = master
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)

    def read(self, seconds: float) -> None:
        """Takes in what the command writes for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self.master], [], [], left)
            if not ready:
                return
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            self._stream.feed(data)

    def lines(self) -> list[str]:
        """The screen, without blanks at the ends of lines."""
        return [line.rstrip() for line in self.screen.display]

    def text(self) -> str:
        """The screen."""
        return "\n".join(self.lines())

    def press(self, keys: str) -> None:
        """Types."""
        os.write(self.master, keys.encode())

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Reads until something is on the screen."""
        end = time.monotonic() + WAIT_S
        while not holds():
            ended = self.process.poll()
            self.read(0.05)
            assert ended is None or holds(), f"it has ended with {ended}; the screen is:\n{self.text()}"
            assert time.monotonic() < end, f"{what}; the screen is:\n{self.text()}"

    def shows(self, words: str) -> None:
        """Waits for words."""
        self.until(lambda: words in self.text(), f"{words!r} is not shown")

    def ends(self) -> int:
        """The exit status, within a while."""
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end; the screen is:\n{self.text()}"
            self.read(0.05)
        self.read(0.1)
        return self.process.returncode


@contextlib.contextmanager
def terminal(*command: str, columns: int = 80, lines: int = 24, term: str = "linux") -> Iterator[Terminal]:
    """Runs a command in a terminal of that size; kills it at exit if it still lives."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    # Without these, curses asks the terminal for its size, and hears of changes.
    env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")} | {"TERM": term}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    try:
        yield Terminal(process, master, columns, lines)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
