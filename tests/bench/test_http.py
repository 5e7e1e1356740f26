"""The HTTP client against real sockets: framing, kept connections, broken servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from headstart.bench.http import HttpClient, Origin, TransferError, encode_request
from headstart.bench.options import BenchError


class Kept:
    def __init__(self) -> None:
        self.sent: list[float] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.times: list[float] = []

    def on_sent(self, now: float) -> None:
        self.sent.append(now)

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None:
        self.status, self.headers = status, headers
        self.times.append(now)

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data
        self.times.append(now)


Answer = Callable[[int], tuple[bytes, bool]]  # number of the request on this server -> bytes, close after them


@asynccontextmanager
async def raw_server(answer: Answer) -> AsyncIterator[tuple[HttpClient, list[int]]]:
    """Answers each request with given bytes. The list counts connections."""
    connections: list[int] = []
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        connections.append(1)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                data, close = answer(requests)
                requests += 1
                writer.write(data)
                await writer.drain()
                if close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(Origin.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), connect_timeout=5)
    try:
        yield client, connections
    finally:
        client.close()
        server.close()
        await server.wait_closed()


async def get(client: HttpClient) -> Kept:
    kept = Kept()
    await client.exchange(encode_request(client.origin, "GET", "/x", b""), kept)
    return kept


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\nX-A: 2\r\n\r\n2\r\nhi\r\n3\r\n yo\r\n0\r\n\r\n"


async def test_a_connection_is_used_again() -> None:
    async with raw_server(lambda n: (PLAIN, False)) as (client, connections):
        assert [(await get(client)).body for _ in range(3)] == [b"hi"] * 3
        assert len(connections) == 1


async def test_chunked_bodies_and_repeated_headers() -> None:
    async with raw_server(lambda n: (CHUNKED, False)) as (client, _):
        kept = await get(client)
    assert (kept.status, kept.body, kept.headers["x-a"]) == (200, b"hi yo", "1, 2")
    assert kept.sent[0] <= kept.times[0] <= kept.times[-1]


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with raw_server(lambda n: (b"HTTP/1.1 200 OK\r\n\r\nall of it", True)) as (client, connections):
        assert (await get(client)).body == b"all of it"
        assert (await get(client)).body == b"all of it"
        assert len(connections) == 2


async def test_interim_answers_are_skipped() -> None:
    async with raw_server(lambda n: (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, False)) as (client, _):
        kept = await get(client)
        assert (kept.status, kept.body) == (200, b"hi")


async def test_a_kept_connection_that_the_server_closed_is_replaced_once() -> None:
    async with raw_server(lambda n: (b"" if n == 1 else PLAIN, n == 1)) as (client, connections):
        await get(client)
        kept = await get(client)
        assert kept.body == b"hi"
        assert len(kept.sent) == 2
        assert len(connections) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhi", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", "closed the connection"),
        (b"", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "not valid HTTP"),
    ],
)
async def test_a_broken_answer_is_an_error(data: bytes, message: str) -> None:
    async with raw_server(lambda n: (data, True)) as (client, _):
        with pytest.raises(TransferError, match=message):
            await get(client)


async def test_nobody_listens() -> None:
    async with raw_server(lambda n: (PLAIN, False)) as (client, _):
        pass
    with pytest.raises(TransferError, match="no connection"):
        await get(client)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("http", "127.0.0.1", 8000, "")),
        ("http://127.0.0.1:8000/v1/", ("http", "127.0.0.1", 8000, "")),
        ("localhost:1", ("http", "localhost", 1, "")),
        ("https://host/llm/v1", ("https", "host", 443, "/llm")),
        ("http://[::1]:9", ("http", "::1", 9, "")),
    ],
)
def test_addresses(url: str, expected: tuple[str, str, int, str]) -> None:
    origin = Origin.parse(url)
    assert (origin.scheme, origin.host, origin.port, origin.prefix) == expected
    assert Origin.parse(origin.url) == origin


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="for example"):
        Origin.parse(url)


def test_a_request_names_the_prefix_the_length_and_its_headers() -> None:
    head, _, body = encode_request(Origin.parse("http://h:1/p"), "POST", "/v1/x", b"{}", [("A", "b")]).partition(
        b"\r\n\r\n"
    )
    assert head.split(b"\r\n")[0] == b"POST /p/v1/x HTTP/1.1"
    assert {b"Host: h:1", b"A: b", b"Content-Length: 2"} <= set(head.split(b"\r\n"))
    assert body == b"{}"
