"""The cases of the edge on every route of the router, not only on /generate. `route_table.py` has the routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cases.route_table import (
    ALL_ENGINES,
    ANY_ENGINE,
    EVERY_ENGINE,
    GENERATION,
    INFO,
    LOADS,
    ONE_ENGINE,
    POSTS,
    REGULAR_ONLY,
    WORKERS,
    At,
    body_of,
)
from scripted.calls import GENERATE, ROUTES, until, without_owned
from scripted.client import Client, encode, request_bytes
from scripted.engine import Engine
from scripted.fleet import Fleet
from scripted.lab import Lab

MODES = ("pd", "regular")
FUTURE: dict[str, Any] = {
    "future_field": {"a": [1, {"b": None}]},
    "cache_salt": "s",
    "null_field": None,
    "nested": {"rid": "inner", "n": 4},
}
SLOW = {"waiting_s": 60.0, "disconnect_s": 60.0}


async def serve(lab: Lab, at: At, *flags: str, **shape: Any) -> tuple[Fleet, Client]:
    fleet = await lab.fleet(at.fleet(**shape))
    router = await lab.router(fleet, "--log-level", "warn", *flags)
    # Ready is one of each role.
    for _ in range(400):
        if [w["state"] for w in await listed(router.client)] == ["active"] * len(fleet.engines):
            return fleet, router.client
        await asyncio.sleep(0.01)
    raise AssertionError("not all engines are active")


async def listed(client: Client) -> list[dict[str, Any]]:
    return list((await client.get("/workers")).json()["workers"])


async def test_the_table_has_every_route_that_the_router_answers(lab: Lab) -> None:
    router = await lab.router(None, ready=False)
    routes = (await router.client.get("/routes")).json()
    assert routes.pop("generate") == list(GENERATION)
    assert routes.pop("any_engine") == list(ANY_ENGINE)
    assert routes.pop("regular_engines_only") == list(REGULAR_ONLY)
    assert routes.pop("every_engine") == list(EVERY_ENGINE)
    assert routes.pop("info") == list(INFO)
    assert routes.pop("loads") == list(LOADS)
    assert routes.pop("workers") == list(WORKERS)
    assert routes.pop("abort") == ["/abort_request"]
    # Health has no body and no engine's data; what is stored is read by ids that only its client has.
    assert set(routes) == {"responses", "health", "references"}, "a new group of routes needs its cases"


# --- JSN-1 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", POSTS, ids=str)
async def test_jsn_1_every_route_passes_every_field_on(lab: Lab, at: At) -> None:
    fleet, client = await serve(lab, at, "--no-start-len-rewrite", dp_size=2)
    body = {**body_of(at.path), **FUTURE}
    assert (await client.post(at.path, body)).status == 200
    reached = at.reached(fleet)
    count = len(fleet.engines) if at in ALL_ENGINES else 2 if at.generates and at.mode == "pd" else 1
    assert len(reached) == count, reached
    for name, raw in reached:
        if not at.generates:
            assert raw == encode(body), f"{name} got another text"
            continue
        seen = without_owned(json.loads(raw))
        seen.pop("stream", None)
        assert json.dumps(seen, sort_keys=True) == json.dumps(body, sort_keys=True), name


# --- JSN-2 ------------------------------------------------------------------------------------------------------------------

ODD = b"cut \\ud83d here, \\ude00, \\u0000, \\u2028"
BROKEN = [b'{"text":"a\xffb"}', b'{"text":"abc', b'{"text":"a"} trailing', b"nonsense"]


@pytest.mark.parametrize("at", POSTS, ids=str)
async def test_jsn_2_every_route_passes_odd_escapes_as_they_were_sent(lab: Lab, at: At) -> None:
    fleet, client = await serve(lab, at)
    raw = encode(body_of(at.path))[:-1] + b',"odd":"' + ODD + b'"}'
    assert (await client.request("POST", at.path, raw)).status == 200
    reached = at.reached(fleet)
    assert reached and all(b'"odd":"' + ODD + b'"' in seen for _, seen in reached), reached


@pytest.mark.parametrize("at", ONE_ENGINE, ids=str)
async def test_jsn_2_every_route_refuses_what_is_no_json_with_its_place(lab: Lab, at: At) -> None:
    fleet, client = await serve(lab, at)
    connection = await client.connect()
    for raw in BROKEN:
        got = await connection.call(at.path, raw)
        assert got.status == 400, got.body
        error = got.error()
        assert error["code"] == "invalid_json"
        assert 0 <= error["measured"] <= len(raw)
    assert at.reached(fleet) == []
    assert (await connection.call(at.path, encode(body_of(at.path)))).status == 200
    connection.close()


@pytest.mark.parametrize("path", ["/workers", "/abort_request", *EVERY_ENGINE])
async def test_jsn_2_control_routes_refuse_what_is_no_json_and_tell_no_engine(lab: Lab, path: str) -> None:
    fleet, client = await serve(lab, At("pd", path))
    connection = await client.connect()
    for raw in BROKEN:
        got = await connection.call(path, raw)
        assert got.status == 400, got.body
        assert got.error()["code"] == "invalid_json"
    assert [r.path for e in fleet.engines for r in e.control if r.path == path] == []
    assert len(await listed(client)) == 4
    connection.close()


# --- HTTP-2 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", POSTS, ids=str)
async def test_http_2_every_route_takes_bodies_over_two_megabytes_whole(lab: Lab, at: At) -> None:
    fleet, client = await serve(lab, at)
    body = {**body_of(at.path), "image_data": "QUJD" * 700_000}
    for chunk_size in (None, 100_000):
        got = await client.request("POST", at.path, encode(body), chunk_size=chunk_size)
        assert got.status == 200, got.body[:300]
    reached = at.reached(fleet)
    assert len(reached) in (2, 4, 8)
    assert all(json.loads(raw)["image_data"] == body["image_data"] for _, raw in reached)


@pytest.mark.parametrize("at", [*POSTS, *(At("pd", path) for path in ("/workers", "/abort_request"))], ids=str)
async def test_http_2_every_route_has_the_one_limit_and_the_connection_stays(lab: Lab, at: At) -> None:
    fleet, client = await serve(lab, at, "--max-payload-size", "50000")
    base = encode({**body_of(at.path), "pad": ""})
    over = base[:-2] + b"z" * (50_001 - len(base)) + b'"}'
    assert len(over) == 50_001
    connection = await client.connect()
    for chunk_size in (None, 7_000):
        await connection.send(request_bytes("POST", at.path, over, chunk_size=chunk_size))
        got = await asyncio.wait_for(connection.answer(), 10.0)
        assert got.status == 413
        assert (got.error()["code"], got.error()["limit"]) == ("body_too_large", 50_000)
    assert at.reached(fleet) == []
    if at in POSTS:
        fits = base[:-2] + b"z" * (50_000 - len(base)) + b'"}'
        assert (await connection.call(at.path, fits)).status == 200
        assert at.reached(fleet)
    connection.close()


# --- EPT-1 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ALL_ENGINES, ids=str)
async def test_ept_1_a_control_call_reaches_every_engine_once_with_its_body(lab: Lab, at: At) -> None:
    fleet, client = await serve(lab, at, dp_size=2)
    body = {"a": [1, {"b": None}], "rid": "x", "flag": True, "session_id": "s"}
    got = await client.post(at.path, body)
    assert got.status == 200, got.body
    assert sorted(at.reached(fleet)) == sorted((engine.name, encode(body)) for engine in fleet.engines)
    text = json.dumps(got.json())
    assert all(engine.url in text for engine in fleet.engines), f"the reply does not name each engine: {text}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", INFO)
async def test_ept_1_information_is_an_engines_own(lab: Lab, mode: str, path: str) -> None:
    fleet, client = await serve(lab, At(mode, path))
    got = await client.get(path)
    if "weight" in path:
        # The fakes do not know these: their own 404 comes through, not the router's.
        assert (got.status, got.json()) == (404, {"detail": "Not Found"})
        return
    assert got.status == 200
    own = {"/v1/models": "data", "/get_model_info": "answered_by", "/model_info": "answered_by"}.get(path, "internal_states")
    assert got.json()[own], got.body
    fleet.check()


@pytest.mark.parametrize("mode", MODES)
async def test_ept_1_loads_and_metrics_have_every_engine(lab: Lab, mode: str) -> None:
    fleet, client = await serve(lab, At(mode, ""), dp_size=2, mamba_slots=64)
    for path in LOADS:
        got = await client.get(path)
        assert got.status == 200
        if path != "/metrics":
            assert all(e.url in got.body.decode() or e.url.removeprefix("http://") in got.body.decode() for e in fleet.engines), path
    for path in ("/health", "/liveness", "/readiness", "/health_generate"):
        assert (await client.get(path)).status == 200


@pytest.mark.parametrize("by", ["rid", "prefix", "abort_all"])
@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("mode", MODES)
async def test_ept_1_an_abort_ends_the_calls_of_every_generation_route(lab: Lab, mode: str, path: str, by: str) -> None:
    shape = {**SLOW, "run_s": 60.0} if mode == "regular" else SLOW
    fleet = At(mode, path).fleet(**shape)
    for engine in fleet.decodes:
        engine.run_s = 60.0
    await lab.fleet(fleet)
    router = await lab.router(fleet)
    client = router.client
    calls = [asyncio.create_task(client.post(path, {**ROUTES[path], "rid": f"ep-7::t{n}"})) for n in range(2)]
    await until(lambda: fleet.posts() == (4 if mode == "pd" else 2), "both are in work")
    if by == "rid":
        for n in range(2):
            assert (await client.post("/abort_request", {"rid": f"ep-7::t{n}"})).status == 200
    else:
        body = {"rid": "ep-7::", "prefix": True} if by == "prefix" else {"abort_all": True}
        assert (await client.post("/abort_request", body)).status == 200
    for answer in await asyncio.wait_for(asyncio.gather(*calls), 5.0):
        assert b"abort" in answer.body
    await fleet.quiet()
    last = [leg for engine in fleet.engines if engine.role != "prefill" for leg in engine.legs]
    assert {leg.end for leg in last} == {"aborted"}
    await router.zero_check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_ept_1_what_is_not_answered_is_a_json_404_that_names_the_path(lab: Lab, mode: str, method: str) -> None:
    fleet, client = await serve(lab, At(mode, ""))
    got = await client.request(method, "/v1/nothing/here", b"{}" if method == "POST" else b"")
    assert got.status == 404
    assert "/v1/nothing/here" in got.error()["message"]
    if mode == "pd":
        for path in REGULAR_ONLY:
            refused = await client.post(path, body_of(path))
            assert refused.status == 501
            assert path in refused.error()["message"]
    assert fleet.posts() == 0


# --- RL-2 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_rl_2_every_list_names_engines_by_their_addresses_and_each_once(lab: Lab, mode: str) -> None:
    fleet, client = await serve(lab, At(mode, ""), dp_size=4)
    urls = sorted(engine.url for engine in fleet.engines)
    workers = await listed(client)
    assert sorted(w["url"] for w in workers) == urls
    assert all(len(w["ranks"]) == 4 for w in workers)
    old = (await client.get("/list_workers")).json()
    assert sorted(old["urls"] if isinstance(old, dict) else old) == urls
    for worker in workers:
        one = (await client.get(f"/workers/{worker['id']}")).json()
        assert one["url"] == worker["url"]
    loads = (await client.get("/get_loads")).json()["workers"]
    assert sorted({w["worker"] for w in loads}) == urls
    everything = b"".join([(await client.get(path)).body for path in ("/workers", "/list_workers", "/get_loads", "/v1/loads")])
    assert b"@" not in everything, "a rank stands in an address"
    # A trainer's client: abort at each URL itself.
    for worker in workers:
        address = Client(int(worker["url"].rsplit(":", 1)[1]))
        assert (await address.post("/abort_request", {"abort_all": True})).status == 200
        address.close()
    assert [len(engine.aborts) for engine in fleet.engines] == [1] * len(fleet.engines)


@pytest.mark.parametrize("style", ["id", "url", "old"])
@pytest.mark.parametrize("at", POSTS, ids=str)
async def test_rl_2_a_deleted_engine_gets_no_call_of_any_route(lab: Lab, at: At, style: str) -> None:
    if style != "id" and not at.generates:
        pytest.skip("the ways to delete are compared on the generation routes")
    fleet, client = await serve(lab, at, dp_size=4)
    gone = fleet.engines[-1]
    (entry,) = [w for w in await listed(client) if w["url"] == gone.url]
    if style == "old":
        assert (await client.post(f"/remove_worker?url={gone.url}", b"")).status == 200
    else:
        assert (await client.delete(f"/workers/{entry['id' if style == 'id' else 'url']}")).status < 300
    await until_absent(client, gone.url)
    for _ in range(6):
        assert (await client.post(at.path, body_of(at.path))).status == 200
    names = {name for name, _ in at.reached(fleet)}
    assert names and gone.name not in names


async def until_absent(client: Client, url: str) -> None:
    for _ in range(200):
        if url not in [w["url"] for w in await listed(client)]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{url} is still listed")


# --- WRK-1 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", POSTS, ids=str)
async def test_wrk_1_no_call_of_any_route_reaches_an_engine_before_it_is_active_or_after_it_is_absent(lab: Lab, at: At) -> None:
    fleet = await lab.fleet(at.fleet(dp_size=2))
    # Of a pair, prefill is what tokenises.
    late = fleet.engines[1 if at.path in ANY_ENGINE else -1]
    healthy = False
    late.healthy = lambda: healthy
    early = Fleet([engine for engine in fleet.engines if engine is not late])
    router = await lab.router(early, "--worker-startup-check-interval", "0.05", "--log-level", "warn")
    client = router.client
    body = {"url": late.url, "worker_type": late.role}
    if late.role == "prefill":
        body["bootstrap_port"] = late.bootstrap.port  # type: ignore[assignment]
    first = await client.post("/workers", body)
    again = await client.post("/workers", body)
    assert first.json()["worker_id"] == again.json()["worker_id"], "a repeat is the same registration"
    worker_id = first.json()["worker_id"]
    for _ in range(4):
        assert (await client.post(at.path, body_of(at.path))).status == 200
    # A paused engine fails its health check, and would never come into choice unless it heard of the end.
    hears = at.path in ("/continue_generation", "/resume_memory_occupation")
    assert (late.name in {name for name, _ in at.reached(fleet)}) == hears, "a pending engine was given a call, or not told to go on"
    assert [w["url"] for w in await listed(client)].count(late.url) == 1
    healthy = True
    for _ in range(400):
        if (await client.get(f"/workers/{worker_id}")).json()["state"] == "active":
            break
        await asyncio.sleep(0.02)
    # It is in choice once it has told its load, which it is asked for every 100 ms.
    for _ in range(100):
        await asyncio.gather(*(client.post(at.path, body_of(at.path)) for _ in range(12)))
        if late.name in {name for name, _ in at.reached(fleet)}:
            break
    assert late.name in {name for name, _ in at.reached(fleet)}, "an active engine was given none"
    assert (await client.delete(f"/workers/{worker_id}")).status < 300
    await until_absent(client, late.url)
    late.legs.clear()
    late.control.clear()
    for _ in range(4):
        assert (await client.post(at.path, body_of(at.path))).status == 200
    assert late.name not in {name for name, _ in at.reached(fleet)}, "a removed engine was given a call"


@pytest.mark.parametrize("mode", MODES)
async def test_wrk_1_the_old_way_to_register_returns_when_the_engine_is_active(lab: Lab, mode: str) -> None:
    fleet = await lab.fleet(At(mode, "").fleet())
    router = await lab.router(Fleet([]), *(["--pd-disaggregation"] if mode == "pd" else []), ready=False)
    client = router.client
    for engine in fleet.engines:
        kind = f"&worker_type={engine.role}" if mode == "pd" else ""
        port = f"&bootstrap_port={engine.bootstrap.port}" if engine.role == "prefill" else ""
        got = await client.post(f"/add_worker?url={engine.url}{kind}{port}", b"")
        assert got.status == 200, got.body
        (entry,) = [w for w in await listed(client) if w["url"] == engine.url]
        assert entry["state"] == "active"
    for path in GENERATION:
        assert (await client.post(path, ROUTES[path])).status == 200


# --- URL-1 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", POSTS, ids=str)
async def test_url_1_every_route_serves_engines_with_ipv6_addresses(lab: Lab, at: At) -> None:
    fleet, client = await serve(lab, at, host="::1", dp_size=2)
    assert all(engine.url.startswith("http://[::1]:") for engine in fleet.engines)
    assert sorted(w["url"] for w in await listed(client)) == sorted(engine.url for engine in fleet.engines)
    assert (await client.post(at.path, body_of(at.path))).status == 200
    assert at.reached(fleet)
    # The fakes compare the bootstrap address that decode is told with that of prefill: brackets and all.
    fleet.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", [*INFO[:5], *LOADS[:3], "/health_generate"])
async def test_url_1_information_of_engines_with_ipv6_addresses(lab: Lab, mode: str, path: str) -> None:
    fleet, client = await serve(lab, At(mode, path), host="::1", mamba_slots=4)
    got = await client.get(path)
    assert got.status == 200
    if path in LOADS:
        assert all(f"[::1]:{engine.server.port}" in got.body.decode() for engine in fleet.engines), got.body


async def test_url_1_every_spelling_of_an_address_is_one_worker_on_every_worker_route(lab: Lab) -> None:
    fleet = await lab.fleet(Fleet([Engine("regular", "R0", host="::1")]))
    router = await lab.router(Fleet([]), ready=False)
    client = router.client
    port = fleet.engines[0].server.port
    spellings = [f"http://[::1]:{port}", f"http://[::1]:{port}/", f"HTTP://[0:0:0:0:0:0:0:1]:{port}", f"[::1]:{port}"]
    ids = set()
    for url in spellings:
        got = await client.post("/workers", {"url": url})
        assert got.status < 300, got.body
        ids.add(got.json()["worker_id"])
        assert (await client.post(f"/add_worker?url={url}", b"")).status == 200
    assert len(ids) == 1
    (entry,) = await listed(client)
    assert entry["url"] == spellings[0], "the list shows the text as registered"
    assert (await client.generate(**GENERATE)).status == 200
    assert (await client.post(f"/remove_worker?url={spellings[2]}", b"")).status == 200
    await until_absent(client, spellings[0])


# --- MEM-1 ------------------------------------------------------------------------------------------------------------------


def unique(path: str, number: int) -> dict[str, Any]:
    """A prompt of about 80 KB that no other call has."""
    text = f"{number:08d} " * 9000
    if path == "/generate" and number % 2:
        return {"input_ids": [number * 7 + i for i in range(13_000)], "sampling_params": {"max_new_tokens": 1}}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": text, "sampling_params": {"max_new_tokens": 1}},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "/v1/completions": {"model": "m", "prompt": text, "max_tokens": 1},
    }
    return bodies[path]


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("mode", MODES)
async def test_mem_1_prefixes_stay_within_their_limit_and_go_with_their_workers(lab: Lab, mode: str, path: str) -> None:
    at = At(mode, path)
    # What 130 prompts leave behind: 79 entries of 52 bytes each, or 50 for ids. Without the limit, 2,000 of them take 7 MB or more.
    fleet, client = await serve(lab, at, "--max-tree-size", "512KiB", "--poll-interval-ms", "1000")
    router = lab.routers[0]

    async def flood(first: int, count: int) -> None:
        numbers = iter(range(first, first + count))

        async def caller() -> None:
            for number in numbers:
                assert (await client.post(path, unique(path, number))).status == 200
                if number % 100 == 0:
                    for engine in fleet.engines:
                        engine.legs.clear()
                    fleet.rooms.forget()

        await asyncio.gather(*(caller() for _ in range(16)))

    await flood(0, 600)
    full = router.rss()
    await flood(600, 2000)
    assert router.rss() - full < 5 << 20, "memory grew with the number of prompts"
    changed = fleet.engines[-1]
    body = {"url": changed.url, "worker_type": changed.role}
    for round_ in range(50):
        got = await client.post("/workers", body)
        for _ in range(400):
            if (await client.get(f"/workers/{got.json()['worker_id']}")).json()["state"] == "active":
                break
            await asyncio.sleep(0.01)
        await flood(4000 + 10 * round_, 4)
        assert (await client.delete(f"/workers/{got.json()['worker_id']}")).status < 300
        await until_absent(client, changed.url)
    assert router.rss() - full < 6 << 20, "memory grew with the number of registrations"
