"""The admin listener: the live table, drain and undrain, its key, and what pages of other sites may not do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from scripted.calls import GENERATE, until
from scripted.client import Client, Response, encode
from scripted.lab import Lab
from scripted.router import Router

JSON = [("content-type", "application/json")]
KEY = "k-admin"


class AdminClient(Client):
    """Calls the listener by its address, as people do."""

    async def request(
        self, method: str, path: str, body: Any = b"", headers: list[tuple[str, str]] | None = None, *, chunk_size: int | None = None
    ) -> Response:
        given = list(headers or [])
        if all(name != "host" for name, _ in given):
            given.append(("host", f"127.0.0.1:{self.port}"))
        return await super().request(method, path, body, given, chunk_size=chunk_size)


def admin_of(router: Router) -> AdminClient:
    return AdminClient(router.admin_port)


async def ranks(admin: Client, **where: Any) -> list[dict[str, Any]]:
    table = (await admin.get("/admin/ranks")).json()
    return [r for r in table["ranks"] if all(r[k] == v for k, v in where.items())]


async def told(admin: Client, path: str, body: dict[str, Any]) -> Response:
    return await admin.request("POST", path, encode(body), JSON)


async def test_the_table_shows_every_rank_with_what_it_holds(lab: Lab) -> None:
    fleet, router, client = await lab.serve(
        "--poll-interval-ms", "20", prefill={"dp_size": 2}, decode={"dp_size": 3, "max_running": 40, "mamba_slots": 64, "run_s": 5.0}
    )
    admin = admin_of(router)
    calls = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(6)]
    await until(lambda: sum(r.running for r in fleet.d.ranks) == 6, "all run")
    for _ in range(200):
        decode = await ranks(admin, role="decode")
        if sum(r["running"] or 0 for r in decode) == 6:
            break
        await asyncio.sleep(0.02)
    assert [r["rank"] for r in decode] == [0, 1, 2]
    for at, rank in enumerate(decode):
        assert rank["url"] == fleet.d.url
        assert rank["open"] == fleet.d.ranks[at].running == rank["running"]
        assert (rank["rows"], rank["rows_free"]) == (40, 40 - rank["open"])
        assert (rank["mamba"], rank["mamba_free"]) == (64, 64 - rank["open"])
        assert rank["kv"] == 10_000_000
        assert (rank["state"], rank["breaker"], rank["drained"], rank["version"]) == ("open", "closed", False, "0.5.23")
        assert rank["window"] >= 1
        assert rank["report_age_s"] < 2
    table = (await admin.get("/admin/ranks")).json()
    assert len(table["ranks"]) == 5
    assert table["requests"]["live"] == 6
    assert table["requests"]["bound"] == 6
    assert table["pd"] is True
    prefill = await ranks(admin, role="prefill")
    assert all(r["window"] is None and r["tau_s"] is None and r["uncached"] is not None for r in prefill)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    admin.close()


async def test_a_worker_that_is_not_there_is_one_line_with_its_reason(lab: Lab) -> None:
    fleet, router, client = await lab.serve(decodes=2)
    admin = admin_of(router)
    await client.post("/workers", {"url": "http://127.0.0.1:9", "worker_type": "decode"})
    await fleet.decodes[1].server.stop()
    for _ in range(300):
        gone = await ranks(admin, url=fleet.decodes[1].url)
        if gone[0]["state"] == "down":
            break
        await asyncio.sleep(0.02)
    (line,) = gone
    assert (line["state"], line["rank"], line["running"]) == ("down", None, None)
    assert "refused" in line["why"]
    (pending,) = await ranks(admin, url="http://127.0.0.1:9")
    assert pending["state"] == "pending"
    admin.close()


async def test_a_drained_rank_gets_nothing_new_and_finishes_what_it_has(lab: Lab) -> None:
    fleet, router, client = await lab.serve(decode={"dp_size": 2, "run_s": 0.6})
    admin = admin_of(router)
    calls = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(4)]
    await until(lambda: all(r.running == 2 for r in fleet.d.ranks), "two run on each rank")
    (rank, _) = await ranks(admin, role="decode")
    got = await told(admin, "/admin/drain", {"worker": rank["worker"], "rank": 0})
    assert (got.status, got.json()["state"], got.json()["open"]) == (200, "draining", 2)
    assert [r["state"] for r in await ranks(admin, role="decode")] == ["draining", "open"]
    more = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(4)]
    waited = await told(admin, "/admin/drain", {"worker": f"{fleet.d.url}@0", "wait_s": 10})
    assert (waited.json()["state"], waited.json()["open"]) == ("drained", 0)
    assert [r.status for r in await asyncio.gather(*calls, *more)] == [200] * 8
    assert [leg.rank for leg in fleet.legs("decode")[4:]] == [1] * 4
    assert (await ranks(admin, role="decode"))[0]["state"] == "drained"
    assert (await client.get("/readiness")).status == 200
    back = await told(admin, "/admin/undrain", {"worker": fleet.d.url, "rank": 0})
    assert back.json()["state"] == "in choice"
    before = len(fleet.legs("decode"))
    await asyncio.gather(*(client.generate(**GENERATE) for _ in range(4)))
    assert sorted(leg.rank for leg in fleet.legs("decode")[before:]) == [0, 0, 1, 1]
    admin.close()


async def test_a_drained_worker_stays_out_over_its_restart_and_the_router_is_not_ready_without_others(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--queue-timeout-secs", "30", decode={"dp_size": 2})
    admin = admin_of(router)
    assert (await told(admin, "/admin/drain", {"worker": fleet.d.url})).json()["state"] == "drained"
    assert (await client.get("/readiness")).status == 503
    fleet.d.server.die()
    for _ in range(300):
        if (await ranks(admin, url=fleet.d.url))[0]["state"] == "down":
            break
        await asyncio.sleep(0.02)
    await fleet.d.server.listen()
    for _ in range(300):
        decode = await ranks(admin, url=fleet.d.url)
        if decode[0]["state"] == "drained":
            break
        await asyncio.sleep(0.02)
    assert [r["state"] for r in decode] == ["drained", "drained"]
    call = asyncio.create_task(client.generate(**GENERATE))
    await asyncio.sleep(0.3)
    assert not call.done(), "it waits for the worker to come back into choice"
    assert (await told(admin, "/admin/undrain", {"worker": fleet.d.url})).status == 200
    assert (await call).status == 200
    admin.close()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "worker is missing"),
        ({"worker": "http://nobody:1"}, 404, "no worker has the id or address"),
        ({"worker": "URL", "rank": 7}, 400, "has ranks 0 to 1, not 7"),
        ({"worker": "URL@0", "rank": 1}, 400, "are not the same rank"),
        ({"worker": "URL", "rank": -1}, 400, "rank -1 is no rank"),
        ({"worker": "URL", "wait_s": "x"}, 400, "wait_s"),
        ({"worker": "URL", "wait": 1}, 400, "wait is no field of a drain"),
        ([], 400, "no JSON object"),
    ],
)
async def test_a_drain_that_cannot_be_understood_changes_nothing(lab: Lab, body: Any, status: int, said: str) -> None:
    fleet, router, _ = await lab.serve(decode={"dp_size": 2})
    admin = admin_of(router)
    raw = json.dumps(body).replace("URL", fleet.d.url).encode()
    got = await admin.request("POST", "/admin/drain", raw, JSON)
    assert got.status == status
    assert said in got.error()["message"]
    assert [r["drained"] for r in await ranks(admin, role="decode")] == [False, False]
    admin.close()


async def test_the_key_opens_and_its_lack_does_not(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--admin-api-key", KEY, "--api-key", "k-client")
    admin = admin_of(router)
    bearer = [("authorization", f"Bearer {KEY}")]
    for path in ("/admin/ranks", "/admin/settings", "/workers", "/v1/loads"):
        assert (await admin.get(path)).status == 401, path
        assert (await admin.request("GET", path, b"", [("authorization", "Bearer k-client")])).status == 401, path
        assert (await admin.request("GET", path, b"", bearer)).status == 200, path
    assert (await admin.request("POST", "/admin/drain", encode({"worker": fleet.d.url}), JSON)).status == 401
    for path in ("/", "/health", "/readiness", "/metrics"):
        assert (await admin.get(path)).status == 200, path
    # The admin's key is none of the clients', and neither is shown.
    assert (await client.request("GET", "/workers", b"", bearer)).status == 401
    shown = (await admin.request("GET", "/admin/settings", b"", bearer)).json()["settings"]
    assert (shown["admin_api_key"], shown["api_key"], shown["port"]) == ("***", "***", router.port)
    assert (await client.request("GET", "/admin/ranks", b"", [("authorization", "Bearer k-client")])).status == 404
    assert KEY not in router.tail() and "k-client" not in router.tail()
    admin.close()


async def test_a_page_of_another_site_can_neither_read_nor_change(lab: Lab) -> None:
    fleet, router, _ = await lab.serve()
    admin = admin_of(router)
    # A name that its owner points to 127.0.0.1.
    got = await admin.request("GET", "/admin/ranks", b"", [("host", f"evil.example:{router.admin_port}")])
    assert (got.status, got.error()["code"]) == (403, "admin_only")
    # What a form or a script may send unasked.
    drain = encode({"worker": fleet.d.url})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        got = await admin.request("POST", "/admin/drain", drain, [("content-type", kind), ("origin", "http://evil.example")])
        assert (got.status, got.error()["code"]) == (403, "admin_only")
    # What it must ask for first is not granted, and no answer may be read by it.
    asked = [("origin", "http://evil.example"), ("access-control-request-method", "POST"), ("content-type", "application/json")]
    got = await admin.request("OPTIONS", "/admin/drain", b"", asked)
    assert got.status == 405
    assert got.header("access-control-allow-origin") is None
    got = await admin.request("GET", "/admin/ranks", b"", [("origin", "http://evil.example")])
    assert got.header("access-control-allow-origin") is None
    assert not any(r["drained"] for r in await ranks(admin))
    admin.close()


async def test_control_can_be_left_to_the_admin_listener_alone(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--no-control-on-main-port")
    admin = admin_of(router)
    for method, path in (("POST", "/workers"), ("DELETE", "/workers/x"), ("POST", "/add_worker"), ("POST", "/pause_generation")):
        got = await client.request(method, path, b"{}", JSON)
        assert (got.status, got.error()["code"]) == (403, "admin_only"), path
        assert "--admin-port" in got.error()["advice"]
    assert (await client.get("/workers")).status == 200
    assert (await client.generate(**GENERATE)).status == 200
    for path in ("/pause_generation", "/continue_generation"):
        got = await told(admin, path, {})
        assert got.status == 200
    assert [r.path for r in fleet.d.control if "generation" in r.path] == ["/pause_generation", "/continue_generation"]
    id_of = (await ranks(admin, role="decode"))[0]["worker"]
    assert (await admin.request("DELETE", f"/workers/{id_of}", b"", JSON)).status == 202
    admin.close()


async def test_metrics_and_every_listed_route_are_answered(lab: Lab) -> None:
    _, router, client = await lab.serve()
    admin = admin_of(router)
    own = (await client.get("/metrics")).body.decode()
    assert "r3router_start_time_seconds 1" in own
    names = {line.split("{")[0].split(" ")[0] for line in own.splitlines() if not line.startswith("#")}
    theirs = (await admin.get("/metrics")).body.decode()
    assert names == {line.split("{")[0].split(" ")[0] for line in theirs.splitlines() if not line.startswith("#")}
    for route in (await admin.get("/admin/routes")).json()["routes"]:
        for path in route["path"].split(", "):
            if "{" not in path and "GET" in route["method"]:
                assert (await admin.get(path)).status == 200, path
            elif route["method"] == "POST":
                assert (await admin.get(path)).status == 405, path
                assert (await told(admin, path, {})).status == 400, path
    page = await admin.get("/")
    assert (page.header("content-type") or "").startswith("text/html")
    assert "default-src 'none'" in (page.header("content-security-policy") or "")
    text = page.body.decode()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    admin.close()


async def test_a_port_that_is_taken_is_no_reason_not_to_serve(lab: Lab) -> None:
    fleet, router, client = await lab.serve()
    second = await lab.router(fleet, "--admin-port", str(router.admin_port))
    assert (await second.client.generate(**GENERATE)).status == 200
    assert "no admin listener" in second.tail()
    assert (await client.generate(**GENERATE)).status == 200
