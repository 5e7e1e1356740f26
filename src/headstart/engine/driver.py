"""StepDriver: moves steps between the core and an executor. Owns the futures in flight; knows no sockets, no waiting.

The engine loop and the offline `LLM` both run on it, so a request meets the same code however it came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from headstart.core.connector import KVArrival
from headstart.core.engine_core import EngineCore
from headstart.core.events import Event
from headstart.core.step import ModelOutput, RequestOutput
from headstart.executor.base import Executor
from headstart.metrics.ledger import LedgerBook


class KVSource(Protocol):
    """What loads KV for requests: `headstart.kv.tiers.TierConnector`."""

    def on_arrival(self, call: Callable[[], None]) -> None:
        """Have `call` called, in any thread, when there is something to take."""
        ...

    def take_arrivals(self) -> list[KVArrival]:
        """How far loads came since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something arrived, or so long."""
        ...


class StepDriver:
    """`clock` gives monotonic seconds. `on_step_done` is called in the executor's thread when a step has finished.

    `on_events` is told what the core tells, in order. `source`: where the core's loads come from.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clock: Callable[[], float],
        on_step_done: Callable[[], None] | None = None,
        on_events: Callable[[list[Event]], None] | None = None,
        source: KVSource | None = None,
    ) -> None:
        self._core = core
        self._executor = executor
        self._clock = clock
        self._on_step_done = on_step_done
        self._on_events = on_events
        self._source = source
        if source is not None and on_step_done is not None:
            source.on_arrival(on_step_done)
        self._ledgers = LedgerBook()
        self._in_flight: deque[Future[ModelOutput]] = deque()
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """A step failed: core and executor no longer agree, and nothing can be computed any more."""
        return self._is_lost

    @property
    def oldest_step(self) -> Future[ModelOutput] | None:
        """The step in flight that must retire next."""
        return self._in_flight[0] if self._in_flight else None

    def fill(self) -> None:
        """Tell the core of KV that arrived; begin and submit as many steps as it allows now."""
        if self._source is not None:
            for arrival in self._source.take_arrivals():
                self._core.kv_arrived(arrival)
        while (step := self._core.begin_step(self._clock())) is not None:
            future = self._executor.submit(step)
            self._in_flight.append(future)
            future.add_done_callback(self._step_done)

    @property
    def seconds_to_check(self) -> float | None:
        """After so long `fill` is to be called again, whatever happens: a load may be too slow. None: no matter."""
        check = self._core.next_check()
        return None if check is None else max(0.0, check - self._clock())

    def wait_for_kv(self) -> None:
        """No step is in flight: block until a load came further, or is too slow."""
        seconds = self.seconds_to_check
        assert self._source is not None, "a live request always has a step to run"
        assert seconds is not None, "a live request always has a step to run, or a load"
        self._source.wait(seconds)

    def retire(self, *, wait: bool = False) -> list[RequestOutput] | None:
        """Take in the oldest step if it is finished (`wait`: when it is). None if there was none to take in.

        Raises what the step raised: the executor is lost then, and the engine with it.
        """
        if not self._in_flight or not (wait or self._in_flight[0].done()):
            return None
        self._is_lost = True  # unless what follows succeeds
        result = self._in_flight.popleft().result()
        outputs = self._core.finish_step(result, self._clock())
        self._is_lost = False
        return self._with_ledgers(outputs)

    def _step_done(self, _: Future[ModelOutput]) -> None:
        if self._on_step_done is not None:
            self._on_step_done()

    def take_outputs(self) -> list[RequestOutput]:
        """What became known outside a step: the ends of aborted requests."""
        return self._with_ledgers(self._core.take_outputs())

    def _with_ledgers(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Give each request's first token its ledger (also a stop token, which no output shows)."""
        events = self._core.take_events()
        self._ledgers.observe(events)
        if self._on_events is not None:
            self._on_events(events)
        for index, output in enumerate(outputs):
            if output.num_output_tokens and (ledger := self._ledgers.take(output.request_id)):
                outputs[index] = output._replace(ledger=ledger)
        return outputs
