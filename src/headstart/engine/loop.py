"""EngineLoop: drives the core with a real clock in the engine process. Owns the order in which things happen.

One thread. It sleeps until a message or a finished step wakes it, so an idle engine uses no CPU, and it answers while a
step computes in the executor's thread. A step is begun at the last moment: what has arrived by then is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headstart.core.engine_core import EngineCore
from headstart.core.errors import QueueFull, RequestRefused, SloMiss
from headstart.core.events import Event
from headstart.core.request import EngineRequest
from headstart.core.stats import CoreStats
from headstart.core.step import RequestOutput
from headstart.engine.driver import KVSource, StepDriver
from headstart.engine.ipc import (
    Abort,
    Add,
    Channel,
    Estimate,
    Estimated,
    FromEngine,
    Outputs,
    Ping,
    Pong,
    Refused,
    Shutdown,
    ToEngine,
)
from headstart.engine.watchdog import TICK_SECONDS, StepWatchdog
from headstart.executor.base import Executor

logger = logging.getLogger(__name__)

EngineChannel = Channel[FromEngine, ToEngine]


class EngineLoop:
    """Serves one channel until it is told to stop. `clock` gives the monotonic seconds of the API process' clock.

    A step that takes `step_timeout` seconds is stuck, and the engine lost. `on_events` is told what the core tells.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        channel: EngineChannel,
        clock: Callable[[], float],
        step_timeout: float = 300.0,
        on_events: Callable[[list[Event]], None] | None = None,
        source: KVSource | None = None,
    ) -> None:
        self._core = core
        self._channel = channel
        self._clock = clock
        self._driver = StepDriver(core, executor, clock, on_step_done=channel.wake, on_events=on_events, source=source)
        self._watchdog = StepWatchdog(step_timeout)
        self._sent_stats: CoreStats | None = None
        self._stopping = False

    def run(self) -> None:
        """Returns after `Shutdown`. Raises if a step failed or is stuck, or a message was none: the engine is lost."""
        while not self._stopping:
            while (outputs := self._driver.retire()) is not None:
                self._publish(outputs)
            self._handle_messages()
            self._driver.fill()
            self._publish(self._driver.take_outputs())
            oldest = self._driver.oldest_step
            self._watchdog.check(oldest, self._clock())
            if not self._stopping:
                ticks = (None if oldest is None else TICK_SECONDS, self._driver.seconds_to_check)
                self._channel.wait(min((seconds for seconds in ticks if seconds is not None), default=None))

    def _handle_messages(self) -> None:
        while (message := self._channel.receive()) is not None:
            match message:
                case Add(request=request):
                    self._add(request)
                case Abort(request_ids=request_ids):
                    for request_id in request_ids:
                        self._core.abort(request_id, self._clock())
                case Ping(number=number):
                    self._channel.send(Pong(number, self._core.stats()))
                case Estimate(number=number, request=request):
                    self._channel.send(self._estimate(number, request))
                case Shutdown():
                    self._stopping = True
                    return

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add_request(request, self._clock())
        except QueueFull as error:
            self._channel.send(Refused(request.request_id, str(error), (error.num_waiting, error.limit)))
        except SloMiss as error:
            numbers = (error.predicted, error.slo, error.retry_after)
            self._channel.send(Refused(request.request_id, str(error), slo_miss=numbers))
        except RequestRefused as error:
            self._channel.send(Refused(request.request_id, str(error)))

    def _estimate(self, number: int, request: EngineRequest) -> Estimated:
        try:
            return Estimated(number, self._core.estimate(request, self._clock()))
        except RequestRefused as error:
            return Estimated(number, None, str(error))

    def _publish(self, outputs: list[RequestOutput]) -> None:
        """One message for all; none if there is nothing new to say."""
        stats = self._core.stats()
        if outputs or stats != self._sent_stats:
            self._channel.send(Outputs(tuple(outputs), stats))
            self._sent_stats = stats
