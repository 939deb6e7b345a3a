"""The scanner over random bodies and random pieces says what a JSON parser and a base64 decoder say."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3router.r3 import FormatError
from r3router.r3.inline import Lines, Scanner

KEYS = ("routed_experts", "indexer_topk")
texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(['"routed_experts":"AAAA"', "routed_experts", '\\"routed_experts\\": \\"', '"', "\\", '{"indexer_topk" : "']),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), texts)
payloads = st.binary(max_size=60)
trees: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(texts.filter(lambda t: t not in KEYS)), inner, max_size=4),
        st.tuples(st.sampled_from(KEYS), payloads).map(lambda p: {p[0]: p[1]}),
        st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), st.integers())).map(lambda p: {p[0]: p[1]}),
    ),
    max_leaves=12,
)


def written(tree: Any) -> Any:
    """The tree with payloads as base64."""
    if isinstance(tree, bytes):
        return base64.b64encode(tree).decode()
    if isinstance(tree, dict):
        return {key: written(value) for key, value in tree.items()}
    return [written(value) for value in tree] if isinstance(tree, list) else tree


def resolved(tree: Any, scanner: Scanner) -> Any:
    """What was scanned, with payloads in the places of their names."""
    if isinstance(tree, dict):
        return {
            key: bytes(scanner.payloads[value]) if key in KEYS and isinstance(value, str) else resolved(value, scanner)
            for key, value in tree.items()
        }
    return [resolved(value, scanner) for value in tree] if isinstance(tree, list) else tree


@settings(max_examples=400, deadline=None)
@given(trees, st.sampled_from([None, 1]), st.sampled_from([(",", ":"), (", ", ": "), (" ,", "  :\n ")]), st.randoms(use_true_random=False))
def test_any_body_in_any_pieces_is_read_as_a_parser_reads_it(tree: Any, indent: int | None, separators: tuple[str, str], draw: Any) -> None:
    raw = json.dumps(written(tree), indent=indent, separators=separators, ensure_ascii=draw.random() < 0.5).encode()
    scanner = Scanner()
    out = b""
    at = 0
    while at < len(raw):
        step = draw.choice((1, 1, 2, 3, 7, 40, 1000))
        out += scanner.feed(raw[at : at + step])
        at += step
    out += scanner.finish()
    assert resolved(json.loads(out), scanner) == tree


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_body_that_ends_inside_a_payload_is_told(cut: int) -> None:
    raw = b'{"meta_info":{"routed_experts":"' + base64.b64encode(bytes(30))
    scanner = Scanner()
    scanner.feed(raw[:-cut])
    if len(raw) - cut < 32:
        scanner.finish()
        return
    with pytest.raises(FormatError, match="ended inside"):
        scanner.finish()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b and b"\r" not in b and not b.startswith(b" ")), max_size=8),
    st.integers(1, 9),
)
def test_events_come_out_as_they_were_sent_in_any_pieces(events: list[bytes], step: int) -> None:
    raw = b"".join(b"data: " + event + b"\n\n" for event in events)
    lines = Lines()
    got = [event for at in range(0, len(raw), step) for event in lines.feed(raw[at : at + step])]
    assert got == events
