"""Metrics: in less out is live, every decision has a counter, labels come from closed sets."""

from __future__ import annotations

import asyncio
from collections import Counter

from scripted.acts import answer, never, refusal, rst
from scripted.calls import GENERATE, until
from scripted.client import Client, encode
from scripted.fleet import Fleet
from scripted.lab import Lab
from scripted.metrics import Metrics
from scripted.router import Router


async def outcomes(router: Router) -> Counter[str]:
    """Ended requests by outcome, once everything that started has ended."""
    for _ in range(200):
        metrics = await router.metrics()
        if metrics.sum("r3router_requests_started_total") == metrics.sum("r3router_requests_total"):
            break
        await asyncio.sleep(0.025)
    assert metrics.sum("r3router_requests_live") == 0
    return Counter({s.labels["outcome"]: int(s.value) for s in _nonzero(metrics)})


def _nonzero(metrics: Metrics) -> list:  # type: ignore[type-arg]
    summed: dict[str, float] = {}
    for sample in metrics.get("r3router_requests_total"):
        summed[sample.labels["outcome"]] = summed.get(sample.labels["outcome"], 0) + sample.value
    return [type(metrics.samples[0])("x", {"outcome": k}, v) for k, v in summed.items() if v]


async def test_every_way_to_end_is_counted_once(lab: Lab) -> None:
    fleet, router, client = await lab.serve(
        "--disable-retries",
        "--disable-circuit-breaker",
        "--delivery-timeout-secs",
        "0.5",
        "--queue-size",
        "1",
        prefill={"waiting_s": 30.0},
        decode={"waiting_s": 30.0, "max_running": 1},
    )
    want: Counter[str] = Counter()

    async def expect(outcome: str) -> None:
        want[outcome] += 1
        assert await outcomes(router) == want

    assert (await client.generate(**GENERATE)).status == 200
    await expect("ok")
    assert (await client.request("POST", "/generate", b"{")).status == 400
    await expect("invalid")
    fleet.p.script = lambda leg: refusal(422, "no")
    assert (await client.generate(**GENERATE)).status == 422
    await expect("engine_rejected")
    await fleet.quiet()
    fleet.p.script = lambda leg: answer(500, {"detail": "x"})
    assert (await client.generate(**GENERATE)).status == 500
    await expect("engine_failed")
    await fleet.quiet()
    fleet.p.script = None
    fleet.d.script = lambda leg: rst(after=0.3)  # soon after the request it would look like an idle connection that was closed
    assert (await client.generate(**GENERATE)).status == 502
    await expect("engine_failed")
    await fleet.quiet()
    fleet.d.script = lambda leg: never()
    assert (await client.generate(**GENERATE)).status == 504
    await expect("delivery_timeout")
    await fleet.quiet()

    # One holds the only row, one fills the queue, the next is shed; the queued one leaves, the running one leaves.
    fleet.d.script = None
    fleet.d.run_s = 30.0
    running = await client.connect()
    await running.post("/generate", encode(GENERATE))
    await until(lambda: fleet.d.open_legs, "one runs")
    queued = await client.connect()
    await queued.post("/generate", encode(GENERATE))
    for _ in range(100):
        if (await router.metrics()).sum("r3router_queued_requests") == 1:
            break
        await asyncio.sleep(0.02)
    shed = await client.generate(**GENERATE)
    assert shed.status == 429
    assert shed.error()["code"] == "queue_full"
    assert shed.error()["limit"] == 1
    assert shed.header("retry-after")
    queued.close()
    running.close()
    await fleet.quiet()
    want += Counter({"shed": 1, "cancelled_queued": 1, "cancelled_running": 1})
    assert await outcomes(router) == want


async def test_met_1_calls_that_reach_no_worker_are_counted_as_what_they_are_and_on_no_worker(lab: Lab) -> None:
    limit = 4096
    fleet, router, client = await lab.serve(
        "--disable-retries", "--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "60", "--max-payload-size", str(limit)
    )
    want: Counter[str] = Counter()

    async def expect(outcome: str, calls: int = 1) -> None:
        want[outcome] += calls
        assert await outcomes(router) == want

    async def legs() -> dict[tuple[str, str], float]:
        samples = (await router.metrics()).get("r3router_legs_total")
        return {(s.labels["worker"], s.labels["result"]): s.value for s in samples if s.value}

    assert (await client.request("POST", "/generate", b'{"input_ids": [1,]}')).status == 400
    await expect("invalid")
    # Both ways to be too large: by the length it names, and by what came.
    large = encode({**GENERATE, "text": "x" * limit})
    assert (await client.request("POST", "/generate", large)).status == 413
    await expect("invalid")
    connection = await client.connect()
    await connection.send(b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
    await connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large))
    assert (await connection.answer()).status == 413
    connection.close()
    await expect("invalid")
    assert await legs() == {}, "no worker has heard of these"

    fleet.d.script = lambda leg: answer(500, {"detail": "broken"})
    assert [(await client.generate(**GENERATE)).status for _ in range(2)] == [500, 500]
    await expect("engine_failed", 2)
    await fleet.quiet()
    before = await legs()
    assert before[fleet.d.url, "server"] == 2
    # The breaker is open: the router's own refusal, for which no worker did anything.
    assert [(await client.generate(**GENERATE)).status for _ in range(3)] == [503] * 3
    await expect("no_workers", 3)
    assert await legs() == before


async def test_admission_shows_every_rank_and_every_reason(lab: Lab) -> None:
    fleet, router, client = await lab.serve(
        "--poll-interval-ms", "20", prefill={"dp_size": 2, "prefill_s": 0.2}, decode={"dp_size": 3, "max_running": 2, "mamba_slots": 40}
    )
    calls = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(12)]
    await until(lambda: fleet.d.open_legs >= 3, "some are in transfer")
    metrics = await router.metrics()
    held = metrics.sum("r3router_queued_requests")
    moving = metrics.sum("r3router_rank_in_transfer", role="decode")
    assert moving >= 1
    assert held >= 1
    for name in (
        "r3router_rank_in_transfer",
        "r3router_rank_open",
        "r3router_rank_window",
        "r3router_rank_rate",
        "r3router_rank_tau_seconds",
        "r3router_rank_rows_free",
        "r3router_rank_kv_free_tokens",
        "r3router_rank_mamba_free",
        "r3router_rank_report_age_seconds",
    ):
        ranks = {s.labels["rank"] for s in metrics.get(name, worker=fleet.d.url)}
        assert ranks == {"0", "1", "2"}, f"{name}: {ranks}"
    await asyncio.gather(*calls)
    metrics = await router.metrics()
    assert metrics.sum("r3router_decisions_total", reason="bound") == 12
    assert metrics.sum("r3router_decisions_total") > 12, "nothing says why requests were held"
    assert metrics.types["r3router_decisions_total"] == "counter"


async def test_series_of_a_worker_go_with_it_and_no_text_of_clients_is_a_label(lab: Lab) -> None:
    fleet, router, client = await lab.serve(decodes=2)
    await client.post("/generate", {**GENERATE, "model": 'a"b\n', "rid": "secret-rid"}, [("x-smg-routing-key", 'k"\\')])
    await client.get("/no/such/path/17")
    text = str((await router.metrics()).samples)
    assert "secret-rid" not in text
    assert "no/such" not in text
    gone = fleet.decodes[1]
    assert gone.url in text
    (entry,) = [w for w in (await client.get("/workers")).json()["workers"] if w["url"] == gone.url]
    await client.delete(f"/workers/{entry['id']}")
    for _ in range(100):
        if gone.url not in str((await router.metrics()).samples):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("series of a deleted worker are still there")


async def test_metrics_are_on_the_main_port_too(lab: Lab) -> None:
    _, router, client = await lab.serve()
    own = await client.get("/metrics")
    assert own.status == 200
    assert (own.header("content-type") or "").startswith("text/plain")
    other = Client(router.metrics_port)
    names = {
        line.split("{")[0].split(" ")[0] for line in (await other.get("/metrics")).body.decode().splitlines() if not line.startswith("#")
    }
    other.close()
    assert names == {line.split("{")[0].split(" ")[0] for line in own.body.decode().splitlines() if not line.startswith("#")}


async def test_legs_are_booked_on_the_worker_that_did_it(lab: Lab) -> None:
    fleet, router, client = await lab.serve(
        "--disable-retries", "--disable-circuit-breaker", prefill={"waiting_s": 30.0}, decode={"waiting_s": 30.0}
    )
    fleet.d.script = lambda leg: answer(500, {"detail": "x"})
    await client.generate(**GENERATE)
    await fleet.quiet()
    metrics = await router.metrics()
    assert metrics.sum("r3router_legs_total", worker=fleet.d.url, result="server") == 1
    assert metrics.sum("r3router_legs_total", worker=fleet.p.url, result="server") == 0
    assert metrics.sum("r3router_legs_total", worker=fleet.p.url, result="cancelled") == 1


def series(metrics: Metrics) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(s.name, tuple(sorted(s.labels.items()))) for s in metrics.samples}


async def test_met_1_a_thousand_workers_that_came_and_went_leave_no_series(lab: Lab) -> None:
    fleet = await lab.pd(decodes=4, decode={"dp_size": 8})
    router = await lab.router(Fleet([fleet.p, fleet.d]), "--worker-startup-check-interval", "5")
    client = router.client
    assert (await client.generate(**GENERATE)).status == 200
    await router.zero_check()
    at_start = series(await router.metrics())
    # Most never answer; three do, so that series of ranks and legs come and go too.
    answers = [await client.post("/workers", {"url": engine.url, "worker_type": "decode"}) for engine in fleet.decodes[1:]]
    ids = [got.json()["worker_id"] for got in answers]
    for number in range(1000 - len(ids)):
        body = {"url": f"http://127.1.{number // 250}.{number % 250 + 1}:9", "worker_type": "decode"}
        got = await client.post("/workers", body)
        assert got.status == 202
        ids.append(got.json()["worker_id"])
    assert len(set(ids)) == 1000
    for _ in range(400):
        there = await router.metrics()
        ranks = {(s.labels["worker"], s.labels["rank"]) for s in there.get("r3router_rank_open")}
        if len(ranks) == 1 + 4 * 8:
            break
        await asyncio.sleep(0.05)
    assert len(ranks) == 33
    assert len(there.get("r3router_worker_up")) == 1002
    await asyncio.gather(*(client.generate(**GENERATE) for _ in range(30)))
    assert any(engine.legs for engine in fleet.decodes[1:])
    for worker_id in ids:
        assert (await client.delete(f"/workers/{worker_id}")).status == 202
    for _ in range(400):
        left = series(await router.metrics())
        if left == at_start:
            break
        await asyncio.sleep(0.05)
    assert left == at_start
    assert (await client.generate(**GENERATE)).status == 200
