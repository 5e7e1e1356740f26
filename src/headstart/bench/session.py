"""One round against one server: sends what a workload plans, at the time it plans, and keeps a record of each request.

Arrivals never wait for answers: `start` returns at once, whatever is in flight. Knows no workload.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from headstart.bench.http import Sink, TransferError
from headstart.bench.observer import StreamObserver
from headstart.bench.record import RequestRecord


class Clock(Protocol):
    """The time that arrivals follow. `now` is in the seconds of `time.perf_counter()`."""

    def now(self) -> float: ...

    async def sleep_until(self, when: float) -> None: ...


class RealClock:
    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, when: float) -> None:
        """Returns at `when`, up to a timer's millisecond later; at once if that is past."""
        await asyncio.sleep(max(0.0, when - time.perf_counter()))


class Exchanger(Protocol):
    """What carries a request to the server; in production `HttpClient`."""

    async def exchange(
        self, request: bytes, sink: Sink, *, on_connect: Callable[[float], None] | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request, ready to send: `payload` is all of HTTP. `prompt_tokens`: what it should count at the server."""

    group: str
    payload: bytes
    prompt_tokens: int | None = None
    keep_text: bool = False


class InFlight:
    """A request on its way. Await `record()` for its end; `first_delta` is set when its first token is here."""

    def __init__(self, task: asyncio.Task[RequestRecord], observer: StreamObserver) -> None:
        self._task = task
        self._observer = observer

    @property
    def first_delta(self) -> asyncio.Event:
        return self._observer.first_delta

    @property
    def text(self) -> str:
        return "".join(self._observer.text)

    def done(self) -> bool:
        return self._task.done()

    async def record(self) -> RequestRecord:
        return await asyncio.shield(self._task)

    async def answering(self) -> bool:
        """Wait for the first token or the end, whichever is first; whether there is a token."""
        waiter = asyncio.ensure_future(self._observer.first_delta.wait())
        await asyncio.wait((waiter, self._task), return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        return self._observer.first_delta.is_set()

    async def stop(self) -> RequestRecord:
        """Leave: close the connection. A record that is still open becomes `stopped`, which is no error."""
        await asyncio.sleep(0)  # a task that is cancelled before its first step would leave no record
        if not self._task.done():
            self._observer.stopped = True
            self._task.cancel()
        return await self._task


@dataclass(frozen=True, slots=True)
class SessionLimits:
    timeout: float = 600.0  # seconds a request
    max_in_flight: int = 4096


class Session:
    """Owns the records of one round. `on_end` is told of each record that is settled (for a progress bar)."""

    def __init__(
        self,
        client: Exchanger,
        *,
        target: str,
        round_index: int,
        limits: SessionLimits,
        clock: Clock,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._client = client
        self._target = target
        self.round_index = round_index
        self._limits = limits
        self._clock = clock
        self._on_end = on_end
        self._began = clock.now()
        self._tasks: set[asyncio.Task[RequestRecord]] = set()
        self._num_started = 0

    def elapsed(self) -> float:
        """Seconds since this round began."""
        return self._clock.now() - self._began

    async def sleep_until(self, offset: float) -> None:
        """Until `offset` seconds after the round's begin."""
        await self._clock.sleep_until(self._began + offset)

    def start(self, plan: RequestPlan, *, planned: float | None = None) -> InFlight:
        """Send now and return at once. `planned`: when it should have been sent, in seconds of this round."""
        record = RequestRecord(
            target=self._target,
            round=self.round_index,
            group=plan.group,
            index=self._num_started,
            wanted_prompt_tokens=plan.prompt_tokens,
            planned_s=self.elapsed() if planned is None else planned,
        )
        self._num_started += 1
        observer = StreamObserver(keep_text=plan.keep_text)
        task = asyncio.get_running_loop().create_task(self._carry(plan, record, observer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return InFlight(task, observer)

    async def send(self, plan: RequestPlan) -> RequestRecord:
        """Send and wait for the end."""
        return await self.start(plan).record()

    async def drain(self) -> None:
        """Until everything that was started has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def interrupt(self) -> None:
        """End everything that is in flight; its records say `interrupted`."""
        for task in tuple(self._tasks):
            task.cancel()
        await self.drain()

    async def _carry(self, plan: RequestPlan, record: RequestRecord, observer: StreamObserver) -> RequestRecord:
        try:
            await self._exchange(plan, record, observer)
        except TimeoutError:
            record.status, observer.error = "timeout", f"no end within {self._limits.timeout:g} s"
        except TransferError as error:
            observer.error = str(error)
        except asyncio.CancelledError:
            record.status = "stopped" if observer.stopped else "interrupted"
        else:
            observer.finish()
            refused = observer.status == HTTPStatus.TOO_MANY_REQUESTS
            record.status = "rejected" if refused else "error" if observer.error else "ok"
        observer.fill(record, end=self._clock.now(), since=lambda when: when - self._began)
        self.records.append(record)
        self._on_end(record)
        return record

    async def _exchange(self, plan: RequestPlan, record: RequestRecord, observer: StreamObserver) -> None:
        if len(self._tasks) > self._limits.max_in_flight:
            raise TransferError(f"not sent: {self._limits.max_in_flight} requests are in flight (--max-in-flight)")

        def on_connect(seconds: float) -> None:
            record.connect_ms = seconds * 1e3

        async with asyncio.timeout(self._limits.timeout):
            await self._client.exchange(plan.payload, observer, on_connect=on_connect)
