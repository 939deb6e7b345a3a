"""The pages for trainers and operators: their code runs, their numbers are the formulas'."""

from __future__ import annotations

import ast
import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from r3router.r3.format import DTYPES, narrow_dtype

from .router import ScriptedRouter, drip, envelope, reply, text
from .rows import LAYERS, TOP_K, expert_rows

PAGES = Path(__file__).parents[2] / "python"
BLOCKS = re.findall(r"```python\n(.*?)```", (PAGES / "R3.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("at", range(len(BLOCKS)))
async def test_the_trainers_code_runs(router: ScriptedRouter, at: int) -> None:
    stream = expert_rows(1, 100)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = len(body["input_ids"])
        rows = stream[: prompt + 3]
        meta: dict[str, Any] = {"routed_experts": text(rows)}
        if request.headers.get("x-r3-transport") == "ref":
            segments = [router.put("a" * 32, rows[:prompt]), router.put("b" * 32, rows[prompt:], pos=prompt)]
            meta = {"output_store_ref": envelope(segments, rows.shape)}
        raw = orjson.dumps(reply(prompt, 4, **meta))
        if body.get("stream"):
            return await drip(b"data: " + raw + b"\n\ndata: [DONE]\n\n", 100, "text/event-stream")(request, body)
        return web.Response(body=raw, content_type="application/json")

    router.script = [answer]
    names: dict[str, Any] = {"ROUTER": router.url, "LAYERS": LAYERS, "TOP_K": TOP_K}
    if "async with" in BLOCKS[at]:
        source = f"async def run():\n{textwrap.indent(BLOCKS[at], '    ')}\n    return locals()"
        exec(compile(ast.parse(source), "R3.md", "exec"), names)  # noqa: S102 - our own page
        found = await names["run"]()
    else:
        await asyncio.to_thread(exec, compile(BLOCKS[at], "R3.md", "exec"), names)
        found = names
    checked = 0
    for name, expected in (("rows", stream[:8]), ("int32", stream[:8]), ("narrow", stream[:8]), ("mine", stream[2:6])):
        if name in found:
            assert np.array_equal(found[name], expected), name
            checked += 1
    if "last" in found:
        assert np.array_equal(found["last"].routed_experts, stream[:6])
        checked += 1
    assert checked and not router.objects


def test_the_operators_table_is_the_formulas() -> None:
    table = (PAGES / "R3-OPERATING.md").read_text().split("<!-- sizes -->")[1].split("<!-- /sizes -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert len(rows) == 9
    for name, layers, top_k, experts, small, large, arena in rows:
        row = int(layers) * int(top_k) * DTYPES[narrow_dtype(int(experts))]
        expected = [f"{(tokens - 1) * row / 1e6:.1f} MB" for tokens in (32_000, 128_000)]
        assert [small, large] == expected, name
        assert arena == f"{31_999 * row * 256 * 1.25 / 2**30:.1f} GiB", name


def test_the_operators_variables_are_the_plug_ins() -> None:
    page = set(re.findall(r"^\| `(R3ROUTER_\w+)`", (PAGES / "R3-OPERATING.md").read_text(), re.MULTILINE))
    code = (PAGES / "r3router" / "plugin" / "settings.py").read_text()
    assert page == set(re.findall(r'"(R3ROUTER_\w+)"', code))
