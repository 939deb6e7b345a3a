"""Starting, draining and stopping."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from scripted.calls import GENERATE, statuses, until
from scripted.client import encode, events
from scripted.lab import Lab


async def test_sigterm_finishes_what_runs_takes_nothing_new_and_exits_with_zero(lab: Lab) -> None:
    fleet, router, client = await lab.serve(decode={"run_s": 1.0, "tokens": 5})
    stream = await client.connect()
    await stream.post("/generate", encode({**GENERATE, "stream": True, "sampling_params": {"max_new_tokens": 5}}))
    plain = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(10)]
    await until(lambda: len(fleet.d.legs) == 11, "all run")
    assert router.process is not None
    router.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    # Not ready at once; whoever is still connected is told, new connections are told or refused.
    try:
        late = await client.generate(**GENERATE)
        assert late.status == 503
        assert late.error()["code"] == "draining"
        assert (await client.get("/readiness")).status == 503
    except ConnectionError:
        pass
    got = await stream.answer()
    assert events(got.body)[-1] == "[DONE]"
    assert statuses(await asyncio.gather(*plain)) == {200: 10}
    await until(lambda: not router.alive(), "it has ended", 20.0)
    assert router.process.returncode == 0
    assert len(fleet.d.legs) == 11
    fleet.check()


async def test_the_grace_period_ends_what_does_not_end_by_itself(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--shutdown-grace-period-secs", "0.5", decode={"run_s": 60.0})
    call = asyncio.create_task(client.generate(**GENERATE))
    await until(lambda: fleet.d.legs and fleet.d.ranks[0].running, "it runs")
    code = await router.stop()
    assert code == 0
    try:
        got = await call
        assert got.status in (502, 503)
    except ConnectionError:
        pass
    await until(lambda: fleet.d.legs[0].ended, "decode's leg is closed or aborted")
    assert fleet.d.legs[0].end == "aborted"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_idle_it_stops_at_once(lab: Lab, how: signal.Signals) -> None:
    _, router, client = await lab.serve()
    idle = await client.connect()
    start = asyncio.get_running_loop().time()
    assert await router.stop(how) == 0
    assert asyncio.get_running_loop().time() - start < 10.0
    idle.close()


async def test_a_queue_that_waits_is_told_when_the_router_drains(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--shutdown-grace-period-secs", "5", prefill={"prefill_s": 0.3}, decode={"max_running": 1})
    calls = [asyncio.create_task(client.generate(**GENERATE)) for _ in range(4)]
    await until(lambda: fleet.d.legs, "the first is dispatched")
    await asyncio.sleep(0.05)
    assert router.process is not None
    router.process.send_signal(signal.SIGTERM)
    for call in calls:
        got = await call
        assert got.status in (200, 503), got.body
        if got.status == 503:
            assert got.error()["code"] == "draining"
    await until(lambda: not router.alive(), "it has ended", 20.0)
    assert router.process.returncode == 0
    fleet.check()


async def test_a_port_in_use_is_an_error_that_names_it(lab: Lab) -> None:
    import subprocess
    import sys

    _, router, _ = await lab.serve()
    command = [sys.executable, "-m", "r3router", "serve", "--host", "127.0.0.1", "--port", str(router.port), "--prometheus-port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = await asyncio.wait_for(process.communicate(), 30.0)
    assert process.returncode not in (0, None)
    assert str(router.port).encode() in out
    assert b"Traceback" not in out
    assert b"panicked" not in out


async def test_one_log_line_per_request_says_where_it_went(lab: Lab) -> None:
    fleet, router, client = await lab.serve("--log-json", prefill={"dp_size": 2}, decode={"dp_size": 2})
    assert (await client.generate(**GENERATE, rid="ep-7::t3")).status == 200
    prefill, decode = fleet.pairs()[0]
    await until(lambda: prefill.rid in router.tail(), "the line is written")
    lines = [json.loads(line) for line in router.tail().splitlines() if line.startswith("{") and prefill.rid in line]
    assert len(lines) == 1
    text = json.dumps(lines[0])
    for part in (str(prefill.room), f"{fleet.p.url}@{prefill.rank}", f"{fleet.d.url}@{decode.rank}", "ok"):
        assert part in text, (part, text)
