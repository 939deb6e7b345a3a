"""The two routers under comparison, each started as a person starts it, in front of engines of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from scripted.client import Client, Response
from scripted.fleet import Fleet
from scripted.metrics import parse
from scripted.router import free_ports

from .recorder import Recorder
from .table import Call

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("R3ROUTER_PEERS") or ROOT / ".venv-peers") / "sglang-router" / "bin" / "python"
OURS = "r3router"
THEIRS = "sglang-router"
COMMANDS = {OURS: [sys.executable, "-m", "r3router.launch_router"], THEIRS: [str(PEER), "-m", "sglang_router.launch_router"]}
START_TIMEOUT_S = 60.0
SETTLE_S = 0.05
# Headers that a client may send and an engine may be told.
PASSED = ("authorization", "x-request-id", "x-correlation-id", "traceparent", "tracestate", "x-smg-routing-key", "x-custom", "content-type")
ANSWERED = ("content-type", "x-engine", "location", "allow")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
MADE = re.compile(r"\b(room|none-|engine-made-)\s?\d+")
HIDDEN = ("id", "rid", "worker_id", "bootstrap_room", "since_s", "timestamp", "created", "created_at")


@dataclass
class Side:
    """One router with its engines."""

    name: str
    mode: str
    fleet: Fleet
    client: Client
    ids: dict[str, str]

    def _seen(self, engine: Any, call: Call) -> list[Any]:
        """What an engine received because of the call. Aborts that a router sends after a failed attempt are none of it: they come when
        they come, and the tests of `cases/` look at them."""
        return [r for r in engine.seen if r.path != "/abort_request" or r.path == call.path]

    async def run(self, call: Call) -> dict[str, Any]:
        """Makes the call and returns what the client got and what each engine received, without what is random."""
        for engine in self.fleet.engines:
            engine.seen.clear()  # type: ignore[attr-defined]
            engine.script = call.act and (lambda leg: call.act)
        path = call.path.format(**self.ids)
        body = call.body if isinstance(call.body, bytes) else self._fill(call.body)
        got = await self.client.request(call.method, path, b"" if body is None else body, list(call.headers))
        await asyncio.sleep(SETTLE_S)
        for engine in self.fleet.engines:
            engine.script = None
        sent = repr(call.body) + repr(call.headers)
        return {
            "status": got.status,
            "headers": {name: self._hide(got.header(name), sent) for name in ANSWERED if got.header(name) is not None},
            "request_id": self._request_id(got, call),
            "body": self._body(got, sent),
            "engines": {engine.name: [self._received(r, sent) for r in self._seen(engine, call)] for engine in self.fleet.engines},
        }

    def _fill(self, body: Any) -> Any:
        """The body with `{name}` of ids and addresses filled in."""
        if isinstance(body, dict):
            return {key: self._fill(value) for key, value in body.items()}
        if isinstance(body, str) and body.startswith("{") and body[1:-1] in self.ids:
            return self.ids[body[1:-1]]
        return body

    def _received(self, request: Any, sent: str) -> dict[str, Any]:
        try:
            body: Any = orjson.loads(request.body) if request.body else None
        except ValueError:
            body = request.body.decode("utf-8", "replace")
        headers = {name: self._hide(request.header(name), sent) for name in PASSED if request.header(name) is not None}
        if (made := headers.get("x-request-id")) and made not in sent:
            headers["x-request-id"] = "<made>"
        return {"call": f"{request.method} {request.path}", "query": request.query, "headers": headers, "body": self._walk(body, sent)}

    @staticmethod
    def _request_id(got: Response, call: Call) -> str:
        value = got.header("x-request-id")
        if value is None:
            return "none"
        return value if value in repr(call.headers) else value.split("-")[0] + "-<made>"

    def _body(self, got: Response, sent: str) -> Any:
        kind = got.header("content-type") or ""
        if kind.startswith("text/event-stream"):
            events = [part.removeprefix("data: ") for part in got.body.decode().split("\n\n") if part]
            return [part if part == "[DONE]" else self._walk(_loads(part), sent) for part in events]
        if kind.startswith("text/plain") and got.body.startswith(b"# "):
            return self._metrics(got.body.decode())
        try:
            return self._walk(orjson.loads(got.body), sent) if got.body else ""
        except ValueError:
            return self._hide(got.body.decode("utf-8", "replace"), sent)

    def _metrics(self, text: str) -> list[Any]:
        """The engines' samples of a metrics page, in an order of their own; routers write numbers and labels as they like."""
        samples = parse(text).samples
        return sorted(
            [s.name, sorted([k, self._hide(v, "")] for k, v in s.labels.items()), s.value] for s in samples if "worker_addr" in s.labels
        )

    def _walk(self, value: Any, sent: str) -> Any:
        if isinstance(value, dict):
            return {
                key: "<made>" if key in HIDDEN and inner is not None and str(inner) not in sent else self._walk(inner, sent)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            walked = [self._walk(inner, sent) for inner in value]
            # Lists of engines are in no order.
            named = all(isinstance(inner, dict) and ("url" in inner or "worker" in inner) for inner in walked)
            return sorted(walked, key=lambda inner: str(inner.get("url") or inner.get("worker"))) if named else walked
        if isinstance(value, int) and value in {engine.bootstrap.port for engine in self.fleet.engines if engine.bootstrap.port}:
            return "<bootstrap port>"
        return self._hide(value, sent) if isinstance(value, str) else value

    def _hide(self, text: str | None, sent: str) -> str:
        """Addresses and ids of this run by their names."""
        text = text or ""
        for engine in self.fleet.engines:
            if engine.bootstrap.port:
                text = text.replace(f" {engine.bootstrap.port}", f" <{engine.name} bootstrap>")
            text = text.replace(engine.url, f"<{engine.name}>").replace(engine.url.removeprefix("http://"), f"<{engine.name}>")
        for uuid in UUID.findall(text):
            if uuid not in sent:
                text = text.replace(uuid, "<uuid>")
        return MADE.sub(r"\1<n>", text)


def _loads(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return text


@contextlib.asynccontextmanager
async def side(name: str, mode: str, folder: Path) -> AsyncIterator[Side]:
    """A started router with one engine of every role, ready to serve."""
    roles = {"regular": [("regular", "R0")], "pd": [("prefill", "P0"), ("decode", "D0")]}[mode]
    fleet = Fleet([Recorder(role, engine) for role, engine in roles])
    await fleet.start()
    port, metrics, admin = free_ports()
    own = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    # The same words for both: what is compared is a drop-in. One attempt, and quick looks at engines that come up.
    flags = [
        *own,
        *fleet.flags(),
        "--policy",
        "round_robin",
        "--disable-retries",
        "--worker-startup-check-interval",
        "1",
        "--disable-circuit-breaker",
    ]
    # A peer that finds a proxy or a hub asks them before it serves.
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith("R3ROUTER_")}
    env |= {"HF_HUB_OFFLINE": "1", "R3ROUTER_ADMIN_PORT": str(admin)}
    log = folder / f"{name}-{mode}.log"
    with log.open("wb") as out:
        process = subprocess.Popen([*COMMANDS[name], *flags], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env)
    client = Client(port)
    try:
        end = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            assert process.poll() is None, f"{name} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
            assert asyncio.get_running_loop().time() < end, f"{name} is not ready:\n{log.read_text()[-3000:]}"
            with contextlib.suppress(OSError):
                if (await client.get("/readiness")).status == 200:
                    break
            await asyncio.sleep(0.05)
        listed = (await client.get("/workers")).json()["workers"]
        by_url = {worker["url"]: worker["id"] for worker in listed}
        ids = {f"id_{e.name}": by_url[e.url] for e in fleet.engines} | {f"url_{e.name}": e.url for e in fleet.engines}
        yield Side(name, mode, fleet, client, ids)
    finally:
        client.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, 20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        await fleet.stop()
