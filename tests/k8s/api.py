"""An API server of Kubernetes, as far as discovery can tell: LIST in pages and WATCH over TLS, failing as those of clusters do."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import trustme

Json = dict[str, Any]
TOKEN = "the-token"  # noqa: S105 - of a server that ends with its test
NAMESPACE = "rollouts"


def pod(name: str, uid: str, ip: str, role: str, bootstrap: int | None = None, **more: Any) -> Json:
    """A pod that runs and is ready, as the API server writes it."""
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid,
            "labels": {"app": "engine", "role": role},
            "annotations": {} if bootstrap is None else {"sglang.ai/bootstrap-port": str(bootstrap)},
            **more,
        },
        "spec": {"containers": [{"name": "engine", "image": "sglang"}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "engine", "restartCount": 0}],
        },
    }


class Api:
    """See the module. `pods` is the truth; whether watches hear of a change is up to the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, Json] = {}
        self.version = 1
        self.oldest = 0
        self.history: list[tuple[int, Json]] = []
        self.silent = False
        self.lists = 0
        self.asked_at = 0.0
        """When the first request came."""
        self.watches = 0
        self.paths: list[str] = []
        self.served_at = 0.0
        """When the first LIST had been written."""
        self._items: dict[str, bytes] = {}
        self._news = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._watching: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listens, and writes the service account's folder."""
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        authority.cert_pem.write_to_path(str(self.folder / "ca.crt"))
        (self.folder / "token").write_text(TOKEN + "\n")
        (self.folder / "namespace").write_text(NAMESPACE)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Ends."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def env(self) -> dict[str, str]:
        """What a pod's environment says of it."""
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}

    def flags(self, port: int, interval_s: float) -> list[str]:
        """The router's flags: engines listen on `port`, lists come so often."""
        return [
            *("--service-discovery", "--service-discovery-port", str(port)),
            *("--prefill-selector", "app=engine", "role=prefill", "--decode-selector", "app=engine", "role=decode"),
            *("--service-discovery-account-dir", str(self.folder), "--service-discovery-interval-secs", str(interval_s)),
        ]

    # --- what happens in the cluster --------------------------------------------------------------------------------

    async def put(self, made: Json, *, told: bool = True) -> None:
        """A pod comes or changes."""
        await self._change("MODIFIED", made, told)

    def fill(self, pods: list[Json]) -> None:
        """Many come, before anybody watches."""
        for made in pods:
            self._set(made)

    async def delete(self, name: str, *, told: bool = True) -> None:
        """A pod is deleted; `told`: watches hear of it."""
        await self._change("DELETED", self.pods[name], told)

    async def cut(self) -> None:
        """Running watches break."""
        for writer in list(self._watching):
            writer.transport.abort()

    def forget(self) -> None:
        """What was before now cannot be watched from any more: 410."""
        self.history.clear()
        self.version += 1
        self.oldest = self.version

    def _set(self, made: Json) -> None:
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        self.pods[made["metadata"]["name"]] = made
        self._items[made["metadata"]["name"]] = json.dumps(made).encode()

    async def _change(self, kind: str, made: Json, told: bool) -> None:
        if kind == "DELETED":
            self.version += 1
            made["metadata"]["resourceVersion"] = str(self.version)
            del self.pods[made["metadata"]["name"]]
            del self._items[made["metadata"]["name"]]
        else:
            self._set(made)
        if told:
            self.history.append((self.version, {"type": kind, "object": made}))
        async with self._news:
            self._news.notify_all()

    # --- the wire ---------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await self._answer(head, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self._writers.discard(writer)
            self._watching.discard(writer)
            writer.transport.abort()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        start, *lines = head.split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        path, _, query = start.split(" ")[1].partition("?")
        asked = {k: v[0] for k, v in parse_qs(query).items()}
        self.asked_at = self.asked_at or time.monotonic()
        self.paths.append(path)
        if headers.get("authorization") != f"Bearer {TOKEN}" or path != f"/api/v1/namespaces/{NAMESPACE}/pods":
            self._reply(writer, 403, b'{"kind":"Status","code":403,"message":"forbidden"}')
        elif asked.get("watch") == "true":
            await self._watch(int(asked["resourceVersion"]), writer)
        else:
            limit, at = int(asked["limit"]), int(unquote(asked.get("continue", "0")))
            page = list(self._items.values())[at : at + limit]
            more = str(at + len(page)) if at + len(page) < len(self._items) else ""
            self.lists += not more
            meta = json.dumps({"resourceVersion": str(self.version), "continue": more}).encode()
            self._reply(writer, 200, b'{"kind":"PodList","metadata":' + meta + b',"items":[' + b",".join(page) + b"]}")
        await writer.drain()
        if not self.served_at and self.lists:
            self.served_at = time.monotonic()

    @staticmethod
    def _reply(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    async def _watch(self, sent: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")

        def event(made: Json) -> None:
            line = json.dumps(made).encode() + b"\n"
            writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

        if sent < self.oldest:
            event({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}})
            writer.write(b"0\r\n\r\n")
            return
        self.watches += 1
        self._watching.add(writer)
        while not writer.is_closing():
            for version, made in [] if self.silent else [h for h in self.history if h[0] > sent]:
                sent = version
                event(made)
            await writer.drain()
            async with self._news:
                await self._news.wait()
