"""A light HTTP/1.1 client whose time stamps are taken where the bytes are: at the write, and when data arrives.

General clients stamp a response when a coroutine gets to run; with many streams on a busy machine that is later than
the data by the work of the others. Here a sink sees the data inside the socket's own callback. Owns connections and
framing; knows nothing of OpenAI, of workloads or of what is measured.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from headstart.bench.options import BenchError


class TransferError(Exception):
    """The exchange broke: no connection, a lost connection, or bytes that are not HTTP."""


class Sink(Protocol):
    """Sees one response as it arrives. `now` is `time.perf_counter()` of the moment the bytes arrived."""

    def on_sent(self, now: float) -> None: ...

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is. `prefix` is the path before `/v1`, without a slash at its end."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """From `http://host:port`, with or without a path and `/v1`. Raises `BenchError`."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise BenchError(f"{url!r} has no valid port; write for example http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"{url!r} is no HTTP address; write for example http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), prefix)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.prefix}"

    @property
    def host_header(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def encode_request(
    origin: Origin, method: str, path: str, body: bytes, headers: Iterable[tuple[str, str]] = ()
) -> bytes:
    """The whole request as bytes, so that nothing is left to do at the moment it is sent."""
    lines = [f"{method} {origin.prefix}{path} HTTP/1.1", f"Host: {origin.host_header}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class _Connection(asyncio.Protocol):
    """One socket, one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._in_body = False
        self._now = 0.0
        self.got_bytes = False
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, so no isinstance

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send `request`; returns when the response is complete. Raises `TransferError`."""
        assert self._transport is not None
        assert self._done is None
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._headers, self._in_body, self.got_bytes = sink, {}, False, False
        done = self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self.connection_lost(None)
        else:
            sink.on_sent(time.perf_counter())
            self._transport.write(request)
        try:
            await done
        finally:
            self._done = self._sink = None

    def close(self) -> None:
        """Drop the connection at once; a server sees its client leave."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._parser is None:  # bytes that nobody asked for
            self.close()
            return
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ or error
            self._fail(TransferError(f"the answer is not valid HTTP: {cause}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        framed = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "")
        if self._in_body and not framed:  # such an answer ends with its connection
            self._finish()
        else:
            self._fail(TransferError(f"the server closed the connection{f': {exc}' if exc else ''}"))

    def _fail(self, error: TransferError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # -- httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._in_body = True
        if self._sink is not None:
            self._sink.on_head(self._parser.get_status_code(), self._headers, self._now)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() < 200:
            self._headers, self._in_body = {}, False
            return
        self.reusable = self.reusable and self._parser.should_keep_alive()
        self._finish()


class HttpClient:
    """Connections to one server, kept and used again. One owner: the event loop that made it."""

    def __init__(self, origin: Origin, *, connect_timeout: float) -> None:
        self.origin = origin
        self._connect_timeout = connect_timeout
        self._idle: list[_Connection] = []
        self._ssl = ssl.create_default_context() if origin.scheme == "https" else None

    async def exchange(self, request: bytes, sink: Sink, *, on_connect: Callable[[float], None] | None = None) -> None:
        """One request and its whole response. Cancelling it closes the connection. Raises `TransferError`.

        `on_connect` is told the seconds that a fresh connection took. A kept connection that the server closed before
        it sent a byte is replaced once, as HTTP allows; `sink.on_sent` is then called again.
        """
        connection = self._take_idle()
        if connection is not None:
            try:
                await self._use(connection, request, sink)
                return
            except TransferError:
                if connection.got_bytes:
                    raise
        began = time.perf_counter()
        connection = await self._connect()
        if on_connect is not None:
            on_connect(time.perf_counter() - began)
        await self._use(connection, request, sink)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _use(self, connection: _Connection, request: bytes, sink: Sink) -> None:
        try:
            await connection.exchange(request, sink)
        except BaseException:  # cancelled or broken: half a response may still come, so nobody may use it again
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        origin = self.origin
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(_Connection, origin.host, origin.port, ssl=self._ssl)
        except TimeoutError:
            raise TransferError(f"no connection to {origin.host_header} within {self._connect_timeout:g} s") from None
        except OSError as error:
            raise TransferError(f"no connection to {origin.host_header}: {error}") from None
        return connection
