"""Uvicorn around the application: the listening socket and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from headstart.config import ServerConfig
from headstart.server.connection import ConnectionLimits, StampedProtocol

GRACE_SECONDS = 20
_FAREWELL_SECONDS = 2.0
_BACKLOG = 2048
_OTHER_FILES = 128  # open files that are no connections
OnWaiting = Callable[[int, int], None]  # requests in flight, seconds that they get at most


class AddressError(OSError):
    """The address cannot be listened on. One line, says what to do."""


class GracefulServer(uvicorn.Server):
    """Calls `on_listening` when it accepts connections, and `on_waiting` when it stops while requests are in flight.

    A signal ends `serve` and nothing else: what else the process owns (the engine) is its owner's to end, so the signal
    is not raised again, as uvicorn does.
    """

    def __init__(
        self, config: uvicorn.Config, on_listening: Callable[[], None] | None, on_waiting: OnWaiting | None
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._on_waiting = on_waiting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_listening is not None:
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = self.server_state.tasks
        if tasks and self._on_waiting is not None:
            self._on_waiting(len(tasks), self.config.timeout_graceful_shutdown or 0)
        await super().shutdown(sockets)
        for task in tasks:
            if not task.cancelling():  # a second SIGINT cut the grace short, for which uvicorn cancels nobody
                task.cancel()
        if tasks:  # they still tell their clients
            await asyncio.wait(tasks, timeout=_FAREWELL_SECONDS)

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


def default_limits() -> ConnectionLimits:
    """As many connections as the limit on open files allows, up to the usual number."""
    limits = ConnectionLimits()
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files == resource.RLIM_INFINITY:
        return limits
    return replace(limits, max_connections=max(1, min(limits.max_connections, open_files - _OTHER_FILES)))


def make_server(
    app: ASGIApp,
    *,
    on_listening: Callable[[], None] | None = None,
    on_waiting: OnWaiting | None = None,
    on_refused: Callable[[int], None] | None = None,
    log_level: str = "warning",
    grace_seconds: int = GRACE_SECONDS,
    limits: ConnectionLimits | None = None,
) -> GracefulServer:
    """A server for `app`; `should_exit = True` ends it as SIGTERM does. `on_refused`: see `StampedProtocol`."""
    protocol = partial(StampedProtocol, limits=limits or default_limits(), on_refused=on_refused)
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], protocol),
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
    return GracefulServer(config, on_listening, on_waiting)


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    on_listening: Callable[[str], None] | None = None,
    on_waiting: OnWaiting | None = None,
    on_refused: Callable[[int], None] | None = None,
    log_level: str = "warning",
    grace_seconds: int = GRACE_SECONDS,
) -> None:
    """Serve on `listener` until SIGTERM or SIGINT, which are handled while this runs.

    Then: no new connections; requests in flight may finish for `grace_seconds` or until a second SIGINT, after which
    they end with an error (503, or an error event). `on_listening` gets the URL, `on_waiting` what is waited for. The
    caller owns the engine and shuts it down afterwards. Runs on the caller's event loop, which should be uvloop's.
    """
    url = url_of(listener)
    server = make_server(
        app,
        on_listening=None if on_listening is None else lambda: on_listening(url),
        on_waiting=on_waiting,
        on_refused=on_refused,
        log_level=log_level,
        grace_seconds=grace_seconds,
    )
    await server.serve(sockets=[listener])
