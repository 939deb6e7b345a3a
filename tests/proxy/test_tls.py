"""TLS towards clients and engines, with certificates on both sides, and new files while the router runs."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from scripted.calls import GENERATE, statuses, until
from scripted.client import READ_SIZE, Client, Connection
from scripted.collector import Collector
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.r3 import R3Model
from scripted.router import Router
from scripted.server import Exchange, Request, Server


class Secured(Client):
    """A client that speaks TLS."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(port)
        self.context = context

    async def connect(self) -> Connection:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=READ_SIZE, ssl=self.context, server_hostname="127.0.0.1"
        )
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(reader, writer)


class Papers:
    """An authority, and files of what it issued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.authority = trustme.CA()
        self.ca = self.folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str = "router") -> tuple[Path, Path]:
        """A certificate for 127.0.0.1 and its key, in place of those that had the name."""
        made = self.authority.issue_cert("127.0.0.1")
        files = (self.folder / f"{name}.pem", self.folder / f"{name}.key")
        files[0].write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        files[1].write_bytes(made.private_key_pem.bytes())
        return files

    def trusting(self, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """A client's context, with a certificate of its own when there is one."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if own is not None:
            context.load_cert_chain(*map(str, own))
        return context


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers(tmp_path / "papers")


async def secured(lab: Lab, fleet: Fleet, context: ssl.SSLContext, *flags: str) -> Router:
    """A router whose clients speak TLS."""
    router = Router(["--r3-store-dir", str(lab.store), *fleet.flags(), *flags], lab.folder / f"router-{len(lab.routers)}.log")
    router.clients = lambda port: Secured(port, context)
    lab.routers.append(router)
    await router.start()
    return router


def server_flags(files: tuple[Path, Path]) -> list[str]:
    return ["--tls-cert-path", str(files[0]), "--tls-key-path", str(files[1])]


async def test_clients_speak_tls_and_one_that_does_not_is_told(lab: Lab, papers: Papers) -> None:
    fleet = await lab.pd()
    router = await secured(lab, fleet, papers.trusting(), *server_flags(papers.issue()))
    answers = [await router.client.generate(**GENERATE) for _ in range(3)]
    stream = await router.client.generate(**GENERATE, stream=True)
    assert statuses([*answers, stream]) == {200: 4}
    assert stream.body.rstrip().endswith(b"data: [DONE]")
    refused = await Client(router.port).generate(**GENERATE)
    assert (refused.status, refused.error()["advice"]) == (400, "use https:// in the address")


async def test_a_client_without_a_certificate_is_not_served_where_one_is_asked_for(lab: Lab, papers: Papers, tmp_path: Path) -> None:
    fleet = await lab.pd()
    mine = papers.trusting(papers.issue("client"))
    router = await secured(lab, fleet, mine, *server_flags(papers.issue()), "--tls-client-ca-paths", str(papers.ca))
    assert (await router.client.generate(**GENERATE)).status == 200
    stranger = papers.trusting(Papers(tmp_path / "others").issue("client"))
    before = fleet.posts()
    for context in (papers.trusting(), stranger):
        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            await Secured(router.port, context).generate(**GENERATE)
    assert fleet.posts() == before


@pytest.mark.parametrize("both", [False, True])
async def test_engines_speak_tls_and_may_ask_for_a_certificate(lab: Lab, papers: Papers, both: bool) -> None:
    fleet = Fleet.pd()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*map(str, papers.issue("engine")))
    flags = ["--ca-cert-paths", str(papers.ca)]
    if both:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(str(papers.ca))
        certificate, key = papers.issue("router")
        flags += ["--client-cert-path", str(certificate), "--client-key-path", str(key)]
    for engine in fleet.engines:
        engine.server.tls = context
    await lab.fleet(fleet)
    router = await lab.router(fleet, *flags)
    answers = [await router.client.generate(**GENERATE) for _ in range(5)]
    assert statuses([*answers, await router.client.generate(**GENERATE, stream=True)]) == {200: 6}
    assert [w["url"][:5] for w in (await router.client.get("/workers")).json()["workers"]] == ["https", "https"]


async def test_an_engine_of_another_authority_gets_no_request_and_the_list_says_why(lab: Lab, papers: Papers, tmp_path: Path) -> None:
    fleet = Fleet.pd()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*map(str, Papers(tmp_path / "others").issue("engine")))
    fleet.d.server.tls = context
    await lab.fleet(fleet)
    router = await lab.router(fleet, "--ca-cert-paths", str(papers.ca), ready=False)

    async def why() -> str:
        listed = (await router.client.get("/workers")).json()["workers"]
        return str(next(w["message"] for w in listed if w["worker_type"] == "decode"))

    for _ in range(1000):
        if "certificate" in await why():
            break
        await asyncio.sleep(0.01)
    assert "certificate" in await why()
    assert (await router.client.generate(**GENERATE)).status == 503


async def test_new_files_are_used_for_new_connections_and_broken_ones_are_not(lab: Lab, papers: Papers) -> None:
    fleet = await lab.pd()
    files = papers.issue()
    router = await secured(lab, fleet, papers.trusting(), *server_flags(files))

    async def shown() -> bytes:
        connection = await router.client.connect()
        certificate = connection.writer.get_extra_info("ssl_object").getpeercert(True)
        connection.close()
        return bytes(certificate)

    first = await shown()
    kept = await router.client.connect()
    files[0].write_text("no certificate")
    await until(lambda: "cannot be read anew" in router.tail(), "the broken file is noticed", 30.0)
    assert await shown() == first
    papers.issue()
    await until(lambda: "certificates read anew" in router.tail(), "the new one is read", 30.0)
    assert await shown() != first
    # What was open goes on.
    body = b'{"input_ids":[1,2,3],"sampling_params":{"max_new_tokens":3}}'
    assert (await kept.call("/generate", body, [("content-type", "application/json")])).status == 200
    kept.close()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tls-cert-path", "CERT"], "--tls-cert-path: its key is missing"),
        (["--client-key-path", "KEY"], "--client-key-path: its certificate is missing"),
        (["--tls-client-ca-paths", "CA"], "--tls-client-ca-paths: clients show a certificate over TLS only"),
        (["--tls-cert-path", "CERT", "--tls-key-path", "OTHER"], "OTHER"),
        (["--tls-cert-path", "CERT", "--tls-key-path", "CERT"], "--tls-key-path: CERT"),
        (["--ca-cert-paths", "KEY"], "--ca-cert-paths: KEY: no certificate is in it"),
        (["--ca-cert-paths", "/nowhere.pem"], "--ca-cert-paths: /nowhere.pem"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start(papers: Papers, flags: list[str], told: str) -> None:
    certificate, key = papers.issue()
    _, other = papers.issue("other")
    names = {"CERT": str(certificate), "KEY": str(key), "CA": str(papers.ca), "OTHER": str(other)}
    args = [names.get(flag, flag) for flag in flags]
    command = [sys.executable, "-m", "r3router", "serve", "--pd-disaggregation", "--port", "0", "--prometheus-port", "0", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2, done.stderr
    for name, path in names.items():
        told = told.replace(name, path) if name != "OTHER" else told
    if told == "OTHER":
        told = "--tls-cert-path: " + str(certificate)
    assert told in done.stderr


async def test_the_sink_of_rows_speaks_tls_too(lab: Lab, papers: Papers) -> None:
    given: list[Any] = []

    async def put(request: Request, exchange: Exchange) -> None:
        reference = json.loads(request.body)
        given.append(reference)
        await exchange.reply(200, json.dumps({"handle": {"type": "other"}, "fields": reference["fields"]}).encode())

    sink = Server(put)
    sink.problems = []
    sink.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    sink.tls.load_cert_chain(*map(str, papers.issue("sink")))
    await sink.listen()
    try:
        shape = ["--r3-layers", "4", "--r3-top-k", "2", "--r3-experts", "256"]
        flags = [*shape, "--ca-cert-paths", str(papers.ca), "--r3-sink", f"https://127.0.0.1:{sink.port}"]
        _, _, client = await lab.serve(*flags, prefill={"r3": R3Model(4, 2)}, decode={"r3": R3Model(4, 2)})
        asked = {"return_routed_experts": True, "return_outputs_via_store": True, "sampling_params": {"max_new_tokens": 3}}
        got = await client.generate(input_ids=[1, 2, 3], **asked)
        assert got.status == 200, got.body[:300]
        assert got.json()["meta_info"]["output_store_ref"]["handle"] == {"type": "other"} and len(given) == 1
    finally:
        await sink.stop()
    assert sink.problems == []


async def test_a_trace_says_that_the_client_spoke_tls(lab: Lab, papers: Papers) -> None:
    collector = await Collector().start()
    try:
        fleet = await lab.pd()
        flags = [*server_flags(papers.issue()), "--enable-trace", "--otlp-traces-endpoint", f"localhost:{collector.grpc_port}"]
        router = await secured(lab, fleet, papers.trusting(), *flags)
        assert (await router.client.generate(**GENERATE)).status == 200
        await until(lambda: bool(collector.named("POST /generate")), "the request's span has come")
        assert collector.named("POST /generate")[0].attributes["url.scheme"] == "https"
    finally:
        await collector.stop()
