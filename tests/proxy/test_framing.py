"""What clients write around their requests: wrong framing gets 400 and says how to mend it, encodings are refused, `Expect` is obeyed, a
closed sending side ends what runs on engines and nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from scripted.calls import GENERATE, ROUTES
from scripted.client import Client, Connection, Response, request_bytes
from scripted.lab import Lab

HEAD = "POST {path} HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n{headers}\r\n\r\n"
BODY = json.dumps(GENERATE).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


async def raw(client: Client, head: str, body: bytes = b"", *, half: bool = False) -> Response:
    connection = await client.connect()
    await connection.send(HEAD.format(path="/generate", headers=head).encode() + body)
    if half:
        connection.writer.write_eof()
    got = await connection.answer()
    connection.close()
    return got


CHUNKS = [
    b"zz\r\n",
    b"-1\r\n",
    b"5\rabc",
    b"fffffffffffffffff\r\n",
    b"5\r\n12345678\r\n0\r\n\r\n",
    b"1 x\r\n",
]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("before", [b"", b"3\r\n{ \n\r\n"])
async def test_a_chunk_that_cannot_be_read_is_the_clients_mistake_and_not_its_end(lab: Lab, chunks: bytes, before: bytes) -> None:
    fleet, router, client = await lab.serve()
    got = await raw(client, "transfer-encoding: chunked", before + chunks)
    assert got.status == 400, got.body
    assert got.error()["code"] == "invalid_request"
    assert "chunks cannot be read" in got.error()["message"]
    assert "in hexadecimal" in got.error()["advice"]
    assert got.header("connection") == "close", "what follows cannot be told from a request"
    assert fleet.posts() == 0
    await router.zero_check()


LENGTHS = ["content-length: -1", "content-length: 5\r\ncontent-length: 6", "content-length: 5x", "content-length: 5, 6", "content-length:"]


@pytest.mark.parametrize("head", LENGTHS)
async def test_a_length_that_is_none_is_said_to_be_the_mistake(lab: Lab, head: str) -> None:
    fleet, _, client = await lab.serve()
    got = await raw(client, head, b"{}")
    assert (got.status, got.error()["code"]) == (400, "invalid_request")
    assert "Content-Length" in got.error()["message"], got.body
    assert got.error()["advice"].startswith("send one Content-Length")
    assert fleet.posts() == 0


WRONG_HEADS = [
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2"),
    (b"GET /health HTTP/1.1\r\nhost: r\r\nbad name: x\r\n\r\n", "NAME: VALUE"),
    (b"GET /health HTTP/1.1\r\nhost: r\r\ntransfer-encoding: gzip\r\n\r\n", "Transfer-Encoding: chunked"),
    (b"GET /a\x7fb HTTP/1.1\r\nhost: r\r\n\r\n", "percent-encode"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "--tls-cert-path"),
]


@pytest.mark.parametrize(("head", "mend"), WRONG_HEADS, ids=[mend for _, mend in WRONG_HEADS])
async def test_a_head_that_cannot_be_read_is_answered_with_its_own_mend(lab: Lab, head: bytes, mend: str) -> None:
    _, _, client = await lab.serve()
    connection = await client.connect()
    await connection.send(head)
    got = await connection.answer()
    assert (got.status, got.error()["code"]) == (400, "invalid_request")
    assert mend in got.error()["advice"], got.body
    connection.close()


@pytest.mark.parametrize("path", [*ROUTES, "/workers", "/v1/embeddings", "/pause_generation"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "x"])
async def test_an_encoded_body_is_refused_before_anybody_reads_it(lab: Lab, path: str, encoding: str) -> None:
    fleet, _, client = await lab.serve()
    packed = gzip.compress(json.dumps(ROUTES.get(path, {})).encode())
    connection = await client.connect()
    got = await connection.call(path, packed, [("content-encoding", encoding)])
    assert (got.status, got.error()["code"]) == (415, "invalid_request"), got.body
    assert "Content-Encoding" in got.error()["message"]
    assert "without Content-Encoding" in got.error()["advice"]
    assert fleet.posts() == 0
    # The connection goes on, and what is not encoded says so in vain.
    good = await connection.call("/generate", BODY, [("content-encoding", "identity")])
    assert good.status == 200
    connection.close()


@pytest.mark.parametrize("expect", ["100-continue", "100-Continue"])
async def test_a_client_that_asks_first_is_told_to_go_on_and_then_answered(lab: Lab, expect: str) -> None:
    _, _, client = await lab.serve()
    connection = await client.connect()
    head = f"content-length: {len(BODY)}\r\nexpect: {expect}"
    await connection.send(HEAD.format(path="/generate", headers=head).encode())
    status, _ = await asyncio.wait_for(connection.head(), 10)
    assert status == 100
    await connection.send(BODY)
    assert (await connection.answer()).status == 200
    # One that may not is told so in place of that.
    refused = HEAD.format(path="/generate", headers=f"content-length: {1 << 40}\r\nexpect: {expect}")
    await connection.send(refused.encode())
    assert (await connection.answer()).status == 413
    connection.close()


QUICK = [
    ("GET", "/health", b""),
    ("GET", "/workers", b""),
    ("GET", "/v1/models", b""),
    ("GET", "/metrics", b""),
    ("POST", "/workers", b'{"url": "ftp://x", "worker_type": "decode"}'),
    ("POST", "/pause_generation", b"{}"),
    ("POST", "/continue_generation", b"{}"),
    ("POST", "/flush_cache", b""),
    ("POST", "/abort_request", b'{"rid": "none"}'),
]


@pytest.mark.parametrize(("method", "path", "body"), QUICK, ids=[f"{m} {p}" for m, p, _ in QUICK])
@pytest.mark.parametrize("together", [True, False])
async def test_a_client_that_only_closes_its_sending_side_is_answered(
    lab: Lab, method: str, path: str, body: bytes, together: bool
) -> None:
    _, _, client = await lab.serve()
    want = await client.request(method, path, body)
    connection = await client.connect()
    await connection.send(request_bytes(method, path, body))
    if not together:
        await asyncio.sleep(0.01)
    connection.writer.write_eof()
    got = await asyncio.wait_for(connection.answer(), 20)
    assert got.status == want.status
    assert await asyncio.wait_for(connection.reader.read(), 20) == b"", "the connection is not closed after the answer"
    connection.close()


async def test_a_body_that_ends_too_soon_is_not_waited_for(lab: Lab) -> None:
    _, _, client = await lab.serve()
    for head, body in (("content-length: 100", b"{}"), ("transfer-encoding: chunked", b"2\r\n{}\r\n")):
        connection = await client.connect()
        await connection.send(HEAD.format(path="/workers", headers=head).encode() + body)
        connection.writer.write_eof()
        # However it is told: it is over at once, and not with the time limit of bodies.
        await asyncio.wait_for(connection.reader.read(), 20)
        connection.close()


@pytest.mark.parametrize("path", ROUTES)
async def test_where_engines_work_a_closed_sending_side_is_a_client_that_has_left_and_it_is_told(lab: Lab, path: str) -> None:
    fleet, router, client = await lab.serve(decode={"run_s": 30.0})
    connection: Connection = await client.connect()
    await connection.send(request_bytes("POST", path, json.dumps(ROUTES[path]).encode()))
    for _ in range(500):
        if fleet.d.legs:
            break
        await asyncio.sleep(0.01)
    connection.writer.write_eof()
    got = await asyncio.wait_for(connection.answer(), 20)
    assert (got.status, got.error()["code"]) == (499, "client_gone")
    assert "keep the whole connection open" in got.error()["advice"]
    await router.zero_check()
    connection.close()
