"""What bounds a client before anybody knows who it is: headers, the time to send a request, connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time

import pytest

from headstart.server.connection import ConnectionLimits
from tests.server.conftest import Start
from tests.server.harness import Running, events

LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
KIB = 1024


def answer_to(client: socket.socket, *pieces: bytes) -> bytes:
    """Everything that comes back until the server closes; it may close while we still send."""
    with contextlib.suppress(OSError):
        for piece in pieces:
            client.sendall(piece)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            data += piece
    return data


def request(head: bytes = b"", *, close: bool = True) -> bytes:
    closing = b"connection: close\r\n" if close else b""
    return LINE + head + closing + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


def responses_counted(running: Running) -> dict[tuple[str, str], int]:
    """HTTP answers by route and status, without those to /metrics itself."""
    pattern = re.compile(r'^headstart_http_responses_total\{route="(.*)",status="(.*)"\} (\d+)$', re.MULTILINE)
    found = pattern.findall(running.client.get("/metrics").text)
    return {(route, status): int(count) for route, status, count in found if route != "/metrics"}


def error_code(data: bytes) -> str:
    head, body = data.split(b"\r\n\r\n", 1)
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    code: str = json.loads(body)["error"]["code"]
    return code


@pytest.mark.parametrize(
    "head",
    [
        b"x-large: " + b"a" * 70 * KIB + b"\r\n",
        b"".join(b"x-%d: %s\r\n" % (index, b"a" * 100) for index in range(700)),
        b"cookie: " + b"a" * 40 * KIB + b"\r\ncookie: " + b"a" * 40 * KIB + b"\r\n",
    ],
    ids=["one", "many", "two"],
)
def test_headers_above_the_limit(shared: Running, head: bytes) -> None:
    data = answer_to(shared.connect(), request(head))
    assert data.startswith(b"HTTP/1.1 431 ")
    assert error_code(data) == "headers_too_large"


def test_headers_below_the_limit(shared: Running) -> None:
    assert answer_to(shared.connect(), request(b"x-large: " + b"a" * 60 * KIB + b"\r\n")).startswith(b"HTTP/1.1 200 ")


def test_an_address_counts_as_header(shared: Running) -> None:
    data = answer_to(shared.connect(), b"GET /" + b"a" * 70 * KIB + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 431 ")


def test_headers_without_end_are_not_kept(shared: Running) -> None:
    with shared.connect() as client:
        client.settimeout(10)
        data = answer_to(client, LINE + b"x-endless: ", *[b"a" * 64 * KIB] * 64)
    assert not data or data.startswith(b"HTTP/1.1 431 ")
    assert shared.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "rest",
    [b"0\r\n" + b"x-trailer: " + b"a" * 700 * KIB, b"1;" + b"a" * 700 * KIB],
    ids=["trailer", "chunk extension"],
)
def test_what_surrounds_chunks_counts_too(shared: Running, rest: bytes) -> None:
    with shared.connect() as client:
        data = answer_to(client, LINE + b"transfer-encoding: chunked\r\n\r\n", rest)
    assert data.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"\r\n",
        b"POST",
        LINE,
        LINE + b"content-length: 50\r\n\r\n{",
        LINE + b"transfer-encoding: chunked\r\n\r\n5\r\n",
    ],
    ids=["nothing", "an empty line", "a word", "headers", "a body", "a chunk"],
)
def test_a_request_that_does_not_come_to_its_end(start: Start, begun: bytes) -> None:
    running, engine = start(limits=ConnectionLimits(read_seconds=0.2))
    data = answer_to(running.connect(), begun)
    assert data.startswith(b"HTTP/1.1 408 ")
    assert error_code(data) == "request_timeout"
    assert not engine.requests

    route = "/v1/completions" if b"\r\n\r\n" in begun else "other"
    assert responses_counted(running) == {(route, "408"): 1}


@pytest.mark.parametrize(
    ("garbage", "route"),
    [
        (b"\x00\x01\x02\x03\r\n\r\n", "other"),
        (b"GET / HTTP/9.9\r\n\r\n", "other"),
        (b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n", "other"),
        (LINE + b"content-length: x\r\n\r\n", "other"),
        (LINE + b"transfer-encoding: chunked\r\n\r\nZZZ\r\n", "/v1/completions"),
    ],
    ids=["bytes", "version", "address", "length", "chunk"],
)
def test_what_is_no_http_is_told_so_in_json_and_counted(start: Start, garbage: bytes, route: str) -> None:
    running, _ = start()
    data = answer_to(running.connect(), garbage)
    assert data.startswith(b"HTTP/1.1 400 ")
    assert error_code(data) == "invalid_http"
    assert responses_counted(running) == {(route, "400"): 1}


def test_headers_above_the_limit_are_counted(start: Start) -> None:
    running, _ = start()
    answer_to(running.connect(), request(b"x-large: " + b"a" * 70 * KIB + b"\r\n"))
    assert responses_counted(running) == {("other", "431"): 1}


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_knows_no_chunks_gets_none(shared: Running, version: bytes, stream: bool) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 8, "stream": stream}).encode()
    line = LINE.replace(b"HTTP/1.1", b"HTTP/" + version)
    data = answer_to(shared.connect(), line + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    head, answer = data.split(b"\r\n\r\n", 1)
    assert b"connection: close" in head
    assert (b"transfer-encoding: chunked" in head) == (stream and version == b"1.1")
    if version == b"1.0" and stream:
        assert events(answer.decode())[-1] == "[DONE]"
    elif not stream:
        assert json.loads(answer)["choices"][0]["text"]


def test_a_request_that_drips_in(start: Start) -> None:
    """Bytes that keep coming do not move the limit."""
    running, _ = start(limits=ConnectionLimits(read_seconds=0.3))
    with running.connect() as client:
        began = time.monotonic()
        client.settimeout(0.02)
        data = b""
        client.sendall(LINE)
        while not data and time.monotonic() < began + 10:
            with contextlib.suppress(TimeoutError):
                data = client.recv(65536)
            if not data:
                client.sendall(b"x-drip: a\r\n")
    assert data.startswith(b"HTTP/1.1 408 ")


def test_the_limit_is_on_the_request_not_on_its_answer(start: Start) -> None:
    running, engine = start(limits=ConnectionLimits(read_seconds=0.1))
    engine.gate = running.call(asyncio.Event)
    with running.connect() as client:
        client.sendall(request(close=False) + request())  # the second waits for the first
        engine.wait_until(lambda: len(engine.running) == 1)
        running.loop.call_soon_threadsafe(running.loop.call_later, 0.5, engine.gate.set)
        data = answer_to(client)
    assert data.count(b"HTTP/1.1 200 ") == 2
    assert b"HTTP/1.1 408" not in data


def test_a_connection_may_rest_between_requests(start: Start) -> None:
    running, _ = start(limits=ConnectionLimits(read_seconds=0.1))
    with running.connect() as client:
        client.sendall(request(close=False))
        data = b""
        while b"text_completion" not in data:
            data += client.recv(65536)
        client.settimeout(0.4)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(10)
        assert answer_to(client, request()).startswith(b"HTTP/1.1 200 ")


def test_connections_above_the_limit(start: Start) -> None:
    running, _ = start(limits=ConnectionLimits(max_connections=2))
    with running.connect() as first, running.connect() as second:
        for client in (first, second):
            client.sendall(request(close=False))
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        data = answer_to(running.connect())
        assert data.startswith(b"HTTP/1.1 503 ")
        assert error_code(data) == "too_many_connections"
        assert b"retry-after: 1" in data
        first.sendall(request(close=False))
        assert first.recv(65536).startswith(b"HTTP/1.1 200 "), "the others are not touched"
    deadline = time.monotonic() + 10
    while not (data := answer_to(running.connect(), request())).startswith(b"HTTP/1.1 200 "):
        assert time.monotonic() < deadline, data
