"""Who may be a worker, where keys go and where they do not, and that nothing is followed or sent around."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest

from scripted.acts import answer
from scripted.calls import GENERATE
from scripted.client import Client
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.server import Exchange, Request, Server

# A key in each place, to be told apart in what was sent and what was logged.
CLIENT, ENGINES, OWN = "k-client-7d1", "k-engines-93b", "k-one-engine-51f"


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


async def state_of(client: Client, worker_id: str, headers: list[tuple[str, str]] | None = None) -> dict[str, Any]:
    got = await client.request("GET", f"/workers/{worker_id}", b"", headers)
    assert got.status == 200
    return dict(got.json())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://169.254.169.254/", "credentials"),
        ("http://[::ffff:169.254.169.254]:80", "credentials"),
        ("http://2852039166", "credentials"),
        ("http://0xa9fea9fe", "credentials"),
        ("http://169.254.169.254.:80", "credentials"),
        ("http://metadata.google.internal", "credentials"),
        ("http://100.100.100.200:80", "credentials"),
        ("http://169.254.7.7:30000", "link-local"),
        ("http://[fe80::1]:30000", "link-local"),
        ("http://224.0.0.1:30000", "no address of one host"),
    ],
)
async def test_what_is_never_a_worker_is_refused_in_both_forms_of_registration(lab: Lab, url: str, said: str) -> None:
    _, _, client = await lab.serve()
    got = await client.post("/workers", {"url": url, "worker_type": "decode"})
    assert (got.status, got.error()["code"]) == (403, "worker_refused")
    assert said in got.error()["message"]
    old = await client.post(f"/add_worker?url={url}&worker_type=decode", b"")
    assert (old.status, old.error()["code"]) == (403, "worker_refused")
    assert len((await client.get("/workers")).json()["workers"]) == 2


async def test_with_a_list_only_listed_hosts_become_workers(lab: Lab) -> None:
    fleet = await lab.pd(decodes=2)
    router = await lab.router(fleet, "--worker-allow", "127.0.0.0/8", "engine-1", "*.decode.example")
    for url, status in (
        ("http://10.0.0.9:30000", 403),
        ("http://[2001:db8::1]:30000", 403),
        ("http://engine-1:30000", 202),
        ("http://a.decode.example:30000", 202),
    ):
        got = await router.client.post("/workers", {"url": url, "worker_type": "decode"})
        assert got.status == status, (url, got.body)
    assert (await router.client.generate(**GENERATE)).status == 200


async def test_a_name_is_held_to_the_list_by_its_addresses_at_every_connect(lab: Lab) -> None:
    fleet = await lab.pd(decodes=2)
    # One that the router has under no other name.
    engine = fleet.decodes[1]
    router = await lab.router(Fleet([fleet.p, fleet.d]), "--worker-allow", "10.0.0.0/8", "127.0.0.1")
    before = engine.server.accepted
    # `localhost` is no listed name, and may be ::1 or 127.0.0.1: the second is on the list.
    url = f"http://localhost:{engine.server.port}"
    got = await router.client.post("/workers", {"url": url, "worker_type": "decode"})
    for _ in range(200):
        if (await state_of(router.client, got.json()["worker_id"]))["state"] == "active":
            break
        await asyncio.sleep(0.02)
    assert (await state_of(router.client, got.json()["worker_id"]))["state"] == "active"
    assert engine.server.accepted > before
    # Somebody is there to be told: at once. What is named at start is looked up at every connect, as everything is.
    other = await lab.router(None, "--worker-allow", "10.0.0.0/8", "--decode", url, ready=False)
    seen = engine.server.accepted
    for path in ("/workers", f"/add_worker?url={url}&worker_type=decode"):
        got = await other.client.post(path, {"url": url, "worker_type": "decode"})
        assert (got.status, got.error()["code"]) == (403, "worker_refused")
        assert "is not in --worker-allow" in got.error()["message"]
    await asyncio.sleep(0.3)
    (state,) = (await other.client.get("/workers")).json()["workers"]
    assert state["state"] == "pending"
    assert "is not in --worker-allow" in state["message"]
    mine = [c for c in engine.server.connections if c.id > seen]
    assert not [c for c in mine if c.requests == 0], "it was connected to"


async def test_workers_named_at_start_are_held_to_the_list_too(lab: Lab) -> None:
    with pytest.raises(AssertionError, match=r"--decode: worker http://192.0.2.1:30000: 192.0.2.1 is not in --worker-allow"):
        await lab.router(None, "--decode", "http://192.0.2.1:30000", "--worker-allow", "10.0.0.0/8", ready=False)
    lab.routers.clear()


async def test_a_redirect_is_an_answer_and_is_not_followed(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--disable-retries", "--disable-circuit-breaker")
    asked: list[Request] = []

    async def elsewhere(request: Request, exchange: Exchange) -> None:
        asked.append(request)
        await exchange.reply(200, b"{}")

    target = Server(elsewhere)
    await target.listen()
    to = [("location", f"http://127.0.0.1:{target.port}/generate")]
    for status in (302, 307, 308):
        fleet.d.script = lambda leg, status=status: answer(status, {}, headers=to)
        got = await client.generate(**GENERATE)
        assert got.status >= 300
        await fleet.quiet()
    assert asked == []
    await target.stop()


async def test_proxies_of_the_environment_are_ignored_for_workers(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.setblocking(False)
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{trap.getsockname()[1]}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert os.environ["HTTP_PROXY"]
        fleet, _, client = await lab.serve()
        assert (await client.generate(**GENERATE)).status == 200
        assert fleet.posts() == 2
        with pytest.raises(BlockingIOError):
            trap.accept()


async def test_aut_1_every_own_call_carries_the_workers_key_and_clients_keys_stay_here(lab: Lab) -> None:
    fleet = await lab.pd(decodes=2)
    for engine in fleet.engines:
        engine.key = ENGINES
    own = fleet.decodes[1]
    own.key = OWN
    registered = Fleet([fleet.p, fleet.d])
    flags = ["--api-key", CLIENT, "--worker-api-key", ENGINES, "--health-check-interval-secs", "0.1", "--log-level", "debug"]
    router = await lab.router(registered, *flags)
    client = router.client
    got = await client.request("POST", "/workers", {"url": own.url, "worker_type": "decode", "api_key": OWN}, bearer(CLIENT))
    worker_id = got.json()["worker_id"]
    for _ in range(200):
        if (await state_of(client, worker_id, bearer(CLIENT)))["state"] == "active":
            break
        await asyncio.sleep(0.02)
    answers = await asyncio.gather(*(client.request("POST", "/generate", GENERATE, bearer(CLIENT)) for _ in range(12)))
    assert [a.status for a in answers] == [200] * 12
    assert all(engine.legs for engine in fleet.engines)
    for path in ("/flush_cache", "/abort_request"):
        got = await client.request("POST", path, {"rid": "nobody"}, bearer(CLIENT))
        assert got.status == 200
    assert (await client.request("GET", "/v1/loads", b"", bearer(CLIENT))).status == 200
    await asyncio.sleep(0.3)
    assert [r.path for e in fleet.engines for r in e.unauthorized] == []
    for engine in fleet.engines:
        sent = {leg.request.header("authorization") for leg in engine.legs} | {r.header("authorization") for r in engine.control}
        assert sent == {f"Bearer {engine.key}"}
    # A wrong key or none reaches no engine.
    before = fleet.posts()
    for headers in (None, bearer("nope"), bearer(ENGINES), [("authorization", CLIENT)], bearer(CLIENT + "x")):
        for path in ("/generate", "/workers", "/flush_cache"):
            got = await client.request("POST", path, GENERATE, headers)
            assert (got.status, got.error()["code"]) == (401, "unauthorized"), (path, headers)
    assert fleet.posts() == before
    for path in ("/health", "/liveness", "/readiness", "/metrics"):
        assert (await client.get(path)).status == 200
    listed = (await client.request("GET", "/workers", b"", bearer(CLIENT))).body.decode()
    said = router.tail(1 << 24) + listed + str((await router.metrics()).samples)
    for key in (CLIENT, ENGINES, OWN):
        assert key not in said, "a key was shown"
    for engine in fleet.engines:
        engine.key = None


async def test_aut_1_an_engine_that_refuses_the_key_says_so_at_registration(lab: Lab) -> None:
    fleet = await lab.pd()
    router = await lab.router(None, ready=False)
    fleet.d.key = ENGINES
    got = await router.client.post("/workers", {"url": fleet.d.url, "worker_type": "decode"})
    for _ in range(200):
        state = await state_of(router.client, got.json()["worker_id"])
        if state["state"] == "failed":
            break
        await asyncio.sleep(0.02)
    assert state["state"] == "failed"
    assert "wants a key" in state["message"]
    assert "--worker-api-key" in state["message"]
    fleet.d.key = None


async def test_without_keys_no_header_is_made_up(lab: Lab) -> None:
    fleet, _, client = await lab.serve()
    assert (await client.generate(**GENERATE)).status == 200
    assert [leg.request.header("authorization") for e in fleet.engines for leg in e.legs] == [None, None]
