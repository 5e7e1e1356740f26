"""One client's connection: stamps, joined writes, and what bounds it before anybody knows who the client is.

Owns the limits on headers, on the time that a request may take to arrive and on the number of connections. Knows
nothing of routes, keys or what a request asks for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import Message, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headstart.server.errors import ApiError, headers_too_large, invalid_http, request_timeout, too_many_connections
from headstart.server.http import HOLD_NEXT_WRITE, RECEIVED, REFUSED

_LINGER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`max_header_bytes`: of the request line and the headers together, also of a chunked body's trailers and what
    surrounds its chunks. `read_seconds`: from a request's first byte, or the connection, to the body's last byte."""

    max_connections: int = 8192
    max_header_bytes: int = 64 * 1024
    read_seconds: float = 30.0


class JoiningTransport:
    """A transport of which one write can be held, to go out with the next one.

    uvloop writes at once, so a response's headers and its first text would be two system calls and wake the client
    twice, the first time for nothing.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._hold = False
        self._held = b""

    def hold_next_write(self) -> None:
        self._hold = True

    def write(self, data: bytes) -> None:
        if self._hold:
            self._hold, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def close(self) -> None:
        if self._held:
            self._transport.write(self._held)
            self._held = b""
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class CloseDelimited:
    """What a cycle sends to a client older than HTTP/1.1, which knows no chunks: a body of unknown length ends with the
    connection. Uvicorn would chunk it, unless it counts on a length; so each piece is the length that it counts on."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cast(Send, cycle.send)
        self._has_length = True

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                self._cycle.chunked_encoding = self._cycle.keep_alive = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message["body"])
        await self._send(message)


class StampedProtocol(HttpToolsProtocol):
    """Notes when the first byte of each request was seen: the ledger's `receive` starts there, not at the handler.

    `on_refused` gets the status of each answer that no application knows of.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        on_refused: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._on_refused = on_refused
        self._num_waiting_bytes = 0  # that came since the parser last gave something out
        self._num_header_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        joining = JoiningTransport(transport)
        super().connection_made(cast(asyncio.Transport, joining))
        self._hold_next_write = joining.hold_next_write
        if len(self.connections) > self._limits.max_connections:
            self._refuse(too_many_connections(self._limits.max_connections))
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_is_here()
        super().connection_lost(exc)

    # -- what arrives --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._await_request()
        self._num_waiting_bytes += len(data)
        super().data_received(data)
        if self._num_waiting_bytes > self._limits.max_header_bytes:
            self._refuse(headers_too_large(self._limits.max_header_bytes))

    def send_400_response(self, msg: str) -> None:
        """What the parser does not understand, or was told not to."""
        if self._num_header_bytes > self._limits.max_header_bytes:
            self._refuse(headers_too_large(self._limits.max_header_bytes))
        else:
            self._refuse(invalid_http())

    def on_message_begin(self) -> None:
        self._await_request()
        self._num_header_bytes = 0
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope[RECEIVED] = time.monotonic()
        scope[HOLD_NEXT_WRITE] = self._hold_next_write

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_waiting_bytes = 0
        super().on_headers_complete()
        if self.parser.get_http_version() in ("0.9", "1.0"):
            self.cycle.send = CloseDelimited(self.cycle).send  # type: ignore[method-assign,assignment]

    def on_body(self, body: bytes) -> None:
        self._num_waiting_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_waiting_bytes = 0
        self._request_is_here()
        super().on_message_complete()

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self._limits.max_header_bytes:
            raise ValueError("too many headers")  # the parser stops and calls `send_400_response`

    # -- limits --------------------------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.read_seconds, self._on_deadline)

    def _request_is_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.pipeline or self._is_answering():  # the next request waits for us, not we for it
            self._await_request()
        else:
            self._refuse(request_timeout(self._limits.read_seconds))

    def _is_answering(self) -> bool:
        cycle = self._current_cycle()
        return cycle is not None and not cycle.more_body

    def _current_cycle(self) -> RequestResponseCycle | None:
        """The latest request whose answer is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return None if cycle is None or cycle.response_complete else cycle

    def _refuse(self, error: ApiError) -> None:
        """Say why and end the connection. What still comes is dropped for a moment: closing with unread data would
        reset the connection, and the client would never see the answer."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._request_is_here()
        self._unset_keepalive_if_required()
        cycle = self._current_cycle()
        if cycle is not None and (cycle.response_started or not cycle.more_body):
            self.transport.close()  # an answer within another one would be read as part of it
            return
        if cycle is not None:  # it waits for its body
            cast(dict[str, Any], cycle.scope)[REFUSED] = error.status
            cycle.disconnected = True
            cycle.message_event.set()
        elif self._on_refused is not None:
            self._on_refused(error.status)
        self.flow.resume_reading()
        self.transport.write(_raw_response(error))
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _raw_response(error: ApiError) -> bytes:
    body = error.body()
    headers = (
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *error.headers,
    )
    return b"".join((STATUS_LINE[error.status], *(b"%b: %b\r\n" % pair for pair in headers), b"\r\n", body))
