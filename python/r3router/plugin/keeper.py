"""The agent of one scheduler process: started, watched, started again on the same port when it dies."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from r3router.r3 import host

from .settings import Settings, address

logger = logging.getLogger("r3router.plugin")
LOOK_SECONDS: Final = 0.25
RESTART_SECONDS: Final = (0.1, 1.0, 5.0, 30.0)
"""Pauses before it is started again, growing while it keeps dying."""
STEADY_SECONDS: Final = 60.0
"""An agent that ran for so long did not die of its start."""


class Keeper:
    """Keeps an agent running. `alive` tells whether references may be given out."""

    def __init__(self, settings: Settings, directory: Path, rank: int, each_look: Callable[[], None] | None = None) -> None:
        """`each_look` is called about every `LOOK_SECONDS`, on the keeper's thread."""
        self._settings = settings
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._alive = False
        self._starts = 0
        self._failures = 0
        self._began = 0.0
        self._each_look = each_look
        if settings.agent_uri is not None:
            self.uri = settings.agent_uri.removeprefix("r3://").removeprefix("http://").rstrip("/")
        else:
            port = settings.agent_port + rank if settings.agent_port else _free_port()
            self.uri = f"{settings.agent_host or address()}:{port}"
        self._thread = threading.Thread(target=self._run, name="r3router-agent", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the agent answered at the last look, `LOOK_SECONDS` ago at most."""
        process = self._process
        return self._alive and (process is None or process.returncode is None)

    @property
    def starts(self) -> int:
        """How often it was started."""
        return self._starts

    def start(self) -> None:
        """Begins to keep it; comes back at once."""
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._look()
                if self._each_look is not None:
                    self._each_look()
            except Exception:
                self._alive = False
                logger.exception("the agent cannot be started or asked; R3 rows go in-line meanwhile")
            time.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        if self._settings.agent_uri is None and (self._process is None or self._process.poll() is not None):
            if self._process is not None:
                logger.error("the agent ended with status %s; R3 rows go in-line until it runs again", self._process.returncode)
                self._alive = False
                self._failures = 0 if time.monotonic() - self._began > STEADY_SECONDS else self._failures
                time.sleep(RESTART_SECONDS[min(self._failures, len(RESTART_SECONDS) - 1)])
                self._failures += 1
            self._spawn()
        alive = self._answers()
        if alive != self._alive:
            text = "answers" if alive else "does not answer: R3 rows go in-line"
            logger.log(logging.INFO if alive else logging.ERROR, "the agent at %s %s", self.uri, text)
        self._alive = alive

    def _spawn(self) -> None:
        self._starts += 1
        self._began = time.monotonic()
        port = self.uri.rpartition(":")[2]
        command = [sys.executable, "-m", "r3router", "agent", "--port", port, "--directory", str(self._directory)]
        command += ["--parent", str(self._settings.parent), "--engine-pid", str(os.getpid())]
        command += ["--engine-start", str(host.start_time(os.getpid())), *(["--nixl"] if self._settings.nixl else [])]
        env = dict(os.environ)
        if self._settings.agent_key is not None:
            env["R3ROUTER_AGENT_API_KEY"] = self._settings.agent_key
        # A session of its own: it outlives the engine until its rows are fetched.
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)

    def _answers(self) -> bool:
        where, _, port = self.uri.rpartition(":")
        # A process of our own is asked on this host, whatever name others have for it.
        connection = http.client.HTTPConnection("127.0.0.1" if self._settings.agent_uri is None else where, int(port), timeout=2)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))  # noqa: S104 - as the agent will
        return int(sock.getsockname()[1])
