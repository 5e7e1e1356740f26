"""EngineProcess: the API process' handle on an engine process. Owns the child, the lifeline and the socket directory.

A fresh interpreter is started (no fork of threads and locks), without a terminal's signals. It must not know what the
messages mean; it says only whether the child lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import headstart
from headstart.engine.child import StartMessage, frame_start
from headstart.engine.ipc import SocketDirectory

_SETTINGS_PREFIX = "HEADSTART_"
_CACHE_VARIABLE = "HEADSTART_CACHE"  # no setting: where what was fetched, quantized and learned is kept


class EngineProcess:
    """A running child. `close` ends it in any case; a parent that dies without calling it takes the child along too."""

    def __init__(self, command: Sequence[str], payload: bytes) -> None:
        """Start `command`, to which the lifeline's file descriptor is added as the last argument."""
        self._directory = SocketDirectory()
        self._lifeline, child_end = socket.socketpair()
        with child_end:
            self._child = subprocess.Popen(
                [*command, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                process_group=0,  # Ctrl-C in the terminal is for the API process, which then ends the engine
                env=engine_environment(os.environ),
            )
        message = StartMessage(
            address=self.address,
            socket_directory=self._directory.path,
            payload=payload,
        )
        with contextlib.suppress(OSError):  # it is dead already: whoever waits on the lifeline sees its end
            self._lifeline.sendall(frame_start(message))
        self._lifeline.setblocking(False)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def address(self) -> str:
        return self._directory.address

    @property
    def lifeline_fd(self) -> int:
        """Becomes readable when the child is dead, and never before."""
        return self._lifeline.fileno()

    def wait(self, timeout: float) -> int | None:
        """The exit code, or None if it is still running after `timeout` seconds."""
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def how_it_ended(self) -> str:
        """For people: how a child whose lifeline has ended was lost."""
        code = self.wait(0.5)
        if code is None:
            return "the engine process closed its connection"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            hint = "; is there too little memory?" if name == "SIGKILL" else ""
            return f"the engine process was killed by {name}{hint}"
        return f"the engine process exited with code {code}"

    def close(self, grace: float = 0.0) -> None:
        """Wait `grace` seconds for the child's own end, then kill it; tidy up. Safe to call twice."""
        if grace == 0.0 or self.wait(grace) is None:
            self._child.kill()
            self._child.wait()
        self._lifeline.close()
        self._directory.remove()


def python_command(module: str) -> list[str]:
    """A fresh interpreter that runs `module`, without the working directory on its import path."""
    return [sys.executable, "-P", "-m", module]


def engine_environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process' environment, with this very package importable (a checkout that nobody installed).

    Without the server's settings: the engine is told its configuration, and API keys are none of its business.
    """
    environment = {
        name: value for name, value in own.items() if not name.startswith(_SETTINGS_PREFIX) or name == _CACHE_VARIABLE
    }
    root = str(Path(headstart.__file__).resolve().parents[1])
    if root != sysconfig.get_path("purelib"):
        present = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not present else f"{root}{os.pathsep}{present}"
    return environment
