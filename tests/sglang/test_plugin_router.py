"""Engines with the plug-in behind r3router: the checks of `equality.py` for clients that ask for references and for clients that do not,
and with one engine of the pair that has no plug-in."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest

from . import fleet
from .compare import plugin
from .environment import PREFILL_SENDS_ROWS
from .equality import Equality, generate
from .fleet import Front, Trio, call, events, post
from .plugin_pair import LAYERS, TOP_K, metric
from .stages import eventually, free, idle

SHAPE = ("--r3-layers", str(LAYERS), "--r3-top-k", str(TOP_K), "--r3-experts", "8")
ASKED = {"x-r3-transport": "ref"}
TEXT_BYTES = 4 * LAYERS * TOP_K * 4 // 3
"""Base64 of one row."""


class ByReference(Front):
    """Asks for references, and puts the rows that they name where they would be in-line. Every reply has to be small."""

    def text(self, reference: dict[str, Any]) -> str:
        """Base64 of the int32 rows that a reference names, which is let go."""
        rows = b""
        for segment in reference["handle"]["segments"]:
            at = re.sub("^r3://([^/]+)/", r"http://\1/r3/", segment["uri"])  # an agent's, or the router's own
            # The address names a part where decode's object begins with rows of the prompt that it never computed.
            status, raw = call(f"{at}{'&' if '?' in at else '?'}dtype=int32")
            assert status == 200 and len(raw) == segment["rows"] * LAYERS * TOP_K * 4, (status, raw[:300])
            rows += raw
            assert call(at.partition("?")[0], method="DELETE")[0] in (200, 204)
        shape = reference["fields"]["routed_experts"]["shape"]
        assert shape == [len(rows) // (LAYERS * TOP_K * 4), LAYERS, TOP_K]
        return base64.b64encode(rows).decode()

    def resolved(self, value: Any) -> Any:
        """A reply with rows in place of references."""
        if isinstance(value, list):
            return [self.resolved(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        assert not value.get("routed_experts"), "rows in-line beside a client that asked for references"
        found = {name: self.resolved(inner) for name, inner in value.items() if name != "output_store_ref"}
        return found | ({"routed_experts": self.text(value["output_store_ref"])} if "output_store_ref" in value else {})

    def post(self, path: str, body: Any) -> Any:
        return self.resolved(post(self.url + path, body, headers=ASKED))

    def events(self, path: str, body: Any) -> list[Any]:
        return [self.resolved(event) for event in events(self.url + path, body, headers=ASKED)]


@pytest.fixture(autouse=True)
def with_rows() -> Iterator[None]:
    """R3 is asked of every release: the plug-in collects it where prefill does not."""
    with plugin():
        yield


class TestByReference(Equality):
    """Both engines have the plug-in, and the client asks for references."""

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, pair: Trio) -> Iterator[Front]:
        with fleet.router([pair.prefill], [pair.decode], *SHAPE, name="router-plugin-ref") as router:
            yield ByReference(pair.unified, router)

    def test_no_row_goes_through_engines_replies_or_the_router(self, pair: Trio, front: Front) -> None:
        before = {engine.url: metric(engine, "by_reference_total") for engine in (pair.prefill, pair.decode)}
        status, raw = call(f"{front.url}/generate", generate(1500, 8), headers=ASKED)
        assert status == 200 and len(raw) < 4096 < 1500 * TEXT_BYTES, raw[:500]
        for engine in (pair.prefill, pair.decode):
            eventually(lambda engine=engine: metric(engine, "by_reference_total") > before[engine.url], "the counters to be told")
        free(pair.decode)
        idle(pair.prefill)


class TestInline(Equality):
    """Both engines have the plug-in, and the client knows nothing of references: the router reads the rows and puts them in."""

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, pair: Trio) -> Iterator[Front]:
        with fleet.router([pair.prefill], [pair.decode], *SHAPE, name="router-plugin-inline") as router:
            yield Front(pair.unified, router)


class TestPrefillAlone(Equality):
    """A decode engine without the plug-in beside a prefill engine with it."""

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, trio: Trio, pair: Trio) -> Iterator[Front]:
        with fleet.router([pair.prefill], [trio.decode], *SHAPE, name="router-plugin-prefill") as router:
            yield Front(pair.unified, router)


@pytest.mark.skipif(not PREFILL_SENDS_ROWS, reason="prefill of this release sends no R3 without the plug-in")
class TestDecodeAloneByReference(Equality):
    """A prefill engine without the plug-in beside a decode engine with it, and a client that asks for references."""

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, trio: Trio, pair: Trio) -> Iterator[Front]:
        with fleet.router([trio.prefill], [pair.decode], *SHAPE, name="router-plugin-decode") as router:
            yield ByReference(pair.unified, router)
