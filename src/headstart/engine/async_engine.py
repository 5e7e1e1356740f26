"""AsyncEngine: an engine process as seen from the API process' event loop.

Owns the registry of live requests and the verdict whether the engine lives. Nothing that waits here waits for ever:
when the engine dies or falls silent, every stream ends with `EngineDeadError`. It must not know HTTP, text, the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, Self

from headstart.core.errors import QueueFull, RequestRefused, RequestTooLong, SloMiss
from headstart.core.forecast import Forecast
from headstart.core.request import EngineRequest
from headstart.core.stats import CoreStats
from headstart.core.step import RequestOutput
from headstart.engine.ipc import (
    Abort,
    Add,
    Channel,
    Dead,
    EngineInfo,
    Estimate,
    Estimated,
    FromEngine,
    IPCError,
    NotConnectedError,
    Outputs,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Shutdown,
    ToEngine,
    api_codec,
)
from headstart.engine.process import EngineProcess
from headstart.engine.streams import Mailbox
from headstart.executor.base import StartupError
from headstart.hub import Progress as ProgressCallback

logger = logging.getLogger(__name__)


class EngineState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineDeadError(RuntimeError):
    """The engine is gone and does not come back by itself; the message says why. Restart the server."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLimits:
    """`max_num_requests`: live ones, running and waiting; more are refused here, without a word to the engine.

    `max_num_waiting` is the number that the refusal names. `heartbeat_timeout`: seconds of silence after which an
    engine counts as dead; its loop answers also while a step computes, so this need not cover a step.
    """

    max_num_requests: int
    max_num_waiting: int
    heartbeat_timeout: float = 30.0


class Reservation:
    """Places kept for requests that come later, so that none of them is refused for want of room. Close it: what was
    not used is given back."""

    def __init__(self, count: int) -> None:
        self.num_left = count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.num_left = 0


class AsyncEngine:
    """Made inside a running event loop, whose thread alone may use it. Takes over `process` and ends it."""

    def __init__(self, process: EngineProcess, limits: EngineLimits, progress: ProgressCallback | None = None) -> None:
        self._process = process
        self._limits = limits
        self._progress = progress
        self._state = EngineState.STARTING
        self._started = asyncio.Event()  # READY or DEAD
        self._why_dead: str | None = None
        self._info: EngineInfo | None = None
        self._stats: CoreStats | None = None
        self._requests: dict[str, Mailbox] = {}
        self._reservations: set[Reservation] = set()  # those with places left, and some of the others
        self._pings: dict[int, asyncio.Future[CoreStats]] = {}
        self._estimates: dict[int, asyncio.Future[Forecast]] = {}
        self._num_questions = 0
        self._silent_ticks = 0
        self._tick_seconds = min(1.0, limits.heartbeat_timeout / 4)
        self._tick_timer: asyncio.TimerHandle | None = None
        self._burial: asyncio.Future[None] | None = None
        self._channel: Channel[ToEngine, FromEngine] = Channel(api_codec(), process.address, bind=True)
        self._channel_fd = self._channel.fileno
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel_fd, self._drain)
        self._loop.add_reader(process.lifeline_fd, self._on_lifeline_end)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def info(self) -> EngineInfo:
        """What the engine can do. Only once it is ready; stays readable when it has died."""
        if self._info is None:
            raise RuntimeError("the engine is not ready yet; await wait_ready() first")
        return self._info

    async def wait_ready(self) -> None:
        """Returns when the engine has loaded and warmed up. Raises `StartupError` if it cannot, with one line."""
        await self._started.wait()
        if self._why_dead is not None and self._info is None:
            raise StartupError(self._why_dead)
        self._check_alive()

    def stats(self) -> CoreStats | None:
        """The numbers as the engine last sent them: after its latest step, abort or ping. None before it is ready."""
        return self._stats

    async def ping(self) -> CoreStats:
        """The numbers as they are now, after everything that was sent before has been taken in."""
        await self._started.wait()
        self._check_alive()
        self._num_questions += 1
        answer: asyncio.Future[CoreStats] = self._loop.create_future()
        self._pings[self._num_questions] = answer
        self._send(Ping(self._num_questions))
        return await answer

    async def estimate(self, request: EngineRequest) -> Forecast:
        """When the request would have its first token if it were submitted now; it is not.

        Raises `EngineDeadError`, or `RequestRefused` for what could never run.
        """
        await self._started.wait()
        self._check_alive()
        self._check_length(request)
        self._num_questions += 1
        answer: asyncio.Future[Forecast] = self._loop.create_future()
        self._estimates[self._num_questions] = answer
        self._send(Estimate(self._num_questions, request))
        return await answer

    # -- requests ------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> Reservation:
        """Keep places for `count` requests that belong together: all are let in, or none. Raises `QueueFullError`."""
        self._check_room(count)
        reservation = Reservation(count)
        self._reservations = {kept for kept in self._reservations if kept.num_left} | {reservation}
        return reservation

    async def generate(
        self, request: EngineRequest, reservation: Reservation | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit at the first `anext` and yield news until the one with a finish reason. Closing aborts the request.

        With a `reservation` it takes one of the places there, and a full queue does not refuse it.
        A caller who reads slowly gets fewer, larger outputs. `request_id` must be new for the life of the engine.
        Raises `EngineDeadError`, `RequestTooLong` (before anything is sent), `QueueFullError`, `RequestRefused`.
        """
        await self._started.wait()
        self._check_alive()
        mailbox = Mailbox()
        try:
            self._submit(request, mailbox, reservation)
            while True:
                output = await mailbox.take()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._withdraw(request.request_id, mailbox)

    def _submit(self, request: EngineRequest, mailbox: Mailbox, reservation: Reservation | None) -> None:
        self._check_alive()
        self._check_length(request)
        if reservation is None:
            self._check_room(1)
        if request.request_id in self._requests:
            raise RequestRefused(f"request id {request.request_id!r} is in use; choose another")
        if not request.submit_time:
            request = dataclasses.replace(request, submit_time=time.monotonic())
        if reservation is not None:
            assert reservation.num_left > 0, "a reservation is for as many requests as it says"
            reservation.num_left -= 1
            request = dataclasses.replace(request, reserved=True)
        self._send(Add(request))
        self._requests[request.request_id] = mailbox

    def _check_length(self, request: EngineRequest) -> None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens + min(request.params.max_tokens, 1) > self.info.max_model_len:
            raise RequestTooLong(num_tokens, self.info.max_model_len, self.info.num_kv_tokens)

    def _check_room(self, count: int) -> None:
        """Raises `QueueFull` unless `count` more may live. Several at once come past the engine's own look at its
        queue, so they are refused here while that is full."""
        num_waiting = self._stats.num_waiting if self._stats is not None else 0
        num_taken = len(self._requests) + sum(reservation.num_left for reservation in self._reservations)
        limits = self._limits
        if num_taken + count > limits.max_num_requests or (count > 1 and num_waiting >= limits.max_num_waiting):
            raise QueueFull(num_waiting, limits.max_num_waiting)

    def _withdraw(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort the request if it still runs for this mailbox."""
        if self._requests.get(request_id) is not mailbox:
            return
        del self._requests[request_id]
        if self._state is EngineState.READY:
            with contextlib.suppress(EngineDeadError):
                self._send(Abort((request_id,)))

    def _check_alive(self) -> None:
        if self._why_dead is not None:
            raise EngineDeadError(self._why_dead)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        """Raises `RequestRefused` for a request that no message can hold, `EngineDeadError` if the engine left."""
        try:
            self._channel.send(message)
        except NotConnectedError:
            self._die(self._process.how_it_ended())
            self._check_alive()
        except IPCError as error:
            raise RequestRefused(str(error)) from error
        # Sending may have swallowed the edge that says "there is something to read".
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        try:
            while self._state is not EngineState.DEAD and (message := self._channel.receive()) is not None:
                self._silent_ticks = 0
                self._on_message(message)
        except IPCError as error:
            self._die(str(error))

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs=outputs, stats=stats):
                self._stats = stats
                for output in outputs:
                    self._deliver(output)
            case Pong(number=number, stats=stats):
                self._stats = stats
                answer = self._pings.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result(stats)
            case Estimated():
                self._on_estimate(message)
            case Refused(request_id=request_id):
                if (mailbox := self._requests.pop(request_id, None)) is not None:
                    mailbox.fail(_refusal(message))
            case Progress(stage=stage, done=done, total=total):
                if self._progress is not None:
                    self._progress(stage, done, total)
            case Ready(info=info, stats=stats):
                self._info, self._stats, self._state = info, stats, EngineState.READY
                self._started.set()
                self._schedule_tick()
            case Dead(message=text):
                self._die(text)

    def _on_estimate(self, message: Estimated) -> None:
        answer = self._estimates.pop(message.number, None)
        if answer is None or answer.done():
            return
        if message.forecast is None:
            answer.set_exception(RequestRefused(message.refusal))
        else:
            answer.set_result(message.forecast)

    def _deliver(self, output: RequestOutput) -> None:
        request_id = output.request_id
        mailbox = self._requests.get(request_id)
        if mailbox is None:
            return  # aborted: nobody waits for it
        if output.finish_reason is not None:
            del self._requests[request_id]
        mailbox.put(output)

    # -- life and death ------------------------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        self._tick_timer = self._loop.call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        """Count heartbeats without an answer. Counted, not timed: this process may have been stopped itself."""
        self._drain()
        if self._state is not EngineState.READY:
            return
        if self._silent_ticks * self._tick_seconds >= self._limits.heartbeat_timeout:
            self._die(f"the engine process has not answered for {self._limits.heartbeat_timeout:g} s")
            return
        self._silent_ticks += 1
        try:
            self._send(Ping(0))
        except EngineDeadError:
            return
        self._schedule_tick()

    def _on_lifeline_end(self) -> None:
        self._drain()  # its last words, if it had any
        if self._state is not EngineState.DEAD:
            how = self._process.how_it_ended()
            self._die(how if self._info is not None else f"{how} while it was starting")

    def _die(self, why: str, grace: float = 0.0, *, wanted: bool = False) -> None:
        """From here on everything is refused; everybody who waits is told, and, unless it was `wanted`, the log."""
        if self._state is EngineState.DEAD:
            return
        if self._state is EngineState.READY and not wanted:
            logger.error("%s; every request gets 503 from now on: restart the server", why)
        self._state = EngineState.DEAD
        self._why_dead = why
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self._loop.remove_reader(self._channel_fd)
        self._loop.remove_reader(self._process.lifeline_fd)
        for mailbox in self._requests.values():
            mailbox.fail(EngineDeadError(why))
        self._requests.clear()
        unanswered: list[asyncio.Future[Any]] = [*self._pings.values(), *self._estimates.values()]
        for answer in unanswered:
            if not answer.done():
                answer.set_exception(EngineDeadError(why))
        self._pings.clear()
        self._estimates.clear()
        self._started.set()
        # Freeing a large process' memory takes long enough to be noticed: not on the event loop.
        self._burial = self._loop.run_in_executor(None, self._bury, grace)

    def _bury(self, grace: float) -> None:
        self._channel.close(linger=grace)
        self._process.close(grace)

    async def shutdown(self, grace: float = 15.0) -> None:
        """End the engine process: asked first, killed after `grace` seconds. Open streams end. Safe to call twice."""
        if self._state is EngineState.READY:
            with contextlib.suppress(EngineDeadError):
                self._send(Shutdown())
            self._die("the engine was shut down", grace, wanted=True)
        else:
            self._die("the engine was shut down", wanted=True)
        if self._burial is not None:
            await asyncio.shield(self._burial)


def _refusal(message: Refused) -> RequestRefused:
    if message.queue_full is not None:
        return QueueFull(*message.queue_full)
    if message.slo_miss is not None:
        return SloMiss(*message.slo_miss)
    return RequestRefused(message.message)
