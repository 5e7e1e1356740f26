"""The engine process' side of its own life: starts the engine, runs its loop, and ends with its parent.

What an engine is made of is passed in (`build`), so this stays below the composition root and never imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headstart.core.engine_core import EngineCore
from headstart.core.events import Event
from headstart.engine.driver import KVSource
from headstart.engine.ipc import Channel, Dead, EngineInfo, FromEngine, Progress, Ready, ToEngine, engine_codec
from headstart.engine.loop import EngineLoop
from headstart.executor.base import Executor, StartupError
from headstart.hub import Progress as ProgressCallback
from headstart.perf.garbage import freeze_garbage_collector

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LAST_WORDS_SECONDS = 5.0
_LENGTH_BYTES = 4

Clock = Callable[[], float]


class StartMessage(msgspec.Struct, frozen=True):
    """The first bytes over the lifeline. `payload` is for `build`."""

    address: str
    socket_directory: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A loaded engine, before its first request."""

    core: EngineCore
    executor: Executor
    info: EngineInfo
    step_timeout: float = 300.0  # seconds after which a step is stuck
    on_events: Callable[[list[Event]], None] = lambda events: None  # what the core tells, in order
    source: KVSource | None = None  # of KV that is loaded
    on_end: Callable[[], object] = lambda: None  # after an orderly shutdown


Build = Callable[[bytes, ProgressCallback], BuiltEngine]


class ProgressSender:
    """A progress callback that sends to the parent, at most some twenty times a second and always a stage's end.

    Called in the executor's thread while the main thread waits for `build`, hence the lock around the channel.
    """

    def __init__(self, channel: Channel[FromEngine, ToEngine], clock: Clock, min_interval: float = 0.05) -> None:
        self._channel = channel
        self._clock = clock
        self._min_interval = min_interval
        self._lock = threading.Lock()
        self._stage = ""
        self._last = 0.0
        self._closed = False

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        with self._lock:
            now = self._clock()
            too_soon = stage == self._stage and done != total and now - self._last < self._min_interval
            if self._closed or too_soon:
                return
            self._stage, self._last = stage, now
            self._channel.send(Progress(stage, done, total))

    def close(self) -> None:
        """From now on the channel is the main thread's alone; whatever still reports is ignored."""
        with self._lock:
            self._closed = True


class Lifeline:
    """The socket pair to the parent. Its end means that the parent is gone, or that it has heard our last words.

    A thread waits for that end and then ends this process at once, whatever the other threads do.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket_directory: str | None = None
        self._exit_code = 0

    def read_start(self) -> StartMessage:
        """Blocks until the parent has sent it. Raises `EOFError` if the parent is gone."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        return msgspec.msgpack.decode(self._read(length), type=StartMessage)

    def watch(self, socket_directory: str) -> None:
        self._socket_directory = socket_directory
        threading.Thread(target=self._wait_for_end, name="headstart-lifeline", daemon=True).start()

    def hand_over(self, exit_code: int) -> None:
        """Last words are sent: wait (with a limit) until the parent has read them and ends the lifeline."""
        self._exit_code = exit_code
        threading.Event().wait(_LAST_WORDS_SECONDS)

    def _wait_for_end(self) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(64):
                pass
        if self._socket_directory is not None:  # a parent that was killed could not tidy up
            shutil.rmtree(self._socket_directory, ignore_errors=True)
        os._exit(self._exit_code)

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._socket.recv(length - len(data))
            if not part:
                raise EOFError("the parent process is gone")
            data += part
        return bytes(data)


def frame_start(message: StartMessage) -> bytes:
    """What `Lifeline.read_start` reads."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def run_child(lifeline_fd: int, build: Build, clock: Clock = time.monotonic) -> int:
    """Be the engine process; returns its exit code. `clock` must be one that all processes of the machine share."""
    # The parent decides when the engine ends: on Ctrl-C or a service manager's TERM it lets streams finish first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lifeline = Lifeline(lifeline_fd)
    try:
        start = lifeline.read_start()
    except EOFError:
        return 0
    _be_woken_by_parents_death()
    lifeline.watch(start.socket_directory)
    channel = Channel(engine_codec(), start.address, bind=False)
    last_words = _serve(channel, build, start.payload, clock)
    if last_words is not None:
        channel.send(last_words)
        lifeline.hand_over(exit_code=1)
    channel.close()
    return 0 if last_words is None else 1


def _serve(channel: Channel[FromEngine, ToEngine], build: Build, payload: bytes, clock: Clock) -> Dead | None:
    """Start and run; None after an orderly shutdown, else why the engine is dead."""
    progress = ProgressSender(channel, clock)
    try:
        engine = build(payload, progress)
    except StartupError as error:
        return Dead(str(error), startup=True)
    except BaseException as error:
        logger.exception("the engine could not start")
        return Dead(f"the engine could not start: {_describe(error)}", startup=True)
    finally:
        progress.close()
    freeze_garbage_collector()
    try:
        channel.send(Ready(engine.info, engine.core.stats()))
        loop = EngineLoop(
            engine.core,
            engine.executor,
            channel,
            clock,
            engine.step_timeout,
            on_events=engine.on_events,
            source=engine.source,
        )
        loop.run()
    except BaseException as error:
        logger.exception("the engine failed")
        return Dead(f"the engine failed: {_describe(error)}")
    engine.executor.shutdown()
    engine.on_end()
    return None


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _be_woken_by_parents_death() -> None:
    """A stopped process cannot see its lifeline end, so the kernel continues it then (Linux).

    Not killed: the last one alive tidies up. The kernel means the parent's *thread*, but an early CONT does no harm.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
