"""Uvicorn around the application: the listening socket, the stamp at a request's first byte, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headstart.config import ServerConfig
from headstart.server.http import HOLD_NEXT_WRITE, RECEIVED

GRACE_SECONDS = 20
_FAREWELL_SECONDS = 2.0
_BACKLOG = 2048


class AddressError(OSError):
    """The address cannot be listened on. One line, says what to do."""


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


class StampedProtocol(HttpToolsProtocol):
    """Notes when the first byte of each request was seen: the ledger's `receive` starts there, not at the handler."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        joining = JoiningTransport(transport)
        super().connection_made(cast(asyncio.Transport, joining))
        self._hold_next_write = joining.hold_next_write

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope[RECEIVED] = time.monotonic()
        scope[HOLD_NEXT_WRITE] = self._hold_next_write


class GracefulServer(uvicorn.Server):
    """Calls `on_listening` when it accepts connections. A signal ends `serve` and nothing else: what else the process
    owns (the engine) is its owner's to end, so the signal is not raised again, as uvicorn does."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_listening is not None:
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:  # cancelled: they still tell their clients
            await asyncio.wait(self.server_state.tasks, timeout=_FAREWELL_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket (port 0: a free one) that refuses connections until `start_listening`.

    Raises `AddressError`, before anything heavy was started.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
        return bound
    except OSError as error:
        raise _address_error(config, error) from None


def start_listening(bound: socket.socket, config: ServerConfig) -> None:
    """From now on connections are taken. Raises `AddressError` if another process was faster since `bind`."""
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        raise _address_error(config, error) from None


def listen(config: ServerConfig) -> socket.socket:
    """`bind` and `start_listening` in one."""
    bound = bind(config)
    start_listening(bound, config)
    return bound


def _address_error(config: ServerConfig, error: OSError) -> AddressError:
    return AddressError(
        f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose another --port or --host"
    )


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(
    app: ASGIApp,
    *,
    on_listening: Callable[[], None] | None = None,
    log_level: str = "warning",
    grace_seconds: int = GRACE_SECONDS,
) -> GracefulServer:
    """A server for `app`; `should_exit = True` ends it as SIGTERM does."""
    config = uvicorn.Config(
        app,
        http=StampedProtocol,
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=grace_seconds,
    )
    return GracefulServer(config, on_listening)


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    on_listening: Callable[[str], None] | None = None,
    log_level: str = "warning",
    grace_seconds: int = GRACE_SECONDS,
) -> None:
    """Serve on `listener` until SIGTERM or SIGINT, which are handled while this runs.

    Then: no new connections; requests in flight may finish for `grace_seconds`, after which they end with an error
    (503, or an error event). `on_listening` gets the URL. The caller owns the engine and shuts it down afterwards. Runs
    on the caller's event loop, which should be uvloop's.
    """
    url = url_of(listener)
    server = make_server(
        app,
        on_listening=None if on_listening is None else lambda: on_listening(url),
        log_level=log_level,
        grace_seconds=grace_seconds,
    )
    await server.serve(sockets=[listener])
