"""Clients that stop in the middle of a request, or whose request is refused before it is here: an answer in time that says why."""

from __future__ import annotations

import asyncio
import json

import pytest

from scripted.calls import GENERATE
from scripted.client import Closed, Connection, request_bytes
from scripted.lab import Lab

HEAD = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


async def ended(connection: Connection) -> bool:
    """Whether the router has closed the connection."""
    try:
        return await asyncio.wait_for(connection.reader.read(1), 10.0) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/workers", "/abort_request", "/flush_cache"])
async def test_a_length_over_the_limit_is_refused_before_any_of_the_body(lab: Lab, path: str) -> None:
    fleet, _, client = await lab.serve("--max-payload-size", "2000", "--body-read-timeout-secs", "60")
    connection = await client.connect()
    await connection.send(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n".encode())
    # Not one byte of the body is sent before the answer is here.
    got = await asyncio.wait_for(connection.answer(), 5.0)
    error = got.error()
    assert (got.status, error["code"]) == (413, "body_too_large")
    assert (error["limit"], error["measured"]) == (2000, 5000)
    # A client that sends its body after all keeps its connection.
    await connection.send(b"z" * 5000)
    assert (await connection.call("/generate", json.dumps(GENERATE).encode())).status == 200
    connection.close()
    assert fleet.posts() == 2


async def test_a_request_that_is_refused_by_its_head_is_answered_before_its_body(lab: Lab) -> None:
    fleet, _, client = await lab.serve("--api-key", "secret", "--body-read-timeout-secs", "60")
    for path in ("/generate", "/workers", "/v1/loads"):
        connection = await client.connect()
        await connection.send(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n".encode())
        got = await asyncio.wait_for(connection.answer(), 5.0)
        assert (got.status, got.error()["code"]) == (401, "unauthorized")
        await connection.send(b"z" * 5000 + request_bytes("GET", "/liveness"))
        assert (await connection.answer()).status == 200
        connection.close()
    assert fleet.posts() == 0


@pytest.mark.parametrize("path", ["/generate", "/workers"])
async def test_a_body_that_stops_gets_408_with_limit_and_what_came(lab: Lab, path: str) -> None:
    fleet, router, client = await lab.serve("--body-read-timeout-secs", "300ms")
    for sent, head in (
        (b"", b"content-length: 50\r\n\r\n"),
        (b'{"text":', b"content-length: 50\r\n\r\n"),
        (b'8\r\n{"text":\r\n', b"transfer-encoding: chunked\r\n\r\n"),
    ):
        connection = await client.connect()
        await connection.send(HEAD.replace(b"/generate", path.encode()) + head + sent)
        got = await asyncio.wait_for(connection.answer(), 10.0)
        error = got.error()
        assert (got.status, error["code"], error["limit"]) == (408, "read_timeout", 0.3)
        came = "8 bytes" if sent else "0 bytes"
        assert came + (" of 50" if b"length" in head else "") in error["message"], error
        assert "--body-read-timeout-secs" in error["advice"]
        assert got.header("connection") == "close"
        assert await ended(connection)
        connection.close()
    assert fleet.posts() == 0
    await router.zero_check()


async def test_a_body_that_drips_ends_with_the_requests_own_limit(lab: Lab) -> None:
    _, router, client = await lab.serve("--body-read-timeout-secs", "60", "--request-timeout-secs", "500ms")
    connection = await client.connect()
    await connection.send(HEAD + b"content-length: 5000\r\n\r\n")

    async def drip() -> None:
        while True:
            await connection.send(b" ")
            await asyncio.sleep(0.05)

    task = asyncio.create_task(drip())
    got = await asyncio.wait_for(connection.answer(), 10.0)
    task.cancel()
    assert got.status == 408
    assert got.error()["limit"] == 0.5
    assert "--request-timeout-secs" in got.error()["advice"]
    connection.close()
    await router.zero_check()


async def test_half_a_head_gets_408_and_an_idle_connection_is_closed_without_a_word(lab: Lab) -> None:
    _, router, client = await lab.serve("--header-read-timeout-secs", "300ms", "--idle-connection-timeout-secs", "1s")
    half, idle, used = await client.connect(), await client.connect(), await client.connect()
    await half.send(HEAD)
    assert (await used.call("/generate", json.dumps(GENERATE).encode())).status == 200
    got = await asyncio.wait_for(half.answer(), 10.0)
    error = got.error()
    assert (got.status, error["code"], error["limit"]) == (408, "read_timeout", 0.3)
    assert f"{len(HEAD)} bytes" in error["message"]
    assert await ended(half)
    # After a request, half a head counts from its own first byte.
    await used.send(HEAD)
    assert (await asyncio.wait_for(used.answer(), 10.0)).status == 408
    with pytest.raises(Closed, match="closed after b''"):
        await asyncio.wait_for(idle.head(), 10.0)
    for connection in (half, idle, used):
        connection.close()
    await router.zero_check()


async def test_a_request_in_work_has_no_idle_limit(lab: Lab) -> None:
    _, _, client = await lab.serve("--header-read-timeout-secs", "100ms", "--idle-connection-timeout-secs", "100ms", decode={"run_s": 1.0})
    assert (await client.generate(**GENERATE)).status == 200


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(500)) + b"\r\n", 431),
    ],
)
async def test_a_head_that_is_none_gets_a_json_error(lab: Lab, raw: bytes, status: int) -> None:
    _, _, client = await lab.serve()
    connection = await client.connect()
    assert (await connection.call("/generate", json.dumps(GENERATE).encode())).status == 200
    await connection.send(raw)
    got = await asyncio.wait_for(connection.answer(), 10.0)
    error = got.error()
    assert (got.status, error["code"], error["status"]) == (status, "invalid_request", status)
    assert error["advice"]
    assert await ended(connection)
    connection.close()
