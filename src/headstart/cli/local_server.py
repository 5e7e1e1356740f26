"""A server of our own in a child process, for commands that need one. Owns its port, its readiness and its end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import NoReturn

from headstart.cli.client import Client, ServerError

_POLL_SECONDS = 0.05
_STOP_SECONDS = 20.0


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LocalServer:
    """`headstart serve MODEL` on a free loopback port, ready on entry and stopped on exit.

    It answers only `client` and who has its `api_key`. What it writes (progress, errors) goes to this process's stderr.
    `startup_seconds`: from the start of the process to ready.
    """

    def __init__(self, model: str, arguments: Sequence[str] = (), *, api_key: str | None = None) -> None:
        port = free_port()
        place = ["--host", "127.0.0.1", "--port", str(port)]
        self._command = [sys.executable, "-m", "headstart", "serve", model, *place, *arguments]
        self.api_key = api_key or secrets.token_urlsafe(16)
        self.model = model
        self.client = Client(f"http://127.0.0.1:{port}", api_key=self.api_key)
        self.startup_seconds = 0.0

    @property
    def pid(self) -> int:
        """Of the server's own process; its engine is a child of it."""
        return self._process.pid

    def __enter__(self) -> LocalServer:
        started = time.perf_counter()
        # Being ended politely must end the server too; the terminal's Ctrl-C is a KeyboardInterrupt already.
        self._handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
        environment = os.environ | {"HEADSTART_API_KEY": self.api_key}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, start_new_session=True
        )
        try:
            while not self.client.is_ready():
                if self._process.poll() is not None:
                    raise ServerError(f"the server stopped while starting (exit code {self._process.returncode})")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self._stop()
            raise
        self.startup_seconds = time.perf_counter() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
