"""A headless Chromium, driven over its own protocol: pages are loaded, clicked and photographed. Debian's package `chromium` is enough."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

WAIT_S = 30.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


def found() -> str | None:
    """The browser's path, where there is one."""
    return os.environ.get("TEST_BROWSER") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next = 0
        self.requests: list[str] = []
        """Every URL that the page asked for."""
        self.complaints: list[str] = []
        """Exceptions, and what the browser refused to do for the page."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One call; what the browser tells meanwhile is kept."""
        self._next += 1
        number = self._next
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), WAIT_S)
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._told(message)

    def _told(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    async def open(self, url: str) -> None:
        """Loads a page."""
        for domain in ("Network", "Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str, what: str) -> Any:
        """Waits until an expression holds, and returns it."""
        end = asyncio.get_running_loop().time() + WAIT_S
        while True:
            value = await self.run(script)
            if value:
                return value
            assert asyncio.get_running_loop().time() < end, f"{what}: {script} is {value!r}; {self.complaints}"
            await asyncio.sleep(0.05)

    async def size(self, width: int, height: int) -> None:
        """Sets the size of the window."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@contextlib.asynccontextmanager
async def page(path: str) -> AsyncIterator[Page]:
    """A browser with one page; it ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *[path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server"],
            *["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"],
            *["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--remote-debugging-port=0", f"--user-data-dir={profile}"],
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            port = await asyncio.wait_for(_port(process.stderr), WAIT_S)
            drained = asyncio.create_task(_drain(process.stderr))
            async with aiohttp.ClientSession(trust_env=False) as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    target = next(t for t in await reply.json() if t["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
                    yield Page(socket)
            drained.cancel()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _port(stream: asyncio.StreamReader) -> int:
    while line := await stream.readline():
        told = re.search(rb"ws://127\.0\.0\.1:(\d+)/", line)
        if told:
            return int(told[1])
    raise AssertionError("the browser did not start")


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(4096):
        pass


def keep(picture: bytes, name: str) -> None:
    """Writes a picture where TEST_PICTURES asks for it."""
    folder = os.environ.get("TEST_PICTURES")
    if folder:
        (Path(folder) / name).write_bytes(picture)
