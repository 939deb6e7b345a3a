"""The status page in a real browser: it shows every rank, asks nobody but the router, drains, and never takes text for markup."""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import pytest

from scripted import browser
from scripted.calls import GENERATE
from scripted.lab import Lab
from scripted.router import Router

BROWSER = browser.found()
REQUIRED = "TEST_BROWSER_REQUIRED" in os.environ
pytestmark = pytest.mark.skipif(BROWSER is None and not REQUIRED, reason="no Chromium here: `make test-page` gets one")

# Cells of a column, top to bottom, by its heading.
CELLS = """(() => {{
  const at = [...document.querySelectorAll('#head th')].findIndex(th => th.textContent.startsWith({0}));
  return [...document.querySelectorAll('#body tr')].map(tr => tr.children[at].textContent);
}})()"""


def cells(heading: str) -> str:
    return CELLS.format(json.dumps(heading))


def address(router: Router) -> str:
    return f"http://127.0.0.1:{router.admin_port}/"


async def test_it_shows_every_rank_and_asks_nobody_but_the_router(lab: Lab) -> None:
    shape = {"dp_size": 4, "max_running": 64, "mamba_slots": 96, "kv_pool": 5_130_000}
    fleet, router, client = await lab.serve("--poll-interval-ms", "50", prefill={**shape, "prefill_s": 0.2}, decode={**shape, "run_s": 1.5})
    random.seed(1)

    async def rollout() -> None:
        for _ in range(12):
            await client.generate(input_ids=[random.randrange(1000) for _ in range(500)], sampling_params={"max_new_tokens": 3})

    load = [asyncio.create_task(rollout()) for _ in range(40)]
    assert BROWSER is not None
    async with browser.page(BROWSER) as page:
        await page.size(1440, 900)
        await page.open(address(router))
        await page.until("document.querySelectorAll('#body tr').length === 8", "eight ranks are shown")
        names = await page.run(cells("Rank"))
        assert sorted(names) == sorted(f"{e.url.removeprefix('http://')}@{rank}" for e in fleet.engines for rank in range(4))
        await page.until(f"{cells('Running')}.some(n => Number(n) > 2)", "running requests are shown")
        await page.until(f"{cells('KV')}.every(n => n.endsWith(' %'))", "used parts are shown")
        for _ in range(4):
            await asyncio.sleep(1.0)
        # Four plots with lines that go somewhere.
        paths = await page.run("[...document.querySelectorAll('#plots path')].map(p => p.getAttribute('d').length)")
        assert len(paths) == 8
        assert all(length > 20 for length in paths), paths
        assert await page.run("Number(document.querySelector('#live').textContent)") > 10
        # Sorted by what a heading says, both ways.
        click = "[...document.querySelectorAll('#head button')].find(b => b.textContent.startsWith('Role')).click()"
        await page.run(click)
        await page.until(f"{cells('Role')}[0] === 'decode'", "decode first")
        await page.run(click)
        await page.until(f"{cells('Role')}[0] === 'prefill'", "prefill first")
        await page.run("(i => { i.value = 'decode open'; i.oninput(); })(document.querySelector('#filter'))")
        await page.until("document.querySelector('#shown').textContent === '4 of 8'", "the filter holds")
        await page.run("(i => { i.value = ''; i.oninput(); })(document.querySelector('#filter'))")
        browser.keep(await page.picture(), "status-page.png")
        assert page.complaints == []
        own = address(router)
        assert page.requests
        assert all(url.startswith((own, "data:")) for url in page.requests), page.requests
        assert page.requests.count(own) == 1, "one file"
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)


async def test_a_rank_is_drained_and_taken_back_by_its_button(lab: Lab) -> None:
    fleet, router, client = await lab.serve(decode={"dp_size": 2})
    assert BROWSER is not None
    async with browser.page(BROWSER) as page:
        await page.open(address(router))
        await page.until("document.querySelectorAll('#body tr').length === 3", "three ranks are shown")
        await page.run("window.confirm = () => true")
        name = f"{fleet.d.url.removeprefix('http://')}@1"
        button = f"document.querySelector('[aria-label=\"{{}} {name}\"]')"
        await page.run(button.format("drain") + ".click()")
        await page.until("!!" + button.format("undrain"), "the rank is drained")
        before = len(fleet.legs("decode"))
        await asyncio.gather(*(client.generate(**GENERATE) for _ in range(4)))
        assert {leg.rank for leg in fleet.legs("decode")[before:]} == {0}
        await page.run(button.format("undrain") + ".click()")
        await page.until("!!" + button.format("drain"), "it is back")
        assert page.complaints == []


async def test_with_a_key_it_asks_for_it_and_text_from_outside_is_no_markup(lab: Lab) -> None:
    fleet = await lab.pd()
    router = await lab.router(fleet, "--admin-api-key", "k-admin")
    evil = '<img src=x onerror="document.title=1">'
    fleet.d.edit_info = lambda info: {**info, "model_path": evil, "version": "0.5.23"}
    fleet.p.edit_info = lambda info: {**info, "model_path": "m", "version": evil}
    for engine in fleet.engines:
        engine.server.die()
        await asyncio.sleep(0.2)
        await engine.server.listen()

    async def findings() -> list[Any]:
        got = await router.client.__class__(router.admin_port).request(
            "GET", "/admin/findings", b"", [("authorization", "Bearer k-admin"), ("host", "127.0.0.1")]
        )
        return list(got.json()["findings"])

    for _ in range(200):
        if any("<img" in f["what"] for f in await findings()):
            break
        await asyncio.sleep(0.05)
    assert any("<img" in f["what"] for f in await findings())
    assert BROWSER is not None
    async with browser.page(BROWSER) as page:
        await page.open(address(router))
        await page.until("document.querySelector('#login')?.hidden === false", "it asks for the key")
        assert await page.run("document.querySelectorAll('#body tr').length") == 0
        await page.run("document.querySelector('#key').value = 'k-admin'; document.querySelector('#login button').click()")
        await page.until("document.querySelectorAll('#body tr').length === 2", "the ranks are shown")
        await page.until("document.querySelector('#findings').textContent.includes('<img')", "the finding is shown as text")
        assert await page.run("document.querySelectorAll('img').length") == 0
        assert await page.run("document.title") == "r3router"
        assert all("favicon" not in url and "/x" not in url for url in page.requests)
        # Refusals before the key was given are in the browser's own log.
        assert all("401" in text for text in page.complaints), page.complaints


async def test_a_router_that_ends_is_said_and_the_last_table_stays(lab: Lab) -> None:
    _, router, _ = await lab.serve()
    assert BROWSER is not None
    async with browser.page(BROWSER) as page:
        await page.open(address(router))
        await page.until("document.querySelectorAll('#body tr').length === 2", "two ranks are shown")
        assert await router.stop() == 0
        await page.until("document.querySelector('#problem').textContent === 'The router does not answer.'", "it says so")
        assert await page.run("document.querySelectorAll('#body tr').length") == 2
